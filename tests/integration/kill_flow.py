"""Kill a flow with `kill -9` and print how long the processes that it started lived on.

    python -m tests.integration.kill_flow

Eight GPU tasks run on host devices; two of them have started a process of their own, one of these in
a session of its own. Prints what was found, and ends with 1 if anything was left after two seconds.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from prefect_gpu.clock import DEADLOCK_S
from tests.integration.programs import Workplace, lines_of, wait_for, workplace

#: Seconds after which nothing may be left.
LIMIT_S = 2.0

CHILDREN = 8

#: A flow whose tasks sleep; the first two have a process of their own each. Arguments: how many, and
#: how the flow ends (`wait`, `raise`, `exit`; `cancel`: by a signal of a worker that cancels it).
SLEEPERS = """
import os
import subprocess
import sys
import time

from prefect import flow, flow_engine, task

from prefect_gpu import GPUTaskRunner, gpu

COUNT, END = int(sys.argv[1]), sys.argv[2]
FOLDER = os.getcwd()


def note(kind):
    with open(os.path.join(FOLDER, "pids.txt"), "a") as file:
        file.write(f"{kind}\\n")


@task(tags=gpu(memory="64MiB", framework="none"))
def sleep(index):
    notes = [f"child {os.getpid()}"]
    if index < 2:
        helper = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=index == 1
        )
        notes.append(f"{'session' if index else 'helper'} {helper.pid}")
    note("\\n".join(notes))
    time.sleep(600)


@flow(task_runner=GPUTaskRunner(devices="host", max_processes=COUNT), flow_run_name=sys.argv[3])
def sleepers():
    futures = sleep.map(list(range(COUNT)))
    if END in ("raise", "exit"):
        while True:
            time.sleep(0.01)
            try:
                if open("pids.txt").read().count("child") == COUNT:
                    break
            except FileNotFoundError:
                pass
        if END == "exit":
            os._exit(7)
        raise ValueError("the flow ends here")
    return futures.result()


if END == "cancel":
    # A worker says it before it sends the signal.
    flow_engine._termination_intent = lambda: "cancel"
sleepers()
"""


@dataclass(frozen=True)
class Running:
    """A flow whose tasks all sleep."""

    process: subprocess.Popen[str]
    #: Process id to what it is: "child", "helper" (of a child) or "session" (the same, in its own).
    pids: dict[int, str]

    def left(self) -> list[int]:
        """Return those of its tasks' processes that live."""
        return [pid for pid in self.pids if _lives(pid)]

    def wait_until_none_left(self, began: float, limit_s: float) -> float:
        """Wait until none lives; return the seconds since `began`."""
        wait_for(lambda: not self.left(), limit_s, lambda: f"left: {self.left()}")
        return time.monotonic() - began


def start_sleepers(place: Workplace, count: int, name: str, end: str = "wait") -> Running:
    """Start a flow and wait until all its tasks sleep."""
    place.write("sleepers.py", SLEEPERS)
    process = place.start("sleepers.py", str(count), end, name, stdout=subprocess.DEVNULL)
    helpers = min(count, 2)
    return Running(process, read_pids(place, count + helpers, process))


def read_pids(place: Workplace, count: int, process: subprocess.Popen[str]) -> dict[int, str]:
    """Wait until the tasks have noted as many processes; return them."""
    file = place.folder / "pids.txt"
    wait_for(lambda: len(lines_of(file)) >= count or process.poll() is not None)
    lines = lines_of(file)
    if len(lines) < count:
        raise AssertionError(process.communicate()[1])
    return {int(pid): kind for kind, pid in (line.split() for line in lines)}


def kill_flow(place: Workplace, count: int = CHILDREN) -> tuple[Running, float]:
    """Kill a flow; return what ran, and the seconds until none of it was left."""
    running = start_sleepers(place, count, f"killed-{place.token}")
    sessions = {pid: os.getsid(pid) for pid in running.pids}
    # The premise: each child leads a session, and one helper has left its child's.
    assert all(sessions[p] == p for p, kind in running.pids.items() if kind in ("child", "session"))
    assert all(sessions[p] != p for p, kind in running.pids.items() if kind == "helper")
    began = time.monotonic()
    running.process.send_signal(signal.SIGKILL)
    seconds = running.wait_until_none_left(began, DEADLOCK_S)
    running.process.communicate()
    return running, seconds


def main() -> int:
    """Run it once, with a Prefect server of its own."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    with ExitStack() as stack:
        stack.enter_context(prefect_test_harness(server_startup_timeout=120))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = stack.enter_context(workplace(folder, PREFECT_API_URL.value()))
        running, seconds = kill_flow(place)
        kinds = [*running.pids.values()]
        print(f"{platform.platform()}, Python {platform.python_version()}")
        print(
            f"a flow with {kinds.count('child')} running GPU tasks, "
            f"{len(kinds) - kinds.count('child')} of which had started a process of their own "
            f"({kinds.count('session')} in a session of its own): kill -9"
        )
        print(f"tasks' processes left after {seconds:.2f} s: {len(running.left())}")
        time.sleep(max(0.0, LIMIT_S - seconds))
        left = place.processes()
        print(f"processes of any kind left after {LIMIT_S:g} s: {len(left)} {left or ''}")
    return 1 if left or seconds > LIMIT_S else 0


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return not file.read().rpartition(b") ")[2].startswith(b"Z")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
