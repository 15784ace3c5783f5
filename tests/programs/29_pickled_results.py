# Stands for caches that keep pickled bytes (diskcache, Redis, LMDB): made in the task, read in the flow and in the next task.
import enum
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from typing import NamedTuple

from checks import TAGS, check
from prefect import task

Old = namedtuple("Old", "a b")


class New(NamedTuple):
    a: int
    b: Old


class Color(enum.IntEnum):
    RED = 1


class Table(OrderedDict):
    """A dictionary of the script's."""


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x

    def __getstate__(self):
        return {"x": self.x}

    def __setstate__(self, state):
        self.x = state["x"]

    def __eq__(self, other):
        return self.x == other.x


def value():
    return {
        "new": New(1, Old(2, 3)),
        Color.RED: [Table(a=Slots(1)), defaultdict(list, b=[Slots(2)])],
    }


@task(tags=TAGS)
def packed():
    return pickle.dumps(value())


@task(tags=TAGS)
def unpacked(data):
    got = pickle.loads(data)
    return got == value(), got["new"].b.b, isinstance(got[Color.RED][0], Table)


class Same:
    """Equal to bytes that hold the value."""

    def __eq__(self, data):
        return isinstance(data, bytes) and pickle.loads(data) == value()


if __name__ == "__main__":
    check(
        (packed, (), Same()),
        (unpacked, (pickle.dumps(value()),), (True, 3, True)),
    )
