"""A benchmark's row in a process of its own: what it told counts, however it ends."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common
import pytest

from tests.process.rig import eventually, is_alive

#: Only ever reached in a deadlock.
LIMIT_S = 120.0


def stream(
    folder: Path,
    program: str,
    limit_s: float = LIMIT_S,
    then: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, Any]], str]:
    """Run a program as a row; return what it told and why it did not end well.

    Args:
        folder: For the program.
        program: Its text.
        limit_s: Seconds that it may take.
        then: Called after each thing that it told.
    """
    script = folder / "row.py"
    script.write_text(textwrap.dedent(program), encoding="utf-8")
    told: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        told.append(record)
        then()

    why = _common.stream(str(script), ["7"], "http://nowhere/api", limit_s, keep)
    return told, why


def test_messages_before_a_death_arrive_and_other_output_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
        import os, sys
        import _common
        print("on the way")
        _common.tell({"given": sys.argv[1], "url": os.environ["PREFECT_API_URL"]})
        _common.tell({"last": True})
    """
    told, why = stream(tmp_path, program)
    assert told == [{"given": "7", "url": "http://nowhere/api"}, {"last": True}]
    assert why == ""
    assert capfd.readouterr().out == "on the way\n"


def test_a_dead_calibration_is_reported_with_its_signal(tmp_path: Path) -> None:
    told, why = stream(tmp_path, "import _common; _common.tell({'a': 1}); raise SystemExit(3)")
    assert told == [{"a": 1}]
    assert why == "its process ended with 3"


def test_one_that_closes_its_output_first_is_waited_for_no_longer_than_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only ever reached if its end is not seen.
    monkeypatch.setattr(_common, "OUTPUT_S", 2 * LIMIT_S)
    program = """
        import os, time
        import _common
        _common.tell({"last": True})
        os.close(1)
        time.sleep(0.5)
    """
    assert stream(tmp_path, program) == ([{"last": True}], "")


class _Clock:
    """The real clock, until it is moved."""

    def __init__(self) -> None:
        self.moved_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.moved_s


def test_one_whose_time_is_up_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(_common, "time", clock)
    monkeypatch.setattr(_common, "TERMINATE_S", 0.1)
    program = """
        import signal, subprocess, sys, time
        import _common
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        _common.tell({"child": child.pid})
        time.sleep(300)
    """

    def hour_passes() -> None:
        clock.moved_s += 3600

    # However long it takes to start, its time is up once its child runs.
    told, why = stream(tmp_path, program, 3600, hour_passes)
    assert why == "ended after 3600 s"
    (record,) = told
    assert eventually(lambda: not is_alive(record["child"]))
