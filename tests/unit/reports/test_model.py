"""What a history keeps of a report."""

from __future__ import annotations

import pytest

from prefect_gpu.measurements import StepFacts
from prefect_gpu.reports.model import figure_values, past_run
from prefect_gpu.scheduling.history import PastRun, learn
from prefect_gpu.units import GIB
from tests.fakes.reports import device, task_report


def test_a_report_becomes_a_run() -> None:
    steps = StepFacts(40, 5 * GIB, 4 * GIB, 0.027, 3, 0.0)
    report = task_report(
        outcome="oom",
        cause="own_cap",
        cap_bytes=5 * GIB,
        wanted_bytes=7 * GIB,
        steps=steps,
        peak_process_bytes=6 * GIB,
        peak_live_bytes=5 * GIB,
    )
    assert past_run(report) == PastRun(
        ended_at=report.placed_at + report.held_s,
        outcome="oom",
        cause="own_cap",
        budget_bytes=6 * GIB,
        cap_bytes=5 * GIB,
        live_bytes=5 * GIB,
        steady_live_bytes=4 * GIB,
        process_bytes=6 * GIB,
        context_bytes=report.context_bytes,
        alloc_retries=3,
        step_s=0.027,
        run_s=report.run_s,
        wanted_bytes=7 * GIB,
        start_s=report.start_s,
        task_run_id=str(report.task_run_id),
    )


def test_steady_memory_of_steps_that_differ_is_not_kept() -> None:
    steps = StepFacts(40, 5 * GIB, 4 * GIB, 0.027, 3, alike=False)
    past = past_run(task_report(steps=steps, peak_live_bytes=5 * GIB))
    assert (past.steady_live_bytes, past.live_bytes) == (None, 5 * GIB)
    assert (past.step_s, past.alloc_retries) == (0.027, 3)
    past = past_run(task_report(peak_live_bytes=None, peak_reserved_bytes=None))
    assert past.live_bytes is past.steady_live_bytes is past.step_s is None
    assert past.alloc_retries == 0


def test_memory_of_several_devices_is_divided_equally() -> None:
    report = task_report(
        devices=tuple(device(i) for i in range(3)),
        peak_process_bytes=10 * GIB,
        peak_live_bytes=7 * GIB,
        peak_reserved_bytes=8 * GIB,
        context_bytes=2 * GIB,
        steps=StepFacts(3, None, 4 * GIB),
    )
    past = past_run(report)
    found = past.process_bytes, past.live_bytes, past.steady_live_bytes, past.context_bytes
    assert found == tuple(-(-size * GIB // 3) for size in (10, 7, 4, 2))
    assert past.budget_bytes == report.budget_bytes


@pytest.mark.parametrize("source", ["framework", "nvml"])
@pytest.mark.parametrize("reserved", [None, 7 * GIB, 8 * GIB])
def test_a_context_is_summed_however_it_is_known(source: str, reserved: int | None) -> None:
    report = task_report(
        devices=(device(0), device(1)),
        peak_process_bytes=9 * GIB,
        peak_reserved_bytes=reserved,
        context_bytes=2 * GIB,
        source=source,
    )
    assert past_run(report).context_bytes == GIB


def test_held_memory_stands_for_the_live_peak_of_a_framework_without_one() -> None:
    report = task_report(
        framework="cupy", peak_live_bytes=GIB, peak_reserved_bytes=3 * GIB, steps=None
    )
    assert past_run(report).live_bytes == 3 * GIB


def test_published_figures_are_numbers_for_programs_and_words_stay_words() -> None:
    report = task_report(
        task_name="12",
        history_key="1e5",
        cap_bytes=None,
        wanted_bytes=None,
        devices=(device(), device(1)),
    )
    found = figure_values(report.metadata())
    expected = {
        "task_name": "12",
        "learn_by": "1e5",
        "cause": "none",
        "attempt": 1,
        "exclusive": False,
        "budget_bytes": 6 * GIB,
        "cap_bytes": None,
        "wanted_bytes": None,
        "run_s": report.run_s,
        "device_total_bytes": [d.total_bytes for d in report.devices],
    }
    assert {name: found[name] for name in expected} == expected
    assert figure_values({"metric_loss": "nan"}) == {"metric_loss": "nan"}


def test_what_a_probe_was_given_beside_others_is_not_kept() -> None:
    given = {"outcome": "oom", "cause": "own_cap", "cap_bytes": 5 * GIB, "budget_bytes": 6 * GIB}
    shared = past_run(task_report(budget_source="probe", **given))
    assert (shared.budget_bytes, shared.cap_bytes) == (0, None)
    # So a later run learns the same budget as after a probe that was alone.
    done = past_run(task_report(budget_source="probe", peak_live_bytes=5 * GIB))
    assert learn([shared, done]) == learn([done])
    budget = past_run(task_report(budget_source="learned", **given))
    assert (budget.budget_bytes, budget.cap_bytes) == (6 * GIB, 5 * GIB)
