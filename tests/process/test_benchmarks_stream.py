"""A benchmark's row in a process of its own: what it told counts, however it ends."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import _common
import pytest

from tests.process.rig import is_alive


def stream(folder: Path, program: str, limit_s: float) -> tuple[list[dict[str, Any]], str]:
    script = folder / "row.py"
    script.write_text(textwrap.dedent(program), encoding="utf-8")
    told: list[dict[str, Any]] = []
    why = _common.stream(str(script), ["7"], "http://nowhere/api", limit_s, told.append)
    return told, why


def test_all_that_was_told_arrives_and_the_rest_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
        import os, sys
        import _common
        print("on the way")
        _common.tell({"given": sys.argv[1], "url": os.environ["PREFECT_API_URL"]})
        _common.tell({"last": True})
    """
    told, why = stream(tmp_path, program, 60)
    assert told == [{"given": "7", "url": "http://nowhere/api"}, {"last": True}]
    assert why == ""
    assert capfd.readouterr().out == "on the way\n"


def test_one_that_dies_says_with_what(tmp_path: Path) -> None:
    told, why = stream(tmp_path, "import _common; _common.tell({'a': 1}); raise SystemExit(3)", 60)
    assert told == [{"a": 1}]
    assert why == "its process ended with 3"


def test_one_whose_time_is_up_is_ended_with_what_it_started(tmp_path: Path) -> None:
    program = """
        import signal, subprocess, sys, time
        import _common
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        _common.tell({"child": child.pid})
        time.sleep(300)
    """
    told, why = stream(tmp_path, program, 4)
    assert why == "ended after 4 s"
    (record,) = told
    assert not is_alive(record["child"])
