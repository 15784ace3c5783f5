# source: https://github.com/pytorch/pytorch/issues/40403
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

# The script sets the start method since CUDA forbids fork; a task that starts processes must get it.
import multiprocessing as mp


def where():
    import multiprocessing

    return multiprocessing.get_start_method()


@task(tags=TAGS)
def method():
    import multiprocessing

    return multiprocessing.get_start_method()


@flow(task_runner=RUNNER)
def main():
    got = method.submit().result()
    assert got == "spawn", got


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
