"""Simulation of a list of tasks on simulated devices, in virtual time, with the broker of the runner.

No process runs and no real clock is read: time jumps from one event to the next. `task_list` reads lists from files,
`recorded_run` makes lists from flow runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from prefect_gpu.broker.broker import Broker, Ticket
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.clock import RealClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.model import Request


@dataclass(frozen=True, slots=True)
class ListedTask:
    """One task of a list."""

    #: Name, memory and devices of the task. Id, order and time are set at the submission.
    request: Request
    #: Seconds for which the task holds its devices.
    duration_s: float
    #: Earliest submission, in seconds from the beginning.
    arrival_s: float = 0.0
    #: Positions of the task's predecessors in the list: they must end before the submission.
    after: tuple[int, ...] = ()
    #: Seconds to the submission from the last end of a predecessor, or from a later arrival.
    lag_s: float = 0.0

    @property
    def device_s(self) -> float:
        """Seconds for which the task holds its devices, summed over the devices."""
        return self.duration_s * self.request.count

    def least_bytes(self, size_bytes: int) -> float:
        """Return the fewest bytes that the task takes on a device of `size_bytes` bytes."""
        memory = self.request.memory
        if self.request.exclusive or not isinstance(memory, (int, float)):
            return size_bytes
        return memory if isinstance(memory, int) else memory * size_bytes


@dataclass(slots=True)
class Outcome:
    """The simulated run of one task. Times are in seconds from the beginning; `None`: the task never started."""

    name: str
    submitted_s: float = 0.0
    #: Seconds from the submission to the start.
    waited_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    #: Indices of the task's devices.
    devices: tuple[int, ...] = ()
    #: Number of times that a later task passed this task and may have delayed it.
    passed: int = 0
    #: Why the task can never run. Empty: it ran.
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The result of the simulation of a list of tasks."""

    #: Seconds from the first arrival to the last end. 0: no task ran.
    makespan_s: float
    #: Lower bounds of the makespan of any schedule: the largest bound, and all bounds by name.
    lower_bound_s: float
    bounds: dict[str, float]
    #: Mean and largest seconds from submission to start.
    mean_wait_s: float
    max_wait_s: float
    #: Reserved fraction of all devices' memory over the makespan.
    utilisation: float
    #: Results in the order of the list.
    tasks: list[Outcome]


def simulate(
    tasks: Sequence[ListedTask],
    devices: SimulatedDevices,
    max_tasks: int | None = None,
    max_processes: int | None = None,
    **settings: Any,
) -> Schedule:
    """Return the schedule of a list of tasks on simulated devices.

    Args:
        tasks: Tasks. Tasks with equal arrivals are submitted in this order. A task's memory includes its context.
        devices: Simulated devices.
        max_tasks: Most tasks on one device at a time. `None`: as many as fit.
        max_processes: Most tasks at a time. `None`: any number.
        settings: Further arguments of `Broker`.
    """
    settings["max_tasks_per_device"] = max_tasks
    # The default of `Broker` depends on this machine's cores.
    settings["max_processes"] = max_processes or sys.maxsize
    simulation = _Simulation(tasks, devices, settings)
    simulation.run()
    return simulation.schedule(max_tasks)


class _VirtualClock(RealClock):
    """A clock whose time `_Simulation` sets. No thread waits on the clock."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


#: Kinds of events. At equal times ends are handled before arrivals, because they free devices for new requests.
_END, _ARRIVAL = range(2)


class _Simulation:
    """Submits tasks to a broker, starts and ends them, and sets the clock to each event's time."""

    def __init__(
        self, tasks: Sequence[ListedTask], devices: SimulatedDevices, settings: dict[str, Any]
    ) -> None:
        self._tasks = tasks
        self._outcomes = [Outcome(task.request.task_name) for task in tasks]
        #: By position of a task: its end in seconds if no task had to wait for a device.
        self._chain_s: dict[int, float] = {}
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        #: Reserved memory of ended tasks over time, in byte-seconds.
        self._byte_s = 0.0
        self._numbers = itertools.count(1)
        self._clock = _VirtualClock()
        self._ledger = Ledger(now=self._clock.now)
        self._broker = Broker(
            SimulatedReader(devices, self._clock),
            self._ledger,
            **settings,
            clock=self._clock,
            read_host_available=lambda: sys.maxsize,
            stepped=True,
        )
        #: Bytes of each device that can be reserved.
        self._capacities = self._broker.capacities(())
        #: Returns tasks whose predecessors have all ended.
        self._sorter = TopologicalSorter({at: task.after for at, task in enumerate(tasks)})
        self._sorter.prepare()
        #: Next events: seconds, kind, position in the list.
        self._events: list[tuple[float, int, int]] = []
        self._push_arrivals()

    def run(self) -> None:
        """Handle all events in order of time."""
        while self._events:
            now_s = self._clock.now_s = self._events[0][0]
            while self._events and self._events[0][0] == now_s:
                _, kind, at = heapq.heappop(self._events)
                if kind == _ARRIVAL:
                    self._submit(at)
                else:
                    self._end(at)
            self._broker.look()
            self._follow()

    def _push_arrivals(self) -> None:
        for at in self._sorter.get_ready():
            task = self._tasks[at]
            arrival_s = max(self._clock.now_s, task.arrival_s) + task.lag_s
            heapq.heappush(self._events, (arrival_s, _ARRIVAL, at))

    def _finish(self, at: int, refusal: str = "") -> None:
        self._outcomes[at].refusal = refusal
        self._sorter.done(at)
        self._push_arrivals()

    def _submit(self, at: int) -> None:
        task = self._tasks[at]
        refused = [self._outcomes[each].name for each in task.after if each not in self._chain_s]
        if refused:
            self._finish(at, f"comes after {refused[0]!r}, which can never run")
            return
        ready_s = max([task.arrival_s, *(self._chain_s[each] for each in task.after)])
        self._chain_s[at] = ready_s + task.lag_s + task.duration_s
        self._outcomes[at].submitted_s = self._clock.now_s
        request = replace(task.request, sequence=next(self._numbers))
        self._waiting[at] = self._broker.submit(request)

    def _follow(self) -> None:
        """Start tasks that the broker has placed, and finish tasks that the broker has refused."""
        for at, ticket in [each for each in self._waiting.items() if each[1].decided]:
            del self._waiting[at]
            if ticket.error is None:
                self._start(at, ticket)
            else:
                del self._chain_s[at]
                self._finish(at, str(ticket.error))

    def _start(self, at: int, ticket: Ticket) -> None:
        self._running[at] = ticket
        outcome, now_s = self._outcomes[at], self._clock.now_s
        entry = self._ledger.entry(ticket.request.id)
        assert entry is not None
        outcome.devices = tuple(device.index for device in ticket.devices)
        outcome.passed = entry.status.passed
        outcome.started_s, outcome.waited_s = now_s, now_s - outcome.submitted_s
        outcome.ended_s = now_s + self._tasks[at].duration_s
        heapq.heappush(self._events, (outcome.ended_s, _END, at))

    def _end(self, at: int) -> None:
        ticket = self._running.pop(at)
        assert ticket.placement is not None
        self._byte_s += sum(ticket.placement.budget_bytes) * self._tasks[at].duration_s
        self._broker.end(ticket)
        self._finish(at)

    def schedule(self, max_tasks: int | None) -> Schedule:
        """Return the result of a finished simulation. `max_tasks`: most tasks on one device; `None`: no limit."""
        begin_s = min((task.arrival_s for task in self._tasks), default=0.0)
        span_s = max([begin_s, *(o.ended_s or 0.0 for o in self._outcomes)]) - begin_s
        waits_s = [o.waited_s for o in self._outcomes if o.waited_s is not None] or [0.0]
        ran, sizes = [self._tasks[at] for at in self._chain_s], self._capacities.values()
        # A task that has a device to itself takes at least the memory of the smallest device.
        small, large = min(sizes), max(sizes)
        byte_s = sum(task.least_bytes(small) * task.device_s for task in ran)
        # No two of these tasks fit on one device.
        large_s = sum(task.device_s for task in ran if task.least_bytes(large) * 2 > large)
        places = len(sizes) * max_tasks if max_tasks else math.inf
        bounds = {
            "chain_s": max([begin_s, *self._chain_s.values()]) - begin_s,
            "memory_s": byte_s / sum(sizes),
            "large_s": large_s / len(sizes),
            "places_s": sum(task.device_s for task in ran) / places,
        }
        all_byte_s = sum(device.total_bytes for device in self._capacities) * span_s
        return Schedule(
            span_s,
            max(bounds.values()),
            bounds,
            statistics.fmean(waits_s),
            max(waits_s),
            self._byte_s / all_byte_s if span_s else 0.0,
            self._outcomes,
        )
