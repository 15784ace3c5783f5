"""The copy of a task that Prefect's engine runs: its body is replaced, and its errors show the user's lines alone.

The engine is in `task_engine`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from prefect import Task

from prefect_gpu.errors import PrefectGPUError

#: Packages whose frames are between a line that submits a task and the task runner.
_NOT_USERS = ("prefect", "prefect_gpu")


def with_body(
    task: Task[..., Any],
    body: Callable[..., Any],
    speaks_for_itself: Callable[[Exception], bool],
    submitted_at: CallingLine | None = None,
) -> Task[..., Any]:
    """Return a copy of a task whose body is replaced, for Prefect's engine to run in a thread.

    Args:
        task: The user's task; it is not changed.
        body: Called in place of `task.fn`, with its arguments, synchronously.
        speaks_for_itself: Returns whether an error is not explained by where in this package it was raised.
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


@dataclass(frozen=True, slots=True)
class CallingLine:
    """A line of the user's. It keeps nothing of the call: a frame would keep all that is in its variables."""

    file: str
    line: int
    function: str
    #: Of the function.
    first_line: int
    module: str

    def traceback(self) -> TracebackType:
        """Return a traceback of this line alone, without what was in its variables."""
        # A frame is only made by running code; this code says that it is from there.
        code = compile("here.append(frame())", self.file, "exec")
        code = code.replace(co_name=self.function, co_firstlineno=self.first_line)
        here: list[FrameType] = []
        exec(code, {"here": here, "frame": sys._getframe, "__name__": self.module})
        # -1: it is not known where in the line.
        return TracebackType(None, here.pop(), -1, self.line)


def calling_line() -> CallingLine | None:
    """Return the innermost line that is neither of Prefect nor of this package; `None`: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    if frame is None:
        return None
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    return CallingLine(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno, module)
