"""The template's own steps, one by one; what becomes of them together is in `tests/process`."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prefect_gpu.processes import ending, template


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have neither this process's threads waited for, nor its `atexit` called, nor itself ended."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(template.os, "_exit", end)
    monkeypatch.setattr(ending.threading, "_shutdown", lambda: None)
    monkeypatch.setattr(ending.atexit, "_run_exitfuncs", lambda: None)


@pytest.fixture
def loop() -> Iterator[tuple[socket.socket, Any]]:
    """The parent's end, and a template's loop on the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handler = signal.getsignal(signal.SIGCHLD)
    made = template._Template(theirs)
    try:
        yield ours, made
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, handler)
        made._selector.close()
        for end in (ours, theirs, made._wake_in, made._wake_out):
            end.close()


@pytest.mark.usefixtures("ends")
def test_files_that_nobody_closed_are_written(tmp_path: Path) -> None:
    module = ModuleType("of_a_body")
    module.log = open(tmp_path / "log", "w")  # type: ignore[attr-defined]  # noqa: SIM115
    sys.modules["of_a_body"] = module
    try:
        module.log.write("all of it")
        with pytest.raises(Ended) as ended:
            template._end(3)
        assert ended.value.args == (3,)
        assert (tmp_path / "log").read_text() == "all of it"
    finally:
        del sys.modules["of_a_body"]
        module.log.close()


@pytest.mark.usefixtures("ends")
def test_what_fails_at_the_end_is_printed_and_the_end_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("at exit")

    monkeypatch.setattr(ending.atexit, "_run_exitfuncs", fail)
    with pytest.raises(Ended):
        template._end(0)
    assert "ValueError: at exit" in capsys.readouterr().err


def test_a_process_with_threads_is_unfit() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="somebody's")
    thread.start()
    try:
        assert "somebody's" in template._unfit()
    finally:
        release.set()
        thread.join()


def test_while_it_imports_the_kernel_watches_the_parent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        template._end_with_parent(theirs, True)
        watched = fcntl.fcntl(theirs, fcntl.F_GETFL) & os.O_ASYNC
        template._end_with_parent(theirs, False)
        assert watched
        assert not fcntl.fcntl(theirs, fcntl.F_GETFL) & os.O_ASYNC


@pytest.mark.usefixtures("ends")
def test_a_parent_that_has_gone_before_ends_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.close()
        with pytest.raises(Ended):
            template._end_with_parent(theirs, True)


@pytest.mark.usefixtures("ends")
def test_it_ends_with_its_parent(loop: tuple[socket.socket, Any]) -> None:
    ours, made = loop
    ours.close()
    with pytest.raises(Ended) as ended:
        made.run()
    assert ended.value.args == (0,)


def test_a_system_that_will_not_fork_is_told_and_nothing_stays_open(
    loop: tuple[socket.socket, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError("no more processes")

    ours, made = loop
    monkeypatch.setattr(template.os, "fork", refuse)
    before = os.listdir("/proc/self/fd")
    reading, writing = os.pipe()
    request = json.dumps({"kind": "fork", "id": 4}).encode()
    socket.send_fds(ours, [request], [writing])
    os.close(writing)
    assert made._serve()
    assert json.loads(ours.recv(4096)) == {
        "kind": "refused",
        "id": 4,
        "reason": "no more processes",
    }
    # Nobody holds the other end any more.
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_to_reap_what_is_gone_is_no_error(loop: tuple[socket.socket, Any]) -> None:
    ours, made = loop
    ours.send(json.dumps({"kind": "reap", "pid": 2**22 + 1}).encode())
    assert made._serve()


def test_the_end_of_a_fork_is_told_once_and_it_stays_until_it_is_reaped(
    loop: tuple[socket.socket, Any],
) -> None:
    ours, made = loop
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 5"], {})
    made._forks[pid] = False
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    made._tell_ends()
    made._tell_ends()
    assert json.loads(ours.recv(4096)) == {"kind": "ended", "pid": pid, "code": 5}
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(4096)
    assert os.path.exists(f"/proc/{pid}")
    ours.send(json.dumps({"kind": "reap", "pid": pid}).encode())
    assert made._serve()
    assert not os.path.exists(f"/proc/{pid}")
