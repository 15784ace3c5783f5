"""A process is asked to return unused device memory, whatever its body does."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes.messages import BodyStarted, ReleasedUnused, ReleaseUnused
from tests.process import bodies
from tests.process.rig import Rig


def test_a_busy_body_is_answered_for(rig: Rig, tmp_path: Path) -> None:
    end = tmp_path / "end"
    child = rig.start(bodies.multiply_until, str(end))
    child.until(BodyStarted)
    for _ in range(3):
        request = ReleaseUnused(time.monotonic() + DEADLOCK_S)
        child.handle.answer(request)
        assert child.until(ReleasedUnused).until_s == request.until_s
    end.touch()
    assert child.value() is True


def test_a_body_that_lets_no_other_thread_run_gets_no_late_release(
    rig: Rig, tmp_path: Path
) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    for path in (begun, end):
        os.mkfifo(path)
    child = rig.start(bodies.hold_interpreter, str(begun), str(end))
    with begun.open():
        pass
    request = ReleaseUnused(time.monotonic() + 0.01)
    child.handle.answer(request)
    while time.monotonic() < request.until_s:
        pass
    with end.open("w") as file:
        file.write("\n")
    assert child.value() == 0
    assert child.of(ReleasedUnused) is None
