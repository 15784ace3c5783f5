# Asynchronous tasks that hold a device submit tasks: they wait in a thread, by `as_completed`, or leave it to the end.
import asyncio
import os
import threading

from prefect import flow, task
from prefect.futures import as_completed
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

THREAD = os.environ.get("RUNNER") == "thread"
RUNNER = ThreadPoolTaskRunner() if THREAD else GPUTaskRunner(devices="simulated:1x10GiB")


def late():
    print("DEADLOCK: nothing has moved for 90 s", flush=True)
    os._exit(3)


@task(tags=gpu(memory="4GiB"))
async def inner(x):
    await asyncio.sleep(0.01)
    return x


@task(tags=gpu(memory="4GiB"))
async def gather(x):
    futures = [inner.submit(x), inner.submit(x + 1)]
    return sum(await asyncio.gather(*(asyncio.to_thread(each.result) for each in futures)))


@task(tags=gpu(memory="4GiB"))
def one_by_one(x):
    return sum(each.result() for each in as_completed([inner.submit(x), inner.submit(x + 1)]))


@task(tags=gpu(memory="4GiB"))
def leave(x):
    inner.submit(x)
    return x


@flow(task_runner=RUNNER)
def main():
    return [each.result() for each in (gather.submit(1), one_by_one.submit(2), leave.submit(3))]


if __name__ == "__main__":
    timer = threading.Timer(90, late)
    timer.daemon = True
    timer.start()
    assert main() == [3, 5, 3]
