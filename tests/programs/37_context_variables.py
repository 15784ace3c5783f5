# source: https://github.com/cloudpipe/cloudpickle/issues/387
# Context variables of a script, with and without a default, as libraries for tracing and requests keep them.
import contextvars
from contextlib import contextmanager

from checks import TAGS, check
from prefect import task

level = contextvars.ContextVar("level", default=1)
user = contextvars.ContextVar("user")


@contextmanager
def at(value):
    token = level.set(value)
    try:
        yield level.get()
    finally:
        level.reset(token)


@task(tags=TAGS)
def set_and_reset():
    with at(5) as inside:
        return inside, level.name, contextvars.copy_context().run(level.get)


@task(tags=TAGS)
def without_default():
    try:
        return user.get()
    except LookupError:
        user.set("u")
        return user.get(), user.get("other")


if __name__ == "__main__":
    check(
        (set_and_reset, (), (5, "level", 5)),
        (without_default, (), ("u", "u")),
    )
