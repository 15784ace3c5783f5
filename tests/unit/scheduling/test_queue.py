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
    decide,
    explain,
    order_key,
    shape_of,
)
from prefect_gpu.units import GIB
from tests.cases import cases
from tests.unit.scheduling.values import host, request, reserved, state

TWO = [state(0), state(1)]


def started(decisions: Decisions) -> str:
    """The started requests with their devices: `a0 b12`."""
    found = ((r.id, "".join(str(d.index) for d in p.devices)) for r, p in decisions.placements)
    return " ".join(f"{name}{indices}" for name, indices in found)


def refused(decisions: Decisions) -> list[str]:
    return [r.id for r, _ in decisions.refusals]


def hungry(gib: float, name: str) -> Request:
    return request(1, name=name, host_bytes=int(gib * GIB))


def sized(**gib: float | None) -> list[Request]:
    """Requests by name: GiB, or `None` for a device to itself."""
    return [request(size, name=name) for name, size in gib.items()]


SHARES = [request(share=0.4, name=n) for n in "abc"]
ON_FIRST = [request(20, name=n, devices=("0",)) for n in "ab"]
FIRST_LOST = [state(0, error="lost"), state(1)]
LARGE = request(20, name="a", devices=("0",), host_bytes=99 * GIB)
URGENT, MOVED = request(6, name="u", priority=5), request(6, name="m", returns_first=True)
ONE_PROCESS = host(1, 0, 1)


@cases(
    "waiting, starts, states, machine, style",
    {
        "none waits": ([], ""),
        "spread over the devices": (sized(a=6, b=6, c=6), "a0 b1 c0"),
        "packed on one": (sized(a=6, b=6, c=6), "a0 b0 c0", TWO, host(), "pack"),
        "two of 40 % together, a third waits": (SHARES, "a0 b0", TWO[:1]),
        "priority goes first": ([*sized(low=6), URGENT], "u0", TWO[:1], ONE_PROCESS),
        "a return of a moved process is before all": ([URGENT, MOVED], "m0", TWO[:1], ONE_PROCESS),
        "then first come, in whatever order they were added": (
            [request(6, name="b", sequence=8), request(6, name="a", sequence=7)],
            *("a0", TWO[:1], ONE_PROCESS),
        ),
        "without budgets one on each device": (sized(a=None, b=None, c=1), "a0 b1"),
        "one that wants a device blocks one that joins": (sized(a=1, b=None, c=1), "a0", TWO[:1]),
        "a blocked head blocks those behind it": (sized(a=20, b=20, c=1), "a0", TWO[:1]),
        "but not on devices that it could not use": ([*ON_FIRST, *sized(c=1)], "a0 c1"),
        "nor on those that are too small": (
            *(sized(a=60, b=60, c=1), "a0 c1", [state(0, 80), state(1, 24)]),
        ),
        "one that waits for two holds back both": (
            [request(1, name="a", devices=("0",)), request(1, count=2, name="b"), *sized(c=1)],
            *("", [state(0, held=[reserved(0, 24)]), state(1)]),
        ),
        "one that waits for a lost device lets others pass": (
            *([request(6, name="a", devices=("0",)), *sized(b=6)], "b1", FIRST_LOST),
        ),
        "all lost: all wait": (sized(a=6, b=6), "", FIRST_LOST[:1]),
        "max_processes": (sized(a=6), "", TWO, host(max_processes=3, processes=3)),
        "a head that the machine cannot hold blocks all: all need of it": (
            *([hungry(40, "a"), hungry(40, "b"), hungry(1, "c")], "a0", TWO, host(64)),
        ),
        "an estimate alone stops no task": ([hungry(99, "a")], "a0", TWO, host(64)),
        "a head that waits for its device leaves the machine to others": (
            [LARGE, hungry(1, "b")],
            *("b1", [state(0, held=[reserved(0, 10)]), state(1)], host(64, processes=1)),
        ),
        "100 % is not one byte": ([request(share=1.0, name="a"), *sized(b=1 / GIB)], "a0 b1"),
    },
    *(TWO, host(), "spread"),
)
def test_order(
    waiting: Sequence[Request],
    starts: str,
    states: Sequence[DeviceState],
    machine: HostState,
    style: PlacementStyle,
) -> None:
    queue = RequestQueue(waiting)
    decisions = decide(queue, Board(states, style), machine, NO_BACKFILL)
    assert started(decisions) == starts
    assert refused(decisions) == []
    assert len(queue) == len(waiting), "deciding leaves the queue as it is"


def test_the_impossible_is_refused_wherever_it_stands() -> None:
    nowhere = request(1, devices=("9",), name="nowhere")
    waiting = [*sized(a=20, b=20, huge=99, huge_too=99), nowhere]
    decisions = decide(RequestQueue(waiting), Board(TWO[:1]), host())
    assert started(decisions) == "a0"
    assert refused(decisions) == ["huge", "huge_too", "nowhere"]


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
def test_a_queue_keeps_its_order_as_requests_come_and_go(steps: list[tuple[Request, int]]) -> None:
    queue = RequestQueue()
    waiting: list[Request] = []
    for each, chosen in steps:
        if chosen < len(waiting):
            assert queue.remove(waiting.pop(chosen))
        queue.add(each)
        waiting.append(each)
        assert list(queue) == sorted(waiting, key=order_key)
        assert {shape_of(lane[0][1]) for lane in queue.lanes} == {shape_of(r) for r in waiting}
    for each in waiting:
        assert queue.remove(each)
    assert not queue
