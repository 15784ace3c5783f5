"""The values that travel between a flow and the node agents of a cluster, and their order.

A flow sends `Command`s, in order. An agent answers each `listen` with `News`. Messages of a child are passed on
unchanged, except values: their large parts go through an `ObjectStore` and are copied once on each side. Results on the
flow's own machine are not copied: the flow opens the child's memory files.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from prefect_gpu.broker.ledger import Entry
from prefect_gpu.errors import CapacityError
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.process_resources import start_thread
from prefect_gpu.processes.launch_spec import LaunchSpec
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.scheduling.model import Device, DeviceKind, Reading, Request
from prefect_gpu.values.transport import (
    VALUE,
    Frame,
    MemoryFile,
    PackedValue,
    ReceivedValue,
    unpack,
    write_file,
)

logger = logging.getLogger(__name__)

#: Exit code of a process that was lost with its node or its value: as if killed.
LOST_CODE = -int(signal.SIGKILL)

#: Bytes from which a part of a value goes through the object store.
STORED_BYTES = 1 << 20


class ObjectStore(Protocol):
    """Keeps large objects where every node can read them."""

    def put(self, data: memoryview) -> Any:
        """Store bytes as long as a reference to them exists; return a reference, which can be sent."""

    def get(self, reference: Any) -> memoryview:
        """Return the bytes of a reference; raise an error if they were lost with their node."""

    def holds(self, part: Any) -> bool:
        """Return whether a part is a reference of this store."""


#: Part of a value: its bytes, or a reference of an `ObjectStore`.
Part: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class SentCall:
    """A packed call of a task: the body of its frame, and its memory files."""

    body: bytes = field(repr=False)
    files: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class SentResult:
    """A value from a child, sent in place of `ValueArrived`: pickle stream and buffers outside the stream."""

    stream: Part = field(repr=False)
    buffers: tuple[Part, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A memory file that a process has open."""

    pid: int
    descriptor: int

    def open(self) -> MemoryFile:
        """Open the file in this process; raise `OSError` if its process is gone, out of reach or another user's."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        # If the agent is on another machine or in another container, the path may be another process's.
        if not os.readlink(path).startswith("/memfd:"):
            raise FileNotFoundError(f"{path} is no memory file")
        return MemoryFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


@dataclass(frozen=True, slots=True)
class SharedResult:
    """A value from a child in memory files, which the agent keeps open until the flow sends `Release`."""

    body: bytes = field(repr=False)
    files: tuple[OpenFile, ...]


@dataclass(frozen=True, slots=True)
class PeaksKnown:
    """Peak memory of a process on simulated devices, sent before its `ChildExited`."""

    pid: int
    #: Most bytes allocated at once.
    live_bytes: int
    devices: int


@dataclass(frozen=True, slots=True)
class Expect:
    """Keep standbys for `count` submitted tasks of a kind, which have no process yet."""

    kind: Kind
    #: Policy of the kind's tasks, without devices and budget, from which the node computes the environment.
    policy: FrameworkPolicy
    count: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process, once the node's own ledger has confirmed its devices."""

    child: str
    #: Names devices by their full UUIDs and asks for exactly the reserved memory.
    request: Request
    #: The spec without its call.
    spec: LaunchSpec
    call: SentCall
    #: Budget on each device, if the process has a cap; `None`: no cap.
    budget_bytes: tuple[int, ...] | None
    #: Kind of suitable standbys, as the node needs it to start one; `None`: no standbys.
    standby: Expect | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a child."""

    child: str
    message: Any


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a child and all its processes."""

    child: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """Kill all children: the flow has given them up."""


@dataclass(frozen=True, slots=True)
class ShareFiles:
    """Send results as `SharedResult` from now on: the flow can open the agent's memory files."""


@dataclass(frozen=True, slots=True)
class Release:
    """Close the files of a child's `SharedResult`: the flow has opened them."""

    child: str


Command: TypeAlias = Expect | Launch | Send | Kill | EndAll | ShareFiles | Release


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node's devices and limits, which its agent sends once."""

    #: Unique name of the agent; a restarted agent has another name.
    agent: str
    #: Version of `prefect_gpu`, which must equal the flow's.
    version: str
    kind: DeviceKind
    #: Devices with the node's name as their host; empty: the node has none.
    devices: tuple[Device, ...]
    #: Bytes of a process's context on each simulated device; 0 for other devices, where contexts are measured.
    context_bytes: int
    #: Most processes at a time on the node.
    max_processes: int
    #: Why the devices cannot be used; empty: no problem.
    problem: str = ""
    #: File with the text of `agent`. A flow that can read it can open all memory files of the agent. `None`: no file.
    probe: OpenFile | None = None


@dataclass(frozen=True, slots=True)
class News:
    """Messages and changes on a node since the flow's last `listen`."""

    agent: str
    #: Number to pass to the next `listen`.
    number: int
    #: Monotonic seconds of the node's clock.
    now_s: float
    #: Messages by child, in order.
    heard: tuple[tuple[str, Any], ...] = ()
    #: The newest reading, with times of the node's clock; `None`: there is no new one.
    reading: Reading | None = None
    #: Bytes that processes have allocated on simulated devices, by process id.
    live_bytes: Mapping[int, int] = field(default_factory=dict)
    #: Requests of other flows that hold devices here, with times of the node's clock; `None`: unchanged.
    others: Mapping[str, Entry] | None = None
    #: Numbers of waiting standbys, by the key of their kind; `None`: unchanged.
    standbys: Mapping[str, int] | None = None


def send_call(
    call: PackedValue, store: ObjectStore, sent: MutableMapping[MemoryFile, Part]
) -> SentCall:
    """Return a packed call for a node, and store its large files. `sent` has files of earlier calls, and gets these."""
    for file in call.files:
        if file not in sent:
            memory = memoryview(file.map())
            sent[file] = store.put(memory) if memory.nbytes >= STORED_BYTES else memory.tobytes()
    return SentCall(bytes(call.body), tuple(sent[file] for file in call.files))


def receive_call(
    call: SentCall, store: ObjectStore, kept: MutableMapping[Any, MemoryFile]
) -> PackedValue:
    """Return a received call, packed for a child; `kept`: files of earlier calls, by reference.

    Raises `OSError` if there is no memory for the call, and the store's error if a stored part is lost.
    """
    files = []
    for part in call.files:
        if not store.holds(part):
            files.append(write_file([memoryview(part)]))
            continue
        file = kept.get(part)
        if file is None:
            file = kept[part] = write_file([store.get(part)])
        files.append(file)
    return PackedValue(bytearray(call.body), tuple(files))


def send_result(value: ReceivedValue, store: ObjectStore | None) -> SentResult:
    """Return a child's value in the form for the flow, with large parts stored; `store`: `None`: nothing is stored."""
    stream, *buffers = (
        store.put(part) if store is not None and part.nbytes >= STORED_BYTES else part.tobytes()
        for part in (value.stream, *value.buffers)
    )
    return SentResult(stream, tuple(buffers))


def receive_result(result: SentResult, store: ObjectStore) -> ReceivedValue:
    """Return a child's value in writable memory of this process; raise an error if a stored part is lost."""
    stream, *buffers = (
        _copied(store.get(part)) if store.holds(part) else memoryview(bytearray(part))
        for part in (result.stream, *result.buffers)
    )
    return ReceivedValue(stream, tuple(buffers))


def share_result(value: ReceivedValue) -> SharedResult | None:
    """Return a child's value as open files of this process; `None`: no part of the value is in a file."""
    if value.frame is None or not value.frame.files:
        return None
    files = tuple(OpenFile(os.getpid(), file.fileno()) for file in value.frame.files)
    return SharedResult(bytes(value.frame.body), files)


def open_shared(result: SharedResult) -> ReceivedValue:
    """Return a child's value, mapped copy-on-write from the child's files; raise `OSError` if the agent is gone."""
    return unpack(Frame(VALUE, bytearray(result.body), tuple(f.open() for f in result.files)))


def can_share(facts: NodeFacts) -> bool:
    """Return whether this process can open memory files of a node's agent."""
    if facts.probe is None:
        return False
    try:
        return facts.probe.open().holds([memoryview(facts.agent.encode())])
    except OSError:
        return False


def _copied(data: memoryview) -> memoryview:
    """Return a writable copy: 300 MB in 0.09 s with huge pages, 0.18 s in a `bytearray`."""
    copy = mmap.mmap(-1, data.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with contextlib.suppress(OSError):
            copy.madvise(advice)
    view = memoryview(copy)
    view[:] = data
    return view


class InOrder:
    """Runs steps one after the other, in the order in which threads pass them to `take`.

    One thread passes on the messages of all children. A large value takes seconds to move, so another thread moves it, and
    only later messages of the same child wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Steps that wait behind a slow step; `None`: no slow step is running.
        self._waiting: deque[Callable[[], object]] | None = None

    def take(self, step: Callable[[], object], slow: bool = False) -> None:
        """Run a step at once, or after waiting steps; log its exceptions. A `slow` step runs on a thread of its own."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(step)
                return
            if slow:
                self._waiting = deque([step])
        if not slow:
            _try_step(step)
            return
        try:
            start_thread(self._run, "prefect-gpu-value")
        except CapacityError:
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._waiting = None
                    return
                step = self._waiting.popleft()
            _try_step(step)


def _try_step(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:
        logger.exception("a message of a GPU task's process could not be passed on")
