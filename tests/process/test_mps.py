"""The daemon of MPS that flows share: when it is started and ended. The control program is a stand-in of the same words."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import mps
from prefect_gpu.processes.guardian import TOKEN_VARIABLE
from prefect_gpu.processes.mps import MpsDaemon, MpsError

#: Answers as NVIDIA's does (driver 580): a daemon with `-d`, else commands from standard input.
STAND_IN = f"""#!{sys.executable}
import os, signal, sys, time
control = os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
if sys.argv[1:] == ["-d"]:
    if os.environ.get("STAND_IN_FAILS"):
        print("no device", file=sys.stderr)
        sys.exit(3)
    if os.fork():
        while not os.path.exists(control):
            time.sleep(0.01)
        sys.exit(0)
    os.setsid()
    with open(os.path.join(os.path.dirname(control), {mps.PID_FILE!r}), "w") as file:
        file.write(f"{{os.getpid()}}\\n")
    with open(control + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(control + ".new", control)
    time.sleep(600)
try:
    pid = int(open(control).read())
    os.kill(pid, 0)
except (OSError, ValueError):
    print("Cannot find MPS control daemon process")
    sys.exit(1)
asked = sys.stdin.read()
if asked.startswith("quit"):
    os.kill(pid, signal.SIGKILL)
    os.unlink(control)
elif asked.startswith("get_server_list"):
    print(os.environ.get("STAND_IN_SERVER", ""))
"""

FLOW = """
import os, sys, time
from prefect_gpu.processes.mps import MpsDaemon
daemon = MpsDaemon(sys.argv[1], os.environ)
print(daemon.pipes, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the daemon, and a stand-in for the control program."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / mps.CONTROL).write_text(STAND_IN)
    (programs / mps.CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", str(tmp_path / "default"))
    yield tmp_path / "mps"
    for control in tmp_path.rglob("control"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(control.read_text()), signal.SIGKILL)


def daemon_of(pipes: str) -> int | None:
    """Return the id of the daemon's process; `None`: there is none."""
    try:
        return int(Path(pipes, "control").read_text())
    except FileNotFoundError:
        return None


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLOCK_S
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def keepers(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(str(folder)) in words and b"-I" in words:
            found.append(int(process.name))
    return found


def start_daemon(pipes: Path) -> None:
    pipes.mkdir()
    environment = {**os.environ, mps.PIPES: str(pipes)}
    subprocess.run([mps.CONTROL, "-d"], env=environment, check=True)


def test_a_daemon_that_was_killed_is_started_again_and_ended_by_its_keeper(folder: Path) -> None:
    daemon = MpsDaemon(str(folder), os.environ)
    first = daemon_of(daemon.pipes)
    daemon.revive()
    assert first is not None and daemon_of(daemon.pipes) == first
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not psutil.pid_exists(first))
    daemon.revive()
    second = daemon_of(daemon.pipes)
    assert second not in (None, first) and len(keepers(folder)) == 1
    daemon.leave()
    assert eventually(lambda: daemon_of(daemon.pipes) is None)


@pytest.mark.parametrize("own", [False, True])
def test_the_server_is_ended_of_a_daemon_that_a_flow_has_started_only(
    folder: Path, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = folder.parent / "own"
    if own:
        start_daemon(pipes)
        monkeypatch.setenv(mps.PIPES, str(pipes))
    daemon = MpsDaemon(str(folder), os.environ)
    server = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv("STAND_IN_SERVER", str(server.pid))
    try:
        mps.end_servers(daemon.pipes)
        assert own or server.wait(DEADLOCK_S) == -signal.SIGKILL
        # It has ended, and the daemon names it still.
        mps.end_servers(daemon.pipes)
        assert own is (server.poll() is None)
    finally:
        server.kill()
        server.wait()
        daemon.leave()


def test_the_users_own_daemon_that_was_killed_is_not_started_again(folder: Path) -> None:
    own = folder.parent / "own"
    start_daemon(own)
    daemon = MpsDaemon(str(folder), {**os.environ, mps.PIPES: str(own)})
    pid = daemon_of(str(own))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not psutil.pid_exists(pid))
    with pytest.raises(MpsError, match="has ended"):
        daemon.revive()


def test_one_daemon_serves_all_flows_and_ends_with_the_last(folder: Path) -> None:
    first = MpsDaemon(str(folder), os.environ)
    pid = daemon_of(first.pipes)
    second = MpsDaemon(str(folder), os.environ)
    assert pid is not None and daemon_of(second.pipes) == pid
    assert folder.stat().st_mode & 0o777 == 0o700
    assert eventually(lambda: len(keepers(folder)) == 1)
    # Nobody waits for the keeper, in a notebook for days.
    assert keepers(folder)[0] not in [child.pid for child in psutil.Process().children()]
    first.leave()
    first.leave()
    time.sleep(0.3)
    assert daemon_of(second.pipes) == pid
    second.leave()
    assert eventually(lambda: daemon_of(second.pipes) is None)
    assert eventually(lambda: not keepers(folder))
    again = MpsDaemon(str(folder), os.environ)
    assert daemon_of(again.pipes) not in (None, pid)
    again.leave()
    assert eventually(lambda: daemon_of(again.pipes) is None)


def test_the_daemon_ends_after_its_flows_were_killed(folder: Path) -> None:
    flows = [
        subprocess.Popen(
            [sys.executable, "-c", FLOW, str(folder)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    pipes = set()
    for each in flows:
        assert each.stdout is not None
        pipes.add(each.stdout.readline().strip())
    assert len(pipes) == 1
    (where,) = pipes
    assert daemon_of(where) is not None
    for each in flows:
        each.kill()
        each.communicate()
    assert eventually(lambda: daemon_of(where) is None)
    assert eventually(lambda: not keepers(folder))


def test_a_daemon_that_was_killed_is_replaced_for_the_next_flow(folder: Path) -> None:
    first = MpsDaemon(str(folder), os.environ)
    pid = daemon_of(first.pipes)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: mps.ask("get_server_list", first.pipes) is None)
    second = MpsDaemon(str(folder), os.environ)
    assert daemon_of(second.pipes) not in (None, pid)
    first.leave()
    second.leave()
    assert eventually(lambda: daemon_of(second.pipes) is None)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_daemon_of_the_users_own_is_used_and_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    pipes = folder.parent / ("named" if is_named else "default")
    start_daemon(pipes)
    pid = daemon_of(str(pipes))
    if is_named:
        monkeypatch.setenv(mps.PIPES, str(pipes))
    used = MpsDaemon(str(folder), os.environ)
    assert used.pipes == str(pipes) and not folder.exists()
    used.leave()
    time.sleep(0.3)
    assert daemon_of(str(pipes)) == pid


def test_the_daemon_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = folder.parent / "default"
    pipes.mkdir()
    (pipes / "control").write_text("2147483646")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(MpsError, match=rf"another user \(id {me}\) has the GPUs, in .*default"):
        MpsDaemon(str(folder), os.environ)
    (pipes / "control").unlink()


def test_a_daemon_that_does_not_start_is_an_error_that_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(MpsError, match="does not start: no device"):
        MpsDaemon(str(folder), os.environ)
    monkeypatch.delenv("STAND_IN_FAILS")
    used = MpsDaemon(str(folder), os.environ)
    assert daemon_of(used.pipes) is not None
    used.leave()
    assert eventually(lambda: daemon_of(used.pipes) is None)


def test_without_the_control_program_there_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MpsError, match="nvidia-cuda-mps-control, a part of NVIDIA's driver"):
        MpsDaemon(str(folder), os.environ)


def test_a_flow_that_was_stopped_as_it_starts_the_daemon_holds_no_other_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "TURN_S", 0.1)
    folder.mkdir(parents=True)
    with (folder / "start").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with pytest.raises(MpsError, match="another process starts or ends its daemon for more"):
            MpsDaemon(str(folder), os.environ)
    used = MpsDaemon(str(folder), os.environ)
    used.leave()
    assert eventually(lambda: daemon_of(used.pipes) is None)


def test_the_daemon_has_nothing_of_the_flow_that_starts_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv(TOKEN_VARIABLE, "outer")
    used = MpsDaemon(str(folder), os.environ)
    assert eventually(lambda: len(keepers(folder)) == 1)
    for pid in (daemon_of(used.pipes), *keepers(folder)):
        variables = psutil.Process(pid).environ()
        assert {"CUDA_VISIBLE_DEVICES", TOKEN_VARIABLE}.isdisjoint(variables)
    used.leave()
    assert eventually(lambda: daemon_of(used.pipes) is None)
