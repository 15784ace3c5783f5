"""What of a traceback reaches the log of a task run."""

from __future__ import annotations

import traceback

import pytest
from prefect import task

from prefect_gpu.errors import PlacementError, ProtocolError
from prefect_gpu.runner.attempt import ChildTraceback
from prefect_gpu.runner.prefect_engine import with_body
from prefect_gpu.runner.submission import speaks_for_itself


@task
def users() -> None:
    pass


def frames(error: Exception) -> list[str]:
    """Return the functions that the traceback of an error names, once it was raised two calls deep."""

    def deeper() -> None:
        raise error

    def body() -> None:
        deeper()

    shadow = with_body(users, body, lambda error: False, speaks_for_itself)
    with pytest.raises(type(error)) as caught:
        shadow.fn()
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:]


def test_frames_of_this_package_stand_above_no_error_of_the_users() -> None:
    error = ValueError("of the body")
    error.__cause__ = ChildTraceback("Traceback ...")
    assert frames(error) == ["call_body"]
    assert isinstance(error.__cause__, ChildTraceback), "the user's frames are its cause"
    assert frames(PlacementError("too large")) == ["call_body"]


def test_a_fault_of_this_package_keeps_its_frames() -> None:
    for error in (ProtocolError("odd"), KeyError("a bug")):
        assert frames(error) == ["call_body", "body", "deeper"]
