"""No process that a child started outlives it, and no child outlives its parent."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import guardian
from tests.process import bodies
from tests.process.rig import Rig, eventually, is_alive

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="without /proc only process groups are found"
)


def pids_of(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "pids").read_text().split()]


def test_killing_a_child_ends_everything_that_it_started(rig: Rig, tmp_path: Path) -> None:
    child = rig.start(bodies.start_others, str(tmp_path), "live")
    assert eventually((tmp_path / "ready").exists)
    others = pids_of(tmp_path)
    assert len(others) == 3 and all(map(is_alive, others))
    child.handle.kill()
    child.exit()
    assert eventually(lambda: not any(map(is_alive, others)))


def test_the_death_of_a_child_ends_everything_that_it_started(rig: Rig, tmp_path: Path) -> None:
    assert rig.start(bodies.start_others, str(tmp_path), "die").exit().code == 4
    assert eventually(lambda: not any(map(is_alive, pids_of(tmp_path))))


def test_after_a_value_the_childs_group_is_ended_and_processes_outside_it_live_on(
    rig: Rig, tmp_path: Path
) -> None:
    group, session, daemon = rig.call(bodies.start_others, str(tmp_path), "return")
    try:
        assert eventually(lambda: not is_alive(group))
        assert is_alive(session) and is_alive(daemon)
    finally:
        for pid in (session, daemon):
            os.kill(pid, signal.SIGKILL)


# The parent.

_PARENT = """
import os, sys, time
from tests.process import bodies
from tests.process.rig import Rig
folder = sys.argv[1]
rig = Rig()
for n in range(2):
    os.mkdir(f"{folder}/{n}")
    rig.start(bodies.start_others, f"{folder}/{n}", "live")
    rig.start(bodies.wait_long, f"{folder}/alone{n}")
print(*[child.pid for child in rig.started], rig.launcher._guardian.process.pid, flush=True)
FORK
time.sleep(600)
"""


@contextlib.contextmanager
def parent(folder: Path, fork: str = "") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent with four children, two of them with children of their own; all that is theirs."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT.replace("FORK", fork), str(folder)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        ready = [folder / name for name in ("0/ready", "1/ready", "alone0", "alone1")]
        assert eventually(lambda: all(path.exists() for path in ready))
        for n in "01":
            pids += pids_of(folder / n)
        yield process, pids
    finally:
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_nothing_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    with parent(tmp_path) as (process, pids):
        assert len(pids) == 4 + 1 + 6
        # Stopped ones cannot act on anything, and must still go.
        os.killpg(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        assert eventually(lambda: not any(map(is_alive, pids)))


def test_nothing_outlives_a_parent_that_was_terminated(tmp_path: Path) -> None:
    with parent(tmp_path) as (process, pids):
        process.terminate()
        assert eventually(lambda: not any(map(is_alive, pids)))


def test_nothing_outlives_a_parent_whose_fork_lives_on(tmp_path: Path) -> None:
    fork = "if os.fork() == 0:\n    bodies.touch(f'{folder}/forked'); time.sleep(600)"
    with parent(tmp_path, fork) as (process, pids):
        assert eventually((tmp_path / "forked").exists)
        forked = int((tmp_path / "forked").read_text())
        process.kill()
        try:
            assert eventually(lambda: not any(map(is_alive, pids)))
            assert is_alive(forked)
        finally:
            os.kill(forked, signal.SIGKILL)


_FORKED = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from prefect_gpu.processes.launcher import process_launcher
from tests.process import bodies
from tests.process.rig import Heard, spec_of
import sys
launcher = process_launcher()
child = Heard(launcher, spec_of(bodies.wait_long, sys.argv[1]))
child.pid
pid = os.fork()
if pid == 0:
    # Its own, and the copy of the parent's, which begins anew.
    for own in (process_launcher(), launcher):
        assert Heard(own, spec_of(bodies.add, 1, b=1)).value() == 2
        own.close()
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
assert Heard(launcher, spec_of(bodies.add, 2, b=2)).value() == 4
print(child.pid)
"""


def test_a_fork_of_the_parent_has_a_launcher_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", _FORKED, str(tmp_path / "x")],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=DEADLOCK_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_alive(int(done.stdout)), "a parent that ends as it should ends its children"


def test_a_child_ends_if_its_parent_died_within_the_first_frame() -> None:
    from prefect_gpu.child import bootstrap

    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, bootstrap.__file__, str(reading), "name"], pass_fds=(reading,)
    )
    os.close(reading)
    os.write(writing, b"\3\0\0")
    os.close(writing)
    assert process.wait(DEADLOCK_S) == 0


def test_a_child_ends_if_its_parent_died_before_it_sent_the_call() -> None:
    import json
    import socket

    from prefect_gpu.child import bootstrap
    from prefect_gpu.processes import messages
    from prefect_gpu.values import transport
    from tests.process.rig import PREPARE

    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, bootstrap.__file__, str(theirs.fileno()), "name"],
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    boot = json.dumps({"sys_path": [os.path.abspath(p) for p in sys.path], "argv": []}).encode()
    ours.sendall(transport.frame_header(transport.BOOT, len(boot)) + boot)
    ours.sendall(messages.encode(PREPARE))
    ours.close()
    assert process.wait(DEADLOCK_S) == 1


# The guardian.


def guardian_of(rig: Rig) -> psutil.Process:
    assert rig.launcher._guardian.process is not None
    return psutil.Process(rig.launcher._guardian.process.pid)


def test_a_guardian_that_was_killed_is_replaced_by_one_that_knows_all_children(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = rig.start(bodies.wait_long, str(tmp_path / "ready"))
    assert eventually((tmp_path / "ready").exists)
    first = guardian_of(rig)
    first.kill()
    # Not by `psutil`: it knows nothing of a process that was just waited for.
    assert eventually(
        lambda: (process := rig.launcher._guardian.process) is not None and process.pid != first.pid
    )
    assert is_alive(child.pid)
    _let_go_of_guardian(rig)
    assert child.exit().code == -signal.SIGKILL, "the new one was told of it"


def test_the_next_launch_replaces_a_guardian_that_ended_at_once(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "_RESTART_S", 1e5)
    child = rig.start(bodies.wait_long, str(tmp_path / "ready"))
    assert eventually((tmp_path / "ready").exists)
    guardian_of(rig).kill()
    assert eventually(lambda: rig.launcher._guardian.process is None)
    assert rig.call(bodies.add, 1) == 1
    _let_go_of_guardian(rig)
    assert child.exit().code == -signal.SIGKILL, "the new one was told of the old child"


def test_a_guardian_that_cannot_be_started_is_tried_again_while_a_child_runs(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "_RESTART_S", 0.1)
    child = rig.start(bodies.wait_long, str(tmp_path / "ready"))
    assert eventually((tmp_path / "ready").exists)
    refused: list[object] = []
    start = guardian.Guardian._start

    def refuse(self: guardian.Guardian) -> None:
        refused.append(self)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(guardian.Guardian, "_start", refuse)
    guardian_of(rig).kill()
    assert eventually(lambda: len(refused) == 3)
    monkeypatch.setattr(guardian.Guardian, "_start", start)
    assert eventually(lambda: rig.launcher._guardian.process is not None)
    _let_go_of_guardian(rig)
    assert child.exit().code == -signal.SIGKILL


def _let_go_of_guardian(rig: Rig) -> None:
    """As the parent's end would."""
    running = rig.launcher._guardian.process
    assert running is not None
    assert running.stdin is not None
    rig.launcher.call(running.stdin.close)


def test_a_guardian_that_was_stopped_does_not_stop_the_launcher(rig: Rig) -> None:
    rig.call(bodies.add, 1)
    stopped = guardian_of(rig)
    stopped.suspend()
    # Before that it would still take what it is told: as much as the pipe holds.
    assert eventually(lambda: stopped.status() == psutil.STATUS_STOPPED)
    rig.launcher.call(lambda: [rig.launcher._guardian.tell("-" + "9" * 9) for _ in range(10_000)])
    assert rig.call(bodies.add, 2) == 2
    assert guardian_of(rig).pid != stopped.pid
