"""What of a traceback reaches the log of a task run."""

from __future__ import annotations

import traceback
import weakref

import pytest
from prefect import task

from prefect_gpu.engine.task_engine import (
    CallingLine,
    ChildTraceback,
    attach_traceback,
    calling_line,
    has_traceback,
    in_place_of,
)
from prefect_gpu.errors import PlacementError, ProtocolError


@task
def users() -> None:
    pass


def frames(error: Exception, submitted_at: CallingLine | None = None) -> list[str]:
    """Return the functions that the traceback of an error names, once it was raised two calls deep."""

    def deeper() -> None:
        raise error

    def body() -> None:
        deeper()

    called = in_place_of(users.fn, body, submitted_at)
    with pytest.raises(type(error)) as caught:
        called()
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:]


def test_frames_of_this_package_stand_above_no_error_of_the_users() -> None:
    error = ValueError("of the body")
    error.__cause__ = ChildTraceback("Traceback ...")
    assert frames(error) == ["call_body"]
    assert isinstance(error.__cause__, ChildTraceback), "the user's frames are its cause"
    assert frames(PlacementError("too large")) == ["call_body"]


def test_an_error_without_frames_of_the_users_shows_the_line_that_submitted_the_task() -> None:
    def submits() -> CallingLine | None:
        return calling_line()

    error = PlacementError("too large")
    assert frames(error, submits()) == ["call_body", "submits"]
    of_body = ValueError("of the body")
    of_body.__cause__ = ChildTraceback("Traceback ...")
    assert frames(of_body, submits()) == ["call_body"]


def test_the_line_that_submitted_a_task_is_shown_as_it_is_written_and_keeps_no_variable() -> None:
    class Large:
        pass

    def submits() -> tuple[CallingLine | None, weakref.ref[Large]]:
        large = Large()
        return calling_line(), weakref.ref(large)

    line, large = submits()
    assert line is not None and large() is None
    called = in_place_of(users.fn, raises, line)
    with pytest.raises(PlacementError) as caught:
        called()
    shown = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (shown.filename, shown.name) == (__file__, "submits")
    assert shown.line == "return calling_line(), weakref.ref(large)"
    assert "^" not in "".join(traceback.format_tb(caught.value.__traceback__)[-1:])


def raises() -> None:
    raise PlacementError("too large")


@pytest.mark.parametrize("error", [ProtocolError("odd"), KeyError("a bug")])
def test_a_fault_of_this_package_keeps_its_frames(error: Exception) -> None:
    assert frames(error) == ["call_body", "body", "deeper"]


def test_the_traceback_of_a_child_is_shown_above_all_causes_that_are_shown() -> None:
    error, cause, hidden = ValueError("x"), KeyError("y"), KeyError("z")
    error.__cause__, cause.__context__ = cause, hidden
    cause.__suppress_context__ = True
    attach_traceback(error, "there")
    assert isinstance(cause.__cause__, ChildTraceback) and hidden.__cause__ is None
    assert has_traceback(error) and not has_traceback(hidden)
