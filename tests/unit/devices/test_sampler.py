"""When the sampler reads, and that nothing stops it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import pytest

from prefect_gpu.clock import DEADLOCK_S, FakeClock
from prefect_gpu.devices.host import HostMemory, HostReader
from prefect_gpu.devices.sampler import MAX_BACK_OFF_S, WINDOW_S, Sampler, Utilisation
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, Reading
from tests.fakes.fake_devices import FakeDevices
from tests.unit.scheduling.values import snapshot


class GateReader:
    """Stays in `read` until let go."""

    kind: DeviceKind = "simulated"

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def devices(self) -> tuple[Device, ...]:
        return ()

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        self.entered.release()
        assert self.gate.acquire(timeout=DEADLOCK_S)
        return ()

    def close(self) -> None:
        return


class Rig:
    """A sampler, its clock and what it published."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.device = FakeDevices(SimulatedDevices("1x8GiB"), self.clock)
        self.published: queue.Queue[Reading] = queue.Queue()
        self.available: Callable[[], int] = lambda: 5
        self.roots: tuple[int, ...] = (10,)
        self.sampler = Sampler(
            self.device,
            lambda: self.roots,
            self.published.put,
            clock=self.clock,
            read_host_available=lambda: self.available(),
        )

    def next(self) -> Reading:
        return self.published.get(timeout=DEADLOCK_S)

    def assert_quiet(self) -> None:
        """No reading comes: the sampler waits, and has published nothing."""
        self.clock.wait_for_waiters()
        assert self.published.empty()


def samplers() -> set[threading.Thread]:
    """The threads of samplers, those of other tests' runners in this process among them."""
    return {t for t in threading.enumerate() if t.name == "prefect-gpu-sampler"}


@pytest.fixture
def rig() -> Iterator[Rig]:
    before = samplers()
    rig = Rig()
    yield rig
    rig.sampler.stop()
    assert not samplers() - before


def test_no_thread_until_needed(rig: Rig) -> None:
    before = samplers()
    rig.sampler.set_active(False)
    assert samplers() == before


def test_active_reads_at_the_interval(rig: Rig) -> None:
    rig.device.attach(10, ["SIM-0"])
    rig.sampler.set_active(True)
    first = rig.next()
    assert first == Reading(1000.0, rig.device.read((10,)), host_available_bytes=5)

    rig.clock.wait_for_waiters()
    rig.clock.advance(0.2)
    rig.assert_quiet()
    rig.clock.advance(0.05)
    assert rig.next().at_s == pytest.approx(1000.25)


def test_the_machines_memory_is_read_once_where_it_is_the_device() -> None:
    read: list[str] = []

    def memory() -> HostMemory:
        read.append("machine")
        return HostMemory(8, 7)

    published: queue.Queue[Reading] = queue.Queue()
    device = HostReader("here", memory)
    read.clear()
    twice = lambda: read.append("twice") or 0  # noqa: E731
    sampler = Sampler(device, tuple, published.put, read_host_available=twice)
    sampler.refresh()
    reading = published.get(timeout=DEADLOCK_S)
    sampler.stop()
    assert read == ["machine"]
    assert reading.host_available_bytes == reading.snapshots[0].free_bytes == 7


def test_idle_reads_nothing(rig: Rig) -> None:
    rig.sampler.set_active(True)
    rig.next()
    rig.sampler.set_active(False)
    rig.clock.advance(60)
    rig.assert_quiet()

    rig.sampler.set_active(True)
    assert rig.next().at_s == 1060.0


def test_refresh_reads_at_once_even_when_idle(rig: Rig) -> None:
    rig.sampler.refresh()
    assert rig.next().at_s == 1000.0
    rig.sampler.set_active(True)
    rig.sampler.refresh()
    assert rig.next().at_s == 1000.0


def test_no_driver_is_a_reading_with_an_error_and_recovers(rig: Rig) -> None:
    rig.device.broken = "gone"
    rig.sampler.set_active(True)
    reading = rig.next()
    assert (reading.snapshots, reading.error) == ((), "simulated driver: gone")
    assert reading.host_available_bytes == 5

    rig.device.broken = ""
    rig.clock.advance(0.25)
    assert rig.next().error == ""


def test_repeated_failures_back_off_to_a_limit(rig: Rig) -> None:
    rig.device.broken = "gone"
    rig.sampler.set_active(True)
    pauses_s = []
    last_s = rig.next().at_s
    for pause_s in (0.25, 0.5, 1.0, 2.0, 4.0, MAX_BACK_OFF_S, MAX_BACK_OFF_S):
        rig.clock.advance(pause_s)
        at_s = rig.next().at_s
        pauses_s.append(at_s - last_s)
        last_s = at_s
    assert pauses_s == [0.25, 0.5, 1.0, 2.0, 4.0, MAX_BACK_OFF_S, MAX_BACK_OFF_S]

    rig.device.broken = ""
    rig.sampler.refresh()
    assert rig.next().error == ""
    rig.clock.advance(0.25)
    assert rig.next().error == ""


def test_an_internal_error_is_reported(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def raises() -> int:
        raise ZeroDivisionError("oops")

    rig.available = raises
    rig.sampler.refresh()
    assert rig.next().error == "ZeroDivisionError: oops"
    assert "could not be read" in caplog.text


def test_a_publish_that_raises_does_not_end_the_readings(caplog: pytest.LogCaptureFixture) -> None:
    seen: queue.Queue[float] = queue.Queue()

    def publish(reading: Reading) -> None:
        seen.put(reading.at_s)
        raise ValueError("not now")

    device = SimulatedReader(SimulatedDevices("1x8GiB"))
    sampler = Sampler(device, tuple, publish)
    for _ in range(2):
        sampler.refresh()
        seen.get(timeout=DEADLOCK_S)
    sampler.stop()
    assert "could not be passed on" in caplog.text


def test_requests_during_a_reading_are_one_more_reading() -> None:
    reader, published = GateReader(), queue.Queue[Reading]()
    sampler = Sampler(reader, tuple, published.put, clock=FakeClock())
    sampler.refresh()
    assert reader.entered.acquire(timeout=DEADLOCK_S)
    for _ in range(5):
        sampler.refresh()
    reader.gate.release(2)
    published.get(timeout=DEADLOCK_S)
    published.get(timeout=DEADLOCK_S)
    sampler.stop()
    assert published.empty()


def test_a_reader_that_hangs_blocks_no_caller() -> None:
    reader, published = GateReader(), queue.Queue[Reading]()
    sampler = Sampler(reader, tuple, published.put)
    sampler.set_active(True)
    assert reader.entered.acquire(timeout=DEADLOCK_S)
    sampler.refresh()
    sampler.set_active(False)
    assert published.empty()
    reader.gate.release(2)
    sampler.stop()


def test_readings_have_the_utilization_since_the_last_one(rig: Rig) -> None:
    rig.device.busy["SIM-0"] = 1.0
    rig.sampler.set_active(True)
    assert rig.next().snapshots[0].busy_fraction == 1.0
    rig.device.busy["SIM-0"] = 0.0
    rig.sampler.refresh()
    assert rig.next().snapshots[0].busy_fraction == 0.5
    rig.device.busy.clear()
    rig.sampler.refresh()
    assert rig.next().snapshots[0].busy_fraction is None


# The mean of the last readings.


def test_one_instant_does_not_decide() -> None:
    utilisation = Utilisation()
    told = [
        utilisation.smooth(replace(snapshot(), at_s=at, busy_fraction=busy)).busy_fraction
        for at, busy in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.5), (WINDOW_S + 1.5, 0.9))
    ]
    assert told == [0.0, 0.5, 0.5, pytest.approx(0.7)], "readings of the window only"


def test_devices_are_distinguished_and_log_again_after_a_recovery() -> None:
    utilisation = Utilisation()

    def smooth(*busy: float | None) -> list[float | None]:
        taken = [replace(snapshot(i), busy_fraction=b) for i, b in enumerate(busy)]
        return [each.busy_fraction for each in map(utilisation.smooth, taken)]

    assert smooth(1.0, 0.0) == [1.0, 0.0]
    assert smooth(None, 1.0) == [None, 0.5]
    assert smooth(0.2, None) == [0.2, None]


def test_a_lost_device_has_no_processes() -> None:
    utilisation = Utilisation()
    utilisation.smooth(replace(snapshot(), busy_fraction=1.0))
    lost = replace(snapshot(error="lost"), busy_fraction=1.0)
    assert utilisation.smooth(lost) == lost
    assert utilisation.smooth(replace(snapshot(), busy_fraction=0.1)).busy_fraction == 0.1
