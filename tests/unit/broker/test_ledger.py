"""Reservations, written only on the version that they were decided on."""

from __future__ import annotations

import pytest

from prefect_gpu.broker.ledger import LedgerView, ProcessLedger
from prefect_gpu.scheduling.model import Reservation
from tests.unit.scheduling.values import reserved
from tests.unit.test_process_resources import in_fork


def all_of(view: LedgerView) -> tuple[Reservation, ...]:
    return tuple(r for group in view.by_device.values() for r in group)


def test_reservations_are_written_only_on_the_current_version() -> None:
    ledger = ProcessLedger()
    before = ledger.view()
    first, second = reserved(0, by="a"), reserved(1, by="a")
    assert ledger.try_reserve(before.version, [first, second])
    assert all_of(ledger.view()) == (first, second)
    assert not ledger.try_reserve(before.version, [reserved(by="b")])
    assert all_of(ledger.view()) == (first, second)
    assert ledger.try_reserve(ledger.view().version, [reserved(2, by="a")])
    assert len(all_of(ledger.view())) == 3


def test_a_view_is_one_moment() -> None:
    ledger = ProcessLedger()
    before = ledger.view()
    assert ledger.view() is before
    ledger.try_reserve(before.version, [reserved(by="a")])
    assert all_of(before) == ()
    assert ledger.view() != before


def test_a_release_calls_each_watcher_once() -> None:
    ledger, told = ProcessLedger(), list[str]()
    ledger.watch(lambda: told.append("one"))
    ledger.watch(lambda: told.append("two"))
    ledger.try_reserve(0, [reserved(by="a")])
    assert told == []
    version = ledger.view().version
    ledger.release("a")
    assert (told, all_of(ledger.view())) == (["one", "two"], ())
    assert ledger.view().version > version, "a decision made before the release is made again"
    ledger.release("a")
    ledger.release("unknown")
    assert told == ["one", "two"]


def test_processes_are_named_as_long_as_they_hold_something() -> None:
    ledger = ProcessLedger()
    ledger.attach("a", 1)
    assert ledger.view().processes == {}
    ledger.try_reserve(0, [reserved(by="a")])
    version = ledger.view().version
    ledger.attach("a", 1)
    ledger.attach("a", 2)
    assert ledger.view().processes == {"a": 2}
    assert ledger.view().version == version, "it changes no reservation"
    ledger.release("a")
    assert ledger.view().processes == {}


def test_one_reservation_replaces_another_in_one_step_without_a_call_of_the_watchers() -> None:
    ledger, told = ProcessLedger(), list[str]()
    ledger.watch(lambda: told.append("one"))
    ledger.try_reserve(0, [reserved(by="standby")])
    ledger.attach("standby", 1)
    before = ledger.view()
    assert not ledger.try_reserve(0, [reserved(by="a")], ["standby"])
    assert ledger.view() == before, "all or nothing"
    assert ledger.try_reserve(before.version, [reserved(by="a")], ["standby", "unknown"])
    view = ledger.view()
    assert [r.request_id for r in all_of(view)] == ["a"] and view.processes == {}
    assert told == []


def test_a_hot_standby_is_asked_to_give_up_for_as_long_as_it_has_a_reservation() -> None:
    ledger, asked = ProcessLedger(), list[str]()
    ledger.lend("standby", lambda: asked.append("too early"))
    ledger.reclaim("standby")
    ledger.try_reserve(0, [reserved(by="standby")])
    ledger.reclaim("standby")
    ledger.lend("standby", lambda: asked.append("standby"))
    ledger.reclaim("standby")
    assert asked == ["standby"]
    assert len(all_of(ledger.view())) == 1, "it is released once its memory is back"
    ledger.release("standby")
    ledger.reclaim("standby")
    assert asked == ["standby"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_process_begins_with_an_empty_ledger() -> None:
    ledger = ProcessLedger()
    ledger.try_reserve(0, [reserved(by="a")])
    assert in_fork(lambda: all_of(ledger.view()) == ())
    assert len(all_of(ledger.view())) == 1
