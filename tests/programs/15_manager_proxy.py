# source: https://github.com/dask/distributed/issues/9122
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

# Progress of tasks through a manager's queue, a common pattern with process pools.
import multiprocessing as mp


@task(tags=TAGS)
def work(q, d, i):
    q.put(("started", i))
    d[i] = i * i
    return i


@flow(task_runner=RUNNER)
def main():
    with mp.Manager() as m:
        q, d = m.Queue(), m.dict()
        fs = [work.submit(q, d, i) for i in range(2)]
        assert [f.result() for f in fs] == [0, 1]
        assert dict(d) == {0: 0, 1: 1}
        assert sorted(q.get(timeout=5) for _ in range(2)) == [("started", 0), ("started", 1)]


if __name__ == "__main__":
    main()
