"""One child as the launcher's thread knows it: its process, its channel, its streams, its deadline.

What is done with them is in `launcher`.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from prefect_gpu.processes.memory_files import MemoryFile
from prefect_gpu.processes.messages import FrameReader
from prefect_gpu.processes.output import StreamName, decoder
from prefect_gpu.processes.spawning import Process, Spawner, SpawnRequest
from prefect_gpu.processes.spec import LaunchSpec, Listener, WarmSpec

#: Bytes that a channel's socket is asked to hold; the kernel gives less (208 KiB by default).
_SOCKET_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class LaunchedChild:
    """One child, as the launcher's thread knows it."""

    def __init__(
        self, spec: LaunchSpec | WarmSpec, listener: Listener, spawn: Spawner | None = None
    ) -> None:
        #: What it is to begin with; given up once it has that: a call may be large.
        self.spec: LaunchSpec | WarmSpec | None = spec
        #: How its process comes to be; `None`, or where that fails: as all do.
        self.spawn = spawn
        #: Hears its messages.
        self.listener = listener
        #: What a process that was made ahead was given later, until it has accepted it.
        self.task: GivenTask | None = None
        self.token = uuid.uuid4().hex
        self.process: Process | None = None
        self.channel: socket.socket | None = None
        self.pidfd: int | None = None
        self.streams: dict[StreamName, IO[bytes]] = {}
        self.decoders = {name: decoder() for name in ("stdout", "stderr")}
        #: Bytes to send, and the memory files that go with the first of them.
        self.outgoing: deque[tuple[memoryview, tuple[MemoryFile, ...]]] = deque()
        self.frames = FrameReader()
        self.stderr_tail = bytearray()
        self.value_arrived = False
        #: Whoever steers it has ended it, or asked it to end.
        self.asked_to_end = False
        self.killed = False
        self.killed_because = ""
        #: Monotonic seconds at which it is killed if it still lives, and why then.
        self.deadline: float | None = None
        self.deadline_reason = ""

    def open(self, spawn: Spawner, title: str, environment: Mapping[str, str], cwd: str) -> None:
        """Make its channel and its process: in its own way if it has one, else as all do.

        Raises:
            Exception: There can be no process; what is left of it is the caller's to close.
        """
        if self.spawn is not None:
            try:
                self._open(self.spawn, title, environment, cwd)
                return
            except OSError as error:
                logger.debug("a GPU task gets a fresh interpreter: %s", error)
                # A process that came of it all the same must not hear what is meant for the other:
                # it sees its channel close, and ends.
                assert self.channel is not None
                self.channel.close()
        self._open(spawn, title, environment, cwd)

    def _open(self, spawn: Spawner, title: str, environment: Mapping[str, str], cwd: str) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            for end in (self.channel, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self.process = spawn(SpawnRequest(title, theirs.fileno(), environment, cwd))

    def give(self, task: GivenTask) -> None:
        """Have it do a task's work: the task's listener hears it from now on."""
        self.task, self.listener = task, task.listener

    def queue(self, *pieces: memoryview, files: tuple[MemoryFile, ...] = ()) -> None:
        """Add bytes to what is to be sent, and memory files that go with the first piece."""
        for piece in pieces:
            if len(piece):
                self.outgoing.append((piece, files))
                files = ()

    def drop_files(self) -> None:
        """Close the memory files that are still to be sent, or came for a frame cut short."""
        self.outgoing.clear()
        self.frames.take_beside()

    def tell(self, message: Any) -> None:
        """Tell the listener. What it raises is its own trouble, not the launcher's."""
        tell(self.listener, message)


@dataclass(frozen=True, slots=True)
class GivenTask:
    """A task that was given to a process made ahead."""

    #: Kept for the case that the process ends before it takes it.
    spec: LaunchSpec
    listener: Listener
    #: Whoever had the process made: told once it has taken the task, or that it ended before.
    keeper: Listener
    #: Has the task done by a process of its own after all.
    start_over: Callable[[], None]


def tell(listener: Listener, message: Any) -> None:
    """Tell a listener. What it raises is its own trouble, not the launcher's."""
    try:
        listener(message)
    except Exception:
        logger.exception("a listener of a GPU task's process raised on %s", type(message))
