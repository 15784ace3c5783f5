"""Tasks of the package."""

import functools
import threading

from checks import TAGS
from prefect import task

from . import registry
from .registry import ANIMALS, CURRENT, Animal, Cat, FoodError, Size, model, register

_awake_lock = threading.Condition()


@register("dog")
class Dog(Animal):
    pass


def timed(function):
    """A decorator of the project."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


calls: list = []


@task(tags=TAGS)
def registered():
    calls.clear()
    before = Animal.made
    cat = Cat("tom")
    # The registry, the counter and the cache are those of the module that everyone imports.
    return (
        sorted(registry.ANIMALS),
        ANIMALS is registry.ANIMALS,
        registry.ANIMALS["cat"] is Cat,
        Animal.made - before,
        Animal.names[-1] == cat.name,
        model("a") is registry.model("a"),
    )


@task(tags=TAGS)
@timed
def score(x):
    import zoo.jobs

    # What the decorator has noted, as the rest of the project sees it.
    return x * 2, zoo.jobs.calls[-1]


@task(tags=TAGS)
def wake():
    registry.set_awake()
    token = CURRENT.set("task")
    try:
        with _awake_lock:
            return registry.is_awake(), registry.CURRENT.get()
    finally:
        CURRENT.reset(token)


@task(tags=TAGS)
def describe(animal, size):
    return (
        isinstance(animal, Animal),
        type(animal) is ANIMALS["dog"],
        size is Size.LARGE,
        Size.SMALL,
    )


@task(tags=TAGS)
def short_of_food(kind):
    raise FoodError(kind)


class Trainer:
    trained = 0

    def __init__(self, by):
        self.by = by

    @staticmethod
    @task(tags=TAGS)
    def once():
        before = Trainer.trained
        Trainer.trained += 1
        return Trainer.trained - before

    @classmethod
    @task(tags=TAGS)
    def named(cls):
        return cls is Trainer

    @task(tags=TAGS)
    def train(self, n):
        return self.by * n, isinstance(self, Trainer)
