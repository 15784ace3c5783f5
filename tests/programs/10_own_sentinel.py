# source: https://github.com/googleapis/google-cloud-python/pull/4634
# A script's own sentinels, compared by `is`: as a default, as an argument, in a container and as a return value.
import enum

from checks import TAGS, check
from prefect import task

_UNSET = object()
STOP = object()


class Missing:
    """A singleton that a class makes once."""

    def __repr__(self):
        return "MISSING"


MISSING = Missing()


class Token(enum.Enum):
    NONE = enum.auto()


def look_up(table, key, default=_UNSET):
    if key in table:
        return table[key]
    return "required" if default is _UNSET else default


def until_stop(items):
    return [item for item in items[: [item is STOP for item in items].index(True)]]


@task(tags=TAGS)
def defaults(default=_UNSET):
    return look_up({}, "a"), look_up({}, "a", default), look_up({}, "a", None)


@task(tags=TAGS)
def stops(items):
    return until_stop(items)


@task(tags=TAGS)
def compared(value):
    return value is MISSING, Token.NONE is Token["NONE"]


@task(tags=TAGS)
def back():
    return [MISSING, STOP, Token.NONE]


if __name__ == "__main__":
    check(
        (defaults, (), ("required", "required", None)),
        (stops, ([1, 2, STOP, 3],), [1, 2]),
        (compared, (MISSING,), (True, True)),
        (back, (), [MISSING, STOP, Token.NONE]),
    )
