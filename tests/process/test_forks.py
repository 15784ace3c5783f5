"""Tasks whose processes are forks of a warm process: all that holds for fresh interpreters, and when there are those."""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import forks, standby_kind
from prefect_gpu.processes import standby_pool as standby
from prefect_gpu.processes.forks import UNKNOWN_CODE, ForkSource
from prefect_gpu.processes.interpreter import Process, SpawnRequest, start_interpreter
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
)
from prefect_gpu.processes.launcher import ProcessLauncher
from prefect_gpu.processes.standby_kind import MOST_FAILURES, Kind
from tests.process import bodies, fork_bodies, test_outcomes, test_printing, test_survivors
from tests.process.rig import Heard, Rig, eventually, is_alive, spec_of
from tests.process.warm import KIND, Source, Warm, module, slow_module

#: Of tasks that may be forks, and use no library.
FORKED = replace(KIND, forks=True)


def with_libraries(*names: str) -> Kind:
    return replace(FORKED, libraries=names)


class ForkRig(Rig):
    """Starts forks of one source where the other starts interpreters."""

    def __init__(self, source: ForkSource, **options: float) -> None:
        self.launcher = ProcessLauncher(spawn=source.fork, **options)
        self.started = []


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source("numpy", "torch", "torch._dynamo")
    assert source.warmed.problem == ""
    yield source
    assert source.source.problem == ""
    source.close()


@pytest.fixture
def make_source() -> Iterator[Callable[..., Source]]:
    sources: list[Source] = []

    def make(*modules: str) -> Source:
        sources.append(Source(*modules))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


@pytest.fixture
def make_forks() -> Iterator[Callable[..., ForkRig]]:
    rigs: list[ForkRig] = []

    def make(of: Source, **options: float) -> ForkRig:
        rigs.append(ForkRig(of.source, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.launcher.close(DEADLOCK_S)
        pids = [child.pid for child in rig.started if child.of(ChildStarted) is not None]
        # Not even zombies: the warm process reaps them.
        assert eventually(lambda pids=pids: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.fixture
def make_rig(make_forks: Callable[..., ForkRig], source: Source) -> Callable[..., ForkRig]:
    return lambda **options: make_forks(source, **options)


@pytest.fixture
def rig(make_rig: Callable[..., ForkRig]) -> ForkRig:
    return make_rig()


@pytest.fixture
def make_warm() -> Iterator[Callable[..., Warm]]:
    warms: list[Warm] = []

    def make(most: int = 0) -> Warm:
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        warms.append(Warm(Rig(), most))
        return warms[-1]

    yield make
    for warm in warms:
        pids = warm.pool.pids
        warm.pool.close(warm)
        warm.pool.shut_down()
        warm.rig.launcher.close(DEADLOCK_S)
        assert not any(map(is_alive, pids))


@pytest.fixture
def warm(make_warm: Callable[..., Warm]) -> Warm:
    return make_warm()


def run(warm: Warm, spec: LaunchSpec, kind: Kind = FORKED) -> Heard:
    """Start a task once its source is there, however fast the pool's thread is."""
    announced = warm.announce(kind)
    if not warm.pool._record(warm.pool._kind(kind)).given_up:
        eventually(lambda: bool(warm.pool.pids), 5.0)
    return warm.run(announced, spec)


def parent_of(warm: Warm, kind: Kind = FORKED, **environment: str) -> int:
    """Run a task, and give the parent of its process."""
    parent: int = run(warm, spec_of(os.getppid, environment=environment), kind).value()
    return parent


def source_pid(warm: Warm) -> int:
    (pid,) = warm.pool.pids
    return pid


# What holds for fresh interpreters holds for forks.

#: Tests of what an interpreter does before its first line, by a file that it imports then: tasks whose environment says so
#: get a fresh one. And of errors of starting one.
OF_INTERPRETERS = {
    "test_libraries_are_frozen_before_the_users_modules_which_are_finalised_at_the_end",
    "test_a_framework_that_refuses_its_policy_is_an_error_and_no_death",
    "test_a_child_that_cannot_start_is_refused_and_nothing_is_left",
    "test_a_limit_that_lets_no_process_start_fails_one_task_and_is_named",
}

for _module in (test_outcomes, test_survivors, test_printing):
    for _name, _test in tuple(vars(_module).items()):
        # Those that start their own parent start it with fresh interpreters.
        if _name.startswith("test_") and "parent" not in _name and _name not in OF_INTERPRETERS:
            globals()[_name] = _test


def test_a_fork_is_like_a_fresh_interpreter(source: Source, rig: ForkRig) -> None:
    spec = replace(
        spec_of(fork_bodies.describe, environment={"PREFECT_GPU_TEST": "its own"}), cwd="/"
    )
    fork = rig.launch(spec)
    found = fork.value()
    assert found["pid"] == found["session"] == fork.pid
    assert found["parent"] == source.pid
    assert (found["variable"], found["cwd"], found["argv"]) == ("its own", "/", sys.argv)
    # Its channel; nothing of the warm process's.
    assert found["sockets"] == 1
    assert fork.exit() == ChildExited(0, "complained\n")


def test_a_change_in_one_fork_is_not_seen_in_another(rig: ForkRig) -> None:
    forks = [rig.start(fork_bodies.count), rig.start(fork_bodies.count)]
    (first, one_number), (second, other_number) = (one.value() for one in forks)
    assert (first, second) == (1, 1)
    # The random numbers of forks that were made alike are not alike.
    assert one_number != other_number


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of installed modules."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return str(folder)


def test_what_the_system_seeds_differs_from_fork_to_fork(
    make_source: Callable[..., Source], make_forks: Callable[..., ForkRig], library: str
) -> None:
    lines = (
        "import random, numpy as np",
        "OWN, FIXED = random.Random(), random.Random(5)",
        "LATER = random.Random()",
        "LATER.seed(5)",
        "STATED = random.Random()",
        "STATED.setstate(FIXED.getstate())",
        "class Demanding(random.Random):",
        "    __hash__ = None",
        "    def seed(self, a, *more): super().seed(a, *more)",
        "WITHOUT_HASH = Demanding(None)",
        "STATE, FIXED_STATE = np.random.RandomState(), np.random.RandomState(5)",
        "DRAWS, FIXED_DRAWS = np.random.default_rng(), np.random.default_rng(5)",
    )
    module(library, "has_generators", "\n".join(lines))
    rig = make_forks(make_source("numpy", "torch", "has_generators"))
    (first, fixed), (second, again) = (rig.start(fork_bodies.draw_all).value() for _ in range(2))
    assert len(first) == 7 and not set(first) & set(second)
    assert fixed == again == Rig().call(fork_bodies.draw_all)[1]


def test_a_seed_that_a_library_sets_stays(
    make_source: Callable[..., Source], make_forks: Callable[..., ForkRig], library: str
) -> None:
    lines = (
        "import random, numpy as np, torch",
        "random.seed(7)",
        "np.random.seed(7)",
        "torch.manual_seed(7)",
    )
    module(library, "sets_seeds", "\n".join(lines))
    rig = make_forks(make_source("numpy", "torch", "sets_seeds"))
    first, second = (rig.start(fork_bodies.draw_seeded).value() for _ in range(2))
    assert first == second == Rig().call(fork_bodies.draw_seeded)


def test_folders_and_archives_that_came_after_the_imports_are_found(
    make_source: Callable[..., Source],
    make_forks: Callable[..., ForkRig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, archive = tmp_path / "later", tmp_path / "code.zip"
    for path in (folder, archive):
        monkeypatch.syspath_prepend(str(path))

    def write(number: int) -> None:
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("in_archive.py", f"NUMBER = {number}\n{'# longer' * number}")

    write(1)
    rig = make_forks(make_source("numpy"))
    write(200)
    folder.mkdir()
    module(str(folder), "in_folder", "NUMBER = 3\n")
    assert rig.call(fork_bodies.numbers_of, ["in_archive", "in_folder"]) == [200, 3]


def test_a_module_of_the_users_begins_in_each_fork(rig: ForkRig, importable: str) -> None:
    module(
        importable,
        "draws_at_import",
        "import random, uuid\nNUMBER, NAME = random.Random().random(), uuid.uuid4()\n",
    )
    drawn = [rig.start(fork_bodies.drawn).value() for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("cpus", [1, 2])
def test_libraries_compute_in_a_fork(rig: ForkRig, cpus: int) -> None:
    assert rig.call(fork_bodies.compute, cpus) == pytest.approx((300.0**3, 300.0**3))


def test_twenty_forks_at_once_train_with_workers(rig: ForkRig) -> None:
    alone = rig.call(fork_bodies.train)
    assert [fork.value() for fork in [rig.start(fork_bodies.train) for _ in range(20)]] == [
        alone
    ] * 20


def test_a_fork_ends_like_a_script(rig: ForkRig, tmp_path: Path) -> None:
    assert rig.start(fork_bodies.leave_open, str(tmp_path)).exit().code == 0
    assert (tmp_path / "never closed").read_text() == "all of it"
    assert (tmp_path / "at exit").read_text() == "called"
    assert (tmp_path / "by a thread").read_text() == "waited for"


def test_objects_of_the_users_module_are_finalised_in_a_fork(
    rig: ForkRig, importable: str, tmp_path: Path
) -> None:
    text = f"""
        class Kept:
            def __del__(self):
                open({str(tmp_path / "finalised")!r}, "w").close()
        KEPT = Kept()
    """
    module(importable, "keeps_an_object", "\n".join(line[8:] for line in text.splitlines()))
    assert rig.start(fork_bodies.import_module, "keeps_an_object").exit().code == 0
    assert (tmp_path / "finalised").exists()


def test_an_environment_may_be_larger_than_a_pipe(rig: ForkRig) -> None:
    large = {f"PREFECT_GPU_TEST_{n}": "x" * 100_000 for n in range(5)}
    spec = spec_of(fork_bodies.describe, environment={**large, "PREFECT_GPU_TEST": "the last"})
    assert rig.launch(spec).value()["variable"] == "the last"


def test_what_a_library_did_at_its_import_is_there_as_after_an_import(
    make_source: Callable[..., Source],
    make_forks: Callable[..., ForkRig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    module(
        str(folder),
        "acts_as_libraries_do",
        "import atexit, os, shutil, sys, tempfile\n"
        "os.environ['OF_A_LIBRARY'], os.environ['PREFECT_GPU_TEST'] = 'set', 'by the library'\n"
        f"LOG = open({str(tmp_path / 'log')!r}, 'a')\n"
        "LOG.write('imported ')\n"
        "print('unfinished', end='', file=sys.stderr)\n"
        "FOLDERS = tempfile.mkdtemp(), (OWNER := tempfile.TemporaryDirectory()).name\n"
        "atexit.register(shutil.rmtree, FOLDERS[0])\n",
    )
    source = make_source("acts_as_libraries_do")
    rig = make_forks(source)
    forks = [
        rig.launch(
            spec_of(fork_bodies.use_library, name, environment={"PREFECT_GPU_TEST": "of the task"})
        )
        for name in "ab"
    ]
    assert [fork.value() for fork in forks] == [("set", "of the task")] * 2
    assert {fork.exit().stderr_tail for fork in forks} == {""}
    written = (tmp_path / "log").read_text()
    assert written.startswith("imported ") and sorted(written[9:]) == ["a", "b"]
    # Removed with the process that made them.
    folders = rig.call(fork_bodies.folders_of_library)
    assert rig.started[-1].exit().code == 0 and all(map(os.path.isdir, folders))
    source.source.retire()
    assert source.until(ChildExited).code == 0 and not any(map(os.path.exists, folders))


def test_what_c_code_prints_is_printed(rig: ForkRig, capfd: pytest.CaptureFixture[str]) -> None:
    rig.call(fork_bodies.print_by_c)
    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "by C" in printed

    assert eventually(is_printed)


def test_a_source_reaps_its_forks_where_the_flow_ignores_them(
    make_forks: Callable[..., ForkRig],
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        source = Source()
    finally:
        signal.signal(signal.SIGCHLD, before)
    rig = make_forks(source)
    assert [rig.start(bodies.die, signal.SIGSEGV).exit().code for _ in range(2)] == [-11] * 2
    assert rig.call(os.getppid) == source.pid
    for child in rig.started:
        child.exit()
    source.close()


def test_limits_are_the_parents_of_now(rig: ForkRig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    umask, cores = os.umask(0o027), os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        os.sched_setaffinity(0, {min(cores)})
        assert rig.call(fork_bodies.limits) == (0o027, soft - 1, {min(cores)})
    finally:
        os.umask(umask)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fork_that_came_too_late_receives_nothing_of_the_call() -> None:
    """A warm process may have forked before it was found not to answer."""
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
    assert orphan.wait() == 0
    for stream in (orphan.stdout, orphan.stderr):
        assert stream is not None and stream.read() == b""
        stream.close()
    plain.close(DEADLOCK_S)


# The warm process.


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()\n",
            "its libraries have started threads (odd)",
            id="a thread of Python's",
        ),
        pytest.param(
            "import ctypes, ctypes.util\n"
            "libc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
            "libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)\n",
            "acts_at_import has started threads that are not known to serve a fork",
            id="a native thread",
        ),
        pytest.param(
            "import scipy.linalg, torch\ntorch.set_num_threads(2)\ntorch.ones(1 << 20).exp()\n",
            "a fork of it cannot compute in OpenMP's threads, in which a library has computed",
            id="a team of OpenMP's",
        ),
        pytest.param("raise ValueError", "acts_at_import could not be imported", id="an error"),
    ],
)
def test_a_process_must_not_be_forked_after_an_import_that_starts(
    make_source: Callable[..., Source], importable: str, text: str, problem: str
) -> None:
    module(importable, "acts_at_import", text)
    assert make_source("json", "acts_at_import", "numpy").warmed.problem == problem


def test_a_source_imports_no_module_of_the_users_through_a_library(
    make_source: Callable[..., Source], importable: str
) -> None:
    module(importable, "of_a_user", "")
    module(importable, "acts_as_a_library", "import of_a_user")
    problem = make_source("acts_as_a_library").warmed.problem
    assert problem == "a library imports of_a_user, which is no library"


def test_threads_of_libraries_that_serve_forks_are_no_problem(
    make_source: Callable[..., Source],
) -> None:
    source = make_source("numpy", "torch", "sklearn.linear_model")
    assert source.warmed.problem == ""


def test_a_flows_default_timeout_of_sockets_is_not_that_of_its_children() -> None:
    """With a timeout a read does not wait, and a fork reads before its parent has written."""
    blocking: list[bool] = []

    def spawn(request: SpawnRequest) -> Process:
        blocking.append(os.get_blocking(request.channel))
        raise OSError("it is not started")

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(7.0)
    source, launcher = ForkSource(), ProcessLauncher(spawn=spawn)
    try:
        launcher.start(spec_of(os.getpid), lambda message: None)
        assert eventually(lambda: blocking == [True])
        assert os.get_blocking(source.descriptor)
    finally:
        socket.setdefaulttimeout(before)
        source.close()
        launcher.close(DEADLOCK_S)


def test_what_a_warm_process_prints_is_not_repeated_by_its_forks(
    make_source: Callable[..., Source],
    make_forks: Callable[..., ForkRig],
    importable: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    module(importable, "prints_at_import", "print('imported')\n")
    rig = make_forks(make_source("prints_at_import"))
    assert [rig.call(os.getppid), rig.call(os.getppid)]
    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "imported" in printed

    assert eventually(is_printed)
    assert printed.count("imported") == 1


def test_a_process_that_was_killed_cannot_be_asked_for_forks(
    make_source: Callable[..., Source], make_forks: Callable[..., ForkRig]
) -> None:
    source = make_source()
    os.kill(source.pid, signal.SIGKILL)
    source.until(ChildExited)
    for _ in range(2):
        assert "no fork" in str(make_forks(source).start(os.getpid).until(ChildRefused).error)


def test_a_fork_that_the_system_refuses_leaves_the_process_and_its_other_forks(
    make_source: Callable[..., Source], make_forks: Callable[..., ForkRig], importable: str
) -> None:
    module(
        importable,
        "refuses_every_other",
        "import itertools, os\nreal, calls = os.fork, itertools.count()\n"
        "def fork():\n    if next(calls) % 2:\n"
        "        raise BlockingIOError(11, 'no more processes')\n    return real()\n"
        "os.fork = fork\n",
    )
    rig = make_forks(source := make_source("refuses_every_other"))
    assert rig.call(os.getppid) == source.pid
    error = rig.start(os.getpid).until(ChildRefused).error
    assert "no more processes" in str(error)
    dies = rig.start(bodies.die, signal.SIGSEGV)
    assert dies.exit().code == -signal.SIGSEGV
    assert not source.source.problem


def test_a_process_without_descriptors_refuses_and_goes_on(
    make_source: Callable[..., Source], make_forks: Callable[..., ForkRig]
) -> None:
    rig = make_forks(source := make_source())
    limits = resource.prlimit(source.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(source.pid, resource.RLIMIT_NOFILE, (6, limits[1]))
    assert "no fork" in str(rig.start(os.getpid).until(ChildRefused).error)
    resource.prlimit(source.pid, resource.RLIMIT_NOFILE, limits)
    assert rig.call(os.getppid) == source.pid


def test_a_retired_process_ends_with_its_last_fork(
    make_source: Callable[..., Source], make_forks: Callable[..., ForkRig], tmp_path: Path
) -> None:
    rig = make_forks(source := make_source())
    fork = rig.start(fork_bodies.wait_for, str(tmp_path))
    assert eventually((tmp_path / "begun").exists)
    source.source.retire()
    assert "it was retired" in str(rig.start(os.getpid).until(ChildRefused).error)
    assert is_alive(source.pid)
    (tmp_path / "go").touch()
    assert fork.value() == "went on" and fork.exit().code == 0
    assert source.until(ChildExited).code == 0


# Which tasks get one.


def test_tasks_are_forks_of_one_process(warm: Warm) -> None:
    children = [run(warm, spec_of(fork_bodies.parent)) for _ in range(8)]
    found = [child.value() for child in children]
    assert {parent for _, parent in found} == {source_pid(warm)}
    assert [pid for pid, _ in found] == [child.pid for child in children]
    assert len({pid for pid, _ in found}) == 8
    assert {child.exit().code for child in children} == {0}


def test_tasks_wait_for_a_process_that_imports(warm: Warm, importable: str, tmp_path: Path) -> None:
    slow_module(importable, "slow_to_import", tmp_path)
    kind = with_libraries("slow_to_import")
    announced = [warm.announce(kind) for _ in range(3)]
    assert eventually((tmp_path / "begun").exists)
    children: list[Heard] = []
    threads = [
        threading.Thread(
            target=lambda each=each: children.append(warm.run(each, spec_of(os.getppid)))
        )
        for each in announced
    ]
    for thread in threads:
        thread.start()
    warm.wait_checks(1)
    assert not children, "they wait"
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(DEADLOCK_S)
    assert {child.value() for child in children} == {source_pid(warm)}


def test_tasks_with_the_same_libraries_share_a_process(warm: Warm) -> None:
    first = parent_of(warm)
    assert parent_of(warm, replace(FORKED, cpus=3)) == first == source_pid(warm)


def test_a_task_that_must_not_be_a_fork_is_none(warm: Warm) -> None:
    first = parent_of(warm)
    assert parent_of(warm, KIND) == os.getpid()
    assert parent_of(warm) == first


def test_a_variable_that_is_read_at_imports_means_another_process(warm: Warm) -> None:
    first = parent_of(warm)
    for environment in ({"PREFECT_HOME": "/else"}, {"CUDA_VISIBLE_DEVICES": "1"}):
        assert parent_of(warm, **environment) == first
    assert parent_of(warm, MKL_DEBUG_CPU_TYPE="5") == os.getpid()
    assert eventually(lambda: not is_alive(first)), "the environment may have changed for good"
    assert parent_of(warm) not in (first, os.getpid())


def test_a_folder_that_does_not_exist_refuses_the_task(warm: Warm) -> None:
    child = run(warm, replace(spec_of(os.getppid), cwd="/no/such/folder"))
    assert isinstance(child.until(ChildRefused).error, FileNotFoundError)


def test_a_process_that_was_killed_is_replaced(warm: Warm) -> None:
    first = parent_of(warm)
    os.kill(first, signal.SIGKILL)
    # This one may find out, and is done all the same.
    assert parent_of(warm) != first
    assert eventually(lambda: parent_of(warm) not in (first, os.getpid()))


def test_tasks_go_on_when_their_source_is_killed(warm: Warm, tmp_path: Path) -> None:
    child = run(warm, spec_of(fork_bodies.wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    os.kill(source_pid(warm), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert child.value() == "went on"
    # Nobody is left who could tell how it ended.
    assert child.exit().code == UNKNOWN_CODE


def test_a_process_that_does_not_report_an_end_is_killed(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "LOOK_S", DEADLOCK_S)
    child = run(warm, spec_of(fork_bodies.wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    # After the fork, which may take longer.
    monkeypatch.setattr(forks, "ANSWER_S", 0.2)
    pid = source_pid(warm)
    os.kill(pid, signal.SIGSTOP)
    child.handle.kill()
    assert child.exit().code == UNKNOWN_CODE
    assert eventually(lambda: not is_alive(pid))


@pytest.mark.parametrize("looks", [True, False])
def test_a_task_whose_source_was_stopped_gets_a_fresh_interpreter(
    warm: Warm, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    first = parent_of(warm)
    if not looks:
        monkeypatch.setattr(forks, "LOOK_S", DEADLOCK_S)
        monkeypatch.setattr(forks, "ANSWER_S", 0.2)
    os.kill(first, signal.SIGSTOP)
    assert parent_of(warm) == os.getpid()
    assert eventually(lambda: not is_alive(first))


def test_a_kind_whose_libraries_start_threads_imports_less(warm: Warm, importable: str) -> None:
    module(
        importable,
        "has_threads",
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()\n",
    )
    kind = with_libraries("has_threads")
    assert eventually(lambda: parent_of(warm, kind) != os.getpid())
    assert parent_of(warm, kind) == source_pid(warm)


def test_a_kind_that_can_never_be_forked_has_standbys(
    make_warm: Callable[..., Warm], importable: str
) -> None:
    module(
        importable,
        "has_threads",
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()\n",
    )
    warm = make_warm(most=1)
    kind = replace(FORKED, always=("has_threads",))
    announced = warm.announce(kind)
    (waited,) = warm.wait_ready()
    assert warm.pool._kind(kind) == replace(kind, forks=False)
    child = warm.run(announced, spec_of(os.getppid))
    assert (child.value(), child.pid) == (os.getpid(), waited)


def test_a_kind_whose_processes_fork_for_no_task_is_given_up(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(source: ForkSource, request: SpawnRequest) -> Process:
        assert source.pid is not None
        os.kill(source.pid, signal.SIGKILL)
        raise OSError("it died")

    monkeypatch.setattr(ForkSource, "fork", dies)
    record = warm.pool._record(warm.pool._kind(FORKED))
    for failures in range(1, MOST_FAILURES + 1):
        assert parent_of(warm) == os.getpid()
        assert eventually(lambda failures=failures: record.failures == failures)
    assert record.given_up


def test_a_runner_that_is_closed_waits_for_no_import(
    warm: Warm, importable: str, tmp_path: Path
) -> None:
    slow_module(importable, "slow_to_import", tmp_path)
    warm.pool.open("another", 0, warm.broker)
    announced = warm.pool.announce(with_libraries("slow_to_import"), warm)
    assert eventually((tmp_path / "begun").exists)
    children: list[Heard] = []
    thread = threading.Thread(
        target=lambda: children.append(warm.run(announced, spec_of(os.getppid)))
    )
    thread.start()
    warm.pool.close(warm)
    thread.join(DEADLOCK_S)
    assert children[0].value() == os.getpid()
    warm.pool.close("another")


def test_a_source_is_kept_while_a_fork_of_it_runs(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = run(warm, spec_of(fork_bodies.wait_for, str(tmp_path)))
    assert eventually((tmp_path / "begun").exists)
    monkeypatch.setattr(standby, "CHECK_S", 0.02)
    monkeypatch.setattr(standby_kind, "IDLE_S", 0.2)
    first = source_pid(warm)
    warm.wait_checks(20)
    assert warm.pool.pids == (first,)
    (tmp_path / "go").touch()
    assert child.value() == "went on"
    assert eventually(lambda: not is_alive(first))


def test_a_kind_whose_sources_die_is_given_up(
    warm: Warm, importable: str, caplog: pytest.LogCaptureFixture
) -> None:
    module(importable, "dies_at_import", "import os\nos._exit(3)\n")
    kind = with_libraries("dies_at_import")
    warm.announce(kind)
    record = warm.pool._record(warm.pool._kind(kind))
    assert eventually(lambda: bool(record.given_up))
    assert record.failures == MOST_FAILURES
    assert parent_of(warm, kind) == os.getpid()
    given_up = [r for r in caplog.records if "no process is started ahead" in r.getMessage()]
    assert len(given_up) == 1 and "it ended with 3" in given_up[0].getMessage()


def test_a_process_that_imports_for_too_long_is_ended_and_its_tasks_start(
    warm: Warm, importable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_module(importable, "imports_for_ever", tmp_path)
    monkeypatch.setattr(standby, "IMPORT_S", 0.5)
    monkeypatch.setattr(standby, "CHECK_S", 0.05)
    assert parent_of(warm, with_libraries("imports_for_ever")) == os.getpid()


def test_one_is_kept_without_regard_to_the_number_of_standbys(
    make_warm: Callable[..., Warm],
) -> None:
    warm = make_warm(most=0)
    for _ in range(3):
        warm.announce(FORKED)
    warm.wait_ready(1)
    warm.wait_checks()
    assert len(warm.pool.pids) == 1


def test_sources_end_for_a_task_that_waits_for_host_memory(warm: Warm) -> None:
    first = parent_of(warm)
    warm.broker.wants_host_memory = True
    assert eventually(lambda: not is_alive(first))
    assert parent_of(warm) == os.getpid()


def test_a_source_without_tasks_ends_after_a_while(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = parent_of(warm)
    monkeypatch.setattr(standby, "CHECK_S", 0.05)
    warm.wait_checks()
    assert is_alive(first)
    monkeypatch.setattr(standby_kind, "IDLE_S", 0.0)
    assert eventually(lambda: not is_alive(first))


def test_a_source_that_was_forked_waits_for_the_next_runner(warm: Warm) -> None:
    first = parent_of(warm)
    unused = warm.announce(replace(FORKED, libraries=("colorsys",)))
    assert eventually(lambda: warm.pool.ready_by_kind.total() == 2)
    warm.pool.close(warm)
    assert warm.pool.pids == (first,)
    unused.retract()
    warm.pool.open("another", 0, warm.broker)
    assert parent_of(warm) == first
    warm.pool.close("another")
    # None is started while there is no runner.
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: warm.pool.pids == ())
    checks = warm.checks
    warm.pool.close("another")
    assert eventually(lambda: warm.checks > checks) and warm.pool.pids == ()


@pytest.mark.parametrize("what", ["a variable", "an ignored signal", "a package"])
def test_a_source_ends_if_meanwhile_has_changed(
    what: str, warm: Warm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    # Python ignores it.
    monkeypatch.setattr(sys, "path", [*sys.path, packages])
    before, seen = signal.getsignal(signal.SIGUSR1), [os.getpid()]
    try:
        for turn in range(MOST_FAILURES + 1):
            warm.pool.open(warm, 0, warm.broker)
            assert eventually(lambda: seen[-1] not in warm.pool.pids)
            first = parent_of(warm)
            assert first not in seen
            seen.append(first)
            warm.pool.close(warm)
            if what == "a variable":
                monkeypatch.setenv("OF_A_LIBRARY", str(turn))
            elif what == "an ignored signal":
                signal.signal(signal.SIGUSR1, [signal.SIG_IGN, signal.SIG_DFL][turn % 2])
            else:
                os.utime(packages, (turn, turn))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_last_sources_are_kept(warm: Warm) -> None:
    libraries = ("colorsys", "bisect", "heapq")
    parents: list[int] = []
    for name in libraries:
        announced = warm.announce(with_libraries(name))
        warm.wait_ready(len(parents) + 1)
        parents.append(warm.run(announced, spec_of(os.getppid)).value())
    assert len(set(parents)) == 3
    warm.pool.close(warm)
    assert warm.pool.pids == tuple(parents[1:])


def test_a_source_that_was_stopped_ends_with_the_interpreter(warm: Warm) -> None:
    first = parent_of(warm)
    os.kill(first, signal.SIGSTOP)
    warm.pool.shut_down()
    # Its end was waited for. A process that has to be killed ends later than `shut_down`.
    assert warm.pool.pids == () and not is_alive(first)


@pytest.mark.parametrize("why", ["a while", "no memory"])
def test_a_source_without_a_runner_ends_after(
    why: str, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parent_of(warm)
    warm.pool.close(warm)
    monkeypatch.setattr(standby, "CHECK_S", 0.05)
    warm.wait_checks()
    assert is_alive(source)
    if why == "a while":
        monkeypatch.setattr(standby_kind, "IDLE_S", 0.0)
    else:
        warm.available_bytes = 0
    assert eventually(lambda: not is_alive(source))


def test_sources_end_with_the_interpreter(warm: Warm) -> None:
    first = parent_of(warm)
    warm.pool.close(warm)
    warm.pool.shut_down()
    assert not is_alive(first) and warm.pool.pids == ()


# The parent.


_PARENT = """
import os, sys, time
from tests.process import bodies, fork_bodies
from tests.process.rig import Rig, eventually, spec_of
from tests.process.test_forks import FORKED, run, source_pid
from tests.process.warm import Warm
folder = sys.argv[1]
warm = Warm(Rig(), 0)
children = [run(warm, spec_of(bodies.wait_long, f"{folder}/{n}")) for n in range(2)]
children.append(run(warm, spec_of(fork_bodies.start_and_wait, folder)))
print(source_pid(warm), *[child.pid for child in children], flush=True)
THEN
time.sleep(600)
"""

_FORK = """
forked = os.fork()
if forked == 0:
    bodies.touch(f"{folder}/{'empty' if warm.pool.pids == () else 'not empty'}")
    time.sleep(600)
"""


@pytest.mark.parametrize("fork", ["", _FORK], ids=["alone", "has forked"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_parent(tmp_path: Path, signum: int, fork: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT.replace("THEN", fork), str(tmp_path)],
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
