# A run's name and a file's name are made of the parameters: by a template, by a function, and in the body.
import os

from prefect import flow, task
from prefect.runtime import task_run
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


def name_of_run():
    return "train-{dataset}-{size}".format(**task_run.parameters)


@task(tags=TAGS, task_run_name=name_of_run)
def train(dataset, size=3):
    return task_run.name, f"{name_of_run()}.pt"


@task(tags=TAGS, task_run_name="eval-{dataset}")
async def evaluate(dataset, size=3):
    return task_run.name, sorted(task_run.parameters)


@flow(task_runner=RUNNER)
def main():
    assert train.submit("mnist").result() == ("train-mnist-3", "train-mnist-3.pt")
    assert evaluate.submit("mnist").result() == ("eval-mnist", ["dataset", "size"])


if __name__ == "__main__":
    main()
