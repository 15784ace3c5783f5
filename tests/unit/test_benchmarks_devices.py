"""What the benchmarks read of devices, on a driver that is made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import _devices
import pytest

from tests.fakes.fake_nvml import MIB, FakeGpu, FakeNvml, FakePart


class FakeBusyNvml(FakeNvml):
    """With the one question more that the benchmarks ask."""

    busy_percent = 0

    def nvmlDeviceGetUtilizationRates(self, handle: FakePart) -> SimpleNamespace:
        self._check(handle.error)
        return SimpleNamespace(gpu=self.busy_percent)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeBusyNvml:
    fake = FakeBusyNvml(FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_sampler_keeps_the_most_that_was_seen(nvml: FakeBusyNvml) -> None:
    first, second = nvml.gpus
    empty = first.total_bytes - first.free_bytes
    sampler = _devices.Sampler(on_gpu=True)
    for held in (100, 300, 200):
        first.compute = {7: held * MIB}
        first.free_bytes = first.total_bytes - empty - held * MIB
        second.compute = {7: 250 * MIB, 8: None}
        sampler.read()
    assert sampler.peak_bytes(7) == 300 * MIB
    assert sampler.peak_bytes(8) == 0
    assert sampler.peak_bytes(9) == 0
    assert sampler.used_peaks[0] == empty + 300 * MIB


def test_the_sampler_returns_the_utilization_of_a_period(nvml: FakeBusyNvml) -> None:
    sampler = _devices.Sampler(on_gpu=True)
    nvml.busy_percent = 30
    sampler.read()
    ((at, load),) = sampler.busy
    assert load == [0.3, 0.3]
    assert sampler.busy_fraction(at, at) == pytest.approx(0.3)
    assert sampler.busy_fraction(at + 1, at + 2) == 0


def test_devices_are_named_and_their_memory_is_read(nvml: FakeBusyNvml) -> None:
    gpu = nvml.gpus[0]
    assert _devices.nvidia() == {"driver": "580.159.04", "devices": ["NVIDIA H200"] * 2}
    assert _devices.usable_bytes() == [gpu.total_bytes - gpu.reserved_bytes] * 2
    before = _devices.used_bytes()
    gpu.free_bytes -= 5 * MIB
    assert _devices.settled_difference_bytes(before, patience_s=0) == 5 * MIB
    gpu.free_bytes += 4 * MIB
    assert _devices.settled_difference_bytes(before, patience_s=0) == 0


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    fake.broken = 12
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert _devices.handles() == []
    assert _devices.nvidia() == {}
    assert _devices.used_bytes() == 0
