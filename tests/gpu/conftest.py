"""What the tests on real devices share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.gpu._checks import nvml_handles

MIB = 1 << 20


@pytest.fixture(scope="session")
def nvml() -> Iterator[object]:
    """The driver's library, or a skip that says why there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA device answers: {error}")
    yield pynvml
    pynvml.nvmlShutdown()


@pytest.fixture
def device_is_clean(nvml: object) -> Iterator[Callable[[], int]]:
    """Fail if the test leaves memory on the first device, or this process in its lists."""
    import pynvml

    handle = nvml_handles()[0]

    def used() -> int:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total - memory.free)

    before = used()
    yield used
    deadline = time.monotonic() + 10
    while abs(used() - before) > 2 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    assert os.getpid() not in pids, "the flow's own process holds device memory"
    assert abs(used() - before) <= 2 * MIB, f"{(used() - before) / MIB:.1f} MiB left behind"
