# Stands for functions of a script under `torch.compile`, `torch.jit.script` and `torch.no_grad`, and a compiled module.
import torch
from checks import TAGS, check
from prefect import task


@torch.compile(backend="eager")
def compiled(x):
    return x * 2


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.no_grad()
def quiet(x):
    return (x * 3).requires_grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, 3)

    def forward(self, x):
        return self.layer(x)


net = torch.compile(Net(), backend="eager")
script_net = torch.jit.script(Net())


@task(tags=TAGS)
def functions():
    x = torch.ones(1)
    return compiled(x).item(), scripted(x).item(), quiet(torch.ones(1, requires_grad=True))


@task(tags=TAGS)
def modules():
    return net(torch.ones(1, 1)).item(), script_net(torch.ones(1, 1)).item()


@task(tags=TAGS)
def given(model):
    return model(torch.ones(1, 1)).item(), type(model).__name__


if __name__ == "__main__":
    check(
        (functions, (), (2.0, 2.0, False)),
        (modules, (), (3.0, 3.0)),
        (given, (net,), (3.0, "OptimizedModule")),
    )
