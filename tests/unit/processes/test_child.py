"""Parts of the child that need no process: calibration, its own peak."""

from __future__ import annotations

import pickle
import socket
from typing import Any

import pytest

from prefect_gpu.frameworks import calibration, hooks
from prefect_gpu.processes import child, messages
from prefect_gpu.processes.channel import Channel
from prefect_gpu.processes.messages import BodyEnded, FrameReader
from tests.process.rig import PREPARE


def test_a_calibration_sends_its_number_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "run_calibration", lambda name: 7)
    monkeypatch.setattr(hooks, "install", lambda adapters, policy: None)
    parent, end = socket.socketpair()
    with parent:
        channel = Channel(end.detach())
        parent.sendall(messages.value_header(0))
        parent.shutdown(socket.SHUT_WR)
        child._calibrate(channel, PREPARE)
        frames = list(FrameReader().feed(parent.recv(1 << 16)))
        channel._socket.close()
    assert messages.decode(frames[1][1]) == BodyEnded(raised=False)
    assert pickle.loads(frames[2][1]) == 7


def test_without_proc_the_peak_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert child._host_peak_bytes() == 0
