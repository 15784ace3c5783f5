"""What the log of a task run says of its processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from prefect_gpu.errors import ResultError
from prefect_gpu.measurements import Sample, Suspension
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.reports.model import TaskReport, Verdict
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_record import ProcessRecord
from prefect_gpu.runner.process_run import Failed
from prefect_gpu.runner.run_log import conclude, ended_line, flow_summary, placed_line
from prefect_gpu.runner.task_plan import TaskPlan
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.units import GIB
from tests.fakes.reports import CONTEXT, on_node, task_report

ONE = Placement("1", (on_node("gpu-1"),), (5 * GIB,))
TWO = Placement("1", (on_node("gpu-1"), on_node("gpu-1", 1)), (5 * GIB, 5 * GIB))
WHO = HistoryKey("evaluate", "evaluate", flow_name="nightly")
UNSENT = ResultError("the error", "result.lock", "lock", "it belongs to one process")
PLAN = TaskPlan("evaluate", "evaluate-1a", print, GPUPolicy(), (), (), (), None, 0)
LEARNED = Grant(5 * GIB, "learned", learned_runs={ONE.devices[0].name: 3})


@pytest.mark.parametrize(
    ("placement", "grant", "whole", "waited_s", "says"),
    [
        (ONE, Grant(5 * GIB, "tag"), False, 0.2, "Placed on gpu-1:0 with a budget of 5GiB (from its tag gpu:memory)"),
        (TWO, LEARNED, False, 61, "Placed after 1m 01s on gpu-1:0, gpu-1:1 with a budget of 5GiB on each (learned from 3 runs of this task in this flow)"),
        (ONE, replace(LEARNED, learned_runs={"another model": 3}), True, 0, "Placed alone on gpu-1:0 with all that is free, 5GiB (no earlier run has shown what it needs)"),
        (ONE, Grant(None, "probe"), True, 0, "Placed alone on gpu-1:0 with all that is free, 5GiB (no earlier run has shown what it needs)"),
        (ONE, replace(LEARNED, estimated_from={ONE.devices[0].name: "batch_size 16, 32"}), False, 0, "Placed on gpu-1:0 with a budget of 5GiB (estimated from runs with batch_size 16, 32)"),
        (ONE, Grant(5 * GIB, "tag", after_oom=True), False, 0, "Placed on gpu-1:0 with a budget of 5GiB (after an out-of-memory)"),
    ],
    ids=["a tag", "learned, on two devices", "learned on another model only", "a probe", "estimated", "after an out-of-memory"],
)  # fmt: skip
def test_a_placement(
    placement: Placement, grant: Grant, whole: bool, waited_s: float, says: str
) -> None:
    assert placed_line(placement, grant, WHO, whole, waited_s) == says


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (WHO, "(learned from 3 runs of this task in this flow)"),
        (replace(WHO, flow_name=None), "(learned from 3 runs of this task outside a flow)"),
        (replace(WHO, learn_by="1f", learn_by_words="size=3"), "(learned from 3 runs of this task in this flow with size=3)"),
    ],
    ids=["in a flow", "in none", "with learn_by"],
)  # fmt: skip
def test_a_placement_says_which_runs_a_budget_was_learned_from(
    identity: HistoryKey, says: str
) -> None:
    assert placed_line(ONE, LEARNED, identity, False, 0).endswith(says)


def test_one_run_is_one() -> None:
    once = replace(LEARNED, learned_runs={ONE.devices[0].name: 1})
    assert "(learned from 1 run of this task" in placed_line(ONE, once, WHO, False, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "Completed: ran 2.5s, at most 3GiB of 6GiB"),
        ({"source": "host"}, "Completed: ran 2.5s, at most 3GiB of 6GiB of host memory"),
        ({"outcome": "timeout", "peak_process_bytes": 0}, "Timed out: ran 2.5s, no device memory seen"),
        ({"outcome": "oom"}, ""),
        ({"outcome": "cancelled"}, ""),
    ],
    ids=["completed", "on the host", "timed out", "out of memory has a line of its own", "cancelled"],
)  # fmt: skip
def test_the_end_of_a_process(changes: dict[str, Any], says: str) -> None:
    report = replace(task_report(), run_s=2.5, peak_process_bytes=3 * GIB)
    assert ended_line(replace(report, **changes)) == says


@pytest.mark.parametrize(
    ("error", "traceback", "says"),
    [
        (ValueError("the first\nthe second"), "a line\nValueError: the first\nthe second", "ValueError: the first"),
        (KeyError(), "a line\nKeyError", "KeyError"),
        (UNSENT, "a line\nLockedError: it said this\n", "LockedError: it said this"),
        (UNSENT, None, str(UNSENT)),
    ],
    ids=["several lines", "no text", "replaced", "replaced, without a traceback"],
)  # fmt: skip
def test_the_error_of_a_body_is_its_type_and_first_line(
    error: Exception, traceback: str | None, says: str
) -> None:
    assert conclude(Failed(error, traceback), PLAN, ProcessRecord(ONE, 0.0, 0.0)) == (
        error,
        Verdict("failed", says),
    )


def test_a_summary_has_the_states_the_tasks_their_devices_and_the_tags_to_write() -> None:
    one = replace(
        task_report(),
        task_name="fine_tune",
        budget_bytes=60 * GIB,
        queued_s=4.0,
        run_s=60.0,
        samples=(Sample(0.0, 0), Sample(10.0, 3 * GIB), Sample(20.0, 2 * GIB)),
        peak_process_bytes=3 * GIB,
        peak_live_bytes=2 * GIB,
        steps=None,
    )
    # They overlap at 10 s.
    other = replace(one, placed_at=one.placed_at + 2.0, queued_s=2.0)
    headline, task, on, tag = flow_summary({"Failed": 1, "Completed": 2}, [one, other]).split("\n")
    assert headline == "GPU task runs: 2 Completed, 1 Failed"
    assert task == "  fine_tune: 2 processes, waited 6s, ran 2m in all, at most 3GiB of 60GiB"
    assert on == "  device 0: these tasks held at most 6GiB of 140GiB"
    assert tag.startswith("  write gpu:memory=3.2GiB in the tag of fine_tune (now 60GiB, tag): ")


def test_a_summary_has_one_piece_of_advice_for_a_task() -> None:
    def sized(size_gib: int, budget_gib: int) -> TaskReport:
        live = size_gib * GIB
        return task_report(
            task_run_id=UUID(int=size_gib),
            history_key=str(size_gib),
            learn_by=f"size={size_gib}",
            peak_live_bytes=live,
            peak_process_bytes=live + CONTEXT,
            budget_bytes=budget_gib * GIB,
        )

    *_, tag = flow_summary({}, [sized(3, 30), sized(5, 30), sized(1, 30)]).splitlines()
    assert tag == (
        "  write gpu:memory=7.1GiB in the tag of evaluate (now 30GiB, tag): live peak 5GiB × 1.3 + "
        "context 612MiB; the most of 3 sets of gpu:learn_by values"
    )
    assert "write" not in flow_summary({}, [sized(5, 7), sized(1, 30)])
    only = flow_summary({}, [sized(5, 30)])
    assert "in the tag of evaluate (size=5) (now 30GiB, tag)" in only and "sets" not in only


def test_a_summary_says_of_a_task_that_no_tag_helps_that_it_must_take_less() -> None:
    large = replace(
        task_report(), task_name="grow", outcome="oom", cause="own_cap", peak_process_bytes=0
    )
    large = replace(large, budget_bytes=140 * GIB, budget_source="probe", wanted_bytes=150 * GIB)
    _, task, tag = flow_summary({"Failed": 1}, [replace(large, samples=())]).split("\n")
    assert task.endswith("in all, no device memory seen")
    assert tag == (
        "  grow (now 140GiB, probe): the largest device gives 140GiB, so no tag helps: it must take less"
    )


def test_a_process_holds_nothing_of_its_device_while_it_is_suspended() -> None:
    # Of readings that were merged the largest is kept: the zeros of the time away are gone.
    suspended = replace(
        task_report(),
        budget_bytes=60 * GIB,
        samples=(Sample(0.0, 0), Sample(10.0, 90 * GIB), Sample(44.0, 90 * GIB)),
        peak_process_bytes=90 * GIB,
        suspensions=(Suspension(20.0, 40.0, 4.0, 2.0, 90 * GIB, "other first runs", "device 0"),),
    )
    beside = replace(
        task_report(),
        placed_at=suspended.placed_at + 25.0,
        samples=(Sample(0.0, 0), Sample(1.0, 120 * GIB), Sample(12.0, 20 * GIB)),
        peak_process_bytes=120 * GIB,
    )
    said = flow_summary({"Completed": 2}, [suspended, beside])
    assert "these tasks held at most 120GiB of 140GiB" in said
    # From 38 s on both hold something, at the most what the device has.
    longer = replace(beside, samples=(*beside.samples[:2], Sample(30.0, 120 * GIB)))
    said = flow_summary({"Completed": 2}, [suspended, longer])
    assert "these tasks held at most 140GiB of 140GiB" in said


def test_a_device_held_at_least_what_one_process_held_between_two_readings() -> None:
    short = replace(task_report(), samples=(), peak_process_bytes=3 * GIB)
    assert "these tasks held at most 3GiB of 140GiB" in flow_summary({"Completed": 1}, [short])


def test_a_summary_is_short_however_many_tasks_there_are() -> None:
    reports = [
        replace(task_report(), task_name=f"t{i}", devices=(on_node("a", i),), budget_bytes=60 * GIB)
        for i in range(9)
    ]
    lines = flow_summary({"Completed": 9}, reports).split("\n  ")
    assert len(lines) == 12
    assert [line for line in lines if line.startswith("other")] == [
        "other tasks: 6",
        "other devices: 7",
        "other tags to change: 6",
    ]


def test_task_runs_without_a_process_are_counted() -> None:
    assert flow_summary({"Cached": 3}, []) == "GPU task runs: 3 Cached"


def test_a_summary_says_for_how_much_of_the_time_a_device_computed() -> None:
    one = replace(task_report(), busy_fraction=0.5, run_s=40.0, samples=(), start_s=0.0)
    later = replace(one, placed_at=one.placed_at + 60.0)
    said = flow_summary({"Completed": 2}, [one, later])
    assert (
        "these tasks held at most 5.5GiB of 140GiB, and it computed for them for 40% of the time"
        in said
    )
