"""Which of many devices a request gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import ModelBudgets, Placement, Request
from prefect_gpu.scheduling.placement import Board, PlacementStyle, fits_now, need_bytes
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import request, reserved, state


def busy(fraction: float | None, index: int = 0, **of_room: object) -> DeviceState:
    plain = state(index, **of_room)  # type: ignore[arg-type]
    return replace(plain, snapshot=replace(plain.snapshot, busy_fraction=fraction))


def choose(board: Board, asked: Request) -> Placement | None:
    chosen = board.choose(asked, board.named(asked))
    return None if chosen is None else board.place(asked, chosen)


def take(board: Board, asked: Request) -> list[int] | None:
    placement = choose(board, asked)
    if placement is None:
        return None
    return [device.index for device in placement.devices]


def test_what_is_booked_is_no_longer_free() -> None:
    board = Board([state(0)])
    assert [take(board, request(share=0.4)) for _ in range(3)] == [[0], [0], None]


def test_a_device_that_one_task_has_alone_takes_no_other() -> None:
    board = Board([state(0), state(1)])
    assert take(board, request()) == [0]
    assert take(board, request(2)) == [1]
    assert take(board, request(2)) == [1]
    assert take(board, request()) is None, "a task runs there"


@pytest.mark.parametrize(
    ("states", "style", "asked", "indices"),
    [
        pytest.param([busy(0.9), busy(0.1, 1, gib=8)], "spread", request(6), [1], id="a busy one is passed over though it has more free memory"),
        pytest.param([busy(0.9, held=[reserved(0, 9)]), busy(0.1, 1)], "pack", request(6), [1], id="though it is fuller"),
        pytest.param([busy(0.9), busy(0.1, 1, gib=8)], "spread", request(9), [0], id="not if no other fits"),
        pytest.param([busy(0.8), busy(0.1, 1, gib=8)], "spread", request(6), [0], id="80 % is not above 80 %"),
        pytest.param([busy(None), busy(0.1, 1, gib=8)], "spread", request(6), [0], id="not known is not busy"),
        pytest.param([busy(0.9), busy(1.0, 1)], "spread", request(6), [0], id="all busy: the emptiest"),
        pytest.param([busy(0.9), busy(0.1, 1)], "spread", request(), [1], id="for a device to itself too"),
        pytest.param([busy(0.9), busy(0.1, 1), busy(None, 2)], "spread", request(6, count=2), [1, 2], id="for several"),
        pytest.param([busy(0.9), busy(0.1, 1)], "spread", request(6, count=2), [1, 0], id="calm ones first, then busy ones"),
        pytest.param([busy(0.9), busy(0.1, 1)], "spread", request(6, devices=("0", "1")), [1], id="of named ones the calm one"),
        pytest.param([busy(0.9), busy(0.1, 1)], "spread", request(6, count=2, devices=("0", "1")), [0, 1], id="several named ones keep their order"),
    ],
)  # fmt: skip
def test_busy_devices(
    states: list[DeviceState], style: PlacementStyle, asked: Request, indices: list[int]
) -> None:
    assert take(Board(states, style), asked) == indices


def test_no_more_tasks_on_a_device_than_are_allowed() -> None:
    board = Board([state(0), state(1)], "pack", max_tasks=2)
    assert [take(board, request(1)) for _ in range(5)] == [[0], [0], [1], [1], None]
    assert take(board, request(1, devices=("0",))) is None


def test_the_tasks_around_this_process_are_no_tasks_of_its_runner() -> None:
    around = [reserved(0, 4, by="outer"), reserved(0, 4, by="middle")]
    board = Board([state(0, held=around)], max_tasks=1, around=around)
    assert [take(board, request(1)) for _ in range(2)] == [[0], None]


models = ModelBudgets((("simulated", 6 * GIB),))
asked = st.builds(
    request,
    gib=st.sampled_from([1, 3, 6.5, 20, 60]),
    count=st.sampled_from([1, 1, 2, 3]),
    exclusive=st.booleans(),
) | st.builds(request, share=st.sampled_from([None, 0.1, 0.5, 1.0]))  # fmt: skip


@given(
    st.lists(st.sampled_from([8, 24, 80]), min_size=1, max_size=6),
    st.lists(st.sampled_from([None, 0.1, 0.9]), min_size=6, max_size=6),
    st.sampled_from(["spread", "pack"]),
    st.none() | st.integers(1, 3),
    st.lists(asked, max_size=25),
    st.data(),
)
def test_the_sorted_lists_choose_what_comparing_all_devices_would(
    sizes: list[int],
    fractions: list[float | None],
    style: PlacementStyle,
    max_tasks: int | None,
    steps: list[Request],
    data: st.DataObject,
) -> None:
    states = [busy(fractions[i], i, gib=gib) for i, gib in enumerate(sizes)]
    board = Board(states, style, max_tasks)
    sign = -1 if style == "spread" else 1
    for each in steps:
        if data.draw(st.booleans(), "by model"):
            each = replace(each, memory=models)
        fitting = [
            (
                (r.snapshot.busy_fraction or 0) > 0.8,
                sign * (r.free_bytes - (need_bytes(each, r) or 0)),
                at,
            )
            for at, r in enumerate(board.states)
            if fits_now(each, r) and (max_tasks is None or len(r.reservations) < max_tasks)
        ]
        expected = [at for _, _, at in sorted(fitting)[: each.count]]
        placement = choose(board, each)
        if len(fitting) < each.count:
            assert placement is None
            continue
        assert placement is not None
        assert [device.index for device in placement.devices] == expected
