"""Background tasks (`task.delay()`): under `prefect_gpu.serve` a GPU task has its process, its device and its place in the
one queue; under Prefect's own `serve` a warning says that it has none of these.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from prefect import get_client
from prefect.client.schemas.objects import StateType

from tests.fakes.ports import free_port
from tests.integration import engine_api as api
from tests.integration.programs import Workplace, lines_of, wait_for, workplace

DEVICES = "simulated:1x8GiB@background"

#: What processes of tasks import: without Prefect, which takes a second.
BODIES = """
import asyncio
import os
import time

from prefect_gpu import current_allocation
from prefect_gpu.testing import allocate


def seen():
    allocation = current_allocation()
    return os.getpid(), allocation and allocation.budget_bytes >> 30


def note(text):
    with open("notes.txt", "a") as file:
        file.write(f"{text}\\n")


def work(index, caller="delay"):
    # Of more than seven at a time one would find no memory.
    with allocate("1000MiB"):
        note(f"{caller} 1")
        time.sleep(0.05)
        note(f"{caller} -1")
        return index, *seen()


def plain():
    return seen()


async def work_async():
    await asyncio.sleep(0)
    return seen()


async def plain_async():
    await asyncio.sleep(0)
    return seen()


def hold(index):
    with open("held.txt", "a") as file:
        file.write(f"{index} {os.getpid()}\\n")
    while not os.path.exists("go"):
        time.sleep(0.02)
    return index


def fail_once():
    if not os.path.exists("failed"):
        open("failed", "w").close()
        time.sleep(600)
    return seen()
"""

#: What servers, callers and flows import.
JOBS = """
import bodies_of_jobs as bodies
from prefect import task
from prefect_gpu import gpu

SMALL = gpu(memory="1GiB", framework="none")

work = task(bodies.work, tags=SMALL)
work_async = task(bodies.work_async, tags=SMALL)
plain = task(bodies.plain)
plain_async = task(bodies.plain_async)
hold = task(bodies.hold, tags=SMALL)
fail_once = task(bodies.fail_once, tags=SMALL, retries=1, timeout_seconds=3)
"""

SERVER = """
import os
import sys

from jobs import fail_once, hold, plain, plain_async, work, work_async
from prefect_gpu import GPUTaskRunner, serve

print("server", os.getpid(), flush=True)
serve(
    work, work_async, plain, plain_async, hold, fail_once,
    runner=GPUTaskRunner(devices=sys.argv[1]),
    limit=int(sys.argv[2]),
    status_server_port=int(sys.argv[3]),
)
"""

#: Prefect's own: nothing of the package is imported but what writes the tags.
PREFECTS_SERVER = """
from prefect.task_worker import serve
from jobs import plain, work_async

serve(work_async, plain)
"""


class Server:
    """A program that serves `jobs`, and what it prints."""

    def __init__(self, place: Workplace, limit: int = 10, program: str = SERVER) -> None:
        self.output = place.folder / f"server-{len(list(place.folder.glob('server-*')))}.txt"
        self.status_port = free_port()
        place.write("server.py", program)
        with self.output.open("w") as file:
            self.process = place.start(
                *("server.py", DEVICES, str(limit), str(self.status_port)),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        wait_for(lambda: "Subscribing" in self.printed(), explain=self.printed)

    def printed(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def end(self, signum: int) -> None:
        self.process.send_signal(signum)
        assert self.process.wait(120) == -signum, self.printed()


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        made.environment["PREFECT_INTEGRATIONS_GPU_DEVICES"] = DEVICES
        made.write("bodies_of_jobs.py", BODIES)
        made.write("jobs.py", JOBS)
        yield made


def call(place: Workplace, text: str) -> dict[str, str]:
    """Run a program that makes `found`; return it."""
    place.write(
        "call.py",
        f"import json\nfrom jobs import *\nfrom prefect_gpu import gpu\n{text}\nprint(json.dumps(found))\n",
    )
    found: dict[str, str] = json.loads(place.run("call.py").stdout.splitlines()[-1])
    return found


def state_types(ids: list[str]) -> list[StateType | None]:
    with get_client(sync_client=True) as client:
        return [client.read_task_run(UUID(each)).state_type for each in ids]


def held(place: Workplace) -> dict[int, int]:
    """Return the process of each call of `hold` that has begun."""
    return {int(i): int(pid) for i, pid in map(str.split, lines_of(place.folder / "held.txt"))}


def assert_nothing_is_left(place: Workplace) -> None:
    place.wait_until_gone(60.0)
    status = json.loads(place.run("-m", "prefect_gpu", "status", "--json").stdout)
    assert (status["tasks"], status["waiting"]) == ([], [])


def test_gpu_tags_have_their_effect_in_the_background(place: Workplace) -> None:
    server = Server(place)
    found = call(
        place,
        """
from prefect import flow, tags
from prefect_gpu import GPUTaskRunner

@flow(task_runner=GPUTaskRunner(devices="host"))
def call_in_flow():
    return {"in_flow": work.delay(6)}

with tags("gpu:memory=5GiB"):
    futures = call_in_flow()
futures |= {
    "work": work.delay(7),
    "work_async": work_async.delay(),
    "plain": plain.delay(),
    "plain_async": plain_async.delay(),
    "other_tags": work.with_options(tags=gpu(memory="2GiB", framework="none")).delay(8),
    "retried": fail_once.delay(),
}
with tags(*gpu(memory="3GiB", framework="none")):
    futures |= {"plain_tagged": plain.delay(), "work_tagged": work.delay(9)}
found = {name: future.result() for name, future in futures.items()}
found["id"] = str(futures["work"].task_run_id)
found["held"] = str(hold.delay(0).task_run_id)
""",
    )
    pid = server.process.pid
    indices = [found[name][0] for name in ("in_flow", "work", "other_tags", "work_tagged")]
    assert indices == [6, 7, 8, 9]
    budgets = {name: value[-1] for name, value in found.items() if name not in ("id", "held")}
    assert budgets == {
        "in_flow": 1, "work": 1, "work_async": 1, "plain": None, "plain_async": None, "other_tags": 2, "retried": 1, "plain_tagged": 3, "work_tagged": 3
    }  # fmt: skip
    pids = {name: value[-2] for name, value in found.items() if name in budgets}
    assert pids.pop("plain") == pids.pop("plain_async") == pid and pid not in pids.values()
    assert len({*pids.values()}) == len(pids), "each has a process of its own"
    (report,) = api.artifacts(task_run_id=UUID(found["id"]), count=1)
    assert report.key == "gpu-memory-work"

    wait_for(lambda: 0 in held(place), explain=server.printed)
    status = f"http://127.0.0.1:{server.status_port}/status"
    wait_for(lambda: httpx.get(status).json()["current"] == 1, explain=server.printed)
    assert sum(httpx.get(status).json()["finished"].values()) == len(found) - 2
    server.end(signal.SIGTERM)
    assert_nothing_is_left(place)
    ended = api.task_run(UUID(found["held"])).state
    assert ended is not None and ended.is_crashed()
    assert ended.message == "Execution was aborted by a termination signal."
    printed = server.printed()
    assert "GPU task runs: 7 Completed, 1 Crashed" in printed
    assert "Failed to submit" not in printed and "no effect" not in printed


@pytest.mark.slow
def test_200_calls_and_a_flow_wait_in_one_queue(place: Workplace) -> None:
    server = Server(place, limit=20)
    place.write(
        "beside.py",
        f"""
import os
import time

from jobs import work
from prefect import flow
from prefect_gpu import GPUTaskRunner

@flow(task_runner=GPUTaskRunner(devices="{DEVICES}"))
def beside():
    while not os.path.exists("notes.txt"):
        time.sleep(0.1)
    return work.map(range(40), caller="flow").result()

assert [value[0] for value in beside()] == list(range(40))
""",
    )
    beside = place.start("beside.py", stdout=subprocess.DEVNULL)
    found = call(
        place,
        """
found = [future.result() for future in [work.delay(index) for index in range(200)]]
""",
    )
    _, errors = beside.communicate(timeout=400)
    assert beside.returncode == 0, errors
    assert [value[0] for value in found] == list(range(200))
    assert len({value[1] for value in found}) == 200
    assert {value[2] for value in found} == {1}
    notes = [line.split() for line in lines_of(place.folder / "notes.txt")]
    callers = [caller for caller, _ in notes]
    assert Counter(callers) == {"delay": 400, "flow": 80}
    assert callers.index("delay") < len(callers) - callers[::-1].index("flow") - 1
    assert callers.index("flow") < len(callers) - callers[::-1].index("delay") - 1
    running = [*accumulate(int(change) for _, change in notes)]
    # 256 MiB are kept free.
    assert 1 < max(running) <= 7 and running[-1] == 0
    server.end(signal.SIGINT)
    assert "GPU task runs: 200 Completed" in server.printed()
    assert_nothing_is_left(place)


@pytest.mark.slow
def test_kill_9_leaves_no_process_and_no_reservation(place: Workplace) -> None:
    server = Server(place, limit=2)
    ids = call(place, "found = [str(hold.delay(index).task_run_id) for index in range(6)]")
    wait_for(lambda: len(held(place)) == 2, explain=server.printed)
    begun = held(place)
    server.end(signal.SIGKILL)
    assert_nothing_is_left(place)
    (place.folder / "go").touch()
    second = Server(place)
    # Prefect's rules: what had begun stays Running, what no worker had fetched is for the next one.
    for each in ids[-2:]:
        assert api.task_run(UUID(each)).state_type == StateType.COMPLETED
    counts = Counter(state_types([ids[index] for index in begun]))
    assert counts == {StateType.RUNNING: 2}
    second.end(signal.SIGTERM)
    assert_nothing_is_left(place)


@pytest.mark.slow
def test_prefects_own_serve_warns_once_for_each_task(place: Workplace) -> None:
    server = Server(place, program=PREFECTS_SERVER)
    found = call(
        place,
        "found = [f.result() for f in [work_async.delay(), work_async.delay(), plain.delay()]]",
    )
    pid = server.process.pid
    assert [[*value] for value in found] == [[pid, None]] * 3
    server.end(signal.SIGTERM)
    warnings = [line for line in server.printed().splitlines() if "WARNING" in line]
    (warning,) = [line for line in warnings if "prefect_gpu" in line]
    assert "GPU task 'work_async'" in warning and "prefect_gpu.serve" in warning
