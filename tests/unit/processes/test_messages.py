"""Frames survive any cut of the stream, and what is no frame is refused."""

from __future__ import annotations

import mmap
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.errors import ProtocolError
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes import messages
from prefect_gpu.processes.messages import HEADER, Asked, BodyStarted, CountersRead, FrameReader

FRAMES = st.lists(
    st.tuples(
        st.sampled_from([messages.SMALL, messages.VALUE, messages.PARCEL]), st.binary(max_size=60)
    ),
    max_size=6,
)


def frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(kind, len(body)) + body


def test_every_field_of_the_counters_gets_through() -> None:
    message = CountersRead(Counters(1, 2, 3, 4, 5, freed_bytes=6), ("torch",))
    ((_, body),) = FrameReader().feed(messages.encode(message))
    assert messages.decode(body) == message


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_any_cut_of_the_stream_gives_the_same_frames(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(frame(kind, body) for kind, body in frames)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        got += [(kind, bytes(body)) for kind, body in reader.feed(stream[at : at + size])]
        at, turn = at + size, turn + 1
    assert got == frames
    assert not reader.truncated


@given(st.binary(max_size=30), st.data())
def test_a_stream_that_ends_inside_a_frame_is_truncated(body: bytes, data: st.DataObject) -> None:
    stream = frame(messages.VALUE, body)
    size = data.draw(st.integers(1, len(stream) - 1))
    reader = FrameReader()
    assert list(reader.feed(stream[:size])) == []
    assert reader.truncated


@given(st.binary(min_size=9, max_size=40).filter(lambda b: b[0] not in (1, 2, 3, 4)))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError, match="something other than prefect_gpu"):
        list(FrameReader().feed(garbage))


def test_a_length_beyond_belief_is_refused() -> None:
    with pytest.raises(ProtocolError, match="length"):
        list(FrameReader().feed(HEADER.pack(messages.VALUE, messages.LONGEST_FRAME_BYTES + 1)))


def test_a_body_that_finds_no_memory_is_refused() -> None:
    with pytest.raises(ProtocolError, match="finds no memory"):
        messages.allocate_body(1 << 62)


def test_large_bodies_have_memory_of_their_own() -> None:
    body = bytes(messages.MAPPED_BYTES)
    ((_, got),) = FrameReader().feed(frame(messages.VALUE, pickle.dumps(body)))
    assert isinstance(got, mmap.mmap)
    assert pickle.loads(got) == body


def test_small_messages_round_trip() -> None:
    for message in (BodyStarted(), Asked("sum", {"a": 1})):
        ((kind, body),) = FrameReader().feed(messages.encode(message))
        assert kind == messages.SMALL
        assert messages.decode(body) == message


@pytest.mark.parametrize("body", [b"", b"abc", pickle.dumps({"no": "message"})])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(body)
