"""A pool of standbys for tests, and what they import."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.processes.launch_spec import LaunchSpec
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.processes.standby_pool import Announcement, StandbyPool
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
        assert eventually(lambda: self.pool.ready == count)
        return self.pool.pids

    def run(self, announced: Announcement, spec: LaunchSpec) -> Heard:
        heard = Heard.__new__(Heard)
        heard.messages, heard._queue = [], queue.SimpleQueue()
        heard.handle = announced.start(spec, heard._queue.put)
        self.rig.started.append(heard)
        return heard


def end_all(warms: Iterable[Warm]) -> None:
    """End what stands by; nothing of it may be left."""
    for warm in warms:
        warm.pool.close(warm)
        assert warm.pool.pids == ()
        warm.pool.shut_down()


def kind_with(*users: str, **changes: Any) -> Kind:
    return replace(KIND, users=users, **changes)


def module(folder: str, name: str, text: str) -> None:
    Path(folder, f"{name}.py").write_text(text)


def slow_module(importable: str, name: str, folder: Path, then: str = "") -> None:
    """Write a module whose import makes the file `begun`, waits for the file `go`, and then does something."""
    begun, go = str(folder / "begun"), str(folder / "go")
    wait = f"while not os.path.exists({go!r}): time.sleep(0.01)"
    module(importable, name, f"import os, time\nopen({begun!r}, 'w').close()\n{wait}\n{then}")
