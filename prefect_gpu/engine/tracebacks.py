"""Tracebacks of a GPU task's errors: the user's lines in the flow and in the child, and few lines of this package.

A child's traceback is text. An error without a line of the user's code shows the line that submitted the task.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType, TracebackType

from prefect_gpu.errors import PrefectGPUError, ProtocolError

#: Packages whose frames lie between the user's `submit` and the task runner.
_NOT_USERS = ("prefect", "prefect_gpu")


class ChildTraceback(Exception):  # noqa: N818  # shown as a cause, never raised
    """The traceback of an exception in a child process, as text; shown as the cause of that exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nin the process of the GPU task:\n{self.text}"


def attach_traceback(error: BaseException, text: str) -> None:
    """Attach a child process's traceback, as text, to an exception: as the cause at the end of its chain of causes."""
    _shown(error)[-1].__cause__ = ChildTraceback(text)


def _shown(error: BaseException | None) -> list[BaseException]:
    """Return an exception, its shown cause or context, the cause or context of that exception, and so on."""
    found: dict[int, BaseException] = {}
    while error is not None and id(error) not in found:
        found[id(error)] = error
        hidden = error.__cause__ is not None or error.__suppress_context__
        error = error.__cause__ if hidden else error.__context__
    return [*found.values()]


def has_traceback(error: BaseException | None) -> bool:
    """Return whether `attach_traceback` was called with this exception."""
    return any(isinstance(each, ChildTraceback) for each in _shown(error))


def speaks_for_itself(error: Exception) -> bool:
    """Return whether an error is clear without this package's frames: the package's own error, or one from a child."""
    if isinstance(error, ProtocolError):
        # A defect of this package: the frames help.
        return False
    return isinstance(error, PrefectGPUError) or has_traceback(error)


@dataclass(frozen=True, slots=True)
class CallingLine:
    """A line of the user's code, without its frame: a frame would keep all local variables alive."""

    file: str
    line: int
    function: str
    #: First line of the function.
    first_line: int
    module: str

    def traceback(self) -> TracebackType:
        """Return a traceback that shows this line alone, without local variables."""
        # Only running code has a frame: this code object is given the line's file and function.
        code = compile("here.append(frame())", self.file, "exec")
        code = code.replace(co_name=self.function, co_firstlineno=self.first_line)
        here: list[FrameType] = []
        exec(code, {"here": here, "frame": sys._getframe, "__name__": self.module})
        # -1: the position inside the line is unknown.
        return TracebackType(None, here.pop(), -1, self.line)


def calling_line() -> CallingLine | None:
    """Return the innermost line of this thread's stack outside Prefect and this package; `None`: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    if frame is None:
        return None
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    return CallingLine(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno, module)
