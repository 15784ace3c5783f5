"""A pool of standbys for tests, and what they import."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.spec import LaunchSpec
from prefect_gpu.processes.standby import Announcement, StandbyPool
from prefect_gpu.units import GIB
from tests.process.rig import Heard, Rig, eventually

KIND = Kind(("prefect_gpu.processes.child",), (), (), False, 1, 1 << 20)


class Warm:
    """A pool on a rig's launcher, whose machine has room."""

    def __init__(self, rig: Rig, most: int = 1) -> None:
        self.rig = rig
        self.available_bytes = 64 * GIB
        self.wants_room = False
        self.pool = StandbyPool(rig.launcher, read_available=lambda: self.available_bytes, cores=4)
        self.pool.open(self, most, wants_room=lambda: self.wants_room)

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
