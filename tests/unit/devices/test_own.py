"""What a process learns of itself from the driver."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices import nvml
from prefect_gpu.devices.nvml import NvmlReader
from prefect_gpu.devices.own import OwnMemory, OwnUse
from prefect_gpu.devices.process_tree import ProcessTable
from tests.fakes.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.fakes.fake_processes import FakeProcesses

PID = os.getpid()
UUIDS = ("GPU-b", "GPU-a")


class Rig:
    """This process on two devices of a fake NVML, in a fake process table."""

    def __init__(self) -> None:
        self.processes = FakeProcesses()
        self.processes.add(PID)
        self.processes.add(PID + 1, parent=PID, session=PID)
        self.nvml = nvml.pynvml = FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", free_bytes=5 * GIB))
        self.opened = 0
        self.own = OwnMemory(UUIDS, self._open)

    def _open(self, uuids: Sequence[str]) -> NvmlReader:
        self.opened += 1
        return NvmlReader(",".join(uuids), table=ProcessTable(self.processes, FakeClock()))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_each_device_lists_the_memory_of_the_process_and_its_children(rig: Rig) -> None:
    rig.nvml.gpus[0].compute = {PID: 3 * GIB, PID + 1: GIB, 4242: 9 * GIB}
    rig.nvml.gpus[1].compute = {PID: 2 * GIB}
    both = (OwnUse("GPU-b", 2 * GIB, 5 * GIB), OwnUse("GPU-a", 4 * GIB, 23 * GIB))
    assert rig.own.read() == both


def test_nothing_is_opened_before_the_first_question_and_once_only(rig: Rig) -> None:
    assert rig.opened == rig.nvml.starts == 0
    rig.own.read()
    rig.own.read()
    assert (rig.opened, rig.nvml.starts) == (1, 1)


def test_a_driver_that_gives_no_bytes_or_other_numbers_leaves_them_unknown(rig: Rig) -> None:
    rig.nvml.gpus[0].compute = {PID: None}
    rig.nvml.gpus[1].compute = {777: GIB}
    assert [use.process_bytes for use in rig.own.read()] == [None, None]


def test_in_a_container_no_process_id_is_taken_for_its_own(rig: Rig) -> None:
    rig.processes.initial_namespace = False
    rig.nvml.gpus[0].compute = {PID: GIB}
    rig.nvml.gpus[1].compute = {PID + 1: GIB}
    unknown = [(None, 5 * GIB), (None, 23 * GIB)]
    assert [(use.process_bytes, use.free_bytes) for use in rig.own.read()] == unknown


def test_a_device_that_fails_is_unknown_and_the_others_are_not(rig: Rig) -> None:
    rig.own.read()
    rig.nvml.gpus[0].error = 15
    assert rig.own.read() == (OwnUse("GPU-b", None, 5 * GIB), OwnUse("GPU-a"))


def test_a_driver_that_does_not_start_is_not_waited_for_again(rig: Rig) -> None:
    rig.nvml.broken = 9
    unknown = (OwnUse("GPU-b"), OwnUse("GPU-a"))
    assert rig.own.read() == unknown
    rig.nvml.broken = None
    assert rig.own.read() == unknown
    assert rig.opened == 1


def test_by_default_nvml_is_asked_for_these_devices(rig: Rig) -> None:
    assert [use.free_bytes for use in OwnMemory(UUIDS).read()] == [5 * GIB, 23 * GIB]
