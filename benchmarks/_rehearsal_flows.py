"""The flows and the server of `rehearsal.py`, each in a process of its own: `_rehearsal_flows.py NAME UNTIL [ARGUMENT]`.

Each prints `FLOW id` with the id of its flow run, and `VALUE [name, arguments, value]` for each task run that returned one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import _rehearsal_bodies as bodies
from prefect import flow, task
from prefect.cache_policies import INPUTS
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, gpu, serve

#: Seconds between two requests.
REQUEST_S = 2.0

#: Values that the killed flow fits.
SWEPT = 24

evaluate = task(
    bodies.evaluate, tags=gpu(framework="torch", learn_by=["library", "name", "batches"])
)
train = task(bodies.train, tags=gpu("16GiB", framework="torch", preemptible=True))
answer = task(bodies.answer, tags=gpu("4GiB", framework="torch", priority=10), persist_result=True)
with_jax = task(bodies.with_jax, tags=gpu("4GiB", framework="jax"))
with_tensorflow = task(bodies.with_tensorflow, tags=gpu("4GiB", framework="tensorflow"))
fit = task(
    bodies.fit,
    tags=gpu("14GiB", framework="torch"),
    cache_policy=INPUTS,
    persist_result=True,
)
leak = task(bodies.leak, tags=gpu("6GiB", framework="torch"))
run_out = task(bodies.run_out, tags=gpu("4GiB", framework="torch"))
crash = task(bodies.crash, tags=gpu("4GiB", framework="torch"))


def tell(name: str, arguments: Iterable[Any], value: Any) -> None:
    """Print a value, for the process that started this one."""
    print("VALUE " + json.dumps([name, list(arguments), value]), flush=True)


def run_all(calls: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    """Submit task runs, and tell the value of each that returns one."""
    print(f"FLOW {flow_run.id}", flush=True)
    futures = [(called, given, called.submit(*given)) for called, given in calls]
    for called, given, future in futures:
        value = future.result(raise_on_failure=False)
        if not isinstance(value, BaseException):
            tell(called.fn.__name__, given, value)


def evaluations(until_s: float, batches: str, *libraries: str) -> None:
    """Evaluate all architectures on three data sets each, again and again, as clients of MPS."""

    @flow(task_runner=GPUTaskRunner(sharing="mps"))
    def evaluate_all() -> None:
        run_all(
            (evaluate, (library, name, data, int(batches)))
            for library in libraries
            for name in bodies.ARCHITECTURES[library]
            for data in range(3)
        )

    while time.time() < until_s:
        evaluate_all()


def frameworks(until_s: float, *names: str) -> None:
    """Run tasks of other frameworks, again and again."""

    @flow(task_runner=GPUTaskRunner())
    def mix() -> None:
        called = {"jax": with_jax, "tensorflow": with_tensorflow}
        run_all((called[name], (seed,)) for seed in range(6) for name in names)

    while time.time() < until_s:
        mix()


def training(until_s: float) -> None:
    """Train for the whole time, preemptible."""

    @flow(task_runner=GPUTaskRunner())
    def train_long() -> None:
        run_all([(train, (0, until_s))])

    train_long()


def troubles(until_s: float) -> None:
    """Leak, run out of memory and crash."""

    @flow(task_runner=GPUTaskRunner(sharing="mps"))
    def trouble() -> None:
        run_all([(leak, ()), (run_out, ()), (crash, ())])

    trouble()


def sweep(until_s: float) -> None:
    """Fit values; what an earlier flow run has fitted is taken from Prefect's cache."""

    @flow(task_runner=GPUTaskRunner())
    def fit_all() -> None:
        run_all((fit, (value,)) for value in range(SWEPT))

    fit_all()


def server(until_s: float) -> None:
    """Answer requests until a little after the last one was made."""
    serve(answer, runner=GPUTaskRunner(), limit=None, timeout=until_s + 10 - time.time())


def requests(until_s: float) -> None:
    """Make a request every two seconds, wait for all answers, and tell the wait of each."""
    # The first answers come once the server is there.
    answer.delay(0).result()
    made = []
    for number in range(1, 10**6):
        if time.time() > until_s:
            break
        made.append((number, time.time(), answer.delay(number)))
        time.sleep(REQUEST_S)
    for number, at_s, future in made:
        line_s, value = future.result()
        tell("answer", [number], value)
        print("WAIT " + json.dumps([str(future.task_run_id), at_s, line_s - at_s]), flush=True)


FLOWS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (evaluations, frameworks, training, troubles, sweep, server, requests)
}


if __name__ == "__main__":
    FLOWS[sys.argv[1]](float(sys.argv[2]), *sys.argv[3:])
