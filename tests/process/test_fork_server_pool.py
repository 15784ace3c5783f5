"""Tasks whose processes are forks: all that holds for fresh interpreters, and when there are those."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import CapacityError
from prefect_gpu.processes import fork_server
from prefect_gpu.processes.fork_server import UNKNOWN_CODE, ForkServer, ForkServerPool
from prefect_gpu.processes.interpreter import Process, SpawnRequest, import_paths, start_interpreter
from prefect_gpu.processes.launch_spec import ChildRefused, ChildStarted, LaunchSpec
from prefect_gpu.processes.launcher import ProcessLauncher
from prefect_gpu.processes.standby_kind import Kind
from tests.process import bodies, test_outcomes, test_printing, test_survivors
from tests.process.rig import Heard, Rig, eventually, is_alive, spec_of

#: Of a task that names no framework; every server imports what is left out here.
KIND = Kind(("prefect_gpu.child.prefect_context",), (), (), False, 1, 1 << 20)


class ForkRig(Rig):
    """Starts forks of one server where the other starts interpreters."""

    def __init__(self, server: ForkServer, **options: float) -> None:
        self.launcher = ProcessLauncher(spawn=server.fork, **options)
        self.started = []


class Pool:
    """A pool on a launcher, and what it started."""

    def __init__(self) -> None:
        self.launcher = ProcessLauncher()
        self.pool = ForkServerPool(self.launcher)
        self.pool.open(self)
        self.started: list[Heard] = []

    def start(self, spec: LaunchSpec, kind: Kind = KIND) -> Heard:
        # Its value differs from test to test, and a fork would come too late for it.
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        heard = Heard.__new__(Heard)
        heard.messages, heard._queue = [], queue.SimpleQueue()
        heard.handle = self.pool.announce(kind).start(spec, heard._queue.put)
        self.started.append(heard)
        return heard

    def parent_of(self, spec: LaunchSpec | None = None, kind: Kind = KIND) -> int:
        """Run a task, and give the parent of its process."""
        parent: int = self.start(spec or spec_of(os.getppid), kind).value()
        return parent

    @property
    def server_pid(self) -> int:
        (pid,) = self.pool.pids
        return pid

    def close(self) -> None:
        self.launcher.close(DEADLOCK_S)
        self.pool.close(self)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    modules = ("numpy", "prefect_gpu.child.main", "prefect_gpu.child.bootstrap")
    server = ForkServer(modules, import_paths(), dict(os.environ))
    assert server.wait_ready(DEADLOCK_S) == ""
    yield server
    assert server.problem == ""
    server.close()


@pytest.fixture
def make_rig(server: ForkServer) -> Iterator[Callable[..., ForkRig]]:
    rigs: list[ForkRig] = []

    def make(**options: float) -> ForkRig:
        rigs.append(ForkRig(server, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.launcher.close(DEADLOCK_S)
        pids = [child.pid for child in rig.started if child.of(ChildStarted) is not None]
        # Not even zombies: the server reaps them.
        assert eventually(lambda pids=pids: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.fixture
def rig(make_rig: Callable[..., ForkRig]) -> ForkRig:
    return make_rig()


@pytest.fixture
def make_pool() -> Iterator[Callable[[], Pool]]:
    pools: list[Pool] = []

    def make() -> Pool:
        pools.append(Pool())
        return pools[-1]

    yield make
    for pool in pools:
        servers = pool.pool.pids
        pool.close()
        assert pool.pool.pids == ()
        assert not any(map(is_alive, servers))


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


# What holds for fresh interpreters holds for forks.

#: Tests of what an interpreter does before its first line, by a file that it imports then: tasks whose
#: environment says so get a fresh one. Of errors of starting one, which are told below. And of an
#: interpreter's end: a fork takes nothing apart.
OF_INTERPRETERS = {
    "test_libraries_are_frozen_before_the_users_modules_which_are_finalised_at_the_end",
    "test_a_framework_that_refuses_its_policy_is_an_error_and_no_death",
    "test_a_child_that_cannot_start_is_refused_and_nothing_is_left",
    "test_a_limit_that_lets_no_process_start_fails_one_task_and_is_named",
    # They fork into a session of its own, which is found only if the child itself was executed.
    "test_killing_a_child_ends_everything_that_it_started",
    "test_the_death_of_a_child_ends_everything_that_it_started",
}

for _module in (test_outcomes, test_survivors, test_printing):
    for _name, _test in tuple(vars(_module).items()):
        # Those that start their own parent start it with fresh interpreters.
        if _name.startswith("test_") and "parent" not in _name and _name not in OF_INTERPRETERS:
            globals()[_name] = _test


def test_killing_a_fork_ends_its_group_and_what_it_executed_elsewhere(
    rig: Rig, tmp_path: Path
) -> None:
    child = rig.start(start_and_wait, str(tmp_path))
    assert eventually((tmp_path / "ready").exists)
    others = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(others) == 2 and all(map(is_alive, others))
    child.handle.kill()
    child.exit()
    assert eventually(lambda: not any(map(is_alive, others)))


# Which tasks get one.


def test_tasks_are_forks_of_one_server(shared_pool: Pool) -> None:
    first, second = (shared_pool.start(spec_of(_describe)) for _ in range(2))
    (pid, parent), (other_pid, other_parent) = first.value(), second.value()
    assert (pid, other_pid) == (first.pid, second.pid)
    assert pid != other_pid
    assert parent == other_parent == shared_pool.server_pid
    assert first.exit().code == second.exit().code == 0


def test_tasks_that_import_different_modules_of_the_users_share_a_server(shared_pool: Pool) -> None:
    server_pid = shared_pool.parent_of()
    kind = replace(KIND, users=("json",), cpus=3, size_bytes=5)
    assert shared_pool.parent_of(kind=kind) == server_pid == shared_pool.server_pid


def test_a_server_imports_only_libraries_that_are_known_to_survive_a_fork(
    shared_pool: Pool,
) -> None:
    modules = fork_server._modules(
        replace(KIND, always=(*KIND.always, "torch", "jax", "tensorflow"))
    )
    assert "torch" in modules and "numpy" in modules
    assert not {"jax", "tensorflow"} & set(modules)


def test_a_variable_that_is_read_at_imports_means_a_fresh_interpreter(shared_pool: Pool) -> None:
    for environment in ({"PREFECT_HOME": "/else"}, {"CUDA_VISIBLE_DEVICES": "1"}):
        assert shared_pool.parent_of(spec_of(os.getppid, environment=environment)) != os.getpid()
    spec = spec_of(os.getppid, environment={"MKL_DEBUG_CPU_TYPE": "5"})
    assert shared_pool.parent_of(spec) == os.getpid()


def test_a_folder_that_does_not_exist_refuses_the_task(shared_pool: Pool) -> None:
    child = shared_pool.start(replace(spec_of(os.getppid), cwd="/no/such/folder"))
    assert isinstance(child.until(ChildRefused).error, FileNotFoundError)


def test_a_server_that_was_killed_is_replaced(
    make_pool: Callable[[], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    first = pool.parent_of()
    os.kill(first, signal.SIGKILL)
    # This one finds out, and is done all the same.
    assert pool.parent_of() == os.getpid()
    second = pool.parent_of()
    assert second == pool.server_pid != first
    assert "the fork server of GPU tasks is given up" in caplog.text


def test_tasks_go_on_when_their_server_is_killed(
    make_pool: Callable[[], Pool], tmp_path: Path
) -> None:
    pool = make_pool()
    child = pool.start(spec_of(_wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    os.kill(pool.server_pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert child.value() == "went on"
    # Nobody is left who could tell how it ended.
    assert child.exit().code == UNKNOWN_CODE


def test_a_server_that_does_not_report_an_end_is_killed(
    make_pool: Callable[[], Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "LOOK_S", DEADLOCK_S)
    pool = make_pool()
    child = pool.start(spec_of(_wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    # After the fork, which may take longer.
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.2)
    server_pid = pool.server_pid
    os.kill(server_pid, signal.SIGSTOP)
    child.handle.kill()
    assert child.exit().code == UNKNOWN_CODE
    assert eventually(lambda: not is_alive(server_pid))


def test_a_task_whose_server_does_not_answer_gets_a_fresh_interpreter(
    make_pool: Callable[[], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "LOOK_S", DEADLOCK_S)
    pool = make_pool()
    server_pid = pool.parent_of()
    assert server_pid != os.getpid()
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.2)
    os.kill(server_pid, signal.SIGSTOP)
    assert pool.parent_of() == os.getpid()


def test_tasks_get_fresh_interpreters_after_three_servers_that_could_not_be_forked(
    make_pool: Callable[[], Pool],
    importable: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path(importable, "has_threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()\n"
    )
    monkeypatch.setattr(fork_server, "TESTED", (*fork_server.TESTED, "has_threads"))
    pool = make_pool()
    kind = replace(KIND, always=("has_threads",))
    assert pool.parent_of(kind=kind) == os.getpid()
    assert pool.pool.pids == ()
    given_up = [r for r in caplog.records if "started threads (odd)" in r.getMessage()]
    assert len(given_up) == fork_server.MOST_FAILURES
    # With the next runner it may have a better time.
    pool.pool.close(pool)
    pool.pool.open(pool)
    pool.pool.announce(kind)
    assert len(pool.pool.pids) == 1


def test_tasks_get_fresh_interpreters_after_one_server_whose_imports_never_end(
    make_pool: Callable[[], Pool],
    importable: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path(importable, "imports_for_ever.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(fork_server, "TESTED", (*fork_server.TESTED, "imports_for_ever"))
    monkeypatch.setattr(fork_server, "READY_S", 0.1)
    pool = make_pool()
    kind = replace(KIND, always=("imports_for_ever",))
    for _ in range(2):
        assert pool.parent_of(kind=kind) == os.getpid()
    given_up = [
        r for r in caplog.records if "it has imported for more than 0.1 s" in r.getMessage()
    ]
    assert len(given_up) == 1


def test_servers_end_with_the_last_runner(make_pool: Callable[[], Pool]) -> None:
    pool = make_pool()
    pool.pool.open("another")
    server_pid = pool.parent_of()
    pool.pool.close(pool)
    assert is_alive(server_pid) and pool.parent_of() == server_pid
    pool.pool.close("another")
    assert not is_alive(server_pid)
    # Nobody may want it any more.
    assert pool.parent_of() == os.getpid()
    assert pool.pool.pids == ()


def test_a_fork_that_came_too_late_receives_nothing_of_the_call(rig: Rig) -> None:
    """A server may have forked before it was found not to answer."""
    orphans: list[Process] = []

    def late(request: SpawnRequest) -> Process:
        orphans.append(start_interpreter(request))
        raise OSError("no answer")

    plain = ProcessLauncher()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    child = Heard.__new__(Heard)
    child.messages, child._queue = [], heard
    child.handle = plain.start(spec_of(os.getpid), heard.put, late)
    assert child.value() == child.pid
    (orphan,) = orphans
    assert orphan.wait(DEADLOCK_S) == 0
    for stream in (orphan.stdout, orphan.stderr):
        assert stream is not None and stream.read() == b""
        stream.close()
    plain.close(DEADLOCK_S)


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        pytest.param("_start_server", BlockingIOError(11, "no room"), id="its process"),
        pytest.param("start_thread", CapacityError("no room"), id="the thread for its output"),
    ],
)
def test_a_server_that_cannot_be_started_is_tried_again_by_the_next_task(
    make_pool: Callable[[], Pool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
    error: Exception,
) -> None:
    def refuse(*given: object) -> None:
        raise error

    pool = make_pool()
    before = len(psutil.Process().children())
    with monkeypatch.context() as limited:
        limited.setattr(fork_server, refused, refuse)
        assert pool.parent_of() == os.getpid()
    assert "no room" in caplog.text
    assert pool.parent_of() == pool.server_pid
    # The guardian and one server; none that nobody reads.
    assert len(psutil.Process().children()) <= before + 3


def test_what_an_import_of_a_server_prints_is_printed(
    make_pool: Callable[[], Pool],
    importable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(importable, "prints_at_import.py").write_text("print('printed at import', flush=True)\n")
    monkeypatch.setattr(fork_server, "TESTED", (*fork_server.TESTED, "prints_at_import"))
    pool = make_pool()
    kind = replace(KIND, always=("prints_at_import",))
    assert pool.parent_of(kind=kind) == pool.server_pid
    printed = []

    def is_printed() -> bool:
        printed.append(capsys.readouterr().err)
        return "printed at import" in "".join(printed)

    assert eventually(is_printed)


def test_a_server_that_has_forked_before_it_failed_is_always_replaced(
    make_pool: Callable[[], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "MOST_FAILURES", 1)
    pool = make_pool()
    for _ in range(2):
        os.kill(pool.parent_of(), signal.SIGKILL)
        assert pool.parent_of() == os.getpid()


# The parent.


def test_a_server_that_still_imports_ends_with_its_parent(importable: str) -> None:
    begun = Path(importable, "begun")
    Path(importable, "imports_for_ever.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    )
    server = ForkServer(("imports_for_ever",), import_paths(), dict(os.environ))
    assert eventually(begun.exists)
    server.forget()
    server.process.returncode = None
    assert server.process.wait(DEADLOCK_S) == -signal.SIGIO


def test_a_server_whose_parent_has_ended_before_it_imports_ends(importable: str) -> None:
    Path(importable, "imports_for_ever.py").write_text("import time\ntime.sleep(600)\n")
    server = ForkServer(("imports_for_ever",), import_paths(), dict(os.environ))
    server.forget()
    server.process.returncode = None
    assert server.process.wait(DEADLOCK_S) in (0, -signal.SIGIO)


_PARENT = """
import os, sys, time
from tests.process import bodies
from tests.process.rig import spec_of
from tests.process.test_fork_server_pool import Pool, start_and_wait
folder = sys.argv[1]
pool = Pool()
children = [pool.start(spec_of(bodies.wait_long, f"{folder}/{n}")) for n in range(2)]
children.append(pool.start(spec_of(start_and_wait, folder)))
print(pool.server_pid, *[child.pid for child in children], flush=True)
FORK
time.sleep(600)
"""

_FORK = """
forked = os.fork()
if forked == 0:
    own = pool.pool
    own.open("the copy")
    bodies.touch(f"{folder}/{'empty' if own.pids == () else 'not empty'}")
    time.sleep(600)
"""


@pytest.mark.parametrize("fork", ["", _FORK], ids=["alone", "has forked"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_parent(tmp_path: Path, signum: int, fork: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT.replace("FORK", fork), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        ready = [tmp_path / name for name in ("0", "1", "ready", *(("empty",) if fork else ()))]
        assert eventually(lambda: all(path.exists() for path in ready))
        pids += map(int, (tmp_path / "pids").read_text().split())
        assert len(pids) == 1 + 3 + 2 and all(map(is_alive, pids))
        process.send_signal(signum)
        assert eventually(lambda: not any(map(is_alive, pids)))
        if fork:
            os.kill(int((tmp_path / "empty").read_text()), signal.SIGKILL)
    finally:
        for pid in [process.pid, *pids]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# Bodies.


def _describe() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def start_and_wait(folder: str) -> None:
    """Start a process in the group, and one in a session of its own."""
    pids = []
    for name, own_session in (("group", False), ("session", True)):
        line = f"import pathlib, time; pathlib.Path({folder!r}, {name!r}).touch(); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", line], start_new_session=own_session)
        pids.append(process.pid)
        assert eventually(Path(folder, name).exists)
    Path(folder, "pids").write_text(" ".join(map(str, pids)))
    bodies.touch(f"{folder}/ready")
    bodies.wait_long(f"{folder}/waits")


def _wait_for(folder: str) -> str:
    bodies.touch(f"{folder}/begun")
    assert eventually(Path(folder, "go").exists)
    return "went on"
