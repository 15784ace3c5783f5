# Filters of the script: one turns a warning of its own class into an error, one silences a library's, NumPy's division raises.
import os
import warnings

import numpy as np
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


class DriftWarning(UserWarning):
    pass


@task(tags=TAGS)
def drifts():
    try:
        warnings.warn("the loss drifts", DriftWarning, stacklevel=1)
    except DriftWarning as error:
        return str(error)
    return "only printed"


@task(tags=TAGS)
def divides():
    try:
        return float(np.float64(1.0) / np.float64(0.0))
    except RuntimeWarning as error:
        return str(error).partition(" encountered")[0]


@task(tags=TAGS)
def is_silent():
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
        warnings.warn("once more", FutureWarning, stacklevel=1)
    return [str(each.message) for each in seen]


@task(tags=TAGS)
def imports_in_the_body():
    # Its import warns; in the flow's process it was imported before the filters were set.
    import warns_at_import

    return warns_at_import.VALUE


@flow(task_runner=RUNNER)
def main():
    wanted = {
        drifts: "the loss drifts",
        divides: "divide by zero",
        is_silent: ["once more"],
        imports_in_the_body: 5,
    }
    found = {each: each.submit() for each in wanted}
    got = {each: future.result() for each, future in found.items()}
    assert got == wanted, {each.name: value for each, value in got.items()}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import warns_at_import  # noqa: F401
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.simplefilter("default", FutureWarning)
    warnings.filterwarnings("error", category=RuntimeWarning)
    warnings.simplefilter("error", DriftWarning)
    warnings.filterwarnings("error", message="a module's import warns")
    main()
