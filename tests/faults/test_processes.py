"""Attacks on the processes of flows: what kills, stops, forks or hides them leaves nothing behind."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect import get_client

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.units import GIB
from tests.integration.engine_api import artifacts
from tests.integration.kill_flow import read_pids
from tests.integration.programs import Workplace, wait_for
from tests.integration.test_signals import read_run, wait_for_states
from tests.process.rig import eventually, is_alive

#: Starts this Python in a PID namespace of its own, in which `/proc` still numbers processes as the machine does.
UNSHARE = ("unshare", "--pid", "--fork")


def can_unshare() -> bool:
    try:
        return not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    except FileNotFoundError:
        return False


needs_unshare = pytest.mark.skipif(
    not can_unshare(), reason="this machine does not allow a PID namespace (unshare --pid)"
)


@needs_unshare
def test_under_another_namespaces_proc_a_process_with_a_childs_number_is_left_alone() -> None:
    program = """
import os, subprocess, sys, time
from prefect_gpu.processes import guardian
child = subprocess.Popen(["sleep", "600"], env={guardian.TOKEN_VARIABLE: "mine"})
marked = f"{guardian.TOKEN_VARIABLE}=mine".encode()
me = os.readlink("/proc/self")
while True:
    with open(f"/proc/{me}/task/{me}/children") as file:
        number = int(file.read())
    with open(f"/proc/{number}/environ", "rb") as file:
        if marked in file.read():
            break
    time.sleep(0.01)
# The next process gets the number that the machine gave to the child.
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(number - 1))
bystander = subprocess.Popen(["sleep", "600"])
print(bystander.pid == number)
guardian.kill_strays({1 << 23: "mine"})
time.sleep(0.1)
print(bystander.poll())
for process in (child, bystander):
    process.kill()
    process.wait()
"""
    done = subprocess.run([*UNSHARE, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\nNone\n", done.stderr


#: A driver whose list has every number that a process of a new PID namespace may get.
PYNVML = """
from tests.fakes.fake_nvml import GIB, FakeGpu, FakeNvml

_machine = FakeNvml(FakeGpu("GPU-a", free_bytes=20 * GIB, compute=dict.fromkeys(range(1, 3000), 3 * GIB)))
globals().update(
    {name: getattr(_machine, name) for name in dir(_machine) if name.lower().startswith("nvml")}
)
"""

CONTAINED = """
import time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="1GiB", framework="none", enforce="kill"))
def small():
    # For some readings of the devices.
    time.sleep(1)
    return "kept"


@flow(task_runner=GPUTaskRunner(devices="nvml"))
def contained():
    future = small.submit()
    print("RESULT", future.task_run_id, future.result())


contained()
"""


@needs_unshare
def test_memory_under_a_number_that_equals_a_childs_by_chance_is_not_the_tasks(
    place: Workplace,
) -> None:
    place.write("pynvml.py", PYNVML)
    place.write("contained.py", CONTAINED)
    command = [*UNSHARE, "--kill-child", "--mount-proc", sys.executable, "contained.py"]
    done = subprocess.run(
        command, cwd=place.folder, env=place.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    _, task_run_id, value = done.stdout.split()
    assert value == "kept"
    (report,) = artifacts(task_run_id=UUID(task_run_id), count=1)
    assert report.metadata_ is not None
    assert report.metadata_["source"] == "framework"
    assert report.metadata_["peak_process_bytes"] == "0"
    assert report.metadata_["leaked_bytes"] == "unknown"


#: A parent with a warm process and its fork, a fresh process that has started others, and a standby. Prints the process
#: ids of the guardian, the source of forks, the standby and the two tasks.
PARENT = """
import os, sys, time
from tests.process import bodies
from tests.process.rig import Rig, spec_of
from tests.process.test_forks import FORKED, run, source_pid
from tests.process.warm import Warm
folder = sys.argv[1]
rig = Rig()
warm = Warm(rig)
forked = run(warm, spec_of(bodies.wait_long, f"{folder}/forked"))
source = source_pid(warm)
fresh = rig.start(bodies.start_others, folder, "live")
warm.announce()
standby = max(warm.wait_ready(2), key=lambda pid: pid != source)
guardian = rig.launcher._guardian.process.pid
print(guardian, source, standby, forked.pid, fresh.pid, flush=True)
time.sleep(600)
"""


@dataclass
class Parent:
    """A process with all kinds of processes, and their ids."""

    process: subprocess.Popen[str]
    guardian: int
    source: int
    standby: int
    forked: int
    fresh: int
    #: Started by the fresh one: in its group, in a session of its own, as a daemon.
    others: list[int]

    @property
    def pids(self) -> list[int]:
        """All of them, without the parent."""
        named = [self.guardian, self.source, self.standby, self.forked, self.fresh]
        return [*named, *self.others]

    def is_gone(self) -> bool:
        """Whether none is left."""
        return not any(map(is_alive, self.pids))


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        ready = [tmp_path / "forked", tmp_path / "ready"]
        assert eventually(lambda: all(path.exists() for path in ready))
        others = [int(word) for word in (tmp_path / "pids").read_text().split()]
        guardian, source, standby, forked, fresh = pids
        pids += others
        yield Parent(process, guardian, source, standby, forked, fresh, others)
    finally:
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_stopped_processes_do_not_outlive_a_parent_that_was_killed(parent: Parent) -> None:
    for pid in (parent.source, parent.standby, parent.forked, parent.fresh, *parent.others):
        os.kill(pid, signal.SIGSTOP)
    parent.process.kill()
    assert eventually(parent.is_gone)


def test_nothing_outlives_a_parent_that_was_killed_while_its_guardian_was_stopped(
    parent: Parent,
) -> None:
    os.kill(parent.guardian, signal.SIGSTOP)
    parent.process.kill()
    assert eventually(parent.is_gone)


def test_nothing_outlives_a_parent_that_was_killed_with_its_guardian(parent: Parent) -> None:
    # It must not start another one.
    os.kill(parent.process.pid, signal.SIGSTOP)
    os.kill(parent.guardian, signal.SIGKILL)
    parent.process.kill()
    assert eventually(parent.is_gone)


#: A flow of forks. Its argument says what becomes of the warm process, which imports a library for ever.
FORKS = """
import os, pathlib, signal, sys, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.processes.standby_pool import standby_pool
from prefect_gpu.processes.launcher import process_launcher

sys.path.append(os.path.abspath("site-packages"))
WHAT = sys.argv[1]


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)


@task(tags=gpu(memory="64MiB", framework="none"))
def work(index):
    if index < 0:
        import slow_library
    return os.getppid() == os.getpid()


@flow(task_runner=GPUTaskRunner(devices="host", start_method="auto", reports=False))
def forks():
    if WHAT.startswith("imports"):
        futures = work.map([0, 1, 2])
        wait_for("being-imported")
        if WHAT.startswith("imports, "):
            # From now on it can be imported.
            pathlib.Path("import-at-once").touch()
            signum = signal.SIGKILL if "killed" in WHAT else signal.SIGSTOP
            os.kill(standby_pool().pids[0], signum)
            return futures.result()
        raise ValueError("the flow ends here")
    first = work.submit(0).result()
    for pid in (process_launcher()._guardian.process.pid, *standby_pool().pids):
        os.kill(pid, signal.SIGSTOP)
    if WHAT == "at its end":
        return [first]
    return [first, *work.map([1, 2]).result()]


print("RESULT", forks())
"""

SLOW = """
import os, pathlib, time
pathlib.Path("being-imported").touch()
while not os.path.exists("import-at-once"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "when", ["before other tasks", pytest.param("at its end", marks=pytest.mark.slow)]
)
def test_a_stopped_guardian_and_source_hold_no_flow_up_and_do_not_outlive_it(
    place: Workplace, when: str
) -> None:
    place.write("forks.py", FORKS)
    done = place.run("forks.py", when)
    assert "RESULT [False" in done.stdout
    assert not place.processes()


@pytest.mark.parametrize("then", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_source_of_forks_that_goes_as_it_imports_loses_no_task(
    place: Workplace, then: str
) -> None:
    place.write("forks.py", FORKS)
    place.write("site-packages/slow_library.py", SLOW)
    done = place.run("forks.py", f"imports, is {then}")
    assert "RESULT [False, False, False]" in done.stdout
    assert not place.processes()


def test_a_flow_that_fails_does_not_wait_for_a_source_of_forks_that_imports_for_ever(
    place: Workplace,
) -> None:
    place.write("forks.py", FORKS)
    place.write("site-packages/slow_library.py", SLOW)
    done = place.run("forks.py", "imports for ever", expect=1)
    assert "the flow ends here" in done.stderr
    assert not place.processes()


#: Flows of tasks that run into their timeouts, one for each way to start a process.
TIMEOUTS = """
import time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="64MiB", framework="none"), timeout_seconds=0.01)
def sleeps(index):
    time.sleep(600)


@flow
def times_out():
    futures = sleeps.map(range(4))
    futures.wait()
    return [future.state.name for future in futures]


for options in (
    {"start_method": "spawn", "standby": 0},
    {"start_method": "spawn", "standby": 2},
    {"start_method": "auto"},
):
    runner = GPUTaskRunner(devices="simulated:2x1GiB", reports=False, **options)
    print("RESULT", *times_out.with_options(task_runner=runner)())
"""


@pytest.mark.slow
def test_timeouts_of_a_hundredth_of_a_second_end_each_kind_of_process(place: Workplace) -> None:
    place.write("timeouts.py", TIMEOUTS)
    done = place.run("timeouts.py")
    assert done.stdout.splitlines() == ["RESULT" + 4 * " TimedOut"] * 3
    assert not place.processes()


#: A flow whose tasks kill all standbys that wait for their siblings.
KILLERS = """
import contextlib, os, signal, time
import psutil
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.processes.launch_spec import STANDBY_TITLE


@task(tags=gpu(memory="64MiB", framework="none"))
def kills(index):
    killed = 0
    for process in psutil.Process(os.getppid()).children():
        # One that the task before killed may end meanwhile.
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and STANDBY_TITLE in process.cmdline():
                process.kill()
                killed += 1
    return index, killed


@flow(task_runner=GPUTaskRunner(devices="simulated:1x1GiB", start_method="spawn", standby=3, reports=False, max_processes=1))
def fight():
    return kills.map(range(6)).result()


print("RESULT", fight())
"""


def test_tasks_that_kill_the_standbys_of_their_siblings_fail_no_other_task(
    place: Workplace,
) -> None:
    place.write("killers.py", KILLERS)
    done = place.run("killers.py")
    ends = ast.literal_eval(done.stdout.partition("RESULT ")[2])
    assert [index for index, _ in ends] == list(range(6))
    assert sum(killed for _, killed in ends) > 0
    assert not place.processes()


#: A flow with tasks in fresh processes and in standbys, which ignore what asks them to end.
STUBBORN = """
import os, signal, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

FOLDER = os.path.dirname(os.path.abspath(__file__))


@task(tags=gpu(memory="64MiB", framework="none"))
def stays(index):
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    with open(os.path.join(FOLDER, "pids.txt"), "a") as file:
        file.write(f"child {os.getpid()}\\n")
    while True:
        time.sleep(600)


method = os.environ.get("METHOD", "spawn")
ahead = 1 if method == "spawn" else 0


@flow(task_runner=GPUTaskRunner(devices="simulated:1x1GiB", standby=ahead, start_method=method))
def stubborn():
    return stays.map(range(3)).result()


if __name__ == "__main__":
    stubborn.with_options(flow_run_name=os.environ["RUN_NAME"])()
"""


@pytest.mark.parametrize(
    "interrupts",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(20, marks=pytest.mark.slow)],
)
def test_ctrl_c_again_and_again_ends_bodies_that_ignore_it(
    place: Workplace, interrupts: int
) -> None:
    place.write("stubborn.py", STUBBORN)
    name = place.environment["RUN_NAME"] = f"interrupted-{place.token}"
    process = place.start("stubborn.py", stdout=subprocess.DEVNULL)
    read_pids(place, 3, process)
    for _ in range(interrupts):
        # As a terminal does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.communicate(timeout=DEADLOCK_S)
    place.wait_until_gone(DEADLOCK_S)
    assert process.returncode != 0
    if interrupts == 1:
        wait_for_states(name, {"CRASHED"}, {"CRASHED"}, 3)


@pytest.mark.slow
def test_sigterm_ends_a_flow_whose_bodies_ignore_it(place: Workplace) -> None:
    place.write("stubborn.py", STUBBORN)
    name = place.environment["RUN_NAME"] = f"terminated-{place.token}"
    process = place.start("stubborn.py", stdout=subprocess.DEVNULL)
    read_pids(place, 3, process)
    process.terminate()
    process.communicate(timeout=DEADLOCK_S)
    place.wait_until_gone(DEADLOCK_S)
    wait_for_states(name, {"CRASHED"}, {"CRASHED"}, 3)


#: A task that takes more of the machine's memory than its control group has, and one after it.
GREEDY = """
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="64MiB", framework="none"))
def takes(size):
    return len(bytearray(size))


@flow(task_runner=GPUTaskRunner(devices="simulated:1x1GiB", reports=False))
def greedy():
    first = takes.submit(8 << 30)
    first.wait()
    print("FIRST", first.state.name, first.state.message)
    print("SECOND", takes.submit(1).result())


greedy()
"""


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group with a gibibyte of memory."""
    for hierarchy, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        folder = Path("/sys/fs/cgroup", hierarchy, f"prefect-gpu-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(GIB))
            with contextlib.suppress(OSError):
                # Swap would hold the rest.
                (folder / "memory.swap.max").write_text("0")
            with contextlib.suppress(OSError):
                (folder / "memory.memsw.limit_in_bytes").write_text(str(GIB))
            yield folder
            return
        except OSError as error:
            reason = error
        finally:
            assert eventually(functools.partial(remove, folder))
        pytest.skip(f"no memory limit can be set for a control group here: {reason}")
    pytest.skip("no control group can be made here")


def remove(folder: Path) -> bool:
    try:
        folder.rmdir()
        return True
    except OSError:
        return False


def test_a_task_that_the_kernel_ends_for_lack_of_memory_fails_alone_and_says_so(
    place: Workplace, control_group: Path
) -> None:
    program = place.write("greedy.py", GREEDY)
    done = subprocess.run(
        [
            "sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(control_group / "cgroup.procs"),
            sys.executable,
            str(program),
        ],
        cwd=place.folder,
        env=place.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("FIRST Crashed")
    assert "the kernel's counter of out-of-memory kills rose" in first
    assert second == "SECOND 1"


#: Bodies that fork after their framework has computed, and leave the forks behind.
FORKERS = """
import importlib.util, multiprocessing, os, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu


def sleep_on(sizes):
    taken = [bytearray(size) for size in sizes]
    time.sleep(600)


def leave_forks():
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=sleep_on, args=([50 << 20],)) for _ in range(2)]
    for other in others:
        other.start()
    # Its end is not waited for.
    multiprocessing.process._children.clear()
    forked = os.fork()
    if not forked:
        sleep_on([50 << 20])
    return [forked, *(other.pid for other in others)]


@task(tags=gpu(memory="2GiB", framework="torch"))
def torch_forks():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    total = float(torch.ones(256, 256).matmul(torch.ones(256, 256)).sum())
    data = TensorDataset(torch.arange(64.0))
    loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    globals()["kept"] = batches
    return total, [*leave_forks(), *(worker.pid for worker in batches._workers)]


@task(tags=gpu(memory="2GiB", framework="tensorflow"))
def tensorflow_forks():
    import tensorflow

    return float(tensorflow.reduce_sum(tensorflow.ones((256, 256)))), leave_forks()


@flow
def forkers():
    # Before the flow's end, which would end them too.
    done = [torch_forks.submit().result(), tensorflow_forks.submit().result()]
    pids = [pid for _, pids in done for pid in pids]
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        time.sleep(0.05)
    return [total for total, _ in done], len(pids)


for options in ({"start_method": "spawn", "standby": 1}, {"start_method": "auto"}):
    if importlib.util.find_spec("tensorflow") is None or options["start_method"] == "auto":
        tensorflow_forks = torch_forks
    runner = GPUTaskRunner(devices="host", reports=False, **options)
    print("RESULT", *forkers.with_options(task_runner=runner)())
"""


@pytest.mark.slow
def test_forks_of_bodies_that_use_torch_and_tensorflow_are_gone_after_their_task(
    place: Workplace,
) -> None:
    pytest.importorskip("torch")
    place.write("forkers.py", FORKERS)
    done = place.run("forkers.py")
    torch_twice = "RESULT [16777216.0, 16777216.0] 10"
    both = "RESULT [16777216.0, 65536.0] 8"
    first = torch_twice if importlib.util.find_spec("tensorflow") is None else both
    assert done.stdout.splitlines() == [first, torch_twice]
    assert not place.processes()


DEPLOY = """
import os
from prefect import flow

found = flow.from_source(source=os.getcwd(), entrypoint="stubborn.py:stubborn")
found.deploy(name="stubborn", work_pool_name=os.environ["RUN_NAME"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "auto"])
def test_runs_that_are_killed_or_cancelled_under_a_process_worker_leave_only_the_worker(
    place: Workplace, method: str
) -> None:
    place.environment["METHOD"] = method
    name = place.environment["RUN_NAME"] = f"cancelled-{place.token}"
    place.environment["PREFECT_WORKER_QUERY_SECONDS"] = "1"
    place.write("stubborn.py", STUBBORN)
    place.run("-m", "prefect", "work-pool", "create", name, "--type", "process")
    place.run("-c", DEPLOY)
    worker = place.start(
        "-m", "prefect", "worker", "start", "--pool", name, stdout=subprocess.DEVNULL
    )
    run = ("-m", "prefect", "deployment", "run", "stubborn/stubborn", "--flow-run-name")
    try:
        place.run(*run, "killed")
        pids = read_pids(place, 3, worker)
        flow = psutil.Process(next(iter(pids)))
        while flow.ppid() != worker.pid:
            # Between them is the source of forks.
            flow = psutil.Process(flow.ppid())
        flow.kill()
        # The worker lives on, and starts the next run.
        wait_for(lambda: set(place.processes()) == {worker.pid})
        (place.folder / "pids.txt").unlink()
        place.run(*run, name)
        pids = read_pids(place, 3, worker)
        with get_client(sync_client=True) as client:
            place.run("-m", "prefect", "flow-run", "cancel", str(read_run(client, name).id))
        wait_for(lambda: not any(map(is_alive, pids)))
        wait_for_states(name, {"CANCELLED"}, {"CANCELLED"}, 3)
        wait_for(
            lambda: set(place.processes()) == {worker.pid}, explain=lambda: str(place.processes())
        )
    finally:
        worker.terminate()
        worker.communicate()
