"""What follows the end of a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_gpu.errors import (
    NodeRefusedError,
    PlacementError,
    PlacementTimeoutError,
)
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused
from prefect_gpu.runner import process_run as run
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_run import (
    AskAgain,
    Ended,
    History,
    Lost,
    Memory,
    Raise,
    Retry,
    Shortage,
    Step,
    next_step,
)
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.ladder import Evidence, OomHistory
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import GIB

GRANT = Grant(2 * GIB, "tag", histories={"A": HistoryKey("a", "a", "A")}, probe_fraction=0.5)
HISTORY = History(GPUPolicy(), OomHistory(), None, since_s=6.0)
EVIDENCE = Evidence(2 * GIB, 2 * GIB, 0, GIB // 2, GIB, 2 * GIB, 20 * GIB, says_own_cap=True)
MEMORY = Memory(EVIDENCE, 24 * GIB, 0, True, "nvml")
FULL, FIRST = RuntimeError("no room"), RuntimeError("the first time")
EXIT = ChildExited(-9, "")


def step(outcome: run.Failure, history: History = HISTORY) -> Step:
    error = (
        outcome.error if isinstance(outcome, (run.Failed, run.OutOfMemory, ChildRefused)) else FULL
    )
    return next_step(Ended(outcome, error, "RuntimeError: no room"), GRANT, history)


@pytest.mark.parametrize(
    "outcome",
    [
        run.Failed(ValueError("no"), "tb"),
        run.OutOfMemory(FULL),
        run.Died(EXIT, "unknown"),
        run.Quit(SystemExit(1), "tb"),
        run.TimedOut(),
        run.Cancelled(),
        ChildRefused(OSError("no process")),
        ChildRefused(PlacementError("too large")),
        # A body that runs a flow of its own may raise any error of this package.
        run.Failed(PlacementError("within the body"), "tb"),
        run.Failed(NodeRefusedError("a", "within the body"), "tb"),
    ],
    ids=repr,
)
def test_an_outcome_without_evidence_of_a_shortage_ends_the_task_run(outcome: run.Failure) -> None:
    error = (
        outcome.error if isinstance(outcome, (run.Failed, run.OutOfMemory, ChildRefused)) else FULL
    )
    assert step(outcome) == Raise(error)


def test_a_process_that_was_lost_is_replaced_by_one_with_the_same_grant() -> None:
    retry = step(Lost("gone"))
    assert isinstance(retry, Retry) and retry.grant == GRANT
    assert retry.warning == "The process was lost in a move: gone; the body runs again"


def test_a_first_run_that_was_ended_for_others_has_a_device_to_itself_the_next_time() -> None:
    retry = step(run.EndedForOthers("device 0"))
    assert isinstance(retry, Retry) and retry.warning is not None
    alone = replace(GRANT, probe_fraction=0.0, alone_because="it was ended once")
    assert retry.grant == replace(alone, histories={})


def test_a_task_that_a_node_refuses_asks_again_until_its_limit_of_waiting() -> None:
    error = NodeRefusedError("a", "no room")
    refused = ChildRefused(error)
    reason = Reason(WaitKind.OTHER_NODE, at="a", detail="no room")
    assert step(refused) == AskAgain(reason)
    over = step(refused, replace(HISTORY, policy=GPUPolicy(wait_s=6.0)))
    assert isinstance(over, Raise) and isinstance(over.error, PlacementTimeoutError)


def test_a_rung_that_no_device_holds_ends_with_what_ran_out() -> None:
    after = replace(HISTORY, shortage=FIRST)
    assert step(ChildRefused(PlacementError("too large")), after) == Raise(FIRST, "too large")
    late = PlacementTimeoutError("busy")
    assert step(ChildRefused(late), after) == Raise(late)


@pytest.mark.parametrize(
    "outcome", [run.OutOfMemory(FULL), run.Failed(FULL), run.Died(EXIT, None), run.TimedOut()]
)
def test_evidence_of_a_shortage_is_followed_by_the_ladder(outcome: run.Failure) -> None:
    retry = step(outcome, replace(HISTORY, memory=MEMORY))
    assert isinstance(retry, Retry) and retry.shortage is not None
    raised = replace(GRANT, memory=3 * GIB, after_oom=True, probe_fraction=0.0)
    assert retry.grant == replace(raised, histories={})
    assert retry.shortage.cause == "own_cap" and retry.shortage.rung is not None
    assert retry.warning == (
        "Out of memory: 2GiB were not enough; it gets 3GiB (RuntimeError: no room)"
    )


def test_a_task_run_that_was_cancelled_climbs_no_more() -> None:
    assert step(run.Cancelled(), replace(HISTORY, memory=MEMORY)) == Raise(FULL)


def test_oom_fail_ends_the_task_run_and_says_what_to_write() -> None:
    failing = replace(HISTORY, policy=GPUPolicy(oom="fail"), memory=MEMORY)
    end = step(run.OutOfMemory(FULL), failing)
    assert isinstance(end, Raise) and end.error is FULL
    assert end.note is not None and "gpu:oom=fail" in end.note
    assert end.shortage == Shortage("own_cap", 5 * GIB // 2, None)
    # A probe beside others was not given what its tag lets it fail with.
    probe = replace(MEMORY, evidence=replace(EVIDENCE, shared_probe=True))
    assert isinstance(step(run.OutOfMemory(FULL), replace(failing, memory=probe)), Retry)


def test_the_last_rung_is_the_end() -> None:
    climbed = replace(HISTORY, climb=OomHistory(processes=5), memory=MEMORY)
    end = step(run.OutOfMemory(FULL), climbed)
    assert isinstance(end, Raise) and end.note is not None and "5 processes" in end.note


@pytest.mark.parametrize("outcome", [run.Failed(FULL, "tb"), run.Died(EXIT, None)], ids=repr)
def test_a_client_of_mps_that_ended_with_a_fault_runs_once_more_outside(
    outcome: run.Failure,
) -> None:
    retry = step(outcome, replace(HISTORY, at_fault=("train", "leak")))
    assert isinstance(retry, Retry) and retry.shortage is None
    assert retry.grant == replace(GRANT, outside_mps=True)
    assert (
        "where a fault of one ends all (train, leak); it runs again, outside MPS" in retry.warning
    )
    assert step(run.Cancelled(), replace(HISTORY, at_fault=())) == Raise(FULL)
