# The outer task uses what it holds, so the inner one can never start: it fails, and the error says what to write.
import os
import threading

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.testing import allocate

THREAD = os.environ.get("RUNNER") == "thread"
RUNNER = ThreadPoolTaskRunner() if THREAD else GPUTaskRunner(devices="simulated:1x10GiB")


def late():
    print("DEADLOCK: nothing has moved for 90 s", flush=True)
    os._exit(3)


@task(tags=gpu(memory="4GiB"))
def inner(x):
    return x


@task(tags=gpu(memory="8GiB"))
def outer(x):
    if not THREAD:
        allocate("7GiB")
    try:
        return inner.submit(x).result()
    except Exception as error:
        assert type(error).__name__ == "PlacementError", error
        assert "from inside a GPU task" in str(error) and "'outer'" in str(error), error
        return "refused"


@flow(task_runner=RUNNER)
def main():
    return outer.map([1, 2]).result()


if __name__ == "__main__":
    timer = threading.Timer(90, late)
    timer.daemon = True
    timer.start()
    assert main() == ([1, 2] if THREAD else ["refused", "refused"])
