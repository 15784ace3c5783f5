"""Flows of several processes on the same devices: one order, one account of the memory, and the end of one of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.scheduling.backfill import PATIENCE
from prefect_gpu.units import GIB
from tests.integration.programs import Workplace, wait_for

#: Seconds for all flows: a fork costs a tenth of a second of CPU.
LIMIT_S = 1500

PROGRAM = """
import contextlib
import random
import sys
import time

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.testing import allocate

name, count, devices = sys.argv[1], int(sys.argv[2]), sys.argv[3]


@task(tags=["gpu"])
def work(gib, seconds, count):
    with contextlib.ExitStack() as held:
        for at in range(count):
            held.enter_context(allocate(f"{gib}GiB", at))
        time.sleep(seconds)


@flow(task_runner=GPUTaskRunner(devices=devices, start_method="auto", max_processes=64))
def shared():
    # The same in each flow, so that their waits can be compared.
    choose = random.Random(0)
    # The first task starts the source of forks.
    work.with_options(tags=gpu(memory="1GiB", framework="none")).submit(1, 0.0, 1).result()
    print("READY", flush=True)
    sys.stdin.readline()
    futures = []
    for number in range(count):
        gib = choose.choice([2, 3, 5, 8, 11])
        # One in twenty wants a device to itself, and one in twenty both.
        alone, devices = number % 20 == 7, 2 if number % 20 == 13 else 1
        tags = gpu(memory=f"{gib}GiB", framework="none", exclusive=alone, count=devices)
        tagged = work.with_options(tags=tags)
        futures.append(tagged.submit(gib, choose.uniform(0.0, 0.1), devices))
    for future in futures:
        future.result()


shared()
print("ENDED", flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One change in the log of a ledger."""

    at_s: float
    owner: str
    request: str
    entry: dict[str, Any] | None

    @property
    def held(self) -> dict[str, int]:
        """Bytes by device."""
        return {r["device_uuid"]: r["reserved_bytes"] for r in self.reservations}

    @property
    def reservations(self) -> list[dict[str, Any]]:
        """What the request holds."""
        return [] if self.entry is None else list(self.entry["reservations"])


def read_log(folder: Path) -> list[Row]:
    """Read the log of a ledger from its file, as any program could; empty: there is none yet."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{folder / 'ledger.db'}?mode=ro", uri=True)
        ) as log:
            rows = log.execute("SELECT at_s, owner, request, entry FROM log ORDER BY number")
            return [Row(at, o, r, None if e is None else json.loads(e)) for at, o, r, e in rows]
    except sqlite3.OperationalError:
        return []


def steps(log: list[Row]) -> Iterator[tuple[Row, dict[str, int]]]:
    """Yield each change and what is reserved of each device after it."""
    held: dict[str, dict[str, int]] = {}
    for row in log:
        held[row.request] = row.held
        sums: dict[str, int] = defaultdict(int)
        for by_device in held.values():
            for device, size_bytes in by_device.items():
                sums[device] += size_bytes
        yield row, dict(sums)


def owner_of(folder: Path, pid: int) -> str:
    """Return the name of a process in a ledger."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as database:
        owners = database.execute("SELECT owner, about FROM owners").fetchall()
    return next((owner for owner, about in owners if json.loads(about)["pid"] == pid), "")


def start_three(place: Workplace, count: int, devices: str) -> dict[str, subprocess.Popen[str]]:
    """Start three flows, and let them submit their tasks at the same moment.

    Their log goes to files: it is more than a pipe holds that nobody reads.
    """
    place.write("shared.py", PROGRAM)
    flows = {}
    for name in ("a", "b", "c"):
        with _log_of(place, name).open("wb") as log:
            flows[name] = place.start(
                "shared.py", name, str(count), devices, stdin=subprocess.PIPE, stderr=log
            )
    for name, each in flows.items():
        assert each.stdout is not None
        assert any("READY" in line for line in each.stdout), _log_of(place, name).read_text()
    for each in flows.values():
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    return flows


def check_end(place: Workplace, name: str, flow: subprocess.Popen[str]) -> None:
    """Wait for the end of a flow, and check that it is a good one."""
    output, _ = flow.communicate(timeout=LIMIT_S)
    assert flow.returncode == 0 and "ENDED" in output, _log_of(place, name).read_text()


def _log_of(place: Workplace, name: str) -> Path:
    return place.folder / f"{name}.log"


def check_capacity(log: list[Row], capacity_bytes: int) -> int:
    """Check that no device was ever promised twice, and that who wants one alone has it alone.

    Returns:
        The most bytes of a device that were promised at a time.
    """
    most = 0
    for row, sums in steps(log):
        most = max(most, *sums.values(), 0)
        assert most <= capacity_bytes, f"{row.at_s}: {sums}"
    held: dict[str, list[dict[str, Any]]] = {}
    for row in log:
        held[row.request] = row.reservations
        if not row.reservations:
            del held[row.request]
            continue
        by_device: dict[str, list[bool]] = defaultdict(list)
        for each in (each for reservations in held.values() for each in reservations):
            by_device[each["device_uuid"]].append(each["exclusive"])
        assert not [d for d, alone in by_device.items() if len(alone) > 1 and any(alone)], row
    return most


def handovers_s(log: list[Row]) -> list[float]:
    """Return the seconds from a release to the next placement on one of its devices, by a waiting task of another flow.

    Only releases that nothing else happened after are counted, so that it is the release which let the task start.
    """
    found = []
    waiting: set[str] = set()
    for before, row in itertools.pairwise(log):
        released = before.entry is None
        if released and row.reservations and row.request in waiting and row.owner != before.owner:
            found.append(row.at_s - before.at_s)
        waiting.discard(row.request)
        if row.entry is not None and not row.reservations:
            waiting.add(row.request)
    return found


def left_in(folder: Path) -> list[str]:
    """Return the files of flows that are gone in a folder of a ledger."""
    patterns = ("*.lock", "simulated * *")
    return [path.name for pattern in patterns for path in folder.glob(pattern)]


def waits_s(log: list[Row]) -> dict[str, list[float]]:
    """Return the seconds between the first two changes of each request, by owner."""
    first: dict[str, float] = {}
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in log:
        first.setdefault(row.request, row.at_s)
        if row.held and row.request not in found[row.owner]:
            found[row.owner][row.request] = row.at_s - first[row.request]
    return {owner: list(by_request.values()) for owner, by_request in found.items()}


def passes(log: list[Row]) -> int:
    """Return how often the request was passed that was passed most."""
    return max(row.entry["status"][0] for row in log if row.entry is not None)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
def test_three_flows_share_two_devices(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    flows = start_three(place, 200, "simulated:2x24GiB@shared")
    for name, each in flows.items():
        check_end(place, name, each)
    log = read_log(place.folder / "ledger")
    most = check_capacity(log, 24 * GIB)
    waits = waits_s(log)
    means = sorted(statistics.mean(each) for each in waits.values())
    handed = handovers_s(log)
    with capsys.disabled():
        print(
            f"\nmost promised of a device: {most / GIB:.0f} GiB of 24; passed at most {passes(log)} times"
        )
        print(
            f"from a release to the start of a task of another flow, {len(handed)} times: median "
            f"{statistics.median(handed) * 1000:.0f} ms, at most {max(handed) * 1000:.0f} ms"
        )
        print(f"mean wait of each flow's tasks: {', '.join(f'{mean:.1f} s' for mean in means)}")
    assert [len(each) for each in waits.values()] == [201, 201, 201]
    assert passes(log) <= PATIENCE.passes
    *_, (_, left) = steps(log)
    assert left == {}
    assert left_in(place.folder / "ledger") == []


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
def test_a_flow_that_is_killed_leaves_its_memory_to_the_others(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    flows = start_three(place, 200, "simulated:2x24GiB@killed")
    folder = place.folder / "ledger"

    killed = flows.pop("a")
    owner = owner_of(folder, killed.pid)

    def all_run() -> bool:
        """Return whether each flow has placed half of its tasks, and the first holds memory now."""
        log = read_log(folder)
        last = {row.request: row for row in log if row.owner == owner}
        placed = [len(each) for each in waits_s(log).values()]
        return min(placed) > 100 and any(row.held for row in last.values())

    wait_for(all_run)
    os.kill(killed.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    killed.communicate()
    for name, each in flows.items():
        check_end(place, name, each)
    log = read_log(folder)
    check_capacity(log, 24 * GIB)
    freed_s = max(row.at_s for row in log if row.owner == owner) - killed_s
    with capsys.disabled():
        print(f"\nthe others had its memory {freed_s:.2f} s after it was killed")
    *_, (_, left) = steps(log)
    assert left == {}
    assert [len(each) for who, each in waits_s(log).items() if who != owner] == [201, 201]
    # Files of the flow that was killed were removed by the others.
    assert left_in(folder) == []
