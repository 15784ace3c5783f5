"""How long from `submit` to a task's first line with its GPU ready, and what stays on the device?

Ours with forks of a warm process (the default), with standbys (`start_method="spawn"`), and with fresh
interpreters (`standby=0` in addition), beside what else a user has: plain `multiprocessing` without Prefect (spawn, or
forks of its fork server, which has imported the framework), Prefect's `ProcessPoolTaskRunner`, its
`ThreadPoolTaskRunner`, and `RayTaskRunner` of prefect-ray with a tenth of a GPU. The module of the task's
function does not import Prefect, except in the rows that say so: it is imported with the function.

    python benchmarks/dispatch.py --out dispatch.json          # under four minutes
    python benchmarks/dispatch.py --frameworks tensorflow --rows auto spawn
    python benchmarks/dispatch.py --frameworks training        # ready after a step with an optimizer
    python benchmarks/dispatch.py --tiny                       # that it runs, on the CPU

Fair to all: one running Prefect server whose URL everybody has, compiled bytecode, each row in a fresh
process. A row submits a first task, `--later` tasks one after another, each when no child of the flow
computes any more, `--burst` tasks at once, and `--long` tasks at once that hold the device for a second.
Times are `time.time()`: in the submitter before `submit`, in the body's first line, after the framework's
import, and when a first tensor is on the device and it has synchronised. Then the body takes 4 GiB and
lets go. "Back" is the time from the result until NVML lists no more for the flow's process and its
children than before the first task. If that takes more than a second, and 0.1 s for each further task
that ended at once, "left" is the memory that they hold then. "Children's CPU" is the CPU time of all child
processes of the row, divided by its tasks. CUDA's own start is the plain process's where that row is
measured: TensorFlow and JAX start under a policy of ours before the first line, so that part of it is not
seen in the body.

What matters most is measured first (ours and spawn, PyTorch, then TensorFlow), then the other peers,
then everything again, until `--repeats` or `--budget` is reached. What had no time is said.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import resource
import statistics
import time
from multiprocessing import forkserver
from typing import Any

import _bound
import _common
import _devices

ROWS = {
    "auto": "GPUTaskRunner, the default",
    "standby": "GPUTaskRunner, start_method=spawn",
    "cold": "GPUTaskRunner, cold",
    "spawn": "multiprocessing spawn, no Prefect",
    "fork": "multiprocessing forkserver, no Prefect",
    "standby-prefect": "GPUTaskRunner, start_method=spawn; module imports Prefect",
    "cold-prefect": "GPUTaskRunner, cold; module imports Prefect",
    "spawn-prefect": "multiprocessing spawn; module imports Prefect",
    "pool": "ProcessPoolTaskRunner",
    "threads": "ThreadPoolTaskRunner",
    "ray": "RayTaskRunner, num_gpus=0.1",
}
#: Modules by name in `--frameworks`. "training" is PyTorch, ready after its first step with an optimizer.
FRAMEWORKS = {
    "torch": "torch",
    "training": "torch",
    "tensorflow": "tensorflow",
    "jax": "jax",
    "none": "",
}

#: Measured first: what this package claims, and the plain process that it is compared with.
FIRST = ("auto", "standby", "cold", "spawn", "fork")

#: Seconds that a row takes on an H200 before it was measured here, to plan within the budget.
GUESS_S = {"torch": 25.0, "training": 30.0, "tensorflow": 45.0, "jax": 30.0, "none": 15.0}
GUESS_RAY_S = 60.0

MIB = _devices.MIB
GPU_BYTES = 4096 * MIB
HOST_BYTES = 64 * MIB

#: Memory and seconds of each of the `--long` tasks, of which two dozen fit on 80 GB.
LONG_BYTES = 1024 * MIB
LONG_S = 1.0

#: Seconds after a task's result within which its memory must be free; otherwise it leaked.
SETTLE_S = 1.0

#: The same for each further task that ended at once: the driver ends their contexts one after another.
SETTLE_EACH_S = 0.1

#: Longest pause, in seconds, between the tasks of a row without standbys.
OTHERS_PAUSE_S = 2.0

#: Most seconds from `submit` until a task with a standby is ready, beyond CUDA's own start.
AIM_S = 0.15


def unavailable_reason(row: str, framework: str) -> str:
    """Return why a row cannot be measured on this machine; empty if it can."""
    if FRAMEWORKS[framework] and not _common.installed(FRAMEWORKS[framework]):
        return f"not installed: {framework}"
    if row == "ray" and not (_common.installed("ray") and _common.installed("prefect_ray")):
        return "not installed: prefect-ray"
    return _common.runner_lacks("standby") if row.startswith("standby") else ""


def make_runner(row: str, framework: str, on_gpu: bool) -> tuple[Any, list[str]]:
    """Make the task runner of a row, and the tags that its task has."""
    from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

    from prefect_gpu import GPUTaskRunner, gpu

    if row == "pool":
        return ProcessPoolTaskRunner(), []
    if row == "threads":
        return ThreadPoolTaskRunner(), []
    if row == "ray":
        return _common.ray_runner(1), []
    more: dict[str, Any] = {} if row == "auto" else {"start_method": "spawn"}
    if row == "cold":
        more["standby"] = 0
    tags = gpu(memory="6GiB" if on_gpu else "1GiB", framework=framework)
    return GPUTaskRunner(devices="nvml" if on_gpu else "host", **more), list(tags)


class Row:
    """Measures one row in this process, and tells each task as it ends."""

    def __init__(self, row: str, framework: str, on_gpu: bool) -> None:
        self._row, self._framework, self._on_gpu = row, framework, on_gpu
        self._kind, _, more = row.partition("-")
        which = "_bodies_training" if framework == "training" else "_bodies"
        self._bodies = importlib.import_module("_bodies_prefect" if more else which)
        #: In `gpu:framework=`.
        self._tag = "torch" if framework == "training" else framework

    def measure(self, later: int, burst: int, long: int, pause_s: float) -> None:
        """Run the first task, later ones, the burst and the long ones."""
        if self._kind in ("spawn", "fork"):
            context: Any = multiprocessing.get_context("spawn")
            if self._kind == "fork":
                context = multiprocessing.get_context("forkserver")
                modules = [FRAMEWORKS[self._framework], self._bodies.__name__]
                context.set_forkserver_preload([name for name in modules if name])

            def start(is_long: bool = False) -> Any:
                queue = context.SimpleQueue()
                process = context.Process(
                    target=self._bodies.spawned, args=(queue, *self._arguments(is_long))
                )
                process.start()

                def result() -> dict[str, float]:
                    found = queue.get()
                    process.join()
                    return found

                return result

            self._run(start, later, burst, long, pause_s)
            self._tell_cpu(1 + later + burst + long)
            return
        from prefect import flow, task

        from prefect_gpu import gpu
        from prefect_gpu.processes.standby_pool import standby_pool

        runner, tags = make_runner(self._kind, self._tag, self._on_gpu)
        work = task(self._bodies.first_use, name="work", tags=tags)

        long_tags = gpu(memory="2GiB" if self._on_gpu else "1GiB", framework=self._tag)
        long_work = work.with_options(tags=list(long_tags) if tags else [])

        def submit(is_long: bool = False) -> Any:
            submitted, arguments = long_work if is_long else work, self._arguments(is_long)
            if self._row != "ray":
                return submitted.submit(*arguments).result
            with _common.ray_options(num_gpus=(0.04 if is_long else 0.1) if self._on_gpu else 0):
                return submitted.submit(*arguments).result

        @flow(task_runner=runner)
        def dispatch() -> None:
            self._run(submit, later, burst, long, pause_s)

        dispatch()
        # Forks count once their source has ended, which would wait for the next flow.
        standby_pool().shut_down()
        self._tell_cpu(1 + later + burst + long)

    def _arguments(self, is_long: bool) -> tuple[Any, ...]:
        if is_long:
            return self._framework, self._on_gpu, LONG_BYTES if self._on_gpu else HOST_BYTES, LONG_S
        return self._framework, self._on_gpu, GPU_BYTES if self._on_gpu else HOST_BYTES

    def _tell_cpu(self, tasks: int) -> None:
        """Tell the CPU time of all child processes that have ended, and of theirs. Ray's are none of this process."""
        if self._kind == "fork":
            # Its forks count once the server itself is reaped.
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = (used.ru_utime + used.ru_stime) / tasks
        named = {"row": self._row, "framework": self._framework, "kind": "cpu"}
        _common.tell({**named, "cpu_s": None if self._kind in ("ray", "threads") else cpu_s})

    def _run(self, start: Any, later: int, burst: int, long: int, pause_s: float) -> None:
        if self._kind not in ("auto", "standby"):
            # Nothing gets ready there; Ray's own processes are never quite idle.
            pause_s = min(pause_s, OTHERS_PAUSE_S)
        before, used_before = _devices.held_bytes(self._on_gpu), _devices.used_bytes()

        def read_left(ended: int = 1) -> dict[str, float | None]:
            began = time.monotonic()
            settle_s = SETTLE_S + SETTLE_EACH_S * (ended - 1)
            while True:
                left, passed = _devices.held_bytes(self._on_gpu) - before, time.monotonic() - began
                is_back = left <= 0
                # A host's resident memory never comes back to the byte.
                if is_back or passed > settle_s or not self._on_gpu:
                    break
                time.sleep(0.02)
            return {
                "back_s": passed if is_back else None,
                "left_bytes": left,
                "device_left_bytes": _devices.used_bytes() - used_before,
            }

        for index in range(1 + later):
            submitted = time.time()
            found = start()()
            ended = time.time()
            times = self._times("later" if index else "first", submitted, found)
            times |= {"whole_s": ended - submitted, **read_left()}
            # Every row waits: a task must not compete with what the one before left running.
            times["idle_after_s"] = _devices.wait_until_idle(pause_s)
            _common.tell(times)
        for kind, count in (("burst", burst), ("long", long)):
            began = time.time()
            started = [(time.time(), start(kind == "long")) for _ in range(count)]
            all_found = [(submitted, result()) for submitted, result in started]
            wall_s = time.time() - began
            left = read_left(count) if count else {}
            for submitted, found in all_found:
                times = self._times(kind, submitted, found)
                _common.tell({**times, "wall_s": wall_s, **left})
            if count:
                _devices.wait_until_idle(pause_s)

    def _times(self, kind: str, submitted: float, found: dict[str, float]) -> dict[str, Any]:
        return {
            "row": self._row,
            "framework": self._framework,
            "kind": kind,
            "line_s": found["line"] - submitted,
            "ready_s": found["ready"] - submitted,
            "import_s": found["import_s"],
            "init_s": found["init_s"],
            "pid": found["pid"],
        }


def order(rows: list[str], frameworks: list[str], repeats: int, seed: int) -> list[Any]:
    """Return the order of the rows: by priority, and at random within a priority."""
    shuffle = random.Random(seed)
    plan = []
    for repeat in range(repeats):
        tiers = [
            [(framework, row) for row in rows if (row in FIRST) == first]
            for first in (True, False)
            for framework in frameworks
        ]
        # With Ray last: it takes the longest.
        for tier in tiers:
            mixed = shuffle.sample(tier, len(tier))
            plan += [(repeat, *pair) for pair in sorted(mixed, key=lambda pair: pair[1] == "ray")]
    return plan


def main() -> None:
    """Measure every row that there is time for; print tables and checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument(
        "--frameworks", nargs="+", choices=tuple(FRAMEWORKS), default=["torch", "tensorflow"]
    )
    parser.add_argument("--later", type=int, default=3, help="tasks after the first, one by one")
    parser.add_argument("--burst", type=int, default=8, help="tasks at once after those; 0: none")
    parser.add_argument("--long", type=int, default=24, help="tasks of a second at once; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=15.0, help="most seconds between tasks")
    _common.add_arguments(parser, ROWS, budget_s=225.0, seed_of="the order in which rows run")
    given = parser.parse_args()
    if given.row:
        (framework,) = given.frameworks
        Row(given.row, framework, given.on_gpu).measure(
            given.later, given.burst, given.long, given.pause
        )
        return
    devices = _devices.nvidia()
    on_gpu = bool(devices) and not given.tiny
    if given.tiny:
        given.frameworks, given.later, given.burst, given.repeats = ["none"], 1, 2, 1
        given.long = 2
        # However loaded the machine is: it shows that everything runs.
        given.pause, given.budget = 1.0, 600.0

    head = {
        "versions": _common.versions("torch", "tensorflow", "ray", "prefect-ray", "nvidia-ml-py"),
        **devices,
        "on_gpu": on_gpu,
        "seed": given.seed,
    }
    print(json.dumps(head), flush=True)
    results = _common.Results(given.out, head)
    absent: dict[tuple[str, str], str] = {}
    took_s: dict[tuple[str, str], float] = {}
    left_s = lambda: given.budget - (time.monotonic() - _common.STARTED_S)  # noqa: E731
    with _common.prefect_server(given.api_url) as url:
        _common.say("the server is there")
        for repeat, framework, row in order(
            given.rows, given.frameworks, given.repeats, given.seed
        ):
            key = (framework, row)
            problem = absent.get(key) or unavailable_reason(row, framework)
            needs_s = took_s.get(key, GUESS_RAY_S if row == "ray" else GUESS_S[framework])
            if problem or left_s() < needs_s:
                # A row that was measured once is there.
                if repeat == 0:
                    absent[key] = problem or f"no time within --budget {given.budget:.0f}"
                    _common.say(f"{framework}, {ROWS[row]}: {absent[key]}")
                continue
            began = time.monotonic()
            problem = _common.stream(
                __file__,
                [
                    *("--row", row, "--frameworks", framework, "--later", str(given.later)),
                    *("--burst", str(given.burst), "--long", str(given.long)),
                    *("--pause", str(given.pause)),
                    *(["--on-gpu"] if on_gpu else []),
                ],
                url,
                max(10.0, left_s()),
                lambda found, repeat=repeat: results.add({"repeat": repeat, **found}),
                # Else TensorFlow and JAX take most of the device, in all rows but ours.
                {
                    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                },
            )
            took_s[key] = time.monotonic() - began
            if problem:
                absent[key] = problem
                results.put("problems", {", ".join(key): why for key, why in absent.items()})
            _common.say(
                f"{framework}, {ROWS[row]}: repeat {repeat}, {took_s[key]:.0f} s {problem}".rstrip()
            )
    runs = results.found["runs"]
    results.put("absent", {", ".join(key): why for key, why in absent.items()})
    results.put("summary", summarise(runs))
    checks = make_checks(runs)
    results.put("checks", [str(check) for check in checks] if on_gpu else [])
    if given.json:
        print(json.dumps(results.found, indent=1))
    what = "GPU memory by NVML" if on_gpu else "no GPU: resident memory"
    print(f"\nmedian (lowest–highest); left: {what}; on {devices.get('devices', 'no GPU')}\n")
    for framework in given.frameworks:
        print_rows(framework, runs, given.rows, absent)
    for check in checks if on_gpu else []:
        print(check)
    if not on_gpu:
        print("no GPU: nothing is judged")


def select(runs: list[dict[str, Any]], framework: str, row: str, kind: str) -> list[dict[str, Any]]:
    """Return the runs of one framework, row and kind."""
    return [r for r in runs if (r["framework"], r["row"], r["kind"]) == (framework, row, kind)]


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians by framework, row and kind."""
    keys = sorted({(r["framework"], r["row"], r["kind"]) for r in runs if r["kind"] != "cpu"})
    return {
        ", ".join(key): {
            name: statistics.median(r[name] for r in select(runs, *key))
            for name in ("line_s", "ready_s", "import_s", "init_s", "left_bytes")
        }
        for key in keys
    }


def make_checks(runs: list[dict[str, Any]]) -> list[_bound.Check]:
    """Judge what is claimed: that nothing waits but CUDA's own start, and nothing stays."""
    checks = []
    for framework in FRAMEWORKS:
        plain = select(runs, framework, "spawn", "later")
        for row in ("auto", "standby"):
            if not (later := select(runs, framework, row, "later")):
                continue
            ready_s = statistics.median(r["ready_s"] for r in later)
            ready_s -= statistics.median(r["init_s"] for r in plain or later)
            of = "spawn" if plain else "the same"
            name = f"{framework}, {row}: ready, less CUDA's own start ({of} row)"
            checks.append(_bound.Check(name, ready_s, AIM_S, "s"))
        for row in ("auto", "standby", "cold"):
            own = [
                r
                for r in runs
                if (r["framework"], r["row"]) == (framework, row) and r["kind"] != "cpu"
            ]
            if own:
                left = max(r["left_bytes"] for r in own) / MIB
                checks.append(
                    _bound.Check(f"{framework}, {row}: left after a task", left, 0, "MiB")
                )
    return checks


def print_rows(
    framework: str,
    runs: list[dict[str, Any]],
    rows: list[str],
    absent: dict[tuple[str, str], str],
) -> None:
    """Print a line for each row of one framework."""
    table = []
    for row in rows:
        first, later, burst, long, cpu = (
            select(runs, framework, row, kind)
            for kind in ("first", "later", "burst", "long", "cpu")
        )
        if not first:
            reason = absent.get((framework, row), "not measured")
            table.append([ROWS[row], reason, *([""] * 10)])
            continue
        # What burst tasks leave is read once for all of them.
        left = [r["left_bytes"] / MIB for r in (*first, *later, *burst[:1], *long[:1])]
        back = [r["back_s"] for r in (*first, *later) if r["back_s"] is not None]
        last_back = [r["back_s"] for r in long[:1] if r["back_s"] is not None]
        table.append(
            [
                ROWS[row],
                _common.spread([r["ready_s"] for r in first], 2),
                _common.spread([r["line_s"] for r in later], 3),
                _common.spread([r["ready_s"] for r in later], 3),
                _common.spread([r["init_s"] for r in later], 3),
                _common.spread([r["ready_s"] for r in burst], 2),
                _common.spread([r["wall_s"] for r in burst], 2),
                _common.spread([r["wall_s"] for r in long], 2),
                _common.spread([r["cpu_s"] for r in cpu if r["cpu_s"] is not None], 2),
                _common.spread(back, 2),
                _common.spread(last_back, 2),
                _common.spread(left, 0),
            ]
        )
    print(f"{framework}\n")
    _common.print_table(
        [
            "runner",
            "first task ready, s",
            "later: line, s",
            "ready, s",
            "of it CUDA init, s",
            "burst: ready, s",
            "all ended, s",
            "of a second: all ended, s",
            "children's CPU a task, s",
            "memory back, s",
            "of a second: back, s",
            "left, MiB",
        ],
        table,
    )
    print(flush=True)


if __name__ == "__main__":
    main()
