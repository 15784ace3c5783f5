"""What the pool of standbys learns of each kind, and what it wants of them for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.standby_kind import (
    FORGET_S,
    MOST_FAILURES,
    SIMULATED,
    Kind,
    KindRecord,
    Stage,
    Standby,
    choose_to_start,
    demands_of,
)
from prefect_gpu.scheduling.model import Device
from prefect_gpu.scheduling.standbys import KindDemand

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
    return Standby(kind, spec, started_s, **{"stage": Stage.WAITING, **state})


GPU = Device("GPU-1", 0, "a device", 1, "nvml", "here")


@pytest.fixture
def record() -> KindRecord:
    return KindRecord(KIND, KIND.size_bytes)


def demands(
    announced: Sequence[Kind], standbys: Sequence[Standby], used: Sequence[Kind] = ()
) -> list[KindDemand]:
    records = {k: KindRecord(k, 1) for k in (*announced, *(s.kind for s in standbys), *used)}
    for number, kind in enumerate(used, 1):
        records[kind].last_used = number
    return demands_of(records, announced, standbys)


# What is wanted.


def test_tasks_that_wait_are_served_first_and_the_last_used_kind_next() -> None:
    used = [replace(KIND, users=(name,)) for name in ("gone", "alive", "latest")]
    left = replace(KIND, users=("left",))
    found = demands([OTHER, KIND, OTHER], [standby(left), standby(used[1])], used)
    assert [d.kind for d in found] == [OTHER, KIND, used[2], used[1], left]
    assert [d.waiting for d in found] == [2, 1, 0, 0, 0]
    assert [d.latest for d in found] == [False, False, True, False, False]
    assert [d.used for d in found] == [False, False, True, True, False]


def test_a_kind_that_is_used_again_is_the_latest() -> None:
    found = demands([], [standby(OTHER)], [KIND, OTHER, KIND])
    assert [d.kind for d in found] == [KIND, OTHER]


def test_those_that_end_do_not_count() -> None:
    stages = [Stage.WAITING, Stage.HOT, Stage.IMPORTING, Stage.ENDING, Stage.IMPORTING]
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
        record.take_success(standby())
    assert not record.given_up


def test_those_that_were_started_before_a_failure_fail_for_the_same_reason(
    record: KindRecord,
) -> None:
    assert record.take_failure(standby(started_s=1.0), 5.0, "a module was edited")
    assert not record.take_failure(standby(started_s=2.0), 6.0, "a module was edited")
    assert record.failures == 1


def test_a_problem_is_first_laid_to_the_users_modules(record: KindRecord) -> None:
    assert record.modules == ("ours", "users")
    for _ in range(2):
        # Two were started before the first reported.
        record.take_imports(Warmed(touched="it opened a file"), ("ours", "users"))
    assert record.modules == ("ours",) and not record.given_up
    record.take_imports(Warmed(touched="it started a thread"), ("ours",))
    assert "it started a thread" in record.given_up


def test_a_kind_is_left_alone_after_some_deaths_and_it_is_said_once(
    record: KindRecord, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MOST_FAILURES - 1):
        record.take_failure(standby(started_s=number), number + 0.5, "it ended with 4")
    assert not record.given_up
    for now_s in (10.0, 20.0):
        record.take_failure(standby(started_s=now_s - 1), now_s, f"it ended at {now_s:g}", "oh")
    (said,) = caplog.messages
    assert "for ours, users: 3 in a row" in said and said.endswith("its stderr:\noh")
    (demand,) = demands_of({KIND: record}, [KIND], [])
    assert record.given_up == "it ended at 10" and not demand.useful


def test_a_kind_is_left_alone_after_some_that_did_not_suit(record: KindRecord) -> None:
    for number in range(MOST_FAILURES):
        assert not record.given_up
        record.take_misfit(standby(started_s=number), number + 0.5)
    assert "environment" in record.given_up


def test_deaths_are_forgotten_after_a_while(record: KindRecord) -> None:
    for number in range(MOST_FAILURES):
        record.take_failure(standby(started_s=number), number + 0.5, "it ended")
    record.forget(MOST_FAILURES + FORGET_S - 1.0)
    assert record.given_up
    record.forget(MOST_FAILURES + FORGET_S)
    assert not record.given_up and demands_of({KIND: record}, [KIND], [])[0].useful
    again = standby(started_s=MOST_FAILURES + FORGET_S)
    record.take_failure(again, again.started_s + 0.5, "it ended")
    assert not record.given_up, "one death is one"


def test_imports_that_fail_are_not_tried_again(record: KindRecord) -> None:
    record.take_imports(Warmed(failed=("users",)), KIND.without_users().modules)
    record.forget(1e9)
    assert record.given_up


# Which start their framework on a device.


@pytest.mark.parametrize("stage", Stage)
def test_one_that_waits_and_has_asked_for_no_device_starts_on_one(
    record: KindRecord, stage: Stage
) -> None:
    record.broker = Broker()  # type: ignore[assignment]
    waits = standby(stage=stage)
    records = {KIND: record, OTHER: KindRecord(OTHER, 1)}
    chosen = [waits] if stage is Stage.WAITING else []
    assert choose_to_start(records, [waits, standby(OTHER)], 0.0) == chosen


def test_with_several_devices_the_first_of_a_kind_is_kept_from_them(record: KindRecord) -> None:
    record.broker = Broker(2)  # type: ignore[assignment]
    assert demands_of({KIND: record}, [KIND], [])[0].spare == 1
    waiting = [standby(stage=Stage.HOT), standby(), standby(), standby()]
    assert choose_to_start({KIND: record}, waiting, 0.0) == waiting[2:]


def test_no_device_is_asked_for_where_hot_ones_never_suit(record: KindRecord) -> None:
    record.broker = Broker()  # type: ignore[assignment]
    for number in range(MOST_FAILURES):
        assert choose_to_start({KIND: record}, [standby()], number)
        record.take_misfit(standby(started_s=number, device=GPU), number + 0.5)
    assert choose_to_start({KIND: record}, [standby()], 99.0) == []
    assert not record.given_up, "standbys that only import go on"


def test_hot_ones_that_were_started_before_one_did_not_suit_count_once(record: KindRecord) -> None:
    record.broker = Broker()  # type: ignore[assignment]
    for number in range(MOST_FAILURES):
        record.take_misfit(standby(started_s=number, device=GPU), 9.0)
    assert choose_to_start({KIND: record}, [standby()], 99.0)


def test_a_device_where_a_framework_does_not_start_is_said_once(
    record: KindRecord, caplog: pytest.LogCaptureFixture
) -> None:
    for uuid in ("GPU-1", "GPU-1", "GPU-2"):
        record.take_failed_start(uuid, "it hung")
    assert [m.split(" ahead")[0].split("device ")[1] for m in caplog.messages] == ["GPU-1", "GPU-2"]
