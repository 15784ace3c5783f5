"""What a parent hears of phases, steps and out-of-memory of a real child."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.in_task import Allocation
from prefect_gpu.measurements import Mark
from prefect_gpu.processes.launch_spec import ChildExited
from prefect_gpu.processes.messages import Asked, BodyEnded, CountersRead, Prepare
from prefect_gpu.units import GIB
from tests.fakes.fake_devices import FakeDevices
from tests.process import step_bodies
from tests.process.rig import Heard, Rig, spec_of

UUIDS = ("SIM-0", "SIM-1")
CAP = 8 * GIB

PREPARE = Prepare(
    FrameworkPolicy("simulated", UUIDS, (24 * GIB,) * 2, (CAP,) * 2),
    Allocation(CAP, CAP, 1, UUIDS, ()),
    0.01,
)


class Simulated:
    """Answers a child as `attempt` does."""

    def __init__(self, rig: Rig, function: Any, *args: Any) -> None:
        self.reader = FakeDevices(SimulatedDevices("2x24GiB"))
        self.child: Heard = rig.launch(replace(spec_of(function, *args), prepare=PREPARE))
        self.reader.attach(self.child.pid, UUIDS, (CAP, CAP))

    def ended(self) -> BodyEnded:
        """Hear it to its end."""
        while True:
            message = self.child.until((Asked, ChildExited))  # type: ignore[arg-type]
            if isinstance(message, ChildExited):
                ended: BodyEnded = self.child.of(BodyEnded)
                return ended
            self.answer(message)

    def answer(self, asked: Asked) -> None:
        memory = self.reader.attached[self.child.pid]
        answer = asked.answer(lambda **given: memory.answer(asked.method, given))
        self.child.handle.answer(answer)


def test_a_body_with_steps_shows_what_it_takes_after_the_first(rig: Rig) -> None:
    run = Simulated(rig, step_bodies.train, 12)
    ended = run.ended()
    steps = ended.steps
    assert steps is not None and ended.counters is not None
    assert (steps.count, steps.first_live_bytes, steps.steady_live_bytes) == (12, CAP, 3 * GIB)
    assert (steps.alloc_retries, steps.growth_bytes) == (0, 0.0)
    assert steps.step_s is not None and steps.step_s > 0
    assert (ended.counters.live_bytes, ended.counters.peak_live_bytes) == (0, CAP)

    sent = [m for message in run.child.messages for m in getattr(message, "marks", ())]
    rows = [(m.name, m.step, m.allocated_bytes, m.peak_allocated_bytes) for m in sent]
    assert rows[:4] == [
        ("forward", 0, 3 * GIB, CAP),
        ("backward", 0, 3 * GIB, 3 * GIB),
        ("forward", 1, 3 * GIB, 3 * GIB),
        ("backward", 1, 3 * GIB, 3 * GIB),
    ]
    assert all(m.process_bytes is None for m in sent), "the driver knows no simulated device"


def test_a_last_step_that_released_the_cache_leaves_no_steady_memory(
    rig: Rig,
) -> None:
    steps = Simulated(rig, step_bodies.train, 3, 2).ended().steps
    assert steps is not None
    assert (steps.count, steps.steady_live_bytes, steps.alloc_retries) == (3, None, 1)


def test_an_out_of_memory_arrives_with_the_memory_at_that_moment(rig: Rig) -> None:
    run = Simulated(rig, step_bodies.want_too_much)
    run.reader.occupy("SIM-1", 20 * GIB)
    ended = run.ended()
    assert ended.out_of_memory == OutOfMemory(
        "", 7 * GIB, 0, None, 4 * GIB, "SIM-1", says_own_cap=False
    )
    # Those that were sent before are not sent again.
    marks = [m for message in run.child.messages for m in getattr(message, "marks", ())]
    assert [m.name for m in marks] == ["forward"], "the phase in which it happened"


def test_marks_arrive_from_a_child_that_dies_later(rig: Rig) -> None:
    run = Simulated(rig, step_bodies.hold_until_heard)
    run.answer(run.child.until(Asked))
    child = run.child
    asked: Asked = child.until(Asked)

    def marks() -> list[Mark]:
        return [m for message in child.messages for m in getattr(message, "marks", ())]

    while not marks():
        child.until(CountersRead)
    assert [(m.name, m.allocated_bytes) for m in marks()] == [("held", 2 * GIB)]
    child.handle.answer(asked.answer(lambda: None))
    assert child.exit().code == 3


def test_a_fork_of_the_child_sends_no_marks_and_blocks_nothing(rig: Rig) -> None:
    child = rig.start(step_bodies.fork_in_a_phase)
    assert child.value() == 0
    ended = child.of(BodyEnded)
    assert ([m.name for m in ended.marks], ended.steps) == (["parent"], None)


def test_steps_without_a_framework_have_times_only(rig: Rig) -> None:
    child = rig.start(step_bodies.only_time)
    child.exit()
    ended: BodyEnded = child.of(BodyEnded)
    first, second = ended.marks
    assert first.duration_s is not None and 0 <= first.at_s <= second.at_s
    assert (first.allocated_bytes, first.step, second.step) == (None, 0, 1)
    assert ended.steps is not None and (ended.steps.count, ended.counters) == (2, None)
