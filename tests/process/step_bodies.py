"""Bodies with phases and steps. Imported by children, so nothing heavy, and no pytest."""

from __future__ import annotations

import os

from prefect_gpu import mark, phase, step
from prefect_gpu.child import channel
from prefect_gpu.testing import allocate, note_allocation_retry


def train(steps: int, pinched_at: int | None = None) -> None:
    """2 GiB of weights, 1 GiB a step, and 5 GiB more in the first to try things out."""
    with allocate("2GiB"):
        for number in range(steps):
            batch = allocate("1GiB")
            with phase("forward"):
                if number == 0:
                    allocate("5GiB").free()
            if number == pinched_at:
                note_allocation_retry()
            with phase("backward"):
                pass
            step()
            batch.free()


def want_too_much() -> None:
    allocate("2GiB")
    with phase("forward"):
        allocate("7GiB", device=1)


def hold_until_heard() -> None:
    allocate("2GiB")
    mark("held")
    own = channel.current_channel()
    assert own is not None
    own.ask("go on")
    os._exit(3)


def fork_in_a_phase() -> int:
    """A process forked from this one is not the task: nobody hears its phases."""
    with phase("parent"):
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                with phase("forked"):
                    mark("forked too")
                    step()
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            assert status == 0
    return status


def only_time() -> None:
    for _ in range(2):
        with phase("forward"):
            pass
