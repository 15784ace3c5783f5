"""Runs flows under faults, and checks what became of them.

    python -m tests.chaos --seed 1 --seconds 120
    python -m tests.chaos --seed 1 --tasks 2000 --flows 3

The exit status is 0 if all checks pass.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pynvml

from prefect_gpu.devices.spec import parse_spec
from tests.chaos import bodies, checks, plan
from tests.chaos.faults import Disk, Faults, read_notes
from tests.faults.api_proxy import proxy
from tests.gpu._checks import nvml_handles, prefect_server, used_bytes
from tests.integration.programs import Workplace, lines_of

#: Tasks of one flow.
TASKS = 50

#: Seconds between two looks at the ledger's log, which keeps a limited number of rows.
LOOK_S = 30.0

#: Only breaks a deadlock: seconds for which no flow writes a word.
QUIET_S = 420.0


def capacities(devices: str) -> list[int]:
    """Return the bytes of each device."""
    simulated = parse_spec(devices).simulated
    if simulated is not None:
        return list(simulated.sizes_bytes)
    return [int(pynvml.nvmlDeviceGetMemoryInfo(each).total) for each in nvml_handles()]


@dataclass
class Flow:
    """A flow's process."""

    number: int
    process: subprocess.Popen[str]
    #: When it was started, in seconds since the begin of the run.
    at_s: float


class Run:
    """One chaos run.

    Args:
        options: Of the command line.
        place: Where the flows run.
        faults: What is done to them.
        look: See `checks.watch_capacity`.
    """

    def __init__(
        self, options: argparse.Namespace, place: Workplace, faults: Faults, look: object
    ) -> None:
        self._options = options
        self._place = place
        self._faults = faults
        assert callable(look)
        self._look = look
        #: On the clock of `time.monotonic`.
        self._began_s = 0.0
        self._next = 0
        self._running: dict[int, Flow] = {}
        #: Flows that ended by themselves.
        self.ended: list[checks.FlowRecord] = []
        #: Flows that were killed.
        self.killed: list[checks.FlowRecord] = []
        self._devices = len(capacities(options.devices))

    def jobs(self) -> dict[str, plan.Job]:
        """Return all tasks that may have been submitted, by key."""
        return {
            job.key: job
            for number in range(self._next)
            for job in plan.jobs(self._options.seed, number, TASKS, self._devices)
        }

    def run(self) -> bool:
        """Start flows, and replace those that end, until there were enough; `False`: one hung."""
        self._began_s = looked_s = heard_s = time.monotonic()
        heard = 0
        while True:
            now_s = time.monotonic() - self._began_s
            # A person may make the file too.
            stop = self._place.folder / "stop"
            over = stop.exists() or self._is_over(now_s)
            if over:
                stop.touch()
                self._faults.end()
                if not self._running:
                    return True
            self._collect(now_s)
            while not over and len(self._running) < self._options.flows:
                self._start(now_s)
            if not over:
                self._faults.step(now_s, self._running)
            if time.monotonic() - looked_s > LOOK_S:
                looked_s = time.monotonic()
                with contextlib.suppress(AssertionError):
                    # The last look raises it again.
                    self._look()
            words = sum(each.stat().st_size for each in self._place.folder.glob("flow-*.jsonl"))
            if words != heard:
                heard, heard_s = words, time.monotonic()
            elif time.monotonic() - heard_s > QUIET_S:
                return False
            time.sleep(0.25)

    def count(self) -> int:
        """Return how many task runs have ended, those of killed flows among them."""
        folder = self._place.folder
        return sum(
            line.startswith('{"key"')
            for number in range(self._next)
            for line in lines_of(folder / f"flow-{number}.jsonl")
        )

    def hung(self) -> list[str]:
        """Return the flows that run still."""
        return [f"flow {flow.number}, pid {pid}" for pid, flow in self._running.items()]

    def _is_over(self, now_s: float) -> bool:
        if self._options.seconds is not None:
            return now_s >= float(self._options.seconds)
        return self.count() >= int(self._options.tasks)

    def _start(self, now_s: float) -> None:
        number, self._next = self._next, self._next + 1
        log = (self._place.folder / f"flow-{number}.log").open("w", encoding="utf-8")
        arguments = [str(self._options.seed), str(number), str(TASKS), self._options.devices]
        with log:
            process = self._place.start(
                *["-m", "tests.chaos.flow", *arguments, str(self._devices)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running[process.pid] = Flow(number, process, now_s)

    def _collect(self, now_s: float) -> None:
        for pid, flow in list(self._running.items()):
            if flow.process.poll() is None:
                continue
            del self._running[pid]
            what = f"flow {flow.number} ({plan.method(flow.number)})"
            took_s = now_s - flow.at_s
            record = checks.read_flow(self._place.folder, flow.number)
            record.began_s, record.ended_s = self._began_s + flow.at_s, time.monotonic()
            if pid in self._faults.killed_flows:
                self.killed.append(record)
                print(f"  {now_s:6.1f} s  {what} was killed after {took_s:.0f} s", flush=True)
                continue
            self.ended.append(record)
            print(
                f"  {now_s:6.1f} s  {what} ended with {flow.process.returncode} after {took_s:.0f} s: "
                f"{len(record.outcomes)} task runs {record.failed[:200]}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--tasks", type=int, help="task runs that have ended, at least")
    length.add_argument("--seconds", type=float, help="until no more tasks are submitted")
    parser.add_argument("--flows", type=int, default=3, help="that run at a time")
    parser.add_argument("--devices", default="simulated:2x24GiB@chaos")
    parser.add_argument("--keep", type=Path, help="an empty folder for what the flows write")
    options = parser.parse_args()
    # What was started and mounted is ended with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with contextlib.ExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = Path(
                stack.enter_context(
                    # The environment's own folder may be short of space.
                    tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)
                )
            )
        return run(options, folder.resolve(), stack)


def run(options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> int:
    """Run it in a folder; return the exit status."""
    server_home, work = folder / "server", folder / "work"
    for each in (server_home, work, work / "disk"):
        each.mkdir()
    server = stack.enter_context(prefect_server(str(server_home)))
    api_url = server["PREFECT_API_URL"]
    before_api = stack.enter_context(proxy(api_url))
    disk = Disk(work / "disk")
    stack.callback(disk.close)
    print(f"seed {options.seed}, {options.flows} flows at a time, devices {options.devices}")
    if not disk.mounted:
        print("full disks are left out: no disk can be mounted here")

    place = Workplace(work, before_api.url)
    notes = work / "notes.txt"
    simulated = parse_spec(options.devices).kind == "simulated"
    place.environment |= {
        bodies.NOTES: str(notes),
        bodies.MEMORY: "simulated" if simulated else "torch",
        "TMPDIR": str(disk.temporary),
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        # It sleeps 2, 4, 8 and 16 s before each and after the last: no flow sleeps for minutes. See also `flow.STARTS`.
        "PREFECT_CLIENT_MAX_RETRIES": "3",
        "PYTHONFAULTHANDLER": "1",
        # Each retry of a request is in the flow's log.
        "PREFECT_LOGGING_LOGGERS_PREFECT_CLIENT_LEVEL": "DEBUG",
    }
    stack.callback(place.kill_all)
    ledger = work / "ledger"
    look = checks.watch_capacity(ledger, max(capacities(options.devices)))
    used = used_bytes()
    faults = Faults(plan.faults(options.seed), place, before_api, disk, notes)
    flows = Run(options, place, faults, look)
    ended = flows.run()
    print("faults: " + ", ".join(f"{n} × {name}" for name, n in sorted(faults.counts.items())))
    print(
        f"flows: {len(flows.ended)} ended by themselves, {len(flows.killed)} were killed; "
        f"{flows.count()} task runs ended in all, and "
        f"{sum(each.failed_readings for each in flows.ended)} readings of devices failed"
    )
    causes = checks.count_out_of_memory(work)
    print("out of memory: " + ", ".join(f"{n} × {cause}" for cause, n in causes.items()))

    verdict = checks.Verdict()
    verdict.say("every flow ends", [] if ended else flows.hung())
    outages = sum(n for name, n in faults.counts.items() if name.startswith("outage"))
    both = [*flows.ended, *flows.killed]
    checks.check_idle(verdict, both, read_notes(notes))
    checks.check_flows(verdict, flows.ended, outages)
    checks.check_logs(verdict, work)
    checks.check_values(verdict, both, flows.jobs(), faults.kills)
    checks.check_states(verdict, flows.ended, flows.killed, api_url)
    checks.check_bodies(verdict, both, read_notes(notes), faults.killed_s)
    checks.check_processes(verdict, place)
    place.kill_all()
    checks.check_ledger(verdict, ledger, look)
    checks.check_events(verdict, work)
    checks.check_files(verdict, flows.ended, disk.temporary)
    if not simulated:
        checks.check_device_memory(verdict, used)
    if not verdict.passed:
        print(f"FAILED with seed {options.seed}")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
