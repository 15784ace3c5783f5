"""The copy of a task that Prefect's engine runs: its body is replaced.

The engine is in `task_engine`, what is shown of its errors in `tracebacks`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from prefect import Task

from prefect_gpu.engine.tracebacks import CallingLine, speaks_for_itself
from prefect_gpu.errors import PrefectGPUError


def with_body(
    task: Task[..., Any],
    body: Callable[..., Any],
    submitted_at: CallingLine | None = None,
) -> Task[..., Any]:
    """Return a copy of a task whose body is replaced, for Prefect's engine to run in a thread.

    Args:
        task: The user's task; it is not changed.
        body: Called in place of `task.fn`, with its arguments, synchronously.
        submitted_at: The line of the user's that submitted the task. It is shown with errors of this package, which
            have no other line of the user's.
    """
    shadow = copy.copy(task)

    @functools.wraps(task.fn)
    def call_body(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(*args, **kwargs)
        except Exception as error:
            if not speaks_for_itself(error):
                raise
            told = error
        # The frames of this package would stand between the user's, which are its cause, and Prefect's.
        try:
            line = submitted_at if isinstance(told, PrefectGPUError) else None
            raise told.with_traceback(None if line is None else line.traceback())
        finally:
            # It holds this frame.
            del told

    shadow.fn = call_body
    shadow.isasync = False
    shadow.isgenerator = False
    # The time is counted from the body's first line in the child, whose process is killed.
    shadow.timeout_seconds = None
    return shadow
