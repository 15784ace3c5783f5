"""What may be suspended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.suspension.eligibility import HOST_MARGIN_BYTES, Candidate, refusal
from prefect_gpu.units import GIB

GOOD = Candidate("nvml", ("GPU-1",), 8 * GIB, 1, ("torch",), 8 * GIB + HOST_MARGIN_BYTES)


def test_a_pytorch_process_alone_on_its_device_may_be_suspended() -> None:
    assert refusal(GOOD) == ""


def test_a_process_of_several_frameworks_may_be_suspended_if_each_was_shown_to_hold() -> None:
    every = ("torch", "cupy", "tensorflow", "onnxruntime")
    assert refusal(replace(GOOD, frameworks=every)) == ""
    assert "it uses jax" in refusal(replace(GOOD, frameworks=(*every, "jax")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "host"}, "of kind host"),
        ({"device_uuids": ("MIG-1",)}, "MIG"),
        ({"device_uuids": ("GPU-1", "GPU-2")}, "several devices"),
        ({"mps": True}, "Multi-Process Service"),
        ({"used_bytes": 0}, "no device memory"),
        ({"processes": 2}, "2 of its processes"),
        ({"frameworks": ()}, "none of the frameworks"),
        ({"frameworks": ("torch", "numba")}, "it uses numba"),
        ({"host_available_bytes": 8 * GIB}, "8GiB do not fit into the machine's own memory: 7GiB"),
        ({"host_available_bytes": 0}, "0B can be used"),
        ({"lost_before": True}, "was lost"),
    ],
)
def test_what_is_not_known_to_hold_is_refused_with_the_reason(
    changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(replace(GOOD, **changes))
