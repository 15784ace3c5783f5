"""A look that knows the one before leaves nobody waiting whom a look at everything would start."""

from __future__ import annotations

import copy
import heapq
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE, Patience, Standing
from prefect_gpu.scheduling.board import Board, PlacementStyle
from prefect_gpu.scheduling.memory import survey_all
from prefect_gpu.scheduling.model import Placement, Request, Reservation
from prefect_gpu.scheduling.queue import RequestQueue
from prefect_gpu.scheduling.turns import Decisions, HostRoom, decide
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import HOST, room, snapshot
from tests.unit.scheduling.values import request as ask

PATIENCES = (
    PATIENCE,
    NO_BACKFILL,
    Patience(passes=2, wait_s=1800.0, heads=1),
    Patience(passes=3, wait_s=40.0, heads=2),
    Patience(passes=64, wait_s=100.0, heads=3),
)


class World:
    """Devices, who waits and who runs, by a number that everything follows from."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.patience = random.choice(PATIENCES)
        style: PlacementStyle = random.choice(["spread", "pack"])
        sizes = [random.choice([24, 80, 80]) for _ in range(random.randint(1, 5))]
        snapshots = [snapshot(index, gib) for index, gib in enumerate(sizes)]
        most_tasks = random.choice([None, None, 2])
        self.board = Board(survey_all(snapshots, (), {}, 0), style, most_tasks)
        self.max_processes = random.choice([3, 1000, 1000])
        self.knows = random.random() < 0.7
        self.queue = RequestQueue()
        self.now_s = 0.0
        self.running: list[tuple[float, int, Placement]] = []
        self.last: Decisions | None = None
        self.made = 0
        self.seen: Counter[str] = Counter()

    def come(self) -> None:
        random = self.random
        self.made += 1
        # Some that share a lane are over sooner than others of it.
        expected_s = random.choice([5.0, 17.0, 31.0, 60.0]) if self.knows else None
        self.queue.add(
            Request(
                id=str(self.made),
                task_name="t",
                sequence=self.made,
                submitted_s=self.now_s,
                memory=random.choice([2 * GIB, 6 * GIB, 10 * GIB, 20 * GIB, 70 * GIB, 0.3, None]),
                count=random.choice([1, 1, 1, 1, 2, 3]),
                devices=random.choice([(), (), (), (), ("0",), ("0", "1")]),
                exclusive=random.random() < 0.1,
                priority=random.choice([0, 0, 0, 1]),
                expected_s=expected_s,
            )
        )
        self.last = None

    def go(self) -> None:
        waiting = list(self.queue)
        self.queue.remove(self.random.choice(waiting))
        self.last = None

    def end(self) -> None:
        self.now_s, _, placement = heapq.heappop(self.running)
        for reservation in placement.reservations:
            self.board.give_back(reservation)

    def decide(self, queue: RequestQueue, board: Board, last: Decisions | None) -> Decisions:
        host = HostRoom(1 << 62, 0, len(self.running), self.max_processes)
        return decide(queue, board, host, self.patience, self.now_s, after=last)

    def look(self) -> None:
        last, self.last = self.last, None
        full = self.decide(*copy.deepcopy((self.queue, self.board)), None)
        made = self.last = self.decide(self.queue, self.board, last)
        self.queue.note(made.standings)
        for gone, _ in (*made.placements, *made.refusals):
            assert self.queue.remove(gone)
        for request, placement in made.placements:
            lasts_s = (request.expected_s or 20.0) * self.random.uniform(0.5, 2.0)
            heapq.heappush(self.running, (self.now_s + lasts_s, int(request.id), placement))
        self.seen["looks"] += 1
        if not made.complete:
            return
        self.seen["complete"] += 1
        after = last is not None and last.complete
        self.seen["after a complete one"] += after
        self.seen["of them with a start"] += after and bool(made.placements)
        assert [p for _, p in made.placements] == [p for _, p in full.placements]
        again = self.decide(*copy.deepcopy((self.queue, self.board)), None)
        assert not again.placements, "it says that nobody else could start"

    def run(self, steps: int) -> None:
        for _ in range(self.random.randint(3, 25)):
            self.come()
        self.look()
        for _ in range(steps):
            if not self.running and not self.queue:
                break
            if self.running:
                self.end()
            if self.random.random() < 0.15:
                self.come()
            if self.queue and self.random.random() < 0.05:
                self.go()
            self.look()


@given(st.integers(0, 2**32))
def test_it_starts_whom_a_look_at_everything_starts(seed: int) -> None:
    World(seed).run(40)


def test_the_property_is_about_something() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        world = World(seed)
        world.run(40)
        seen += world.seen
    assert seen["after a complete one"] > seen["looks"] / 4
    assert seen["of them with a start"] > 50


def two_full_devices() -> tuple[Board, list[Placement]]:
    board = Board([room(0, 24), room(1, 24)])
    queue = RequestQueue([ask(20, name="a"), ask(20, name="b")])
    host = HostRoom(1 << 62, 0, 0, 1000)
    first = decide(queue, board, host)
    assert first.complete
    return board, [placement for _, placement in first.placements]


def test_after_a_look_only_what_came_back_is_looked_at() -> None:
    board, (one, _) = two_full_devices()
    queue = RequestQueue([ask(10, name="large"), ask(3, name="small")])
    host = HostRoom(1 << 62, 0, 2, 1000)
    last = decide(queue, board, host)
    (started,) = last.placements
    assert started[0].memory == 3 * GIB
    queue.remove(started[0])
    board.give_back(one.reservations[0])
    then = decide(queue, board, host, after=last)
    assert [r.memory for r, _ in then.placements] == [10 * GIB]


@pytest.mark.parametrize("told", [True, False])
def test_a_look_that_was_cut_short_leads_to_one_at_everything(told: bool) -> None:
    board = Board([room(0, 24), room(1, 24)])
    queue = RequestQueue([ask(4), ask(4), ask(4)])
    first = decide(queue, board, HostRoom(1 << 62, 0, 0, 1))
    assert len(first.placements) == 1 and not first.complete
    queue.remove(first.placements[0][0])
    last = first if told else None
    then = decide(queue, board, HostRoom(1 << 62, 0, 1, 1000), after=last)
    assert len(then.placements) == 2 and then.complete


def held(index: int, by: str, ends_s: float | None) -> Reservation:
    return Reservation(by, HOST, f"SIM-{index}", 22 * GIB, ends_s=ends_s)


def test_of_one_lane_the_next_may_have_what_the_first_would_hold_too_long() -> None:
    soon, late, unknown = held(1, "soon", 30.0), held(2, "late", 50.0), held(3, "unknown", None)
    rooms = [room(0, 24), *(room(int(r.device_uuid[-1]), 24, [r]) for r in (soon, late, unknown))]
    board = Board(rooms)
    head = ask(20, count=3, expected_s=5.0)
    first, second = ask(20, expected_s=31.0), ask(20, expected_s=17.0)
    queue = RequestQueue([head, first, second])
    assert len(queue.lanes) == 2
    host = HostRoom(1 << 62, 0, 3, 1000)
    before = decide(queue, board, host, now_s=20.0)
    assert not before.placements and before.complete
    assert before.standings[head.id].starts_s == 50.0
    queue.note(before.standings)
    board.give_back(unknown)
    then = decide(queue, board, host, now_s=26.0, after=before)
    assert [(r.id, p.devices[0].index) for r, p in then.placements] == [
        (first.id, 3),
        (second.id, 0),
    ]


def test_devices_that_were_let_go_are_looked_at_again() -> None:
    board = Board([room(0, 24, [held(0, "runs", 50.0)]), room(1, 24, [held(1, "too", 60.0)])])
    one, other = ask(20, expected_s=5.0), ask(20, expected_s=50.0)
    queue = RequestQueue([one, other, ask(2, expected_s=500.0)])
    kept = Standing(since_s=0.0, kept=((HOST, "SIM-0"),), starts_s=50.0, looked_s=0.0)
    queue.note({one.id: kept, other.id: kept})
    last = decide(queue, board, HostRoom(1 << 62, 0, 2, 1000), now_s=1.0)
    assert last.standings[other.id].kept != kept.kept
    assert not last.complete
