"""The order of `submit`, and one first run at a time for each history, at a broker."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.futures import PrefectConcurrentFuture, PrefectFlowRunFuture

from prefect_gpu.broker.broker import NeedLearned, Ticket
from prefect_gpu.broker.opening import PATIENCE_S
from prefect_gpu.broker.phases import Phase
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import DeviceError, PlacementTimeoutError
from prefect_gpu.runner.engine_threads import MOST_INPUTS, when_there
from prefect_gpu.scheduling.model import NEVER_BYTES, ModelBudgets
from prefect_gpu.scheduling.probes import FIRST_S
from tests.unit.broker.broker_rig import Rig, Waiter, histories_of, indices
from tests.unit.broker.broker_rig import rig as rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig
from tests.unit.broker.test_leaving_probes import FirstRun

READY = False
WAITS = True


def opened(rig: Rig, *tasks: bool, first: int = 1) -> None:
    """Submit task runs 1, 2, 3 …, whose inputs are `READY`, or are waited for."""
    for sequence, waits in enumerate(tasks, start=first):
        rig.broker.places.expect(sequence)
        if not waits:
            rig.broker.places.open(sequence)


def ask(rig: Rig, sequence: int) -> Ticket:
    return rig.submit(f"task {sequence}", 1, sequence=sequence)


def placed(rig: Rig, *tickets: Ticket) -> list[bool]:
    rig.broker.look()
    return [ticket.placement is not None for ticket in tickets]


# The order of `submit`.


def test_those_whose_threads_are_faster_wait_for_those_that_were_submitted_before(rig: Rig) -> None:
    opened(rig, READY, READY, READY)
    third, second = ask(rig, 3), ask(rig, 2)
    assert placed(rig, second, third) == [False, False]
    assert rig.why(second) == "earlier task runs to ask for their devices"
    assert placed(rig, ask(rig, 1), second, third) == [True, True, True]


def test_the_first_of_those_that_ask_too_early_has_the_device(rig: Rig) -> None:
    opened(rig, READY, READY)
    second = rig.submit("second", 20, sequence=2)
    rig.broker.look()
    first = rig.submit("first", 20, sequence=1)
    assert placed(rig, first, second) == [True, False]


@pytest.mark.parametrize("asks", [False, True], ids=["ends", "asks and is withdrawn"])
def test_one_that_ends_without_a_process_holds_up_none(rig: Rig, asks: bool) -> None:
    opened(rig, READY, READY)
    second = ask(rig, 2)
    assert placed(rig, second) == [False]
    if asks:
        rig.broker.withdraw(ask(rig, 1))
    else:
        rig.broker.places.leave(1)
        rig.broker.places.leave(1)
    assert placed(rig, second) == [True]
    assert not rig.machines[0].known.to_come


def test_one_that_waits_for_its_inputs_is_passed_and_is_in_front_once_it_has_them(rig: Rig) -> None:
    future: Future[int] = Future()
    upstream = PrefectConcurrentFuture(UUID(int=1), future)
    for sequence, inputs in (
        (1, ([upstream], {})),
        (2, (None, {})),
        (3, (None, {"a": [upstream]})),
    ):
        rig.broker.places.expect(sequence)
        when_there(inputs, partial(rig.broker.places.open, sequence))
    assert placed(rig, ask(rig, 2)) == [True]
    future.set_result(1)
    third = ask(rig, 3)
    assert placed(rig, third) == [False]
    assert placed(rig, ask(rig, 1), third) == [True, True]


def test_those_that_do_not_come_are_passed_after_a_while_and_hold_up_none_from_then_on(
    rig: Rig,
) -> None:
    opened(rig, READY, READY, READY)
    third, second = ask(rig, 3), ask(rig, 2)
    assert placed(rig, second) == [False]
    rig.clock.advance(PATIENCE_S)
    # A later one is as patient with one that waits itself.
    assert placed(rig, second, third) == [True, True]
    assert placed(rig, ask(rig, 1)) == [True]


def test_all_that_do_not_come_are_passed_at_once(rig: Rig) -> None:
    opened(rig, *[READY] * 10)
    even = [ask(rig, sequence) for sequence in (2, 4, 6)]
    assert placed(rig, *even) == [False] * 3
    rig.clock.advance(PATIENCE_S / 2)
    late = ask(rig, 10)
    assert placed(rig, *even, late) == [False] * 4
    rig.clock.advance(PATIENCE_S / 2)
    # The last one's own wait for 7, 8 and 9 began later.
    assert placed(rig, *even, late) == [True] * 3 + [False]
    assert rig.machines[0].known.to_come == [7, 8, 9]
    assert [rig.why(late)] == ["earlier task runs to ask for their devices"]
    rig.clock.advance(PATIENCE_S / 2)
    assert placed(rig, late) == [True]
    assert not rig.machines[0].known.held


def test_patience_begins_again_for_those_that_come_later(rig: Rig) -> None:
    opened(rig, READY, READY)
    second = ask(rig, 2)
    rig.broker.look()
    rig.broker.places.leave(1)
    assert placed(rig, second) == [True] and not rig.machines[0].known.held
    rig.clock.advance(PATIENCE_S)
    opened(rig, READY, READY, first=3)
    assert placed(rig, ask(rig, 4)) == [False]


def test_one_whose_inputs_are_there_too_late_has_no_place(rig: Rig) -> None:
    opened(rig, WAITS, WAITS, READY)
    first = ask(rig, 1)
    rig.broker.places.leave(2)
    for sequence in (1, 2):
        rig.broker.places.open(sequence)
    assert placed(rig, first, ask(rig, 3)) == [True, True]
    assert not rig.machines[0].known.to_come


def test_inputs_are_searched_for_futures_up_to_a_number() -> None:
    upstream = PrefectConcurrentFuture(UUID(int=1), Future())
    called: list[str] = []
    when_there((None, {"a": [upstream]}), lambda: called.append("never"))
    when_there((None, {"a": [*range(MOST_INPUTS), upstream]}), lambda: called.append("not found"))
    when_there(([PrefectFlowRunFuture(UUID(int=2))], {}), lambda: called.append("another's"))
    assert called == ["not found"]


def test_a_thread_passes_those_that_do_not_come(thread_rig: Rig) -> None:
    opened(thread_rig, READY, READY)
    second = ask(thread_rig, 2)
    while thread_rig.clock.waits.get(timeout=DEADLOCK_S)[1] != PATIENCE_S:
        pass
    thread_rig.clock.advance(PATIENCE_S)
    thread_rig.decided(second)


def test_lost_devices_refuse_those_that_wait_for_their_turn(rig: Rig) -> None:
    opened(rig, READY, READY)
    second = ask(rig, 2)
    rig.broker.look()
    rig.broker.give_up("gone")
    rig.decided(second)
    assert isinstance(second.error, DeviceError)


# First runs.


def first_run(rig: Rig, name: str = "a", **others: object) -> Ticket:
    """Ask for the first run of a task, which has a device to itself unless `others` has a `probe_fraction`."""
    return rig.submit(name, **{"histories": histories_of(rig.reader, name), **others})


def end(rig: Rig, ticket: Ticket, need: float | None = None, over: bool = True) -> None:
    """End the process of a first run, which shows its need, or nothing."""
    rig.exit(ticket)
    rig.broker.look()
    key = ticket.histories[ticket.devices[0].name]
    shown = {} if need is None else {key: int(need * 2**30)}
    rig.broker.kept(ticket.request.sequence, over, shown)
    rig.broker.look()


def test_others_wait_until_what_a_first_run_has_shown_is_kept() -> None:
    rig = Rig("2x24GiB")
    first, second, other = first_run(rig), first_run(rig), first_run(rig, "b")
    assert placed(rig, first, second, other) == [True, False, True]
    assert rig.why(second) == "the first run of a to show how much memory it needs"
    rig.start(first, 4)
    rig.exit(first)
    assert placed(rig, second) == [False], "it is not kept yet"
    end(rig, other) if other.pid else rig.broker.end(other)
    rig.broker.kept(first.request.sequence, True, {})
    assert placed(rig, second) == [True], "the first one has shown nothing"


def test_others_ask_again_once_the_need_is_known(rig: Rig) -> None:
    first, second = first_run(rig), first_run(rig)
    rig.broker.look()
    rig.start(first, 4)
    end(rig, first, need=5)
    assert isinstance(second.error, NeedLearned)
    # A budget that was chosen before that is chosen again.
    stale = rig.broker.submit(second.request, second.histories, rig.broker.runs_kept - 1)
    rig.broker.look()
    assert isinstance(stale.error, NeedLearned)
    assert placed(rig, first_run(rig)) == [True], "as where the histories were read since"


def test_one_in_the_queue_asks_again_too(rig: Rig) -> None:
    busy = rig.place("busy", 20)
    waiting = first_run(rig)
    assert placed(rig, waiting) == [False] and waiting.phase is Phase.WAITING
    rig.broker.kept(7, True, {next(iter(waiting.histories.values())): 2**30})
    rig.broker.look()
    assert isinstance(waiting.error, NeedLearned)
    assert waiting.phase is Phase.GONE and len(rig.reservations()) == 1 and busy.placement


def test_one_that_can_be_estimated_from_another_asks_again_and_one_that_runs_goes_on(
    rig: Rig,
) -> None:
    running, waiting = first_run(rig, "b", probe_fraction=1.0), first_run(rig, "a")
    assert placed(rig, running, waiting) == [True, False]
    rig.start(running, 4)
    before = rig.reservations()
    keys = [next(iter(ticket.histories.values())) for ticket in (running, waiting)]
    rig.broker.kept(7, True, dict.fromkeys(keys))
    rig.broker.look()
    assert isinstance(waiting.error, NeedLearned)
    assert running.phase is Phase.RUNNING and rig.reservations() == before


def test_one_that_shares_its_device_holds_up_others_in_the_queue_and_after_its_end_only(
    rig: Rig,
) -> None:
    first, second = (first_run(rig, probe_fraction=1.0) for _ in range(2))
    assert placed(rig, first, second) == [True, True]
    rig.start(first, 10)
    rig.start(second, 10)
    rig.broker.look()
    third, fourth = (first_run(rig, probe_fraction=1.0) for _ in range(2))
    assert placed(rig, third, fourth) == [False, False]
    assert [third.phase, fourth.phase] == [Phase.WAITING, Phase.OPEN]
    rig.broker.withdraw(third)
    rig.broker.kept(third.request.sequence, True, {})
    rig.broker.look()
    assert fourth.phase is Phase.WAITING
    rig.broker.withdraw(fourth)
    rig.broker.kept(fourth.request.sequence, True, {})
    # The flow may have the value, and submit the next one, before the process has ended.
    rig.broker.returned(first)
    fifth = first_run(rig, probe_fraction=1.0)
    rig.broker.look()
    assert fifth.phase is Phase.OPEN, "the need will be known in a moment"
    rig.exit(first)
    rig.broker.look()
    assert fifth.phase is Phase.OPEN
    rig.broker.kept(first.request.sequence, True, {})
    assert placed(rig, fifth) == [True]
    # A process may also end without a value.
    rig.exit(second)
    sixth = first_run(rig, probe_fraction=1.0)
    rig.broker.look()
    assert sixth.phase is Phase.OPEN


def test_the_next_process_of_a_first_run_is_still_the_first_run(rig: Rig) -> None:
    first, second = first_run(rig), first_run(rig)
    rig.broker.look()
    rig.start(first, 4)
    end(rig, first, over=False)
    assert placed(rig, second) == [False]
    again = first_run(rig, sequence=first.request.sequence)
    assert placed(rig, again, second) == [True, False]


def test_gpu_wait_ends_the_wait_for_a_first_run(thread_rig: Rig) -> None:
    first = first_run(thread_rig)
    thread_rig.decided(first)
    second = first_run(thread_rig)
    waiter = Waiter(thread_rig, second, limit_s=60)
    while second.request.id not in thread_rig.machines[0].known.open:
        time.sleep(0.001)
    thread_rig.clock.advance(1)
    assert waiter.next_told() == "the first run of a to show how much memory it needs"
    thread_rig.clock.advance(59)
    error = waiter.result()
    assert isinstance(error, PlacementTimeoutError)
    assert "gpu:wait=1m is over: 'a' still waited for the first run of a" in str(error)


def test_first_runs_begin_in_the_order_of_submit(rig: Rig) -> None:
    later, earlier = (first_run(rig, sequence=sequence) for sequence in (7, 5))
    assert placed(rig, earlier, later) == [True, False]


def test_histories_and_devices_are_looked_at_apart() -> None:
    rig = Rig("2x24GiB")
    running, same = first_run(rig), first_run(rig)
    rig.broker.look()
    rig.start(running, 4)
    other = first_run(rig, "b", devices=("1",))
    assert placed(rig, same, other) == [False, True]
    assert rig.why(same) == "the first run of a to show how much memory it needs"


def test_one_that_came_back_from_a_suspension_holds_up_no_other(rig: Rig) -> None:
    old = FirstRun(rig, "old", 2)
    rig.clock.advance(1)
    new = FirstRun(rig, "new", 8)
    rig.broker.look()
    rig.clock.advance(FIRST_S)
    rig.broker.look()
    old.grow(15)
    new.hear()
    new.move_out()
    rig.exit(old.ticket)
    rig.broker.look()
    new.move_in()
    assert new.ticket.phase is Phase.RUNNING and not new.ticket.claims


def test_thousands_that_wait_for_a_first_run_cost_little(rig: Rig) -> None:
    running = first_run(rig)
    rig.broker.look()
    rig.start(running, 4)
    many = [first_run(rig) for _ in range(3000)]
    rig.broker.look()
    asked = 0

    class Counted(dict[str, Ticket]):
        def __getitem__(self, key: str) -> Ticket:
            nonlocal asked
            asked += 1
            return super().__getitem__(key)

    known = rig.machines[0].known
    known.open = Counted(known.open)
    for _ in range(10):
        rig.broker.look()
    # The first one only.
    assert asked <= 10 and all(ticket.phase is Phase.OPEN for ticket in many)


# Several device models.


@pytest.fixture
def mixed() -> Rig:
    """Devices 0 and 1 of two models."""
    return Rig("1x24GiB,1x32GiB")


A, B = "simulated 24GiB", "simulated 32GiB"


def test_of_two_unknown_models_two_first_runs_find_out_at_once(mixed: Rig) -> None:
    first, second, third = (first_run(mixed) for _ in range(3))
    assert placed(mixed, first, second, third) == [True, True, False]
    assert sorted(indices(first) + indices(second)) == [0, 1]
    mixed.start(first, 4)
    end(mixed, first)
    assert placed(mixed, third) == [True] and indices(third) == indices(first)


def test_of_two_models_one_is_known_and_one_task_run_at_a_time_finds_out_about_the_other(
    mixed: Rig,
) -> None:
    known = ModelBudgets(((A, 8 * 2**30),))
    histories = {B: histories_of(mixed.reader, "a")[B]}
    mixed.place("busy", 20, devices=("0",))
    first = mixed.submit("a", memory=known, histories=histories, probe_fraction=1.0)
    second = mixed.submit("a", memory=known, histories=histories, probe_fraction=1.0)
    assert placed(mixed, first, second) == [True, False]
    assert indices(first) == [1] and not second.claims
    assert second.request.memory == ModelBudgets(((A, 8 * 2**30), (B, NEVER_BYTES)))
    assert second.request.probe_fraction == 0.0


def test_one_that_needs_both_devices_is_not_kept_off_the_unknown_one(mixed: Rig) -> None:
    known = ModelBudgets(((A, 8 * 2**30),))
    histories = {B: histories_of(mixed.reader, "a")[B]}
    pair = [
        mixed.submit("a", memory=known, histories=histories, count=2, probe_fraction=0.5)
        for _ in range(2)
    ]
    assert placed(mixed, *pair) == [True, False]
    assert pair[1].phase is Phase.WAITING and pair[1].request.memory == known
    assert pair[1].request.probe_fraction == 0.0


def test_a_first_run_beside_another_is_one_on_another_model() -> None:
    rig = Rig("1x24GiB,1x32GiB,1x48GiB")
    first, second, third = (first_run(rig, probe_fraction=0.5) for _ in range(3))
    assert placed(rig, first, second, third) == [True] * 3
    assert first.request.probe_fraction == second.request.probe_fraction == 0.5


# All of it.

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "open",
                "ask",
                "ask",
                "ask",
                "leave",
                "withdraw",
                "return",
                "end",
                "end",
                "keep",
                "keep",
                "learn",
            ]
        ),
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=40,
)


@given(STEPS)
def test_no_history_has_two_first_runs_with_devices_of_their_own_and_all_are_decided(
    steps: list[tuple[str, int, bool]],
) -> None:
    rig = Rig("3x24GiB")
    asked: list[Ticket] = []
    ended: list[Ticket] = []
    places: list[int] = []

    def running() -> list[Ticket]:
        return [t for t in asked if t.placement is not None and t not in ended]

    def alone(ticket: Ticket) -> bool:
        return any(
            r.exclusive and not r.probe
            for r in (ticket.placement or asked[0].placement).reservations
        )  # type: ignore[union-attr]

    def look() -> None:
        rig.broker.look()
        while unstarted := [t for t in running() if t.pid is None]:
            for ticket in unstarted:
                rig.start(ticket, 1)
            rig.broker.look()
        for name in "ab":
            held = [t for t in running() if t.request.task_name == name and alone(t)]
            assert len(held) <= 1

    for number, (step, which, flag) in enumerate(steps, start=1):
        if step == "open":
            opened(rig, flag, first=number)
            places.append(number)
        elif step == "ask":
            sequence = places.pop(which % len(places)) if flag and places else number
            share = {"probe_fraction": 1.0} if which > 2 else {}
            asked.append(first_run(rig, "ab"[which % 2], sequence=sequence, **share))
        elif step == "leave" and places:
            rig.broker.places.leave(places.pop(which % len(places)))
        elif step == "withdraw" and asked:
            if rig.broker.withdraw(asked[which % len(asked)]):
                rig.broker.kept(asked[which % len(asked)].request.sequence, True, {})
        elif step == "return" and running():
            rig.broker.returned(running()[which % len(running())])
        elif step == "end" and running():
            ticket = running()[which % len(running())]
            rig.exit(ticket)
            ended.append(ticket)
        elif step in ("keep", "learn") and ended:
            ticket = ended[which % len(ended)]
            key = ticket.histories[ticket.devices[0].name]
            rig.broker.kept(ticket.request.sequence, True, {key: 2**30} if step == "learn" else {})
        look()
    for sequence in places:
        rig.broker.places.leave(sequence)
    look()
    for _ in range(2 * len(asked) + 1):
        for ticket in running():
            rig.exit(ticket)
            ended.append(ticket)
        for ticket in asked:
            if ticket.decided:
                rig.broker.kept(ticket.request.sequence, True, {})
        look()
    assert all(ticket.decided for ticket in asked)
    known = rig.machines[0].known
    assert not (known.open or known.to_come or known.waiting or known.own)
