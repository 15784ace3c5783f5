"""Which of many devices a request gets, look after look."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.board import Board, PlacementStyle
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import ModelBudgets, Placement, Request
from prefect_gpu.scheduling.placement import fits_now, need_bytes, place
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import promise, request, room


def busy(fraction: float | None, index: int = 0, **of_room: object) -> Room:
    plain = room(index, **of_room)  # type: ignore[arg-type]
    return replace(plain, snapshot=replace(plain.snapshot, busy_fraction=fraction))


def choose(board: Board, asked: Request) -> Placement | None:
    among = None
    if asked.devices:
        among = [board.rooms[int(name)] for name in asked.devices]
    chosen = board.choose(asked, among=among)
    return None if chosen is None else place(asked, chosen)


def take(board: Board, asked: Request) -> list[int] | None:
    placement = choose(board, asked)
    if placement is None:
        return None
    board.take(placement)
    return [device.index for device in placement.devices]


def test_what_is_taken_is_gone_until_it_is_given_back() -> None:
    board = Board([room(0)])
    first = choose(board, request(share=0.4))
    assert first is not None
    board.take(first)
    assert take(board, request(share=0.4)) == [0]
    assert take(board, request(share=0.4)) is None
    board.give_back(first.reservations[0])
    assert take(board, request(share=0.4)) == [0]


def test_who_has_a_device_alone_shuts_it_until_he_ends() -> None:
    board = Board([room(0), room(1)])
    alone = choose(board, request())
    assert alone is not None
    board.take(alone)
    assert len(board) == 1
    assert take(board, request(2)) == [1]
    assert take(board, request()) is None, "nobody may be there"
    board.give_back(alone.reservations[0])
    assert len(board) == 2
    assert take(board, request()) == [0]


@pytest.mark.parametrize(
    ("rooms", "style", "asked", "indices"),
    [
        pytest.param([busy(0.9), busy(0.1, 1, gib=8)], "spread", request(6), [1], id="a busy one is passed over though it has more room"),
        pytest.param([busy(0.9, held=[promise(0, 9)]), busy(0.1, 1)], "pack", request(6), [1], id="though it is fuller"),
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
    rooms: list[Room], style: PlacementStyle, asked: Request, indices: list[int]
) -> None:
    assert take(Board(rooms, style), asked) == indices


def test_no_more_tasks_on_a_device_than_are_allowed() -> None:
    board = Board([room(0), room(1)], "pack", max_tasks=2)
    assert [take(board, request(1)) for _ in range(5)] == [[0], [0], [1], [1], None]
    assert take(board, request(1, devices=("0",))) is None
    board.give_back(board.rooms[0].reservations[0])
    assert take(board, request(1, devices=("0", "1"))) == [0]


def test_what_is_kept_is_found_again_whoever_is_there() -> None:
    gone = room(3, error="lost")
    board = Board([room(0), room(1), room(2, gib=8), gone])
    keys = [each.device.key for each in board.rooms]
    asked, kept = request(20), (keys[1], keys[0])
    assert board.places_for(asked, kept) == (1, 0)
    taken = choose(board, request())
    assert taken is not None
    board.take(taken)
    assert board.places_for(asked, kept) == (1, 0)
    assert board.places_for(asked, (keys[0],)) == (0,), "others are kept by now"
    assert board.places_for(asked, (keys[0], keys[2])) is None, "one is too small"
    assert board.places_for(request(1), (keys[2], keys[3])) is None, "one does not work"
    assert board.places_for(request(1), (("node", "SIM-9"),)) is None, "one is not there"


def test_the_task_around_this_process_is_no_task_of_its_runner() -> None:
    outer = promise(0, 4, by="outer")
    board = Board([room(0, held=[outer])], max_tasks=1, held_by_parent=[outer])
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
    st.lists(st.tuples(asked, st.booleans()), max_size=25),
    st.data(),
)
def test_the_lists_give_what_looking_at_each_device_gives(
    sizes: list[int],
    fractions: list[float | None],
    style: PlacementStyle,
    max_tasks: int | None,
    steps: list[tuple[Request, bool]],
    data: st.DataObject,
) -> None:
    rooms = [busy(fractions[i], i, gib=gib) for i, gib in enumerate(sizes)]
    board = Board(rooms, style, max_tasks)
    sign = -1 if style == "spread" else 1
    running: list[Placement] = []
    for each, ends in steps:
        if ends and running:
            over = running.pop(data.draw(st.integers(0, len(running) - 1), "who ends"))
            for reservation in over.reservations:
                board.give_back(reservation)
        if data.draw(st.booleans(), "by model"):
            each = replace(each, memory=models)
        fitting = [
            (
                (r.snapshot.busy_fraction or 0) > 0.8,
                sign * (r.free_bytes - (need_bytes(each, r) or 0)),
                at,
            )
            for at, r in enumerate(board.rooms)
            if fits_now(each, r) and (max_tasks is None or len(r.reservations) < max_tasks)
        ]
        expected = [at for _, _, at in sorted(fitting)[: each.count]]
        placement = choose(board, each)
        if len(fitting) < each.count:
            assert placement is None
            continue
        assert placement is not None
        assert [device.index for device in placement.devices] == expected
        board.take(placement)
        running.append(placement)
