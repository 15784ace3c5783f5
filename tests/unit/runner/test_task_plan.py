"""What is known of a task when it is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import task

from prefect_gpu.errors import PolicyError
from prefect_gpu.policy import FrameworkShare, GPUPolicy
from prefect_gpu.runner.task_plan import PlanMaker
from tests.cases import cases


@task
def body() -> None:
    pass


def test_a_relative_folder_for_snapshots_is_in_the_folder_that_the_flow_starts_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    maker = PlanMaker(Path("snapshots"))
    monkeypatch.chdir("/")
    assert maker.make(body, GPUPolicy(), 0).snapshots == tmp_path / "snapshots"


def test_a_task_records_for_no_snapshots_by_default() -> None:
    assert PlanMaker().make(body, GPUPolicy(), 0).snapshots is None


@cases(
    "policy, fraction, because",
    {
        "what can be capped shares": (GPUPolicy(), 1.0, None),
        "exclusive": (GPUPolicy(exclusive=True), 0.0, "gpu:exclusive"),
        "all": (
            GPUPolicy(allocation="all", stated=frozenset({"allocation"})),
            0.0,
            "gpu:allocation=all leaves no room for others",
        ),
        "no cap": (GPUPolicy(caching=False), 0.0, "gpu:caching=off has no cap"),
        "no framework": (
            GPUPolicy(frameworks=(FrameworkShare("none"),)),
            0.0,
            "gpu:framework=none has no cap",
        ),
        "takes its cap whole": (GPUPolicy(frameworks=(FrameworkShare("tensorflow"),)), 0.5, None),
    },
)
def test_which_tasks_of_unknown_need_may_share_a_device(
    policy: GPUPolicy, fraction: float, because: str | None
) -> None:
    plan = PlanMaker().make(body, policy, 0)
    assert (plan.probe_fraction, plan.alone_because) == (fraction, because)


def test_a_history_is_that_of_the_arguments_with_their_defaults() -> None:
    @task
    def sized(size: object, batch: int = 32) -> None: ...

    plan = PlanMaker().make(sized, GPUPolicy(learn_by=("size", "batch")), 0)
    default = plan.identity((1,), {}, "nightly")
    assert default == plan.identity((1,), {"batch": 32}, "nightly")
    assert default.learn_by_words == "batch=32, size=1"
    assert default != plan.identity((1, 64), {}, "nightly")
    with pytest.raises(PolicyError, match="gpu:learn_by=size: size is of type dict"):
        plan.identity(({},), {}, "nightly")
