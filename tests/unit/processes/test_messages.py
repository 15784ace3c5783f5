"""Messages arrive as they were, and what is no message is refused."""

from __future__ import annotations

import contextlib
import pickle
import resource
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu import values
from prefect_gpu.errors import PrefectGPUError, ProtocolError
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes import messages
from prefect_gpu.processes.messages import (
    Answered,
    Asked,
    BodyEnded,
    BodyStarted,
    CountersRead,
    EventEmitted,
    LogEmitted,
    ReleaseUnused,
    Warmed,
)
from prefect_gpu.values import transport
from prefect_gpu.values.transport import Frame, FrameReader, frame_header
from tests.fakes.frames import feed

MIB = 1 << 20


@pytest.mark.parametrize(
    "message",
    [
        BodyStarted(),
        ReleaseUnused(1.5),
        Asked("sum", {"a": 1}),
        CountersRead(Counters(1, 2, 3, 4, 5, freed_bytes=6), ("torch",)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_with_every_field(message: Any) -> None:
    ((kind, body, _),) = feed(FrameReader(), messages.encode(message))
    assert kind == transport.MESSAGE
    assert messages.decode(body) == message


@pytest.mark.parametrize("body", [b"", b"abc", pickle.dumps({"no": "message"})])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(body)


class _Unreadable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def _refuse() -> None:
    raise _Unreadable


class _Refuses:
    def __reduce__(self) -> Any:
        return _refuse, ()


def test_a_message_whose_parts_fail_without_a_text_is_refused() -> None:
    with pytest.raises(ProtocolError, match="_Unreadable"):
        messages.decode(pickle.dumps(Asked("method", {"part": _Refuses()})))


COUNTERS = Counters(1, 2, 3, 4, 5, freed_bytes=6)

BODIES = [
    messages.encode(message)[transport.HEADER.size :]
    for message in (
        Warmed(failed=("torch",)),
        BodyStarted(),
        LogEmitted({"message": "é☃", "level": 20, "nested": [1, 2.5, None]}),
        EventEmitted('{"event": "it"}'),
        CountersRead(COUNTERS, ("torch", "jax")),
        Asked("simulated_allocate", {"device_uuid": "SIM-0", "size_bytes": 1 << 40}),
        Answered(error=ValueError("no", 1)),
        BodyEnded(raised=True, traceback="at line 1", counters=COUNTERS),
    )
]


@contextlib.contextmanager
def little_memory(size_bytes: int = 512 * MIB) -> Iterator[None]:
    """Refuse this process more memory than it has and so much: a machine must not be filled by a test."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (psutil.Process().memory_info().vms + size_bytes, before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@st.composite
def damaged(draw: st.DrawFn, bodies: list[bytes]) -> bytes:
    """Draw bytes that were cut, changed, or mixed with others."""
    body = draw(st.sampled_from(bodies))
    for _ in range(draw(st.integers(1, 4))):
        at, end = draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))
        other = draw(st.sampled_from(bodies))
        piece = draw(st.binary(max_size=4) | st.just(other[at:end]) | st.just(body[at:end]))
        body = body[:at] + piece + body[draw(st.sampled_from([at + len(piece), at, end])) :]
    return body


@given(damaged(BODIES))
def test_a_damaged_message_is_read_or_refused(body: bytes) -> None:
    with little_memory(), contextlib.suppress(PrefectGPUError):
        messages.decode(body)


VALUES = [
    bytes(values.dumps(value, "argument", "it").body)
    for value in (None, {"a": [1, "é", 2.5]}, b"x" * 300, ValueError("no"), [bytearray(100)] * 2)
]


@given(damaged(VALUES))
def test_a_damaged_value_is_read_or_refused(body: bytes) -> None:
    with little_memory(), contextlib.suppress(PrefectGPUError):
        values.loads(transport.unpack(Frame(transport.VALUE, bytearray(body))), "argument")


STREAM = b"".join(frame_header(transport.MESSAGE, len(body)) + body for body in BODIES)


@given(damaged([STREAM]))
def test_a_damaged_stream_gives_messages_until_it_is_refused(stream: bytes) -> None:
    with little_memory(), contextlib.suppress(PrefectGPUError):
        for frame in feed(FrameReader(), stream):
            if frame.kind == transport.MESSAGE:
                messages.decode(frame.body)


@pytest.mark.parametrize("kind", [transport.MESSAGE, transport.VALUE, transport.BOOT])
def test_a_declared_length_takes_no_memory_before_the_bytes_come(kind: int) -> None:
    before = psutil.Process().memory_info().rss
    readers = [FrameReader() for _ in range(8)]
    for reader in readers:
        with contextlib.suppress(ProtocolError):
            feed(reader, frame_header(kind, 1 << 33) + bytes(100))
    assert psutil.Process().memory_info().rss - before < 64 * MIB
