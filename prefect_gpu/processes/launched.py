"""One child as the launcher's thread knows it: its process, its channel, its streams, its deadline.

What is done with them is in `launcher`.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import uuid
from collections import deque
from typing import IO, Any

from prefect_gpu.processes.memory_files import MemoryFile
from prefect_gpu.processes.messages import FrameReader
from prefect_gpu.processes.output import StreamName, decoder
from prefect_gpu.processes.spec import LaunchSpec, Listener

logger = logging.getLogger(__name__)


class LaunchedChild:
    """One child, as the launcher's thread knows it."""

    def __init__(self, spec: LaunchSpec, listener: Listener) -> None:
        #: Given up once the child has it: a call may be large.
        self.spec: LaunchSpec | None = spec
        self._listener = listener
        self.token = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None
        self.pidfd: int | None = None
        self.streams: dict[StreamName, IO[bytes]] = {}
        self.decoders = {name: decoder() for name in ("stdout", "stderr")}
        #: Bytes to send, and the memory files that go with the first of them.
        self.outgoing: deque[tuple[memoryview, tuple[MemoryFile, ...]]] = deque()
        self.frames = FrameReader()
        self.stderr_tail = bytearray()
        self.value_arrived = False
        self.killed = False
        self.killed_because = ""
        #: Monotonic seconds at which it is killed if it still lives, and why then.
        self.deadline: float | None = None
        self.deadline_reason = ""

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
        try:
            self._listener(message)
        except Exception:
            logger.exception("a listener of a GPU task's process raised on %s", type(message))
