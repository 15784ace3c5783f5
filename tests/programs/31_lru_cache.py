# source: https://github.com/cloudpipe/cloudpickle/issues/178
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


@functools.lru_cache(maxsize=None)
def load(name):
    return name.upper()


class Store:
    @functools.lru_cache
    def get(self, k):
        return k * 2


@task(tags=TAGS)
def cached_function():
    return load("x"), load("x")


@task(tags=TAGS)
def cached_method(s):
    return s.get(4)


if __name__ == "__main__":
    check((cached_function, (), ("X", "X")), (cached_method, (Store(),), 8))
