# Stands for clients, consoles, generators and thread pools in globals, as scripts that call services keep them.
import concurrent.futures

import httpx
from checks import TAGS, Refused, check
from prefect import task

client = httpx.Client(base_url="http://localhost:9")
pool = concurrent.futures.ThreadPoolExecutor(2)
lines = (n * n for n in range(5))


@task(tags=TAGS)
def asks():
    return str(client.base_url)


@task(tags=TAGS)
def pooled():
    return list(pool.map(abs, [-1, -2]))


@task(tags=TAGS)
def generated():
    return next(lines)


class Job:
    def __init__(self):
        self.sources = {"letters": (x for x in "ab")}


@task(tags=TAGS)
def given(job):
    return next(job.sources["letters"])


if __name__ == "__main__":
    check(
        (asks, (), Refused("client", "http://localhost:9")),
        (pooled, (), Refused("pool", [1, 2])),
        (generated, (), Refused("lines", 0)),
        (given, (Job(),), Refused("job.sources['letters']", "a")),
    )
