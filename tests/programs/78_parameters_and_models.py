# Parameters that are objects: the body finds the same ones in the context, of the task and of the flow.
import os

import numpy as np
from prefect import flow, task
from prefect.runtime import flow_run, task_run
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from pydantic import BaseModel

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


class Config(BaseModel):
    rate: float
    layers: list[int]


class Model:
    def __init__(self):
        self.weights = np.arange(1_000_000)


@task(tags=TAGS)
def train(model, config: Config, shared):
    found = task_run.parameters
    # A change of an argument shows in the parameters: they are the same object.
    model.weights[0] = 5
    return [
        found["model"] is model,
        found["config"] is config,
        found["shared"] is shared,
        int(found["model"].weights[0]),
        type(flow_run.parameters["config"]).__name__,
    ]


@flow(task_runner=RUNNER)
def main(config: Config):
    got = train.submit(Model(), config, [1, 2]).result()
    assert got == [True, True, True, 5, "Config"], got


if __name__ == "__main__":
    main(Config(rate=0.5, layers=[1]))
