"""Hours of suspensions and moves in virtual time: what holds whatever comes when.

Scheduling passes and plans decide; the ledger's part is played here, in the steps that brokers and runners make: a task
is asked, its memory is out after the seconds that this takes, reservations change hands in one step, it comes back
through the queue, or at once where it was moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.placement import Board
from prefect_gpu.scheduling.preemption import (
    AGING_S,
    REST_S,
    Plan,
    Running,
    aged_priority,
    in_s,
    out_s,
    plan,
)
from prefect_gpu.scheduling.scheduling_pass import RequestQueue, decide
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import HOST, host, snapshot

DEVICE_GIB = 24

#: Seconds between passes in which nothing else happens.
TICK_S = 30.0


class Job(NamedTuple):
    """One task."""

    #: Asked for and held; `whole`: it asks for a device to itself.
    gib: float
    whole: bool
    count: int
    priority: int
    runs_s: int
    #: Expected, as a part of `runs_s`; `None`: not known.
    expected: float | None
    preemptible: bool
    #: It may come back on another device.
    movable: bool
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
    movable=st.booleans(),
    refuses=st.sampled_from([False] * 9 + [True]),
)


@dataclass
class Task:
    """A task run from its submission to its end."""

    job: Job
    request: Request
    #: `waiting`, `running`, `out`, `away`, `in`.
    phase: str = "waiting"
    #: When `running`, `out` or `in` is over.
    until_s: float = 0.0
    #: What it has still to compute, while it does not.
    left_s: float = 0.0
    since_s: float = 0.0
    reservations: tuple[Reservation, ...] = ()
    #: What it had reserved when it went.
    reserved_bytes: int = 0
    #: Where its memory is, but while it is away.
    on: tuple[DeviceKey, ...] = ()
    suspended_for: str = ""
    rests_until_s: float = 0.0
    #: When it was last asked, and for which request.
    went_s: float = 0.0
    went_for: str = ""

    @property
    def held_bytes(self) -> int:
        return int(self.job.gib * GIB)

    @property
    def on_host(self) -> bool:
        return self.phase in ("out", "away", "in")


@dataclass
class Machine:
    """Devices, the host, and the tasks that want them."""

    devices: int
    host_gib: int
    queue: RequestQueue = field(default_factory=RequestQueue)
    tasks: dict[str, Task] = field(default_factory=dict)
    now_s: float = 0.0
    submitted: int = 0
    #: Seconds for which each suspended task was away, and how often tasks were moved.
    absences: list[float] = field(default_factory=list)
    moves: int = 0

    @property
    def keys(self) -> list[DeviceKey]:
        return [snapshot(i, DEVICE_GIB).device.key for i in range(self.devices)]

    def submit(self, job: Job) -> None:
        job = job._replace(count=min(job.count, self.devices))
        number = self.submitted = self.submitted + 1
        request = Request(
            f"t{number}",
            f"t{number}",
            number,
            self.now_s,
            memory=None if job.whole else int(job.gib * GIB),
            count=job.count,
            priority=job.priority,
            expected_s=None if job.expected is None else job.expected * job.runs_s,
        )
        self.tasks[request.id] = Task(job, request, left_s=job.runs_s)
        self.queue.add(request)

    def states(self) -> list[DeviceState]:
        states = []
        for number, key in enumerate(self.keys):
            held = {i: t.held_bytes for i, t in self.tasks.items() if key in self.here(t)}
            taken = snapshot(number, DEVICE_GIB, used_gib=sum(held.values()) / GIB)
            reservations = [
                r for t in self.tasks.values() for r in t.reservations if r.device_key == key
            ]
            states.append(device_state(taken, reservations, held, 0))
        return states

    @staticmethod
    def here(task: Task) -> tuple[DeviceKey, ...]:
        return () if task.phase in ("waiting", "away") else task.on

    def host_room_bytes(self) -> int:
        """What the kernel says, where a part of what is on its way is there, less the rest of what was let go."""
        taken = 0.0
        for task in self.tasks.values():
            if task.on_host:
                asked = task.phase == "out" and task.suspended_for
                left_s = max(0.0, task.until_s - self.now_s) if asked else 0.0
                taken += task.held_bytes * (1 - left_s / out_s(task.held_bytes))
        return int(self.host_gib * GIB - taken)

    def running(self) -> dict[str, Running]:
        return {
            name: Running(
                name,
                task.job.priority,
                task.job.preemptible,
                task.reservations,
                tuple(self.keys) if task.job.movable else task.on,
                task.held_bytes,
                task.since_s,
                task.rests_until_s,
                task.suspended_for,
                # Until it computes again.
                task.phase in ("away", "in"),
            )
            for name, task in self.tasks.items()
            if task.reservations
        }

    # What happens by itself.

    def finish_phases(self) -> None:
        for name, task in list(self.tasks.items()):
            if task.until_s > self.now_s:
                continue
            if task.phase == "running":
                del self.tasks[name]
            elif task.phase == "out":
                task.phase = "away"
            elif task.phase == "in":
                task.phase, task.rests_until_s = "running", self.now_s + REST_S
                self.go_on(task)

    def go_on(self, task: Task) -> None:
        task.until_s = self.now_s + task.left_s
        if task.job.expected is not None:
            done_s = task.job.runs_s - task.left_s
            ends_s = self.now_s + max(0.0, task.job.expected * task.job.runs_s - done_s)
            task.reservations = tuple(replace(r, ends_s=ends_s) for r in task.reservations)

    def start(self, task: Task, reservations: tuple[Reservation, ...]) -> None:
        task.phase, task.since_s, task.reservations = "running", self.now_s, reservations
        task.on = tuple(r.device_key for r in reservations)
        task.until_s = self.now_s + task.left_s

    def restore(self, task: Task) -> None:
        """The driver loses a process that finds no room."""
        (reservation,) = task.reservations
        assert task.phase == "away" and task.held_bytes <= reservation.reserved_bytes
        at = self.keys.index(reservation.device_key)
        assert self.states()[at].snapshot.free_bytes >= task.held_bytes, "no restore without room"
        assert task.job.movable or (reservation.device_key,) == task.on, "it is pinned"
        self.absences.append(self.now_s - task.went_s)
        task.phase, task.on = "in", (reservation.device_key,)
        task.until_s = self.now_s + in_s(task.held_bytes)

    # What the brokers do.

    def ask_for_returns(self) -> None:
        """Suspended tasks without a reservation stand in the queue, with what they have aged."""
        waiting = {request.id: request for request in self.queue}
        for name, task in self.tasks.items():
            if task.phase != "away" or task.reservations:
                continue
            request = replace(
                task.request,
                memory=task.reserved_bytes,
                exclusive=task.job.whole,
                priority=aged_priority(task.request, self.now_s - task.went_s),
                devices=() if task.job.movable else (task.on[0][1],),
                returns=True,
            )
            before = waiting.get(name)
            if before is None or before.priority != request.priority:
                status = self.queue.statuses.get(name)
                if before is not None:
                    self.queue.remove(before)
                self.queue.add(request)
                if status is not None:
                    self.queue.statuses[name] = status

    def schedule(self) -> bool:
        """Make a pass; return whether anything changed."""
        self.ask_for_returns()
        board = Board(self.states())
        decisions = decide(self.queue, board, host(9999, max_processes=999), now_s=self.now_s)
        assert not decisions.refusals
        self.queue.statuses.update(decisions.statuses)
        for request, placement in decisions.placements:
            self.queue.remove(request)
            task = self.tasks[request.id]
            if request.returns:
                task.reservations = placement.reservations
            else:
                self.start(task, placement.reservations)
        plans = plan(
            list(self.queue),
            board.states,
            self.running(),
            {HOST: self.host_room_bytes()},
            self.now_s,
        )
        changed = self.reconcile(plans) or bool(decisions.placements)
        for task in self.tasks.values():
            if task.phase == "away" and task.reservations and not task.suspended_for:
                self.restore(task)
        self.check()
        return changed

    def reconcile(self, plans: list[Plan]) -> bool:
        goes_for = {name: each.request_id for each in plans for name in each.going}
        changed = False
        for name, task in self.tasks.items():
            if task.suspended_for and goes_for.get(name) != task.suspended_for:
                task.suspended_for, task.reservations = "", task.reservations[:1]
                changed = True
        for each in plans:
            asks = [self.ask(name, to, each) for name, to in each.going.items()]
            changed = any(asks) or changed
            if all(self.tasks[name].phase == "away" for name in each.going):
                changed = self.hand_over(each) or changed
        return changed

    def ask(self, name: str, to: DeviceKey | None, for_plan: Plan) -> bool:
        task, urgent = self.tasks[name], self.tasks[for_plan.request_id]
        assert to is not None or task.job.priority < urgent.job.priority
        assert to is None or (task.job.movable and to not in for_plan.devices)
        assert not urgent.on, "what comes back suspends nothing"
        new = not task.suspended_for
        if new:
            # Out it is if another request let it go a moment ago.
            assert task.phase in ("running", "out") and task.job.preemptible
            assert self.now_s >= task.rests_until_s, "it has just come back"
            assert len(task.reservations) == 1
            if task.job.refuses:
                task.job = task.job._replace(preemptible=False)
                return True
            task.suspended_for = task.went_for = urgent.request.id
            if task.phase == "running":
                task.phase, task.left_s = "out", task.until_s - self.now_s
                task.until_s, task.went_s = self.now_s + out_s(task.held_bytes), self.now_s
        if to is not None and len(task.reservations) == 1:
            (held,) = task.reservations
            task.reservations = held, replace(held, machine=to[0], device_uuid=to[1])
            return True
        return new

    def hand_over(self, done: Plan) -> bool:
        """All reservations change in one step, if the request fits then; return whether they did."""
        before = {name: self.tasks[name].reservations for name in done.going}
        for name, to in done.going.items():
            self.tasks[name].reservations = tuple(r for r in before[name] if r.device_key == to)
        urgent = self.tasks[done.request_id]
        board = Board(self.states())
        chosen = [board.positions[key] for key in done.devices]
        if not all(board.fits(urgent.request, at) for at in chosen):
            # It counts on what goes for a request before it.
            for name, reservations in before.items():
                self.tasks[name].reservations = reservations
            return False
        for name, to in done.going.items():
            task = self.tasks[name]
            task.reserved_bytes, task.suspended_for = before[name][0].reserved_bytes, ""
            self.moves += to is not None
        placement = board.place(urgent.request, chosen, self.now_s)
        assert self.queue.remove(urgent.request)
        self.start(urgent, placement.reservations)
        return True

    def check(self) -> None:
        for state in self.states():
            assert sum(r.reserved_bytes for r in state.reservations) <= state.capacity_bytes
            assert state.snapshot.free_bytes >= 0, "more is held than there is"
            if any(r.exclusive for r in state.reservations):
                assert len(state.reservations) == 1
        waiting = {request.id for request in self.queue if not request.returns}
        for task in self.tasks.values():
            if task.phase == "away" and not task.reservations:
                assert task.went_for not in waiting, "its room went to another request"
        taken = sum(t.held_bytes for t in self.tasks.values() if t.on_host)
        assert taken <= self.host_gib * GIB, "the host is full"

    def advance(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s and (self.tasks or self.queue):
            self.finish_phases()
            then()
            passes = 0
            while self.schedule():
                passes += 1
                assert passes < 100, "decisions turn in a circle"
            times = [t.until_s for t in self.tasks.values() if t.phase not in ("waiting", "away")]
            later = [time_s for time_s in times if time_s > self.now_s]
            self.now_s = min([ends_s, self.now_s + TICK_S, *later])

    def drain(self) -> None:
        """Nothing comes any more: all ends in about the time of one after the other."""
        left_s = sum(
            t.until_s - self.now_s if t.phase == "running" else t.left_s
            for t in self.tasks.values()
        )
        self.advance(3 * left_s + 3600)
        assert not self.tasks, "something starves"


class Hours(RuleBasedStateMachine):
    """Tasks come at any time."""

    machine: Machine

    @initialize(devices=st.integers(1, 3), host_gib=st.sampled_from([4, 30, 100, 1000]))
    def begin(self, devices: int, host_gib: int) -> None:
        self.machine = Machine(devices, host_gib)

    @rule(jobs=st.lists(JOBS, min_size=1, max_size=3))
    @precondition(lambda self: len(self.machine.tasks) < 24)
    def submit(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.machine.submit(job)

    @rule(seconds=st.integers(1, 600))
    def let_time_pass(self, seconds: int) -> None:
        self.machine.advance(seconds)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "machine"):
            self.machine.check()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.drain()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Hours,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_hours_of_suspensions_and_moves() -> None:
    run(examples=25, steps=30)


@pytest.mark.slow
def test_many_hours_of_suspensions_and_moves() -> None:
    run(examples=150, steps=60)


LONG = Job(20, False, 1, 0, 3600, None, preemptible=True, movable=True)


# Three hours each: a smaller example is not worth the time that it takes to find.
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(st.integers(1, 3), st.integers(30, 300), st.booleans(), st.booleans())
def test_while_tasks_of_higher_priority_go_on_to_come_a_suspended_one_comes_back_in_time(
    priority: int, runs_s: int, known: bool, preemptible: bool
) -> None:
    machine = Machine(devices=1, host_gib=100)
    machine.submit(LONG)
    machine.advance(REST_S)
    urgent = Job(20, False, 1, priority, runs_s, 1.0 if known else None, preemptible, False)

    def more_come() -> None:
        while sum(task.phase == "waiting" for task in machine.tasks.values()) < 2:
            machine.submit(urgent)

    machine.advance(3 * 3600.0, more_come)
    long = machine.tasks.get("t1")
    if long is not None and long.phase == "away":
        machine.absences.append(machine.now_s - long.went_s)
    most_s = (priority + 1) * AGING_S + runs_s + 2 * TICK_S
    assert len(machine.absences) > 1 and max(machine.absences) <= most_s


def test_a_task_is_moved_for_a_whole_device_and_computes_on() -> None:
    machine = Machine(devices=2, host_gib=100)
    for _ in range(2):
        machine.submit(LONG._replace(gib=12))
    machine.advance(120)
    machine.submit(LONG._replace(whole=True, gib=20, runs_s=60))
    machine.advance(20)
    assert {name: task.phase for name, task in machine.tasks.items()} == dict.fromkeys(
        ("t1", "t2", "t3"), "running"
    )
    assert machine.moves == 1
    machine.drain()
    # No second of work was lost or done twice.
    assert 3600 < machine.now_s < 3600 + 2 * TICK_S
