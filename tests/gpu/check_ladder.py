"""What a task runs out of memory of, and what is made of it: one case for each cause.

    python -m tests.gpu.check_ladder

- own cap: its tag is too small. It gets more.
- crowded: a task of the runner without a cap took more than it had reserved, while another asked for what it
  was promised. The other gets the same again, once there is room.
- foreign: a process outside the runner took the memory. The task waits until it lets go.
- host: the machine's own memory, here that of a control group. No more of a device would help.
- killed: a bare SIGKILL, of unknown cause. It is Prefect's to retry, if there are retries.

Where the script is only tried out, on `--devices simulated:1x9GiB`, `foreign` and `host` are left out. On
a GPU the device is made small by a filler, a program that knows nothing of this package and holds all but a
few GiB. The bodies agree on what comes when by files in a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    GIB,
    MIB,
    Ended,
    Process,
    gather,
    installed,
    read_processes,
    read_task_runs,
    run,
    run_flow,
    say,
    size,
    table,
)

#: What the filler leaves of the device at first, and what is left once it, or a task of the runner, has taken
#: more than it should.
ROOM_BYTES = 9 * GIB
LITTLE_BYTES = 1 * GIB

#: What the one that meets the shortage asks for, within the cap that its budget leaves.
SHARE = "5GiB"
ASKED_BYTES = 3 * GIB + 512 * MIB

#: Seconds that bodies wait for one another.
PATIENCE_S = 60.0

#: Seconds for which the memory stays away after the shortage.
AWAY_S = 4.0

#: Holds all but so many bytes of device 0, and changes that when told to, until its input ends.
FILLER = """
import sys, torch
held = []
def free():
    return torch.cuda.mem_get_info()[0]
torch.zeros(1, device="cuda")
for line in sys.stdin:
    left = int(line)
    while held and free() < left:
        held.pop()
        torch.cuda.empty_cache()
    if free() > left:
        held.append(torch.empty(free() - left, dtype=torch.uint8, device="cuda"))
    print(free(), flush=True)
"""


class Filler:
    """A process outside the runner that allocates device memory."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FILLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def leave(self, left_bytes: int) -> None:
        """Allocate or free until this many bytes of the device are free.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{left_bytes}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the filler ended with {self._process.wait(10)}")
        say(f"filler: {size(int(answer))} MiB of the device are free")

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def wait_for(file: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Wait until a file exists.

    Raises:
        RuntimeError: The file does not exist after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while not Path(file).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{Path(file).name} did not appear within {patience_s:g} s")
        time.sleep(0.02)


# The bodies. On simulated devices, where the script is only tried out, they take what is simulated.


def on_simulated() -> bool:
    from prefect_gpu import current_allocation

    allocation = current_allocation()
    return allocation is not None and allocation.device_uuids[0].startswith("SIM")


def take(count: int) -> Any:
    """Allocate bytes on the device; what it returns holds them."""
    if on_simulated():
        from prefect_gpu.testing import allocate

        return allocate(count)
    import torch

    held = torch.ones(count, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return held


def free_bytes() -> int:
    """Read what is free on the device."""
    if on_simulated():
        return ROOM_BYTES
    import torch

    return int(torch.cuda.mem_get_info()[0])


@task(name="own-cap", tags=gpu(memory="2GiB", framework="torch"), timeout_seconds=BODY_S)
def take_too_much() -> int:
    """Allocate 3 GiB with a budget of 2 GiB."""
    from prefect_gpu import current_allocation

    held = take(3 * GIB)
    allocation = current_allocation()
    assert allocation is not None and held is not None
    return allocation.attempt


@task(
    name="hog",
    tags=gpu(memory="1.5GiB", framework="torch", allocation="growth"),
    timeout_seconds=BODY_S,
)
def take_others_share(folder: str) -> None:
    """Once the other is there, take nearly all, until it was refused and some seconds more."""
    small = take(MIB)
    Path(folder, "hog-is-there").touch()
    wait_for(Path(folder, "victim-is-there"))
    large = take(free_bytes() - LITTLE_BYTES)
    Path(folder, "taken").touch()
    wait_for(Path(folder, "refused"))
    time.sleep(AWAY_S)
    del small, large


@task(name="victim", tags=gpu(memory=SHARE, framework="torch"), timeout_seconds=BODY_S)
def ask_for_share(folder: str) -> int:
    """Allocate the reserved memory; the first attempt waits until another process took it."""
    from prefect_gpu import current_allocation

    allocation = current_allocation()
    assert allocation is not None
    # Its context is there before the others begin.
    small = take(MIB)
    if allocation.attempt == 1:
        Path(folder, "victim-is-there").touch()
        wait_for(Path(folder, "taken"))
    try:
        held = take(ASKED_BYTES)
    except Exception:
        Path(folder, "refused").touch()
        raise
    assert small is not None and held is not None
    return allocation.attempt


@task(name="killed", tags=gpu(memory="1GiB", framework="none"), timeout_seconds=BODY_S)
def kill_itself() -> int:
    """Die by SIGKILL, the first time."""
    import signal

    from prefect_gpu import current_allocation

    allocation = current_allocation()
    assert allocation is not None
    if allocation.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return allocation.attempt


@task(name="host", tags=gpu(memory="1GiB", framework="none"), timeout_seconds=BODY_S)
def exhaust_host(processes_file: str, take_bytes: int) -> int:
    """Enter a control group that allows little, and take more."""
    Path(processes_file).write_text(str(os.getpid()), encoding="ascii")
    held = [os.urandom(MIB) for _ in range(take_bytes // MIB)]
    return len(held)


# A control group that allows little memory.

GROUP_BYTES = 256 * MIB


@contextlib.contextmanager
def small_group() -> Iterator[tuple[Path | None, str]]:
    """Make one.

    Yields:
        The file that takes the ids of its processes; or `None`, and why there can be none.
    """
    root = Path("/sys/fs/cgroup")
    undo: list[tuple[Path, str]] = []
    group: Path | None = None
    try:
        group, why = _make_group(root, undo), ""
    except OSError as error:
        why = str(error)
    try:
        yield (None if group is None else group / "cgroup.procs"), why
    finally:
        if group is not None:
            # What was in it is gone; the kernel may need a moment to see that.
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        for file, text in undo:
            with contextlib.suppress(OSError):
                file.write_text(text, encoding="ascii")


def _make_group(root: Path, undo: list[tuple[Path, str]]) -> Path:
    name = f"prefect-gpu-check-{os.getpid()}"
    if (root / "cgroup.controllers").exists():
        switch = root / "cgroup.subtree_control"
        if "memory" not in switch.read_text(encoding="ascii").split():
            switch.write_text("+memory", encoding="ascii")
            undo.append((switch, "-memory"))
        group, limit, swap = root / name, "memory.max", ("memory.swap.max", "0")
    else:
        group, limit = root / "memory" / name, "memory.limit_in_bytes"
        swap = "memory.memsw.limit_in_bytes", str(GROUP_BYTES)
    group.mkdir()
    try:
        (group / limit).write_text(str(GROUP_BYTES), encoding="ascii")
        if (group / swap[0]).exists():
            (group / swap[0]).write_text(swap[1], encoding="ascii")
    except OSError:
        group.rmdir()
        raise
    return group


def try_counter() -> list[str]:
    """Where no such kill can be caused: show that the reader of the kernel's counter sees one."""
    from prefect_gpu.devices.host import read_oom_kills

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "proc", "vmstat")
        file.parent.mkdir()
        found = []
        for count in (3, 4):
            file.write_text(f"nr_free_pages 12\noom_kill {count}\npgfault 7\n", encoding="ascii")
            found.append(read_oom_kills(Path(folder)))
    say(f"from a folder in place of /proc, with oom_kill 3 and then 4, its reader gives {found}")
    say(f"from this machine's own /proc it gives {read_oom_kills()}")
    return [] if found == [3, 4] else [f"host: the counter's reader gives {found}, not [3, 4]"]


# The flows.


@dataclass(frozen=True)
class Case:
    """One task run, and what must become of it."""

    name: str
    ended: Ended
    cause: str
    #: Processes: exactly so many, or at least, if `more` are allowed.
    processes: int
    state: str = "COMPLETED"
    run_count: int = 1
    more: bool = False


class Warnings(logging.Handler):
    """Keeps what the ladder logs on task runs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno != logging.WARNING:
            return
        run_id = str(getattr(record, "task_run_id", ""))
        self.said.setdefault(run_id, []).append(record.getMessage().partition("\n")[0])


def run_quick_ones(options: argparse.Namespace, processes_file: Path | None) -> list[Case]:
    """Run the cases that need no filler, side by side."""

    def body() -> dict[str, Ended]:
        futures = {
            "killed": kill_itself.submit(),
            "killed, retries=1": kill_itself.with_options(
                name="killed-retried", retries=1
            ).submit(),
        }
        futures["own cap"] = take_too_much.submit()
        if processes_file is not None:
            futures["host"] = exhaust_host.submit(str(processes_file), 4 * GROUP_BYTES)
        return gather(futures, BODY_S)

    flow = run_flow("check-ladder", body, options.devices)
    told = {
        "own cap": ("own_cap", 2, "COMPLETED", 1, True),
        "host": ("host", 1, "CRASHED", 1, False),
        "killed": ("unknown", 1, "CRASHED", 1, False),
        "killed, retries=1": ("unknown", 2, "COMPLETED", 2, False),
    }
    return _take(flow.id, [Case(name, ended, *told[name]) for name, ended in flow.value.items()])


def run_crowded(options: argparse.Namespace, folder: str) -> list[Case]:
    """Run a task of the runner that takes the memory reserved for another task."""

    def body() -> dict[str, Ended]:
        hog = take_others_share.submit(folder)
        wait_for(Path(folder, "hog-is-there"))
        victim = ask_for_share.with_options(name="crowded").submit(folder)
        return gather({"hog": hog, "crowded": victim}, BODY_S)

    flow = run_flow("check-ladder", body, options.devices)
    return _take(
        flow.id,
        [
            Case("the one that took it", flow.value["hog"], "none", 1),
            Case("crowded", flow.value["crowded"], "crowded", 2),
        ],
    )


def run_foreign(options: argparse.Namespace, folder: str, filler: Filler) -> list[Case]:
    """Make the filler take the memory reserved for a task, and free it later."""
    problems: list[BaseException] = []

    def act() -> None:
        try:
            wait_for(Path(folder, "victim-is-there"))
            filler.leave(LITTLE_BYTES)
            Path(folder, "taken").touch()
            wait_for(Path(folder, "refused"))
            time.sleep(AWAY_S)
            filler.leave(ROOM_BYTES)
        except Exception as error:
            problems.append(error)

    actor = threading.Thread(target=act, daemon=True)
    actor.start()

    def body() -> dict[str, Ended]:
        victim = ask_for_share.with_options(name="foreign").submit(folder)
        return gather({"foreign": victim}, BODY_S)

    flow = run_flow("check-ladder", body, options.devices)
    actor.join(PATIENCE_S)
    if problems:
        raise problems[0]
    return _take(flow.id, [Case("foreign", flow.value["foreign"], "foreign", 2)])


#: What the API has of each task run, by its id.
_reports: dict[str, list[Process]] = {}
_task_runs: dict[str, dict[str, Any]] = {}


def _take(flow_run_id: str, cases: list[Case]) -> list[Case]:
    _reports.update(read_processes(flow_run_id, sum(case.processes for case in cases)))
    _task_runs.update(read_task_runs(flow_run_id))
    return cases


def check(options: argparse.Namespace) -> list[str]:
    """Cause each, and look at what became of it."""
    warnings = Warnings()
    logging.getLogger("prefect.task_runs").addHandler(warnings)
    on_gpu, problems, cases = options.devices == "nvml", [], []
    if on_gpu and not installed("torch"):
        return ["torch is not installed"]
    with small_group() if on_gpu else _no_group() as (file, why):
        if file is None:
            say(f"host: a kill for want of the machine's memory cannot be caused here ({why})")
            problems += try_counter()
        cases += run_quick_ones(options, file)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("crowded", "foreign"):
            Path(folder, name).mkdir()
        if not on_gpu:
            cases += run_crowded(options, str(Path(folder, "crowded")))
        else:
            with Filler() as filler:
                filler.leave(ROOM_BYTES)
                cases += run_crowded(options, str(Path(folder, "crowded")))
                cases += run_foreign(options, str(Path(folder, "foreign")), filler)
    return problems + judge(cases, warnings)


@contextlib.contextmanager
def _no_group() -> Iterator[tuple[Path | None, str]]:
    yield None, "only tried out"


def judge(cases: list[Case], warnings: Warnings) -> list[str]:
    """Print what became of each; say what is not as it should be."""
    problems = []
    rows = []
    for case in cases:
        run_id = case.ended.task_run_id
        reports, task_run = _reports.get(run_id, []), _task_runs.get(run_id, {})
        causes = [report["cause"] for report in reports]
        cause = next((found for found in causes if found != "none"), "none")
        state, count = task_run.get("state_type", "?"), task_run.get("run_count", -1)
        rows.append(
            (
                case.name,
                " ".join(causes) or "?",
                " ".join(report["outcome"] for report in reports) or "?",
                " ".join(size(report.bytes("budget_bytes")) for report in reports) or "?",
                " ".join(report["queued_s"] for report in reports) or "?",
                str(count),
                state,
            )
        )
        if cause != case.cause:
            problems.append(f"{case.name}: put down to {cause}, not {case.cause}")
        if len(reports) < case.processes or (len(reports) > case.processes and not case.more):
            problems.append(f"{case.name}: {len(reports)} processes, not {case.processes}")
        if count != case.run_count:
            problems.append(f"{case.name}: Prefect ran it {count} times, not {case.run_count}")
        if state != case.state:
            problems.append(f"{case.name}: it ended {state}, not {case.state}")
        if (state == "COMPLETED") != (case.ended.error is None):
            problems.append(f"{case.name}: the API has {state}, the flow {case.ended.words}")
    table(["case", "cause", "outcomes", "budgets", "queued-s", "run_count", "state"], rows)
    say("cause, outcome, budget (MiB) and wait are those of each process, in order")
    for case in cases:
        for text in warnings.said.get(case.ended.task_run_id, []):
            say(f"{case.name}: {text}")
        if case.ended.error is not None:
            say(f"{case.name}: {case.ended.words}")
    killed = next((case for case in cases if case.name == "killed"), None)
    if killed is not None and "cause unknown" not in str(killed.ended.error):
        problems.append("killed: its error does not say that the cause is unknown")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=240)


if __name__ == "__main__":
    sys.exit(main())
