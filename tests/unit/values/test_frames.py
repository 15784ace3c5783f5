"""Frames survive any cut of the stream, and what is no frame is refused."""

from __future__ import annotations

import mmap
import pickle
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.errors import ProtocolError
from prefect_gpu.values import transport
from prefect_gpu.values.transport import FrameReader, frame_header
from tests.fakes.frames import feed

FRAMES = st.lists(
    st.tuples(
        st.sampled_from([transport.MESSAGE, transport.VALUE, transport.BOOT]),
        st.binary(max_size=60),
    ),
    max_size=6,
)


def frame(kind: int, body: bytes) -> bytes:
    return frame_header(kind, len(body)) + body


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_any_cut_of_the_stream_gives_the_same_frames(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(frame(kind, body) for kind, body in frames)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        got += [(kind, bytes(body)) for kind, body, _ in feed(reader, stream[at : at + size])]
        at, turn = at + size, turn + 1
    assert got == frames
    assert not reader.truncated


@given(st.binary(max_size=30), st.data())
def test_a_stream_that_ends_inside_a_frame_is_truncated(body: bytes, data: st.DataObject) -> None:
    stream = frame(transport.VALUE, body)
    size = data.draw(st.integers(1, len(stream) - 1))
    reader = FrameReader()
    assert feed(reader, stream[:size]) == []
    assert reader.truncated


def test_a_stream_that_is_closed_is_at_its_end() -> None:
    left, right = socket.socketpair()
    left.close()
    with right, pytest.raises(EOFError):
        FrameReader().receive(right)


@given(st.binary(min_size=9, max_size=40).filter(lambda b: b[0] not in (1, 2, 3)))
def test_bytes_that_are_no_frame_are_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError, match="something other than prefect_gpu"):
        feed(FrameReader(), garbage)


def test_a_frame_that_is_longer_than_any_value_is_refused() -> None:
    with pytest.raises(ProtocolError, match="length"):
        feed(FrameReader(), frame_header(transport.VALUE, transport.LONGEST_FRAME_BYTES + 1))


def test_a_body_that_finds_no_memory_is_refused() -> None:
    with pytest.raises(ProtocolError, match="finds no memory"):
        transport.allocate_body(1 << 62)


def test_large_bodies_have_memory_of_their_own() -> None:
    body = bytes(transport.MAPPED_BYTES)
    ((_, got, _),) = feed(FrameReader(), frame(transport.VALUE, pickle.dumps(body)))
    assert isinstance(got, mmap.mmap)
    assert pickle.loads(got) == body
