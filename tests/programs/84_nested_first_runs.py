# Recursion of depth three without a budget: each level holds the device as a first run and waits for the next one.
import os
import threading

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = (
    ThreadPoolTaskRunner()
    if os.environ.get("RUNNER") == "thread"
    else GPUTaskRunner(devices="simulated:1x10GiB")
)


def late():
    print("DEADLOCK: nothing has moved for 90 s", flush=True)
    os._exit(3)


@task(tags=gpu())
def factorial(n):
    if n == 0:
        return 1
    return n * factorial.submit(n - 1).result()


@flow(task_runner=RUNNER)
def main():
    return factorial.map([3, 2]).result()


if __name__ == "__main__":
    timer = threading.Timer(90, late)
    timer.daemon = True
    timer.start()
    assert main() == [6, 2]
