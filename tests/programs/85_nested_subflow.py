# A flow with a runner of its own is called inside a GPU task, on the devices that the task holds.
import os
import threading

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.testing import SimulatedDevices, allocate

THREAD = os.environ.get("RUNNER") == "thread"


def runner():
    return (
        ThreadPoolTaskRunner()
        if THREAD
        else GPUTaskRunner(devices=SimulatedDevices("2x10GiB", context="256MiB"))
    )


def late():
    print("DEADLOCK: nothing has moved for 90 s", flush=True)
    os._exit(3)


@task(tags=gpu(memory="3GiB"))
def fold(x):
    if not THREAD:
        # It is there: what the outer tasks do not use is lent, and promised to nobody else.
        allocate("2GiB")
    return x + 1


@flow(task_runner=runner())
def cross_validate(x):
    return sum(fold.map([x, x, x]).result())


@task(tags=gpu(memory="80%"))
def evaluate(x):
    if not THREAD:
        allocate("1GiB")
    return cross_validate(x)


@flow(task_runner=runner())
def main():
    return evaluate.map([1, 2, 3]).result()


if __name__ == "__main__":
    timer = threading.Timer(90, late)
    timer.daemon = True
    timer.start()
    assert main() == [6, 9, 12]
