"""The guardian alone: it reads lines, and kills when the pipe closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import guardian
from tests.process.rig import eventually

Start = Callable[..., "subprocess.Popen[bytes]"]

#: More than the largest process id that Linux allows.
NOBODY = 1 << 23


@pytest.fixture
def sleeper() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(token: str = "", session: bool = True) -> subprocess.Popen[bytes]:
        environment = {**os.environ, guardian.TOKEN_VARIABLE: token}
        process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=session)
        started.append(process)
        # `/proc` shows the environment a moment after `Popen` has returned.
        assert eventually(Path(f"/proc/{process.pid}/environ").read_bytes)
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


def test_the_guardian_kills_registered_children_when_the_pipe_closes(
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


def test_a_guardian_without_children_ends_with_its_parent(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(DEADLOCK_S) == 0


def test_a_token_is_found_whole_and_anywhere_in_the_path(sleeper: Start) -> None:
    outer, inner, longer = sleeper("t1"), sleeper("t0/t1"), sleeper("t11")
    assert set(guardian.find_strays({NOBODY: "t1"})) == {outer.pid, inner.pid}
    assert set(guardian.find_strays({NOBODY: "t11", NOBODY + 1: "unknown"})) == {longer.pid}


def test_a_process_in_a_childs_session_is_found_without_a_token(sleeper: Start) -> None:
    leader, other = sleeper(), sleeper()
    # In the session of its parent, this process, and in a group of its own.
    inside = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
    try:
        assert guardian.find_strays({leader.pid: "t"}) == [leader.pid]
        assert inside.pid in guardian.find_strays({os.getsid(0): "t"})
        assert other.pid not in guardian.find_strays({os.getsid(0): "t"})
    finally:
        inside.kill()
        inside.wait()


def test_a_process_that_has_ended_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    guardian.kill_group(gone.pid)
    monkeypatch.setattr(guardian, "find_strays", lambda children: [gone.pid])
    guardian.kill_strays({NOBODY: "t"})


def test_the_search_for_processes_ends_even_if_new_ones_always_appear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches: list[int] = []

    def more(children: object) -> list[int]:
        searches.append(0)
        return [(1 << 30) + len(searches)]

    monkeypatch.setattr(guardian, "find_strays", more)
    guardian.kill_strays({NOBODY: "t"})
    assert len(searches) == guardian._MOST_SEARCHES


def test_without_a_proc_file_system_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(guardian.os, "listdir", refuse)
    assert guardian.find_strays({NOBODY: "t"}) == []


def test_the_guardians_script_loads_only_small_modules() -> None:
    folder = os.path.dirname(guardian.__file__)
    program = f"import sys; sys.path.insert(0, {folder!r}); import guardian; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "guardian" in loaded
    assert not {"prefect_gpu", "selectors", "subprocess", "typing"} & loaded
