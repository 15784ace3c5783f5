"""What children print reaches the parent's streams, and never stops anybody for good."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import output
from tests.process import bodies
from tests.process.rig import Rig

MUCH_BYTES = 100_000_000


class Counting:
    def __init__(self) -> None:
        self.bytes = 0

    def write(self, text: str) -> int:
        self.bytes += len(text)
        return len(text)

    def flush(self) -> None:
        return


class Blocked(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        assert self.gate.wait(DEADLOCK_S * 2)
        return super().write(text)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_great_deal_of_output_arrives_whole(
    rig: Rig, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Counting()
    monkeypatch.setattr(sys, stream, sink)
    child = rig.start(bodies.print_much, stream, MUCH_BYTES)
    assert child.value() == MUCH_BYTES
    assert rig.launcher.output.flush(DEADLOCK_S)
    assert sink.bytes == MUCH_BYTES
    tail = child.exit().stderr_tail
    assert len(tail) == (0 if stream == "stdout" else 64 * 1024)


def test_a_stream_that_is_not_read_stops_no_child(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "STALLED_S", 0.2)
    sink = Blocked()
    monkeypatch.setattr(sys, "stdout", sink)
    try:
        assert rig.call(bodies.print_much, "stdout", MUCH_BYTES) == MUCH_BYTES
    finally:
        sink.gate.set()
        assert rig.launcher.output.flush(DEADLOCK_S)
    assert 0 < sink.bytes < MUCH_BYTES


def test_output_that_is_not_utf_8_is_shown(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.call(bodies.print_bytes, b"caf\xe9 \xff\n")
    rig.call(bodies.print_text, "grün \udc80 ✓")
    assert rig.launcher.output.flush(DEADLOCK_S)
    out = capsys.readouterr().out
    assert "caf\ufffd \ufffd\n" in out
    assert "grün \\udc80 ✓\n" in out


def test_a_parent_whose_output_is_closed_still_runs_tasks() -> None:
    program = (
        "from tests.process import bodies; from tests.process.rig import Rig; import os\n"
        "rig = Rig(); os.close(1)\n"
        "assert rig.call(bodies.print_text, 'x') is None; rig.launcher.close(); os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        timeout=DEADLOCK_S,
    )
    assert done.returncode == 0, done.stderr


def test_a_daemon_that_prints_for_ever_does_not_hold_up_the_childs_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Counting())
    pid = rig.call(start_yes)
    # It may have ended already: no process reads what it prints.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
    # What was read of it until then belongs to no test that comes after.
    assert rig.launcher.output.flush(DEADLOCK_S)


def start_yes() -> int:
    process = subprocess.Popen(["yes"], start_new_session=True)
    process.returncode = 0
    return process.pid
