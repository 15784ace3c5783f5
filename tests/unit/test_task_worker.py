"""Background tasks: which tags a run has, and what `serve` refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect import task

from prefect_gpu import GPUTaskRunner, PolicyError, SettingError, serve
from prefect_gpu.task_worker import run_tags

RUNNER = GPUTaskRunner(devices="simulated:1x8GiB", standby=0)


@task
def one(x: int) -> None:
    pass


def context(around: set[str], of_flow: tuple[str, ...] = ()) -> dict[str, Any]:
    flow_run = {"flow_run_context": {"flow_run": {"tags": [*of_flow]}}} if of_flow else {}
    return {"tags_context": {"current_tags": around}, **flow_run}


@pytest.mark.parametrize(
    ("served", "of_run", "called_in", "own", "around"),
    [
        pytest.param({"gpu"}, {"gpu"}, None, {"gpu"}, set(), id="its own, without parameters"),
        pytest.param({"gpu"}, {"gpu", "a"}, None, {"gpu"}, {"a"}, id="a context's, without parameters"),
        pytest.param({"gpu"}, {"gpu"}, context(set()), {"gpu"}, set(), id="its own"),
        pytest.param({"gpu"}, {"gpu", "a"}, context({"a"}), {"gpu"}, {"a"}, id="its own, and a context's"),
        pytest.param(
            {"gpu:memory=1GiB"},
            {"gpu:memory=2GiB"},
            context(set()),
            {"gpu:memory=2GiB"},
            set(),
            id="those of with_options in place of its own",
        ),
        pytest.param({"gpu"}, {"gpu"}, context({"gpu"}), {"gpu"}, {"gpu"}, id="its own, which a context has too"),
        pytest.param(
            {"gpu"},
            {"gpu", "a"},
            context({"gpu", "a"}, of_flow=("gpu", "a")),
            {"gpu"},
            set(),
            id="not those of the flow run that called delay",
        ),
    ],
)  # fmt: skip
def test_tags_of_a_run(
    served: set[str],
    of_run: set[str],
    called_in: dict[str, Any] | None,
    own: set[str],
    around: set[str],
) -> None:
    task_run: Any = SimpleNamespace(tags=[*of_run])
    assert run_tags(one.with_options(tags=served), task_run, called_in) == (own, around)


@pytest.mark.parametrize(
    ("tasks", "runner", "says"),
    [
        pytest.param([], RUNNER, "has no task; accepted: at least one task", id="no task"),
        pytest.param([one, one.fn], RUNNER, r"was given <function one at .*accepted: tasks", id="a function"),
        pytest.param([one], "simulated:1x8GiB", r"runner='simulated:1x8GiB' .*accepted: GPUTaskRunner", id="no runner"),
        pytest.param([one.with_options(tags=["gpu:memory=6"])], RUNNER, r"serve\(\), task 'one': gpu:memory=6", id="a wrong tag"),
    ],
)  # fmt: skip
def test_serve_refuses(tasks: list[Any], runner: Any, says: str) -> None:
    with pytest.raises((SettingError, PolicyError), match=says):
        serve(*tasks, runner=runner)
