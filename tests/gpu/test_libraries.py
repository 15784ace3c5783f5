"""Libraries with a training loop of their own on a real device; `check_libraries` has more of them."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import BODY_S, Observer, gather, installed, read_processes, run_flow
from tests.gpu.check_libraries import (
    LIBRARIES,
    TOO_SMALL,
    is_alive,
    judge_first,
    judge_learned,
    judge_too_small,
    missing_for,
    try_all,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml", "prefect_server", "device_is_clean"),
    # Libraries warn, and the filters of this process are in force in the tasks' processes, too.
    pytest.mark.filterwarnings("default"),
]


def with_library(*names: str) -> pytest.MarkDecorator:
    """Run a test with each of some libraries, but for those that cannot be tried here."""
    missing = {name: missing_for(name, on_gpu=True) for name in names}
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why))
            for name, why in missing.items()
        ],
    )


@with_library("lightning", "trainer", "torch-compile", "flax")
def test_an_out_of_memory_inside_a_library_is_one_of_the_cap(name: str) -> None:
    assert not LIBRARIES[name].catches
    (tried,) = try_all("too-small", [(name, "too small")], "nvml")
    assert judge_too_small(tried, catches=False) == []


# The largest of their inputs comes first: it is in no steady step.
@with_library("generate", "torch-geometric")
def test_a_learned_budget_is_enough_for_the_same_inputs_of_changing_size(name: str) -> None:
    with Observer() as observer:
        (first,) = try_all("first-run", [(name, "first")], "nvml")
        (learned,) = try_all("learned-run", [(name, "learned")], "nvml")
    assert judge_first(first) == []
    assert judge_learned(learned, first, observer) == []


@with_library("torch-compile", "accelerate")
def test_processes_that_a_library_has_started_end_with_the_task(name: str) -> None:
    (tried,) = try_all("descendants", [(name, "first")], "nvml")
    assert tried.ended.error is None
    assert tried.found["descendants"], "it has started none: nothing is shown"
    assert not [pid for pid, began in tried.found["descendants"] if is_alive(pid, began)]


@pytest.mark.skipif(not installed("accelerate"), reason="accelerate is not installed")
def test_a_batch_size_that_is_not_found_is_an_out_of_memory() -> None:
    @task(
        name="no-batch-size",
        timeout_seconds=BODY_S,
        tags=gpu(memory=TOO_SMALL, framework="torch", oom="fail"),
    )
    def find() -> Any:
        import torch
        from accelerate.utils import find_executable_batch_size

        def train(batch_size: int) -> None:
            torch.ones(4 << 30, dtype=torch.uint8, device="cuda")

        return find_executable_batch_size(train, starting_batch_size=4)()

    flow = run_flow("no-batch-size", lambda: gather({"find": find.submit()}, BODY_S), "nvml")
    ended = flow.value["find"]
    assert "No executable batch size found" in str(ended.error)
    (report,) = read_processes(flow.id, 1)[ended.task_run_id]
    assert (report["outcome"], report["cause"]) == ("oom", "own_cap")
