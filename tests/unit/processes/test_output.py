"""When output is written, held back, or dropped."""

from __future__ import annotations

import os
import selectors
import sys
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import CapacityError
from prefect_gpu.processes import output
from prefect_gpu.processes.output import ChildOutput, OutputForwarder


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
        self.forwarder = OutputForwarder(on_progress=self.room.release)

    def fill(self) -> None:
        self.forwarder.offer("stdout", "a")
        assert self.gate.entered.acquire(timeout=DEADLOCK_S)
        self.forwarder.offer("stdout", "b" * 100)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_consecutive_output_of_one_stream_is_one_write(rig: Rig) -> None:
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


def test_a_slow_stream_holds_children_back_and_drops_nothing(rig: Rig) -> None:
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


def test_a_stalled_stream_drops_output_and_says_how_much(rig: Rig) -> None:
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


def test_a_broken_stream_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    forwarder = OutputForwarder(on_progress=lambda: None)
    forwarder.offer("stdout", "lost")
    assert forwarder.flush(DEADLOCK_S)


def test_flush_returns_whether_it_was_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(sys, "stdout", gate)
    forwarder = OutputForwarder(on_progress=lambda: None)
    forwarder.offer("stdout", "x")
    assert not forwarder.flush(0)
    gate.turns.release()
    assert forwarder.flush(DEADLOCK_S)


def test_a_character_that_is_cut_between_two_reads_is_decoded() -> None:
    reading, writing = os.pipe()
    offered: list[str] = []
    forwarder = SimpleNamespace(full=False, offer=lambda name, text: offered.append(text))
    with selectors.DefaultSelector() as selector, open(reading, "rb", buffering=0) as stream:
        child = ChildOutput({"stdout": stream}, selector, cast(OutputForwarder, forwarder))
        for piece in ("grün".encode()[:3], "grün".encode()[3:]):
            os.write(writing, piece)
            ((key, mask),) = selector.select(DEADLOCK_S)
            key.data(mask)
        os.close(writing)
        child.finish()
    assert offered == ["gr", "ün", ""]


def test_output_for_which_no_thread_starts_is_written_with_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> threading.Thread:
        raise CapacityError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(output, "start_thread", refuse)
        rig.forwarder.offer("stdout", "first ")
    rig.gate.turns.release()
    rig.forwarder.offer("stdout", "second")
    assert rig.forwarder.flush(DEADLOCK_S)
    assert rig.gate.text == "first second"
