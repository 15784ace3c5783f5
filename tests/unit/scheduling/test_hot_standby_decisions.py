"""Hot standbys: which task takes one, which must end for a task, and where the next one is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_gpu.scheduling.memory import DeviceState, StandbyHold, device_state
from prefect_gpu.scheduling.model import (
    Device,
    DeviceSnapshot,
    Placement,
    ProcessUse,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.standbys import (
    MOST_ON_DEVICE,
    Settled,
    choose_device,
    in_the_way,
    settle,
)
from prefect_gpu.units import GIB


def device(index: int = 0) -> Device:
    return Device(f"GPU-{index}", index, "a model", 24 * GIB, "nvml", "here")


def state(
    *standbys: tuple[str, int], free: int = 20, index: int = 0, **changes: object
) -> DeviceState:
    some = device(index)
    return DeviceState(
        DeviceSnapshot(some, 0.0, free * GIB, **changes),  # type: ignore[arg-type]
        free * GIB,
        0,
        24 * GIB,
        standbys=tuple(StandbyHold(name, size * GIB) for name, size in standbys),
    )


def placed(
    name: str, gib: int, index: int = 0, exclusive: bool = False
) -> tuple[Request, Placement]:
    some = device(index)
    reservation = Reservation(name, "here", some.uuid, gib * GIB, exclusive)
    return Request(name, name, 0, 0.0), Placement(name, (some,), (gib * GIB,), (reservation,))


def outcome(settled: Settled) -> tuple[dict[str, str], tuple[str, ...]]:
    return {request.id: taken for request, _, taken in settled.made}, settled.given_up


KINDS = dict.fromkeys(("a", "b", "c"), "torch")


@pytest.mark.parametrize(
    ("placements", "standbys", "offers", "made", "given_up"),
    [
        pytest.param([placed("a", 4)], [], {}, {"a": ""}, (), id="there is no hot standby"),
        pytest.param(
            [placed("a", 4)],
            [("s", 1)],
            {"s": "torch"},
            {"a": "s"},
            (),
            id="a task takes the one of its kind",
        ),
        pytest.param(
            [placed("a", 4), placed("b", 4)],
            [("s", 1)],
            {"s": "torch"},
            {"a": "s", "b": ""},
            (),
            id="one is taken once",
        ),
        pytest.param(
            [placed("a", 4)],
            [("s", 1)],
            {"s": "cupy"},
            {"a": ""},
            (),
            id="another kind's stays beside it",
        ),
        pytest.param(
            [placed("a", 4)], [("s", 1)], {}, {"a": ""}, (), id="what is not offered is not taken"
        ),
        pytest.param(
            [placed("a", 20)],
            [("s", 1)],
            {"s": "torch"},
            {"a": "s"},
            (),
            id="the context is part of the budget of the task that takes it",
        ),
        pytest.param(
            [placed("a", 20)],
            [("s", 1)],
            {"s": "cupy"},
            {},
            ("s",),
            id="another's goes before a task that needs all",
        ),
        pytest.param(
            [placed("a", 18)],
            [("s", 1), ("t", 1), ("u", 1)],
            {},
            {},
            ("s",),
            id="no more go than must",
        ),
        pytest.param(
            [placed("a", 4, exclusive=True)],
            [("s", 1), ("t", 0)],
            {"s": "torch", "t": "torch"},
            {},
            ("t",),
            id="alone but for the one that it takes, whatever others hold",
        ),
        pytest.param(
            [placed("a", 4, exclusive=True)],
            [("s", 1)],
            {"s": "torch"},
            {"a": "s"},
            (),
            id="alone with the one that it takes",
        ),
        pytest.param(
            [placed("a", 10), placed("b", 9), placed("c", 1)],
            [("s", 1)],
            {},
            {"a": "", "b": ""},
            ("s",),
            id="those before it are placed, and one that does not fit beside it waits",
        ),
        pytest.param(
            [placed("a", 19), placed("b", 1)],
            [("s", 1), ("t", 1)],
            {},
            {},
            ("s", "t"),
            id="what goes holds its memory until it is gone",
        ),
        pytest.param(
            [placed("a", 20), placed("b", 4, index=1)],
            [("s", 1)],
            {},
            {"b": ""},
            ("s",),
            id="another device is another matter",
        ),
    ],
)
def test_placements_beside_hot_standbys(
    placements: list[tuple[Request, Placement]],
    standbys: list[tuple[str, int]],
    offers: dict[str, str],
    made: dict[str, str],
    given_up: tuple[str, ...],
) -> None:
    states = [state(*standbys), state(index=1)]
    assert outcome(settle(placements, states, offers, KINDS)) == (made, given_up)


def test_a_task_on_two_devices_takes_no_hot_standby_and_ends_those_on_both() -> None:
    devices = device(0), device(1)
    reservations = tuple(Reservation("a", "here", d.uuid, 20 * GIB) for d in devices)
    both = Placement("a", devices, (20 * GIB,) * 2, reservations)
    states = [state(("s", 1)), state(("t", 1), index=1)]
    settled = settle(
        [(Request("a", "a", 0, 0.0, count=2), both)], states, {"s": "torch", "t": "torch"}, KINDS
    )
    assert outcome(settled) == ({}, ("s", "t"))


def test_a_task_of_no_kind_takes_no_hot_standby() -> None:
    settled = settle([placed("x", 4)], [state(("s", 1))], {"s": "torch"}, KINDS)
    assert outcome(settled) == ({"x": ""}, ())


# Where the next one is made.


def chosen(
    *states: DeviceState, style: str = "spread", count: dict[int, int] | None = None
) -> int | None:
    found = choose_device(
        states,
        style,  # type: ignore[arg-type]
        {found.device.key: GIB for found in states},
        {device(index).key: number for index, number in (count or {}).items()},
        avoid={"GPU-3"},
    )
    return None if found is None else found.index


@pytest.mark.parametrize(
    ("states", "options", "index"),
    [
        pytest.param([state(free=9), state(free=20, index=1)], {}, 1, id="the emptiest"),
        pytest.param(
            [state(free=9), state(free=20, index=1)],
            {"style": "pack"},
            0,
            id="the fullest that fits",
        ),
        pytest.param(
            [state(free=9), state(free=20, index=1)],
            {"count": {1: 1}},
            0,
            id="one on each before a second",
        ),
        pytest.param([state()], {"count": {0: MOST_ON_DEVICE}}, None, id="no more than the most"),
        pytest.param([state(free=0)], {}, None, id="too little memory for a context"),
        pytest.param(
            [state(("s", 20))], {}, None, id="beside those that exist, which are not ended for it"
        ),
        pytest.param(
            [state(free=20, busy_fraction=0.95), state(free=9, index=1)],
            {},
            1,
            id="a calm one first",
        ),
        pytest.param([state(index=3)], {}, None, id="not where it does not start"),
        pytest.param([state(error="lost")], {}, None, id="not where nothing works"),
    ],
)
def test_the_device_of_the_next_hot_standby(
    states: list[DeviceState], options: dict[str, object], index: int | None
) -> None:
    assert chosen(*states, **options) == index  # type: ignore[arg-type]


def test_no_hot_standby_starts_beside_an_exclusive_task() -> None:
    alone = state().after(Reservation("a", "here", "GPU-0", GIB, exclusive=True))
    assert chosen(alone) is None


# What a survey makes of them.


def surveyed(reserved: int, measured: int, free: int) -> DeviceState:
    some = device()
    used = ProcessUse(7, 7, measured * GIB)
    return device_state(
        DeviceSnapshot(some, 0.0, free * GIB, processes=(used,) if measured else ()),
        [
            Reservation("s", "here", some.uuid, reserved * GIB, standby=True),
            Reservation("a", "here", some.uuid, 4 * GIB),
        ],
        {"s": measured * GIB} if measured else {},
        GIB,
    )


@pytest.mark.parametrize(
    ("reserved", "measured", "free", "beside"),
    [
        pytest.param(1, 0, 19, 18, id="reserved and not there yet"),
        pytest.param(2, 1, 19, 17, id="there in part"),
        pytest.param(1, 3, 19, 16, id="larger than it was reserved"),
    ],
)
def test_what_a_hot_standby_holds_counts_as_free_and_is_listed(
    reserved: int, measured: int, free: int, beside: int
) -> None:
    found = surveyed(reserved, measured, 24 - measured)
    assert (found.free_bytes, found.beside_bytes) == (free * GIB, beside * GIB)
    assert found.foreign_bytes == 0
    assert [r.request_id for r in found.reservations] == ["a"]
    later = found.after(Reservation("b", "here", "GPU-0", GIB))
    assert later.beside_bytes == (beside - 1) * GIB
    assert later.standbys == found.standbys


def test_hot_standbys_end_for_a_request_that_needs_a_device_to_the_last_byte() -> None:
    whole = Request("a", "a", 0, 0.0, memory=24 * GIB)
    # What the driver keeps for them belongs to no process: 23 of 24 GiB count as free.
    full, empty = state(("s", 1), ("t", 1), free=23), state(("u", 1), free=23, index=1)
    assert in_the_way(whole, [full]) == ("s", "t")
    assert in_the_way(whole, [full, empty]) == ("u",)
    both = Request("b", "b", 0, 0.0, memory=24 * GIB, count=2)
    assert in_the_way(both, [full]) == ()
    assert set(in_the_way(both, [full, empty])) == {"s", "t", "u"}


def test_no_hot_standby_ends_for_a_request_that_waits_for_another_task() -> None:
    whole = Request("a", "a", 0, 0.0, memory=24 * GIB)
    running = placed("b", 4)[1].reservations
    held = replace(state(("s", 1), free=19), reservations=running)
    assert in_the_way(whole, [held]) == ()
    assert in_the_way(Request("c", "c", 0, 0.0, memory=25 * GIB), [state(("s", 1))]) == ()
