"""Which running tasks are suspended or moved for a blocked request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.preemption import (
    AGING_S,
    EXACT,
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


def task(name: str, gib: float = 8, at: int = 0, to: Sequence[int] = (), **others: Any) -> Running:
    """A preemptible task that has run for 1000 s; it may come back on its device and on those in `to`."""
    given: dict[str, Any] = {
        "priority": 0,
        "preemptible": True,
        "reservations": (reserved(at, gib, by=name, exclusive=others.pop("alone", False)),),
        "devices": (key(at), *map(key, to)),
        "moved_bytes": int(others.pop("moved_gib", gib) * GIB),
        "since_s": 0.0,
    }
    return Running(name, **{**given, **others})


def until(ends_s: float, running: Running) -> Running:
    """The same task with a known end."""
    held = tuple(replace(r, ends_s=ends_s) for r in running.reservations)
    return replace(running, reservations=held)


def moving(running: Running, to: int, for_id: str) -> Running:
    """A task on its way to another device."""
    there = replace(running.reservations[0], device_uuid=f"SIM-{to}")
    return replace(running, reservations=(*running.reservations, there), suspended_for=for_id)


def machine(tasks: Sequence[Running], devices: int = 1, gib: float = 24) -> list[DeviceState]:
    held = [r for each in tasks for r in each.reservations]
    return [state(i, gib, [r for r in held if r.device_key == key(i)]) for i in range(devices)]


def urgent(gib: float | None = 20, priority: int = 1, **others: Any) -> Request:
    return request(gib, name=others.pop("name", "urgent"), priority=priority, **others)


def goes(
    blocked: Request | Sequence[Request],
    *tasks: Running,
    devices: int = 1,
    room_gib: float = 1000,
    max_tasks: int | None = None,
    extra: Sequence[Reservation] = (),
) -> list[tuple[str, list[int], dict[str, int | None]]]:
    """Return each plan with its devices and destinations by index."""
    states = machine(tasks, devices)
    for each in extra:
        at = int(each.device_uuid[4:])
        states[at] = states[at].after(each)
    asked = [blocked] if isinstance(blocked, Request) else blocked
    running = {each.request_id: each for each in tasks}
    plans = plan(asked, states, running, {HOST: int(room_gib * GIB)}, NOW_S, max_tasks)

    def index(device: DeviceKey | None) -> int | None:
        return None if device is None else int(device[1][4:])

    return [
        (
            p.request_id,
            [int(k[1][4:]) for k in p.devices],
            {v: index(k) for v, k in p.going.items()},
        )
        for p in plans
    ]


#: Seconds that 8 GiB take out.
OUT_S = out_s(8 * GIB)


@pytest.mark.parametrize(
    ("blocked", "tasks", "names"),
    [
        pytest.param(urgent(), [task("v")], "v", id="one of lower priority goes"),
        pytest.param(urgent(priority=0), [task("v")], None, id="not for one of the same priority"),
        pytest.param(urgent(), [task("v", priority=2)], None, id="not for one of lower priority"),
        pytest.param(urgent(), [task("v", preemptible=False)], None, id="not one without the tag"),
        pytest.param(urgent(), [task("v", rests_until_s=NOW_S + 1)], None, id="not one that has just come back"),
        pytest.param(urgent(), [task("v", rests_until_s=NOW_S)], "v", id="one that has rested goes"),
        pytest.param(urgent(), [task("v", suspended_for="other")], None, id="not one that goes for another request"),
        pytest.param(urgent(), [task("v", away=True)], None, id="not one that is just coming back"),
        pytest.param(urgent(), [until(NOW_S + OUT_S - 0.1, task("v"))], None, id="not one that ends before it is away"),
        pytest.param(urgent(), [until(NOW_S + OUT_S + 0.1, task("v"))], "v", id="one that ends after that goes"),
        pytest.param(urgent(), [task("v", since_s=NOW_S - OUT_S + 0.1)], None, id="not one that has just started, if its end is not known"),
        pytest.param(urgent(), [until(NOW_S - 60, task("v"))], "v", id="one that is long overdue goes"),
        pytest.param(urgent(), [until(NOW_S - 1, task("v"))], None, id="not one that is due any moment"),
        pytest.param(urgent(12), [task("a", 6), task("b", 10)], "a", id="the cheapest that is enough"),
        pytest.param(urgent(16), [task("a", 6), task("b", 10)], "b", id="one is enough if it is large enough"),
        pytest.param(urgent(20), [task("a", 6), task("b", 10)], "ab", id="both if one is not enough"),
        pytest.param(urgent(16), [task("a", 4), task("b", 4), task("c", 8, moved_gib=2), task("d", 7)], "cd", id="what costs is what is moved"),
        pytest.param(urgent(), [task("a", 8, moved_gib=0.5), task("b", 14, preemptible=False)], None, id="not if it would not be enough"),
        pytest.param(urgent(25), [task("v")], None, id="not for what the device could never hold"),
        pytest.param(urgent(2), [task("v")], None, id="not for what waits for something else"),
        pytest.param(urgent(None), [task("a", 2), task("b", 2)], "ab", id="all go for one that wants the device to itself"),
        pytest.param(urgent(1, exclusive=True), [task("a", 2), task("b", 2)], "ab", id="all go for an exclusive one"),
        pytest.param(urgent(1, exclusive=True), [task("a", 2), task("b", 2, priority=1)], None, id="all or none"),
        pytest.param(urgent(None, probe_fraction=1.0), [task("a", 22)], None, id="not for a first run that may share"),
        pytest.param(urgent(1), [task("a", 2, alone=True)], "a", id="an exclusive task goes"),
        pytest.param(urgent(returns=True), [task("v")], None, id="not for one that comes back itself"),
        pytest.param(urgent(devices=("1",)), [task("v")], None, id="not for one that names a device that is not there"),
    ],
)  # fmt: skip
def test_which_tasks_are_suspended(
    blocked: Request, tasks: list[Running], names: str | None
) -> None:
    expected = [] if names is None else [("urgent", [0], dict.fromkeys(names))]
    assert goes(blocked, *tasks) == expected


def test_a_task_that_is_asked_goes_on_to_go_whatever_the_time_and_costs_nothing() -> None:
    resting = task("asked", 16, suspended_for="urgent", rests_until_s=NOW_S + 60)
    asked = until(NOW_S, resting)
    assert goes(urgent(16), asked, task("b", 1)) == [("urgent", [0], {"asked": None})]
    # A device where less would have to go does not change it.
    other = task("c", 16, at=1, moved_gib=0.1)
    assert goes(urgent(16), asked, other, devices=2) == [("urgent", [0], {"asked": None})]
    # It has room on the host already.
    assert goes(urgent(16), replace(asked, away=True), room_gib=0)
    assert goes(urgent(16), asked, room_gib=0)


def test_what_a_task_frees_is_for_the_request_that_it_goes_for() -> None:
    asked = task("v", 16, suspended_for="first")
    both = [urgent(16, name="first"), urgent(16, name="second")]
    assert goes(both, asked) == [("first", [0], {"v": None})]
    assert goes(both[1:], asked) == []


def test_several_requests_each_get_what_the_earlier_ones_leave() -> None:
    tasks = [task("a", 12), task("b", 12, moved_gib=13), task("c", 20, at=1)]
    both = [urgent(11, name="first"), urgent(11, name="second"), urgent(11, name="third")]
    assert goes(both, *tasks, devices=2) == [
        ("first", [0], {"a": None}),
        ("second", [0], {"b": None}),
        ("third", [1], {"c": None}),
    ]


def test_tasks_go_for_a_few_requests_at_a_time() -> None:
    tasks = [task(f"t{i}", 20, at=i) for i in range(HEADS + 2)]
    waiting = [urgent(20, name=f"u{i}") for i in range(HEADS + 2)]
    assert len(goes(waiting, *tasks, devices=HEADS + 2)) == HEADS
    # The tasks of one behind them that were asked before are not let go.
    tasks[0] = replace(tasks[0], suspended_for=f"u{HEADS + 1}")
    assert len(goes(waiting, *tasks, devices=HEADS + 2)) == HEADS + 1


@pytest.mark.parametrize(("room_gib", "enough"), [(20, True), (19.9, False)])
def test_the_host_has_room_for_all_that_goes(room_gib: float, enough: bool) -> None:
    margin = HOST_MARGIN_BYTES / GIB
    tasks = [task("a", 12), task("b", 8)]
    assert bool(goes(urgent(24), *tasks, room_gib=room_gib + margin)) is enough
    # What is on its way there counts, also if it goes for another request.
    other = task("c", 5, at=1, suspended_for="other")
    assert (
        bool(goes(urgent(24), *tasks, other, devices=2, room_gib=room_gib + margin + 5)) is enough
    )
    assert goes(urgent(24), *tasks, replace(other, away=True), devices=2, room_gib=20 + margin)


def test_the_host_has_room_for_the_process_of_the_request_too() -> None:
    room_gib = 12 + HOST_MARGIN_BYTES / GIB
    assert goes(urgent(24, host_bytes=2 * GIB), task("a", 12), room_gib=room_gib + 2)
    assert not goes(urgent(24, host_bytes=2 * GIB), task("a", 12), room_gib=room_gib + 1)
    # Once it is there, it stays.
    away = task("a", 12, suspended_for="urgent", away=True)
    assert goes(urgent(24, host_bytes=2 * GIB), away, room_gib=0)


def test_a_task_goes_where_there_is_a_limit_of_tasks() -> None:
    tasks = [task("a", 2), task("b", 1)]
    assert goes(urgent(1), *tasks, max_tasks=2) == [("urgent", [0], {"b": None})]
    assert goes(urgent(1), *tasks, max_tasks=1) == [("urgent", [0], {"b": None, "a": None})]


def test_where_tasks_are_many_what_goes_is_enough_and_none_of_it_could_stay() -> None:
    tasks = [task(f"t{i}", 1 + i / 8, moved_gib=2 - i / 8) for i in range(EXACT + 4)]
    free = 24 - sum(1 + i / 8 for i in range(EXACT + 4))
    ((_, _, going),) = goes(urgent(12), *tasks)
    sizes = [1 + int(name[1:]) / 8 for name in going]
    assert free + sum(sizes) >= 12 > free + sum(sizes) - min(sizes)
    # One that is large enough is found.
    tasks = [task(f"t{i}", 1) for i in range(EXACT + 4)] + [task("large", 8, moved_gib=2)]
    assert goes(urgent(12), *tasks) == [("urgent", [0], {"large": None})]


def test_a_task_on_several_devices_stays() -> None:
    wide = task("wide", 16)
    there = replace(wide.reservations[0], device_uuid="SIM-1")
    wide = replace(wide, reservations=(*wide.reservations, there))
    assert goes(urgent(), wide, devices=2) == []


def test_nothing_goes_if_the_request_would_start_sooner_by_waiting() -> None:
    victim = task("v", 20)
    ends = task("ends", 20, at=1, preemptible=False)
    took_s = out_s(20 * GIB)
    assert goes(urgent(), victim, until(NOW_S + took_s - 0.1, ends), devices=2) == []
    assert goes(urgent(), victim, until(NOW_S + took_s + 0.1, ends), devices=2)


def test_an_unknown_task_that_is_not_ours_stays() -> None:
    assert goes(urgent(), extra=[reserved(0, 20)]) == []
    assert goes(urgent(20), task("v", 4), extra=[reserved(0, 8)]) == []


# Moves.


def test_a_task_is_moved_rather_than_suspended() -> None:
    full = task("w", 20, at=1, preemptible=False)
    assert goes(urgent(), task("v", to=[1]), full, devices=2) == [("urgent", [0], {"v": None})]
    tasks = [task("v", 12, to=[1]), task("w", 8, at=1, preemptible=False)]
    assert goes(urgent(), *tasks, devices=2) == [("urgent", [0], {"v": 1})]
    # It is pinned to its device.
    assert goes(urgent(), replace(tasks[0], devices=(key(0),)), tasks[1], devices=2) == [
        ("urgent", [0], {"v": None})
    ]


@pytest.mark.parametrize("priority", [0, 5])
def test_tasks_are_moved_for_any_priority(priority: int) -> None:
    tasks = [task("v", 12, to=[1], priority=priority), task("w", 12, at=1, preemptible=False)]
    assert goes(urgent(None, priority=0), *tasks, devices=2) == [("urgent", [0], {"v": 1})]


def test_a_move_is_made_only_if_more_wait_is_saved_than_it_costs() -> None:
    took_s = out_s(12 * GIB)
    least_s = took_s + took_s + in_s(12 * GIB)
    for spare_s, expected in ((-0.1, []), (0.1, [("urgent", [0], {"v": 1})])):
        victim = task("v", 12, to=[1], priority=1)
        other = until(NOW_S + least_s + spare_s, task("w", 12, at=1, preemptible=False))
        assert goes(urgent(), victim, other, devices=2) == expected
    # For one of higher priority it has to be sooner, no more.
    other = until(NOW_S + took_s + 0.1, task("w", 12, at=1, preemptible=False))
    assert goes(urgent(), task("v", 12, to=[1]), other, devices=2) == [("urgent", [0], {"v": 1})]


@pytest.mark.parametrize(
    ("change", "index"),
    [
        pytest.param({"name": "other"}, None, id="another model"),
        pytest.param({"host": "other"}, None, id="another node"),
        pytest.param({}, 1, id="the same"),
    ],
)
def test_a_task_is_moved_within_its_model_and_node(
    change: dict[str, str], index: int | None
) -> None:
    victim = task("v", 12, to=[1])
    states = machine([victim], 2)
    device = replace(states[1].device, **change)  # type: ignore[arg-type]
    states[1] = replace(states[1], snapshot=replace(states[1].snapshot, device=device))
    victim = replace(victim, devices=(key(0), device.key))
    blocked = urgent(devices=("SIM-0",))
    (found,) = plan([blocked], states, {"v": victim}, {HOST: 1000 * GIB}, NOW_S)
    assert found.going == {"v": None if index is None else key(1)}


def test_no_task_is_moved_where_it_would_not_be_alone_if_it_must_be() -> None:
    victim = task("v", 12, to=[1], alone=True)
    blocked = urgent(devices=("0",))
    assert goes(blocked, victim, task("w", 1, at=1), devices=2) == [("urgent", [0], {"v": None})]
    assert goes(blocked, victim, devices=2) == [("urgent", [0], {"v": 1})]


def test_two_tasks_that_share_the_room_elsewhere_do_not_get_it_twice() -> None:
    tasks = [task("a", 10, to=[1]), task("b", 8, to=[1]), task("w", 12, at=1, preemptible=False)]
    found = goes(urgent(24, devices=("0",)), *tasks, devices=2)
    assert found == [("urgent", [0], {"a": 1, "b": None})]


def test_a_move_under_way_keeps_its_destination() -> None:
    victim = moving(task("v", 10, to=[1, 2]), 1, "urgent")
    # There is more room on device 2, and none on device 1 beside what is reserved for it.
    full = task("w", 14, at=1, preemptible=False)
    fuller = task("x", 13, at=2, preemptible=False)
    assert goes(urgent(), victim, full, fuller, devices=3) == [("urgent", [0], {"v": 1})]
    assert goes(urgent(), replace(victim, away=True), full, fuller, devices=3, room_gib=0) == [
        ("urgent", [0], {"v": 1})
    ]
    # A request that is placed somewhere else lets it go.
    assert goes(urgent(name="other"), victim, full, fuller, devices=3) == []


def test_room_that_is_still_to_be_left_is_no_place_to_move_to() -> None:
    # 12 GiB of device 0 will be free once the first has started there; now 4 are.
    tasks = [task("v", 20), task("w", 8, at=1, to=[0], priority=1), task("x", 8, at=1, preemptible=False)]  # fmt: skip
    both = [urgent(8, name="first", devices=("0",)), urgent(16, name="second", devices=("1",))]
    assert goes(both, *tasks, devices=2) == [("first", [0], {"v": None})]
    # A request needs nothing to go for it where the room that will be left is enough.
    both[1] = urgent(12, name="second")
    assert goes(both, *tasks, devices=2) == [("first", [0], {"v": None})]
    # Nor is more gone than is missing then.
    tasks.append(task("y", 4))
    both[1] = urgent(18, name="second", devices=("0",))
    assert goes(both, *tasks, devices=2)[1:] == []
    both[1] = urgent(16, name="second", devices=("0",))
    assert goes(both, *tasks, devices=2)[1:] == [("second", [0], {"y": None})]


def test_for_several_devices_the_cheapest_of_one_node_are_chosen() -> None:
    tasks = [task("a", 12), task("b", 4, at=1), task("c", 8, at=2)]
    assert goes(urgent(22, count=2), *tasks, devices=3) == [
        ("urgent", [1, 2], {"b": None, "c": None})
    ]
    # In the order of the tag.
    blocked = urgent(22, count=2, devices=("2", "1"))
    assert goes(blocked, *tasks, devices=3) == [("urgent", [2, 1], {"b": None, "c": None})]


def test_two_whole_devices_are_had_by_moving_what_is_there_to_a_third() -> None:
    tasks = [task(n, 8, at=i, to=[j for j in range(3) if j != i]) for i, n in enumerate("abc")]
    ((_, devices, going),) = goes(urgent(None, priority=0, count=2), *tasks, devices=3)
    (left,) = {0, 1, 2} - {*devices}
    assert len(going) == 2 and {*going.values()} == {left}
    # Two do not fit beside the third.
    tasks = [task(n, 12, at=i, to=[j for j in range(3) if j != i]) for i, n in enumerate("abc")]
    assert goes(urgent(None, priority=0, count=2), *tasks, devices=3) == []


# What later requests are kept from.


def test_what_waits_for_its_return_keeps_one_device() -> None:
    tasks = [task("a", 20), task("b", 20, at=1, since_s=10.0)]
    back = urgent(18, priority=3, returns=True, name="back")
    later = [urgent(name="u"), urgent(name="w")]
    # The second is expected to end sooner: it has run for a shorter time.
    assert goes([back, *later], *tasks, devices=2) == [("u", [0], {"a": None})]


def test_the_first_that_cannot_be_helped_keeps_one_device() -> None:
    tasks = [task("a", 12), task("b", 12, preemptible=False), task("c", 12, at=1), task("d", 12, at=1, preemptible=False)]  # fmt: skip
    whole = urgent(24, priority=3, name="whole")
    later = [urgent(12, name="u"), urgent(12, name="w")]
    assert [name for name, *_ in goes(later, *tasks, devices=2)] == ["u", "w"]
    assert [name for name, *_ in goes([whole, *later], *tasks, devices=2)] == ["u"]


def test_a_return_gets_one_more_priority_for_each_ten_minutes_away() -> None:
    back = request(1, priority=2)
    assert [aged_priority(back, s) for s in (0, AGING_S - 1, AGING_S, 3 * AGING_S)] == [2, 2, 3, 5]
