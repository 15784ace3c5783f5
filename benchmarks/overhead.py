"""What does a GPU task cost beside its body: throughput, latency, and the flow's own process?

Prefect's engine runs in the flow's process for every task, whatever the runner; a process for each
task must neither make it a bottleneck nor fill it. Tasks do nothing, on host devices, so any machine
will do. Peers in the same run: Prefect's `ThreadPoolTaskRunner`, which is the baseline, its
`ProcessPoolTaskRunner`, `RayTaskRunner` where it is installed, plain `multiprocessing`; ours with a
fresh interpreter for each task, with standbys (the default), and with forks (`start_method="auto"`).

    python benchmarks/overhead.py                              # what has time in five minutes
    python benchmarks/overhead.py --budget 900                 # all of it on two quiet cores
    python benchmarks/overhead.py --all-tasks --repeats 3 --budget 3600
    python benchmarks/overhead.py --rows threads-few cold standby --framework torch --at-once 0
    python benchmarks/overhead.py --rows --at-once 0           # the ledger alone
    python benchmarks/overhead.py --tiny                       # that it runs, in under a minute

Each row is measured in a fresh process against one Prefect server whose URL everybody has, with
compiled bytecode, after a first flow of two tasks that is not counted (imports, threads, pools, the
template). All rows but one have the same tags: Prefect asks its API about each tag. Rows that start an
interpreter for each task run fewer tasks, unless `--all-tasks` is given. Then a crowd: 2,000 tasks
mapped at once, from a sync and from an async flow; with a fresh interpreter for each that would take
most of an hour, so it is the forks', beside threads without tags (with tags their engine asks
the API 2,000 times at once, which a server on SQLite does not answer).

What is measured: tasks a second from the flow's start to its last result; `submit` → first line,
one task at a time; `RUSAGE_SELF` of the flow's process, without its children; how much its resident
set has grown once all results are there and the flow goes on, futures and all; in the crowd, whose flows
run on the system's allocator for that, also how much of it is in use: the rest is room that 2,000 tasks
took while all of them waited. For standbys, what lies between a task's placement and its first line
beyond serialising the call and Prefect's context. And the ledger that all flows of a machine share: seconds and CPU for
all that a task writes there while another process reads, and the share of a core that it takes of a flow in which nothing
runs, or one task waits for another flow's.

Prints tables, whether each target is met, and JSON (versions, seed, every run). Within `--budget` what
has no time left says so.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
import _ledger_row
import _overhead_row
from _overhead_row import ROWS

BASELINE = "threads"
#: For rows with fewer tasks: a flow has a cost of its own.
FEW_BASELINE = "threads-few"
CROWD_BASELINE = "threads-untagged"
CROWD = "forks"
OURS = ("cold", "standby", "forks")

#: Tasks of a row that starts an interpreter for each: each takes two seconds of CPU.
SLOW_TASKS = 16

#: Fewer tasks tell nothing of how fast many are done.
PACE_TASKS = SLOW_TASKS

#: Seconds that a row takes beside its tasks: imports, its first flow, what comes one by one.
ROW_S = 20.0

#: Targets: milliseconds from placement to first line under a ready standby, beyond serialising; times
#: the throughput of fresh interpreters; milliseconds of CPU, and bytes kept, a task above threads.
STANDBY_MS = 10.0
TIMES_COLD = 5.0
ABOVE_THREADS_MS = 25.0
KEPT_ABOVE_BYTES = 10_000

#: Targets of the ledger: milliseconds a task, and the share of a core while idle.
LEDGER_MS = 1.0
LEDGER_CORES = 0.01

#: Name of its part, and its tasks, by `--tiny`.
LEDGER = "ledger"
LEDGER_TASKS = {False: 1000, True: 20}

#: Seconds for which the server must store nothing more before a row, and for which that is waited for.
QUIET_S = 3.0
QUIET_LIMIT_S = 120.0

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """A target, and what was found."""

    name: str
    #: Whether it is met; `None`: it was not measured.
    met: bool | None
    found: str

    def line(self) -> str:
        """Return the target and its result as one line."""
        verdict = {True: "PASS", False: "MISSED", None: "not measured"}[self.met]
        return f"{verdict}: {self.name}: {self.found}"


def checks(runs: Iterable[Run]) -> list[Check]:
    """Compare the measurements with the targets."""
    found = list(runs)
    rows = [run for run in found if run["part"] == "rows"]
    crowd = [run for run in found if run["part"] == "crowd"]
    beyond = _over(rows, "standby", lambda run: [s * 1000 for s in run.get("beyond_s", ())])
    made = [
        _at_most(
            f"a ready standby adds at most {STANDBY_MS:g} ms between placement and first line, beyond "
            "serialising",
            beyond,
            STANDBY_MS,
            "ms",
        )
    ]
    fast = _over(rows, "forks", lambda run: [run["tasks_per_s"]])
    cold = _over(rows, "cold", lambda run: [run["tasks_per_s"]])
    name = f"forks do {TIMES_COLD:g} times the tasks of fresh interpreters"
    if fast and cold:
        times = statistics.median(fast) / statistics.median(cold)
        made.append(Check(name, times >= TIMES_COLD, f"{times:.1f} times"))
    else:
        made.append(Check(name, None, "a row is missing"))
    for row in OURS:
        made.append(
            _at_most(
                f"the flow's own CPU, {ROWS[row].title}, is at most {ABOVE_THREADS_MS:g} ms a task above "
                "threads",
                _above(rows, row, _baseline(row), "parent_cpu_per_task_s", 1000),
                ABOVE_THREADS_MS,
                "ms",
            )
        )
    for kind in ("sync", "async"):
        of_kind = [run for run in crowd if run["flow"] == kind]
        made.append(
            _at_most(
                f"the flow's process keeps at most {KEPT_ABOVE_BYTES / 1000:g} kB a task above threads, "
                f"{kind} flow",
                _above(of_kind, CROWD, CROWD_BASELINE, "parent_kept_per_task_bytes", 0.001),
                KEPT_ABOVE_BYTES / 1000,
                "kB",
            )
        )
    ledger = [run for run in found if run["part"] == LEDGER and "tasks" in run]
    name = f"the ledger of the machine takes at most {LEDGER_MS:g} ms a task"
    made.append(_at_most(name, [run["shared_ms"] for run in ledger], LEDGER_MS, "ms"))
    idle = [run["idle_cores"] * 100 for run in ledger]
    waiting = [(run["waiting_cores"] - run["waiting_alone_cores"]) * 100 for run in ledger]
    for shares, what in ((idle, "nothing runs"), (waiting, "a task waits")):
        name = f"it takes at most {LEDGER_CORES:.0%} of a core while {what}"
        made.append(_at_most(name, shares, LEDGER_CORES * 100, "%"))
    ran = [run for run in found if "finished" in run]
    lost = [f"{run['tasks'] - run['finished']} of {run['row']}" for run in ran if _lost(run)]
    # What ended early lost its tasks; what had no time or is not installed did not begin.
    lost += [f"all of {run['row']}" for run in found if run.get("failed")]
    total = sum(run["tasks"] for run in ran)
    told = ", ".join(lost) or f"{total} of {total}"
    made.append(Check("every task finishes", not lost if ran or lost else None, told))
    return made


def _baseline(row: str) -> str:
    return FEW_BASELINE if ROWS[row].slow else BASELINE


def _lost(run: Run) -> bool:
    return bool(run["finished"] != run["tasks"])


def _over(runs: Iterable[Run], row: str, values: Callable[[Run], list[float]]) -> list[float]:
    return [value for run in runs if run["row"] == row and "tasks" in run for value in values(run)]


def _above(runs: list[Run], row: str, baseline: str, key: str, times: float) -> list[float]:
    base, own = (
        _over(runs, name, lambda run: [run[key]] if key in run else []) for name in (baseline, row)
    )
    return [(value - statistics.median(base)) * times for value in own] if base else []


def _at_most(name: str, values: list[float], limit: float, unit: str) -> Check:
    if not values:
        return Check(name, None, "a row is missing")
    return Check(name, statistics.median(values) <= limit, f"{_common.spread(values)} {unit}")


class _Clock:
    """The time that is left of the budget."""

    def __init__(self, budget_s: float) -> None:
        self._until_s = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        return self._until_s - time.monotonic()


def wait_until_quiet(url: str) -> None:
    """Wait until the server has stored what the previous row sent; it stores asynchronously.

    Right after 2,000 tasks in threads it answered the next flow with 503 (SQLite, Prefect 3.8.8).
    """
    deadline = time.monotonic() + QUIET_LIMIT_S
    seen, since = -1, time.monotonic()
    done = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    asked = urllib.request.Request(
        f"{url}/task_runs/count", json.dumps(done).encode(), {"Content-Type": "application/json"}
    )
    while time.monotonic() < min(deadline, since + QUIET_S):
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                found = int(answer.read())
        except OSError:
            found = -1
        if found != seen or found < 0:
            seen, since = found, time.monotonic()
        time.sleep(0.5)


def run_row(
    row: str, given: argparse.Namespace, part: str, clock: _Clock, url: str, kind: str
) -> Run:
    """Measure a row in a new process, or return why it was not measured."""
    spec = ROWS[row]
    found: Run = {"part": part, "row": row}
    if part == "crowd":
        tasks = given.at_once
    else:
        tasks = given.tasks
        if spec.slow and not given.all_tasks:
            tasks = min(tasks, SLOW_TASKS)
    found["flow"] = kind
    if spec.needs and not _common.installed(spec.needs):
        return {**found, "problem": "not installed"}
    expected_s = ROW_S + tasks / given.pace.get(row, 100.0)
    if expected_s > clock.left_s:
        return {**found, "problem": f"no time: it takes about {expected_s:.0f} s"}
    arguments = ["--row", row, "--tasks", str(tasks), "--flow", kind]
    arguments += ["--framework", given.framework]
    arguments += ["--one-by-one", str(given.one_by_one if part == "rows" else 0)]
    told: list[Run] = []
    wait_until_quiet(url)
    _common.say(f"{part}: {row}, {tasks} tasks, {kind} flow")
    problem = _common.stream(
        *(__file__, arguments, url, max(60.0, clock.left_s), told.append),
        environment=_overhead_row.MALLOC_BY_SYSTEM if part == "crowd" else None,
    )
    if not told:
        return {**found, "problem": problem or "it sent no record", "failed": True}
    if tasks >= PACE_TASKS:
        given.pace[row] = min(told[0]["tasks_per_s"], given.pace.get(row, 1e9))
    return {**found, **told[0]}


def measure_ledger(given: argparse.Namespace) -> Run:
    """Measure what the ledger costs, in a new process."""
    _common.say("the ledger")
    arguments = [
        "--row",
        LEDGER,
        "--tasks",
        str(LEDGER_TASKS[given.tiny]),
        "--idle",
        str(given.idle),
    ]
    return {"part": LEDGER, "row": LEDGER, **_common.measure(__file__, arguments, "")}


def print_ledger(runs: list[Run]) -> None:
    """Print what the ledger costs."""
    own = [run for run in runs if run["part"] == LEDGER and "tasks" in run]
    names = ("shared_ms", "shared_cpu_ms", "alone_ms", "alone_cpu_ms")
    table = [
        *([name, _common.spread([run[name] for run in own])] for name in names),
        *(
            [f"{name}, %", _common.spread([run[name] * 100 for run in own])]
            for name in ("idle_cores", "waiting_cores", "waiting_alone_cores")
        ),
    ]
    _common.print_table(["what", "median (lowest–highest)"], table)


def main() -> None:
    """Measure every row and the crowd; print tables, checks and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--all-tasks", action="store_true", help="as many for slow rows as well")
    parser.add_argument("--at-once", type=int, default=2000, help="tasks of the crowd; 0: none")
    parser.add_argument("--one-by-one", type=int, default=6, help="tasks that show the latency")
    parser.add_argument("--flow", choices=("sync", "async"), default="sync", help="of the rows")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--budget", type=float, default=285.0, help="seconds for all of it")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which rows run")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of the idle ledger")
    parser.add_argument("--api-url", default=None, help="use this Prefect server")
    parser.add_argument("--framework", default="none", help="that bodies one by one import")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here, not to stdout")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=(*ROWS, LEDGER), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row == LEDGER:
        _common.tell(_ledger_row.measure(given.tasks, given.idle))
        return
    if given.row:
        _common.tell(
            _overhead_row.measure(
                given.row, given.tasks, given.one_by_one, given.flow, given.framework
            )
        )
        return
    if given.tiny:
        given.tasks, given.at_once, given.one_by_one, given.idle = 3, 20, 1, 0.5
        given.rows = ["threads", "threads-few", "threads-untagged", "standby", "forks"]
    #: Tasks a second, as far as they are known.
    given.pace = {"cold": 1.0, "standby": 1.0, "forks": 10.0}

    clock, order, runs = _Clock(given.budget), random.Random(given.seed), []
    with _common.prefect_server(given.api_url) as url:
        head = {"versions": _common.versions("prefect-ray"), "seed": given.seed}
        for repeat in range(given.repeats):
            runs.append({"repeat": repeat, **measure_ledger(given)})
            for row in order.sample(given.rows, len(given.rows)):
                run = run_row(row, given, "rows", clock, url, given.flow)
                runs.append({"repeat": repeat, **run})
            for kind in ("sync", "async"):
                for row in (CROWD_BASELINE, CROWD):
                    if row in given.rows and given.at_once:
                        run = run_row(row, given, "crowd", clock, url, kind)
                        runs.append({"repeat": repeat, **run})
    found = {**head, "runs": runs, "checks": [check.line() for check in checks(runs)]}
    if given.out is None:
        print(json.dumps(found, indent=1))
    else:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{given.tasks} tasks that do nothing, {given.flow} flow: median (lowest–highest)\n")
    print_rows(runs, given.rows)
    print(f"\nFrom placement to the first line (framework: {given.framework}), ms\n")
    print_starts(runs)
    if given.at_once:
        print(f"\n{given.at_once} tasks mapped at once\n")
        print_crowd(runs)
    print(f"\nThe ledger, {LEDGER_TASKS[given.tiny]} tasks, beside one that is not shared\n")
    print_ledger(runs)
    print()
    for check in checks(runs):
        print(check.line())


def print_rows(runs: list[Run], rows: list[str]) -> None:
    """Print a line for each row."""
    part = [run for run in runs if run["part"] == "rows"]
    table = []
    for row in rows:
        own = [run for run in part if run["row"] == row and "tasks" in run]
        if not own:
            problem = next((run["problem"] for run in part if run["row"] == row), "not run")
            table.append([ROWS[row].title, problem, *[""] * 6])
            continue
        table.append(
            [
                ROWS[row].title,
                str(own[0]["tasks"]),
                _common.spread([run["tasks_per_s"] for run in own]),
                _latency(own),
                *_cost(part, own, row, _baseline(row)),
                _common.spread([run["parent_peak_rss_bytes"] / 2**20 for run in own], 0),
            ]
        )
    _common.print_table(
        [
            "runner",
            "tasks",
            "tasks a second",
            "submit → first line, ms",
            "parent's CPU a task, ms",
            "above threads, ms",
            "parent grows a task, kB",
            "its peak RSS, MiB",
        ],
        table,
    )


def _latency(own: list[Run]) -> str:
    return _common.spread([s * 1000 for run in own for s in run.get("latencies_s", ())], 0)


def _cost(part: list[Run], own: list[Run], row: str, baseline: str) -> list[str]:
    key = "parent_cpu_per_task_s"
    above = _above(part, row, baseline, key, 1000)
    return [
        _common.spread([run[key] * 1000 for run in own]),
        "0" if row == baseline else _common.spread(above),
        _common.spread([run["parent_rss_per_task_bytes"] / 1000 for run in own]),
    ]


def print_starts(runs: list[Run]) -> None:
    """Print a line for each way to start that was seen from inside."""
    table = []
    for row in OURS:
        own = [run for run in runs if run["row"] == row and run.get("start_s")]
        columns = [[v * 1000 for run in own for v in run[key]] for key in _START_COLUMNS]
        if own:
            table.append([ROWS[row].title, *map(_common.spread, columns)])
    _common.print_table(["process", *_START_COLUMNS.values()], table)


_START_COLUMNS = {
    "start_s": "placement → first line",
    "serialise_s": "of it serialising the call",
    "beyond_s": "beyond that",
}


def print_crowd(runs: list[Run]) -> None:
    """Print a line for each flow and runner of the crowd."""
    part = [run for run in runs if run["part"] == "crowd"]
    table = []
    for kind in ("sync", "async"):
        of_kind = [run for run in part if run["flow"] == kind]
        for row in (CROWD_BASELINE, CROWD):
            own = [run for run in of_kind if run["row"] == row and "tasks" in run]
            if not own:
                problem = next((run["problem"] for run in of_kind if run["row"] == row), "not run")
                table.append([ROWS[row].title, kind, problem, *[""] * 8])
                continue
            kept = [run.get("parent_kept_per_task_bytes") for run in own]
            above = _above(of_kind, row, CROWD_BASELINE, "parent_kept_per_task_bytes", 0.001)
            table.append(
                [
                    ROWS[row].title,
                    kind,
                    f"{sum(run['finished'] for run in own)} of {sum(run['tasks'] for run in own)}",
                    _common.spread([run["results_s"] for run in own]),
                    _common.spread([run["tasks_per_s"] for run in own]),
                    *_cost(of_kind, own, row, CROWD_BASELINE),
                    _common.spread([size / 1000 for size in kept if size is not None]),
                    "0" if row == CROWD_BASELINE else _common.spread(above),
                    _common.spread([run["parent_peak_rss_bytes"] / 2**20 for run in own], 0),
                ]
            )
    _common.print_table(
        [
            "runner",
            "flow",
            "finished",
            "last result after, s",
            "tasks a second",
            "parent's CPU a task, ms",
            "above threads, ms",
            "parent grows a task, kB",
            "of it in use, kB",
            "above threads, kB",
            "its peak RSS, MiB",
        ],
        table,
    )


if __name__ == "__main__":
    main()
