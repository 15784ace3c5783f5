"""How soon are forty different model evaluations done on one GPU, and how soon could they be?

Peers: a process for each model one after another (plain `multiprocessing`, no Prefect), the device to one
task at a time (`gpu:exclusive`), Ray with the fraction of the GPU's memory that a task needs, ours with
budgets from tags, ours with budgets learned in the exclusive row, and ours with neither budgets nor histories.

    python benchmarks/makespan.py --out makespan.json             # sequential, ours, what has time
    python benchmarks/makespan.py --costs makespan.json --rows exclusive learned ray
    python benchmarks/makespan.py --tiny                          # that it runs, on the CPU

The evaluations (`_evaluations.py`) take 0.5 to 40 GiB and 1 to 8 seconds each, prepare their data and
compute their metrics on the CPU, and so keep the GPU busy for a small part of their time only. That is
where sharing a device pays, and it is stated with the results: with models that saturate the GPU by
themselves the bound is the GPU itself, and no runner is faster than one after another.

The sequential row measures each task alone, in a process of its own: seconds, NVML's peak, CPU seconds
and how busy NVML says the GPU was. It also settles how many batches each evaluation does, which is the
same in all other rows. The lower bound of every row is made of those costs: the largest of the longest
chain; memory × duration over the device's memory; durations of tasks larger than half a device; GPU-busy
seconds; CPU seconds over cores. Durations leave out the start of the process and of CUDA. Which term
binds is printed. Tasks are submitted the longest first in all rows but the sequential one, where the
order makes no difference. All have one CPU thread each.

Caches are warm, as on a machine that is in use: before anything is timed, what JAX compiles for these
models is put into its own cache on disk, which all rows read (a process for each task would compile
again what the one before it has compiled, whoever starts it); and a row of ours runs one small task of
each framework, whose contexts are measured once.

Where memory binds, it is also told what the device's memory was for during a row of ours: work as it is
alone, budgets above peaks, processes that start and end, work that took longer, nobody's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bound
import _common
import _devices
import _evaluations
import _makespan_row
import psutil

ROWS = {
    "sequential": "a process each, one after another, no Prefect",
    "ours": "GPUTaskRunner, budgets from tags",
    "ray": "RayTaskRunner, fractions of memory",
    "exclusive": "GPUTaskRunner, gpu:exclusive",
    "learned": "GPUTaskRunner, learned budgets",
    "first": "GPUTaskRunner, no budgets, empty histories",
}

MIB, GIB = _devices.MIB, 2**30

#: Rows in which the row `learned` may learn its budgets.
TEACHERS = ("exclusive", "first")

#: Expected duration of a row as a fraction of the sequential row, to skip rows that would not end
#: within the budget.
EXPECTED_FRACTION = {"ours": 0.15, "learned": 0.2, "ray": 0.35, "exclusive": 1.1, "first": 0.35}

#: Seconds that the process of a sequential task takes beyond its work.
PROCESS_START_S = 2.5

#: Seconds that a row takes before and after: imports, flow run, reports.
ROW_OVERHEAD_S = 12.0

#: Most seconds of the row without budgets and histories, as a multiple of those of the row with learned budgets.
MOST_ABOVE_LEARNED = 1.5

#: Targets.
LEAST_SPEEDUP = 4.0
MOST_ABOVE_BOUND = 1.2

#: For all rows: one CPU thread for each task, and frameworks that do not take the whole device.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # By default what took less than a second to compile is not kept.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def unavailable_reason(row: str) -> str:
    """Return why a row cannot be measured on this machine; empty if it can."""
    if row == "ray" and not (_common.installed("ray") and _common.installed("prefect_ray")):
        return "not installed: prefect-ray"
    return ""


def read_costs(path: Path) -> dict[str, dict[str, Any]]:
    """Read what tasks take, alone, from what an earlier run wrote.

    Raises:
        SystemExit: There is no complete sequential row in it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        costs: dict[str, dict[str, Any]] = found["costs"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(
            f"--costs {path}: no costs in it ({type(error).__name__}); accepted is a file that "
            f"makespan.py --rows sequential --out FILE has written to its end"
        ) from None
    return costs


def make_costs(
    tasks: list[dict[str, Any]], jobs: list[_evaluations.Evaluation]
) -> dict[str, dict[str, Any]]:
    """Work out what each task takes, alone; those that failed are left out."""
    sizes = {job.name: job.size_bytes for job in jobs}
    costs = {}
    for found in tasks:
        if found["error"]:
            continue
        duration_s = found["ended"] - found["ready"]
        costs[found["name"]] = {
            "duration_s": duration_s,
            "start_s": found["ready"] - found["line"],
            "init_s": found["ready"] - found["imported"],
            "steps": found["steps"],
            # It was too short to be seen.
            "peak_bytes": found["peak_bytes"] or sizes[found["name"]],
            "busy_s": found["busy_fraction"] * duration_s,
            "cpu_s": found["cpu_s"],
            "score": found["score"],
        }
    return costs


def bound_of(
    costs: dict[str, dict[str, Any]], device_bytes: int, cores: int, with_init: bool = False
) -> _bound.Bound:
    """Work out the least makespan; with or without CUDA's start in a task's duration."""
    return _bound.lower_bound(costs_of(costs, device_bytes, with_init), 1, device_bytes, cores)


def costs_of(
    costs: dict[str, dict[str, Any]], device_bytes: int, with_init: bool = False
) -> list[_bound.Cost]:
    """Return what tasks take alone, in the form that `bound_of` expects."""
    return [
        _bound.Cost(
            name,
            cost["duration_s"] + (cost["init_s"] if with_init else 0.0),
            min(cost["peak_bytes"], device_bytes),
            cost["busy_s"],
            cost["cpu_s"],
        )
        for name, cost in costs.items()
    ]


def main() -> None:
    """Measure every row that there is time for; print tables and checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument(
        "--frameworks", nargs="+", choices=tuple(_evaluations.KINDS), default=["torch", "jax"]
    )
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--scale", type=float, default=1.0, help="of each task's seconds")
    parser.add_argument("--costs", type=Path, help="what an earlier run wrote with --out")
    parser.add_argument(
        "--learn-from", choices=TEACHERS, default="exclusive", help="where the row learned learns"
    )
    parser.add_argument(
        "--cap",
        type=float,
        help="GB of the device to use; the runner's headroom withholds the rest",
    )
    _common.add_settings(parser)
    rows = ("caches", *ROWS)
    _common.add_arguments(parser, rows, budget_s=360.0, seed_of="sizes, kinds and seconds")
    given = parser.parse_args()
    settings = _common.read_settings(given.settings)
    if given.cap is not None:
        settings["headroom"] = _devices.headroom(_devices.usable_bytes(), int(given.cap * 1e9))
    if given.tiny:
        # However loaded the machine is: it shows that everything runs.
        given.tasks, given.budget = 3, 600.0
        if given.rows == list(ROWS):
            # Each process imports a framework and Prefect for seconds.
            given.rows = ["sequential", "ours", "ray"]
    frameworks = [name for name in given.frameworks if _common.installed(name)]
    if not frameworks:
        raise SystemExit(f"none of {', '.join(given.frameworks)} is installed")
    jobs = _evaluations.plan(given.seed, given.tasks, frameworks, given.scale, given.tiny)
    if given.row == "caches":
        _makespan_row.fill_caches(jobs, given.on_gpu)
        return
    if given.row == "sequential":
        _makespan_row.measure_sequential(jobs, given.on_gpu)
        return
    if given.row:
        costs = read_costs(given.costs)
        jobs = sorted(
            (job for job in jobs if job.name in costs),
            key=lambda job: (-costs[job.name]["duration_s"], job.name),
        )
        learns = given.row in ("learned", given.learn_from)
        device_bytes = _read_device_bytes(given.cap) if given.on_gpu else 0
        _makespan_row.measure_flow(
            given.row, jobs, costs, device_bytes, given.on_gpu, settings, learns
        )
        return
    Benchmark(given, settings, frameworks, jobs).run()


def _read_device_bytes(cap_gb: float | None) -> int:
    """Return the memory of the first device that the rows use: its total, or the cap."""
    import pynvml

    total = int(pynvml.nvmlDeviceGetMemoryInfo(_devices.handles()[0]).total)
    return total if cap_gb is None else int(cap_gb * 1e9)


class Benchmark:
    """Runs the rows, one process after another, and prints what came of them."""

    def __init__(
        self,
        given: argparse.Namespace,
        settings: dict[str, Any],
        frameworks: list[str],
        jobs: list[_evaluations.Evaluation],
    ) -> None:
        self._given, self._settings, self._jobs = given, settings, jobs
        devices = _devices.nvidia()
        self._on_gpu = bool(devices) and not given.tiny
        if not self._on_gpu and not given.tiny:
            raise SystemExit("no GPU: NVML shows no device; --tiny tries it out on the CPU")
        self._frameworks = frameworks
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._device_bytes = (
            _read_device_bytes(given.cap) if self._on_gpu else int(psutil.virtual_memory().total)
        )
        head = {
            "versions": _common.versions("torch", "jax", "tensorflow", "ray", "prefect-ray"),
            **devices,
            "on_gpu": self._on_gpu,
            "device_bytes": self._device_bytes,
            "seed": given.seed,
            "scale": given.scale,
            "settings": settings,
            "tasks": [dataclasses.asdict(job) for job in jobs],
        }
        self._results = _common.Results(given.out, head)
        print(json.dumps({k: v for k, v in head.items() if k != "tasks"}), flush=True)
        self._costs: dict[str, dict[str, Any]] = {}
        #: By row: seconds, failures, leaks; and what its tasks told.
        self._rows: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, list[dict[str, Any]]] = {}
        self._absent: dict[str, str] = {}
        #: Folder in which JAX keeps what it has compiled, while rows are measured.
        self._caches = ""

    def run(self) -> None:
        """Measure, and print."""
        given = self._given
        if given.costs is not None:
            earlier = json.loads(given.costs.read_text(encoding="utf-8"))
            self._costs = read_costs(given.costs)
            self._check_same(earlier)
            given.rows = [row for row in given.rows if row != "sequential"]
            self._rows["sequential"] = earlier["rows"]["sequential"]
            self._results.put("costs", self._costs)
        elif "sequential" not in given.rows:
            raise SystemExit(
                "the other rows need what tasks take alone: add the row sequential, or --costs FILE"
            )
        if self._on_gpu and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            # One device, for all rows alike.
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        with (
            _common.prefect_server(given.api_url) as url,
            tempfile.TemporaryDirectory() as self._caches,
        ):
            _common.say("the server is there")
            if any(map(_makespan_row.is_compiled, self._jobs)):
                began = time.monotonic()
                told: list[dict[str, Any]] = []
                problem = self._run_row("caches", url, given.budget, told.append)
                found = f"{told[0]['filled']} of {told[0]['of']}" if told else problem
                _common.say(f"caches filled: {found}, {time.monotonic() - began:.0f} s")
            rows = [row for row in ROWS if row in given.rows]
            if given.learn_from == "first":
                rows.sort(key=lambda row: row == "learned")
            for row in rows:
                self._measure(row, url)
        self._results.put("absent", self._absent)
        self._print()

    def _check_same(self, earlier: dict[str, Any]) -> None:
        mine = [dataclasses.asdict(job) for job in self._jobs]
        if earlier["tasks"] != mine:
            raise SystemExit(
                f"--costs {self._given.costs}: it has other tasks (seed {earlier['seed']}, "
                f"{len(earlier['tasks'])} of them); give the same --seed, --tasks, --scale and "
                f"--frameworks"
            )

    def _needs_s(self, row: str) -> float:
        work_s = sum(job.seconds for job in self._jobs)
        alone_s = work_s + PROCESS_START_S * len(self._jobs)
        sequential = self._rows.get("sequential")
        if sequential:
            alone_s = float(sequential["makespan_s"])
        return alone_s * EXPECTED_FRACTION.get(row, 1.0) + (ROW_OVERHEAD_S if self._on_gpu else 0)

    def _measure(self, row: str, url: str) -> None:
        given = self._given
        left_s = given.budget - (time.monotonic() - _common.STARTED_S)
        problem = unavailable_reason(row)
        if not problem and row in EXPECTED_FRACTION and not self._costs:
            problem = "not measured: the sequential row was not complete"
        if not problem and row == "learned" and given.learn_from not in self._rows:
            problem = f"not measured: it learns in the row {given.learn_from}"
        if not problem and left_s < self._needs_s(row):
            problem = f"no time within --budget {given.budget:.0f}: {self._needs_s(row):.0f} s more"
        unknown = _common.runner_lacks(*self._settings) if row not in ("sequential", "ray") else ""
        if problem or unknown:
            self._absent[row] = problem or unknown
            _common.say(f"{ROWS[row]}: {self._absent[row]}")
            return
        began = time.monotonic()
        self._tasks[row] = []
        problem = self._run_row(row, url, left_s, lambda found: self._take(row, found))
        if row not in self._rows:
            self._absent[row] = problem or "it told nothing"
        elif row == "sequential":
            self._costs = make_costs(self._tasks[row], self._jobs)
            self._results.put("costs", self._costs)
        self._results.put("rows", self._rows)
        _common.say(f"{ROWS[row]}: {time.monotonic() - began:.0f} s {problem}".rstrip())

    def _run_row(
        self, row: str, url: str, left_s: float, take: Callable[[dict[str, Any]], None]
    ) -> str:
        given = self._given
        costs_file = self._write_costs()
        problem = _common.stream(
            __file__,
            [
                *("--row", row, "--tasks", str(given.tasks), "--seed", str(given.seed)),
                *("--scale", str(given.scale), "--frameworks", *self._frameworks),
                *("--costs", str(costs_file), "--learn-from", given.learn_from),
                *(part for pair in given.settings for part in ("--with", pair)),
                *(["--cap", str(given.cap)] if given.cap is not None else []),
                *(["--on-gpu"] if self._on_gpu else []),
                *(["--tiny"] if given.tiny else []),
            ],
            url,
            max(10.0, left_s),
            take,
            {**ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": self._caches},
        )
        costs_file.unlink()
        return problem

    def _write_costs(self) -> Path:
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump({"costs": self._costs}, file)
        return Path(file.name)

    def _take(self, row: str, found: dict[str, Any]) -> None:
        if found["kind"] == "row":
            self._rows[row] = found
        else:
            self._tasks[row].append(found)
        self._results.add({"row": row, **found})

    def _print(self) -> None:
        if self._costs:
            self._print_costs()
        sequential = self._rows.get("sequential")
        bound = bound_of(self._costs, self._device_bytes, self._cores) if self._costs else None
        table, checks = [], []
        for row in ROWS:
            found = self._rows.get(row)
            if found is None:
                if row in self._absent:
                    table.append([ROWS[row], self._absent[row], *([""] * 6)])
                continue
            seconds = found["makespan_s"]
            speedup = sequential["makespan_s"] / seconds if sequential else None
            above = seconds / bound.seconds if bound else None
            table.append(
                [
                    ROWS[row],
                    f"{seconds:.1f}",
                    f"{speedup:.2f}" if speedup else "–",
                    f"{above:.2f}" if above else "–",
                    str(found["failed"]),
                    str(found.get("out_of_memory", "–")),
                    f"{found['leaked_bytes'] / MIB:.0f}" if self._on_gpu else "no GPU",
                    self._same_scores(row),
                ]
            )
            if row in ("ours", "learned") and self._on_gpu and speedup and above:
                checks += [
                    _bound.Check(f"{row}: out of memory", found["out_of_memory"], 0),
                    _bound.Check(f"{row}: failed tasks", found["failed"], 0),
                    _bound.Check(
                        f"{row}: left on the device", abs(found["leaked_bytes"]) / MIB, 0, "MiB"
                    ),
                    _bound.Check(
                        f"{row}: times as fast as sequential", speedup, LEAST_SPEEDUP, at_least=True
                    ),
                    _bound.Check(f"{row}: times the lower bound", above, MOST_ABOVE_BOUND),
                ]
                if row == "ours":
                    checks.append(
                        _bound.Check(
                            "ours: leaked, by its reports",
                            found["reports"]["leaked_bytes"] / MIB,
                            0,
                            "MiB",
                        )
                    )
            learned = self._rows.get("learned")
            if row == "first" and learned and self._on_gpu:
                checks += [
                    _bound.Check("first: failed tasks", found["failed"], 0),
                    _bound.Check(
                        "first: times the row with learned budgets",
                        seconds / learned["makespan_s"],
                        MOST_ABOVE_LEARNED,
                    ),
                ]
        print()
        _common.print_table(
            [
                "runner",
                "makespan, s",
                "× as fast as sequential",
                "× the lower bound",
                "failed",
                "out of memory",
                "left on the device, MiB",
                "scores as alone",
            ],
            table,
        )
        for row in ("ours", "learned"):
            self._print_account(row)
        print()
        for check in checks:
            print(check)
        if not self._on_gpu:
            print("no GPU: nothing is judged")
        self._results.put("checks", [str(check) for check in checks])
        if self._given.json:
            print(json.dumps(self._results.found, indent=1))

    def _print_account(self, row: str) -> None:
        """Print how the memory of the device was used during a row."""
        found = self._rows.get(row)
        if found is None or not self._on_gpu:
            return
        costs = {cost.name: cost for cost in costs_of(self._costs, self._device_bytes)}
        uses = []
        for told in self._tasks[row]:
            placed = found["placed"].get(told["name"])
            if told["error"] or placed is None:
                continue
            budget, start_s = placed
            times = told["line"] - start_s, told["ready"], told["ended"], told["gone"]
            uses.append(_bound.Use(costs[told["name"]], budget, *times))
        parts = _bound.account(uses, found["makespan_s"], self._device_bytes)
        self._results.put(f"account of {row}", parts)
        print(f"\n{ROWS[row]}: what the device's memory was for\n")
        _common.print_table(
            ["memory × time", "s of the whole device", "of the makespan"],
            [[n, f"{s:.1f}", f"{s / found['makespan_s']:.0%}"] for n, s in parts.items()],
        )

    def _same_scores(self, row: str) -> str:
        """Count tasks whose score is what it was alone: the same work was done."""
        told = [t for t in self._tasks.get(row, []) if not t["error"]]
        if not told:
            return "–"
        same = sum(
            abs(t["score"] - self._costs[t["name"]]["score"]) < 0.02
            and t["steps"] == self._costs[t["name"]]["steps"]
            for t in told
            if t["name"] in self._costs
        )
        return f"{same} of {len(told)}"

    def _print_costs(self) -> None:
        bound = bound_of(self._costs, self._device_bytes, self._cores)
        with_init = bound_of(self._costs, self._device_bytes, self._cores, with_init=True)
        self._results.put("bound", {"terms": dict(bound.terms), "binds": bound.binds})
        costs = list(self._costs.values())
        work_s = sum(c["duration_s"] for c in costs)
        print(
            f"\n{len(costs)} tasks alone: work {work_s:.1f} s (each "
            f"{_common.spread([c['duration_s'] for c in costs])}), peak GiB "
            f"{_common.spread([c['peak_bytes'] / GIB for c in costs])}, imports and CUDA s "
            f"{_common.spread([c['start_s'] for c in costs])}, of it CUDA "
            f"{_common.spread([c['init_s'] for c in costs], 2)};\nGPU busy for "
            f"{sum(c['busy_s'] for c in costs) / work_s:.0%} of the work, by NVML; CPU time "
            f"{sum(c['cpu_s'] for c in costs) / work_s:.0%} of it\n"
        )
        _common.print_table(
            ["lower bound", "s", "binds"],
            [
                [name, f"{value:.1f}", "yes" if name == bound.binds else ""]
                for name, value in bound.terms.items()
            ],
        )
        print(f"\nwith CUDA's start counted as work it would be {with_init.seconds:.1f} s")


if __name__ == "__main__":
    main()
