"""Records and demand of each kind of standbys, and the choice of a standby for a task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.standby_kind import (
    FORGET_S,
    MOST_FAILURES,
    Kind,
    KindRecord,
    Stage,
    Standby,
    choose_standby,
    demands_of,
)
from prefect_gpu.processes.standby_plan import KindDemand

KIND = Kind(("ours",), ("library",), (), False, 1, 100)
OTHER = replace(KIND, libraries=("others",))


def standby(
    kind: Kind = KIND,
    modules: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    started_s: float = 0.0,
    stage: Stage = Stage.WAITING,
) -> Standby:
    spec = WarmSpec(modules or kind.modules, environment or {})
    return Standby(kind, spec, started_s, stage=stage)


@pytest.fixture
def record() -> KindRecord:
    return KindRecord(KIND, KIND.size_bytes, KIND.modules)


def demands(
    announced: Sequence[Kind], standbys: Sequence[Standby], used: Sequence[Kind] = ()
) -> list[KindDemand]:
    records = {
        k: KindRecord(k, 1, k.modules) for k in (*announced, *(s.kind for s in standbys), *used)
    }
    for number, kind in enumerate(used, 1):
        records[kind].last_used = number
    return demands_of(records, announced, standbys, 0.0)


# What is wanted.


def test_tasks_that_wait_are_served_first_and_the_last_used_kind_next() -> None:
    used = [replace(KIND, libraries=(name,)) for name in ("gone", "alive", "latest")]
    left = replace(KIND, libraries=("left",))
    found = demands([OTHER, KIND, OTHER], [standby(left), standby(used[1])], used)
    assert [d.kind for d in found] == [OTHER, KIND, used[2], used[1], left]
    assert [d.wanted for d in found] == [2, 1, 1, 0, 0]
    assert [d.spare for d in found] == [False, False, True, True, False]


def test_one_that_is_forked_is_enough_for_any_number_of_tasks() -> None:
    forked = replace(KIND, forks=True)
    (demand,) = demands([forked] * 9, [])
    assert demand.forks and demand.wanted == 1


def test_a_kind_that_is_used_again_is_the_latest() -> None:
    found = demands([], [standby(OTHER)], [KIND, OTHER, KIND])
    assert [d.kind for d in found] == [KIND, OTHER]


def test_those_that_end_do_not_count() -> None:
    stages = [Stage.WAITING, Stage.WAITING, Stage.IMPORTING, Stage.ENDING, Stage.IMPORTING]
    (demand,) = demands([], [standby(stage=stage) for stage in stages])
    assert (demand.ready, demand.importing) == (2, 2)


def test_one_takes_what_was_measured_last(record: KindRecord) -> None:
    sizes = []
    for warmed in (
        Warmed(resident_bytes=300),
        Warmed(),
        Warmed(touched="it opened a file", resident_bytes=500),
        Warmed(),
    ):
        sizes += [record.size_bytes]
        record.take_imports(warmed, KIND.modules)
    assert sizes == [100, 300, 300, 300]


# Failures.


def test_a_success_makes_failures_count_anew(record: KindRecord) -> None:
    for now_s in (1.0, 2.0, 3.0, 4.0):
        record.take_failure(standby(started_s=now_s - 0.5), now_s, "it died")
        record.take_success()
    assert not record.given_up


def test_those_that_were_started_before_a_failure_fail_for_the_same_reason(
    record: KindRecord,
) -> None:
    record.take_failure(standby(started_s=1.0), 5.0, "the disk was full")
    record.take_failure(standby(started_s=2.0), 6.0, "the disk was full")
    assert record.failures == 1


def test_a_problem_is_first_laid_to_the_libraries(
    record: KindRecord, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert record.modules == ("ours", "library")
    for _ in range(2):
        # Two were started before the first reported.
        record.take_imports(Warmed(touched="it opened a file"), ("ours", "library"))
    assert record.modules == ("ours",) and not record.given_up
    record.take_imports(Warmed(touched="it started a thread"), ("ours",))
    assert record.given_up and "it started a thread" in caplog.messages[-1]


def test_a_kind_is_left_alone_after_some_deaths_and_it_is_said_once(
    record: KindRecord, caplog: pytest.LogCaptureFixture
) -> None:
    record.last_used = 1
    for number in range(MOST_FAILURES - 1):
        record.take_failure(standby(started_s=number), number + 0.5, "it ended with 4")
    assert not record.given_up
    for now_s in (10.0, 20.0):
        record.take_failure(standby(started_s=now_s - 1), now_s, f"it ended at {now_s:g}", "oh")
    (said,) = caplog.messages
    assert "for ours, library: 3 in a row" in said and said.endswith("its stderr:\noh")
    (demand,) = demands_of({KIND: record}, [KIND], [], 0.0)
    assert "the last since it ended at 10;" in said
    assert record.given_up and not demand.wanted and not demand.spare


def test_deaths_are_forgotten_after_a_while(record: KindRecord) -> None:
    for number in range(MOST_FAILURES):
        record.take_failure(standby(started_s=number), number + 0.5, "it ended")
    record.forget(MOST_FAILURES + FORGET_S - 1.0)
    assert record.given_up
    record.forget(MOST_FAILURES + FORGET_S)
    assert not record.given_up and demands_of({KIND: record}, [KIND], [], 0.0)[0].wanted == 1
    again = standby(started_s=MOST_FAILURES + FORGET_S)
    record.take_failure(again, again.started_s + 0.5, "it ended")
    assert not record.given_up, "one death is one"


def test_imports_that_fail_are_not_tried_again(record: KindRecord) -> None:
    record.take_imports(Warmed(failed=("library",)), KIND.always)
    record.forget(1e9)
    assert record.given_up


# Which standby a task gets.


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(standby(), standby(stage=Stage.IMPORTING), id="one that is ready"),
        pytest.param(standby(), standby(modules=("ours",)), id="one that has imported more"),
        pytest.param(standby(), standby(started_s=1.0), id="one that has waited longer"),
    ],
)
def test_the_standby_that_is_further_along_is_taken(better: Standby, worse: Standby) -> None:
    for standbys in ([better, worse], [worse, better]):
        assert choose_standby(standbys, KIND, {}) == ((better, {}), [])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(standby(stage=Stage.ENDING), id="one that ends"),
        pytest.param(standby(modules=("ours", "library", "more")), id="one that imported more"),
        pytest.param(standby(replace(KIND, always=("others",))), id="one of another framework"),
    ],
)
def test_a_task_does_not_get(other: Standby) -> None:
    assert choose_standby([other], KIND, {}) == (None, [])


def test_of_those_that_suit_no_more_the_kinds_own_are_named() -> None:
    own = standby(environment={"LANG": "C"})
    others = standby(replace(KIND, libraries=()), ("ours",), {"LANG": "C"})
    good = standby()
    assert choose_standby([own, others, good], KIND, {}) == ((good, {}), [own])


def test_what_may_still_change_is_changed() -> None:
    waits = standby(environment={"PREFECT_A": "1", "PREFECT_B": "2"})
    changes = {"PREFECT_A": "3", "PREFECT_B": None}
    assert choose_standby([waits], KIND, {"PREFECT_A": "3"}) == ((waits, changes), [])


@pytest.mark.parametrize(
    ("standbys", "tasks", "suits"),
    [
        pytest.param(False, False, True, id="both computed"),
        pytest.param(True, False, False, id="stated as it was made"),
        pytest.param(False, True, False, id="stated by the task"),
    ],
)
def test_a_stated_number_of_threads_cannot_be_set_late(
    standbys: bool, tasks: bool, suits: bool
) -> None:
    waits = standby(replace(KIND, cpus_stated=standbys), environment={"OMP_NUM_THREADS": "2"})
    best, _ = choose_standby([waits], replace(KIND, cpus_stated=tasks), {"OMP_NUM_THREADS": "4"})
    assert (best is not None) == suits
