"""When output is written, held back, or dropped."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import output
from prefect_gpu.processes.output import OutputForwarder


class Gate:
    """A stream that takes one write for each turn it is given."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)
        self.text = ""

    def write(self, text: str) -> int:
        self.entered.release()
        assert self.turns.acquire(timeout=DEADLOCK_S)
        self.text += text
        return len(text)

    def flush(self) -> None:
        return


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.gate = Gate()
        self.room = threading.Semaphore(0)
        monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(output, "PENDING_BYTES", 100)
        # The module's name, not `sys.stdout`: pytest sets that anew between fixture and test.
        self.streams = SimpleNamespace(stdout=self.gate, stderr=self.gate)
        monkeypatch.setattr(output, "sys", self.streams)
        self.forwarder = OutputForwarder(on_room=self.room.release)

    def fill(self) -> None:
        self.forwarder.offer("stdout", "a")
        assert self.gate.entered.acquire(timeout=DEADLOCK_S)
        self.forwarder.offer("stdout", "b" * 100)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_neighbours_go_out_in_one_write(rig: Rig) -> None:
    other = Gate()
    other.turns.release()
    rig.streams.stderr = other
    rig.forwarder.offer("stdout", "")
    rig.forwarder.offer("stdout", "a")
    assert rig.gate.entered.acquire(timeout=DEADLOCK_S)
    for text in ("b", "c"):
        rig.forwarder.offer("stdout", text)
    rig.forwarder.offer("stderr", "d")
    for _ in range(2):
        rig.gate.turns.release()
    assert rig.room.acquire(timeout=DEADLOCK_S)
    for _ in range(2):
        assert rig.room.acquire(timeout=DEADLOCK_S)
    assert (rig.gate.text, other.text) == ("abc", "d")


def test_a_slow_stream_holds_back_and_drops_nothing(rig: Rig) -> None:
    rig.fill()
    assert rig.forwarder.full
    rig.now_s += output.STALLED_S - 1
    assert rig.forwarder.full
    rig.gate.turns.release()
    assert rig.gate.entered.acquire(timeout=DEADLOCK_S)
    rig.now_s += output.STALLED_S - 1
    assert rig.forwarder.full, "one write is progress"
    rig.gate.turns.release()
    assert rig.room.acquire(timeout=DEADLOCK_S) and rig.room.acquire(timeout=DEADLOCK_S)
    assert not rig.forwarder.full
    assert rig.gate.text == "a" + "b" * 100


def test_a_stalled_stream_drops_and_says_how_much(rig: Rig) -> None:
    rig.fill()
    rig.now_s += output.STALLED_S
    assert not rig.forwarder.full
    rig.forwarder.offer("stdout", "c" * 30)
    rig.forwarder.offer("stdout", "c" * 12)
    for _ in range(2):
        rig.gate.turns.release()
        assert rig.room.acquire(timeout=DEADLOCK_S)
    assert "c" not in rig.gate.text.partition("[")[0]
    assert "42 bytes of output dropped" in rig.gate.text
    # It goes on as ever.
    rig.gate.turns.release()
    rig.forwarder.offer("stdout", "later")
    assert rig.room.acquire(timeout=DEADLOCK_S)
    assert rig.gate.text.endswith("later")


def test_a_broken_stream_is_no_ones_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    forwarder = OutputForwarder(on_room=lambda: None)
    forwarder.offer("stdout", "lost")
    assert forwarder.flush(DEADLOCK_S)


def test_flush_says_if_it_was_not_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(sys, "stdout", gate)
    forwarder = OutputForwarder(on_room=lambda: None)
    forwarder.offer("stdout", "x")
    assert not forwarder.flush(0)
    gate.turns.release()
    assert forwarder.flush(DEADLOCK_S)


def test_characters_may_be_cut() -> None:
    decode = output.decoder().decode
    data = "grün".encode()
    assert decode(data[:3]) + decode(data[3:]) == "grün"
