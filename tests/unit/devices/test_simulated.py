"""The arithmetic of simulated devices."""

from __future__ import annotations

import pickle

import pytest

from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedOutOfMemoryError
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import ProcessUse
from prefect_gpu.units import GIB, MIB
from tests.fakes.fake_devices import FakeDevices


@pytest.fixture
def reader() -> FakeDevices:
    return FakeDevices(SimulatedDevices("2x8GiB", context="512MiB"))


def test_specifications_are_values() -> None:
    spec = SimulatedDevices("1x80GiB, 2x24GiB", context="512MiB")

    assert spec.sizes_bytes == (80 * GIB, 24 * GIB, 24 * GIB)
    assert spec == SimulatedDevices("80GiB,24GiB,24GiB", context="0.5GiB")
    assert hash(spec) == hash(SimulatedDevices("80GiB,24GiB,24GiB", context="0.5GiB"))
    assert spec != SimulatedDevices("1x80GiB,2x24GiB")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(SimulatedDevices("2x24GiB")) == "SimulatedDevices('2x24GiB')"
    assert "context=" in repr(spec)


@pytest.mark.parametrize("text", ["two", "", "0x1GiB", "2000x1GiB", "2x", "2x24", "-1x1GiB"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="accepted: a number of devices"):
        SimulatedDevices(text)


@pytest.mark.parametrize("context", ["half", "9GiB"])
def test_a_context_that_cannot_be_is_refused(context: str) -> None:
    with pytest.raises(DeviceError, match="context"):
        SimulatedDevices("1x8GiB", context=context)


def test_devices_have_the_same_names_every_time(reader: FakeDevices) -> None:
    found = [(d.uuid, d.index, d.name) for d in reader.devices()]
    assert found == [(f"SIM-{at}", at, "simulated 8GiB") for at in range(2)]


def test_context_counts_from_attaching_to_detaching(reader: FakeDevices) -> None:
    reader.attach(10, ["SIM-1"])
    first, second = reader.read((10,))

    assert first.free_bytes == 8 * GIB
    assert second.free_bytes == 8 * GIB - 512 * MIB
    assert second.processes == (ProcessUse(10, 10, 512 * MIB),)

    reader.detach(10)
    assert reader.read(())[1].free_bytes == 8 * GIB


def test_allocations_count_until_freed(reader: FakeDevices) -> None:
    memory = reader.process_memory(["SIM-0"], None)
    memory.attach(10)
    reader.allocate(10, "SIM-0", GIB)
    reader.allocate(10, "SIM-0", 2 * GIB)
    memory.answer("simulated_free", {"device_uuid": "SIM-0", "size_bytes": 2 * GIB})

    assert reader.read((10,))[0].free_bytes == 8 * GIB - 512 * MIB - GIB
    assert memory.live_bytes() == GIB
    assert memory.detach() == (3 * GIB, 1)
    assert reader.read(())[0].free_bytes == 8 * GIB


def test_a_second_process_replaces_one_that_ended_early(reader: FakeDevices) -> None:
    memory = reader.process_memory(["SIM-0"], None)
    memory.attach(10)
    reader.allocate(10, "SIM-0", GIB)
    memory.attach(11)

    assert reader.read(())[0].processes == (ProcessUse(11, None, 512 * MIB),)
    assert memory.live_bytes() == 0


def test_the_cap_refuses_before_the_device(reader: FakeDevices) -> None:
    reader.attach(10, ["SIM-0", "SIM-1"], (2 * GIB, GIB))
    reader.allocate(10, "SIM-0", GIB)

    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        reader.allocate(10, "SIM-0", 3 * GIB)

    error = pickle.loads(pickle.dumps(caught.value))
    assert error.hit_cap
    asked, here = "out of memory: tried to allocate 3GiB", "1GiB allocated by this process"
    assert str(error) == f"{asked}; 6.5GiB of 8GiB free; {here}; cap 2GiB"
    reader.allocate(10, "SIM-0", GIB)


def test_the_device_refuses_what_others_hold(reader: FakeDevices) -> None:
    reader.attach(11, ["SIM-0"])
    reader.allocate(11, "SIM-0", int(6.5 * GIB))
    reader.attach(10, ["SIM-0"])

    with pytest.raises(SimulatedOutOfMemoryError, match="512MiB of 8GiB free") as caught:
        reader.allocate(10, "SIM-0", GIB)

    assert not caught.value.hit_cap
    assert "cap" not in str(caught.value)


def test_a_device_outside_the_runner_is_refused(reader: FakeDevices) -> None:
    reader.attach(10, ["SIM-0"])

    with pytest.raises(DeviceError, match="not a device of process 10"):
        reader.allocate(10, "SIM-1", 1)
    with pytest.raises(ValueError, match="cannot allocate"):
        reader.allocate(10, "SIM-0", -1)


def test_an_ended_process_that_holds_memory_is_foreign(reader: FakeDevices) -> None:
    reader.attach(10, ["SIM-0"])

    assert reader.read(())[0].processes == (ProcessUse(10, None, 512 * MIB),)
