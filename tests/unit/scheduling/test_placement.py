"""Which devices a request gets: now, later or never."""

from __future__ import annotations

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
from tests.unit.scheduling.values import request, reserved, state

TWO = [state(0), state(1)]
BUSY = state(0, held=[reserved(0, 10)])
ALONE = state(0, held=[reserved(0, 10, exclusive=True)])
LOST = state(0, error="GPU is lost")
MIXED = [state(0, 80), state(1, 24)]


@pytest.mark.parametrize(
    ("asked", "states", "style", "indices", "budgets_gib"),
    [
        pytest.param(request(6), TWO, "spread", [0], [6], id="of equals the first"),
        pytest.param(request(6), TWO, "pack", [0], [6], id="of equals the first, packed too"),
        pytest.param(
            request(6), [BUSY, state(1)], "spread", [1], [6], id="spread takes the emptiest"
        ),
        pytest.param(request(6), [BUSY, state(1)], "pack", [0], [6], id="pack takes the fullest"),
        pytest.param(
            request(20), [BUSY, state(1)], "pack", [1], [20], id="pack takes the fullest that fits"
        ),
        pytest.param(request(15), [BUSY], "spread", None, [], id="what does not fit waits"),
        pytest.param(request(14), [BUSY], "spread", [0], [14], id="what just fits starts"),
        pytest.param(
            request(share=0.4), MIXED, "spread", [0], [32], id="a share is of that device"
        ),
        pytest.param(
            request(share=0.4), MIXED, "pack", [1], [9.6], id="pack by what would be left"
        ),
        pytest.param(
            request(share=0.5),
            [state(0, 80, used_gib=50), state(1, 24)],
            "spread",
            [1],
            [12],
            id="a share fits where it fits",
        ),
        pytest.param(
            request(share=1.0),
            [state(0, headroom_gib=1)],
            "spread",
            [0],
            [23],
            id="100 % is all that can be reserved",
        ),
        pytest.param(
            request(share=1.0),
            [state(0, used_gib=1)],
            "spread",
            None,
            [],
            id="100 % waits while others use it",
        ),
        pytest.param(
            request(),
            [BUSY, state(1)],
            "spread",
            [1],
            [24],
            id="without a budget: a device to itself",
        ),
        pytest.param(request(), [BUSY], "spread", None, [], id="without a budget none to share"),
        pytest.param(
            request(),
            [state(0, used_gib=4)],
            "spread",
            [0],
            [20],
            id="others' memory is not in its budget",
        ),
        pytest.param(
            request(),
            [state(0, used_gib=23)],
            "spread",
            None,
            [],
            id="a whole device with next to nothing free is none",
        ),
        pytest.param(
            request(), [state(0, 2)], "spread", [0], [2], id="a small device is enough for itself"
        ),
        pytest.param(request(6), [ALONE], "spread", None, [], id="no task joins an exclusive one"),
        pytest.param(
            request(6, exclusive=True),
            [BUSY],
            "spread",
            None,
            [],
            id="an exclusive task joins no other",
        ),
        pytest.param(
            request(6, exclusive=True),
            [BUSY, state(1)],
            "pack",
            [1],
            [6],
            id="an exclusive task goes to an empty device",
        ),
        pytest.param(
            request(6), [LOST, state(1)], "spread", [1], [6], id="a lost device is passed over"
        ),
        pytest.param(request(6), [LOST], "spread", None, [], id="a lost device alone: wait"),
        pytest.param(request(6, count=2), TWO, "spread", [0, 1], [6, 6], id="two devices"),
        pytest.param(
            request(16, count=2), [BUSY, state(1)], "spread", None, [], id="two devices or none"
        ),
        pytest.param(
            request(1, count=2),
            [BUSY, state(1), state(2, used_gib=1)],
            "spread",
            [1, 2],
            [1, 1],
            id="the two emptiest",
        ),
        pytest.param(
            request(share=0.5, count=2),
            MIXED,
            "spread",
            [0, 1],
            [40, 12],
            id="each has its own share",
        ),
        pytest.param(
            request(6, devices=("1", "0"), count=2),
            TWO,
            "spread",
            [1, 0],
            [6, 6],
            id="named devices keep their order",
        ),
        pytest.param(
            request(6, devices=("0", "1")),
            [BUSY, state(1)],
            "spread",
            [0],
            [6],
            id="of named ones the first that fits",
        ),
        pytest.param(
            request(20, devices=("0", "1")),
            [BUSY, state(1)],
            "spread",
            [1],
            [20],
            id="of named ones the next if it does not",
        ),
    ],
)
def test_choice(
    asked: Request,
    states: list[DeviceState],
    style: PlacementStyle,
    indices: list[int] | None,
    budgets_gib: list[float],
) -> None:
    board = Board(states, style)
    chosen = board.choose(asked, board.named(asked))
    placement = None if chosen is None else board.place(asked, chosen)
    if indices is None:
        assert placement is None
        return
    assert placement is not None
    assert [device.index for device in placement.devices] == indices
    assert placement.budget_bytes == tuple(int(gib * GIB) for gib in budgets_gib)
    assert [
        (r.request_id, r.device_key, r.reserved_bytes, r.exclusive) for r in placement.reservations
    ] == [
        (asked.id, device.key, budget, asked.exclusive or asked.memory is None)
        for device, budget in zip(placement.devices, placement.budget_bytes, strict=True)
    ]


def test_naming_devices() -> None:
    many = [state(i) for i in range(12)]
    chosen = select_devices(request(1, devices=("3", "sim-11", "SIM-1")), many)
    assert [r.device.index for r in chosen] == [3, 11, 1]
    # Devices of a runner keep their index where only some are looked at.
    assert select_devices(request(1, devices=("3",)), many[2:]) == [many[3]]


@pytest.mark.parametrize(
    ("asked", "states", "says"),
    [
        pytest.param(
            request(1, devices=("7",)), TWO, "gpu:device=7 names no device", id="no such index"
        ),
        pytest.param(
            request(1, devices=("GPU",)), TWO, "gpu:device=GPU names no device", id="no such UUID"
        ),
        pytest.param(
            request(1, devices=("SIM",)), TWO, "names more than one", id="a prefix of several"
        ),
        pytest.param(
            request(1, devices=("0", "SIM-0")), TWO, "twice", id="one device under two names"
        ),
        pytest.param(
            request(1, count=3),
            TWO,
            "more devices than there are (2 here)",
            id="more than there are",
        ),
        pytest.param(
            request(1, count=2, devices=("1",)), TWO, "(1 named)", id="more than are named"
        ),
        pytest.param(
            request(25), TWO, "gpu:memory=25GiB is larger than any device", id="larger than each"
        ),
        pytest.param(
            request(24), [state(0, headroom_gib=1)], "23GiB usable", id="headroom is not given"
        ),
        pytest.param(
            request(30, count=2), MIXED, "only 1 could hold it", id="too large for the second"
        ),
        pytest.param(
            request(30, devices=("1",)),
            MIXED,
            "largest: device 1, 24GiB",
            id="too large for the named",
        ),
        pytest.param(
            request(),
            [state(0, 1, headroom_gib=2)],
            "lower the headroom",
            id="nothing but headroom",
        ),
        pytest.param(
            request(share=0.5),
            [state(0, 1, headroom_gib=2)],
            "larger than any",
            id="a share of nothing",
        ),
        pytest.param(
            request(30),
            [state(0, error="lost")],
            "device 0: lost",
            id="the reason of a lost device is told",
        ),
    ],
)
def test_never(asked: Request, states: list[DeviceState], says: str) -> None:
    with pytest.raises(PlacementError) as caught:
        check_possible(asked, states)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "states", "says"),
    [
        pytest.param(request(15), [BUSY], "15GiB on device 0; most free 14GiB", id="one device"),
        pytest.param(
            request(25), TWO, "25GiB on any of 2 devices; most free 24GiB", id="any of several"
        ),
        pytest.param(
            request(25, count=2),
            TWO,
            "25GiB on 2 of 2 devices; most free 24GiB",
            id="several of them",
        ),
        pytest.param(
            request(share=0.5),
            MIXED,
            "12GiB or 40GiB on any of 2 devices; most free 80GiB",
            id="shares differ",
        ),
        pytest.param(
            request(),
            [BUSY],
            "a device to itself on device 0; running there: task other",
            id="which tasks are in the way",
        ),
        pytest.param(
            request(2, exclusive=True),
            [state(0, held=[reserved(0, 1, by=n) for n in "abcd"])],
            "2GiB and no other task on device 0; running there: task a, task b, task c and others",
            id="many are in the way",
        ),
        pytest.param(
            request(1),
            [ALONE],
            "1GiB on device 0; in exclusive use by: task other",
            id="which task has it alone",
        ),
        pytest.param(
            request(),
            [state(0, used_gib=23)],
            "a device to itself on device 0; most free 1GiB",
            id="others' memory is in the way",
        ),
        pytest.param(
            request(1), [LOST], "1GiB on device 0; device 0: GPU is lost", id="a lost device"
        ),
        pytest.param(
            request(25),
            [LOST, state(1)],
            "25GiB on any of 2 devices; most free 24GiB",
            id="one of them lost",
        ),
        pytest.param(
            request(1), [state(0, used_gib=23.97)], "1GiB on device 0; most free 0B", id="to 64 MiB"
        ),
    ],
)
def test_saying_what_is_waited_for(asked: Request, states: list[DeviceState], says: str) -> None:
    assert sentence(device_reason(asked, states)) == says
