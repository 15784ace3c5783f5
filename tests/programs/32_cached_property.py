# source: https://github.com/cloudpipe/cloudpickle/issues/438
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


def check(*wanted):
    """Run a flow of tasks, each with what it must return; all failures are shown."""

    @flow(task_runner=RUNNER)
    def main():
        bad = {}
        for t, args, want in wanted:
            try:
                got = t.submit(*args).result()
                if got != want:
                    bad[t.name] = got
            except BaseException as e:
                bad[t.name] = f"{type(e).__name__}: {str(e)[:300]}"
        return bad

    bad = main()
    assert not bad, bad


import functools
from dataclasses import dataclass


@dataclass
class Model:
    name: str

    @functools.cached_property
    def weights(self):
        return self.name * 2


@task(tags=TAGS)
def use(m):
    return m.weights


@task(tags=TAGS)
def make():
    return Model("q").weights


@task(tags=TAGS)
def back():
    return Model("z")


if __name__ == "__main__":
    check((use, (Model("a"),), "aa"), (make, (), "qq"), (back, (), Model("z")))
