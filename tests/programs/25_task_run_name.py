# source: https://github.com/PrefectHQ/prefect/issues/15747
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

from prefect.runtime import task_run, flow_run


def name_it(parameters):
    return f"{task_run.task_name}-{parameters['cfg']['v']}-{flow_run.name}"


@task(tags=TAGS)
def make(v):
    return {"v": v}


@task(tags=TAGS, task_run_name=name_it)
def use(cfg, k=1):
    return (
        task_run.name,
        task_run.parameters,
        sorted(task_run.tags),
        flow_run.name,
        flow_run.parameters,
        task_run.run_count,
    )


@task(tags=TAGS, task_run_name="plain-{cfg[v]}-{k}")
def templated(cfg, k=1):
    return task_run.name


@flow(task_runner=RUNNER, flow_run_name="my-{z}")
def main(z=5):
    m = make.submit(3)
    a = use.submit(m).result()
    b = templated.submit(m, k=2).result()
    return a, b


a, b = main()
assert a[0] == "use-3-my-5", a
assert a[1] == {"cfg": {"v": 3}, "k": 1}, a[1]
assert a[2] == ["gpu:memory=128MiB"] or "gpu:memory=128MiB" in a[2], a[2]
assert a[3] == "my-5" and a[4] == {"z": 5} and a[5] == 1, a
assert b == "plain-3-2", b
