"""What forks do in `test_forks`. Imported by each of them: with pytest that takes longer than all else that it does."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.process import bodies


def parent() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def describe() -> dict[str, Any]:
    print("printed")
    print("complained", file=sys.stderr)
    kinds = []
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError):
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "variable": os.environ.get("PREFECT_GPU_TEST"),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
    }


def count() -> tuple[int, float]:
    import numpy as np

    np.seen = getattr(np, "seen", 0) + 1  # type: ignore[attr-defined]
    return np.seen, float(np.random.random())  # type: ignore[attr-defined]


def draw_all() -> tuple[list[float], list[float]]:
    import random

    import has_generators as library  # type: ignore[import-not-found]
    import numpy as np
    import torch

    fixed = [library.FIXED, library.LATER, library.STATED, library.FIXED_STATE, library.FIXED_DRAWS]
    drawn = [
        library.OWN.random(),
        library.WITHOUT_HASH.random(),
        library.STATE.random(),
        library.DRAWS.random(),
    ]
    drawn += [random.random(), np.random.rand(), torch.rand(1).item()]
    return drawn, [float(each.random()) for each in fixed]


def draw_seeded() -> list[float]:
    import random

    import numpy as np
    import sets_seeds  # type: ignore[import-not-found] # noqa: F401
    import torch

    return [random.random(), np.random.rand(), torch.rand(1).item()]


def numbers_of(modules: list[str]) -> list[int]:
    return [importlib.import_module(name).NUMBER for name in modules]


def drawn() -> tuple[float, str]:
    import draws_at_import  # type: ignore[import-not-found]

    return draws_at_import.NUMBER, str(draws_at_import.NAME)


def use_library(name: str) -> tuple[str | None, str | None]:
    import acts_as_libraries_do  # type: ignore[import-not-found]

    acts_as_libraries_do.LOG.write(name)
    return os.environ.get("OF_A_LIBRARY"), os.environ.get("PREFECT_GPU_TEST")


def folders_of_library() -> tuple[str, str]:
    import acts_as_libraries_do

    folders: tuple[str, str] = acts_as_libraries_do.FOLDERS
    return folders


def print_by_c() -> None:
    import ctypes

    ctypes.CDLL(None).printf(b"by C\n")


def import_module(name: str) -> None:
    __import__(name)


def compute(cpus: int) -> tuple[float, float]:
    import numpy as np
    import torch

    torch.set_num_threads(cpus)
    ones = np.ones((300, 300))
    return float((ones @ ones).sum()), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())


def train() -> float:
    """Train with a convolution on data that workers load; return the last loss."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(8, 1, 8, 8)), batch_size=4, num_workers=1)
    for (batch,) in data:
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return round(float(loss.detach()), 6)


def limits() -> tuple[int, int, set[int]]:
    umask = os.umask(0)
    return umask, resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.sched_getaffinity(0)


def leave_open(folder: str) -> None:
    import atexit
    import time

    def write(name: str, text: str) -> None:
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)

    def slowly() -> None:
        time.sleep(0.2)
        write("by a thread", "waited for")

    atexit.register(write, "at exit", "called")
    threading.Thread(target=slowly).start()
    sys.never_closed = open(os.path.join(folder, "never closed"), "w")  # type: ignore[attr-defined]  # noqa: SIM115
    sys.never_closed.write("all of it")  # type: ignore[attr-defined]


def start_and_wait(folder: str) -> None:
    """Start a process in the group, and one in a session of its own."""
    from tests.process.rig import eventually

    pids = []
    for name, own_session in (("group", False), ("session", True)):
        line = f"import pathlib, time; pathlib.Path({folder!r}, {name!r}).touch(); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", line], start_new_session=own_session)
        pids.append(process.pid)
        assert eventually(Path(folder, name).exists)
    Path(folder, "pids").write_text(" ".join(map(str, pids)))
    bodies.touch(f"{folder}/ready")
    bodies.wait_long(f"{folder}/waits")


def wait_for(folder: str) -> str:
    from tests.process.rig import eventually

    bodies.touch(f"{folder}/begun")
    assert eventually(Path(folder, "go").exists)
    return "went on"
