# A helper notes with which parameters a task run was called, as experiment trackers do: results of other tasks among them.
import os

from prefect import flow, task
from prefect.context import TaskRunContext
from prefect.runtime import task_run
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


def noted():
    return dict(task_run.parameters), dict(TaskRunContext.get().parameters)


@task(tags=TAGS)
def base(x):
    return {"x": x}


@task(tags=TAGS)
def train(data, rate=0.5, *layers, seed: int, **options):
    return noted()


@flow(task_runner=RUNNER)
def main():
    data = base.submit(2)
    wanted = {
        "data": {"x": 2},
        "rate": 0.1,
        "layers": (8, 16),
        "seed": 1,
        "options": {"mixed": True},
    }
    assert train.submit(data, 0.1, 8, 16, seed=1, mixed=True).result() == (wanted, wanted)
    mapped = train.map([{"x": 1}, {"x": 2}], seed=0)
    assert [each.result()[0]["data"]["x"] for each in mapped] == [1, 2]


if __name__ == "__main__":
    main()
