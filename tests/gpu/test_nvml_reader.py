"""`NvmlReader` against a real driver: what it says of memory that a child really takes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from prefect_gpu.devices.nvml import NvmlReader
from prefect_gpu.devices.spec import open_reader, parse_spec
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import DeviceSnapshot
from prefect_gpu.units import GIB, MIB

pytestmark = pytest.mark.gpu

#: Seconds after which a wait is a failure; memory came back within 0.13 s on an H200.
LIMIT_S = 30.0

#: A child that takes 1 GiB through a helper process of its own, by the driver's own interface, and
#: ends with its standard input.
CHILD = """
import ctypes, os, sys
if os.fork() == 0:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 30)) == 0
    print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def reader() -> Iterator[NvmlReader]:
    try:
        reader = NvmlReader()
    except DeviceError as error:
        pytest.skip(f"no NVIDIA device answers: {error}")
    yield reader
    reader.close()


def held_bytes(snapshot: DeviceSnapshot, root: int) -> int:
    return sum(use.used_bytes or 0 for use in snapshot.processes if use.root_pid == root)


def test_memory_of_a_childs_helper_is_the_childs_and_comes_back(reader: NvmlReader) -> None:
    device = reader.devices()[0]
    before = reader.read(())[0]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        during = reader.read([child.pid])[0]

    assert during.error == ""
    assert held_bytes(during, child.pid) >= GIB
    assert before.free_bytes - during.free_bytes >= GIB
    assert child.pid not in {use.pid for use in during.processes}

    deadline_s = time.monotonic() + LIMIT_S
    while reader.read(())[0].free_bytes < before.free_bytes - 64 * MIB:
        assert time.monotonic() < deadline_s, "the memory did not come back"


def test_reading_creates_no_context_here(reader: NvmlReader) -> None:
    reader.read(())
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    # Not initialised (3) is the best answer; else there must be no current context.
    assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 3 or context.value is None
    assert not any(use.root_pid for use in reader.read(())[0].processes)


def test_a_uuid_prefix_and_the_environment_choose(reader: NvmlReader) -> None:
    uuid = reader.devices()[0].uuid
    for spec, environ in (
        ([uuid[:12]], {}),
        ("auto", {"CUDA_VISIBLE_DEVICES": uuid}),
        ([0], {"CUDA_VISIBLE_DEVICES": uuid[:12]}),
    ):
        opened = open_reader(parse_spec(spec), environ)
        assert [device.uuid for device in opened.devices()] == [uuid]
        opened.close()
    assert open_reader(parse_spec("auto"), {"CUDA_VISIBLE_DEVICES": ""}).kind == "host"
    with pytest.raises(DeviceError, match=uuid):
        open_reader(parse_spec([99]), {})


def test_a_reading_is_cheap_enough_for_four_a_second(reader: NvmlReader) -> None:
    started_s = time.perf_counter()
    for _ in range(100):
        reader.read(range(1000, 1050))
    print(f"one reading: {(time.perf_counter() - started_s) * 10:.3f} ms")
