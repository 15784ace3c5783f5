"""Tasks that are suspended for others, across flows of several processes, on simulated devices and a driver that is a fake."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

from tests.integration.programs import REPOSITORY, Workplace, wait_for

HEAD = f"""
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, {str(REPOSITORY)!r})
from tests.fakes import suspending

suspending.install(Path("driver"))

from prefect import flow, task
from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.live.progress import combine, view_lines
from prefect_gpu.live.view import live_view
from prefect_gpu.testing import allocate


def runner(devices, **options):
    return GPUTaskRunner(devices=devices, headroom="0", **options)
"""

#: Counts until a file says that it is enough, on a device of its budget.
COUNTS = """
@task(tags=gpu(memory="6GiB", framework="none", preemptible=True))
def count(name):
    with allocate("5GiB"):
        turns = 0
        Path(f"{name}.run").write_text(f"{os.getpid()} {current_allocation().device_uuids[0]}")
        while not Path(f"{name}.go").exists():
            turns += 1
            # Replaced: a reader, or a stop, must not find it while it is written.
            Path(f"{name}.new").write_text(str(turns))
            Path(f"{name}.new").replace(f"{name}.turns")
            time.sleep(0.02)
        return turns, current_allocation().attempt
"""

TRAIN = (
    HEAD
    + COUNTS
    + """
def show():
    \"\"\"Write what a terminal would show.\"\"\"
    while True:
        parts = [each() for each in (*live_view()._sources.values(),)]
        if parts:
            Path("view.new").write_text("\\n".join(view_lines(combine(parts), 40)))
            Path("view.new").replace("view")
        time.sleep(0.1)


@flow(task_runner=runner(sys.argv[1]))
def trains():
    threading.Thread(target=show, daemon=True).start()
    futures = [count.with_options(task_run_name=name).submit(name) for name in sys.argv[2:]]
    for future in futures:
        print("RESULT", *future.result(), flush=True)


trains()
"""
)

URGENT = (
    HEAD
    + """
gib, priority, exclusive = sys.argv[2], int(sys.argv[3]), len(sys.argv) > 4


@task(tags=gpu(memory=f"{gib}GiB", framework="none", priority=priority, exclusive=exclusive))
def urgent():
    with allocate(f"{int(gib) - 1}GiB"):
        Path("urgent.run").write_text(current_allocation().device_uuids[0])
        while not Path("urgent.go").exists():
            time.sleep(0.02)


@flow(task_runner=runner(sys.argv[1]))
def flow_of_urgent():
    urgent.submit().result()


flow_of_urgent()
print("ENDED", flush=True)
"""
)


class Scene:
    """Flows of several processes in one folder."""

    def __init__(self, place: Workplace, devices: str) -> None:
        self.place = place
        self.devices = devices
        self.started: list[subprocess.Popen[str]] = []
        place.write("train.py", TRAIN)
        place.write("urgent.py", URGENT)

    def start(self, program: str, *words: str) -> subprocess.Popen[str]:
        self.started.append(self.place.start(program, self.devices, *words))
        return self.started[-1]

    def read(self, name: str) -> str:
        path = self.place.folder / name
        return path.read_text() if path.exists() else ""

    def appears(self, name: str) -> str:
        def there() -> bool:
            for each in self.started:
                if each.poll():
                    raise AssertionError(each.communicate()[1])
            return bool(self.read(name))

        wait_for(there, explain=lambda: f"no {name}")
        return self.read(name)

    def touch(self, name: str) -> None:
        (self.place.folder / name).touch()

    def goes_on(self, name: str) -> None:
        def turns() -> int:
            # There is none before the first turn.
            return int(self.read(f"{name}.turns") or 0)

        before = turns()
        wait_for(lambda: turns() > before)

    def status(self, name: str) -> str:
        return psutil.Process(int(self.read(f"{name}.run").split()[0])).status()


def ended(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output + errors


def test_a_task_of_another_flow_is_suspended_for_an_urgent_one_and_loses_no_step(
    place: Workplace,
) -> None:
    scene = Scene(place, "simulated:1x8GiB@preempt")
    training = scene.start("train.py", "a")
    scene.appears("a.run")
    urgent = scene.start("urgent.py", "6", "5")
    scene.appears("urgent.run")
    assert scene.status("a") == psutil.STATUS_STOPPED
    turns = scene.read("a.turns")
    status = place.run("-m", "prefect_gpu", "status", "--devices", scene.devices).stdout
    assert scene.read("a.turns") == turns
    assert "5GiB in host memory" in status, status
    wait_for(
        lambda: "5GiB in host memory" in scene.read("view"), explain=lambda: scene.read("view")
    )
    shown = scene.read("view")
    assert "0 running, 1 waiting for a device" in shown and "for task 'urgent'" in shown, shown
    scene.touch("urgent.go")
    assert "ENDED" in ended(urgent)
    scene.goes_on("a")
    wait_for(
        lambda: "1 running, 0 waiting" in scene.read("view"), explain=lambda: scene.read("view")
    )
    scene.touch("a.go")
    output = ended(training)
    assert output.splitlines().count("RESULT") == 0
    result = next(line for line in output.splitlines() if line.startswith("RESULT"))
    assert result.split()[2] == "1", "it ran again"
    assert "suspended for task 'urgent'" in output, output


@pytest.mark.slow
def test_nothing_is_suspended_for_a_task_of_the_same_priority(place: Workplace) -> None:
    scene = Scene(place, "simulated:1x8GiB@equal")
    training = scene.start("train.py", "a")
    scene.appears("a.run")
    urgent = scene.start("urgent.py", "6", "0")
    wait_for(
        lambda: (
            "urgent" in place.run("-m", "prefect_gpu", "status", "--devices", scene.devices).stdout
        )
    )
    scene.goes_on("a")
    assert not scene.read("urgent.run")
    scene.touch("a.go")
    scene.touch("urgent.go")
    assert "suspended" not in ended(training)
    ended(urgent)


def test_a_task_is_moved_to_make_room_for_one_that_needs_a_whole_device(place: Workplace) -> None:
    scene = Scene(place, "simulated:2x16GiB@moves")
    training = scene.start("train.py", "a", "b")
    first, second = (scene.appears(f"{name}.run").split()[1] for name in "ab")
    assert first != second, "they are spread"
    urgent = scene.start("urgent.py", "15", "0")
    there = scene.appears("urgent.run")
    assert there in (first, second)
    for name in "ab":
        scene.goes_on(name)
    status = place.run("-m", "prefect_gpu", "status", "--devices", scene.devices, "--json").stdout
    assert status.count('"used_bytes": 5368709120') >= 2, status
    for name in ("urgent", "a", "b"):
        scene.touch(f"{name}.go")
    ended(urgent)
    output = ended(training)
    assert output.count("Goes on, now on device") == 1, output
    assert [line.split()[2] for line in output.splitlines() if line.startswith("RESULT")] == [
        "1",
        "1",
    ]


@pytest.mark.slow
def test_a_suspended_task_comes_back_if_the_flow_that_needed_the_room_is_killed(
    place: Workplace,
) -> None:
    scene = Scene(place, "simulated:1x8GiB@killed")
    training = scene.start("train.py", "a")
    scene.appears("a.run")
    urgent = scene.start("urgent.py", "6", "5")
    scene.appears("urgent.run")
    os.killpg(urgent.pid, signal.SIGKILL)
    urgent.communicate()
    scene.goes_on("a")
    scene.touch("a.go")
    assert "RESULT" in ended(training)


@pytest.mark.slow
def test_a_flow_that_is_killed_while_its_task_is_suspended_leaves_nothing(place: Workplace) -> None:
    scene = Scene(place, "simulated:1x8GiB@gone")
    training = scene.start("train.py", "a")
    pid = int(scene.appears("a.run").split()[0])
    urgent = scene.start("urgent.py", "6", "5")
    scene.appears("urgent.run")
    os.kill(training.pid, signal.SIGKILL)
    training.communicate()
    wait_for(lambda: not psutil.pid_exists(pid))
    scene.touch("urgent.go")
    ended(urgent)
    status = place.run("-m", "prefect_gpu", "status", "--devices", scene.devices).stdout
    assert "no tasks on devices" in status and "no tasks waiting" in status, status
