"""What the pool of standbys learns of each kind, and what it wants of them for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.standby_kind import (
    MOST_FAILURES,
    RETRY_S,
    SIMULATED,
    Backoff,
    Kind,
    KindRecord,
    Kinds,
    LentDevice,
    Stage,
    Standby,
)

KIND = Kind(("ours",), ("users",), (), False, 1, 100, SIMULATED)
OTHER = replace(KIND, users=("others",))


@dataclass(frozen=True)
class Broker:
    """Is never asked for a device."""

    count: int = 1

    @property
    def devices(self) -> tuple[object, ...]:
        return (SimpleNamespace(),) * self.count


def standby(kind: Kind = KIND, started_s: float = 0.0, **state: Any) -> Standby:
    spec = WarmSpec(kind.modules, {}, "", (), ())
    return Standby(kind, spec, (), started_s, **{"stage": Stage.WAITING, **state})


@pytest.fixture
def kinds() -> Kinds:
    return Kinds()


@pytest.fixture
def record(kinds: Kinds) -> KindRecord:
    return kinds.of(KIND)


# What is wanted.


def test_tasks_that_wait_are_served_first_and_the_last_used_kind_next(kinds: Kinds) -> None:
    used = [replace(KIND, users=(name,)) for name in ("gone", "alive", "latest")]
    for kind in used:
        kinds.use(kind)
    left = replace(KIND, users=("left",))
    demands = kinds.demands([OTHER, KIND, OTHER], [standby(left), standby(used[1])])
    assert [d.kind for d in demands] == [OTHER, KIND, used[2], used[1], left]
    assert [d.waiting for d in demands] == [2, 1, 0, 0, 0]
    assert [d.latest for d in demands] == [False, False, True, False, False]
    assert [d.used for d in demands] == [False, False, True, True, False]


def test_a_kind_that_is_used_again_is_the_latest(kinds: Kinds) -> None:
    for kind in (KIND, OTHER, KIND):
        kinds.use(kind)
    assert [d.kind for d in kinds.demands([], [standby(OTHER)])] == [KIND, OTHER]


def test_those_that_end_do_not_count(kinds: Kinds) -> None:
    stages = [Stage.WAITING, Stage.HOT, Stage.IMPORTING, Stage.ENDING, Stage.IMPORTING]
    (demand,) = kinds.demands([], [standby(stage=stage) for stage in stages])
    assert (demand.ready, demand.importing) == (2, 2)


def test_none_of_a_kind_may_start_while_a_task_of_it_begins(kinds: Kinds) -> None:
    demands = kinds.demands([KIND, OTHER], [], [KIND])
    assert [d.may_start for d in demands] == [False, True]
    assert all(d.useful for d in demands), "those that there are stay"


def test_one_takes_what_was_measured_last(kinds: Kinds, record: KindRecord) -> None:
    sizes = []
    for warmed in (
        Warmed(resident_bytes=300),
        Warmed(),
        Warmed(touched="it opened a file", resident_bytes=500),
        Warmed(),
    ):
        sizes += [d.size_bytes for d in kinds.demands([KIND], [])]
        record.take_imports(warmed, KIND.modules)
    assert sizes == [100, 300, 300, 300]


# Failures.


def test_what_fails_is_tried_again_at_once_then_after_a_while_then_not_at_all() -> None:
    backoff, tries = Backoff(), []
    for now_s in (1.0, 2.0, 10.0):
        assert backoff.fail(now_s - 0.5, now_s, "it died")
        tries.append([backoff.allows(now_s), backoff.allows(now_s + RETRY_S), backoff.given_up])
    assert tries == [[True, True, ""], [False, True, ""], [False, False, "it died"]]


def test_a_success_makes_failures_count_anew() -> None:
    backoff = Backoff()
    for now_s in (1.0, 2.0, 3.0, 4.0):
        backoff.fail(now_s - 0.5, now_s, "it died")
        backoff.succeed()
    assert backoff.allows(4.0)


def test_those_that_were_started_before_a_failure_fail_for_the_same_reason() -> None:
    backoff = Backoff()
    assert backoff.fail(started_s=1.0, now_s=5.0, why="a module was edited")
    assert not backoff.fail(started_s=2.0, now_s=6.0, why="a module was edited")
    assert backoff.failures == 1


def test_a_problem_is_first_laid_to_the_users_modules(record: KindRecord) -> None:
    assert record.modules == ("ours", "users")
    for _ in range(2):
        # Two were started before the first reported.
        record.take_imports(Warmed(touched="it opened a file"), ("ours", "users"))
    assert record.modules == ("ours",) and not record.starts.given_up
    record.take_imports(Warmed(touched="it started a thread"), ("ours",))
    assert "it started a thread" in record.starts.given_up


def test_a_kind_is_left_alone_after_some_deaths_and_it_is_said_once(
    kinds: Kinds, record: KindRecord, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MOST_FAILURES - 1):
        record.take_death(standby(started_s=number), number + 0.5, "it ended with 4")
    assert not record.starts.given_up
    for now_s in (10.0, 20.0):
        record.take_death(standby(started_s=now_s - 1), now_s, f"it ended at {now_s:g}", "oh")
    (said,) = caplog.messages
    assert "for ours, users: 3 in a row" in said and said.endswith("its stderr:\noh")
    (demand,) = kinds.demands([KIND], [])
    assert record.starts.given_up == "it ended at 10" and not demand.useful


def test_a_kind_is_left_alone_after_some_that_did_not_suit(record: KindRecord) -> None:
    for number in range(MOST_FAILURES):
        assert not record.starts.given_up
        record.take_misfit(standby(started_s=number), number + 0.5)
    assert "environment" in record.starts.given_up


# Which start their framework on a device.


@pytest.mark.parametrize("stage", Stage)
def test_one_that_waits_and_has_asked_for_no_device_starts_on_one(
    kinds: Kinds, record: KindRecord, stage: Stage
) -> None:
    record.broker = broker = Broker()  # type: ignore[assignment]
    record.take_failed_start("GPU-1", "it hung")
    waits = standby(stage=stage)
    chosen = [(waits, broker, frozenset({"GPU-1"}))] if stage is Stage.WAITING else []
    assert kinds.choose_to_start([waits, standby(OTHER)], 0.0) == chosen


def test_with_several_devices_the_first_of_a_kind_is_kept_from_them(
    kinds: Kinds, record: KindRecord
) -> None:
    record.broker = Broker(2)  # type: ignore[assignment]
    assert kinds.demands([KIND], [])[0].spare == 1
    waiting = [standby(stage=Stage.HOT), standby(), standby(), standby()]
    assert [s for s, _, _ in kinds.choose_to_start(waiting, 0.0)] == waiting[2:]


def test_no_device_is_asked_for_where_hot_ones_never_suit(kinds: Kinds, record: KindRecord) -> None:
    record.broker = Broker()  # type: ignore[assignment]
    for number in range(MOST_FAILURES):
        assert kinds.choose_to_start([standby()], number + RETRY_S)
        hot = standby(started_s=number, lent=LentDevice("GPU-1", {}))
        record.take_misfit(hot, number + 0.5)
    assert kinds.choose_to_start([standby()], 99.0) == []
    assert not record.starts.given_up, "standbys that only import go on"


def test_a_device_where_a_framework_does_not_start_is_said_once(
    record: KindRecord, caplog: pytest.LogCaptureFixture
) -> None:
    for uuid in ("GPU-1", "GPU-1", "GPU-2"):
        record.take_failed_start(uuid, "it hung")
    assert [m.split(" ahead")[0].split("device ")[1] for m in caplog.messages] == ["GPU-1", "GPU-2"]


def test_devices_of_a_runner_that_has_ended_are_not_asked_for(kinds: Kinds) -> None:
    kinds.of(KIND).broker, kinds.of(OTHER).broker = Broker(1), Broker(2)  # type: ignore[assignment]
    kinds.keep_brokers([Broker(2)])  # type: ignore[list-item]
    assert kinds.of(KIND).broker is None and kinds.of(OTHER).broker == Broker(2)


def test_nothing_is_held_against_a_kind_once_all_is_forgotten(
    kinds: Kinds, record: KindRecord
) -> None:
    kinds.use(KIND)
    record.starts.given_up = "it died"
    kinds.forget()
    assert kinds.demands([], []) == [] and not kinds.of(KIND).starts.given_up
