"""What parent and child say to each other, and how it is framed.

One stream socket for each child. A frame is a kind (1 byte), a length (8 bytes, big-endian) and that
many bytes. Small messages are pickled values of the classes below; values of users travel as raw
bytes in a frame of their own (`transport`), so that neither side pickles them twice. A stream that ends inside a
frame is a death, not an error of the protocol (`FrameReader.truncated`).

It does not know sockets, processes or Prefect.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from prefect_gpu.errors import ProtocolError
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.inside import Allocation
from prefect_gpu.reports.model import Mark, StepFacts

HEADER: Final = struct.Struct("!BQ")

#: Frame kinds.
SMALL: Final = 1
VALUE: Final = 2
#: Only parent to child, and first: JSON that the bootstrap reads before it can import anything.
BOOT: Final = 3
#: A value in parts, some of them in memory files whose descriptors come with the frame.
PARCEL: Final = 4

#: Bytes from which a body gets memory of its own from the system: it is not filled with zeros first,
#: and goes back to the system as soon as nobody holds it.
MAPPED_BYTES: Final = 1 << 20

#: A body: bytes that pickle reads in place.
Body: TypeAlias = bytearray | mmap.mmap

#: Bytes of a frame that we believe. A longer one is garbage on the stream, not a message.
LONGEST_FRAME_BYTES: Final = 1 << 44


# Parent to child.


@dataclass(frozen=True, slots=True)
class Prepare:
    """First message: what must be in place before anything of the user's is imported."""

    policy: FrameworkPolicy
    allocation: Allocation
    #: Seconds between two readings of the frameworks' counters.
    counters_interval_s: float
    #: "body": a call follows as a value. "calibrate": use the framework named, and answer.
    work: str = "body"
    framework: str = ""
    #: What has changed since the process came to be; `None`: it was made for this very task.
    late: Late | None = None
    #: Modules that the call needs and that are none of the user's: imported before it is read, if this
    #: process was made for it.
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Late:
    """What a process that was made ahead of its task gets only now."""

    #: Variables to set, or to remove (`None`).
    environment: Mapping[str, str | None]
    #: As the parent's are now. An empty `cwd`: stay where you are.
    cwd: str
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    #: The task's name, for `ps`.
    title: str
    #: The framework that was started ahead, as in `Heat`; empty: none was.
    hot: str = ""


@dataclass(frozen=True, slots=True)
class Heat:
    """To a process made ahead of its task: start a framework on the device that it will have."""

    #: As in `gpu:framework=`; one that has no adapter (simulated devices) starts nothing.
    framework: str
    #: Variables to set first, the device among them, or to remove (`None`).
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to an `Asked`: a result, or the error to raise."""

    result: Any = None
    error: BaseException | None = None


# Child to parent.


@dataclass(frozen=True, slots=True)
class Warmed:
    """A process made ahead of its task has imported what it was told to.

    Where something is amiss it ends by itself then, whether a task was given to it or not.
    """

    #: What could not be imported: nobody knows what is left of it, so nothing may run here.
    failed: tuple[str, ...] = ()
    #: What a module did at its import that the task's policy would come too late for; empty: nothing.
    touched: str = ""
    #: Private memory of the process now; 0: cannot be told.
    resident_bytes: int = 0

    @property
    def problem(self) -> str:
        """Why no task may run here; empty: one may."""
        if self.touched:
            return self.touched
        return f"{', '.join(self.failed)} could not be imported" if self.failed else ""


@dataclass(frozen=True, slots=True)
class Heated:
    """A process made ahead of its task has started its framework, or ends by itself now."""

    #: Why it could not; empty: it has.
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The child has taken its `Prepare` and reads the call next. Until then nothing of it has run."""


@dataclass(frozen=True, slots=True)
class BodyStarted:
    """The next thing the child does is the body's first line: `timeout_seconds` counts from here."""


@dataclass(frozen=True, slots=True)
class LogEmitted:
    """A log record as Prefect's API handler prepared it."""

    log: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventEmitted:
    """A Prefect event, as JSON."""

    event: str


@dataclass(frozen=True, slots=True)
class CountersRead:
    """The frameworks' own counters, summed over frameworks and devices."""

    counters: Counters
    frameworks: tuple[str, ...]
    #: What the steps so far say; `None`: there was none.
    steps: StepFacts | None = None
    #: Marks and phases since the last message. Their times are seconds since the body's first line.
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that blocks the child until an `Answered` comes."""

    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BodyEnded:
    """The body is over. A value's frame follows: the return value, or the exception."""

    #: `True`: the value is an exception to raise in the parent.
    raised: bool
    #: The exception, or one of its causes, says that device memory ran out; `None`: none does.
    out_of_memory: OutOfMemory | None = None
    #: The traceback as text; empty if nothing was raised.
    traceback: str = ""
    #: Last counters, `None` where no framework was used.
    counters: Counters | None = None
    frameworks: tuple[str, ...] = ()
    #: Largest resident set of the child so far, in bytes; 0: cannot be told.
    host_peak_bytes: int = 0
    #: As in `CountersRead`.
    steps: StepFacts | None = None
    marks: tuple[Mark, ...] = ()


#: Every class that may come as a small message.
_MESSAGES: Final = (
    Prepare,
    Heat,
    Answered,
    Warmed,
    Heated,
    Accepted,
    BodyStarted,
    LogEmitted,
    EventEmitted,
    CountersRead,
    Asked,
    BodyEnded,
)


def encode(message: Any) -> bytes:
    """Frame a small message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(SMALL, len(body)) + body


def value_header(size_bytes: int, kind: int = VALUE) -> bytes:
    """Give the header of a value's frame; its bytes are written after it, uncopied."""
    return HEADER.pack(kind, size_bytes)


def allocate_body(size_bytes: int) -> Body:
    """Give memory for a body.

    Raises:
        ProtocolError: There is not so much.
    """
    try:
        if size_bytes < MAPPED_BYTES:
            return bytearray(size_bytes)
        # Private, not Python's default of shared: the system may then use huge pages.
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError) as error:
        raise ProtocolError(f"a message of {size_bytes} bytes finds no memory: {error}") from error


class FrameReader:
    """Turns bytes, in whatever pieces they come, into frames.

    Bytes are received straight into the memory of the frame that they belong to: `room` says where
    the next ones go, `filled` that they are there.
    """

    def __init__(self) -> None:
        self._header = memoryview(bytearray(HEADER.size))
        self._kind: int | None = None
        self._body: Body = bytearray()
        self._room = self._header
        #: What came beside the bytes of the frame begun, or of the one just completed.
        self._beside: list[Any] = []
        self._completed = False

    @property
    def truncated(self) -> bool:
        """Whether the stream stands inside a frame."""
        return self._kind is not None or len(self._room) < HEADER.size

    @property
    def room(self) -> memoryview:
        """Where the next bytes go; never empty, never past the end of a frame."""
        return self._room

    def take_beside(self) -> list[Any]:
        """Give up what came beside the bytes of the frame just completed, or of one cut short."""
        taken, self._beside = self._beside, []
        return taken

    def filled(self, size_bytes: int, beside: Sequence[Any] = ()) -> tuple[int, Body] | None:
        """Say that so many bytes of `room` were written.

        Args:
            size_bytes: How many.
            beside: What came with them: memory files. `take_beside` gives them, until the next
                frame begins.

        Returns:
            Kind and body of the frame that is complete with them, or `None`.

        Raises:
            ProtocolError: The bytes are not a frame.
        """
        if self._completed and size_bytes:
            # Nobody wanted what came with the last one.
            self._beside, self._completed = [], False
        self._beside += beside
        self._room = self._room[size_bytes:]
        if len(self._room):
            return None
        if self._kind is None:
            kind, length = HEADER.unpack(self._header)
            if kind not in (SMALL, VALUE, BOOT, PARCEL) or length > LONGEST_FRAME_BYTES:
                raise ProtocolError(
                    f"a child sent a frame of kind {kind} and length {length}; something "
                    f"other than prefect_gpu wrote to its channel"
                )
            self._kind, self._body = kind, allocate_body(length)
            if length:
                self._room = memoryview(self._body)
                return None
        frame = self._kind, self._body
        self._kind, self._body, self._room = None, bytearray(), self._header
        self._completed = True
        return frame

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, Body]]:
        """Take what arrived and give the frames that are complete with it.

        Yields:
            Kind and body.

        Raises:
            ProtocolError: The bytes are not a frame.
        """
        rest = memoryview(data)
        while len(rest):
            size_bytes = min(len(rest), len(self._room))
            self._room[:size_bytes] = rest[:size_bytes]
            rest = rest[size_bytes:]
            frame = self.filled(size_bytes)
            if frame is not None:
                yield frame


def decode(body: bytes | Body) -> Any:
    """Read a small message.

    Raises:
        ProtocolError: The bytes are not one.
    """
    try:
        message = pickle.loads(body)
    except Exception as error:
        raise ProtocolError(f"a child sent a message that cannot be read: {error!r}") from error
    if not isinstance(message, _MESSAGES):
        raise ProtocolError(f"a child sent a {type(message).__name__}, which is no message")
    return message
