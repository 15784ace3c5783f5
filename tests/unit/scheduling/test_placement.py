"""Which devices a request gets: now, later or never."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Request
from prefect_gpu.scheduling.placement import (
    Board,
    PlacementStyle,
    check_possible,
    device_reason,
    select_devices,
)
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.units import GIB
from tests.cases import cases
from tests.unit.scheduling.values import request, reserved, state

TWO = [state(0), state(1)]
BUSY = state(0, held=[reserved(0, 10)])
ALONE = state(0, held=[reserved(0, 10, exclusive=True)])
LOST = state(0, error="GPU is lost")
MIXED = [state(0, 80), state(1, 24)]


#: The first has 14 GiB free, the second 24.
PAIR = [BUSY, state(1)]

#: A task that keeps the first device busy, as does `FILLING`.
FILLED = state(0, held=[replace(reserved(0, 4), fills=True)])
FILLING = request(6, fills=True)
FOUR_TASKS = state(0, held=[reserved(0, 1, by=n) for n in "abcd"])
FOUR_USED, FULL, HEADROOM = state(0, used_gib=4), state(0, used_gib=23), state(0, headroom_gib=1)


@cases(
    "asked, states, indices, budgets_gib, style",
    {
        "of equals the first": (request(6), TWO, [0], [6]),
        "of equals the first, packed too": (request(6), TWO, [0], [6], "pack"),
        "spread takes the emptiest": (request(6), PAIR, [1], [6]),
        "pack takes the fullest": (request(6), PAIR, [0], [6], "pack"),
        "pack takes the fullest that fits": (request(20), PAIR, [1], [20], "pack"),
        "what does not fit waits": (request(15), [BUSY]),
        "what just fits starts": (request(14), [BUSY], [0], [14]),
        "a share is of that device": (request(share=0.4), MIXED, [0], [32]),
        "pack by what would be left": (request(share=0.4), MIXED, [1], [9.6], "pack"),
        "a share fits where it fits": (
            *(request(share=0.5), [state(0, 80, used_gib=50), state(1, 24)], [1], [12]),
        ),
        "100 % is all that can be reserved": (request(share=1.0), [HEADROOM], [0], [23]),
        "100 % waits while others use it": (request(share=1.0), [FOUR_USED]),
        "without a budget: a device to itself": (request(), PAIR, [1], [24]),
        "without a budget none to share": (request(), [BUSY]),
        "others' memory is not in its budget": (request(), [FOUR_USED], [0], [20]),
        "a whole device with next to nothing free is none": (request(), [FULL]),
        "a small device is enough for itself": (request(), [state(0, 2)], [0], [2]),
        "no task joins an exclusive one": (request(6), [ALONE]),
        "an exclusive task joins no other": (request(6, exclusive=True), [BUSY]),
        "but goes to an empty device": (request(6, exclusive=True), PAIR, [1], [6], "pack"),
        "one that fills a device joins no other that does": (FILLING, [FILLED]),
        "but goes to another device, packed too": (FILLING, [FILLED, state(1)], [1], [6], "pack"),
        "even to one that is fuller": (FILLING, [FILLED, state(1, used_gib=12)], [1], [6]),
        "and joins others": (FILLING, [BUSY], [0], [6]),
        "others join one that does": (request(6), [FILLED], [0], [6]),
        "the task inside which it runs waits for it": (
            *(replace(FILLING, ancestors=("other",)), [FILLED], [0], [6]),
        ),
        "an urgent one does not wait": (replace(FILLING, priority=1), [FILLED], [0], [6]),
        "named, it waits as well": (replace(FILLING, devices=("0",)), [FILLED, state(1)]),
        "a lost device is passed over": (request(6), [LOST, state(1)], [1], [6]),
        "a lost device alone: wait": (request(6), [LOST]),
        "two devices": (request(6, count=2), TWO, [0, 1], [6, 6]),
        "two devices or none": (request(16, count=2), PAIR),
        "the two emptiest": (request(1, count=2), [*PAIR, state(2, used_gib=1)], [1, 2], [1, 1]),
        "each has its own share": (request(share=0.5, count=2), MIXED, [0, 1], [40, 12]),
        "named: in their order": (request(6, devices=("1", "0"), count=2), TWO, [1, 0], [6, 6]),
        "of named ones the first that fits": (request(6, devices=("0", "1")), PAIR, [0], [6]),
        "or the next if it does not": (request(20, devices=("0", "1")), PAIR, [1], [20]),
    },
    *(None, [], "spread"),
)
def test_choice(
    asked: Request,
    states: list[DeviceState],
    indices: list[int] | None,
    budgets_gib: list[float],
    style: PlacementStyle,
) -> None:
    board = Board(states, style)
    chosen = board.choose(asked, board.named(asked))
    assert chosen == indices
    if chosen is None:
        return
    placement = board.place(asked, chosen)
    budgets = tuple(int(gib * GIB) for gib in budgets_gib)
    assert (placement.devices, placement.budget_bytes) == (
        tuple(states[at].device for at in chosen),
        budgets,
    )
    alone = asked.exclusive or asked.memory is None
    assert [(r.request_id, r.reserved_bytes, r.exclusive) for r in placement.reservations] == [
        (asked.id, budget, alone) for budget in budgets
    ]
    assert [r.device_key for r in placement.reservations] == [d.key for d in placement.devices]


def test_naming_devices() -> None:
    many = [state(i) for i in range(12)]
    chosen = select_devices(request(1, devices=("3", "sim-11", "SIM-1")), many)
    assert [r.device.index for r in chosen] == [3, 11, 1]
    # Devices of a runner keep their index where only some are looked at.
    assert select_devices(request(1, devices=("3",)), many[2:]) == [many[3]]


@cases(
    "asked, states, says",
    {
        "no such index": (request(1, devices=("7",)), TWO, "gpu:device=7 names no device"),
        "no such UUID": (request(1, devices=("GPU",)), TWO, "gpu:device=GPU names no device"),
        "a prefix of several": (request(1, devices=("SIM",)), TWO, "names more than one"),
        "one device under two names": (request(1, devices=("0", "SIM-0")), TWO, "twice"),
        "more than there are": (request(1, count=3), TWO, "more devices than there are (2 here)"),
        "more than are named": (request(1, count=2, devices=("1",)), TWO, "(1 named)"),
        "larger than each": (request(25), TWO, "gpu:memory=25GiB is larger than any device"),
        "headroom is not given": (request(24), [state(0, headroom_gib=1)], "23GiB usable"),
        "too large for the second": (request(30, count=2), MIXED, "only 1 could hold it"),
        "too large for the named": (request(30, devices=("1",)), MIXED, "largest: device 1, 24GiB"),
        "nothing but headroom": (request(), [state(0, 1, headroom_gib=2)], "lower the headroom"),
        "a share of nothing": (
            request(share=0.5),
            [state(0, 1, headroom_gib=2)],
            "larger than any",
        ),
        "the reason of a lost device is told": (request(30), [LOST], "device 0: GPU is lost"),
    },
)
def test_never(asked: Request, states: list[DeviceState], says: str) -> None:
    with pytest.raises(PlacementError) as caught:
        check_possible(asked, states)
    assert says in str(caught.value)


@cases(
    "asked, states, says",
    {
        "one device": (request(15), [BUSY], "15GiB on device 0; most free 14GiB"),
        "any of several": (request(25), TWO, "25GiB on any of 2 devices; most free 24GiB"),
        "several of them": (request(25, count=2), TWO, "25GiB on 2 of 2 devices; most free 24GiB"),
        "shares differ": (request(share=0.5), MIXED, "12GiB or 40GiB on any of 2 devices; most free 80GiB"),
        "which tasks are in the way": (request(), [BUSY], "a device to itself on device 0; running there: task other"),
        "many are in the way": (request(2, exclusive=True), [FOUR_TASKS], "2GiB and no other task on device 0; running there: task a, task b, task c and others"),
        "which task has it alone": (request(1), [ALONE], "1GiB on device 0; in exclusive use by: task other"),
        "others' memory is in the way": (request(), [FULL], "a device to itself on device 0; most free 1GiB"),
        "a lost device": (request(1), [LOST], "1GiB on device 0; device 0: GPU is lost"),
        "one of them lost": (request(25), [LOST, state(1)], "25GiB on any of 2 devices; most free 24GiB"),
        "to 64 MiB": (request(1), [state(0, used_gib=23.97)], "1GiB on device 0; most free 0B"),
        "the other to compute less": (FILLING, [FILLED], "6GiB on device 0 where it computes alone; kept busy by: task other"),
        "memory, if that lacks too": (replace(FILLING, memory=21 * GIB), [FILLED], "21GiB on device 0; most free 20GiB"),
    },
)  # fmt: skip
def test_saying_what_is_waited_for(asked: Request, states: list[DeviceState], says: str) -> None:
    assert sentence(device_reason(asked, states)) == says


@cases(
    "gib, count, fits",
    {
        "the smaller of two": (16, 2, True),
        "only the larger": (20, 2, False),
        "the largest": (24, 1, True),
        "more devices than there are": (1, 3, False),
        "a device each": (None, 2, True),
    },
)
def test_no_device_is_asked_if_a_request_surely_fits(
    gib: float | None, count: int, fits: bool
) -> None:
    board = Board([state(0, 24), state(1, 16)])
    assert board.surely_fits(request(gib, count=count)) is fits


def test_two_that_fill_a_device_are_not_booked_on_one_in_the_same_pass() -> None:
    board = Board([state(0)])
    placement = board.place(FILLING, [0])
    assert placement.reservations[0].fills
    assert board.choose(request(6, fills=True)) is None
    assert board.choose(request(6)) == [0]
