# A tree is deeper than Python's default limit of recursion; the script raises the limit, and the task walks the tree.
import os
import sys

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

sys.setrecursionlimit(20_000)
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


def depth(tree):
    return 0 if tree is None else 1 + depth(tree[0])


@task(tags=TAGS)
def walk(levels):
    tree = None
    for _ in range(levels):
        tree = (tree,)
    return depth(tree)


@task(tags=TAGS)
def digits(power):
    return len(str(10**power))


@flow(task_runner=RUNNER)
def main():
    walked, counted = walk.submit(5_000), digits.submit(5_000)
    assert walked.result() == 5_000
    assert counted.result() == 5_001


if __name__ == "__main__":
    main()
