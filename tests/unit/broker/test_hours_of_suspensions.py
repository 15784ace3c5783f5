"""Hours of suspensions and moves in virtual time, at brokers that make a pass when the test says so.

The processes of the tasks are played here: one that is asked for its memory has moved it after the seconds that this
takes, and comes back once its broker says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prefect_gpu.broker.broker import Broker, Ticket, next_sequence
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.model import Request
from prefect_gpu.scheduling.preemption import AGING_S, REST_S, in_s, out_s
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Reader

DEVICE_GIB = 24

#: Seconds between passes in which nothing else happens.
TICK_S = 30.0


class Job(NamedTuple):
    """One task."""

    #: Asked for and held; `whole`: it asks for a device to itself.
    gib: int
    whole: bool
    count: int
    priority: int
    runs_s: int
    #: Expected, as a part of `runs_s`; `None`: not known.
    expected: float | None
    preemptible: bool
    #: It names one device.
    pinned: bool = False
    #: Its process may not be suspended, which shows only when it is asked.
    refuses: bool = False


JOBS = st.builds(
    Job,
    gib=st.integers(1, DEVICE_GIB),
    whole=st.sampled_from([False] * 5 + [True]),
    count=st.sampled_from([1, 1, 1, 2]),
    priority=st.integers(0, 3),
    runs_s=st.integers(5, 1200),
    expected=st.sampled_from([None, 0.5, 1.0, 1.0, 1.5]),
    preemptible=st.sampled_from([True, True, False]),
    pinned=st.booleans(),
    refuses=st.sampled_from([False] * 9 + [True]),
)


@dataclass
class Task:
    """A task from its submission to its end."""

    job: Job
    broker: Broker
    ticket: Ticket
    left_s: float
    #: `waiting`, `running`, `out`, `away`, `in`.
    phase: str = "waiting"
    #: When `running`, `out` or `in` is over.
    until_s: float = 0.0
    pid: int = 0
    #: Where its memory is, or was before it was moved to the host.
    devices: list[str] = field(default_factory=list)
    wanted_away: bool = False
    #: When it was last asked for its memory, and when it last ran again.
    went_s: float = 0.0
    back_s: float = float("-inf")
    suspensions: int = 0

    @property
    def id(self) -> str:
        return self.ticket.request.id

    @property
    def held_bytes(self) -> int:
        return self.job.gib * GIB


@dataclass
class Machine:
    """Devices, the host, two brokers and the tasks that they place."""

    devices: int
    host_gib: int
    clock: FakeClock = field(default_factory=FakeClock)
    tasks: dict[str, Task] = field(default_factory=dict)
    pids: Iterator[int] = field(default_factory=lambda: iter(range(1000, 10**6)))
    #: Seconds for which each suspended task was away.
    absences: list[float] = field(default_factory=list)
    #: Tasks that came back on another device.
    moves: int = 0
    submitted: int = 0

    def __post_init__(self) -> None:
        self.began_s = self.clock.now()
        self.reader = Reader(SimulatedDevices(f"{self.devices}x{DEVICE_GIB}GiB"), self.clock)
        self.ledger = Ledger(now=self.clock.now)
        self.brokers = [
            Broker(
                self.reader,
                self.ledger,
                clock=self.clock,
                headroom_bytes=0,
                max_processes=1000,
                read_host_available=self.host_available_bytes,
                stepped=True,
            )
            for _ in range(2)
        ]

    def submit(self, job: Job) -> Task:
        job = job._replace(count=1 if job.pinned else min(job.count, self.devices))
        sequence = next_sequence()
        self.submitted += 1
        broker = self.brokers[self.submitted % 2]
        request = Request(
            "",
            f"task {sequence}",
            sequence,
            0.0,
            None if job.whole else job.gib * GIB,
            job.count,
            devices=("0",) if job.pinned else (),
            priority=job.priority,
            expected_s=None if job.expected is None else job.expected * job.runs_s,
            preemptible=job.preemptible,
        )
        task = Task(job, broker, broker.submit(request), job.runs_s)
        task.ticket.on_held_back = lambda away: self.hear(task, away)
        self.tasks[task.id] = task
        return task

    def hear(self, task: Task, away: bool) -> None:
        task.wanted_away = away
        entry = self.ledger.entry(task.id)
        if away and entry is not None and entry.suspended_for:
            now_s, asker = self.clock.now(), self.tasks[entry.suspended_for]
            assert task.job.preemptible and task.job.count == 1
            assert now_s >= task.back_s + REST_S, "it has just come back"
            assert task.job.priority < asker.job.priority or not task.job.pinned
            task.went_s = now_s

    def host_available_bytes(self) -> int:
        """Return what the kernel says, where a part of what is on its way is there."""
        taken = 0.0
        for task in self.tasks.values():
            if task.phase in ("out", "away", "in"):
                left_s = max(0.0, task.until_s - self.clock.now()) if task.phase == "out" else 0.0
                taken += task.held_bytes * (1 - left_s / out_s(task.held_bytes))
        return int(self.host_gib * GIB - taken)

    def step(self, task: Task) -> bool:
        """Take the next step of a process; return whether there was one."""
        now_s, broker, ticket = self.clock.now(), task.broker, task.ticket
        is_over = now_s >= task.until_s
        if task.phase == "waiting" and ticket.placement is not None:
            task.pid, task.phase, task.until_s = next(self.pids), "running", now_s + task.left_s
            self.take_devices(task)
            broker.attach(ticket, task.pid)
            broker.mark_running(ticket)
        elif task.phase == "running" and is_over:
            self.reader.detach(task.pid)
            broker.end(ticket)
            del self.tasks[task.id]
        elif task.phase == "running" and task.wanted_away and task.job.refuses:
            task.wanted_away = False
            broker.show_suspension(ticket, Trigger.NOT_MOVED, "not suspended: it refuses")
        elif task.phase == "running" and task.wanted_away:
            task.phase, task.left_s = "out", task.until_s - now_s
            task.until_s = now_s + out_s(task.held_bytes)
            task.suspensions += 1
            broker.show_suspension(ticket, Trigger.MOVING_OUT, "moving to the host")
        elif task.phase == "out" and is_over:
            self.reader.detach(task.pid)
            task.phase = "away"
            broker.show_suspension(ticket, Trigger.MOVED_OUT, "away")
        elif task.phase == "away" and not task.wanted_away and self.may_resume(task):
            task.phase, task.until_s = "in", now_s + in_s(task.held_bytes)
            before = task.devices
            self.take_devices(task)
            assert not task.job.pinned or before == task.devices
            self.moves += before != task.devices
        elif task.phase == "in" and is_over:
            task.phase, task.until_s, task.back_s = "running", now_s + task.left_s, now_s
            self.absences.append(now_s - task.went_s)
            broker.show_suspension(ticket, Trigger.MOVED_IN, "")
        else:
            return False
        return True

    def may_resume(self, task: Task) -> bool:
        task.broker.show_suspension(task.ticket, Trigger.MOVING_IN, "moving back")
        task.broker.look()
        return task.ticket.may_resume.get_nowait()

    def take_devices(self, task: Task) -> None:
        """Allocate what a process holds; the driver loses one that finds no room."""
        uuids = [device.uuid for device in task.ticket.devices]
        free = {s.device.uuid: s.free_bytes for s in self.reader.read(())}
        assert all(free[uuid] >= task.held_bytes for uuid in uuids), "no restore without room"
        self.reader.attach(task.pid, uuids)
        for uuid in uuids:
            self.reader.allocate(task.pid, uuid, task.held_bytes)
        task.devices = uuids

    def settle(self) -> None:
        """Make passes and take the steps of processes until nothing more happens now."""
        for _ in range(100):
            # The first one has to see what the second one asks of it.
            for broker in (*self.brokers, *self.brokers):
                broker.look()
            self.check()
            # Each takes its step: no `any` that ends with the first.
            if not sum([self.step(task) for task in list(self.tasks.values())]):
                return
        raise AssertionError("decisions turn in a circle")

    def check(self) -> None:
        held = self.ledger.view().by_device
        for snapshot in self.reader.read(()):
            there = held.get(snapshot.device.key, ())
            assert sum(r.reserved_bytes for r in there) <= DEVICE_GIB * GIB
            assert len(there) == 1 or not any(r.exclusive for r in there)
        for entry in self.ledger.running().values():
            assert len(entry.reservations) in (0, entry.request.count)
            assert entry.reservations or entry.away
        assert self.host_available_bytes() >= 0, "the host is full"

    def advance(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        ends_s = self.clock.now() + seconds
        while (now_s := self.clock.now()) < ends_s and self.tasks:
            then()
            self.settle()
            times = [t.until_s for t in self.tasks.values() if t.phase not in ("waiting", "away")]
            later = [time_s for time_s in times if time_s > now_s]
            self.clock.advance(max(1e-3, min([ends_s, now_s + TICK_S, *later]) - now_s))

    def drain(self) -> None:
        """Nothing comes any more: all tasks end in about the time of one after the other."""
        now_s = self.clock.now()
        left_s = sum(
            t.until_s - now_s if t.phase == "running" else t.left_s for t in self.tasks.values()
        )
        self.advance(3 * left_s + 3600)
        assert not self.tasks, "a task starves"
        assert not self.ledger.view().by_device


def live(devices: int, host_gib: int, arrivals: list[tuple[int, list[Job]]]) -> None:
    """Submit tasks, each some seconds after those before it, and wait for the end of all."""
    machine = Machine(devices, host_gib)
    for seconds, jobs in arrivals:
        for job in jobs:
            machine.submit(job)
        machine.advance(seconds)
        for task in machine.tasks.values():
            assert task.suspensions <= 1 + (machine.clock.now() - machine.began_s) / REST_S
    machine.drain()


ARRIVALS = st.lists(
    st.tuples(st.integers(1, 600), st.lists(JOBS, min_size=1, max_size=3)), min_size=1, max_size=15
)
HOURS = given(st.integers(1, 3), st.sampled_from([4, 30, 100, 1000]), ARRIVALS)

test_hours_of_suspensions_and_moves = settings(max_examples=20, deadline=None)(HOURS(live))
test_many_hours_of_suspensions_and_moves = pytest.mark.slow(
    settings(max_examples=150, deadline=None)(HOURS(live))
)


LONG = Job(20, False, 1, 0, 3600, None, preemptible=True)


# Three hours each: a smaller example is not worth the time that it takes to find.
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(st.integers(1, 3), st.integers(30, 300), st.booleans(), st.booleans())
def test_while_tasks_of_higher_priority_go_on_to_come_a_suspended_one_comes_back_in_time(
    priority: int, runs_s: int, known: bool, preemptible: bool
) -> None:
    machine = Machine(devices=1, host_gib=100)
    long = machine.submit(LONG)
    machine.advance(REST_S)
    urgent = Job(20, False, 1, priority, runs_s, 1.0 if known else None, preemptible)

    def more_come() -> None:
        while sum(task.phase == "waiting" for task in machine.tasks.values()) < 2:
            machine.submit(urgent)

    machine.advance(3 * 3600.0, more_come)
    if long.phase == "away" and long.id in machine.tasks:
        machine.absences.append(machine.clock.now() - long.went_s)
    most_s = (priority + 1) * AGING_S + runs_s + 2 * TICK_S
    assert machine.absences and max(machine.absences) <= most_s
    # It keeps the priority that its time away has given it.
    assert long.suspensions <= priority + 1


def test_a_task_is_moved_for_a_whole_device_and_computes_on() -> None:
    machine = Machine(devices=2, host_gib=100)
    tasks = [machine.submit(LONG._replace(gib=12)) for _ in range(2)]
    machine.advance(120)
    tasks.append(machine.submit(LONG._replace(whole=True, gib=20, runs_s=60)))
    machine.advance(20)
    assert [task.phase for task in tasks] == ["running"] * 3
    assert machine.moves == 1
    machine.drain()
    # No second of work was lost or done twice.
    assert 3600 < machine.clock.now() - machine.began_s < 3600 + 2 * TICK_S
