"""Errors and values of classes that fail when they are looked at."""

from __future__ import annotations

import json

from tests.integration.programs import Workplace

PROGRAM = """
import json
import traceback

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu


class NoCause(Exception):
    def __setattr__(self, name, value):
        raise TypeError(f"{name} cannot be set")


class NoText(Exception):
    def __str__(self):
        raise TypeError("no text")


class NoTextAtAll(BaseException):
    def __str__(self):
        raise TypeError("no text")

    __repr__ = __str__


class NoPicture:
    def __repr__(self):
        raise TypeError("no picture")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


@task(tags=gpu(memory="64MiB", framework="none"))
def fail(name):
    raise {"NoCause": NoCause, "NoText": NoText, "NoTextAtAll": NoTextAtAll}[name]("of the body")


@task(tags=gpu(memory="64MiB", framework="none"))
def give():
    return {"model": [NoPicture()]}


@task(tags=gpu(memory="64MiB", framework="none"))
def give_key():
    return {NoPicture(): NoPicture()}


@task(tags=gpu(memory="64MiB", framework="none"))
def take(value):
    return 1


@flow(task_runner=GPUTaskRunner(devices="host"))
def odd():
    futures = {name: fail.submit(name) for name in ("NoCause", "NoText", "NoTextAtAll")}
    futures["value"] = give.submit()
    futures["key"] = give_key.submit()
    futures["argument"] = take.submit(NoPicture())
    found = {}
    for name, future in futures.items():
        state = future.wait() or future.state
        try:
            future.result()
        except BaseException as error:
            found[name] = [type(error).__name__, future.state.name, traceback.format_exc()]
    print("FOUND", json.dumps(found))
    return "done"


odd()
"""


def test_what_was_wrong_in_the_body_is_said_whatever_its_class(place: Workplace) -> None:
    place.write("odd.py", PROGRAM)
    done = place.run("odd.py")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    kinds = {name: (kind, state) for name, (kind, state, _) in found.items()}
    assert kinds == {
        # Prefect cannot keep these, whatever the task runner: what they are is said instead.
        "NoCause": ("ResultError", "Failed"),
        "NoText": ("ResultError", "Failed"),
        "NoTextAtAll": ("ResultError", "Failed"),
        "value": ("ResultError", "Failed"),
        "key": ("ResultError", "Failed"),
        "argument": ("ResultError", "Failed"),
    }
    for name in ("NoCause", "NoText", "NoTextAtAll"):
        assert f"__main__.{name} fails when it is used (TypeError: " in found[name][2]
        assert "in fail" in found[name][2], "where in the body it was raised"
    assert "['model'][0]" in found["value"][2] and "NoPicture" in found["value"][2]
