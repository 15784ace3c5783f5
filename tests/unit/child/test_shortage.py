"""What a child makes of an out-of-memory."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.child.shortage import SUMMARY_CHARS, find_shortage, parse_refusal
from prefect_gpu.devices.own import OwnUse
from prefect_gpu.devices.simulated import SimulatedOutOfMemoryError
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.units import GIB, MIB


class FakeReadings:
    def __init__(self, *uses: OwnUse, counters: Counters | None = None) -> None:
        self.device_uuids = tuple(use.device_uuid for use in uses) or ("GPU-a",)
        self._uses, self._counters = uses, counters
        #: By framework.
        self.pages: dict[str, str] = {}

    def counters(self) -> Counters | None:
        return self._counters

    def own(self) -> tuple[OwnUse, ...]:
        return self._uses

    def memory_summary(self, framework: str) -> str:
        return self.pages.get(framework, "")

    def write_snapshot(self, framework: str) -> str:
        return f"/snapshots/{framework}.pickle" if framework in self.pages else ""


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def find(error: BaseException, *uses: OwnUse, **known: Any) -> OutOfMemory | None:
    readings: Any = FakeReadings(*uses, **known)
    return find_shortage(error, ("torch",), readings)


# Which error it is.


def test_an_out_of_memory_is_found_in_an_error_and_in_its_causes() -> None:
    outer = ValueError("step failed")
    outer.__cause__ = RuntimeError("CUDA out of memory: trying to allocate 7 bytes")
    assert find(outer) == OutOfMemory("torch", wanted_bytes=7)
    group = ValueError("unhandled errors in a TaskGroup")
    group.exceptions = (KeyError("a"), RuntimeError("CUDA out of memory"))  # type: ignore[attr-defined]
    assert find(group) == OutOfMemory("torch")
    assert find(ValueError("other")) is None
    assert find(RuntimeError("OOM when allocating tensor")) is None, "of another framework"


def test_the_framework_s_own_page_and_snapshot_are_taken_with_it() -> None:
    readings: Any = FakeReadings()
    readings.pages = {"torch": "x" * (SUMMARY_CHARS + 1)}
    found = find_shortage(RuntimeError("CUDA out of memory"), ("torch",), readings)
    assert found is not None
    assert (found.summary, found.snapshot_path) == ("x" * SUMMARY_CHARS, "/snapshots/torch.pickle")
    other = RuntimeError("OOM when allocating tensor")
    found = find_shortage(other, ("torch", "tensorflow"), readings)
    assert found is not None and (found.summary, found.snapshot_path) == ("", "")
    assert find_shortage(ValueError("another"), ("torch",), readings) is None


@pytest.mark.parametrize(
    ("counters", "counts"),
    [
        pytest.param(Counters(1, 1, 1, 1, alloc_retries=17), True, id="the allocator was refused"),
        pytest.param(Counters(1, 1, 1, 1, alloc_retries=0), False, id="it never was"),
        pytest.param(None, False, id="on the host"),
    ],
)
def test_no_batch_size_is_an_out_of_memory_if_the_allocator_was_refused_memory(
    counters: Counters | None, counts: bool
) -> None:
    error = RuntimeError("No executable batch size found, reached zero.")
    assert (find(error, counters=counters) is not None) == counts


def test_circular_errors_and_errors_without_text_are_no_out_of_memory() -> None:
    circle = ValueError("a")
    circle.__context__ = Wordless()
    circle.__context__.__context__ = circle
    assert find(circle) is None


def test_an_error_may_be_marked_as_an_out_of_memory() -> None:
    marked = ValueError("tried to allocate 5 bytes")
    marked.__prefect_gpu_out_of_memory__ = True  # type: ignore[attr-defined]
    assert find(marked) == OutOfMemory("", wanted_bytes=5)


@pytest.mark.parametrize(
    ("cap", "own_cap"),
    [
        pytest.param(6 * GIB, True, id="its cap"),
        pytest.param(None, False, id="the device"),
        pytest.param(20 * GIB, False, id="the device, within its cap"),
    ],
)
def test_a_simulated_out_of_memory_says_whether_the_cap_refused(
    cap: int | None, own_cap: bool
) -> None:
    error = SimulatedOutOfMemoryError(4 * GIB, 2 * GIB, 24 * GIB, cap, 3 * GIB)
    error.device_uuid = "SIM-1"
    assert find(error) == OutOfMemory(
        framework="",
        wanted_bytes=4 * GIB,
        held_bytes=3 * GIB,
        free_bytes=2 * GIB,
        device_uuid="SIM-1",
        says_own_cap=own_cap,
    )


# What is there then.

PLAIN = RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    ("reserved", "held"),
    [pytest.param(9, 9, id="reserved"), pytest.param(None, 5, id="live where that is unknown")],
)
def test_the_held_bytes_are_those_that_the_framework_reports(
    reserved: int | None, held: int
) -> None:
    found = find(PLAIN, OwnUse("GPU-a", 11, 2), counters=Counters(5, reserved, 5, reserved))
    assert found == OutOfMemory("torch", None, held, 11, 2, "GPU-a")


def test_of_several_devices_the_fullest_is_reported() -> None:
    uses = OwnUse("GPU-a", 11, 7), OwnUse("GPU-b", 12, 2), OwnUse("GPU-c")
    found = find(PLAIN, *uses, counters=Counters(5, 9, 5, 9))
    assert found == OutOfMemory("torch", None, None, 12, 2, "GPU-b")


def test_the_device_that_the_error_names_is_reported() -> None:
    error = RuntimeError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
        "of which 1.50 GiB is free. Of the allocated memory 3.00 GiB is allocated by PyTorch, and "
        "512.00 MiB is reserved by PyTorch but unallocated."
    )
    uses = OwnUse("GPU-a", 11, 7), OwnUse("GPU-b", 12, 2)
    found = find(error, *uses, counters=Counters(5, 9, 5, 9))
    assert found == OutOfMemory("torch", 2 * GIB, 3 * GIB + 512 * MIB, 11, 7, "GPU-a")
    without_driver = find(error, OwnUse("GPU-a"))
    assert without_driver is not None
    assert (without_driver.device_uuid, without_driver.free_bytes) == ("GPU-a", 3 * GIB // 2)


def test_without_counters_and_driver_only_the_text_is_known() -> None:
    assert find(PLAIN) == OutOfMemory("torch")


# What the text of one tells.


def torch_text(
    wanted: str, allowed: str, allocated: str, cached: str, free: str = "70.00 GiB"
) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 1 has a total capacity of 79.19 GiB "
        f"of which {free} is free. Process 2102129 has 17.54 GiB memory in use. Including "
        f"non-PyTorch memory, this process has 17.81 GiB memory in use. {allowed} allowed; Of the "
        f"allocated memory {allocated} is allocated by PyTorch, with 17.00 MiB allocated in private "
        f"pools (e.g., CUDA Graphs), and {cached} is reserved by PyTorch but unallocated. If reserved"
    )


@pytest.mark.parametrize(
    ("text", "own_cap"),
    [
        pytest.param(
            torch_text("996.00 MiB", "17.69 GiB", "17.44 GiB", "59.88 MiB"), True, id="its cap"
        ),
        pytest.param(
            torch_text("2.00 GiB", "50.00 GiB", "9.58 GiB", "0 bytes", "0 bytes"),
            False,
            id="the device: 'allowed' stands there whoever refused",
        ),
        pytest.param(
            torch_text("2.00 MiB", "4.00 GiB", "3.99 GiB", "8.00 MiB"),
            None,
            id="too close, being rounded",
        ),
    ],
)
def test_the_numbers_in_pytorchs_text_show_whether_its_cap_refused(
    text: str, own_cap: bool | None
) -> None:
    found, device = parse_refusal("torch", text)
    assert (device, found.says_own_cap) == (1, own_cap)


def test_pytorchs_text_without_a_cap_does_not_say_what_refused() -> None:
    text = torch_text("1.00 GiB", "17.69 GiB", "17.00 GiB", "512.00 MiB")
    found, device = parse_refusal("torch", text.replace("17.69 GiB allowed; ", ""))
    assert device == 1
    assert found == OutOfMemory(
        "torch", GIB, held_bytes=17 * GIB + 512 * MIB, free_bytes=70 * GIB, says_own_cap=None
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "Out of memory allocating 1,024 bytes (allocated so far: 512 bytes, limit set to: 1,535 "
            "bytes).",
            OutOfMemory("cupy", 1024, 512, says_own_cap=True),
            id="its limit, by one byte",
        ),
        pytest.param(
            "Out of memory allocating 1,024 bytes (allocated so far: 512 bytes, limit set to: 1,536 "
            "bytes).",
            OutOfMemory("cupy", 1024, 512, says_own_cap=False),
            id="the device",
        ),
        pytest.param(
            "Out of memory allocating 1,024 bytes (allocated so far: 512 bytes).",
            OutOfMemory("cupy", 1024, 512),
            id="no limit",
        ),
        pytest.param(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes.",
            OutOfMemory("cupy", 7),
            id="of a framework that says nothing of a limit",
        ),
    ],
)
def test_texts_of_other_frameworks_are_read(text: str, expected: OutOfMemory) -> None:
    assert parse_refusal("cupy", text) == (expected, None)
