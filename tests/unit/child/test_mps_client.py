"""When a client of MPS ends the server, and gives its body up, so that no client hangs."""

from __future__ import annotations

import pytest

from prefect_gpu.child.main import GRACE_S, WATCH_S, MpsClient
from prefect_gpu.devices.cuda_driver import PER_THREAD
from prefect_gpu.processes.mps import ASSERTION


class Rig:
    def __init__(self) -> None:
        self.fault = ""
        self.now_s = 10.0
        self.looks = 0
        self.ended: list[str] = []
        self.given_up: list[str] = []
        self.client = MpsClient(
            "/run/mps/pipe", self.given_up.append, self.find, self.end, lambda: self.now_s
        )

    def find(self, stream: int | None) -> str:
        assert stream == PER_THREAD
        self.looks += 1
        return self.fault

    def end(self, pipes: str) -> None:
        self.ended.append(pipes)


def test_the_server_is_ended_once_after_an_assertion() -> None:
    rig = Rig()
    for rig.fault in ("", "CUDA_ERROR_ILLEGAL_ADDRESS"):
        rig.client.look()
        rig.now_s += 2 * WATCH_S
    assert not rig.ended
    for rig.fault in (ASSERTION, ASSERTION):
        rig.client.look()
        rig.now_s += 2 * WATCH_S
    rig.client.finish(ASSERTION)
    assert rig.ended == ["/run/mps/pipe"]


def test_the_context_is_looked_at_now_and_then() -> None:
    rig = Rig()
    for _ in range(10):
        rig.client.look()
        rig.now_s += WATCH_S / 5
    assert rig.looks == 2


@pytest.mark.parametrize(("fault", "ends"), [(ASSERTION, 1), ("", 0), ("CUDA_ERROR_UNKNOWN", 0)])
def test_a_body_that_has_ended_with_a_fault(fault: str, ends: int) -> None:
    rig = Rig()
    rig.client.finish(fault)
    assert len(rig.ended) == ends


@pytest.mark.parametrize(
    ("fault", "given_up"),
    [
        ("CUDA_ERROR_MPS_RPC_FAILURE", True),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", True),
        # A body may catch its own assertion, and go on without the device.
        (ASSERTION, False),
        ("", False),
    ],
)
def test_a_body_that_does_not_end_after_a_fault(fault: str, given_up: bool) -> None:
    rig = Rig()
    rig.fault = fault
    rig.client.look()
    rig.now_s += GRACE_S - WATCH_S
    rig.client.look()
    assert not rig.given_up
    rig.now_s += 2 * WATCH_S
    rig.client.look()
    assert rig.given_up == [fault] * given_up


def test_a_body_that_is_over_is_not_given_up() -> None:
    rig = Rig()
    rig.fault = "CUDA_ERROR_ILLEGAL_ADDRESS"
    rig.client.look()
    rig.client.finish(rig.fault)
    rig.now_s += 2 * GRACE_S
    rig.client.look()
    assert not rig.given_up
