"""An hour of first runs beside tasks with budgets, in virtual time: what holds whatever they need.

The rules of `scheduling.probes` and of the scheduling pass decide; processes grow as hypothesis says. A process that
would pass its cap, or finds its device full, runs out of memory, and the ladder's answer for a shared probe follows. A
process that leaves past its first seconds is away once its memory has moved, and goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.scheduling.placement import Board
from prefect_gpu.scheduling.preemption import OUT_BYTES_S
from prefect_gpu.scheduling.probes import (
    AT_ONCE_FRACTION,
    FIRST_S,
    Growth,
    choose_leaving,
    counted_bytes,
    observe,
)
from prefect_gpu.scheduling.scheduling_pass import RequestQueue, decide
from prefect_gpu.units import GIB, MIB
from tests.unit.scheduling.values import host, snapshot

#: GiB of the device, and what is left free on it.
DEVICE_GIB, HEADROOM_BYTES = 24, GIB // 4

STEP_S = 1.0


class Job(NamedTuple):
    """One task."""

    #: Needed, in MiB.
    need: int
    #: Asked for in a tag; otherwise its need is not known.
    known: bool
    #: It takes its whole cap when it starts, as TensorFlow does.
    at_once: bool
    #: Seconds until it has all that it needs, and until it ends after that.
    grows_s: int
    runs_s: int
    arrives_s: int
    #: A first taste, in MiB: less than what it needs.
    taste: int
    #: It takes the rest all at once, and not little by little.
    jumps: bool = True


JOBS = st.lists(
    st.builds(
        Job,
        need=st.integers(64, 23 * 1024),
        known=st.booleans(),
        at_once=st.booleans(),
        grows_s=st.integers(0, 60),
        runs_s=st.integers(1, 60),
        arrives_s=st.integers(0, 60),
        taste=st.integers(1, 512),
        jumps=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@dataclass
class Running:
    """A process."""

    placement: Placement
    began_s: float
    held: int = 0
    growth: Growth | None = None
    #: Seconds for which it has run.
    age_s: float = 0.0
    #: When its memory is on the host; `None`: it is not on its way.
    away_s: float | None = None
    #: It has a device again, and its memory is still on the host.
    waits_for_room: bool = False
    #: It was placed without a budget. One that has come back has its cap for one.
    unknown: bool = False

    @property
    def on_device(self) -> int:
        return 0 if self.waits_for_room else self.held

    @property
    def cap(self) -> int:
        return self.placement.budget_bytes[0]

    @property
    def shares(self) -> bool:
        return self.placement.reservations[0].probe is not None


class Machine:
    """One device, and the tasks that want it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.queue = RequestQueue()
        self.running: dict[str, Running] = {}
        #: Those whose memory is on the host, and that have no device.
        self.away: dict[str, Running] = {}
        self.done: set[str] = set()
        #: How often each was ended or ran out of memory beside others.
        self.again: dict[str, int] = {}
        self.now_s = 0.0
        self.log: list[str] = []

    def submit(self, number: int, fraction: float) -> None:
        job, name = self.jobs[number], f"j{number:02}"
        # What a learned budget leaves: a little above the need.
        memory = job.need * MIB + MIB if job.known else None
        asked = Request(name, name, number, self.now_s, memory=memory, probe_fraction=fraction)
        self.queue.add(asked)

    def state(self) -> DeviceState:
        held = {name: each.on_device for name, each in self.running.items()}
        reservations = [r for each in self.running.values() for r in each.placement.reservations]
        counts = {
            name: counted_bytes(each.placement.reservations[0], each.growth, self.now_s)
            for name, each in self.running.items()
            if each.shares
        }
        taken = snapshot(0, DEVICE_GIB, used_gib=sum(held.values()) / GIB)
        return device_state(taken, reservations, held, HEADROOM_BYTES, counts)

    def schedule(self) -> None:
        before = self.state()
        decisions = decide(self.queue, Board([before]), host(), now_s=self.now_s)
        self.queue.statuses.update(decisions.statuses)
        assert not decisions.refusals
        for request, placement in decisions.placements:
            self.queue.remove(request)
            back = self.away.pop(request.id, None)
            self.running[request.id] = (
                Running(placement, self.now_s, unknown=placement.reservations[0].probe is not None)
                if back is None
                else replace(back, placement=placement, growth=None, waits_for_room=True)
            )
            self.log.append(f"{self.now_s} {request.id} {placement.budget_bytes[0]}")
        self.check()

    def check(self) -> None:
        """Whatever the probes do: budgets are safe while all take their caps."""
        capacity = DEVICE_GIB * GIB - HEADROOM_BYTES
        caps = sum(each.cap for each in self.running.values())
        if any(not each.shares for each in self.running.values()):
            assert caps <= capacity
        assert all(each.cap <= capacity for each in self.running.values())
        assert sum(each.on_device for each in self.running.values()) <= DEVICE_GIB * GIB

    def run_again(self, name: str) -> None:
        """As `BodyRun` does after a probe was ended or ran out of memory: alone."""
        del self.running[name]
        self.again[name] = self.again.get(name, 0) + 1
        self.log.append(f"{self.now_s} {name} again")
        self.submit(int(name[1:]), 0.0)

    def leave(self, name: str) -> None:
        """As `broker.preempting` does: its request waits for room for its cap."""
        each = self.away[name] = self.running.pop(name)
        each.away_s = None
        self.log.append(f"{self.now_s} {name} away")
        asked = Request(
            *(name, name, int(name[1:]), self.now_s),
            memory=each.cap,
            probe_fraction=1.0,
            returns=True,
        )
        self.queue.add(asked)

    def step(self) -> None:
        self.now_s += STEP_S
        for name, each in list(self.running.items()):
            if each.away_s is not None:
                if self.now_s >= each.away_s:
                    self.leave(name)
                continue
            if each.waits_for_room:
                others = sum(other.on_device for other in self.running.values())
                if others + each.held + GIB // 2 > DEVICE_GIB * GIB:
                    continue
                each.waits_for_room = False
            job = self.jobs[int(name[1:])]
            each.age_s += STEP_S
            age_s = each.age_s
            taste = min(job.taste, job.need)
            part = min(1.0, age_s / max(STEP_S, job.grows_s))
            if job.jumps:
                part = float(age_s > job.grows_s)
            wants = taste * MIB + int((job.need - taste) * part) * MIB
            if job.at_once and each.shares:
                wants = max(wants, each.cap)
            if wants > each.cap:
                # Its own cap; only a probe that was given less than the device.
                assert each.unknown, (name, each)
                self.run_again(name)
                continue
            free = DEVICE_GIB * GIB - sum(other.on_device for other in self.running.values())
            if wants - each.held > free:
                # The device is full: that may happen to probes among themselves.
                assert each.shares, (name, each)
                self.run_again(name)
                continue
            each.held = wants
            each.growth = observe(each.growth, self.now_s, each.held)
            if age_s > job.grows_s + job.runs_s:
                self.done.add(name)
                del self.running[name]
        growths = {n: r.growth for n, r in self.running.items() if r.shares and r.growth}
        leaving = any(each.away_s is not None for each in self.running.values())
        found = None
        if not leaving:
            found = choose_leaving(self.state(), growths, self.now_s, HEADROOM_BYTES)
        if found is not None:
            each = self.running[found.request_id]
            assert each.shares and len(self.running) > 1
            if found.ends:
                # It is not one that has come back.
                assert each.age_s <= FIRST_S
                self.run_again(found.request_id)
            else:
                each.away_s = self.now_s + each.held / OUT_BYTES_S
        self.check()

    def run(self) -> list[str]:
        arrivals = sorted(range(len(self.jobs)), key=lambda n: (self.jobs[n].arrives_s, n))
        while len(self.done) < len(self.jobs):
            assert self.now_s < 3600, "something starves"
            while arrivals and self.jobs[arrivals[0]].arrives_s <= self.now_s:
                number = arrivals.pop(0)
                at_once = self.jobs[number].at_once
                self.submit(number, AT_ONCE_FRACTION if at_once else 1.0)
            self.schedule()
            self.step()
        return self.log


@settings(max_examples=60, deadline=None)
@given(JOBS)
def test_budgets_are_kept_nothing_starves_and_each_runs_again_once_at_most(jobs: list[Job]) -> None:
    machine = Machine(jobs)
    log = machine.run()
    assert all(count == 1 for count in machine.again.values())
    assert not any(jobs[int(name[1:])].known for name in machine.again)
    # The same values give the same decisions.
    assert Machine(jobs).run() == log


def test_eight_small_ones_are_side_by_side_within_seconds() -> None:
    machine = Machine([Job(1536, False, False, 1, 60, 0, 256)] * 8)
    for number in range(8):
        machine.submit(number, 1.0)
    for _ in range(20):
        machine.schedule()
        machine.step()
    assert len(machine.running) == 8 and not machine.again


def test_a_known_task_behind_probes_starts_when_their_caps_leave_room() -> None:
    jobs = [Job(1024, False, False, 0, 5, 0, 64), Job(2048, True, False, 0, 5, 0, 64)]
    machine = Machine(jobs)
    starts = [line.split() for line in machine.run()]
    # The first may take all of the device, so the second waits for its end.
    assert [name for _, name, _ in starts] == ["j00", "j01"]
    assert float(starts[1][0]) > 5


def test_where_one_grows_little_by_little_another_leaves_and_none_runs_again() -> None:
    grows = Job(22 * 1024, False, False, 60, 20, 0, 1024, jumps=False)
    machine = Machine([grows, Job(4096, False, False, 0, 90, 1, 4096)])
    log = machine.run()
    assert not machine.again
    away = [line.split() for line in log if "away" in line]
    assert [name for _, name, _ in away] == ["j01"]
    # It comes back at the end of the one that it has left its device to, and takes what was left of its time.
    ends_s = 80 + STEP_S
    assert machine.now_s == pytest.approx(1 + 90 + ends_s - float(away[0][0]), abs=6)
