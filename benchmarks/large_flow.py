"""What do people see of a flow of 500 task runs: how large is its report, how soon does a browser show it, what does the live view cost?

    python benchmarks/large_flow.py
    python benchmarks/large_flow.py --count 2000 --out large_flow.json
    python benchmarks/large_flow.py --tiny               # that it runs, in seconds

Three measurements, each in a process of its own, on one Prefect server with its UI:

- `report`: a flow of as many GPU tasks, each a process of its own on one of four simulated devices, forked from one warm process. A
  fifth of them fail or run out of memory, so that the report has all its parts. Bytes of the flow report's Markdown as the API has it.
- `browser`: seconds from the click on an address until headless Chromium shows the report with its chart and its tables, in either
  UI: the first time, with an empty cache, and the median of further times.
- `view`: eight tasks hold the devices and call `step` ten times a second, all others wait. CPU seconds of the flow's process in half
  a minute, with the live view on a pseudo-terminal and without it, and of the view's thread alone.

Prints a table, then JSON (versions, every run).
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import _common

#: Task runs of the flow, and seconds in which the view's CPU time is taken.
COUNT = 500
QUIET_S = 30.0

#: Openings of the report in each UI, after the first.
OPENINGS = 5

#: Seconds for which the tasks that hold the devices run: longer than the measurement takes.
HOLD_S = 6000.0


def run_report(count: int) -> dict[str, Any]:
    """Run a flow of that many GPU tasks; return the id and the size of its report."""
    # Of the tasks that fail, as they are to.
    os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
    from prefect import flow, get_client, task
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner, gpu
    from prefect_gpu.testing import allocate

    @task
    def evaluate(number: int) -> int:
        size = f"{1 + number % 3}GiB"
        with allocate(size):
            time.sleep(0.02)
        if number % 10 == 9:
            raise ValueError(f"checkpoint {number} has no weights for the classifier")
        if number % 10 == 4:
            allocate("60GiB")
        return number

    found: dict[str, Any] = {"count": count}
    runner = GPUTaskRunner(devices="simulated:4x24GiB", standby=0, start_method="auto")

    @flow(task_runner=runner, name="large flow")
    def large() -> None:
        found["flow_run_id"] = flow_run.id
        models = [f"model-{number}" for number in range(10)]
        each = [
            evaluate.with_options(
                name=models[number % len(models)],
                task_run_name=f"{models[number % len(models)]}-{number}",
                tags=gpu(memory="4GiB", oom="fail"),
            ).submit(number)
            for number in range(count)
        ]
        for future in each:
            future.wait()

    began = time.monotonic()
    large()
    found["flow_s"] = time.monotonic() - began
    wanted = {"artifacts": {"flow_run_id": {"any_": [found["flow_run_id"]]}}, "limit": 200}
    wanted["artifacts"]["key"] = {"any_": ["gpu-flow-large-flow"]}
    with get_client(sync_client=True) as client:
        (artifact,) = client.request("POST", "/artifacts/filter", json=wanted).json()
    found["artifact_id"] = artifact["id"]
    found["headline"] = artifact["description"]
    found["markdown_bytes"] = len(artifact["data"].encode())
    return found


def open_report(api_url: str, artifact_id: str, ui: str, openings: int) -> dict[str, Any]:
    """Open a report in a browser again and again; return the seconds until it was shown."""
    from tests.ui.capture import browser_page, open_artifact

    found: list[float] = []
    with browser_page() as page:
        for _ in range(1 + openings):
            page.goto("about:blank")
            began = time.monotonic()
            open_artifact(page, api_url, artifact_id, ui)  # type: ignore[arg-type]
            found.append(time.monotonic() - began)
    return {"ui": ui, "first_s": found[0], "again_s": found[1:]}


def run_view(count: int, quiet_s: float, view: bool) -> dict[str, Any]:
    """Run a flow whose task runs wait; return the CPU time that it takes meanwhile."""
    # The terminal, whose text another process reads: standard output is for the figures.
    master, slave = pty.openpty()
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL)
    os.environ["TERM"] = "xterm"
    os.environ["PREFECT_INTEGRATIONS_GPU_LIVE_VIEW"] = "on" if view else "off"
    subprocess.run(["stty", "rows", "40", "cols", "120"], stdin=slave, check=True)
    # It stays open: Prefect's console writes there to the end.
    sys.stderr = open(slave, "w", buffering=1, encoding="utf-8")  # noqa: SIM115

    from prefect import flow, task

    from prefect_gpu import GPUTaskRunner, gpu, step

    found: dict[str, Any] = {"count": count, "view": view}

    @task(name="holder", tags=gpu(memory="10GiB"))
    def hold(seconds: float) -> None:
        for _ in range(int(10 * seconds)):
            time.sleep(0.1)
            step()

    @task(name="waiting", tags=gpu(memory="20GiB"))
    def wait(number: int) -> int:
        return number

    class EnoughError(Exception):
        """Ends the flow with its tasks."""

    @flow(task_runner=GPUTaskRunner(devices="simulated:4x24GiB", standby=0, reports=False))
    def carries() -> None:
        hold.map([HOLD_S] * 8)
        wait.map(range(max(1, count - 8)))
        # For all to wait, and to have said so.
        time.sleep(min(60.0, 10 + count / 10))
        drawing = [t for t in threading.enumerate() if t.name == "prefect-gpu-live-view"]
        assert len(drawing) == view, drawing
        clocks = [time.pthread_getcpuclockid(t.ident) for t in drawing if t.ident]
        before, own, began = cpu_s(), sum(map(time.clock_gettime, clocks)), time.monotonic()
        time.sleep(quiet_s)
        found["seconds"] = time.monotonic() - began
        found["cpu_s"] = cpu_s() - before
        found["view_cpu_s"] = sum(map(time.clock_gettime, clocks)) - own
        raise EnoughError

    try:
        carries()
    except EnoughError:
        pass
    finally:
        reader.kill()
        reader.wait()
    return found


def cpu_s() -> float:
    """Return the CPU time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT, help="task runs of the flow")
    parser.add_argument("--quiet", type=float, default=QUIET_S, help="seconds of the view")
    parser.add_argument("--openings", type=int, default=OPENINGS)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--tiny", action="store_true", help="few task runs, to see that it runs")
    parser.add_argument("--one", choices=("report", "view", "no-view"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.count, options.quiet, options.openings = 12, 2.0, 1
    if options.one == "report":
        _common.tell(run_report(options.count))
        return
    if options.one is not None:
        _common.tell(run_view(options.count, options.quiet, options.one == "view"))
        return
    sys.path.insert(0, str(_common.REPOSITORY))
    from tests.ui.capture import CHROMIUM
    from tests.ui.server import running_server

    # Asked to end, it ends its server and the row that is measured.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: dict[str, Any] = {"versions": _common.versions()}
    given = ["--count", str(options.count), "--quiet", str(options.quiet)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ["PREFECT_HOME"] = home
        os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
        # Not the one that `PREFECT_API_URL` may name, which has no UI as a rule.
        with running_server(Path(home)) as url:
            for one in ("report", "view", "no-view"):
                _common.say(f"{options.count:,} task runs: {one}")
                found[one] = _common.measure(__file__, [*given, "--one", one], url)
                _common.say(json.dumps(found[one]))
            artifact_id = found["report"]["artifact_id"]
            for ui in ("v2", "v1") if CHROMIUM else ():
                _common.say(f"browser, UI {ui}")
                found[ui] = open_report(url, artifact_id, ui, options.openings)
                _common.say(json.dumps(found[ui]))
    report, view, without = found["report"], found["view"], found["no-view"]
    rows = [
        [
            "flow report",
            f"{report['count']:,} task runs",
            f"{report['markdown_bytes'] / 1e3:.0f} kB",
        ],
    ]
    for ui in ("v2", "v1"):
        if ui in found:
            again = statistics.median(found[ui]["again_s"])
            rows += [
                [f"shown in UI {ui}", "the first time", f"{found[ui]['first_s']:.2f} s"],
                [f"shown in UI {ui}", "again, median", f"{again:.2f} s"],
            ]
    for what, row, key in (
        ("flow's process", without, "cpu_s"),
        ("flow's process with the view", view, "cpu_s"),
        ("the view's thread", view, "view_cpu_s"),
    ):
        share = f"{row[key] / row['seconds']:.2%} of a core"
        rows.append([f"CPU of {what}", f"in {row['seconds']:.0f} s: {row[key]:.3f} s", share])
    _common.print_table(["what", "of", "figure"], rows)
    text = json.dumps(found)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
