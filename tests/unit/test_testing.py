"""What a task allocates of simulated devices, and the tally of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefect_gpu import in_task as inside
from prefect_gpu import testing
from prefect_gpu.child import channel
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.units import GIB
from tests.fakes.fake_devices import FakeDevices

UUIDS = ("SIM-1", "SIM-0")


class FakeChannel:
    """Answers as the parent does."""

    def __init__(self) -> None:
        self.reader = FakeDevices(SimulatedDevices("2x8GiB"))
        self.reader.attach(10, UUIDS, (6 * GIB, 6 * GIB))

    def ask(self, method: str, **arguments: Any) -> Any:
        return self.reader.attached[10].answer(method, arguments)


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeChannel]:
    """A task on two simulated devices."""
    monkeypatch.setattr(testing, "_tally", testing._Tally())
    parent: Any = FakeChannel()
    channel.set_current_channel(parent)
    inside.set_current_allocation(inside.Allocation(6 * GIB, 6 * GIB, 1, UUIDS, ()))
    yield parent
    inside.set_current_allocation(None)
    channel.set_current_channel(None)


def test_a_process_that_allocates_nothing_has_no_counters() -> None:
    assert testing.tally() is None


def test_counters_follow_allocations_and_frees() -> None:
    kept = testing.allocate("2GiB")
    with testing.allocate(GIB, device=1):
        pass
    with testing.allocate("3GiB"):
        assert testing.tally() == Counters(5 * GIB, 5 * GIB, 6 * GIB, 6 * GIB, 0)
    assert testing.tally() == Counters(2 * GIB, 2 * GIB, 6 * GIB, 6 * GIB, 0)
    kept.free()
    kept.free()
    assert testing.tally() == Counters(0, 0, 6 * GIB, 6 * GIB, 0)


def test_a_trace_has_the_peak_since_it_began() -> None:
    assert testing.begin_trace() is None
    with testing.allocate("5GiB"):
        pass
    kept = testing.allocate(GIB)
    end = testing.begin_trace()
    assert end is not None
    with testing.allocate("2GiB"), testing.allocate(GIB, device=1):
        pass
    kept.free()
    assert end() == 4 * GIB
    # It has ended.
    assert end() is None


def test_the_parent_counts_the_same_allocations(task: FakeChannel) -> None:
    testing.allocate("2GiB")
    with testing.allocate("3GiB", device=1):
        pass
    memory = task.reader.attached[10]
    tally = testing.tally()
    assert tally is not None
    assert tally.live_bytes == memory.live_bytes()
    assert (tally.peak_live_bytes, len(UUIDS)) == memory.detach()


def test_a_refusal_counts_nothing_and_names_its_device() -> None:
    testing.allocate("2GiB")
    with pytest.raises(testing.SimulatedOutOfMemoryError) as refused:
        testing.allocate("7GiB", device=1)
    assert refused.value.device_uuid == "SIM-0"
    assert testing.tally() == Counters(2 * GIB, 2 * GIB, 2 * GIB, 2 * GIB, 0)


def test_an_allocation_retry_can_be_simulated() -> None:
    testing.note_allocation_retry()
    testing.note_allocation_retry()
    assert testing.tally() == Counters(0, 0, 0, 0, 2)
