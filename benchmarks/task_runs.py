"""How many Prefect task runs does one flow carry, while all but one of them wait for a device?

    python benchmarks/task_runs.py                       # 500, 1,000, 2,000 and 4,000 task runs
    python benchmarks/task_runs.py --counts 8000 --out task_runs.json
    python benchmarks/task_runs.py --tiny                # that it runs, in seconds

One task holds a simulated device. The others are submitted after it and wait: each has a thread in which Prefect's engine
runs, a state and its logs. Measured of the flow's own process: how many the API comes to show as waiting, seconds from the first
`submit` until the last of these, CPU time of that, how much the resident set has grown for each task run, threads, and the share of a core in half a minute in which
nothing happens. Then the flow is cancelled: seconds until all task runs have ended. Each count is run in a process of its own
against one Prefect server, on SQLite.

Prints a table, then JSON (versions, every run).
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import _common

#: Task runs that wait, and seconds to look at them.
COUNTS = (500, 1_000, 2_000, 4_000)
QUIET_S = 30.0

#: The name of the state of a task run that waits for a device.
AWAITING = "AwaitingGPU"

#: Seconds without a change after which no further one is expected.
SETTLED_S = 60.0

#: Seconds for which the holder sleeps: longer than the flow takes.
HOLD_S = 6000.0


def cpu_s() -> float:
    """Return the CPU time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Return the resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def count_waiting(flow_run_id: UUID) -> int:
    """Return how many task runs of a flow run the API shows as waiting for a device."""
    from prefect import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterId,
        TaskRunFilter,
        TaskRunFilterState,
        TaskRunFilterStateName,
    )

    runs = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    states = TaskRunFilter(state=TaskRunFilterState(name=TaskRunFilterStateName(any_=[AWAITING])))
    asked = {
        "flow_runs": runs.model_dump(mode="json"),
        "task_runs": states.model_dump(mode="json"),
    }
    with get_client(sync_client=True) as client:
        return int(client.request("POST", "/task_runs/count", json=asked).json())


def measure(count: int, quiet_s: float) -> dict[str, Any]:
    """Run one flow with that many task runs that wait; return what it took."""
    from prefect import flow, task
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner, gpu

    found: dict[str, Any] = {"count": count}

    @task(name="holder", tags=gpu(memory="70GiB"))
    def holder(seconds: float) -> None:
        time.sleep(seconds)

    @task(name="waiting", tags=gpu(memory="20GiB"))
    def waiting(number: int) -> int:
        return number

    class EnoughError(Exception):
        """Ends the flow with its tasks."""

    @flow(task_runner=GPUTaskRunner(devices="simulated:1x80GiB", standby=0, reports=False))
    def carries() -> None:
        holder.submit(HOLD_S)
        run_id = UUID(flow_run.id)
        # For the holder to have its device, and for what the first task brings.
        time.sleep(10)
        before, cpu, began = resident_bytes(), cpu_s(), time.monotonic()
        waiting.map(range(count))
        found["submitted_s"] = time.monotonic() - began
        found["shown"], changed = 0, began
        while found["shown"] < count and time.monotonic() < changed + SETTLED_S:
            time.sleep(2)
            if (shown := count_waiting(run_id)) != found["shown"]:
                found["shown"], changed = shown, time.monotonic()
        found["waiting_s"] = changed - began
        found["waiting_cpu_s"] = cpu_s() - cpu
        found["bytes_each"] = (resident_bytes() - before) / count
        found["threads"] = threading.active_count()
        cpu, began = cpu_s(), time.monotonic()
        time.sleep(quiet_s)
        found["quiet_cores"] = (cpu_s() - cpu) / (time.monotonic() - began)
        found["ends_s"] = -time.monotonic()
        raise EnoughError

    try:
        carries()
    except EnoughError:
        found["ends_s"] += time.monotonic()
    return found


def main() -> None:
    """Run all counts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="*", default=list(COUNTS))
    parser.add_argument("--quiet", type=float, default=QUIET_S, help="seconds of waiting")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="few task runs, to see that it runs")
    options = parser.parse_args()
    if options.tiny:
        options.counts, options.quiet = [5], 1.0
    if options.one is not None:
        _common.tell(measure(options.one, options.quiet))
        return
    rows = []
    with _common.prefect_server() as url:
        for count in options.counts:
            _common.say(f"{count:,} task runs")
            given = ["--one", str(count), "--quiet", str(options.quiet)]
            rows.append(_common.measure(__file__, given, url))
            _common.say(json.dumps(rows[-1]))
    head = ["task runs", "shown as waiting", "submitted, s", "all wait, s", "CPU each, ms"]
    head += ["MiB each", "threads", "cores while they wait", "cancelled, s"]
    _common.print_table(
        head,
        [
            [
                *(f"{row['count']:,}", f"{row['shown']:,}"),
                *(f"{row['submitted_s']:.1f}", f"{row['waiting_s']:.0f}"),
                f"{1000 * row['waiting_cpu_s'] / row['count']:.1f}",
                f"{row['bytes_each'] / 2**20:.2f}",
                str(row["threads"]),
                f"{row['quiet_cores']:.3f}",
                f"{row['ends_s']:.1f}",
            ]
            for row in rows
        ],
    )
    text = json.dumps({"versions": _common.versions(), "rows": rows})
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
