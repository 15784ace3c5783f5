# Libraries ask for the name of the process and for the arguments of the program before they log or start workers.
import multiprocessing as mp
import os
import sys

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


def where():
    return (
        mp.current_process().name,
        sys.argv,
        sys.flags.optimize,
        sys.flags.utf8_mode,
        mp.get_context()._name,
    )


def square(value):
    return value * value


@task(tags=TAGS)
def looks():
    return where()


@task(tags=TAGS)
def works(lock, total):
    # Workers that the task itself starts, and what the manager of the flow lends.
    with mp.get_context("spawn").Pool(2) as pool, lock:
        total.value += sum(pool.map(square, range(4)))
    return total.value


@flow(task_runner=RUNNER)
def main():
    assert looks.submit().result() == where()
    with mp.Manager() as manager:
        lock, total = manager.Lock(), manager.Value("i", 0)
        assert [works.submit(lock, total).result() for _ in range(2)] == [14, 28]


if __name__ == "__main__":
    sys.argv += ["--epochs", "3"]
    mp.set_start_method("forkserver")
    mp.current_process().name = "trainer"
    main()
