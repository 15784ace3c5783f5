"""The body of all tasks of a chaos run. What it does is in its job."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator
from typing import Any

from prefect.runtime import task_run

from prefect_gpu.testing import allocate
from tests.chaos.plan import GIB, Job, value

#: Names the file that takes a line at each begin and end of a body.
NOTES = "CHAOS_NOTES"

#: What a body holds of its devices: `torch`, or `simulated`.
MEMORY = "CHAOS_MEMORY"


class MeantError(Exception):
    """What a body raises that is to fail."""


def note(word: str, key: str, attempt: int) -> None:
    """Append a line to the notes, in one write: others do the same."""
    line = f"{word} {key} {attempt} {os.getpid()} {time.monotonic():.6f}\n".encode()
    descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(job: Job) -> Iterator[None]:
    """Hold a job's memory."""
    size_bytes = int(job.gib * GIB)
    if os.environ[MEMORY] == "torch":
        import torch

        kept: list[Any] = [
            torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{at}")
            for at in range(job.count)
        ]
        for each in kept:
            each.fill_(1)
        torch.cuda.synchronize()
        yield
        assert all(int(each[-1]) == 1 for each in kept)
        return
    with contextlib.ExitStack() as stack:
        for at in range(job.count):
            stack.enter_context(allocate(size_bytes, at))
        yield


def work(job: Job, argument: Any) -> Any:
    """Do what a job says; return its value."""
    # Imported only here: the flow's replacement starts sooner.
    import numpy as np

    attempt = int(task_run.run_count or 0)
    note("begin", job.key, attempt)
    try:
        with held(job):
            time.sleep(job.seconds)
            if job.sort == "raises" or (job.sort == "retried" and attempt < 2):
                raise MeantError(job.key)
            made = np.frombuffer(value(job, zlib.crc32(argument)), dtype=np.uint8)
    except BaseException:
        note("raise", job.key, attempt)
        raise
    note("end", job.key, attempt)
    return made
