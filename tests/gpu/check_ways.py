"""Every way to start a flow: did its tasks run on the GPU, and did the process that started it stay away from it?

    python -m tests.gpu.check_ways

The same tasks, with classes and helpers defined beside them, are started from a script without a `__main__` guard, from
standard input, with `python -m`, from a notebook, by a worker and by `flow.serve`. Another flow finds its result in
Prefect's cache; in another one a task waits for memory, and a second client reads its state. A reader of NVML that knows
nothing of the package looks on: it may see the tasks' processes and no other. Last, a flow is killed while eight of its
tasks hold memory (`check_many_flows`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    GIB,
    Observer,
    installed,
    read_processes,
    read_task_runs,
    run,
    run_flow,
    say,
    size,
    table,
)
from tests.gpu.check_many_flows import check_kill
from tests.integration import engine_api as api
from tests.integration.programs import (
    CALL,
    Workplace,
    make_tasks,
    run_cells,
    wait_for,
    workplace,
)

#: What each task takes of the device.
HELD_BYTES = GIB

#: Seconds that one program may take here.
LIMIT_S = 120.0

_WORK = f"""
import time
import torch
held = torch.ones({HELD_BYTES}, dtype=torch.uint8, device="cuda")
assert int(held[-1]) == 1
# The runner reads NVML every 0.25 s.
time.sleep(0.6)
"""

_CACHED = """
import os

from prefect import flow, task
from prefect.cache_policies import INPUTS
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, gpu

with open(os.environ["MODULE_RUNS"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n")


@task(tags=gpu(TAGS), cache_policy=INPUTS, persist_result=True)
def square(x):
    WORK
    return x * x, os.getpid()


@flow(task_runner=GPUTaskRunner(devices=DEVICES))
def cached():
    print("FLOW", flow_run.id)
    return square.submit(12).result()


first, second = cached(), cached()
assert first == second and first[0] == 144, (first, second)
print("RESULT the second run has the first one's value")
"""

_WAITING = """
import os
import time

from prefect import flow, task
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, gpu

with open(os.environ["MODULE_RUNS"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n")


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.05)


@task(tags=gpu(TAGS))
def hold():
    WORK
    open("holds", "w").close()
    wait_for("let-go")


@task(tags=gpu(TAGS))
def follow():
    WORK


@flow(task_runner=GPUTaskRunner(devices=DEVICES))
def crowd():
    print("FLOW", flow_run.id)
    holds = hold.submit()
    wait_for("holds")
    follows = follow.submit()
    with open("follows.new", "w") as file:
        file.write(str(follows.task_run_id))
    os.rename("follows.new", "follows")
    holds.result(), follows.result()


crowd()
"""

_DEPLOY = """
import sys

from prefect import flow

flow.from_source(source=sys.argv[1], entrypoint="deployed.py:host_flow").deploy(
    name="by-worker", work_pool_name=sys.argv[2]
)
"""

_SERVE = '\nif __name__ == "__main__":\n    host_flow.serve(name="served")\n'


@dataclass(frozen=True)
class Seen:
    """What a way of starting a flow came to."""

    #: Its flow runs.
    flow_run_ids: list[str]
    #: What it printed of its result.
    result: str
    #: Ids of the processes that started it (the flow's own, a notebook's kernel, a worker), and of others
    #: that imported the flow's module: tasks' processes and standbys.
    parents: list[int]
    #: Task runs that had a process of their own.
    processes: int = 2
    #: Of these, the ones that took memory.
    on_device: int = 2


@dataclass(frozen=True)
class Row:
    """What was seen of a way, from inside and from outside."""

    result: str
    #: Bytes that NVML showed at most for each process of a task that took memory.
    peaks: list[int]
    #: Processes that started the flow and that NVML listed.
    listed_parents: list[int]
    seconds: float
    problems: list[str]


class Way:
    """Programs of one way, in a folder of their own, on some devices."""

    def __init__(self, place: Workplace, devices: str) -> None:
        self.place = place
        self._devices = devices
        self._on_gpu = devices == "nvml"

    def tasks(self) -> str:
        """Return the program of tasks that every way starts."""
        return make_tasks(self._devices, self._tags("3GiB"), self._work())

    def program(self, text: str, memory: str = "3GiB") -> str:
        """Fill in a program of this module."""
        work = self._work().strip().replace("\n", "\n    ")
        filled = text.replace("WORK", work).replace("DEVICES", repr(self._devices))
        return filled.replace("TAGS", self._tags(memory))

    def parents(self) -> list[int]:
        """Return the ids of the processes that ran the module level of the program."""
        return [pid for pid, _ in self.place.runs()]

    def seen(self, printed: str, **counts: int) -> Seen:
        """Read what a program printed."""
        (result,) = _after("RESULT ", printed)
        return Seen(_after("FLOW ", printed), result, self.parents(), **counts)

    def _tags(self, memory: str) -> str:
        framework = "torch" if self._on_gpu else "none"
        small = memory if memory.endswith("%") or self._on_gpu else "64MiB"
        return f'memory="{small}", framework="{framework}"'

    def _work(self) -> str:
        return _WORK if self._on_gpu else "pass"


def _after(word: str, printed: str) -> list[str]:
    return [line[len(word) :] for line in printed.splitlines() if line.startswith(word)]


def _run(way: Way, *arguments: str, **options: Any) -> Seen:
    return way.seen(way.place.run(*arguments, limit_s=LIMIT_S, **options).stdout)


def script(way: Way) -> Seen:
    way.place.write("script.py", way.tasks() + CALL)
    return _run(way, "script.py")


def standard_input(way: Way) -> Seen:
    return _run(way, "-", stdin=way.tasks() + CALL)


def module(way: Way) -> Seen:
    way.place.write("package/__init__.py", "")
    way.place.write("package/flows.py", way.tasks() + CALL)
    return _run(way, "-m", "package.flows")


def notebook(way: Way) -> Seen:
    return way.seen("".join(run_cells(way.place, [way.tasks(), CALL])))


def worker(way: Way) -> Seen:
    place, pool = way.place, f"pool-{way.place.token[:8]}"
    place.write("deployed.py", way.tasks())
    place.write("deploy.py", _DEPLOY)
    place.run("-m", "prefect", "work-pool", "create", pool, "--type", "process")
    place.run("deploy.py", str(place.folder), pool)
    arguments = ("-m", "prefect", "worker", "start", "--pool", pool, "--type", "process")
    return _deployed(way, "host-flow/by-worker", *arguments)


def serve(way: Way) -> Seen:
    way.place.write("served.py", way.tasks() + _SERVE)
    return _deployed(way, "host-flow/served", "served.py")


def _deployed(way: Way, name: str, *arguments: str) -> Seen:
    """Start what runs deployments, have it run one, and end it."""
    from prefect.client.orchestration import get_client
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    way.place.environment |= {
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
    }
    said = way.place.folder / "said.txt"

    def exists() -> bool:
        with contextlib.suppress(ObjectNotFound), get_client(sync_client=True) as client:
            client.read_deployment_by_name(name)
            return True
        return process.poll() is not None

    with said.open("w") as file:
        process = way.place.start(*arguments, stdout=file, stderr=file)
        try:
            wait_for(exists, LIMIT_S, said.read_text, interval_s=0.2)
            flow_run: Any = run_deployment(name, timeout=LIMIT_S, poll_interval=0.5)
            state = flow_run.state
            if not state.is_completed():
                raise AssertionError(f"{state!r}\n{said.read_text()[-5000:]}")
            result = state.result()
            # The last reports are published after the run is shown as Completed, and a worker that is
            # stopped kills the flow's process with SIGKILL.
            read_processes(str(flow_run.id), 2)
        finally:
            process.terminate()
            process.wait(30)
    return Seen([str(flow_run.id)], result, [process.pid, *way.parents()])


def cache(way: Way) -> Seen:
    way.place.write("cached.py", way.program(_CACHED))
    seen = way.seen(way.place.run("cached.py", limit_s=LIMIT_S).stdout, processes=1, on_device=1)
    (again,) = read_task_runs(seen.flow_run_ids[1]).values()
    if again["state_name"] != "Cached":
        raise AssertionError(f"the second task run is {again['state_name']}")
    return seen


def waiting(way: Way) -> Seen:
    """Read a task run's state while it waits, as any client of the API may."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    place = way.place
    place.write("waiting.py", way.program(_WAITING, "60%"))
    said, follows = place.folder / "said.txt", place.folder / "follows"
    states: list[Any] = []
    with said.open("w") as file, get_client(sync_client=True) as client:
        process = place.start("waiting.py", stdout=file, stderr=file)
        try:
            wait_for(follows.exists, LIMIT_S, said.read_text)
            run_id = UUID(follows.read_text())

            def awaits() -> bool:
                # At first the API knows no such run, then it knows of no state.
                with contextlib.suppress(ObjectNotFound):
                    states.append(client.read_task_run(run_id).state)
                return any(state is not None and state.name == "AwaitingGPU" for state in states)

            wait_for(awaits, LIMIT_S, lambda: f"last: {states[-1:]}", interval_s=0.2)
            place.write("let-go", "")
            process.wait(LIMIT_S)
        finally:
            process.kill()
    names = api.names(run_id)
    if names != ["Pending", "Running", "AwaitingGPU", "Starting", "Running", "Completed"]:
        raise AssertionError(f"its states are {names}; {said.read_text()[-5000:]}")
    seen = states[-1]
    result = f"{seen.type.name} {seen.name}: {seen.message}"
    return Seen(_after("FLOW ", said.read_text()), result, way.parents())


#: By what a person would call it.
WAYS: dict[str, Callable[[Way], Seen]] = {
    "a script without a __main__ guard": script,
    "python - (standard input)": standard_input,
    "python -m package.flows": module,
    "a cell of a Jupyter notebook": notebook,
    "a deployment, by a process worker": worker,
    "a deployment, by flow.serve": serve,
    "a result from the cache": cache,
    "a task that waits for memory": waiting,
}


def missing_for(start: Callable[[Way], Seen]) -> str:
    """Return why a way cannot be tried here; empty: it can."""
    needed = ("ipykernel", "jupyter_client") if start is notebook else ()
    missing = [name for name in needed if not installed(name)]
    return f"{' and '.join(missing)} cannot be imported" if missing else ""


def measure_context(devices: str) -> None:
    """Run a task, so that PyTorch's context is measured: that takes a process of its own, which no report names."""

    def use() -> int:
        import torch

        return int(torch.ones(1, device="cuda")) if devices == "nvml" else 0

    first = task(name="first", tags=gpu(memory="3GiB", framework="torch"))(use)
    run_flow("first", lambda: first.submit().result(), devices)


def look(start: Callable[[Way], Seen], folder: Path, devices: str) -> Row:
    """Start a flow in one way, and compare what it says with what NVML showed.

    Args:
        start: One of `WAYS`.
        folder: An empty one.
        devices: Of its runner; nothing is on a GPU with others than `nvml`.
    """
    began_s = time.monotonic()
    with Observer() as observer, workplace(folder, os.environ["PREFECT_API_URL"]) as place:
        # As a user has it.
        del place.environment["PREFECT_INTEGRATIONS_GPU_STANDBY"]
        seen = start(Way(place, devices))
    seconds = time.monotonic() - began_s
    reports = []
    for flow_run_id in seen.flow_run_ids:
        least = seen.processes - len(reports)
        reports += [r for rs in read_processes(flow_run_id, least, 10.0).values() for r in rs]
    outcomes = [report["outcome"] for report in reports]
    peaks = [observer.peaks[report.pid] for report in reports if report.pid in observer.peaks]
    own = {report.pid for report in reports}
    parents = set(seen.parents) - own
    listed_parents = sorted(parents & set(observer.peaks))
    others = set(observer.peaks) - own - parents
    problems = []
    if len(outcomes) != seen.processes:
        problems.append(f"{len(outcomes)} processes, expected {seen.processes}: {outcomes}")
    if len([peak for peak in peaks if peak > HELD_BYTES]) != seen.on_device:
        problems.append(f"NVML showed {[size(p) for p in peaks]} MiB for its tasks' processes")
    if listed_parents:
        problems.append(
            f"NVML listed {listed_parents}, of {sorted(parents)} which started the flow"
        )
    if others:
        problems.append(f"NVML listed {sorted(others)}, which no report names")
    if not parents:
        problems.append("nothing is known of the process that started it")
    return Row(seen.result, peaks, listed_parents, seconds, problems)


def check(options: argparse.Namespace) -> list[str]:
    """Try each way, whatever becomes of the others."""
    problems, rows = [], []
    measure_context(options.devices)
    for name, start in WAYS.items():
        if missing := missing_for(start):
            rows.append((name, "-", "-", f"not tried: {missing}", "-"))
            continue
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                row = look(start, Path(folder), options.devices)
        except Exception as error:
            say(f"{name}: {traceback.format_exc()}")
            problems.append(f"{name}: {type(error).__name__}: {error}"[:500])
            rows.append((name, "?", "?", type(error).__name__, "-"))
            continue
        say(f"{name}: seen after {row.seconds:.0f} s")
        problems += [f"{name}: {problem}" for problem in row.problems]
        shown = ", ".join(size(peak) for peak in sorted(row.peaks)) or "none"
        parents = ", ".join(map(str, row.listed_parents)) or "none"
        rows.append((name, shown, parents, row.result, f"{row.seconds:.0f}"))
    heads = ("started from", "tasks in NVML", "parents in NVML", "result", "seconds")
    table(heads, rows)
    say(
        f"tasks in NVML: MiB at most of each process that took {size(HELD_BYTES)} MiB. parents: the"
    )
    say("flow's own process, a notebook's kernel, a worker. seconds: with all that was started")
    with tempfile.TemporaryDirectory() as ledger:
        return problems + check_kill(options, ledger)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=400, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
