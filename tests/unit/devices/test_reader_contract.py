"""What every `DeviceReader` must do, checked on each that this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefect_gpu.devices import nvml
from prefect_gpu.devices.host import HostReader
from prefect_gpu.devices.nvml import NvmlReader
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.errors import DeviceError, ProtocolError
from tests.fakes.fake_devices import FakeDevices
from tests.fakes.fake_nvml import FakeGpu, FakeNvml, FakePart
from tests.fakes.fake_processes import FakeProcesses

ME = os.getpid()

#: An id that no process has.
ABSENT = 2**22 + 1


def _simulated(folder: Path) -> DeviceReader:
    reader = FakeDevices(SimulatedDevices("1x80GiB,2x24GiB", context="512MiB"))
    reader.attach(ME, ["SIM-0"])
    reader.occupy("SIM-1", 2**30)
    reader.failed["SIM-2"] = "GPU is lost"
    return reader


def _nvml(*gpus: FakeGpu, in_container: bool = False) -> Callable[[Path], DeviceReader]:
    def make(folder: Path) -> DeviceReader:
        processes = FakeProcesses()
        processes.add(ME)
        processes.initial_namespace = not in_container
        nvml.pynvml = FakeNvml(*gpus)
        return NvmlReader(table=ProcessTable(processes))

    return make


@dataclass
class LateLoss(FakeGpu):
    """A GPU that is lost once it was listed."""

    def __post_init__(self) -> None:
        self.process_errors = [15] * 99


def _real(folder: Path) -> DeviceReader:
    try:
        return NvmlReader()
    except DeviceError as error:
        pytest.skip(f"no NVIDIA device answers: {error}")


READERS = [
    pytest.param(lambda folder: HostReader(), id="host"),
    pytest.param(_simulated, id="simulated"),
    pytest.param(_nvml(FakeGpu("GPU-a", compute={ME: 5, 1: 7}), FakeGpu("GPU-b")), id="NVML: two GPUs"),
    pytest.param(_nvml(FakeGpu("GPU-a", instances=[FakePart("MIG-1"), FakePart("MIG-2")])), id="NVML: MIG"),
    pytest.param(_nvml(FakeGpu("GPU-a", compute={ME: None})), id="NVML: WSL tells no bytes"),
    pytest.param(_nvml(FakeGpu("GPU-a", compute={ME: 5, 99999: 7}), in_container=True), id="NVML: process ids from outside of the container"),
    pytest.param(_nvml(FakeGpu("GPU-a", memory_error=3)), id="NVML: unified memory"),
    pytest.param(_nvml(FakeGpu("GPU-a"), LateLoss("GPU-b")), id="NVML: one GPU is lost"),
    pytest.param(_real, id="NVML: this machine", marks=pytest.mark.gpu),
]  # fmt: skip


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceReader]:
    made: DeviceReader = request.param(tmp_path)
    yield made
    made.close()


def test_devices_are_listed_in_order_and_the_same_every_time(reader: DeviceReader) -> None:
    devices = reader.devices()

    assert devices
    assert devices == reader.devices()
    assert [device.index for device in devices] == list(range(len(devices)))
    assert len({device.uuid for device in devices}) == len(devices)
    for device in devices:
        assert device.kind == reader.kind
        assert device.uuid.startswith(("GPU-", "MIG-", "HOST-", "SIM-"))
        assert device.total_bytes > 0 and device.name and device.host


def test_every_device_is_read_in_order(reader: DeviceReader) -> None:
    devices = reader.devices()
    first, second = reader.read([ME]), reader.read([ME])

    assert tuple(snapshot.device for snapshot in first) == devices
    for before, after in zip(first, second, strict=True):
        assert after.at_s >= before.at_s
    for snapshot in first:
        if not snapshot.error:
            assert 0 <= snapshot.free_bytes <= snapshot.device.total_bytes
            assert snapshot.system_reserved_bytes >= 0
            assert snapshot.usable_bytes >= snapshot.used_bytes >= 0


def test_processes_belong_to_a_root_that_was_given_or_to_none(reader: DeviceReader) -> None:
    for roots in ((), (ME,), (ABSENT,)):
        for snapshot in reader.read(roots):
            pids = [use.pid for use in snapshot.processes]
            assert len(set(pids)) == len(pids)
            for use in snapshot.processes:
                assert use.root_pid is None or use.root_pid in {*roots} - {ABSENT}
                assert use.used_bytes is None or use.used_bytes >= 0


def test_reading_goes_on_after_closing(reader: DeviceReader) -> None:
    devices = reader.devices()
    reader.close()
    reader.close()
    assert tuple(snapshot.device for snapshot in reader.read(())) == devices


def test_what_is_stored_about_a_process_begins_empty_and_ends_with_it(reader: DeviceReader) -> None:
    memory = reader.process_memory([reader.devices()[0].uuid], None)
    assert memory.live_bytes() is memory.detach() is None
    memory.attach(ME)
    assert memory.live_bytes() in (None, 0)
    assert memory.detach() in (None, (0, 1))


def test_a_process_with_a_budget_has_no_cap_above_it(reader: DeviceReader) -> None:
    (device, *_) = reader.devices()
    memory = reader.process_memory([device.uuid], [2**30])
    assert memory.cap_bytes is None or memory.cap_bytes[0] + (memory.context_bytes or 0) == 2**30


def test_an_unknown_request_of_a_process_is_refused(reader: DeviceReader) -> None:
    memory = reader.process_memory([reader.devices()[0].uuid], None)
    memory.attach(ME)
    with pytest.raises(ProtocolError):
        memory.answer("unknown", {})
