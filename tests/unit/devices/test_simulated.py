"""Simulated devices: their arithmetic, and the memory that flows share by a name."""

from __future__ import annotations

import gc
import json
import os
import pickle
from pathlib import Path

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices import shared_folder, simulated
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.devices.simulated import (
    SimulatedDevices,
    SimulatedMemory,
    SimulatedOutOfMemoryError,
    SimulatedReader,
)
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import ProcessUse
from prefect_gpu.units import GIB, MIB
from tests.fakes.fake_devices import FakeDevices
from tests.unit.test_process_resources import in_fork


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


# Devices that flows share by a name: each sees the memory of the others.


def flow(folder: Path, devices: str = "1x24GiB@lab") -> SimulatedReader:
    return SimulatedReader(SimulatedDevices(devices), None, SharedFolder(folder))


def child(reader: SimulatedReader, pid: int, gib: int = 0) -> SimulatedMemory:
    (uuid,) = reader.by_uuid
    memory = reader.process_memory([uuid], None)
    memory.attach(pid)
    memory.answer("simulated_allocate", {"device_uuid": uuid, "size_bytes": gib * GIB})
    return memory


def free_gib(reader: SimulatedReader) -> float:
    (snapshot,) = reader.read(())
    return snapshot.free_bytes / GIB


def test_each_flow_sees_what_the_others_hold(tmp_path: Path) -> None:
    one, other = flow(tmp_path), flow(tmp_path)
    held = child(one, 10, 8)
    (snapshot,) = other.read([10])
    assert snapshot.free_bytes == 16 * GIB
    assert [(p.pid, p.root_pid, p.used_bytes) for p in snapshot.processes] == [(10, 10, 8 * GIB)]
    held.detach()
    assert free_gib(other) == 24


def test_an_allocation_finds_no_more_than_the_others_leave(tmp_path: Path) -> None:
    one, other = flow(tmp_path), flow(tmp_path)
    child(one, 10, 20)
    with pytest.raises(SimulatedOutOfMemoryError, match="4GiB of 24GiB free"):
        child(other, 11, 5)
    child(other, 12, 4)
    assert free_gib(one) == 0


def test_what_a_flow_held_is_free_at_its_end(tmp_path: Path) -> None:
    one, other = flow(tmp_path), flow(tmp_path)
    child(one, 10, 20)
    assert free_gib(other) == 4
    del one
    gc.collect()
    assert len(list(tmp_path.glob("simulated lab *"))) == 1, "its file is removed"
    assert free_gib(other) == 24


def test_process_ids_of_another_namespace_are_nobodys_here(tmp_path: Path) -> None:
    one, other = flow(tmp_path), flow(tmp_path)
    child(one, 10, 8)
    (path,) = (p for p in tmp_path.glob("simulated lab *") if '"10"' in p.read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), "namespace": "pid:[1]"}))
    (snapshot,) = other.read([10])
    assert (snapshot.free_bytes, snapshot.processes) == (16 * GIB, ())


def test_names_are_told_apart(tmp_path: Path) -> None:
    child(flow(tmp_path, "1x24GiB@lab.old"), 10, 8)
    kept = flow(tmp_path, "1x24GiB@lab-new")
    child(kept, 10, 4)
    assert free_gib(flow(tmp_path)) == 24


def test_flows_that_say_different_things_of_one_name_are_refused(tmp_path: Path) -> None:
    one = flow(tmp_path)
    with pytest.raises(DeviceError, match=r"@lab: .* accepted: the same in all flows"):
        flow(tmp_path, "2x24GiB@lab")
    del one
    gc.collect()
    flow(tmp_path, "2x24GiB@lab")


def test_devices_without_a_name_are_shared_with_those_who_are_told_where() -> None:
    devices, others = SimulatedDevices("1x24GiB"), SimulatedDevices("1x8GiB")
    one, told = SimulatedReader(devices), list[Path]()
    one.on_shared = told.append
    memory = child(one, 10, 8)
    assert free_gib(SimulatedReader(devices)) == 24
    folder = memory.answer("simulated_share", {"spec": devices})
    inner = SimulatedReader(devices, folder=SharedFolder(folder))
    assert (told, free_gib(inner)) == ([folder], 16)
    assert inner.folder_for(devices) == one.folder_for(devices) == folder
    assert one.folder_for(others) == one.folder_for(others) != folder
    assert told == [folder]
    folders = [folder, one.folder_for(others)]
    del one, inner, memory
    gc.collect()
    assert not any(each.exists() for each in folders)


def test_a_fork_of_a_flow_writes_nothing_in_its_name(tmp_path: Path) -> None:
    reader = flow(tmp_path)
    child(reader, 10, 4)
    other = flow(tmp_path)

    def end_in_the_fork() -> bool:
        # The number of the flow's file is free here: another file may get it.
        assert reader._shared is not None and reader._shared._hold is not None
        with (tmp_path / "of the fork").open("w+b") as file:
            os.dup2(file.fileno(), reader._shared._hold.descriptor)
            reader.attached[10].detach()
            return file.read() == b""

    assert in_fork(end_in_the_fork)
    assert free_gib(other) == 20


def test_a_process_that_is_stopped_in_the_middle_holds_no_other_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_folder, "LOCKED_S", 0.02)
    clock = FakeClock()
    reader = SimulatedReader(SimulatedDevices("1x24GiB@lab"), clock, SharedFolder(tmp_path))
    held = child(flow(tmp_path), 10, 8)
    with SharedFolder(tmp_path).locked("simulated lab"):
        with pytest.raises(OSError, match="has kept the lock 'simulated lab'"):
            flow(tmp_path)
        assert free_gib(reader) == free_gib(reader) == 24
    (record,) = caplog.records
    assert "devices @lab is not seen for 1m: another process has kept" in record.getMessage()
    assert free_gib(reader) == 24
    clock.advance(simulated.AGAIN_S)
    assert free_gib(reader) == 16
    held.detach()


def test_a_flow_that_ends_while_its_file_is_about_to_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, ends, stays = flow(tmp_path), flow(tmp_path), flow(tmp_path)
    child(ends, 10, 4)
    child(stays, 11, 8)
    name = ends._shared._name  # type: ignore[union-attr]
    is_held = SharedFolder.is_held

    def ends_after_the_check(folder: SharedFolder, checked: str) -> bool:
        held = is_held(folder, checked)
        if checked == name:
            (tmp_path / name).unlink(missing_ok=True)
        return held

    monkeypatch.setattr(SharedFolder, "is_held", ends_after_the_check)
    assert free_gib(reader) == free_gib(reader) == 16
    assert not caplog.records


def test_a_file_that_is_cut_short_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader, other = flow(tmp_path), flow(tmp_path)
    (path,) = (p for p in tmp_path.glob("simulated lab *") if p.name != reader._shared._name)  # type: ignore[union-attr]
    path.write_text('{"devices": [')
    with pytest.raises(OSError, match="another program has written to it"):
        flow(tmp_path)
    assert free_gib(reader) == 24
    assert str(path) in caplog.text
    del other
