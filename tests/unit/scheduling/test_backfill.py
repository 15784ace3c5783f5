"""Which requests may pass a blocked one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefect_gpu.scheduling.backfill import (
    NO_BACKFILL,
    BlockedStatus,
    Patience,
    ready_s,
    spare_bytes,
)
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Request, Reservation
from prefect_gpu.scheduling.placement import Board
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.scheduling.scheduling_pass import RequestQueue, decide, explain
from prefect_gpu.units import GIB
from tests.cases import cases
from tests.unit.scheduling.values import host, request, reserved, state

#: Few enough to be reached.
SHORT = Patience(passes=2, wait_s=60.0, heads=1)


def until(ends_s: float | None, gib: float, index: int = 0, **others: object) -> Reservation:
    held = reserved(index, gib, by=f"until {ends_s}", **others)  # type: ignore[arg-type]
    return replace(held, ends_s=ends_s)


def started(
    queue: RequestQueue,
    states: Sequence[DeviceState],
    now_s: float = 0.0,
    patience: Patience = SHORT,
    max_tasks: int | None = None,
) -> list[tuple[str, list[int]]]:
    """Make one pass and carry it out; the devices stay as they are."""
    decisions = decide(queue, Board(states, max_tasks=max_tasks), host(), patience, now_s)
    queue.statuses.update(decisions.statuses)
    for each, _ in decisions.placements:
        assert queue.remove(each)
    return [(r.id, [d.index for d in p.devices]) for r, p in decisions.placements]


#: 20 of 24 GiB until 100 s.
HELD = state(0, held=[until(100.0, 20)])


@pytest.mark.parametrize(
    ("head", "later", "states", "starts"),
    [
        pytest.param(request(23), request(4, expected_s=100), [HELD], [0], id="it ends before"),
        pytest.param(request(23), request(4, expected_s=101), [HELD], None, id="it ends after"),
        pytest.param(request(23), request(4), [HELD], None, id="its end is not known"),
        pytest.param(request(20), request(4), [HELD], [0], id="it leaves memory for then"),
        pytest.param(request(20), request(4, exclusive=True), [HELD], None, id="no task may join it"),
        pytest.param(request(), request(1), [HELD], None, id="the blocked one wants all"),
        pytest.param(request(), request(1, expected_s=9), [HELD], [0], id="and gets it in time"),
        pytest.param(request(4.5, exclusive=True), request(1), [HELD], None, id="the blocked one joins no task"),
        pytest.param(request(23), request(4), [HELD, state(1, held=[until(200.0, 20, 1)])], [1], id="it may have what is not kept"),
        pytest.param(request(23), request(4), [HELD, state(1, held=[until(None, 20, 1)])], [1], id="a device whose ends are not known is not kept"),
        pytest.param(request(23, count=2), request(4, expected_s=150), [HELD, state(1, held=[until(200.0, 20, 1)])], [0], id="two are kept until both are free"),
        pytest.param(request(23, count=2), request(4, expected_s=250), [HELD, state(1, held=[until(200.0, 20, 1)])], None, id="both of them"),
        pytest.param(request(23, devices=("0",)), request(4), [HELD, state(1, held=[until(5.0, 20, 1)])], [1], id="what is named is kept"),
    ],
)  # fmt: skip
def test_a_later_one_passes_where_it_does_not_delay(
    head: Request, later: Request, states: list[DeviceState], starts: list[int] | None
) -> None:
    queue = RequestQueue([replace(head, id="head"), replace(later, id="later")])
    assert started(queue, states) == ([] if starts is None else [("later", starts)])
    standing = queue.statuses.get("head")
    assert standing is not None and standing.passed == 0 and standing.kept


def test_several_pass_only_while_together_they_leave_enough_memory() -> None:
    queue = RequestQueue([request(20, name="head"), *(request(2, name=n) for n in "abc")])
    assert [name for name, _ in started(queue, [HELD])] == ["a", "b"]


def test_places_count_as_memory_does() -> None:
    states = [state(0, held=[until(None, 1)]), state(1, held=[until(100.0, 20, 1)])]
    waiting = [request(20, count=2, name="head"), request(3, name="later")]
    assert started(RequestQueue(waiting), states, max_tasks=3) == [("later", [0])]
    assert started(RequestQueue(waiting), states, max_tasks=2) == [("later", [1])]


def test_what_is_kept_stays_kept() -> None:
    first, second = state(0, held=[until(100.0, 20)]), state(1, held=[until(200.0, 20, 1)])
    queue = RequestQueue([request(23, name="head"), request(4, name="a", expected_s=300)])
    assert started(queue, [first, second]) == [("a", [1])]
    # The other would be free sooner by now; where it goes first is taken as it comes.
    second = state(1, held=[until(50.0, 20, 1)])
    queue.add(request(4, name="b", expected_s=300))
    assert started(queue, [first, second], 30.0) == [("b", [1])]
    assert started(queue, [first, state(1)], 55.0) == [("head", [1])]


def test_a_device_that_is_lost_is_kept_no_longer() -> None:
    second = state(1, held=[until(200.0, 23, 1)])
    queue = RequestQueue([request(23, name="head"), request(4, name="behind")])
    started(queue, [HELD, second])
    queue.add(request(1, name="small"))
    started(queue, [state(0, error="lost"), second], 1.0)
    standing = queue.statuses.get("head")
    assert standing is not None and [uuid for _, uuid in standing.kept] == ["SIM-1"]


#: 20 of 24 GiB, it is not known until when.
UNTOLD = [state(i, held=[until(None, 20, i)]) for i in range(2)]


def test_where_ends_are_not_known_a_blocked_request_is_passed_so_often_and_no_more() -> None:
    queue = RequestQueue([request(23, name="head"), *(request(1, name=n) for n in "abcd")])
    assert [name for name, _ in started(queue, UNTOLD)] == ["a", "b"]
    assert queue.statuses.get("head") == BlockedStatus(passed=2, since_s=0.0, looked_s=0.0)
    assert started(queue, UNTOLD, 1.0) == []
    # Others than those that it could use are none of its business.
    small = state(2, 8)
    assert [name for name, _ in started(queue, [*UNTOLD, small], 2.0)] == ["c", "d"]


def test_where_ends_are_not_known_a_blocked_request_is_passed_for_so_long() -> None:
    queue = RequestQueue([request(23, name="head"), request(1, name="a")])
    assert [name for name, _ in started(queue, UNTOLD, 10.0)] == ["a"]
    queue.add(request(1, name="b"))
    assert started(queue, UNTOLD, 70.0) == []
    assert started(RequestQueue([request(23), request(1, name="b")]), UNTOLD, 70.0)


def test_once_it_may_not_be_passed_a_device_is_kept_if_its_end_is_known_by_then() -> None:
    queue = RequestQueue([request(23, name="head"), *(request(1.5, name=n) for n in "abcd")])
    started(queue, UNTOLD)
    known = [UNTOLD[0], state(1, held=[until(100.0, 20, 1)])]
    assert started(queue, known, 9.0) == [("c", [0]), ("d", [0])]


def test_one_that_is_overdue_drains_all_that_it_could_use() -> None:
    states = [HELD, state(1, held=[until(500.0, 20, 1)])]
    queue = RequestQueue([request(23, name="head"), request(4, name="a")])
    assert started(queue, states) == [("a", [1])]
    queue.add(request(4, name="b"))
    # What ran until 100 s still runs. Until then nothing was lost by letting others pass.
    assert started(queue, states, 99.0) == [("b", [1])]
    queue.add(request(4, name="c", expected_s=1))
    assert started(queue, states, 100.0) == []
    assert started(queue, [HELD, state(1)], 101.0) == [("head", [1]), ("c", [0])]


def test_a_request_of_higher_priority_does_not_count_as_passing() -> None:
    queue = RequestQueue([request(23, name="head"), request(4, name="urgent", priority=1)])
    assert started(queue, UNTOLD, patience=NO_BACKFILL) == [("urgent", [0])]
    assert queue.statuses.get("head") is None


def test_without_patience_no_request_passes_a_blocked_one() -> None:
    queue = RequestQueue([request(23, name="head"), request(4, name="a", expected_s=1)])
    assert started(queue, [HELD], patience=NO_BACKFILL) == []


def test_a_request_that_waits_for_a_kept_device_is_not_passed_by_what_ends_before() -> None:
    queue = RequestQueue([request(23, name="head"), request(22, name="second"), request(4, name="a", expected_s=9)])  # fmt: skip
    assert [name for name, _ in started(queue, [HELD])] == ["a"]
    assert queue.statuses.get("second") is None or queue.statuses.get("second").passed == 0  # type: ignore[union-attr]


def test_one_whose_broker_does_not_start_it_is_passed_so_often_and_then_its_devices_drain() -> None:
    queue = RequestQueue([request(20, name="first", origin="other/0")])

    def starts(name: str, passive: bool = True) -> bool:
        queue.add(request(4, name=name))
        board, origins = Board([state(0, held=[until(100.0, 4)])]), {"other/0"} if passive else ()
        decisions = decide(queue, board, host(), SHORT, 0.0, {"other/0": 9}, origins)
        queue.statuses.update(decisions.statuses)
        own = [r for r, _ in decisions.placements if not r.origin]
        return [r.id for r in own if queue.remove(r)] == [name]

    assert not starts("before it counts as blocked", passive=False)
    queue.remove(next(r for r in queue if not r.origin))
    assert [starts("a"), starts("b"), starts("c")] == [True, True, False]
    (status,) = queue.statuses.values()
    assert (status.passed, status.kept) == (SHORT.passes, ())


def test_what_is_noted_goes_with_the_request() -> None:
    head = request(23, name="head")
    queue = RequestQueue([head, request(4, name="behind")])
    assert started(queue, [HELD]) == []
    assert queue.statuses.get("head") is not None
    queue.remove(head)
    assert queue.statuses.get("head") is None


@pytest.mark.parametrize(
    ("asked", "held", "most", "seconds"),
    [
        pytest.param(request(4), [until(None, 20)], None, 5.0, id="now"),
        pytest.param(request(5), [until(9.0, 20)], None, 9.0, id="when the one ends"),
        pytest.param(request(5), [until(3.0, 20)], None, 5.0, id="overdue: any moment"),
        pytest.param(request(20), [until(9.0, 10), until(7.0, 10)], None, 9.0, id="when enough end"),
        pytest.param(request(12), [until(9.0, 10), until(None, 10)], None, 9.0, id="others may stay"),
        pytest.param(request(20), [until(9.0, 10), until(None, 10)], None, None, id="not if that is not known"),
        pytest.param(request(1), [until(9.0, 2, exclusive=True)], None, 9.0, id="when the exclusive task ends"),
        pytest.param(request(1, exclusive=True), [until(9.0, 2), until(8.0, 2)], None, 9.0, id="when all end"),
        pytest.param(request(), [until(9.0, 2)], None, 9.0, id="a device to itself"),
        pytest.param(request(1), [until(9.0, 2), until(8.0, 2)], 2, 8.0, id="when there is a place"),
        pytest.param(request(1, fills=True), [replace(until(9.0, 2), fills=True), until(7.0, 2)], None, 9.0, id="when the other computes no more"),
        pytest.param(request(25), [until(9.0, 2)], None, None, id="never"),
    ],
)  # fmt: skip
def test_when_a_device_is_expected_to_have_the_memory(
    asked: Request, held: list[Reservation], most: float | None, seconds: float | None
) -> None:
    assert ready_s(asked, state(0, held=held), 5.0, most or math.inf) == seconds


def test_memory_of_tasks_that_end_by_then_can_be_spared() -> None:
    there = state(0, held=[until(10.0, 10), until(20.0, 10)])
    assert spare_bytes(there, request(12), 10.0, math.inf) == 2 * GIB
    assert spare_bytes(there, request(12), 20.0, math.inf) == 12 * GIB
    assert spare_bytes(there, request(12), 10.0, 3) == 2 * GIB
    assert spare_bytes(there, request(12), 10.0, 2) < 0, "there is no place for a third"
    assert spare_bytes(there, request(15), 10.0, math.inf) < 0, "not even without one more"
    assert spare_bytes(there, request(12, exclusive=True), 20.0, math.inf) < 0
    assert spare_bytes(there, request(), 20.0, math.inf) < 0


def test_in_one_pass_no_more_of_a_kept_device_is_given_than_can_be_spared() -> None:
    states = [state(0, held=[until(100.0, 18)])]
    queue = RequestQueue([request(20, name="head")])
    queue.add(request(3, name="first"))
    queue.add(request(2, name="second"))
    queue.add(request(1, name="third"))
    assert started(queue, states) == [("first", [0]), ("third", [0])]


# What is said of a blocked request.


@cases(
    "standing, now_s, says",
    {
        "others pass it": (
            BlockedStatus(passed=1, since_s=0.0),
            9.0,
            "; later tasks that started before it: 1",
        ),
        "they did so often enough": (
            BlockedStatus(passed=2, since_s=0.0),
            9.0,
            "; later tasks that started before it: 2; no later task may start on the devices that it can use",
        ),
        "a device is kept": (
            BlockedStatus(since_s=0.0, kept=(("node", "SIM-0"),), starts_s=99.0),
            9.0,
            "; device 0 kept for it, free in about 1m 30s",
        ),
        "many are, two of which have left, and due": (
            BlockedStatus(
                since_s=0.0, kept=tuple(("node", f"SIM-{i}") for i in range(5)), starts_s=9.0
            ),
            9.0,
            "; device 0, SIM-1, SIM-2 and others kept for it",
        ),
    },
)
def test_what_is_done_for_a_blocked_request_is_said(
    standing: BlockedStatus, now_s: float, says: str
) -> None:
    head = request(23, name="head")
    queue = RequestQueue([head])
    queue.statuses.update({"head": standing})
    text = sentence(explain(head, queue, [HELD], host(), SHORT, now_s))
    assert text == "23GiB on device 0; most free 4GiB" + says


# A suspended process that comes back.


def returning(gib: float, **others: object) -> Request:
    return request(gib, name="back", returns=True, **others)


def test_one_device_is_kept_for_a_process_that_comes_back_and_no_more() -> None:
    soon, late = state(0, held=[until(100.0, 20)]), state(1, held=[until(200.0, 20, 1)])
    queue = RequestQueue([returning(23), request(4, name="a"), request(4, name="b")])
    assert started(queue, [soon, late]) == [("a", [1])]
    assert started(queue, [soon, late], 1.0) == [("b", [1])], (
        "the device is kept, b may not have it"
    )
    queue.add(request(4, name="short", expected_s=50))
    assert started(queue, [soon, state(1, held=[until(200.0, 24, 1)])], 2.0) == [("short", [0])]
    # No number of others and no time changes what is kept.
    for number in range(SHORT.passes + 2):
        queue.add(request(4, name=f"c{number}"))
        assert started(queue, [soon, late], 80.0) == [(f"c{number}", [1])]


def test_a_device_whose_ends_are_not_known_drains_for_a_process_that_comes_back() -> None:
    fuller = state(1, held=[until(None, 21, 1)])
    queue = RequestQueue([returning(23), *(request(1, name=n) for n in "abc")])
    assert [i for _, i in started(queue, [UNTOLD[0], fuller])] == [[1], [1], [1]]
    # It goes on to drain, although the other has more free by now.
    queue.add(request(1, name="d"))
    assert started(queue, [UNTOLD[0], state(1, held=[until(None, 12, 1)])], 1.0) == [("d", [1])]
    status = queue.statuses["back"]
    assert [uuid for _, uuid in status.kept] == ["SIM-0"] and status.starts_s is None
    text = sentence(explain(next(iter(queue)), queue, UNTOLD, host(), SHORT, 2.0))
    assert text.endswith("; device 0 kept for it")
    # Its only device: no later request starts at all.
    assert started(RequestQueue([returning(23), request(1)]), UNTOLD[:1]) == []


def test_two_that_come_back_keep_a_device_each() -> None:
    queue = RequestQueue([returning(23), replace(returning(22), id="second"), request(1, name="a")])
    three = [*UNTOLD, state(2, held=[until(None, 22, 2)])]
    assert started(queue, three) == [("a", [2])]
    assert started(queue, three[:2]) == []


def test_a_request_of_higher_priority_has_the_device_of_one_that_comes_back() -> None:
    queue = RequestQueue([returning(23, priority=1), request(4, name="urgent", priority=2)])
    assert started(queue, [HELD]) == [("urgent", [0])]


def test_a_process_that_comes_back_is_overdue_on_its_device_alone() -> None:
    queue = RequestQueue([returning(24), request(1, name="a"), request(2, name="b", expected_s=1)])
    late = state(1, held=[until(900.0, 20, 1)])
    assert started(queue, [HELD, late], 98.0) == [("a", [1]), ("b", [0])]
    queue.add(request(1, name="c", expected_s=1))
    assert started(queue, [HELD, late], 101.0) == [("c", [1])]
