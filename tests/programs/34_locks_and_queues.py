# Stands for locks, conditions, semaphores, barriers, events and queues that a script keeps in globals, classes and attributes.
import asyncio
import queue
import threading

from checks import TAGS, Refused, check
from prefect import task

reentrant = threading.RLock()
changed = threading.Condition()
few = threading.BoundedSemaphore(2)
some = threading.Semaphore(3)
both = threading.Barrier(2)
jobs = queue.Queue(maxsize=2)
urgent = queue.PriorityQueue()
simple = queue.SimpleQueue()
limit = asyncio.Semaphore(2)
ready = threading.Event()


class Counter:
    lock = threading.Lock()

    def __init__(self):
        self.n = 0
        self.own = threading.Lock()

    def add(self):
        with self.lock, self.own:
            self.n += 1
        return self.n


counter = Counter()


@task(tags=TAGS)
def locks():
    with reentrant, reentrant, changed:
        changed.notify_all()
    with few, few, some:
        return (
            few.acquire(blocking=False),
            some.acquire(blocking=False),
            Counter().add(),
            both.parties,
        )


@task(tags=TAGS)
def waits():
    other = threading.Thread(target=both.wait)
    other.start()
    both.wait(60)
    other.join()
    threading.Thread(target=ready.set).start()
    return ready.wait(60)


@task(tags=TAGS)
def queues():
    jobs.put(1)
    urgent.put(2)
    simple.put(3)
    return jobs.get(), urgent.get(), simple.get(), jobs.maxsize


@task(tags=TAGS)
async def limited():
    async with limit, limit:
        return limit.locked()


@task(tags=TAGS)
def passed(given):
    return given.add(), counter.add()


@task(tags=TAGS)
def shared(guard):
    # A new lock would guard nothing: the task and the flow would each have their own.
    with guard:
        return 1


if __name__ == "__main__":
    check(
        (locks, (), (False, True, 1, 2)),
        (waits, (), True),
        (queues, (), (1, 2, 3, 2)),
        (limited, (), True),
        (passed, (Counter(),), (1, 1)),
        (shared, (threading.Lock(),), Refused("guard", 1)),
    )
