"""Promises, written only on the version that they were decided on."""

from __future__ import annotations

from prefect_gpu.ledger import ProcessLedger
from tests.unit.scheduling.values import promise


def test_promises_are_written_on_the_version_that_stands() -> None:
    ledger = ProcessLedger()
    before = ledger.view()
    first, second = promise(0, by="a"), promise(1, by="a")
    assert ledger.try_reserve(before.version, [first, second])
    assert ledger.view().reservations == (first, second)
    assert not ledger.try_reserve(before.version, [promise(by="b")])
    assert ledger.view().reservations == (first, second)
    assert ledger.try_reserve(ledger.view().version, [promise(2, by="a")])
    assert len(ledger.view().reservations) == 3


def test_a_view_is_one_moment() -> None:
    ledger = ProcessLedger()
    before = ledger.view()
    assert ledger.view() is before
    ledger.try_reserve(before.version, [promise(by="a")])
    assert before.reservations == ()
    assert ledger.view() != before


def test_a_release_tells_the_watchers_once() -> None:
    ledger, told = ProcessLedger(), list[str]()
    end = ledger.watch(lambda: told.append("one"))
    ledger.watch(lambda: told.append("two"))
    ledger.try_reserve(0, [promise(by="a")])
    assert told == []
    version = ledger.view().version
    ledger.release("a")
    assert (told, ledger.view().reservations) == (["one", "two"], ())
    assert ledger.view().version > version, "a decision made before the release is made again"
    ledger.release("a")
    ledger.release("unknown")
    end()
    end()
    ledger.try_reserve(ledger.view().version, [promise(by="b")])
    ledger.release("b")
    assert told == ["one", "two", "two"]


def test_processes_are_named_as_long_as_they_hold_something() -> None:
    ledger = ProcessLedger()
    ledger.attach("a", 1)
    assert ledger.view().processes == {}
    ledger.try_reserve(0, [promise(by="a")])
    version = ledger.view().version
    ledger.attach("a", 1)
    ledger.attach("a", 2)
    assert ledger.view().processes == {2: "a"}
    assert ledger.view().version == version, "it changes no promise"
    ledger.release("a")
    assert ledger.view().processes == {}


def test_one_promise_takes_the_place_of_another_in_one_step_and_nobody_is_told() -> None:
    ledger, told = ProcessLedger(), list[str]()
    ledger.watch(lambda: told.append("one"))
    ledger.try_reserve(0, [promise(by="standby")])
    ledger.attach("standby", 1)
    before = ledger.view()
    assert not ledger.try_reserve(0, [promise(by="a")], ["standby"])
    assert ledger.view() == before, "all or nothing"
    assert ledger.try_reserve(before.version, [promise(by="a")], ["standby", "unknown"])
    view = ledger.view()
    assert [r.request_id for r in view.reservations] == ["a"] and view.processes == {}
    assert told == []


def test_whoever_holds_what_may_be_taken_back_is_asked_as_long_as_he_holds_it() -> None:
    ledger, asked = ProcessLedger(), list[str]()
    ledger.lend("standby", lambda: asked.append("too early"))
    ledger.reclaim("standby")
    ledger.try_reserve(0, [promise(by="standby")])
    ledger.reclaim("standby")
    ledger.lend("standby", lambda: asked.append("standby"))
    ledger.reclaim("standby")
    assert asked == ["standby"]
    assert len(ledger.view().reservations) == 1, "it is released once its memory is back"
    ledger.release("standby")
    ledger.reclaim("standby")
    assert asked == ["standby"]


def test_nothing_outlives_its_only_owner() -> None:
    ProcessLedger().renew(1, 2.0)
