# source: https://github.com/PrefectHQ/prefect/issues/17060
# A task that submits tasks and waits for them, while the tasks like it hold the devices.
import os, time
from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.testing import allocate

RUNNER = (
    ThreadPoolTaskRunner()
    if os.environ.get("RUNNER") == "thread"
    else GPUTaskRunner(devices="simulated:1x10GiB@nested")
)


@task(tags=gpu(memory="4GiB"))
def inner(x):
    return x


@task(tags=gpu(memory="4GiB"))
def outer(x):
    return sum(inner.map([x, x]).result())


@flow(task_runner=RUNNER)
def main():
    return outer.map([1, 2]).result()


t = time.time()
import threading


def late():
    print("DEADLOCK: nothing has moved for 400 s", flush=True)
    os._exit(3)


timer = threading.Timer(400, late)
timer.daemon = True
timer.start()
assert main() == [2, 4]
