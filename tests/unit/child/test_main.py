"""Parts of the child that need no process: calibration, its own peak."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from prefect_gpu.child import main as child
from prefect_gpu.child.channel import Channel
from prefect_gpu.frameworks import context, hooks
from prefect_gpu.processes import messages, transport, values
from prefect_gpu.processes.messages import BodyEnded
from prefect_gpu.processes.transport import FrameReader
from tests.fakes.frames import feed
from tests.process.rig import PREPARE


def test_a_calibration_sends_its_number_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "run_calibration", lambda name: 7)
    monkeypatch.setattr(hooks, "install", lambda adapters, policy: None)
    parent, end = socket.socketpair()
    with parent:
        channel = Channel(end.detach())
        parent.sendall(b"".join(transport.pack((), ()).frame))
        parent.shutdown(socket.SHUT_WR)
        child._calibrate(channel, PREPARE)
        frames = feed(FrameReader(), parent.recv(1 << 16))
        channel.close()
    assert messages.decode(frames[1][1]) == BodyEnded(raised=False)
    assert values.loads(transport.unpack(frames[2]), "return value") == 7


def test_without_proc_the_peak_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert child._host_peak_bytes() == 0
