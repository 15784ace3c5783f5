"""Whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.backfill import NO_BACKFILL
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Request
from prefect_gpu.scheduling.placement import Board, PlacementStyle
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.scheduling.scheduling_pass import (
    Decisions,
    HostState,
    RequestQueue,
    Shape,
    decide,
    explain,
    order_key,
)
from prefect_gpu.units import GIB
from tests.cases import cases
from tests.unit.scheduling.values import host, request, reserved, state

TWO = [state(0), state(1)]


def started(decisions: Decisions) -> list[tuple[str, list[int]]]:
    return [(r.id, [d.index for d in p.devices]) for r, p in decisions.placements]


def refused(decisions: Decisions) -> list[str]:
    return [r.id for r, _ in decisions.refusals]


def hungry(gib: float, name: str) -> Request:
    return request(1, name=name, host_bytes=int(gib * GIB))


@cases(
    "waiting, states, machine, style, starts",
    {
        "none waits": ([], TWO, host(), "spread", []),
        "spread over the devices": (
            [request(6, name=n) for n in "abc"],
            TWO,
            host(),
            "spread",
            [("a", [0]), ("b", [1]), ("c", [0])],
        ),
        "packed on one": (
            [request(6, name=n) for n in "abc"],
            TWO,
            host(),
            "pack",
            [("a", [0]), ("b", [0]), ("c", [0])],
        ),
        "two of 40 % together, a third waits": (
            [request(share=0.4, name=n) for n in "abc"],
            TWO[:1],
            host(),
            "spread",
            [("a", [0]), ("b", [0])],
        ),
        "priority goes first": (
            [request(6, name="low"), request(6, name="high", priority=5)],
            TWO[:1],
            host(1, 0, 1),
            "spread",
            [("high", [0])],
        ),
        "the return of a moved process goes before all priorities": (
            [request(6, name="high", priority=5), request(6, name="moved", returns_first=True)],
            TWO[:1],
            host(1, 0, 1),
            "spread",
            [("moved", [0])],
        ),
        "then first come, in whatever order they were added": (
            [request(6, name="late", sequence=8), request(6, name="early", sequence=7)],
            TWO[:1],
            host(1, 0, 1),
            "spread",
            [("early", [0])],
        ),
        "without budgets one on each device": (
            [request(name="a"), request(name="b"), request(1, name="c")],
            TWO,
            host(),
            "spread",
            [("a", [0]), ("b", [1])],
        ),
        "a request for a device alone blocks one that would join the first": (
            [request(1, name="a"), request(name="b"), request(1, name="c")],
            TWO[:1],
            host(),
            "spread",
            [("a", [0])],
        ),
        "a blocked head blocks those behind it": (
            [request(20, name="a"), request(20, name="b"), request(1, name="c")],
            TWO[:1],
            host(),
            "spread",
            [("a", [0])],
        ),
        "but not on devices that it could not use": (
            [
                request(20, name="a", devices=("0",)),
                request(20, name="b", devices=("0",)),
                request(1, name="c"),
            ],
            TWO,
            host(),
            "spread",
            [("a", [0]), ("c", [1])],
        ),
        "nor on those that are too small for it": (
            [request(60, name="a"), request(60, name="b"), request(1, name="c")],
            [state(0, 80), state(1, 24)],
            host(),
            "spread",
            [("a", [0]), ("c", [1])],
        ),
        "one that waits for two holds back both": (
            [
                request(1, name="a", devices=("0",)),
                request(1, count=2, name="b"),
                request(1, name="c"),
            ],
            [state(0, held=[reserved(0, 24)]), state(1)],
            host(),
            "spread",
            [],
        ),
        "one that waits for a lost device lets others pass": (
            [request(6, name="a", devices=("0",)), request(6, name="b")],
            [state(0, error="lost"), state(1)],
            host(),
            "spread",
            [("b", [1])],
        ),
        "all lost: all wait": (
            [request(6, name="a"), request(6, name="b")],
            [state(0, error="lost"), state(1, error="lost")],
            host(),
            "spread",
            [],
        ),
        "max_processes": (
            [request(6, name="a")],
            TWO,
            host(max_processes=3, processes=3),
            "spread",
            [],
        ),
        "a head that the machine cannot hold blocks all: all need of it": (
            [hungry(40, "a"), hungry(40, "b"), hungry(1, "c")],
            TWO,
            host(64),
            "spread",
            [("a", [0])],
        ),
        "an estimate alone stops no task": (
            [hungry(99, "a")],
            TWO,
            host(64),
            "spread",
            [("a", [0])],
        ),
        "a head that waits for its device leaves the machine to others": (
            [request(20, name="a", devices=("0",), host_bytes=99 * GIB), hungry(1, "b")],
            [state(0, held=[reserved(0, 10)]), state(1)],
            host(64, processes=1),
            "spread",
            [("b", [1])],
        ),
        "100 % is not one byte": (
            [request(share=1.0, name="a"), request(1 / GIB, name="b")],
            TWO,
            host(),
            "spread",
            [("a", [0]), ("b", [1])],
        ),
    },
)
def test_order(
    waiting: Sequence[Request],
    states: Sequence[DeviceState],
    machine: HostState,
    style: PlacementStyle,
    starts: list[tuple[str, list[int]]],
) -> None:
    queue = RequestQueue(waiting)
    decisions = decide(queue, Board(states, style), machine, NO_BACKFILL)
    assert started(decisions) == starts
    assert refused(decisions) == []
    assert len(queue) == len(waiting), "deciding leaves the queue as it is"


def test_the_impossible_is_refused_wherever_it_stands() -> None:
    waiting = [
        request(20, name="a"),
        request(20, name="b"),
        request(99, name="huge"),
        request(99, name="huge too"),
        request(1, devices=("9",), name="nowhere"),
    ]
    decisions = decide(RequestQueue(waiting), Board(TWO[:1]), host())
    assert started(decisions) == [("a", [0])]
    assert refused(decisions) == ["huge", "huge too", "nowhere"]


@pytest.mark.parametrize(
    ("asked", "states", "machine", "says"),
    [
        pytest.param(request(25, sequence=3), TWO, host(), "25GiB on any of 2 devices; most free 24GiB; 2 ahead in the queue: train, tune", id="devices, and how many are ahead"),
        pytest.param(request(1, devices=("1",), sequence=3), TWO, host(), "1GiB on device 1; most free 24GiB; 1 ahead in the queue: train", id="only those that could use its device"),
        pytest.param(request(1, priority=9, sequence=3), TWO, host(), "1GiB on any of 2 devices; most free 24GiB", id="none is ahead"),
        pytest.param(request(1, priority=9), TWO, host(processes=4, max_processes=4), "another process to end (max_processes is 4)", id="max_processes"),
        pytest.param(request(1, priority=9, host_bytes=9 * GIB), TWO, host(3, 1), "9GiB of host memory for its process; 3GiB available", id="host memory"),
    ],
)  # fmt: skip
def test_the_reason_of_a_wait_is_said(
    asked: Request, states: list[DeviceState], machine: HostState, says: str
) -> None:
    waiting = [
        request(1, sequence=0, name="train"),
        request(1, sequence=1, devices=("0",), name="tune"),
        request(1, sequence=2, devices=("77",)),
        request(1, sequence=9),
        asked,
    ]
    assert sentence(explain(asked, RequestQueue(waiting), states, machine)) == says


# The queue itself.


def test_a_queue_yields_its_requests_in_order() -> None:
    waiting = [
        request(1, sequence=5, name="e"),
        request(2, sequence=1, name="b"),
        request(1, sequence=0, name="a"),
        request(1, sequence=9, name="first", priority=1),
        request(2, sequence=5, name="f"),
    ]
    queue = RequestQueue(waiting)
    assert [r.id for r in queue] == ["first", "a", "b", "e", "f"]
    assert (len(queue), len(queue.lanes), bool(queue)) == (5, 2, True)
    for each in waiting:
        assert queue.remove(each)
        assert not queue.remove(each)
    assert (len(queue), len(queue.lanes), bool(queue)) == (0, 0, False)


def test_requests_with_one_sequence_number_are_distinguished() -> None:
    one, two, three = (request(1, sequence=4, name=n) for n in "abc")
    queue = RequestQueue([one, two])
    assert not queue.remove(three)
    assert queue.remove(two)
    queue.add(request(1, sequence=5, name="d"))
    assert not queue.remove(two)
    assert [r.id for r in queue] == ["a", "d"]


added = st.builds(
    request,
    st.sampled_from([1, 2, 3, None]),
    sequence=st.integers(0, 9),
    priority=st.integers(0, 1),
)


@given(st.lists(st.tuples(added, st.integers(0, 20)), max_size=40))
def test_a_queue_keeps_its_order_as_requests_come_and_go(
    steps: list[tuple[Request, int]],
) -> None:
    queue = RequestQueue()
    waiting: list[Request] = []
    for each, chosen in steps:
        if chosen < len(waiting):
            assert queue.remove(waiting.pop(chosen))
        queue.add(each)
        waiting.append(each)
        assert list(queue) == sorted(waiting, key=order_key)
        assert {Shape.of(lane[0][1]) for lane in queue.lanes} == {Shape.of(r) for r in waiting}
    for each in waiting:
        assert queue.remove(each)
    assert not queue


def test_requests_leave_and_come_in_any_order() -> None:
    waiting = [request(1, sequence=n) for n in range(100)]
    queue = RequestQueue(waiting)
    for gone, each in enumerate(waiting[:99], start=1):
        assert queue.remove(each)
        assert list(queue) == waiting[gone:]
    early = request(1, sequence=-1)
    queue.add(early)
    assert list(queue) == [early, waiting[99]]
