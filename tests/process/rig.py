"""Starts children, hears them, and sees that none is left."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil

from prefect_gpu import values
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.in_task import Allocation
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    ValueArrived,
)
from prefect_gpu.processes.launcher import ProcessLauncher
from prefect_gpu.processes.messages import BodyEnded, Call, Prepare

PREPARE = Prepare(
    FrameworkPolicy("host", ("host",), (1 << 30,), (1 << 30,)),
    Allocation(1 << 30, None, 1, ("host",), ()),
    0.1,
)

Body = Callable[..., Any]


def spec_of(
    function: Body, *args: Any, environment: Mapping[str, str | None] | None = None, **kwargs: Any
) -> LaunchSpec:
    return LaunchSpec(
        "a-task",
        dict(environment or {}),
        PREPARE,
        values.dumps(Call(function, args, kwargs), "call", "call"),
        os.getcwd(),
        tuple(sys.argv),
        tuple(os.path.abspath(p) for p in sys.path),
    )


class Heard:
    """One child, heard to its end."""

    def __init__(self, launcher: ProcessLauncher, spec: LaunchSpec) -> None:
        self.messages: list[Any] = []
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.handle = launcher.start(spec, self._queue.put)

    def until(self, kind: type) -> Any:
        while True:
            message = self._queue.get(timeout=DEADLOCK_S)
            self.messages.append(message)
            if isinstance(message, kind):
                return message

    @property
    def pid(self) -> int:
        for message in self.messages:
            if isinstance(message, ChildStarted):
                return message.pid
        return int(self.until(ChildStarted).pid)

    def exit(self) -> ChildExited:
        for message in self.messages:
            if isinstance(message, ChildExited):
                return message
        ended: ChildExited = self.until(ChildExited)
        return ended

    def of(self, kind: type) -> Any:
        return next((m for m in self.messages if isinstance(m, kind)), None)

    def value(self) -> Any:
        """What the body returned; what it raised is raised."""
        self.exit()
        ended, arrived = self.of(BodyEnded), self.of(ValueArrived)
        refused = self.of(ChildRefused)
        assert arrived is not None, (refused, self.messages[-1])
        value = values.loads(arrived.data, "return value")
        # Its files are open for as long as it is there; the task runner, too, lets go of it here.
        self.messages[self.messages.index(arrived)] = ValueArrived(
            replace(arrived.data, frame=None)
        )
        if ended.raised:
            raise value
        return value


class Rig:
    """A launcher and its children, which may take as long to end as the machine needs.

    Args:
        **options: Of the launcher.
    """

    def __init__(self, **options: Any) -> None:
        patient = {"exit_grace_s": DEADLOCK_S, "silent_grace_s": DEADLOCK_S}
        self.launcher = ProcessLauncher(**{**patient, **options})
        self.started: list[Heard] = []

    def start(self, function: Body, *args: Any, **kwargs: Any) -> Heard:
        return self.launch(spec_of(function, *args, **kwargs))

    def launch(self, spec: LaunchSpec) -> Heard:
        heard = Heard(self.launcher, spec)
        self.started.append(heard)
        return heard

    def call(self, function: Body, *args: Any, **kwargs: Any) -> Any:
        return self.start(function, *args, **kwargs).value()


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def open_descriptors() -> Counter[str]:
    """Return the open descriptors of this process, by what they refer to.

    Compared by difference: an object of another test or thread may close its own at any time.
    """
    # What other tests have left in cycles.
    gc.collect()
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        # That of the listing itself is closed.
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def eventually(condition: Callable[[], bool], within_s: float = DEADLOCK_S) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
