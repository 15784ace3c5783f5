"""Two flows of one machine: what one of them does, or what happens to it, as the other one sees it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil

from prefect_gpu.devices.shared_folder import SharedFolder
from tests.integration.programs import LIMIT_S, Workplace, lines_of, wait_for

HEAD = """
import os
import sys
import time
from pathlib import Path

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu


def say(text):
    with open("seen.txt", "a") as file:
        file.write(text + chr(10))


def wait_for(*texts):
    while not set(texts) <= set(Path("seen.txt").read_text().splitlines()):
        time.sleep(0.01)

"""


def seen(place: Workplace) -> list[str]:
    return list(lines_of(place.folder / "seen.txt"))


def ends_well(process: subprocess.Popen[str]) -> None:
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "ENDED" in output, errors


ALONE = (
    HEAD
    + """
name = sys.argv[1]


@task
def alone():
    say("begin")
    time.sleep(0.3)
    say("end")


@flow(task_runner=GPUTaskRunner(devices="host", start_method="auto"))
def main():
    say(f"submits {name}")
    wait_for("submits a", "submits b")
    each = [gpu(memory="51%", framework="none"), gpu(memory="1%", exclusive=True, framework="none")]
    futures = [alone.with_options(tags=tags).submit() for tags in each]
    for future in futures:
        future.result()


main()
print("ENDED")
"""
)


def test_the_memory_of_the_machine_is_reserved_once_and_a_task_that_wants_it_alone_has_it_alone(
    place: Workplace,
) -> None:
    place.write("alone.py", ALONE)
    flows = [place.start("alone.py", name) for name in "ab"]
    for each in flows:
        ends_well(each)
    notes = [line for line in seen(place) if line in ("begin", "end")]
    assert notes == ["begin", "end"] * 4


STOPPED = (
    """
from dataclasses import replace
from prefect_gpu.scheduling import backfill

# Before the broker takes it.
backfill.PATIENCE = replace(backfill.PATIENCE, passes=8)
"""
    + HEAD
    + """
@task(tags=gpu(memory="12GiB", framework="none"))
def runs():
    say("runs")
    wait_for("go on")


@task(tags=gpu(memory="20GiB", framework="none"))
def blocked():
    pass


@task(tags=gpu(memory="10GiB", framework="none"))
def short():
    pass


@flow(task_runner=GPUTaskRunner(devices="simulated:1x24GiB@stopped", start_method="auto"))
def main():
    if sys.argv[1] == "stopped":
        futures = [runs.submit(), blocked.submit()]
    else:
        futures = [short.submit() for _ in range(12)]
    for future in futures:
        future.result()


main()
print("ENDED")
"""
)


def test_a_flow_that_is_stopped_keeps_what_it_has_and_holds_up_no_other(place: Workplace) -> None:
    place.write("stopped.py", STOPPED)
    stopped = place.start("stopped.py", "stopped")
    wait_for(lambda: "runs" in seen(place))
    # Not in the middle of a reading of the devices, which would hold others up for some seconds.
    ledger = SharedFolder(Path(place.environment["PREFECT_INTEGRATIONS_GPU_LEDGER"]))
    with ledger.locked("simulated stopped"):
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
    try:
        # More tasks than may pass a blocked one.
        ends_well(place.start("stopped.py", "other"))
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    with (place.folder / "seen.txt").open("a") as file:
        file.write("go on\n")
    ends_well(stopped)


#: A driver that does not answer while there is a file.
PYNVML = """
import os
from tests.fakes.fake_nvml import GIB, FakeGpu, FakeNvml

_machine = FakeNvml(FakeGpu("GPU-a", free_bytes=20 * GIB), FakeGpu("GPU-b", free_bytes=20 * GIB))


def _wrap(call):
    def answer(*args, **kwargs):
        _machine.broken = 999 if os.path.exists("no answer") else None
        _machine.gpus[1].error = 15 if os.path.exists("lost") else None
        return call(*args, **kwargs)

    return answer


for _name in dir(_machine):
    if _name.lower().startswith("nvml"):
        _value = getattr(_machine, _name)
        _call = callable(_value) and not isinstance(_value, type)
        globals()[_name] = _wrap(_value) if _call else _value
"""

DRIVER = (
    HEAD
    + """
from prefect_gpu.broker.device_view import FRESH_S


@task
def body(name):
    say(name)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def on(device, name):
    tags = gpu(memory="1GiB", framework="none", device=device)
    return body.with_options(tags=tags).submit(name)


def waits_for(future, text):
    while text not in (message := future.state.message or ""):
        assert not future.state.is_final(), message
        time.sleep(0.2)


@flow(task_runner=GPUTaskRunner(devices="nvml"))
def main():
    assert on(0, "first").result() == "GPU-a"
    for fault, text in (("no answer", "NVML error 999"), ("lost", "GPU is lost")):
        Path(fault).touch()
        # Until then the last reading is used.
        time.sleep(2 * FRESH_S)
        future = on(1, fault)
        waits_for(future, text)
        assert fault not in Path("seen.txt").read_text()
        Path(fault).unlink()
        assert future.result() == "GPU-b"


main()
print("ENDED")
"""
)


def test_tasks_wait_while_the_driver_does_not_answer_or_has_lost_their_device(
    place: Workplace,
) -> None:
    place.write("pynvml.py", PYNVML)
    place.write("driver.py", DRIVER)
    ends_well(place.start("driver.py"))
