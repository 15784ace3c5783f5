"""What a child measures of itself on a real device: phases, steps, out-of-memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import AllocationMode, FrameworkPolicy, child_environment
from prefect_gpu.in_task import Allocation
from prefect_gpu.processes.messages import BodyEnded, Prepare
from tests.gpu import step_bodies
from tests.process.rig import Heard, Rig, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device_is_clean")]

MIB = 1 << 20
GIB = 1 << 30
CAP = GIB
Launch = Callable[..., Heard]
Run = Callable[..., BodyEnded]


@pytest.fixture
def launch(nvml: Any) -> Iterator[Launch]:
    """Start a body in a child on device 0."""
    pytest.importorskip("torch")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    rig = Rig()

    def launch(
        allocation: AllocationMode, function: Any, *args: Any, snapshot_path: str = ""
    ) -> Heard:
        policy = FrameworkPolicy(
            "nvml",
            (uuid,),
            (total,),
            (CAP,),
            allocation=allocation,
            frameworks=("torch",),
            snapshot_path=snapshot_path,
        )
        environment = child_environment(policy, registry.adapters_for(policy), os.environ)
        spec = spec_of(function, *args, environment=environment)
        prepare = Prepare(policy, Allocation(CAP, CAP, 1, (uuid,), ("torch",)), 0.1)
        return rig.launch(replace(spec, prepare=prepare))

    yield launch
    rig.launcher.close(DEADLOCK_S)


@pytest.fixture
def run(launch: Launch) -> Run:
    """Run a body in a child on device 0, and give how it ended."""

    def run(allocation: AllocationMode, function: Any, *args: Any, **given: Any) -> BodyEnded:
        child = launch(allocation, function, *args, **given)
        child.exit()
        ended: BodyEnded = child.of(BodyEnded)
        marks = tuple(m for message in child.messages for m in getattr(message, "marks", ()))
        return replace(ended, marks=marks)

    return run


def test_steps_and_phases_of_torch(run: Run) -> None:
    ended = run("growth", step_bodies.train, 20)
    assert not ended.raised, ended.traceback
    steps = ended.steps
    assert steps is not None
    assert (steps.count, steps.first_live_bytes) == (20, 896 * MIB)
    # The next batch is there for a moment before the last one is let go.
    assert steps.steady_live_bytes == 512 * MIB
    assert steps.alloc_retries == 0
    # Steps as short as these are not all looked at.
    assert not steps.growth_bytes

    first, second = ended.marks[:2]
    assert (first.name, first.allocated_bytes, first.peak_allocated_bytes) == (
        "forward",
        384 * MIB,
        896 * MIB,
    )
    assert (second.name, second.peak_allocated_bytes) == ("backward", 384 * MIB)
    assert (second.reserved_bytes, second.peak_reserved_bytes) == (896 * MIB, 896 * MIB)


def test_a_peak_that_is_shorter_than_a_look_is_learned_exactly(run: Run, launch: Launch) -> None:
    exact = launch("growth", step_bodies.spike, 10, True).value()
    ended = run("growth", step_bodies.spike, 10)
    assert not ended.raised, ended.traceback
    steps = ended.steps
    assert steps is not None and steps.first_live_bytes is not None
    assert steps.steady_live_bytes == exact > 768 * MIB
    assert steps.first_live_bytes > exact


def test_a_history_for_snapshots_leaves_the_steady_peak_exact(
    run: Run, launch: Launch, tmp_path: Path
) -> None:
    exact = launch("growth", step_bodies.spike, 10, True).value()
    ended = run("growth", step_bodies.spike, 10, snapshot_path=str(tmp_path / "a.pickle"))
    assert not ended.raised, ended.traceback
    assert ended.steps is not None and ended.steps.steady_live_bytes == exact
    assert not list(tmp_path.iterdir()), "nothing went wrong"


def test_a_shortage_has_pytorchs_summary_and_a_snapshot_with_stacks(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "snapshots" / "a.pickle"
    found = run("limit", step_bodies.want, 768, snapshot_path=str(path)).out_of_memory
    assert found is not None and found.snapshot_path == str(path)
    assert "PyTorch CUDA memory summary, device ID 0" in found.summary
    snapshot = pickle.loads(path.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    (held,) = [block for block in blocks if block["state"] == "active_allocated"]
    assert held["size"] == 512 * MIB
    assert "want" in [frame["name"] for frame in held["frames"]]
    assert {"alloc", "oom"} <= {event["action"] for event in snapshot["device_traces"][0]}


def test_what_a_body_records_itself_goes_on(launch: Launch) -> None:
    on, events = launch("growth", step_bodies.record, 10).value()
    assert on
    assert events >= 9


def test_a_cap_that_refuses_says_so(run: Run) -> None:
    ended = run("limit", step_bodies.want, 768)
    found = ended.out_of_memory
    assert found is not None, ended.traceback
    assert (found.framework, found.wanted_bytes, found.held_bytes) == (
        "torch",
        768 * MIB,
        512 * MIB,
    )
    assert found.says_own_cap is True
    assert found.device_uuid.startswith(("GPU-", "MIG-"))
    assert found.free_bytes is not None and found.free_bytes > 768 * MIB
    # Unknown in a container whose numbers the driver does not know.
    assert found.process_bytes is None or found.process_bytes > 512 * MIB


def test_a_device_that_is_full_is_no_cap(run: Run) -> None:
    ended = run("growth", step_bodies.want, 1 << 20)
    found = ended.out_of_memory
    assert found is not None, ended.traceback
    assert found.says_own_cap is None
    assert found.free_bytes is not None and found.wanted_bytes is not None
    assert found.free_bytes < found.wanted_bytes == 1 << 40
