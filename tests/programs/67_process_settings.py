# Stands for settings of the whole process at the top of a script: which arrive in a task's process, and which do not.
import collections.abc
import decimal
import os
import random
import socket
import sys
import tempfile
import warnings

import default_float
import numpy as np
import torch
from checks import MODE, TAGS, check
from prefect import task


class Row:
    """A virtual subclass of a class of the standard library."""


os.environ["PROJECT_MODE"] = "train"
os.chdir(tempfile.mkdtemp(prefix="project-"))
sys.path.append("/project/late")
sys.setrecursionlimit(4321)
warnings.filterwarnings("error", message="project")
np.seterr(all="raise")
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True)
decimal.getcontext().prec = 7
decimal.DefaultContext.prec = 7
socket.setdefaulttimeout(7)
random.seed(1)
torch.manual_seed(1)
collections.abc.Sequence.register(Row)


@task(tags=TAGS)
def arrives():
    return {
        "environment": os.environ.get("PROJECT_MODE") == "train",
        "folder": os.path.basename(os.getcwd()).startswith("project-"),
        "sys.path": "/project/late" in sys.path,
        "sys.argv": os.path.basename(sys.argv[0]),
        "recursion limit": sys.getrecursionlimit(),
        "warnings filter": any(each[0] == "error" and each[1] for each in warnings.filters),
        "numpy errors": np.geterr()["divide"] == "raise",
        "default dtype": torch.get_default_dtype() is torch.float64,
        "default of an earlier import": default_float.ONE.dtype is torch.float32,
        "precision of products": torch.get_float32_matmul_precision() == "high",
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@task(tags=TAGS)
def stays_away():
    return {
        "decimal precision": decimal.DefaultContext.prec == 7,
        "socket timeout": socket.getdefaulttimeout() == 7,
        "seed": torch.initial_seed() == 1,
        "virtual subclass": isinstance(Row(), collections.abc.Sequence),
    }


@task(tags=TAGS)
def set_in_the_task():
    torch.set_default_dtype(torch.float16)
    with np.errstate(divide="ignore"):
        return torch.ones(1).dtype is torch.float16, np.geterr()["divide"]


if __name__ == "__main__":
    here = arrives.fn()
    assert set(here.values()) - {True} == {4321, "67_process_settings.py"}, here
    check(
        (arrives, (), here),
        (stays_away, (), {name: MODE != "gpu" for name in stays_away.fn()}),
        (set_in_the_task, (), (True, "ignore")),
    )
