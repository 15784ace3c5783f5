"""When a client of MPS whose assertion failed is ended, so that the kernels of others go on."""

from __future__ import annotations

import pytest

from prefect_gpu.child.main import GRACE_S, WATCH_S, AssertionWatch

ASSERT = "CUDA_ERROR_ASSERT"


@pytest.mark.parametrize(
    ("faults", "ends_at"),
    [
        pytest.param([""] * 9, None, id="no fault"),
        pytest.param(["", ASSERT, "", "", "", "", "", "", ""], None, id="the body has ended by it"),
        pytest.param(["", *[ASSERT] * 8], 5, id="the body goes on"),
        pytest.param(["CUDA_ERROR_ILLEGAL_ADDRESS"] * 9, None, id="the server ends all clients"),
    ],
)
def test_a_body_that_goes_on_after_an_assertion_is_ended(
    faults: list[str], ends_at: int | None
) -> None:
    looks = ends = 0
    now_s = 10.0

    def fault() -> str:
        nonlocal looks
        looks += 1
        return faults[looks - 1]

    def end() -> None:
        nonlocal ends, ended_at
        ends += 1
        ended_at = ended_at or looks - 1

    ended_at: int | None = None
    watch = AssertionWatch(end, fault, lambda: now_s)
    while looks < len(faults):
        watch()
        # A second call is too soon.
        watch()
        now_s += WATCH_S * 1.001
    assert ended_at == ends_at
    assert GRACE_S < 0.5
