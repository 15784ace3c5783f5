"""Tasks that are made by a function, and tasks that are only in a dictionary."""

from checks import TAGS
from prefect import task

seen: list = []


def note(name):
    seen.append(name)


def count(name):
    return seen.count(name)


def make(name, factor):
    @task(name=name, tags=TAGS)
    def scaled(x):
        seen.clear()
        note(name)
        return x * factor, count(name)

    return scaled


def _square(x):
    seen.clear()
    note("square")
    return x * x, count("square")


TASKS = {"square": task(name="square", tags=TAGS)(_square)}
