"""What the programs share: the runner that `RUNNER` names, tags, and a flow that compares what tasks return.

A program exits with 0 only if each of its tasks returned what it returns in a thread. Where a GPU task
cannot have what a thread has, `Refused` and `Noted` say what the error must tell its reader.
"""

import os
from dataclasses import dataclass
from typing import Any

from prefect import flow
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, ResultError, gpu

MODE = os.environ.get("RUNNER", "gpu")
RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(MODE, GPUTaskRunner)()
TAGS = gpu(memory="128MiB")


@dataclass
class Refused:
    """Under `gpu` a `ResultError` that names the path and says what to do; elsewhere the plain result."""

    path: str
    result: Any

    def __eq__(self, got: object) -> bool:
        if MODE != "gpu":
            return got == self.result
        return (
            isinstance(got, ResultError) and self.path in str(got) and "inside the task" in str(got)
        )


@dataclass
class Noted:
    """Under `gpu` the plain result, or an error with a note that module-level code of a script did not run."""

    kind: type[BaseException]
    result: Any

    def __eq__(self, got: object) -> bool:
        if MODE != "gpu" or not isinstance(got, BaseException):
            return got == self.result
        notes = " ".join(getattr(got, "__notes__", ()))
        return isinstance(got, self.kind) and "module-level code" in f"{got} {notes}"


@flow(task_runner=RUNNER)
def outcomes(calls: list) -> list:
    """Return what each call of a task returns, or its error; one call after the other."""
    got = []
    for task, arguments in calls:
        try:
            got.append(task.submit(*arguments).result())
        except BaseException as error:
            got.append(error)
    return got


def check(*wanted: tuple) -> None:
    """Run tasks, each a tuple of the task, its arguments and what it must return; all failures are shown."""
    # `with_options` keeps Prefect from checking and copying the arguments of the flow.
    plain = outcomes.with_options(validate_parameters=False)
    got = plain([(task, arguments) for task, arguments, _ in wanted])
    bad = {
        f"{n} {task.name}": each if not isinstance(each, BaseException) else shown(each)
        for n, ((task, _, want), each) in enumerate(zip(wanted, got, strict=True))
        if not want == each
    }
    assert not bad, bad


def shown(error: BaseException) -> str:
    return " | ".join(
        [f"{type(error).__name__}: {str(error)[:400]}", *getattr(error, "__notes__", ())]
    )
