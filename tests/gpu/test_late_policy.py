"""That a policy which comes after the imports does what it does when it comes before them.

Each case runs in a child made for it and in one that waited, with the framework imported, and compares
what came of it.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.devices.nvml import NvmlReader
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import FrameworkPolicy, child_environment
from prefect_gpu.in_task import Allocation
from prefect_gpu.processes.launch_spec import ChildExited
from prefect_gpu.processes.messages import Prepare
from prefect_gpu.processes.standby_kind import Kind, kind_of
from prefect_gpu.processes.standby_pool import StandbyPool
from prefect_gpu.units import GIB, MIB
from tests.gpu import late_bodies as bodies
from tests.process.conftest import make_rig as make_rig
from tests.process.rig import Heard, Rig, eventually, spec_of
from tests.process.warm import Broker

pytestmark = pytest.mark.gpu

CONTEXT = GIB
BUDGET = 5 * GIB
CAP = BUDGET - CONTEXT


def device(reader: DeviceReader) -> Any:
    return reader.devices()[0]


def policy_of(found: Any, framework: str, **changes: Any) -> FrameworkPolicy:
    plain = FrameworkPolicy(
        "nvml",
        (found.uuid,),
        (found.total_bytes,),
        (BUDGET,),
        context_bytes={framework: CONTEXT},
        cpus=2,
        frameworks=(framework,),
    )
    return replace(plain, **changes)


def needs(framework: str) -> None:
    pytest.importorskip(framework)


class Both:
    """Runs a body in a cold child and in a warmed one."""

    def __init__(self, rig: Rig, found: Any) -> None:
        self.rig, self.device = rig, found
        self.pool = StandbyPool(rig.launcher, cores=4)
        self.pool.open(self, 1, Broker())

    def spec(self, body: Callable[..., Any], policy: FrameworkPolicy, *args: Any) -> Any:
        environment = child_environment(policy, registry.adapters_for(policy), os.environ)
        cap = policy.cap_bytes(policy.frameworks[0])
        allocation = Allocation(
            BUDGET, cap[0] if cap else None, 1, policy.device_uuids, policy.frameworks
        )
        spec = spec_of(body, *args, environment=environment)
        return replace(spec, prepare=Prepare(policy, allocation, 0.1))

    def kind(self, body: Callable[..., Any], policy: FrameworkPolicy) -> Kind:
        # What is known as a task is submitted: no device, no budget.
        early = replace(
            policy,
            device_uuids=(),
            total_bytes=(),
            budget_bytes=(),
            allocation="growth",
            context_bytes={},
        )
        return kind_of(body, early, size_bytes=GIB)

    def run(self, body: Callable[..., Any], policy: FrameworkPolicy, *args: Any) -> tuple[Any, Any]:
        cold = self.rig.launch(self.spec(body, policy, *args)).value()
        announced = self.pool.announce(self.kind(body, policy))
        assert eventually(lambda: self.pool.ready_by_kind.total() == 1)
        (waited,) = self.pool.pids
        heard = Heard.__new__(Heard)
        heard.messages, heard._queue = [], queue.SimpleQueue()
        heard.handle = announced.start(self.spec(body, policy, *args), heard._queue.put)
        self.rig.started.append(heard)
        warm = heard.value()
        assert heard.pid == waited, "it was not done by the process that waited"
        assert isinstance(heard.exit(), ChildExited)
        return cold, warm


@pytest.fixture
def both(nvml: object, make_rig: Callable[..., Rig]) -> Any:
    found = device(NvmlReader())
    made = Both(make_rig(), found)
    yield made
    made.pool.close(made)
    made.pool.shut_down()


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "cupy"])
def test_the_device_is_the_one_allotted(both: Both, framework: str) -> None:
    needs(framework)
    cold, warm = both.run(bodies.devices, policy_of(both.device, framework), framework)
    assert cold == warm == (both.device.uuid, 1)


@pytest.mark.parametrize("allocation", ["limit", "all"])
@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "cupy"])
def test_the_cap_holds(both: Both, framework: str, allocation: str) -> None:
    needs(framework)
    policy = policy_of(both.device, framework, allocation=allocation)
    sizes = (CAP - 2 * GIB, CAP + GIB)
    for fits, refused in both.run(bodies.fill, policy, framework, sizes):
        assert fits == "had" and refused == "out of memory"


@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_growth_takes_no_more_than_is_used(both: Both, framework: str) -> None:
    needs(framework)
    policy = policy_of(both.device, framework, allocation="growth", context_bytes={})
    for used in both.run(bodies.driver_shows, policy, framework, 64 * MIB):
        assert used < 4 * GIB


@pytest.mark.parametrize(
    "options",
    [
        {"max_split_size_mb": "64"},
        {"expandable_segments": "True"},
        {"garbage_collection_threshold": "0.7", "max_split_size_mb": "128"},
        {"roundup_power2_divisions": "4"},
    ],
    ids=lambda options: "+".join(options),
)
def test_pytorchs_allocator_takes_its_options(both: Both, options: dict[str, str]) -> None:
    needs("torch")
    policy = policy_of(both.device, "torch", allocator_options=options)
    cold, warm = both.run(bodies.allocator_settings, policy)
    assert cold == warm and cold


def test_pytorchs_backend_is_there_from_the_start(both: Both) -> None:
    needs("torch")
    policy = policy_of(both.device, "torch", allocator_options={"backend": "cudaMallocAsync"})
    cold, warm = both.run(bodies.allocator_backend, policy)
    assert cold == warm == "cudaMallocAsync"


def test_caching_off(both: Both) -> None:
    needs("torch")
    off = policy_of(both.device, "torch", caching=False)
    for reserved in both.run(bodies.reserved_after_free, off):
        assert reserved == 0
    # Known as the task is submitted, so put in place before the imports; and taken away late.
    for reserved in both.run(bodies.reserved_after_free, policy_of(both.device, "torch")):
        assert reserved > 0


def test_a_module_that_asks_pytorch_for_a_gpu_as_it_is_imported_touches_nothing(both: Both) -> None:
    needs("torch")
    cold, warm = both.run(bodies.asked_at_import, policy_of(both.device, "torch"))
    assert cold == warm == (True, 1, both.device.uuid)
