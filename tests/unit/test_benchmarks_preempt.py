"""What the benchmark of preemption reads from the files of trainings, and how it judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import preempt
import pytest

GIB = 2**30


def test_a_line_that_is_not_written_to_its_end_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert preempt.read_steps(path) == []
    path.write_text("0 0.5 10.0\n1 0.25 10.1\n2 0.1")
    assert preempt.read_steps(path) == [
        preempt.Step(0, "0.5", 10.0),
        preempt.Step(1, "0.25", 10.1),
    ]


def test_steps_that_are_done_again_are_lost() -> None:
    steps = [preempt.Step(number, "1.0", 0.0) for number in (0, 1, 2, 0, 1, 2, 3)]
    assert preempt.lost_steps(steps) == 3
    assert preempt.lost_steps(steps[3:]) == 0


def test_losses_are_compared_to_the_last_bit() -> None:
    steps = [preempt.Step(0, "0.5", 0.0), preempt.Step(1, "0.25000000000000006", 0.0)]
    assert preempt.differing_steps(steps, {0: "0.5", 1: "0.25", 2: "0.1"}) == 1


@pytest.mark.parametrize(("gap_s", "pause_s"), [(0.1, 0.0), (12.0, 12.0)])
def test_a_training_stands_still_only_if_a_step_takes_long(gap_s: float, pause_s: float) -> None:
    steps = [preempt.Step(0, "1.0", 5.0), preempt.Step(1, "1.0", 5.0 + gap_s)]
    assert preempt.longest_pause_s(steps) == pytest.approx(pause_s)


def run_of(row: str, ready_s: float, **more: Any) -> dict[str, Any]:
    found = {"pause_s": 20.0, "lost_steps": 0, "differing_steps": 0, "live_bytes": 17 * GIB}
    return {"row": row, "ready_s": ready_s, **found, **more}


@pytest.mark.parametrize(
    ("run", "passed"),
    [
        pytest.param(run_of("suspend", 12.4), True, id="within the aim"),
        pytest.param(run_of("suspend", 12.6), False, id="later than the aim"),
        pytest.param(run_of("suspend", 12.4, lost_steps=1), False, id="a step done twice"),
        pytest.param(run_of("suspend", 12.4, pause_s=0.0), False, id="not suspended at all"),
        pytest.param(run_of("rerun", 99.0, lost_steps=40), True, id="other rows have no aim"),
        pytest.param(run_of("rerun", 1.0, differing_steps=1), False, id="other losses"),
    ],
)
def test_what_is_judged(run: dict[str, Any], passed: bool) -> None:
    assert all(check.passed for check in preempt.make_checks([run])) == passed
