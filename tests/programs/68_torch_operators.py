# Stands for tasks that call operators by their names, as torchvision, FlashAttention and vLLM do: `torch.ops` is an object, not a module.
import torch
import torch.nn.functional as F
from checks import TAGS, check
from prefect import task

ops = torch.ops
aten = torch.ops.aten
KERNELS = {"relu": torch.ops.aten.relu.default, "gelu": F.gelu, "add": torch.add}


@task(tags=TAGS)
def by_path():
    return torch.ops.aten.relu(torch.tensor([-1.0, 2.0])).tolist()


@task(tags=TAGS)
def by_name():
    return ops.aten.abs(torch.tensor([-3.0])).item(), aten.neg(torch.tensor([4.0])).item()


@task(tags=TAGS)
def from_table():
    x = torch.tensor([0.0])
    return KERNELS["relu"](x).item(), KERNELS["gelu"](x).item(), KERNELS["add"](x, 1).item()


if __name__ == "__main__":
    check(
        (by_path, (), [0.0, 2.0]),
        (by_name, (), (3.0, -4.0)),
        (from_table, (), (0.0, 0.0, 1.0)),
    )
