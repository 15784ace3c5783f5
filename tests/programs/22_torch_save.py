# source: https://github.com/pytorch/pytorch/issues/112944
# Checkpoints with objects of the script's classes: saved by the script and loaded in the task, and the other way.
import pathlib
import tempfile
from dataclasses import dataclass

import torch
from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())


@dataclass
class Arguments:
    lr: float


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)


@task(tags=TAGS)
def load(path):
    saved = torch.load(path, weights_only=False)
    return (
        isinstance(saved["net"], Net),
        saved["net"](torch.ones(1, 2)).shape[0],
        saved["arguments"],
    )


@task(tags=TAGS)
def save(path):
    torch.save({"net": Net(), "arguments": Arguments(0.5)}, path)
    return sorted(torch.load(path, weights_only=False))


if __name__ == "__main__":
    torch.save({"net": Net(), "arguments": Arguments(0.25)}, FOLDER / "a.pt")
    check(
        (load, (FOLDER / "a.pt",), (True, 1, Arguments(0.25))),
        (save, (FOLDER / "b.pt",), ["arguments", "net"]),
    )
    back = torch.load(FOLDER / "b.pt", weights_only=False)
    assert isinstance(back["net"], Net) and back["arguments"] == Arguments(0.5)
