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

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import forkserver, launcher, templates
from prefect_gpu.processes.forkserver import UNKNOWN_CODE, ForkServer
from prefect_gpu.processes.interpreter import import_paths
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.launcher import ProcessLauncher
from prefect_gpu.processes.spawning import Process, SpawnRequest, spawn_fresh
from prefect_gpu.processes.spec import ChildRefused, ChildStarted, LaunchSpec
from prefect_gpu.processes.templates import TemplatePool
from tests.process import bodies, test_outcomes, test_printing, test_survivors
from tests.process.rig import Heard, Rig, eventually, is_alive, spec_of

#: Of a task that names no framework; what is left out here every template imports anyway.
KIND = Kind(("prefect_gpu.prefect_bridge",), (), (), False, 1, 1 << 20)


class ForkRig(Rig):
    """Starts forks of one template where the other starts interpreters."""

    def __init__(self, server: ForkServer, **options: float) -> None:
        self.launcher = ProcessLauncher(spawn=server.fork, **options)
        self.started = []


class Pool:
    """A pool on a launcher, and what it started."""

    def __init__(self) -> None:
        self.launcher = ProcessLauncher()
        self.pool = TemplatePool(self.launcher)
        self.pool.open(self)
        self.started: list[Heard] = []

    def start(self, spec: LaunchSpec, kind: Kind = KIND) -> Heard:
        # Another test's is another value, for which a template would not do.
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
    def template(self) -> int:
        (pid,) = self.pool.pids
        return pid

    def close(self) -> None:
        self.launcher.close(DEADLOCK_S)
        self.pool.close(self)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    modules = ("numpy", "prefect_gpu.processes.child")
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
        # Not even zombies: the template has let go of them.
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
        templates = pool.pool.pids
        pool.close()
        assert pool.pool.pids == ()
        assert not any(map(is_alive, templates))


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
    "test_libraries_are_set_aside_before_the_users_modules_which_are_taken_apart_at_the_end",
    "test_a_framework_that_refuses_its_policy_is_an_error_and_no_death",
    "test_a_calibration_holds_its_device_until_the_parent_lets_go",
    "test_a_child_that_cannot_start_is_refused_and_nothing_is_left",
}

for _module in (test_outcomes, test_survivors, test_printing):
    for _name, _test in tuple(vars(_module).items()):
        # Those that start their own parent start it with fresh interpreters.
        if _name.startswith("test_") and "parent" not in _name and _name not in OF_INTERPRETERS:
            globals()[_name] = _test


# Which tasks get one.


def test_tasks_are_forks_of_one_template(shared_pool: Pool) -> None:
    first, second = (shared_pool.start(spec_of(_describe)) for _ in range(2))
    (pid, parent), (other_pid, other_parent) = first.value(), second.value()
    assert (pid, other_pid) == (first.pid, second.pid)
    assert pid != other_pid
    assert parent == other_parent == shared_pool.template
    assert first.exit().code == second.exit().code == 0


def test_what_a_task_imports_of_its_own_makes_no_other_template(shared_pool: Pool) -> None:
    template = shared_pool.parent_of()
    kind = replace(KIND, users=("json",), cpus=3, size_bytes=5)
    assert shared_pool.parent_of(kind=kind) == template == shared_pool.template


def test_what_is_not_known_to_survive_a_fork_is_not_imported(shared_pool: Pool) -> None:
    modules = templates._modules(replace(KIND, always=(*KIND.always, "torch", "jax", "tensorflow")))
    assert "torch" in modules and "numpy" in modules
    assert not {"jax", "tensorflow"} & set(modules)


def test_a_variable_that_is_read_at_imports_means_a_fresh_interpreter(shared_pool: Pool) -> None:
    for environment in ({"PREFECT_HOME": "/else"}, {"CUDA_VISIBLE_DEVICES": "1"}):
        assert shared_pool.parent_of(spec_of(os.getppid, environment=environment)) != os.getpid()
    spec = spec_of(os.getppid, environment={"MKL_DEBUG_CPU_TYPE": "5"})
    assert shared_pool.parent_of(spec) == os.getpid()


def test_it_is_shown_by_its_tasks_name(shared_pool: Pool, tmp_path: Path) -> None:
    child = shared_pool.start(spec_of(bodies.wait_long, str(tmp_path / "runs")))
    assert eventually((tmp_path / "runs").exists)
    command = Path(f"/proc/{child.pid}/cmdline").read_text().split("\0")
    assert command[-2].strip() == "a-task"
    child.handle.kill()
    assert child.exit().code == -signal.SIGKILL


def test_a_folder_that_is_gone_is_refused_as_ever(shared_pool: Pool) -> None:
    child = shared_pool.start(replace(spec_of(os.getppid), cwd="/no/such/folder"))
    assert isinstance(child.until(ChildRefused).error, FileNotFoundError)


def test_a_template_that_was_killed_is_replaced(
    make_pool: Callable[[], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    first = pool.parent_of()
    os.kill(first, signal.SIGKILL)
    # This one finds out, and is done all the same.
    assert pool.parent_of() == os.getpid()
    second = pool.parent_of()
    assert second == pool.template != first
    assert "the template of forked GPU tasks is given up" in caplog.text


def test_tasks_of_a_template_that_is_killed_go_on(
    make_pool: Callable[[], Pool], tmp_path: Path
) -> None:
    pool = make_pool()
    child = pool.start(spec_of(_wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    os.kill(pool.template, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert child.value() == "went on"
    # Nobody is left who could tell how it ended.
    assert child.exit().code == UNKNOWN_CODE


def test_a_template_that_hangs_is_ended_and_its_tasks_are_not_lost(
    make_pool: Callable[[], Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "ANSWER_S", 0.2)
    pool = make_pool()
    child = pool.start(spec_of(_wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    template = pool.template
    os.kill(template, signal.SIGSTOP)
    child.handle.kill()
    assert child.exit().code == UNKNOWN_CODE
    assert eventually(lambda: not is_alive(template))


def test_a_template_that_does_not_answer_has_a_fresh_interpreter_take_its_place(
    make_pool: Callable[[], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "ANSWER_S", 0.2)
    pool = make_pool()
    os.kill(pool.parent_of(), signal.SIGSTOP)
    assert pool.parent_of() == os.getpid()


def test_a_kind_whose_templates_cannot_be_forked_is_left_alone(
    make_pool: Callable[[], Pool],
    importable: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path(importable, "has_threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()\n"
    )
    monkeypatch.setattr(templates, "TESTED", (*templates.TESTED, "has_threads"))
    pool = make_pool()
    kind = replace(KIND, always=("has_threads",))
    assert pool.parent_of(kind=kind) == os.getpid()
    assert pool.pool.pids == ()
    given_up = [r for r in caplog.records if "started threads (odd)" in r.getMessage()]
    assert len(given_up) == templates.MOST_FAILURES
    # With the next runner it may have a better time.
    pool.pool.close(pool)
    pool.pool.open(pool)
    pool.pool.announce(kind)
    assert len(pool.pool.pids) == 1


def test_with_its_last_runner_a_template_ends(make_pool: Callable[[], Pool]) -> None:
    pool = make_pool()
    pool.pool.open("another")
    template = pool.parent_of()
    pool.pool.close(pool)
    assert is_alive(template) and pool.parent_of() == template
    pool.pool.close("another")
    assert not is_alive(template)
    # Nobody may want it any more.
    assert pool.parent_of() == os.getpid()
    assert pool.pool.pids == ()


def test_without_process_descriptors_its_end_is_seen_all_the_same(
    make_pool: Callable[[], Pool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher, "open_pidfd", lambda pid: None)
    pool = make_pool()
    child = pool.start(spec_of(_wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    (tmp_path / "go").touch()
    assert child.value() == "went on"
    assert child.exit().code == 0


def test_a_process_that_came_after_all_hears_nothing_of_the_call(rig: Rig) -> None:
    """A template may have forked before it was found not to answer."""
    orphans: list[Process] = []

    def late(request: SpawnRequest) -> Process:
        orphans.append(spawn_fresh(request))
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


_REFUSES = """
import json, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
control.recv(1 << 20)
control.send(json.dumps({"kind": "ready", "failed": {"x": "gone"}, "unfit": ""}).encode())
while data := control.recv(1 << 20):
    answer = {"kind": "refused", "id": json.loads(data)["id"], "reason": "no more processes"}
    control.send(json.dumps(answer).encode())
"""


def test_a_fork_that_the_system_refuses_leaves_the_template_in_use(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refuses.py").write_text(_REFUSES)
    monkeypatch.setattr(forkserver, "TEMPLATE", tmp_path / "refuses.py")
    refusing = ForkServer((), (), dict(os.environ))
    assert refusing.wait_ready(DEADLOCK_S) == ""
    assert refusing.failed == {"x": "gone"}
    for _ in range(2):
        with pytest.raises(BlockingIOError, match="no fork: no more processes"):
            refusing.fork(SpawnRequest("a-task", 0, {}, ""))
    assert refusing.problem == ""
    refusing.close()


def test_a_template_that_imports_for_too_long_is_given_up(importable: str) -> None:
    Path(importable, "imports_for_ever.py").write_text("import time\ntime.sleep(600)\n")
    server = ForkServer(("imports_for_ever",), import_paths(), dict(os.environ))
    assert "said nothing for 0.05 s" in server.wait_ready(0.05)
    assert server.failed == {}
    server.process.wait(DEADLOCK_S)
    server.close()


# The parent.


def test_a_template_that_still_imports_ends_with_its_parent(importable: str) -> None:
    begun = Path(importable, "begun")
    Path(importable, "imports_for_ever.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    )
    server = ForkServer(("imports_for_ever",), import_paths(), dict(os.environ))
    assert eventually(begun.exists)
    server.forget()
    server.process.returncode = None
    assert server.process.wait(DEADLOCK_S) == -signal.SIGIO


def test_a_template_whose_parent_is_gone_before_it_looks_ends(importable: str) -> None:
    Path(importable, "imports_for_ever.py").write_text("import time\ntime.sleep(600)\n")
    server = ForkServer(("imports_for_ever",), import_paths(), dict(os.environ))
    server.forget()
    server.process.returncode = None
    assert server.process.wait(DEADLOCK_S) in (0, -signal.SIGIO)


_PARENT = """
import os, sys, time
from tests.process import bodies
from tests.process.rig import spec_of
from tests.process.test_templates import Pool
folder = sys.argv[1]
pool = Pool()
children = [pool.start(spec_of(bodies.wait_long, f"{folder}/{n}")) for n in range(2)]
children.append(pool.start(spec_of(bodies.start_others, folder, "live")))
print(pool.template, *[child.pid for child in children], flush=True)
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
        assert len(pids) == 1 + 3 + 3 and all(map(is_alive, pids))
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


def _wait_for(folder: str) -> str:
    bodies.touch(f"{folder}/begun")
    assert eventually(Path(folder, "go").exists)
    return "went on"
