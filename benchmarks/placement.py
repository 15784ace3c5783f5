"""What does it cost to decide which task starts where, with a long queue and many devices?

The broker's decisions only, in virtual time: no process, no Prefect, no driver. Devices of 80 GiB are full
with tasks of 24 shapes; then all tasks of a row are queued at once behind one that is blocked (8 whole
devices, or half of them all), and every end of a task leads to a scheduling pass, until all have started. Peer,
in the same run and by the same code: first come, first served, where a blocked task blocks all behind it. Where
durations are known they are what a history would tell: of the shape, not of the single task.

    python benchmarks/placement.py                      # 8, 64 and 1,024 devices, three times each
    python benchmarks/placement.py --tiny               # that it runs, in seconds

CPU is that of the process (`time.process_time`) in all that the broker does for a pass: its view of the ledger,
the state of each device, the board made of them, the decisions, writing the reservations, taking what was
placed out of the queue, and releasing what ended. Not in it: snapshots of devices, of which one serves all
passes, making requests, and the events of virtual time. Each row is measured in a fresh process.

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

from prefect_gpu.broker.device_view import DeviceView
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Phase
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE, Patience
from prefect_gpu.scheduling.model import Reading, Request
from prefect_gpu.scheduling.placement import Board
from prefect_gpu.scheduling.scheduling_pass import HostState, RequestQueue, decide
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
    """Devices, waiting and running tasks, in virtual time, with the parts of a broker."""

    def __init__(self, devices: int, patience: Patience, known: bool, seed: int) -> None:
        self._random = random.Random(seed)
        self._known = known
        self._clock = FakeClock(0.0)
        self._ledger = Ledger()
        reader = SimulatedReader(SimulatedDevices(f"{devices}x80GiB"))
        self._view = DeviceView(reader.devices(), "simulated", 0, (), own_pid=0)
        self._view.take(Reading(0.0, reader.read(()), ANY), 0.0)
        # Any may pass while the devices are filled.
        self._patience = Patience(ANY, float("inf"), 0)
        self._patience_later = patience
        self.queue = RequestQueue()
        #: By request id.
        self._waiting: dict[str, Ticket] = {}
        self._placed: dict[str, Ticket] = {}
        #: Seconds of the end, request's number, its id.
        self._running: list[tuple[float, int, str]] = []
        self._made = 0
        self._lasts: dict[str, float] = {}
        self.cpu_s = 0.0
        self.placed = 0
        self.passes = 0

    @property
    def now_s(self) -> float:
        """Seconds of virtual time."""
        return self._clock.now()

    def make(self, count: int) -> list[Ticket]:
        """Make requests of random shapes."""
        return [self.request(*self._random.choice(SHAPES)) for _ in range(count)]

    def request(self, gib: float, count: int, seconds: float) -> Ticket:
        """Make one request; it lasts from half to twice what is typical."""
        self._made += 1
        name = str(self._made)
        self._lasts[name] = seconds * self._random.uniform(0.5, 2.0)
        expected_s = seconds if self._known else None
        memory = int(gib * GIB)
        return Ticket(
            Request(name, f"{gib}GiB", self._made, 0.0, memory, count, expected_s=expected_s)
        )

    def submit(self, tickets: list[Ticket]) -> None:
        """Queue requests at once."""
        began = time.process_time()
        for ticket in tickets:
            self.queue.add(ticket.request)
            self._waiting[ticket.request.id] = ticket
        self.cpu_s += time.process_time() - began

    def make_pass(self) -> None:
        """Decide, and carry it out as the broker does."""
        host = HostState(ANY, 0, len(self._placed), ANY)
        began = time.process_time()
        view = self._ledger.view()
        states = self._view.states(view, self._placed)
        board = Board(states, least_bytes=self.queue.least_bytes)
        decisions = decide(self.queue, board, host, self._patience, self.now_s)
        entries = {
            request.id: Entry(request, phase=Phase.PLACED, reservations=placement.reservations)
            for request, placement in decisions.placements
        }
        assert self._ledger.try_write(view.version, entries)
        self.queue.statuses.update(decisions.statuses)
        for request, placement in decisions.placements:
            ticket = self._placed[request.id] = self._waiting.pop(request.id)
            self.queue.remove(request)
            ticket.placement = placement
        self.cpu_s += time.process_time() - began
        assert not decisions.refusals
        self.passes += 1
        self.placed += len(decisions.placements)
        for request, _ in decisions.placements:
            ends_s = self.now_s + self._lasts[request.id]
            heapq.heappush(self._running, (ends_s, request.sequence, request.id))

    def end_next(self) -> None:
        """Go to the next end of a task."""
        ends_s, _, request_id = heapq.heappop(self._running)
        self._clock.advance(ends_s - self.now_s)
        began = time.process_time()
        del self._placed[request_id]
        self._ledger.release(request_id)
        self.cpu_s += time.process_time() - began

    def fill(self) -> None:
        """Run tasks until nothing more fits, and withdraw those that still wait."""
        placed = -1
        while self.placed > placed:
            placed = self.placed
            self.submit(self.make(1000))
            self.make_pass()
            self.queue, self._waiting = RequestQueue(), {}
        self._patience = self._patience_later
        self.cpu_s, self.placed, self.passes = 0.0, 0, 0


def measure_row(row: str, tasks: int, devices: int, seed: int) -> dict[str, Any]:
    """Queue and place all tasks of a row."""
    _, patience, known = ROWS[row]
    world = World(devices, patience, known, seed)
    world.fill()
    head = world.request(80, min(8, devices // 2), 100.0)
    rest = world.make(tasks - 1)
    world.submit([head, *rest])
    world.make_pass()
    while world.queue:
        world.end_next()
        world.make_pass()
    return {
        "row": row,
        "tasks": tasks,
        "devices": devices,
        "shapes": len(SHAPES) + 1,
        "seed": seed,
        "cpu_s": world.cpu_s,
        "cpu_per_task_us": world.cpu_s / tasks * 1e6,
        "cpu_per_pass_us": world.cpu_s / world.passes * 1e6,
        "passes": world.passes,
        "virtual_s": world.now_s,
    }


def main() -> None:
    """Measure every row, print JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--seed", type=int, default=0, help="of shapes, durations and order")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        _common.tell(measure_row(given.row, given.tasks[0], given.devices[0], given.seed))
        return
    if given.tiny:
        given.tasks, given.devices, given.repeats = [50, 200], [8], 1
    order = random.Random(given.seed)
    runs = []
    for repeat in range(given.repeats):
        cells = [(r, t, d) for r in given.rows for t in given.tasks for d in given.devices]
        for row, tasks, devices in order.sample(cells, len(cells)):
            arguments = ["--row", row, "--tasks", str(tasks), "--devices", str(devices)]
            arguments += ["--seed", str(given.seed + repeat)]
            runs.append({"repeat": repeat, **_common.measure(__file__, arguments, "")})
    found = {"versions": _common.versions(), "seed": given.seed, "runs": runs}
    print(json.dumps(found, indent=1))
    print(
        f"\nDevices of 80 GiB, {len(SHAPES)} shapes and a blocked head, {given.repeats} run(s) each: CPU "
        f"a placed task, µs, median (lowest–highest)\n"
    )
    print_rows(runs, given.rows, given.devices, given.tasks)


def print_rows(
    runs: list[dict[str, Any]], rows: list[str], devices: list[int], sizes: list[int]
) -> None:
    """Print a line for each row and number of devices."""

    def of(row: str, there: int, tasks: int, key: str) -> list[float]:
        asked = (row, there, tasks)
        return [r[key] for r in runs if (r["row"], r["devices"], r["tasks"]) == asked]

    table = []
    for there in devices:
        for row in rows:
            costs = [of(row, there, tasks, "cpu_per_task_us") for tasks in sizes]
            growth = statistics.median(costs[-1]) / statistics.median(costs[0])
            table.append(
                [
                    f"{there:,}",
                    ROWS[row][0],
                    *(_common.spread(cost) for cost in costs),
                    f"{growth:.2f}",
                    _common.spread(of(row, there, sizes[-1], "cpu_per_pass_us")),
                ]
            )
    heads = [f"{tasks:,} queued" for tasks in sizes]
    _common.print_table(["devices", "scheduling", *heads, "growth", "µs a pass"], table)


if __name__ == "__main__":
    main()
