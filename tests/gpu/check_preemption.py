"""Random evaluations of random priorities suspend one another on a GPU for ten minutes: is each value right, and what is left?

    python -m tests.gpu.check_preemption [--minutes 10] [--faults]

Two flow processes keep 24 evaluations each in the queue or on the device, where a few fit at a time. Most of them are
preemptible. Meanwhile `prefect-gpu suspend` and `resume` are run on some of them. Each value must be the one that the same
evaluation had before, when nothing disturbed it.

With `--faults` three things are tried in place of that: another program takes the memory that a suspended task is to come back
to; a suspended process is killed with -9; the flow of a suspended process is killed with -9.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from tests.gpu._checks import (
    MIB,
    ROOT,
    TOLERANCE_BYTES,
    nvml_handles,
    read_all,
    read_processes,
    run,
    say,
    settle,
    table,
    used_bytes,
)
from tests.gpu.preemption_flows import Kind, Options, has_preemptible, started_ticks

GIB = 1 << 30

#: Kinds of evaluations, 0.3 to 6 GiB and 4 to 20 s each.
KINDS = [
    Kind(0, 300, 200),
    Kind(1, 300, 700),
    Kind(2, 700, 400),
    Kind(3, 1024, 900),
    Kind(4, 1536, 250),
    Kind(5, 2048, 600),
    Kind(6, 2560, 800),
    Kind(7, 3072, 300),
    Kind(8, 4096, 500),
    Kind(9, 4608, 1000),
    Kind(10, 5120, 600),
    Kind(11, 6144, 800),
]

#: GiB of the device that may be used: four to ten evaluations.
CHAOS_GIB = 20

#: Evaluations of each flow that are there at a time, and flows.
TASKS, FLOWS = 24, 2

#: Seconds until the last of them have ended, and for what comes before and after.
DRAIN_S, BESIDE_S = 240.0, 180.0

#: Suspensions in a minute that there must be at least, or little was tried.
LEAST_A_MINUTE = 1

#: GiB by which the machine's available memory may differ afterwards: what the server and the kernel's caches take.
HOST_TOLERANCE_GIB = 4

#: With `--faults`: GiB that may be used, the urgent evaluation, and for each fault the one that is suspended. Of none of these
#: the duration is known, so it is expected to take as long again as it has taken.
FAULTS_GIB, URGENT = 16, Kind(1, 9 * 1024, 20)
DISTURBED, KILLED, ORPHANED = Kind(2, 8192, 700), Kind(3, 8192, 5000), Kind(4, 8192, 5000)

#: Seconds that anything may take there, and for which what is to wait is seen to wait.
FAULT_S, WAITS_S = 120.0, 5.0


class Flow:
    """A flow in a process of its own."""

    #: All that were started here.
    started: ClassVar[list[Flow]] = []

    def __init__(self, options: Options) -> None:
        self.folder = Path(options.folder)
        self.folder.mkdir()
        self._log = self.folder / "log"
        # What it logs is in a file, and shown if something is wrong.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_LOGGING")}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.gpu.preemption_flows"),
                    json.dumps(dataclasses.asdict(options)),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self.started.append(self)

    def running(self) -> list[tuple[str, str, int, str]]:
        """Return task run's id, name, process and its start of each evaluation that is past its first step."""
        found = []
        for path in self.folder.glob("running-*"):
            try:
                name, pid, ticks = path.read_text().split()
            except OSError:
                # It has just ended.
                continue
            found.append((path.name.removeprefix("running-"), name, int(pid), ticks))
        return found

    def first(self) -> tuple[str, str, int, str]:
        """Wait until an evaluation is past its first step; return it."""
        self.wait_until(lambda: bool(self.running()), "no evaluation began")
        return self.running()[0]

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait.

        Raises:
            RuntimeError: The flow ended first, or it took too long.
        """
        until_s = time.monotonic() + FAULT_S
        while not condition():
            if time.monotonic() > until_s or self.process.poll() not in (None, 0):
                raise RuntimeError(f"{otherwise}: {self.log()}")
            time.sleep(0.05)

    def result(self, limit_s: float = FAULT_S) -> dict[str, Any]:
        """Wait for its end; return what became of its tasks.

        Raises:
            RuntimeError: It ended without that.
        """
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a flow took longer than {limit_s:g} s: {self.log()}") from None
        path = self.folder / "result.json"
        if not path.exists():
            raise RuntimeError(f"a flow ended with {self.process.returncode}: {self.log()}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def log(self) -> str:
        """Return the end of what it has printed."""
        return self._log.read_text()[-2000:]


def make_options(devices: str, folder: Path, gib: int, **more: Any) -> Options:
    """Return options of a flow that may use some GiB of the device."""
    if devices != "nvml":
        name = f"simulated:1x{gib}GiB@{folder.parent.name}"
        return Options(name, "0", str(folder), **more)
    import pynvml

    total = min(pynvml.nvmlDeviceGetMemoryInfo(handle).total for handle in nvml_handles())
    return Options("nvml", f"{total // MIB - gib * 1024}MiB", str(folder), **more)


def host_available_bytes() -> int:
    """Return the machine's memory that processes could still use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def command(*words: str) -> tuple[int, str]:
    """Run `prefect-gpu`; return its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect_gpu", *words], capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


# The chaos.


def check_chaos(options: argparse.Namespace, folder: Path) -> list[str]:
    """Run the evaluations, undisturbed and then in the chaos."""
    before, host_before = used_bytes(), host_available_bytes()
    quiet = Flow(make_options(options.devices, folder / "quiet", CHAOS_GIB, once=KINDS))
    undisturbed = quiet.result(BESIDE_S)["tasks"]
    if failed := [found["error"] for found in undisturbed if found["error"]]:
        return [f"undisturbed: {error}" for error in failed]
    values = {found["kind"]: found["value"] for found in undisturbed}
    say(f"{len(values)} kinds of evaluations ran undisturbed")
    seconds = options.minutes * 60
    chaos: dict[str, Any] = {"kinds": KINDS, "tasks": options.tasks, "seconds": seconds}
    flows = [
        Flow(
            make_options(
                options.devices, folder / f"chaos-{n}", CHAOS_GIB, seed=options.seed + n, **chaos
            )
        )
        for n in range(FLOWS)
    ]
    by_hand = suspend_by_hand(flows, seconds, options.seed, options.devices == "nvml")
    problems: list[str] = []
    rows, suspensions = [], 0
    for number, each in enumerate(flows):
        try:
            result = each.result(DRAIN_S)
        except RuntimeError as error:
            each.process.kill()
            problems.append(f"flow {number}: {error}")
            continue
        row, found, wrong = judge(number, result, values)
        rows.append(row)
        suspensions += found
        problems += wrong
    table(
        (
            *("flow", "evaluations", "right", "failed", "processes", "ended otherwise"),
            *("suspensions", "suspended, s", "of one, s"),
        ),
        rows,
    )
    say(f"suspended by hand: {by_hand['suspended']} of {by_hand['asked']} asked")
    if suspensions < LEAST_A_MINUTE * options.minutes:
        problems.append(f"only {suspensions} suspensions in {options.minutes:g} minutes")
    problems += look_for_rest(flows, host_before)
    problems += left("the chaos", before)
    for number, each in enumerate(flows if problems else []):
        say(f"the end of the log of flow {number}:\n{each.log()}")
    return problems


def suspend_by_hand(
    flows: list[Flow], seconds: float, seed: int, is_judged: bool
) -> dict[str, int]:
    """Suspend and resume evaluations for a time; return how many were asked for and suspended."""
    draw = random.Random(seed)
    count = {"asked": 0, "suspended": 0}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and all(each.process.poll() is None for each in flows):
        time.sleep(draw.uniform(1.0, 4.0))
        there = [each for flow in flows for each in flow.running()]
        if not there:
            continue
        task_run_id, *_ = draw.choice(there)
        count["asked"] += 1
        code, said = command("suspend", task_run_id)
        count["suspended"] += not code
        if is_judged and count["asked"] <= 3:
            say(f"  $ prefect-gpu suspend {task_run_id}\n{said.rstrip()}")
        time.sleep(draw.uniform(0.0, 4.0))
        # It may have ended before: then there is nothing to resume.
        command("resume", task_run_id)
    return count


def judge(
    number: int, result: dict[str, Any], values: dict[int, str]
) -> tuple[list[str], int, list[str]]:
    """Compare a flow's values, and read its reports.

    Returns:
        A row of the table, the number of suspensions, and what is wrong.
    """
    tasks = result["tasks"]
    wrong = [
        f"flow {number}: an evaluation of kind {found['kind']}, priority {found['priority']}: "
        f"{found['error'] or 'another value'}"
        for found in tasks
        if found["value"] != values[found["kind"]]
    ]
    right = len(tasks) - len(wrong)
    reports = [
        report
        for each in read_processes(result["flow_run_id"], len(tasks)).values()
        for report in each
    ]
    if len(reports) < len(tasks):
        wrong.append(f"flow {number}: {len(reports)} reports of {len(tasks)} evaluations")
    if leaked := Counter(r["leaked_bytes"] for r in reports if r["leaked_bytes"] not in ("0", "?")):
        wrong.append(f"flow {number}: leaked {dict(leaked)}")
    away = [report for report in reports if "suspended_s" in report.fields]
    # A report has a line for each; at the least there was one.
    suspensions = sum(max(1, report.text.count(" to host memory in ")) for report in away)
    outcomes = Counter(report["outcome"] for report in reports)
    otherwise = [f"{count} {name}" for name, count in outcomes.items() if name != "completed"]
    suspended_s = [float(report["suspended_s"]) for report in away]
    row = [
        *(str(number), str(len(tasks)), str(right)),
        str(sum(bool(found["error"]) for found in tasks)),
        *(str(len(reports)), ", ".join(otherwise) or "-", str(suspensions)),
        *(f"{sum(suspended_s):.0f}", f"{max(suspended_s, default=0.0):.0f}"),
    ]
    return row, suspensions, wrong


def look_for_rest(flows: list[Flow], host_before: int) -> list[str]:
    """Look for processes that are left, and at the machine's memory."""
    problems = []
    known = [
        (int(pid), ticks)
        for flow in flows
        for path in flow.folder.glob("*-*-*")
        for _, pid, ticks in [path.read_text().split()]
    ]
    alive = [pid for pid, ticks in known if started_ticks(pid) == ticks]
    say(f"processes of {len(known)} evaluations: {len(alive)} are left")
    if alive:
        problems.append(f"processes are left: {alive}")
    after = host_available_bytes()
    say(
        f"the machine's available memory: {host_before / GIB:.1f} GiB before, {after / GIB:.1f} GiB after"
    )
    if host_before - after > HOST_TOLERANCE_GIB * GIB:
        problems.append(f"{(host_before - after) / GIB:.1f} GiB of host memory are not back")
    return problems


def left(what: str, before: list[int]) -> list[str]:
    """Say what is left on the devices."""
    found = [now - then for now, then in zip(settle(before), before, strict=True)]
    say(f"left after {what}: {', '.join(f'{size / MIB:+.1f} MiB' for size in found)}")
    return [f"after {what}: {size / MIB:+.1f} MiB" for size in found if abs(size) > TOLERANCE_BYTES]


# The faults.


class Pair:
    """A preemptible evaluation and an urgent one for which it is suspended, each in a flow of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path, kind: Kind) -> None:
        folder.mkdir()
        self.go = folder / "go"

        def make(name: str, **more: Any) -> Flow:
            return Flow(make_options(options.devices, folder / name, FAULTS_GIB, **more))

        self.victim = make("victim", once=[kind], preemptible=True)
        self.task_run_id, self.name, self.pid, self._ticks = self.victim.first()
        say(f"  the preemptible evaluation holds {held_by(self.pid) / GIB:.1f} GiB")
        self.urgent = make("urgent", once=[URGENT], priority=10, go=str(self.go))
        began_s = time.monotonic()
        self.urgent.first()
        say(f"  the urgent one was past its first step after {time.monotonic() - began_s:.1f} s")

    @property
    def is_alive(self) -> bool:
        """Whether the process of the preemptible evaluation is there."""
        return started_ticks(self.pid) == self._ticks

    def is_away(self) -> list[str]:
        """Return what is wrong if it is not suspended."""
        held = held_by(self.pid)
        say(
            f"  suspended it holds {held / MIB:.0f} MiB; its task run is {state_of(self.task_run_id)}"
        )
        if held or not self.is_alive:
            return [f"it holds {held} bytes, and its process is there: {self.is_alive}"]
        return []

    def end_urgent(self) -> list[str]:
        """Let the urgent evaluation end; return what is wrong with it."""
        self.go.touch()
        (found,) = self.urgent.result()["tasks"]
        return [f"the urgent evaluation: {found['error']}"] if found["error"] else []


def held_by(pid: int) -> int:
    """Return the bytes that NVML shows for a process on all devices."""
    import pynvml

    return sum(
        process.usedGpuMemory or 0
        for handle in nvml_handles()
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid == pid
    )


def state_of(task_run_id: str, patience_s: float = 10.0) -> str:
    """Return a task run's state and its message, once it is another than `Running`: states reach the API late."""
    until_s = time.monotonic() + patience_s
    while True:
        rows = read_all("/task_runs/filter", {"task_runs": {"id": {"any_": [task_run_id]}}})
        state = (rows[0]["state"] or {}) if rows else {}
        if state.get("name", "Running") != "Running" or time.monotonic() > until_s:
            return f"{state.get('name', '?')} ({state.get('message') or ''})"
        time.sleep(0.5)


@contextlib.contextmanager
def other_program() -> Iterator[int]:
    """Run another program that takes nearly all that the device has free; yield its process id."""
    source = (
        "import sys, torch\n"
        "free = torch.cuda.mem_get_info()[0]\n"
        "held = torch.empty(free - (1 << 30), dtype=torch.uint8, device='cuda')\n"
        "print('there', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.communicate("go\n")


def take_device(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Another program takes the device before a suspended evaluation comes back: it waits, and says so."""
    pair = Pair(options, folder, DISTURBED)
    yield from pair.is_away()
    with other_program() as other:
        say(f"  another program has {held_by(other) / GIB:.1f} GiB")
        yield from pair.end_urgent()
        until_s = time.monotonic() + WAITS_S
        while time.monotonic() < until_s and not held_by(pair.pid):
            time.sleep(0.1)
        if held_by(pair.pid):
            yield "it came back while another program had the memory"
        state = state_of(pair.task_run_id)
        say(f"  while the other program has the memory: {state}")
        if not state.startswith("AwaitingGPU"):
            yield f"its task run does not say that it waits: {state}"
    began_s = time.monotonic()
    pair.victim.wait_until(lambda: bool(held_by(pair.pid)), "it did not come back")
    say(f"  back on the device {time.monotonic() - began_s:.1f} s after the other program's end")
    (found,) = pair.victim.result()["tasks"]
    quiet = Flow(
        make_options(options.devices, folder / "quiet", FAULTS_GIB, once=[DISTURBED], step_s=0.0)
    )
    (undisturbed,) = quiet.result()["tasks"]
    digests = found["value"][:16], undisturbed["value"][:16]
    say(f"  digest: {digests[0] or found['error']}, undisturbed {digests[1]}")
    if found["value"] != undisturbed["value"] or not found["value"]:
        yield f"the values differ: {found['error'] or digests}"


def kill_child(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A suspended process is killed with -9: its task run ends as that of any killed process, and nothing is left."""
    pair = Pair(options, folder, KILLED)
    yield from pair.is_away()
    os.kill(pair.pid, signal.SIGKILL)
    (found,) = pair.victim.result()["tasks"]
    say(f"  its task run: {found['state']}, {found['error']}")
    if found["state"] != "CRASHED" or "SIGKILL" not in found["error"]:
        yield f"its task run is {found['state']}: {found['error'] or 'no error'}"
    if pair.is_alive:
        yield "the killed process is still there"
    yield from pair.end_urgent()


def kill_flow(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The flow of a suspended process is killed with -9: the process ends too, and the urgent evaluation goes on."""
    pair = Pair(options, folder, ORPHANED)
    yield from pair.is_away()
    pair.victim.process.kill()
    pair.victim.process.wait()
    killed_s = time.monotonic()
    while pair.is_alive and time.monotonic() < killed_s + 10:
        time.sleep(0.02)
    say(f"  its process had ended after {time.monotonic() - killed_s:.2f} s")
    if pair.is_alive:
        yield "a suspended process outlived its flow"
    yield from pair.end_urgent()


def check_faults(options: argparse.Namespace, folder: Path) -> list[str]:
    """Try each fault; what is left of the device is seen after each."""
    problems: list[str] = []
    for fault in (take_device, kill_child, kill_flow):
        assert fault.__doc__ is not None
        say(f"{fault.__name__.replace('_', ' ')}: {fault.__doc__}")
        before, host_before = used_bytes(), host_available_bytes()
        try:
            found = [f"{fault.__name__}: {p}" for p in fault(options, folder / fault.__name__)]
        except RuntimeError as error:
            found = [f"{fault.__name__}: {error}"]
        problems += found
        for each in Flow.started:
            each.process.kill()
            each.process.wait()
            if found:
                say(f"the end of the log of {each.folder.name}:\n{each.log()}")
        Flow.started.clear()
        problems += left(fault.__name__.replace("_", " "), before)
        say(f"  host memory: {(host_available_bytes() - host_before) / GIB:+.1f} GiB")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    if not has_preemptible():
        say("gpu() has no preemptible in this version: nothing suspends a task but a person")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PREFECT_INTEGRATIONS_GPU_LEDGER"] = str(folder / "ledger")
        (folder / "ledger").mkdir()
        if not options.faults:
            return check_chaos(options, folder)
        if options.devices != "nvml":
            return ["the faults need a GPU: simulated memory is not moved"]
        return check_faults(options, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=TASKS, help="of each flow at a time")
    parser.add_argument("--faults", action="store_true", help="in place of the chaos")
    known, _ = parser.parse_known_args(
        [word for word in sys.argv[1:] if word not in ("-h", "--help")]
    )
    return run(check, parser, known.minutes * 60 + DRAIN_S + 2 * BESIDE_S, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
