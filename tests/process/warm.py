"""A pool of standbys for tests, and what they import."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.processes import standby_kind
from prefect_gpu.processes.forks import ForkSource
from prefect_gpu.processes.interpreter import import_paths
from prefect_gpu.processes.launch_spec import ChildStarted, LaunchSpec, WarmSpec
from prefect_gpu.processes.launcher import ProcessLauncher
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.processes.standby_pool import Announcement, StandbyPool, standby_pool
from prefect_gpu.units import GIB
from tests.process.rig import Heard, Rig, eventually

KIND = Kind(("prefect_gpu.child.main",), (), (), False, 1, 1 << 20)


class Broker:
    """Its tasks wait for host memory when a test says so."""

    def __init__(self) -> None:
        self.host_promised_bytes = 0
        self.wants_host_memory = False


class Warm:
    """A pool on a rig's launcher, whose machine has room."""

    def __init__(self, rig: Rig, most: int = 1, shared: SharedFolder | None = None) -> None:
        self.rig = rig
        self.available_bytes = 64 * GIB
        self.broker = Broker()
        #: How often the pool has checked what is due.
        self.checks = 0
        self.pool = StandbyPool(rig.launcher, read_available=self._read_available, cores=4)
        self.pool.open(self, most, self.broker, shared)

    def _read_available(self) -> int:
        self.checks += 1
        return self.available_bytes

    def wait_checks(self, count: int = 3) -> None:
        """Wait until the pool has checked that often from now on."""
        until = self.checks + count
        assert eventually(lambda: self.checks >= until)

    def announce(self, kind: Kind = KIND) -> Announcement:
        return self.pool.announce(kind)

    def wait_ready(self, count: int = 1) -> tuple[int, ...]:
        assert eventually(lambda: self.pool.ready_by_kind.total() == count)
        return self.pool.pids

    def run(self, announced: Announcement, spec: LaunchSpec) -> Heard:
        heard = Heard.__new__(Heard)
        heard.messages, heard._queue = [], queue.SimpleQueue()
        heard.handle = announced.start(spec, heard._queue.put)
        self.rig.started.append(heard)
        return heard


class Source:
    """A warm process, and its report."""

    def __init__(self, *modules: str) -> None:
        # Its value differs from test to test, and a fork would come too late for it.
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        self.launcher = ProcessLauncher()
        self.source = ForkSource()
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        environment = dict(os.environ)
        spec = WarmSpec(
            modules, environment, os.getcwd(), (), import_paths(), self.source.descriptor
        )
        self.handle = self.launcher.start(spec, self.heard.put)
        self.pid = self.until(ChildStarted).pid
        self.source.started(self.pid)
        self.warmed: Warmed = self.until(Warmed)

    def until(self, kind: type) -> Any:
        while not isinstance(message := self.heard.get(timeout=DEADLOCK_S), kind):
            pass
        return message

    def close(self) -> None:
        self.launcher.close(DEADLOCK_S)
        self.source.close()


def end_sources() -> None:
    """End the sources that wait for the next flow of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby_kind, "IDLE_S", 0.0)
        # Wakes the pool.
        standby_pool().close(None)
        assert eventually(lambda: standby_pool().pids == ())


def end_all(warms: Iterable[Warm]) -> None:
    """End what stands by; nothing of it may be left."""
    for warm in warms:
        warm.pool.close(warm)
        warm.pool.shut_down()
        # A loaded machine may need longer than the pool waits.
        assert eventually(lambda warm=warm: warm.pool.pids == ())


def kind_with(*libraries: str, **changes: Any) -> Kind:
    return replace(KIND, libraries=libraries, **changes)


def module(folder: str, name: str, text: str) -> None:
    Path(folder, f"{name}.py").write_text(text)


def slow_module(importable: str, name: str, folder: Path, then: str = "") -> None:
    """Write a module whose import makes the file `begun`, waits for the file `go`, and then does something."""
    begun, go = str(folder / "begun"), str(folder / "go")
    wait = f"while not os.path.exists({go!r}): time.sleep(0.01)"
    module(importable, name, f"import os, time\nopen({begun!r}, 'w').close()\n{wait}\n{then}")
