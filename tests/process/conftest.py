from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.shared_folder import SharedFolder
from tests.process.rig import Heard, Rig, is_alive
from tests.process.warm import Warm, end_all


def _left() -> set[int]:
    """Children of this process, zombies included."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Launchers; fails if a child, a guardian or a zombie survives them."""
    before = _left()
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    survivors = []
    for rig in rigs:
        rig.launcher.close(DEADLOCK_S)
        survivors += [h.pid for h in rig.started if any_started(h) and is_alive(h.pid)]
    assert not survivors, f"children survive their launcher: {survivors}"
    zombies = _left() - before
    assert not zombies, [psutil.Process(pid) for pid in zombies]


def any_started(heard: Heard) -> bool:
    from prefect_gpu.processes.launch_spec import ChildStarted

    return heard.of(ChildStarted) is not None


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def importable(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder on `sys.path` with a module that notes its environment as it is imported."""
    folder = os.fspath(tmp_path)
    with open(os.path.join(folder, "test_process_marker.py"), "w") as file:
        file.write("import os\nSEEN = os.environ.get('PREFECT_GPU_TEST')\n")
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def make_warm(make_rig: Callable[..., Rig]) -> Iterator[Callable[..., Warm]]:
    warms: list[Warm] = []

    def make(most: int = 1, shared: SharedFolder | None = None) -> Warm:
        warms.append(Warm(make_rig(), most, shared))
        return warms[-1]

    yield make
    end_all(warms)


@pytest.fixture
def warm(make_warm: Callable[..., Warm]) -> Warm:
    return make_warm()
