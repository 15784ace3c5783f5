# Stands for registrations of a script with PyTorch: operators, safe classes of checkpoints, pytree nodes.
import pathlib
import pickle
import tempfile
from dataclasses import dataclass

import torch
from checks import TAGS, Noted, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())


@torch.library.custom_op("demo::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@dataclass
class Arguments:
    lr: float


torch.serialization.add_safe_globals([Arguments])


@task(tags=TAGS)
def operator():
    return torch.ops.demo.twice(torch.ones(1)).item()


@task(tags=TAGS)
def checkpoint(path):
    return torch.load(path, weights_only=True)


if __name__ == "__main__":
    torch.save(Arguments(0.5), FOLDER / "a.pt")
    check(
        (operator, (), Noted(AttributeError, 2.0)),
        (checkpoint, (FOLDER / "a.pt",), Noted(pickle.UnpicklingError, Arguments(0.5))),
    )
