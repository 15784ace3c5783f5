"""Bytes through a socket, as a `FrameReader` gets them."""

from __future__ import annotations

import socket

from prefect_gpu.values.transport import Frame, FrameReader


def feed(reader: FrameReader, data: bytes) -> list[Frame]:
    """Send bytes through a socket and return the frames that are complete with them."""
    frames: list[Frame] = []
    left, right = socket.socketpair()
    with left, right:
        right.setblocking(False)
        rest = memoryview(data)
        while len(rest):
            rest = rest[left.send(rest[: 1 << 16]) :]
            try:
                while True:
                    frame = reader.receive(right)
                    if frame is not None:
                        frames.append(frame)
            except BlockingIOError:
                pass
    return frames
