"""Faults at random moments, from a seed; see `tests.chaos`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos import plan
from tests.chaos.checks import (
    IDLE_S,
    FlowRecord,
    Verdict,
    check_bodies,
    check_flows,
    check_idle,
    check_states_of_killed,
    check_values,
    read_flow,
    watch_capacity,
)
from tests.chaos.faults import Note

#: Seconds for two minutes of faults, the end of what was submitted, and the checks.
LIMIT_S = 1500


def test_a_seed_has_one_plan() -> None:
    def whole(seed: int) -> tuple[list[plan.Job], list[plan.Fault]]:
        return list(plan.jobs(seed, 3, 50, 2)), list(islice(plan.faults(seed), 50))

    assert whole(1) == whole(1)
    assert whole(1) != whole(2)


@pytest.mark.parametrize(
    ("words", "killed_s", "passes"),
    [
        ("begin:1 end:1", None, True),
        ("begin:1 raise:1 begin:1 end:1", None, True),
        ("begin:1 raise:1 begin:2 end:2", None, True),
        ("begin:1 end:1 begin:1 end:1", None, False),
        ("begin:1 end:1 begin:2 end:2", None, False),
        ("begin:1 begin:1 end:1", None, False),
        ("begin:1", None, False),
        # The process was killed after the body's end, which is the second note, and before its value arrived.
        ("begin:1 end:1 begin:2 end:2", 1.5, True),
        ("begin:1 end:1 begin:1 end:1", 1.5, False),
        # It was another process of that number.
        ("begin:1 end:1 begin:2 end:2", 0.5, False),
        ("begin:1 end:1 begin:2 end:2", 2.5, False),
    ],
)
def test_a_body_that_ran_again_or_did_not_end_is_found(
    words: str, killed_s: float | None, passes: bool
) -> None:
    notes = [
        Note(word[:-2], "0.1", int(word[-1]), 7, float(at)) for at, word in enumerate(words.split())
    ]
    kills = {} if killed_s is None else {7: [killed_s]}
    verdict = Verdict()
    flow = FlowRecord(0, outcomes={"0.1": {"key": "0.1", "state": "COMPLETED", "value": "right"}})
    check_bodies(verdict, [flow], notes, kills)
    assert verdict.passed == passes


def test_a_wrong_value_is_found() -> None:
    (job,) = plan.jobs(1, 0, 1, 2)
    for value, passes in (("right", True), ("wrong", False)):
        outcome = {"key": job.key, "state": "COMPLETED", "value": value}
        verdict = Verdict()
        check_values(verdict, [FlowRecord(0, outcomes={job.key: outcome})], {job.key: job}, 0)
        assert verdict.passed == passes


@pytest.mark.parametrize(
    ("failed", "outages", "passes"),
    [
        ("httpx.ConnectError: [Errno 111] Connection refused", 1, True),
        ("httpx.ConnectError: [Errno 111] Connection refused", 0, False),
        ("builtins.RuntimeError: Failed to reach API at http://127.0.0.1:4200/api/", 1, True),
        ("builtins.RuntimeError: Failed to reach API at http://127.0.0.1:4200/api/", 0, False),
        ("builtins.RuntimeError: no process can be started", 1, False),
        ("builtins.ValueError: Failed to reach API at http://127.0.0.1:4200/api/", 1, False),
    ],
)
def test_a_flow_may_end_with_an_error_only_by_the_absence_of_the_api(
    failed: str, outages: int, passes: bool
) -> None:
    verdict = Verdict()
    check_flows(verdict, [FlowRecord(0, failed=failed)], outages)
    assert verdict.passed == passes


@pytest.mark.parametrize(
    ("seen", "states", "passes"),
    [
        ("COMPLETED", ["PENDING", "RUNNING", "COMPLETED"], True),
        ("COMPLETED", ["PENDING", "RUNNING"], True),
        ("COMPLETED", [], True),
        ("COMPLETED", ["RUNNING", "FAILED"], False),
        ("COMPLETED", ["COMPLETED", "CRASHED"], False),
        ("", ["RUNNING", "CRASHED"], True),
        ("", ["COMPLETED", "CRASHED"], False),
    ],
)
def test_a_task_run_of_a_killed_flow_has_one_final_state_or_none(
    seen: str, states: list[str], passes: bool
) -> None:
    outcomes = {"0.1": {"key": "0.1", "state": seen}} if seen else {}
    flow = FlowRecord(0, submitted={"0.1": "a"}, outcomes=outcomes)
    verdict = Verdict()
    check_states_of_killed(verdict, [flow], {"a": states})
    assert verdict.passed == passes


def test_what_a_killed_flow_wrote_is_read_up_to_the_line_that_it_did_not_finish(
    tmp_path: Path,
) -> None:
    assert read_flow(tmp_path, 0) == FlowRecord(0)
    text = '{"submitted": "0.1", "task_run": "a", "at_s": 3.5}\n{"submitted": "0.2", "ta'
    (tmp_path / "flow-0.jsonl").write_text(text, encoding="utf-8")
    assert read_flow(tmp_path, 0) == FlowRecord(0, words_s=[3.5], submitted={"0.1": "a"})


@pytest.mark.parametrize(
    ("words_s", "bodies_s", "passes"),
    [
        ([], [], False),
        ([0.1], [], False),
        ([0.9], [0.1], True),
        ([0.5], [], True),
        ([0.1, 1.3], [0.6], True),
    ],
)
def test_a_flow_that_does_nothing_for_long_is_found(
    words_s: list[float], bodies_s: list[float], passes: bool
) -> None:
    # In units of the limit, from the start of the flow to its end at 1.4.
    flow = FlowRecord(1, 0.0, 1.4 * IDLE_S, [at * IDLE_S for at in words_s])
    notes = [Note("begin", "1.7", 1, 9, at * IDLE_S) for at in bodies_s]
    others = [Note("begin", "11.7", 1, 9, 0.7 * IDLE_S)]
    verdict = Verdict()
    check_idle(verdict, [flow], [*notes, *others])
    assert verdict.passed == passes


def test_a_promise_above_capacity_is_found_after_the_log_has_lost_it(tmp_path: Path) -> None:
    entry = {"reservations": [{"device_uuid": "GPU-1", "reserved_bytes": 2 * plan.GIB}]}
    look = watch_capacity(tmp_path, plan.GIB)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        database.execute("CREATE TABLE log (number INTEGER, at_s, owner, request, entry)")
        database.execute("INSERT INTO log VALUES (1, 0.0, 'a', 'r', ?)", (json.dumps(entry),))
        database.commit()
        with pytest.raises(AssertionError, match="GPU-1"):
            look()
        database.execute("DELETE FROM log")
        database.commit()
        with pytest.raises(AssertionError, match="GPU-1"):
            look()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
def test_flows_end_well_under_two_minutes_of_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", "tests.chaos", "--seed", "173", "--seconds", "120", "--keep", str(tmp_path)]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        # If it hangs: it ends what it has started.
        process.terminate()
        process.wait()
    with capsys.disabled():
        print(f"\n{output}")
    assert process.returncode == 0
