# Levels that the script sets of its own loggers and of a library's decide what the task computes and logs.
import logging
import os

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

logging.basicConfig(level=logging.WARNING)
LOG = logging.getLogger("mine.model")


@task(tags=TAGS)
def levels():
    return {
        "own": LOG.isEnabledFor(logging.DEBUG),
        "library": logging.getLogger("urllib3.connectionpool").isEnabledFor(logging.WARNING),
        "propagates": logging.getLogger("noisy").propagate,
        "disabled": logging.getLogger("old").disabled,
        "root": logging.getLogger().level,
    }


@task(tags=TAGS)
def of_prefect():
    from prefect import get_run_logger

    get_run_logger().info("a line of the run")
    return levels.fn()


@flow(task_runner=RUNNER)
def main():
    wanted = {
        "own": True,
        "library": False,
        "propagates": False,
        "disabled": True,
        "root": logging.INFO,
    }
    for each in (levels, of_prefect):
        got = each.submit().result()
        assert got == wanted, (each.name, got)


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("mine").setLevel(logging.DEBUG)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    logging.getLogger("noisy").propagate = False
    logging.getLogger("old").disabled = True
    main()
