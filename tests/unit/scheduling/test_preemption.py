"""Which running tasks are suspended or moved for a blocked request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.preemption import (
    AGING_S,
    HEADS,
    HOST_MARGIN_BYTES,
    Running,
    aged_priority,
    in_s,
    out_s,
    plan,
)
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import HOST, request, reserved, state

NOW_S = 1000.0


def key(index: int) -> DeviceKey:
    return HOST, f"SIM-{index}"


class Task(NamedTuple):
    """A task and what it holds."""

    running: Running
    held: Reservation


def task(name: str, gib: float = 8, at: int = 0, to: Sequence[int] = (), **others: Any) -> Task:
    """A preemptible task that has run for 1000 s; it may come back on its device and on those in `to`."""
    held = reserved(at, gib, by=name, exclusive=others.pop("alone", False))
    held = replace(held, ends_s=others.pop("ends_s", None))
    given: dict[str, Any] = {
        "priority": 0,
        "preemptible": True,
        "devices": (key(at), *map(key, to)),
        "moved_bytes": int(others.pop("moved_gib", gib) * GIB),
        "since_s": 0.0,
    }
    return Task(Running(name, **{**given, **others}), held)


def changed(found: Task, **others: Any) -> Task:
    return Task(replace(found.running, **others), found.held)


def urgent(gib: float | None = 20, priority: int = 1, **others: Any) -> Request:
    return request(gib, name=others.pop("name", "urgent"), priority=priority, **others)


def goes(
    blocked: Request | Sequence[Request],
    *tasks: Task,
    devices: int = 1,
    room_gib: float = 1000,
    max_tasks: int | None = None,
    extra: Sequence[Reservation] = (),
    foreign_gib: float = 0,
) -> list[tuple[str, list[int], dict[str, bool]]]:
    """Return each plan with its devices by index, and the tasks that are suspended for it: `True` is moved."""
    held = [*(each.held for each in tasks), *extra]
    states = [
        state(i, held=[r for r in held if r.device_key == key(i)], used_gib=foreign_gib)
        for i in range(devices)
    ]
    asked = [blocked] if isinstance(blocked, Request) else blocked
    running = {each.running.request_id: each.running for each in tasks}
    plans = plan(asked, states, running, {HOST: int(room_gib * GIB)}, NOW_S, max_tasks)
    return [(p.request_id, [int(k[1][4:]) for k in p.devices], {**p.suspended}) for p in plans]


#: Seconds that 8 GiB take out.
OUT_S = out_s(8 * GIB)


@pytest.mark.parametrize(
    ("blocked", "tasks", "name"),
    [
        pytest.param(urgent(), [task("v")], "v", id="one of lower priority is suspended"),
        pytest.param(urgent(priority=0), [task("v")], None, id="not for one of the same priority"),
        pytest.param(urgent(), [task("v", priority=2)], None, id="not for one of lower priority"),
        pytest.param(urgent(), [task("v", preemptible=False)], None, id="not one without the tag"),
        pytest.param(urgent(), [task("v", rests_until_s=NOW_S + 1)], None, id="not one that has just come back"),
        pytest.param(urgent(), [task("v", rests_until_s=NOW_S)], "v", id="one that has rested is suspended"),
        pytest.param(urgent(), [task("v", suspended_for="other")], None, id="not one that is suspended for another request"),
        pytest.param(urgent(), [task("v", away=True)], None, id="not one that is just coming back"),
        pytest.param(urgent(), [task("v", ends_s=NOW_S + OUT_S - 0.1)], None, id="not one that ends before it is away"),
        pytest.param(urgent(), [task("v", ends_s=NOW_S + OUT_S + 0.1)], "v", id="one that ends after that is suspended"),
        pytest.param(urgent(), [task("v", since_s=NOW_S - OUT_S + 0.1)], None, id="not one that has just started, if its end is not known"),
        pytest.param(urgent(), [task("v", ends_s=NOW_S - 60)], "v", id="one that is long overdue is suspended"),
        pytest.param(urgent(), [task("v", ends_s=NOW_S - 1)], None, id="not one that is due any moment"),
        pytest.param(urgent(12), [task("a", 6), task("b", 10)], "a", id="the cheapest that is enough"),
        pytest.param(urgent(16), [task("a", 6), task("b", 10)], "b", id="one that is enough"),
        pytest.param(urgent(12), [task("a", 6, priority=1), task("b", 10)], "b", id="the cheapest of lower priority"),
        pytest.param(urgent(20), [task("a", 6), task("b", 10)], None, id="none if one is not enough"),
        pytest.param(urgent(12), [task("a", 8), task("b", 9, moved_gib=2)], "b", id="what costs is what is moved"),
        pytest.param(urgent(12), [task("b"), task("a")], "a", id="of two that cost the same the first by its id"),
        pytest.param(urgent(), [task("a", 8, moved_gib=0.5), task("b", 14, preemptible=False)], None, id="not if it would not be enough"),
        pytest.param(urgent(25), [task("v")], None, id="not for what the device could never hold"),
        pytest.param(urgent(2), [task("v")], None, id="not for what waits for something else"),
        pytest.param(urgent(None), [task("a", 2)], "a", id="the only one for one that wants the device to itself"),
        pytest.param(urgent(None), [task("a", 2), task("b", 2)], None, id="none of two for one that wants the device to itself"),
        pytest.param(urgent(1, exclusive=True), [task("a", 2)], "a", id="the only one for an exclusive one"),
        pytest.param(urgent(1, exclusive=True), [task("a", 2), task("b", 2)], None, id="none of two for an exclusive one"),
        pytest.param(urgent(None, probe_fraction=1.0), [task("a", 22)], None, id="not for a first run that may share"),
        pytest.param(urgent(1), [task("a", 2, alone=True)], "a", id="an exclusive task is suspended"),
        pytest.param(urgent(returns=True), [task("v")], None, id="not for one that comes back itself"),
        pytest.param(urgent(devices=("1",)), [task("v")], None, id="not for one that names a device that is not there"),
    ],
)  # fmt: skip
def test_which_task_is_suspended(blocked: Request, tasks: list[Task], name: str | None) -> None:
    expected = [] if name is None else [("urgent", [0], {name: False})]
    assert goes(blocked, *tasks) == expected


def test_a_task_that_was_asked_stays_asked_whatever_the_time_and_costs_nothing() -> None:
    asked = task("asked", 16, suspended_for="urgent", rests_until_s=NOW_S + 60, ends_s=NOW_S)
    assert goes(urgent(16), asked, task("b", 1)) == [("urgent", [0], {"asked": False})]
    # A device where less would have to be moved does not change it.
    other = task("c", 16, at=1, moved_gib=0.1)
    assert goes(urgent(16), asked, other, devices=2) == [("urgent", [0], {"asked": False})]
    # It has room on the host already.
    assert goes(urgent(16), changed(asked, away=True), room_gib=0)
    assert goes(urgent(16), asked, room_gib=0)


def test_what_a_task_frees_is_for_the_request_that_it_is_suspended_for() -> None:
    asked = task("v", 16, suspended_for="first")
    both = [urgent(16, name="first"), urgent(16, name="second")]
    assert goes(both, asked) == [("first", [0], {"v": False})]
    assert goes(both[1:], asked) == []


def test_several_requests_each_get_what_the_earlier_ones_leave() -> None:
    tasks = [task("a", 12), task("b", 12, moved_gib=13), task("c", 20, at=1)]
    three = [urgent(11, name="first"), urgent(11, name="second"), urgent(11, name="third")]
    assert goes(three, *tasks, devices=2) == [
        ("first", [0], {"a": False}),
        ("second", [0], {"b": False}),
        ("third", [1], {"c": False}),
    ]
    # Beside the first there is room for a small one.
    assert len(goes([three[0], urgent(1, name="small")], *tasks[:2])) == 1


def test_tasks_are_suspended_for_a_few_requests_at_a_time() -> None:
    tasks = [task(f"t{i}", 20, at=i) for i in range(HEADS + 2)]
    waiting = [urgent(20, name=f"u{i}") for i in range(HEADS + 2)]
    assert len(goes(waiting, *tasks, devices=HEADS + 2)) == HEADS
    # A request behind them for which a task was asked before keeps its plan.
    tasks[0] = changed(tasks[0], suspended_for=f"u{HEADS + 1}")
    assert len(goes(waiting, *tasks, devices=HEADS + 2)) == HEADS + 1


@pytest.mark.parametrize(("room_gib", "enough"), [(20, True), (19.9, False)])
def test_the_host_has_room_for_all_that_is_suspended(room_gib: float, enough: bool) -> None:
    margin = HOST_MARGIN_BYTES / GIB
    tasks = [task("a", 12), task("b", 8, at=1)]
    both = urgent(24, count=2)
    assert bool(goes(both, *tasks, devices=2, room_gib=room_gib + margin)) is enough
    # What is on its way there counts, also if it is for another request.
    other = task("c", 5, at=2, suspended_for="other")
    room_gib += margin + 5
    assert bool(goes(both, *tasks, other, devices=3, room_gib=room_gib)) is enough
    away = changed(other, away=True)
    assert goes(both, *tasks, away, devices=3, room_gib=20 + margin)


def test_the_host_has_room_for_the_process_of_the_request_too() -> None:
    room_gib = 12 + HOST_MARGIN_BYTES / GIB
    assert goes(urgent(24, host_bytes=2 * GIB), task("a", 12), room_gib=room_gib + 2)
    assert not goes(urgent(24, host_bytes=2 * GIB), task("a", 12), room_gib=room_gib + 1)
    # Once it is there, it stays.
    away = task("a", 12, suspended_for="urgent", away=True)
    assert goes(urgent(24, host_bytes=2 * GIB), away, room_gib=0)


def test_a_task_is_suspended_where_there_is_a_limit_of_tasks() -> None:
    tasks = [task("a", 2), task("b", 1)]
    assert goes(urgent(1), *tasks, max_tasks=2) == [("urgent", [0], {"b": False})]
    assert goes(urgent(1), *tasks, max_tasks=1) == []


def test_nothing_is_suspended_if_the_request_would_start_sooner_by_waiting() -> None:
    victim = task("v", 20)
    took_s = out_s(20 * GIB)

    def other(ends_s: float) -> Task:
        return task("ends", 20, at=1, preemptible=False, ends_s=NOW_S + took_s + ends_s)

    assert goes(urgent(), victim, other(-0.1), devices=2) == []
    assert goes(urgent(), victim, other(0.1), devices=2)


@pytest.mark.parametrize(("foreign_gib", "enough"), [(4, True), (4.1, False)])
def test_nothing_is_suspended_where_another_program_holds_what_is_missing(
    foreign_gib: float, enough: bool
) -> None:
    assert bool(goes(urgent(), task("v"), foreign_gib=foreign_gib)) is enough


def test_an_unknown_task_stays() -> None:
    assert goes(urgent(), extra=[reserved(0, 20)]) == []
    assert goes(urgent(20), task("v", 4), extra=[reserved(0, 8)]) == []


# Moves.


def test_a_task_is_moved_if_another_device_has_the_room_for_it() -> None:
    assert goes(urgent(), task("v", to=[1]), task("w", 20, at=1, preemptible=False), devices=2) == [
        ("urgent", [0], {"v": False})
    ]
    tasks = [task("v", 12, to=[1]), task("w", 8, at=1, preemptible=False)]
    assert goes(urgent(), *tasks, devices=2) == [("urgent", [0], {"v": True})]
    # It is pinned to its device.
    pinned = changed(tasks[0], devices=(key(0),))
    assert goes(urgent(), pinned, tasks[1], devices=2) == [("urgent", [0], {"v": False})]


@pytest.mark.parametrize("priority", [0, 5])
def test_a_task_is_moved_for_any_priority(priority: int) -> None:
    tasks = [task("v", 12, to=[1], priority=priority), task("w", 12, at=1, preemptible=False)]
    assert goes(urgent(None, priority=0), *tasks, devices=2) == [("urgent", [0], {"v": True})]


def test_a_move_is_made_only_if_more_wait_is_saved_than_it_costs() -> None:
    took_s = out_s(12 * GIB)
    least_s = took_s + took_s + in_s(12 * GIB)

    def other(after_s: float) -> Task:
        return task("w", 12, at=1, preemptible=False, ends_s=NOW_S + after_s)

    victim = task("v", 12, to=[1], priority=1)
    assert goes(urgent(), victim, other(least_s - 0.1), devices=2) == []
    assert goes(urgent(), victim, other(least_s + 0.1), devices=2) == [("urgent", [0], {"v": True})]
    # For one of higher priority it has to be sooner, no more.
    lower = changed(victim, priority=0)
    assert goes(urgent(), lower, other(took_s + 0.1), devices=2) == [("urgent", [0], {"v": True})]


def test_of_two_that_cost_the_same_the_one_is_taken_that_can_be_moved() -> None:
    tasks = [task("a"), task("b", to=[1]), task("w", 12, at=1, preemptible=False)]
    assert goes(urgent(12, devices=("0",)), *tasks, devices=2) == [("urgent", [0], {"b": True})]


def test_no_task_is_moved_where_it_would_not_be_alone_if_it_must_be() -> None:
    victim = task("v", 12, to=[1], alone=True)
    blocked = urgent(devices=("0",))
    assert goes(blocked, victim, task("w", 1, at=1), devices=2) == [("urgent", [0], {"v": False})]
    assert goes(blocked, victim, devices=2) == [("urgent", [0], {"v": True})]


def test_a_move_that_has_lost_its_room_meanwhile_is_a_suspension_or_none() -> None:
    victim = task("v", 12, to=[1], suspended_for="urgent")
    full = task("w", 14, at=1, preemptible=False)
    assert goes(urgent(), victim, full, devices=2) == [("urgent", [0], {"v": False})]
    assert goes(urgent(priority=0), victim, full, devices=2) == []


def test_room_that_is_still_to_be_left_is_no_place_to_move_to() -> None:
    # 12 GiB of device 0 will be free once the first has started there; now 4 are.
    tasks = [task("v", 20), task("w", 8, at=1, to=[0], priority=1), task("x", 8, at=1, preemptible=False)]  # fmt: skip
    both = [urgent(8, name="first", devices=("0",)), urgent(16, name="second", devices=("1",))]
    assert goes(both, *tasks, devices=2) == [("first", [0], {"v": False})]
    # A request needs no suspension where the room that will be left is enough.
    both[1] = urgent(12, name="second")
    assert goes(both, *tasks, devices=2) == [("first", [0], {"v": False})]


def test_a_task_is_suspended_for_one_request() -> None:
    # The first is to be moved to device 1, where the second could have used its room.
    tasks = [task("a", 8, to=[1]), task("b", 8, at=1, moved_gib=9)]
    both = [urgent(20, name="first"), urgent(10, name="second", devices=("1",))]
    assert goes(both, *tasks, devices=2) == [
        ("first", [0], {"a": True}),
        ("second", [1], {"b": False}),
    ]


def test_for_several_devices_those_are_chosen_where_it_costs_least() -> None:
    tasks = [task("a", 12), task("b", 4, at=1), task("c", 8, at=2)]
    assert goes(urgent(22, count=2), *tasks, devices=3) == [
        ("urgent", [1, 2], {"b": False, "c": False})
    ]
    # In the order of the tag.
    blocked = urgent(22, count=2, devices=("2", "1"))
    assert goes(blocked, *tasks, devices=3) == [("urgent", [2, 1], {"b": False, "c": False})]
    # A device where it fits costs nothing.
    assert goes(urgent(22, count=2), *tasks[1:], devices=3) == [("urgent", [0, 1], {"b": False})]


def test_two_whole_devices_are_had_by_moving_what_is_there_to_a_third() -> None:
    tasks = [task(n, 8, at=i, to=[j for j in range(3) if j != i]) for i, n in enumerate("abc")]
    assert goes(urgent(None, priority=0, count=2), *tasks, devices=3) == [
        ("urgent", [0, 1], {"a": True, "b": True})
    ]
    # Two do not fit beside the third.
    tasks = [task(n, 12, at=i, to=[j for j in range(3) if j != i]) for i, n in enumerate("abc")]
    assert goes(urgent(None, priority=0, count=2), *tasks, devices=3) == []


# What later requests are kept from.


def test_what_waits_for_its_return_keeps_one_device() -> None:
    tasks = [task("a", 20), task("b", 20, at=1, since_s=10.0)]
    back = urgent(18, priority=3, returns=True, name="back")
    later = [urgent(name="u"), urgent(name="w")]
    # The second is expected to end sooner: it has run for a shorter time.
    assert goes([back, *later], *tasks, devices=2) == [("u", [0], {"a": False})]


def test_the_first_that_cannot_be_helped_keeps_one_device() -> None:
    tasks = [task("a", 12), task("b", 12, preemptible=False), task("c", 12, at=1), task("d", 12, at=1, preemptible=False)]  # fmt: skip
    whole = urgent(24, priority=3, name="whole")
    later = [urgent(12, name="u"), urgent(12, name="w")]
    assert [name for name, *_ in goes(later, *tasks, devices=2)] == ["u", "w"]
    assert [name for name, *_ in goes([whole, *later], *tasks, devices=2)] == ["u"]


def test_a_return_gets_one_more_priority_for_each_ten_minutes_away() -> None:
    back = request(1, priority=2)
    assert [aged_priority(back, s) for s in (0, AGING_S - 1, AGING_S, 3 * AGING_S)] == [2, 2, 3, 5]
