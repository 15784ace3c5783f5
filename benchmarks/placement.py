"""What does it cost to decide who starts where, with a long queue and a thousand devices?

Decisions only, in virtual time: no process, no Prefect, no driver. 1,024 devices of 80 GiB are full with
tasks of 24 shapes; then all tasks of a row are queued at once behind one that is blocked (8 whole
devices), and every end of a task leads to a look at the queue, until all have started. Peer, in the same
run and by the same code: first come, first served, where a blocked task blocks all behind it. Where
durations are known they are what a history would tell: of the shape, not of the single task.

    python benchmarks/placement.py                      # 1,000 to 100,000 tasks, three times each
    python benchmarks/placement.py --tiny               # that it runs, in seconds

CPU is that of the process (`time.process_time`) in: putting requests into the queue, `decide`, taking
what was placed out of the queue, noting what was passed, and booking what ended. Not in it: making
snapshots, rooms and the first board out of readings, making requests, and the events of virtual time.
Each row is measured in a fresh process.

Prints JSON (versions, seed, every run), then a table of medians and spreads.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from typing import Any

import _common

sys.path.insert(0, str(_common.REPOSITORY))

from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE, Patience
from prefect_gpu.scheduling.board import Board
from prefect_gpu.scheduling.memory import survey_all
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.scheduling.queue import RequestQueue, Shape
from prefect_gpu.scheduling.turns import Decisions, HostRoom, decide
from prefect_gpu.units import GIB

ROWS: dict[str, tuple[str, Patience, bool]] = {
    "known": ("backfill, durations known", PATIENCE, True),
    "unknown": ("backfill, durations not known", PATIENCE, False),
    "fcfs": ("first come, first served", NO_BACKFILL, True),
}

#: GiB, devices and typical seconds of each shape.
SHAPES = [
    *((gib, 1, seconds) for gib in (2, 6, 10, 16, 24, 40) for seconds in (40.0, 200.0, 900.0)),
    *((gib, 2, 300.0) for gib in (8, 20, 60)),
    *((gib, 4, 600.0) for gib in (12, 30, 79)),
]
assert len(SHAPES) == 24

#: More than a machine has.
ANY = 1 << 62


class World:
    """Devices, who waits and who runs, in virtual time."""

    def __init__(self, devices: int, patience: Patience, known: bool, seed: int) -> None:
        self._random = random.Random(seed)
        self._patience = patience
        self._known = known
        snapshots = SimulatedReader(SimulatedDevices(f"{devices}x80GiB")).read(())
        self._board = Board(survey_all(snapshots, (), {}, 0))
        self.queue = RequestQueue()
        self._checked: frozenset[Shape] = frozenset()
        #: The last look; `None`: requests have come or gone since.
        self._last: Decisions | None = None
        self._now_s = 0.0
        #: Seconds of the end, request's number, placement.
        self._running: list[tuple[float, int, Placement]] = []
        self._made = 0
        self._lasts: dict[str, float] = {}
        self.cpu_s = 0.0
        self.placed = 0
        self.looks = 0

    def make(self, count: int) -> list[Request]:
        """Make requests of random shapes."""
        return [self.request(*self._random.choice(SHAPES)) for _ in range(count)]

    def request(self, gib: float, count: int, seconds: float) -> Request:
        """Make one request; it lasts from half to twice what is typical."""
        self._made += 1
        name = str(self._made)
        self._lasts[name] = seconds * self._random.uniform(0.5, 2.0)
        return Request(
            name,
            f"{gib}GiB",
            self._made,
            0.0,
            int(gib * GIB),
            count,
            expected_s=seconds if self._known else None,
        )

    def submit(self, requests: list[Request]) -> None:
        """Queue requests at once."""
        self._last = None
        began = time.process_time()
        for request in requests:
            self.queue.add(request)
        self.cpu_s += time.process_time() - began

    def look(self) -> None:
        """Decide, and carry it out."""
        host = HostRoom(ANY, 0, len(self._running), ANY)
        began = time.process_time()
        decisions = decide(
            self.queue,
            self._board,
            host,
            self._patience,
            self._now_s,
            checked=self._checked,
            after=self._last,
        )
        self.queue.note(decisions.standings)
        for request, _ in decisions.placements:
            self.queue.remove(request)
        self._checked = self.queue.shapes
        self._last = decisions
        self.cpu_s += time.process_time() - began
        assert not decisions.refusals
        self.looks += 1
        self.placed += len(decisions.placements)
        for request, placement in decisions.placements:
            ends_s = self._now_s + self._lasts[request.id]
            heapq.heappush(self._running, (ends_s, request.sequence, placement))

    def end_next(self) -> None:
        """Go to the next end of a task."""
        self._now_s, _, placement = heapq.heappop(self._running)
        began = time.process_time()
        for reservation in placement.reservations:
            self._board.give_back(reservation)
        self.cpu_s += time.process_time() - began

    def fill(self) -> None:
        """Let tasks run until nothing more fits, and withdraw those that still wait."""
        patience, self._patience = self._patience, Patience(ANY, float("inf"), 0)
        placed = -1
        while self.placed > placed:
            placed = self.placed
            self.submit(self.make(1000))
            self.look()
            for request in tuple(self.queue):
                self.queue.remove(request)
        self._last = None
        self._patience = patience
        self.cpu_s, self.placed, self.looks = 0.0, 0, 0


def measure_row(row: str, tasks: int, devices: int, seed: int) -> dict[str, Any]:
    """Queue and place all tasks of a row."""
    _, patience, known = ROWS[row]
    world = World(devices, patience, known, seed)
    world.fill()
    head = world.request(80, min(8, devices), 100.0)
    rest = world.make(tasks - 1)
    world.submit([head, *rest])
    world.look()
    before = world.placed
    while world.queue:
        world.end_next()
        world.look()
    return {
        "row": row,
        "tasks": tasks,
        "devices": devices,
        "shapes": len(SHAPES) + 1,
        "seed": seed,
        "cpu_s": world.cpu_s,
        "cpu_per_task_us": world.cpu_s / tasks * 1e6,
        "looks": world.looks,
        "placed_at_once": before,
        "virtual_s": world._now_s,
    }


def main() -> None:
    """Measure every row, print JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--seed", type=int, default=0, help="of shapes, durations and order")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        _common.tell(measure_row(given.row, given.tasks[0], given.devices, given.seed))
        return
    if given.tiny:
        given.tasks, given.devices, given.repeats = [50, 200], 16, 1
    order = random.Random(given.seed)
    runs = []
    for repeat in range(given.repeats):
        cells = [(row, tasks) for row in given.rows for tasks in given.tasks]
        for row, tasks in order.sample(cells, len(cells)):
            arguments = ["--row", row, "--tasks", str(tasks), "--devices", str(given.devices)]
            arguments += ["--seed", str(given.seed + repeat)]
            runs.append({"repeat": repeat, **_common.measure(__file__, arguments, "")})
    found = {"versions": _common.versions(), "seed": given.seed, "runs": runs}
    print(json.dumps(found, indent=1))
    print(
        f"\n{given.devices} devices of 80 GiB, {len(SHAPES)} shapes and a blocked head, "
        f"{given.repeats} run(s) each: CPU a placed task, µs, median (lowest–highest)\n"
    )
    print_rows(runs, given.rows, given.tasks)


def print_rows(runs: list[dict[str, Any]], rows: list[str], sizes: list[int]) -> None:
    """Print a line for each row."""

    def of(row: str, tasks: int, key: str) -> list[float]:
        return [r[key] for r in runs if r["row"] == row and r["tasks"] == tasks]

    table = []
    for row in rows:
        costs = [of(row, tasks, "cpu_per_task_us") for tasks in sizes]
        growth = statistics.median(costs[-1]) / statistics.median(costs[0])
        spans = of(row, sizes[-1], "virtual_s")
        table.append(
            [
                ROWS[row][0],
                *(_common.spread(cost) for cost in costs),
                f"{growth:.2f}",
                _common.spread([span / 3600 for span in spans]),
            ]
        )
    heads = [f"{tasks:,} queued" for tasks in sizes]
    _common.print_table(
        ["scheduling", *heads, "growth", "last start, virtual h"],
        table,
    )


if __name__ == "__main__":
    main()
