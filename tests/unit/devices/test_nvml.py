"""What `NvmlReader` makes of what NVML answers."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices import nvml
from prefect_gpu.devices.host import HostMemory
from prefect_gpu.devices.nvml import REOPEN_INTERVAL_S, NvmlReader
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import DeviceSnapshot, DeviceWork, ProcessUse
from tests.fakes.fake_nvml import GIB, MIB, FakeGpu, FakeNvml, FakePart
from tests.fakes.fake_processes import FakeProcesses

ROOTS = (100, 200)


class Rig:
    """A reader over a fake NVML and a fake process table."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.processes = FakeProcesses()
        self.processes.add(100)
        self.processes.add(101, parent=100, session=100)
        self.processes.add(200)
        self.processes.add(300, session=300)
        self.nvml = nvml.pynvml = FakeNvml(*(gpus or (FakeGpu("GPU-a"),)))
        self.clock = FakeClock()
        self.visible: str | None = None
        self.wall_s = 6.0

    def reader(self) -> NvmlReader:
        return NvmlReader(
            self.visible,
            clock=self.clock,
            table=ProcessTable(self.processes, self.clock),
            memory=lambda: HostMemory(128 * GIB, 100 * GIB),
            wall_clock=lambda: self.wall_s,
        )

    def read(self) -> tuple[DeviceSnapshot, ...]:
        return self.reader().read(ROOTS)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_device_is_described(rig: Rig) -> None:
    (device,) = rig.reader().devices()

    assert (device.uuid, device.index, device.nvml_index) == ("GPU-a", 0, 0)
    assert (device.name, device.driver, device.kind) == ("NVIDIA H200", "580.159.04", "nvml")
    assert device.total_bytes == 24 * GIB
    assert device.attributed


@pytest.mark.parametrize(
    ("reserved_bytes", "said_bytes"),
    [
        pytest.param(512 * MIB, 512 * MIB, id="plausible"),
        pytest.param(2 * GIB, GIB, id="more than is not free"),
        pytest.param(-1, 0, id="negative"),
    ],
)
def test_free_is_trusted_reserved_bounded(rig: Rig, reserved_bytes: int, said_bytes: int) -> None:
    rig.nvml.gpus[0].reserved_bytes = reserved_bytes
    (snapshot,) = rig.read()

    assert snapshot.free_bytes == 23 * GIB
    assert snapshot.system_reserved_bytes == said_bytes
    assert snapshot.used_bytes == GIB - said_bytes


@pytest.mark.parametrize("code", [13, 25, 3])
def test_version_1_of_the_memory_will_do(rig: Rig, code: int) -> None:
    rig.nvml.v2_error = code
    (snapshot,) = rig.read()

    assert (snapshot.free_bytes, snapshot.system_reserved_bytes) == (23 * GIB, 0)


@pytest.mark.parametrize(("memory", "v2"), [(999, None), (None, 999), (999, 13)])
def test_an_error_of_the_memory(rig: Rig, memory: int | None, v2: int | None) -> None:
    reader = rig.reader()
    reader.devices()
    rig.nvml.gpus[0].memory_error, rig.nvml.v2_error = memory, v2
    assert reader.read(ROOTS)[0].error == "Unknown Error (NVML error 999)"


def test_processes_are_those_that_compute_and_those_that_draw(rig: Rig) -> None:
    gpu = rig.nvml.gpus[0]
    gpu.compute = {100: 3 * GIB, 101: None, 300: GIB, 200: None}
    gpu.graphics = {100: 2 * GIB, 101: MIB, 200: None, 4242: 5}

    assert rig.read()[0].processes == (
        ProcessUse(100, 100, 3 * GIB),
        ProcessUse(101, 100, MIB),
        ProcessUse(300, None, GIB),
        ProcessUse(200, 200, None),
        ProcessUse(4242, None, 5),
    )


def test_the_mark_for_not_available_is_no_number(rig: Rig) -> None:
    rig.nvml.gpus[0].compute = {100: 2**64 - 1}
    assert rig.read()[0].processes == (ProcessUse(100, 100, None),)


def test_in_a_container_a_pid_that_equals_a_childs_by_chance_is_not_attributed(rig: Rig) -> None:
    rig.processes.initial_namespace = False
    rig.nvml.gpus[0].compute = {100: GIB, 101: GIB, 300: GIB}
    (snapshot,) = rig.read()

    assert not snapshot.device.attributed
    assert [use.root_pid for use in snapshot.processes] == [None, None, None]
    assert not rig.processes.parents_read


def test_in_a_container_no_chance_pid_is_added_to_unified_memory(rig: Rig) -> None:
    rig.processes.initial_namespace = False
    gpu = rig.nvml.gpus[0]
    gpu.memory_error = 3
    gpu.compute = {100: GIB}
    assert rig.read()[0].processes == (ProcessUse(100, None, GIB),)


def test_an_older_driver_lists_processes_in_its_own_way(rig: Rig) -> None:
    rig.nvml.old_process_lists = True
    rig.nvml.gpus[0].compute = {100: GIB}
    assert rig.read()[0].processes == (ProcessUse(100, 100, GIB),)


@pytest.mark.parametrize(
    ("errors", "pids", "said"),
    [
        pytest.param([3, 3], [], "", id="not supported"),
        pytest.param([4], [200], "", id="no permission for one of the lists"),
        pytest.param([7], [100, 200], "", id="processes that start while they are listed"),
        pytest.param([7] * 8, [], "", id="they never stop starting"),
        pytest.param([15], [], "GPU is lost (NVML error 15)", id="lost while they are listed"),
    ],
)
def test_failing_lists(rig: Rig, errors: list[int], pids: list[int], said: str) -> None:
    gpu = rig.nvml.gpus[0]
    gpu.compute, gpu.graphics, gpu.process_errors = {100: 1}, {200: 1}, errors
    (snapshot,) = rig.read()

    assert [use.pid for use in snapshot.processes] == pids
    assert snapshot.error == said


def mig_gpu(**first: Any) -> FakeGpu:
    """Return a GPU with two instances. `first`: fields of the first instance."""
    one = FakePart("MIG-1", "NVIDIA H200 MIG 1g.18gb", 16 * GIB, 15 * GIB, gpu_instance_id=1)
    two = FakePart("MIG-2", total_bytes=8 * GIB, free_bytes=8 * GIB, gpu_instance_id=2)
    for name, value in first.items():
        setattr(one, name, value)
    return FakeGpu("GPU-b", instances=[one, None, two])


def test_mig_instances_take_the_place_of_their_gpu() -> None:
    snapshots = Rig(FakeGpu("GPU-a"), mig_gpu(compute={100: GIB})).read()

    devices = [s.device for s in snapshots]
    assert [(d.uuid, d.index, d.nvml_index, d.name) for d in devices] == [
        ("GPU-a", 0, 0, "NVIDIA H200"),
        ("MIG-1", 1, 1, "NVIDIA H200 MIG 1g.18gb"),
        ("MIG-2", 2, 1, "NVIDIA H200 MIG"),
    ]
    assert [s.free_bytes for s in snapshots] == [23 * GIB, 15 * GIB, 8 * GIB]
    assert [s.processes for s in snapshots] == [(), (ProcessUse(100, 100, GIB),), ()]


def test_mig_instances_may_have_no_name() -> None:
    (first, _) = Rig(mig_gpu(name_error=3)).reader().devices()
    assert first.name == "NVIDIA H200 MIG"


def test_mig_instances_are_visible_in_the_old_notation() -> None:
    rig = Rig(mig_gpu())
    rig.visible = "MIG-GPU-b/2/0"
    assert [device.uuid for device in rig.reader().devices()] == ["MIG-2"]


def test_a_gpu_with_an_unknown_mig_mode_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    gpus = (FakeGpu("GPU-x", mig_mode_error=999), mig_gpu(error=999), FakeGpu("GPU-a"))
    (device,) = Rig(*gpus).reader().devices()
    assert (device.uuid, device.index, device.nvml_index) == ("GPU-a", 0, 2)
    assert "GPU 0 is left out" in caplog.text


def test_unified_memory_is_the_machines(rig: Rig) -> None:
    gpu = rig.nvml.gpus[0]
    gpu.memory_error = 3
    gpu.compute = {100: GIB, 300: 5}
    (snapshot,) = rig.read()
    held = {use.pid: use for use in snapshot.processes}

    assert (snapshot.device.total_bytes, snapshot.free_bytes) == (128 * GIB, 100 * GIB)
    assert set(held) == {100, 101, 200, 300}
    assert (held[100].used_bytes or 0) > GIB > (held[200].used_bytes or 0) > 0
    assert held[300] == ProcessUse(300, None, 5)


def test_a_lost_gpu_leaves_the_others_and_may_come_back() -> None:
    rig = Rig(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    reader = rig.reader()
    reader.read(ROOTS)
    rig.nvml.gpus[0].error = 15
    first, second = reader.read(ROOTS)
    assert (first.error, second.error) == ("GPU is lost (NVML error 15)", "")

    rig.nvml.gpus[0].error = None
    assert [s.error for s in reader.read(ROOTS)] == ["", ""]
    assert rig.nvml.starts == 1


def test_nvml_is_started_anew_now_and_then_while_every_gpu_is_lost(rig: Rig) -> None:
    reader = rig.reader()
    reader.devices()
    rig.nvml.gpus[0].error = 15
    for _ in range(7):
        assert reader.read(ROOTS)[0].error
        rig.clock.advance(REOPEN_INTERVAL_S / 4)
    assert rig.nvml.starts == 2
    assert rig.nvml.started == 1

    rig.nvml.gpus[0].error = None
    assert not reader.read(ROOTS)[0].error
    rig.clock.advance(2 * REOPEN_INTERVAL_S)
    reader.read(ROOTS)
    assert rig.nvml.starts == 2


def test_a_driver_that_stops_raises_and_recovers(rig: Rig) -> None:
    reader = rig.reader()
    devices = reader.devices()
    rig.nvml.broken, rig.nvml.started = 18, 0
    with pytest.raises(DeviceError, match="stopped answering: Driver/library version mismatch"):
        reader.read(ROOTS)
    with pytest.raises(DeviceError, match="does not start"):
        reader.read(ROOTS)

    rig.nvml.broken = None
    assert reader.read(ROOTS)[0].device == devices[0]
    assert rig.nvml.started == 1


def test_a_driver_that_stops_while_the_devices_are_listed(rig: Rig) -> None:
    rig.nvml.gpus[0].error = 1
    with pytest.raises(DeviceError, match="could not list the devices: Uninitialized"):
        rig.reader().devices()
    assert rig.nvml.started == 0


def test_a_device_that_is_there_no_more_says_so(rig: Rig) -> None:
    reader = rig.reader()
    reader.devices()
    rig.nvml.gpus.clear()
    reader.close()
    assert reader.read(ROOTS)[0].error == "Not Found (NVML error 6)"


def test_close_gives_back_and_may_be_repeated(rig: Rig) -> None:
    reader = rig.reader()
    reader.read(ROOTS)
    reader.close()
    reader.close()
    assert rig.nvml.started == 0

    reader.read(ROOTS)
    rig.nvml.shutdown_error = 999
    reader.close()


def test_the_fake_has_the_codes_and_functions_of_the_bindings() -> None:
    import pynvml

    for name in vars(FakeNvml):
        if name.startswith(("nvml", "NVML")):
            real, fake = getattr(pynvml, name), getattr(FakeNvml, name)
            assert isinstance(fake, int) == isinstance(real, int), name
            if isinstance(fake, int):
                assert fake == real, name


@pytest.mark.parametrize(
    ("percent", "code", "busy", "error"),
    [
        pytest.param(93, None, 0.93, "", id="it tells"),
        pytest.param(0, None, 0.0, "", id="idle"),
        pytest.param(50, 3, None, "", id="not supported, as on MIG instances"),
        pytest.param(50, 999, None, "", id="another error sets no device aside"),
        pytest.param(50, 15, None, "GPU is lost (NVML error 15)", id="lost"),
    ],
)
def test_busy(rig: Rig, percent: int, code: int | None, busy: float | None, error: str) -> None:
    rig.nvml.gpus[0].busy_percent, rig.nvml.gpus[0].busy_error = percent, code
    (snapshot,) = rig.read()
    assert (snapshot.busy_fraction, snapshot.error) == (busy, error)


# What processes computed.


def work_of(reader: NvmlReader) -> DeviceWork | None:
    (snapshot,) = reader.read(ROOTS)
    assert snapshot.error == ""
    return snapshot.work


def test_the_newest_sample_of_each_process_counts_for_its_root(rig: Rig) -> None:
    gpu = rig.nvml.gpus[0]
    gpu.work = [
        (100, 5_500_000, 90),
        (101, 6_000_000, 20),
        (100, 6_000_000, 30),
        (300, 5_900_000, 7),
    ]
    gpu.millijoules = 12_500
    work = work_of(rig.reader())
    assert work == DeviceWork({100: pytest.approx(0.5), None: 0.07}, 12.5)


def test_processes_that_compute_by_turns_have_their_parts_of_the_device(rig: Rig) -> None:
    """Their newest samples are of different times."""
    rig.nvml.gpus[0].work = [(100, 5_500_000, 100), (101, 6_000_000, 100), (200, 5_800_000, 50)]
    assert work_of(rig.reader()) == DeviceWork({100: 0.8, 200: 0.2}, 0.0)


def test_a_process_without_a_new_sample_computes_for_a_second_and_is_idle_then(rig: Rig) -> None:
    """The driver takes a sample less often than devices are read, and none of idle processes."""
    reader, gpu = rig.reader(), rig.nvml.gpus[0]
    gpu.work = [(100, 5_500_000, 40)]
    assert work_of(reader) == DeviceWork({100: 0.4}, 0.0)
    rig.wall_s = 6.4
    assert work_of(reader) == DeviceWork({100: 0.4}, 0.0)
    rig.wall_s = 6.6
    assert work_of(reader) == DeviceWork({}, 0.0)
    # The system's clock is set back.
    rig.wall_s = 5.6
    assert work_of(reader) == DeviceWork({100: 0.4}, 0.0)


@pytest.mark.parametrize(
    ("changes", "work"),
    [
        pytest.param({}, DeviceWork({}, 0.0), id="idle"),
        pytest.param({"work_error": 3}, None, id="not supported, as on MIG instances"),
        pytest.param({"work_error": 999}, None, id="another error sets no device aside"),
        pytest.param({"energy_error": 3}, DeviceWork({}, None), id="no energy"),
        pytest.param({"work": [(100, 5_500_000, 4000)]}, DeviceWork({}, 0.0), id="garbage"),
        pytest.param(
            {"work": [(100, 2**63, 40)]}, DeviceWork({}, 0.0), id="a time that never comes"
        ),
    ],
)
def test_work(rig: Rig, changes: dict[str, Any], work: DeviceWork | None) -> None:
    for name, value in changes.items():
        setattr(rig.nvml.gpus[0], name, value)
    assert work_of(rig.reader()) == work


@pytest.mark.parametrize("question", ["work_error", "energy_error", "units_error"])
def test_a_device_that_is_lost_as_it_is_asked_for_its_work_is_set_aside(
    rig: Rig, question: str
) -> None:
    setattr(rig.nvml.gpus[0], question, 15)
    (snapshot,) = rig.read()
    assert snapshot.error == "GPU is lost (NVML error 15)"


def test_the_use_of_units_is_that_since_the_reading_before(rig: Rig) -> None:
    gpu, reader = rig.nvml.gpus[0], rig.reader()
    gpu.units, gpu.units_error = (18.0, 1.0, 2.0), None
    found = []
    for pause_s in (0.0, 0.25, 0.05, 0.25):
        rig.clock.advance(pause_s)
        work = work_of(reader)
        assert work is not None
        found.append(work.units)
    # The first, and one that is too soon after another.
    assert found == [None, (0.18, 0.01, 0.02), None, (0.18, 0.01, 0.02)]
    assert rig.nvml.samples == 1
    reader.close()
    assert rig.nvml.samples == 0


@pytest.mark.parametrize("percent", [float("nan"), -1.0, 2e9])
def test_a_figure_of_units_that_is_none(rig: Rig, percent: float) -> None:
    gpu, reader = rig.nvml.gpus[0], rig.reader()
    gpu.units, gpu.units_error = (18.0, percent, 2.0), None
    for _ in range(3):
        rig.clock.advance(0.25)
        assert work_of(reader) == DeviceWork({}, 0.0)


def test_a_device_without_counters_is_asked_for_them_once(rig: Rig) -> None:
    reader = rig.reader()
    for _ in range(2):
        rig.clock.advance(0.25)
        assert work_of(reader) == DeviceWork({}, 0.0)
        rig.nvml.gpus[0].units_error = None
    assert rig.nvml.samples == 1
    reader.close()
    assert rig.nvml.samples == 0


def test_in_a_container_the_work_of_processes_is_not_known(rig: Rig) -> None:
    rig.processes.initial_namespace = False
    rig.nvml.gpus[0].work = [(100, 5_500_000, 40)]
    assert work_of(rig.reader()) is None


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        ((FakeGpu("GPU-a"), FakeGpu("GPU-b")), ""),
        (
            (FakeGpu("GPU-a"), FakeGpu("GPU-b", compute_mode=3)),
            "GPU 1 is not in the default compute mode",
        ),
        (
            (FakeGpu("GPU-a", mig_mode_error=None, instances=[FakePart("MIG-1")]),),
            "its devices are MIG instances",
        ),
    ],
)
def test_devices_whose_processes_cannot_be_clients_of_mps(
    gpus: tuple[FakeGpu, ...], problem: str
) -> None:
    assert Rig(*gpus).reader().mps_refusal() == problem
