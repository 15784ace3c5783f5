"""Forks of warm processes on a GPU: twenty at once, several times, for each framework, against fresh interpreters.

    python -m tests.gpu.check_forks --only torch

Each kind of body runs once in a fresh interpreter, then twenty at once as forks of one process that has imported its
libraries, `--rounds` times. All must return what the first one returned, have that process as their parent, and leave no
memory. Frameworks are tried whether or not `standby_kind.FORKED` has them.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.processes import standby_kind
from prefect_gpu.processes.standby_pool import standby_pool
from tests.gpu import fork_bodies
from tests.gpu._checks import run, say

AT_ONCE = 20

#: Body, framework, modules, rounds for which it is too slow otherwise.
KINDS: dict[str, tuple[Callable[[], Any], str | tuple[str, ...], tuple[str, ...], int]] = {
    "torch": (fork_bodies.train_torch, "torch", ("torch",), 10),
    "torch-libraries": (
        fork_bodies.use_torch_libraries,
        "torch",
        ("torch", "timm", "transformers", "gpytorch"),
        10,
    ),
    "torch-compile": (fork_bodies.compile_torch, "torch", ("torch",), 1),
    "jax": (fork_bodies.train_jax, "jax", ("jax", "flax", "optax"), 10),
    "torch-jax": (
        fork_bodies.train_torch_and_jax,
        ("torch:50%", "jax:50%"),
        ("torch", "jax", "flax", "optax"),
        2,
    ),
    "cupy": (fork_bodies.use_cupy, "cupy", ("cupy",), 10),
    "numba-sklearn": (fork_bodies.use_numba_and_sklearn, "none", ("numba", "sklearn"), 10),
}


def with_parent(body: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(body)
    def call() -> tuple[Any, int]:
        return body(), os.getppid()

    return call


def check(options: argparse.Namespace) -> list[str]:
    standby_kind.FORKED = frozenset({"torch", "jax", "cupy", "onnxruntime"})
    problems: list[str] = []
    memory = "3GiB" if options.devices == "nvml" else "256MiB"
    for name in options.only or KINDS:
        body, framework, modules, most = KINDS[name]
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            say(f"{name}: left out, not installed: {', '.join(missing)}")
            continue
        work = task(with_parent(body), name=name, tags=gpu(memory=memory, framework=framework))
        given: dict[str, Any] = {"devices": options.devices, "reports": False, "standby": 0}

        @flow(task_runner=GPUTaskRunner(start_method="spawn", **given))
        def alone(work: Any = work) -> Any:
            return work.submit().result()[0]

        @flow(task_runner=GPUTaskRunner(start_method="auto", max_processes=AT_ONCE, **given))
        def forked(wanted: Any, work: Any = work, rounds: int = min(most, options.rounds)) -> Any:
            found: list[Any] = []
            took_s: list[float] = []
            for _ in range(rounds):
                began_s = time.monotonic()
                states = [work.submit(return_state=False) for _ in range(AT_ONCE)]
                found += [future.result(raise_on_failure=False) for future in states]
                took_s.append(time.monotonic() - began_s)
                same = sum(isinstance(each, tuple) and each[0] == wanted for each in found)
                say(f"{same} of {len(found)} as fresh; the last {AT_ONCE} took {took_s[-1]:.1f} s")
            return found, took_s, standby_pool().pids

        try:
            wanted = alone()
        except Exception as error:
            problems.append(f"{name}: it fails in a fresh interpreter, too: {error!r}")
            continue
        found, took_s, sources = forked(wanted)
        values = collections.Counter(
            repr(each[0] if isinstance(each, tuple) else each) for each in found
        )
        parents = {each[1] for each in found if isinstance(each, tuple)}
        same = values[repr(wanted)]
        say(
            f"{name}: {same} of {len(found)} as fresh, {len(parents)} parent(s), {min(took_s):.1f} to {max(took_s):.1f} s for {AT_ONCE} at once; fresh: {wanted!r}"
        )
        if same != len(found):
            problems.append(f"{name}: fresh {wanted!r}, forks {values.most_common(4)}")
        if not parents <= set(sources):
            problems.append(f"{name}: the parents are {parents}, the warm processes {sources}")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=10)
    raise SystemExit(run(check, parser, 540.0, quiet=True))
