"""The guardian alone: lines in, kills when the pipe closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import guardian

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def sleeper() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(token: str = "", session: bool = True) -> subprocess.Popen[bytes]:
        environment = {**os.environ, guardian.TOKEN_VARIABLE: token}
        process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=session)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def guard() -> Iterator[subprocess.Popen[bytes]]:
    # Not `-I -S` as the launcher has it: coverage comes in with `site`.
    process = subprocess.Popen(
        [sys.executable, guardian.__file__],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdin is not None and process.stderr is not None
    yield process
    process.stdin.close()
    process.stderr.close()
    process.kill()
    process.wait()


def test_it_kills_what_is_registered_when_the_pipe_closes(
    guard: subprocess.Popen[bytes], sleeper: Start
) -> None:
    child, ended = sleeper("aa"), sleeper("bb")
    stray, nested = sleeper("aa"), sleeper("xx/aa/cc")
    assert guard.stdin is not None and guard.stderr is not None
    guard.stdin.write(f"+{child.pid} aa\n+{ended.pid} bb\n".encode())
    # Cut, and nonsense.
    guard.stdin.write(f"-{ended.pid}"[:3].encode())
    guard.stdin.write(f"-{ended.pid}"[3:].encode() + b"\n\nnonsense\n+77777777\n+1 x\n-1\n\xff\n")
    guard.stdin.close()
    assert guard.wait(DEADLOCK_S) == 0
    assert guard.stderr.read() == b""
    for process in (child, stray, nested):
        assert process.wait(DEADLOCK_S) == -signal.SIGKILL
    assert ended.poll() is None


def test_it_ends_with_nothing_to_do(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(DEADLOCK_S) == 0


def test_a_token_is_found_whole_and_anywhere_in_the_path(sleeper: Start) -> None:
    outer, inner, longer = sleeper("t1"), sleeper("t0/t1"), sleeper("t11")
    assert set(guardian.pids_with_tokens(["t1"])) == {outer.pid, inner.pid}
    assert set(guardian.pids_with_tokens(["t11", "nobody"])) == {longer.pid}


def test_what_is_gone_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    guardian.kill_group(gone.pid)
    monkeypatch.setattr(guardian, "pids_with_tokens", lambda tokens: [gone.pid])
    guardian.kill_strays(["t"])


def test_a_crowd_without_end_is_left_at_some_point(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def more(tokens: object) -> list[int]:
        looks.append(0)
        return [(1 << 30) + len(looks)]

    monkeypatch.setattr(guardian, "pids_with_tokens", more)
    guardian.kill_strays(["t"])
    assert len(looks) == guardian._MOST_LOOKS


def test_without_proc_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(guardian.os, "listdir", refuse)
    assert guardian.pids_with_tokens(["t"]) == []
