"""The arithmetic of simulated devices."""

from __future__ import annotations

import pickle

import pytest

from prefect_gpu.devices.simulated import (
    FOREIGN_PID,
    SimulatedCounters,
    SimulatedDevices,
    SimulatedOutOfMemoryError,
    SimulatedReader,
)
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import DeviceSnapshot, ProcessUse
from prefect_gpu.units import GIB, MIB


@pytest.fixture
def reader() -> SimulatedReader:
    return SimulatedReader(SimulatedDevices("2x8GiB", context="512MiB"))


def read(reader: SimulatedReader, *roots: int) -> tuple[DeviceSnapshot, DeviceSnapshot]:
    first, second = reader.read(roots)
    return first, second


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


def test_devices_have_the_same_names_every_time(reader: SimulatedReader) -> None:
    assert [(d.uuid, d.index, d.name) for d in reader.devices()] == [
        ("SIM-0", 0, "simulated 8GiB"),
        ("SIM-1", 1, "simulated 8GiB"),
    ]


def test_context_counts_from_attaching_to_detaching(reader: SimulatedReader) -> None:
    reader.attach(10, ["SIM-1"])
    first, second = read(reader, 10)

    assert first.free_bytes == 8 * GIB
    assert second.free_bytes == 8 * GIB - 512 * MIB
    assert second.processes == (ProcessUse(10, 10, 512 * MIB),)

    assert reader.detach(10) == {"SIM-1": SimulatedCounters()}
    assert read(reader)[1].free_bytes == 8 * GIB


def test_allocations_count_until_freed(reader: SimulatedReader) -> None:
    reader.attach(10, ["SIM-0"])
    kept = reader.allocate(10, "SIM-0", GIB)
    freed = reader.allocate(10, "SIM-0", 2 * GIB)
    reader.free(freed)
    reader.free(freed)

    assert kept != freed
    assert read(reader, 10)[0].free_bytes == 8 * GIB - 512 * MIB - GIB
    assert reader.root_counters(10) == {"SIM-0": SimulatedCounters(GIB, 3 * GIB)}

    reader.detach(10)
    reader.free(kept)
    assert read(reader)[0].free_bytes == 8 * GIB
    assert reader.root_counters(10) == {}
    assert reader.detach(10) == {}


def test_the_cap_refuses_before_the_device(reader: SimulatedReader) -> None:
    reader.attach(10, ["SIM-0", "SIM-1"], (2 * GIB, GIB))
    reader.allocate(10, "SIM-0", GIB)

    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        reader.allocate(10, "SIM-0", 3 * GIB)

    error = pickle.loads(pickle.dumps(caught.value))
    assert error.hit_cap
    assert str(error) == (
        "out of memory: tried to allocate 3GiB; 6.5GiB of 8GiB free; "
        "1GiB allocated by this process; cap 2GiB"
    )
    reader.allocate(10, "SIM-0", GIB)


def test_the_device_refuses_what_others_hold(reader: SimulatedReader) -> None:
    reader.occupy("SIM-0", 7 * GIB)
    reader.attach(10, ["SIM-0"])

    with pytest.raises(SimulatedOutOfMemoryError, match="512MiB of 8GiB free") as caught:
        reader.allocate(10, "SIM-0", GIB)

    assert not caught.value.hit_cap
    assert "cap" not in str(caught.value)


def test_a_device_outside_the_runner_is_refused(reader: SimulatedReader) -> None:
    reader.attach(10, ["SIM-0"])

    with pytest.raises(DeviceError, match="not a device of process 10"):
        reader.allocate(10, "SIM-1", 1)
    with pytest.raises(DeviceError, match="not a device of process 11"):
        reader.allocate(11, "SIM-0", 1)
    with pytest.raises(DeviceError, match="there are SIM-0, SIM-1"):
        reader.attach(11, ["SIM-2"])
    with pytest.raises(ValueError, match="cannot allocate"):
        reader.allocate(10, "SIM-0", -1)


def test_other_peoples_memory_comes_and_goes(reader: SimulatedReader) -> None:
    reader.occupy("SIM-0", 5 * GIB)
    reader.vacate("SIM-0", GIB)
    snapshot = read(reader)[0]
    assert snapshot.free_bytes == 4 * GIB
    assert snapshot.processes == (ProcessUse(FOREIGN_PID, None, 4 * GIB),)

    with pytest.raises(SimulatedOutOfMemoryError):
        reader.occupy("SIM-0", 5 * GIB)

    reader.vacate("SIM-0")
    assert read(reader)[0].processes == ()


def test_an_ended_process_that_holds_memory_is_foreign(reader: SimulatedReader) -> None:
    reader.attach(10, ["SIM-0"])

    assert read(reader)[0].processes == (ProcessUse(10, None, 512 * MIB),)


def test_a_leak_is_blamed_on_no_task(reader: SimulatedReader) -> None:
    reader.leave_behind("SIM-0", 9 * GIB)
    assert read(reader)[0].free_bytes == 0
    assert read(reader)[0].processes == ()
    reader.leave_behind("SIM-0", -9 * GIB)
    assert read(reader)[0].free_bytes == 8 * GIB


def test_a_failed_device_leaves_the_others(reader: SimulatedReader) -> None:
    reader.attach(10, ["SIM-0"])
    reader.fail("SIM-0", "fell off the bus")

    assert [snapshot.error for snapshot in read(reader)] == ["fell off the bus", ""]
    with pytest.raises(DeviceError, match="fell off the bus"):
        reader.allocate(10, "SIM-0", 1)

    reader.recover("SIM-0")
    assert [snapshot.error for snapshot in read(reader)] == ["", ""]


def test_a_broken_driver_raises_until_mended(reader: SimulatedReader) -> None:
    reader.break_driver("gone")
    with pytest.raises(DeviceError, match="gone"):
        reader.read(())
    with pytest.raises(DeviceError, match="gone"):
        reader.devices()
    reader.mend_driver()
    reader.close()
    assert len(reader.read(())) == 2
