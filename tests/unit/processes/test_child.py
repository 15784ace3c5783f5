"""Parts of the child that need no process: counters, out-of-memory, tracebacks, calibration."""

from __future__ import annotations

import pickle
import socket
import threading
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.frameworks import calibration, hooks
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes import child, messages
from prefect_gpu.processes.channel import Channel
from prefect_gpu.processes.messages import BodyEnded, CountersRead, FrameReader
from tests.process.rig import PREPARE


class FakeAdapter:
    name = "fake"

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "no memory" in str(error)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.came = threading.Semaphore(0)
        self.gone = False

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.came.release()
        if self.gone:
            raise BrokenPipeError


def counters(live_bytes: int) -> Counters:
    return Counters(live_bytes, live_bytes, live_bytes, live_bytes)


def watch_of(channel: FakeChannel) -> child._CountersWatch:
    return child._CountersWatch(channel, (), 0.001)  # type: ignore[arg-type]


def test_counters_are_sent_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([None, counters(1), counters(1), counters(2)])
    monkeypatch.setattr(hooks, "collect_counters", lambda adapters: next(readings, counters(2)))
    channel = FakeChannel()
    watch = watch_of(channel)
    watch.start()
    for _ in range(2):
        assert channel.came.acquire(timeout=DEADLOCK_S)
    watch.stop()
    assert [m.counters.live_bytes for m in channel.sent if isinstance(m, CountersRead)] == [1, 2]
    assert watch.last()[0] == counters(2)


def test_a_parent_that_is_gone_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Semaphore(0)
    live = iter(range(1, 1000))

    def collect(adapters: object) -> Counters:
        read.release()
        return counters(next(live))

    monkeypatch.setattr(hooks, "collect_counters", collect)
    channel = FakeChannel()
    channel.gone = True
    child._CountersWatch(channel, (), 0.0)._watch()  # type: ignore[arg-type]
    assert len(channel.sent) == 1


def test_counters_that_cannot_be_read_fail_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(adapters: object) -> Counters:
        raise RuntimeError("half imported")

    monkeypatch.setattr(hooks, "collect_counters", fail)
    assert watch_of(FakeChannel()).last()[0] is None
    assert "half imported" in capsys.readouterr().err


def test_out_of_memory_is_found_in_an_error_and_in_its_causes() -> None:
    adapters: Any = (FakeAdapter(),)
    outer = ValueError("step failed")
    outer.__cause__ = RuntimeError("no memory")
    assert child._out_of_memory(outer, adapters) is not None
    assert child._out_of_memory(ValueError("other"), adapters) is None
    circle = ValueError("a")
    circle.__context__ = Wordless()
    circle.__context__.__context__ = circle
    assert child._out_of_memory(circle, adapters) is None
    marked = ValueError("b")
    marked.__prefect_gpu_out_of_memory__ = True  # type: ignore[attr-defined]
    assert child._out_of_memory(marked, adapters) is not None


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
