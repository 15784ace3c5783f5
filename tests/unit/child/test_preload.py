"""The fork server's own steps, one by one; the whole of them is tested in `tests/process`."""

from __future__ import annotations

import fcntl
import os
import socket

import pytest

from prefect_gpu.child import exit as process_exit
from prefect_gpu.child import preload


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `Ended` where the process would end; wait for no thread, call no `atexit` function."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(process_exit.threading, "_shutdown", lambda: None)
    monkeypatch.setattr(process_exit.atexit, "_run_exitfuncs", lambda: None)


@pytest.mark.usefixtures("ends")
def test_an_exit_function_that_fails_is_printed_and_the_fork_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("at exit")

    monkeypatch.setattr(process_exit.atexit, "_run_exitfuncs", fail)
    with pytest.raises(Ended) as ended:
        process_exit.end_fork(3)
    assert ended.value.args == (3,)
    assert "ValueError: at exit" in capsys.readouterr().err


def test_the_kernel_watches_the_parent_during_the_imports() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        preload.end_with_parent(theirs, True)
        watched = fcntl.fcntl(theirs, fcntl.F_GETFL) & os.O_ASYNC
        preload.end_with_parent(theirs, False)
        assert watched
        assert not fcntl.fcntl(theirs, fcntl.F_GETFL) & os.O_ASYNC


@pytest.mark.usefixtures("ends")
def test_a_parent_that_has_ended_before_the_imports_ends_the_server() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.close()
        with pytest.raises(Ended):
            preload.end_with_parent(theirs, True)
