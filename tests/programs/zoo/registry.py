"""What the package's modules share: a registry, classes with counters, a cached model, an enumeration, errors."""

import contextvars
import enum
import functools
import threading

ANIMALS = {}
CURRENT = contextvars.ContextVar("current", default="none")
_awake = False
_lock = threading.RLock()


def register(name):
    def note(made):
        ANIMALS[name] = made
        return made

    return note


class Animal:
    made = 0
    names: list = []

    def __init__(self, name):
        Animal.made += 1
        self.names.append(name)
        self.name = name


@register("cat")
class Cat(Animal):
    pass


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class FoodError(Exception):
    def __init__(self, kind):
        super().__init__(f"no {kind} left")
        self.kind = kind


@functools.lru_cache(maxsize=2)
def model(name):
    return [name]


def set_awake():
    global _awake
    with _lock:
        _awake = True


def is_awake():
    return _awake
