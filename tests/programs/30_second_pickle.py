# Stands for bytes that one task pickles and another loads, with functions and classes that tasks share.
import functools
import pickle

from checks import RUNNER, TAGS
from prefect import flow, task

SCALE = 4


def scaled(x, by=1):
    return x * SCALE * by


class Job:
    def __init__(self, call):
        self.call = call

    def __call__(self, x):
        return self.call(x)


@task(tags=TAGS)
def write():
    return pickle.dumps([Job(scaled), functools.partial(scaled, by=2), Job])


@task(tags=TAGS)
def read(data):
    job, partial, kind = pickle.loads(data)
    return job(1), partial(1), isinstance(job, kind), kind is Job


@flow(task_runner=RUNNER)
def main():
    written = write.submit()
    job, partial, kind = pickle.loads(written.result())
    assert kind is Job and job.call is scaled and partial(2) == 16
    return read.submit(written).result()


if __name__ == "__main__":
    got = main()
    assert got == (4, 8, True, True), got
