# Stands for models and services of a script that hold a lock or a thread-local beside plain state, passed to a task and returned.
import functools
import threading
from dataclasses import dataclass, field

from checks import TAGS, check
from prefect import task


@dataclass
class Service:
    name: str
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    local: threading.local = field(default_factory=threading.local, repr=False, compare=False)
    done: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @functools.cached_property
    def loaded(self):
        with self.lock:
            self.local.name = self.name
            return self.local.name.upper()


def memoized(function):
    cache, lock = {}, threading.Lock()

    @functools.wraps(function)
    def wrapper(x):
        with lock:
            if x not in cache:
                cache[x] = function(x)
            return cache[x]

    wrapper.cache = cache
    return wrapper


@memoized
def square(x):
    return x * x


@task(tags=TAGS)
def use(service):
    service.done.set()
    return service.loaded, service.done.is_set()


@task(tags=TAGS)
def back(service):
    with service.lock:
        return Service(service.name * 2)


@task(tags=TAGS)
def closed_over():
    return square(3), square.cache[3]


if __name__ == "__main__":
    check(
        (use, (Service("a"),), ("A", True)),
        (back, (Service("b"),), Service("bb")),
        (closed_over, (), (9, 9)),
    )
