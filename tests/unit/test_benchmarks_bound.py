"""What the benchmarks judge by: the least makespan, and whether an aim was met."""

from __future__ import annotations

import _bound
import pytest
from _bound import Cost

from prefect_gpu.frameworks.context import COLLECTIVES_BYTES


def task(name: str = "a", duration_s: float = 1.0, memory_bytes: int = 0, **more: object) -> Cost:
    return Cost(name, duration_s, memory_bytes, **{"busy_s": 0.0, "cpu_s": 0.0, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "term", "seconds"),
    [
        pytest.param(
            [task("a", 3), task("b", 5)], "longest chain", 5, id="one task cannot be cut in two"
        ),
        pytest.param(
            [task("a", 3), task("b", 5, after=("a",)), task("c", 1, after=("b", "a"))],
            "longest chain",
            9,
            id="what comes after others waits for the longest of them",
        ),
        pytest.param(
            [task(str(i), 2, 40) for i in range(10)],
            "memory × time",
            10 * 2 * 40 / 200,
            id="memory is filled over time, on all devices",
        ),
        pytest.param(
            [task("a", 2, 60, devices=2), task("b", 3, 60), task("c", 8, 50)],
            "larger than half a device",
            (2 * 2 + 3) / 2,
            id="tasks of more than half a device never share it; half is not more",
        ),
        pytest.param(
            [task(str(i), 1, busy_s=4.0) for i in range(3)], "GPU busy", 6, id="GPUs compute"
        ),
        pytest.param([task(str(i), 1, cpu_s=8.0) for i in range(3)], "CPU", 6, id="cores compute"),
    ],
)
def test_every_term_is_a_time_no_schedule_can_beat(
    costs: list[Cost], term: str, seconds: float
) -> None:
    bound = _bound.lower_bound(costs, devices=2, device_bytes=100, cores=4)
    assert bound.terms[term] == pytest.approx(seconds)


def test_the_largest_term_binds() -> None:
    bound = _bound.lower_bound([task("a", 3, busy_s=7.0)], devices=1, device_bytes=10, cores=1)
    assert (bound.binds, bound.seconds) == ("GPU busy", 7.0)


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        pytest.param([], "no tasks", id="nothing"),
        pytest.param([task("a", 1, 11)], "'a' takes 11 bytes", id="larger than a device"),
        pytest.param([task("a", devices=3)], "3 device", id="more devices than there are"),
        pytest.param([task("a", after=("b",))], "'b', which is not there", id="after nobody"),
        pytest.param(
            [task("a", after=("b",)), task("b", after=("a",))], "a circle", id="after each other"
        ),
    ],
)
def test_tasks_that_cannot_run_have_no_bound(costs: list[Cost], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _bound.lower_bound(costs, devices=2, device_bytes=10, cores=1)


@pytest.mark.parametrize(
    ("measured", "at_least", "verdict"),
    [(1.2, False, "PASS"), (1.21, False, "MISSED"), (1.2, True, "PASS"), (1.19, True, "MISSED")],
)
def test_check_prints_its_verdict_first(measured: float, at_least: bool, verdict: str) -> None:
    check = _bound.Check("as fast", measured, 1.2, "s", at_least)
    assert str(check).split()[0] == verdict
    assert str(check).endswith(f"(aim {'≥' if at_least else '≤'} 1.2 s)")


def test_a_budget_leaves_room_for_a_context_that_is_larger() -> None:
    # 676 MiB were measured where a task's own was 520.
    assert _bound.budget_bytes(2**30) - 2**30 > (676 - 520) * 2**20


def test_a_budget_of_several_devices_leaves_room_for_nccl() -> None:
    assert _bound.budget_bytes(2**30, 2) - _bound.budget_bytes(2**30) == COLLECTIVES_BYTES


def test_the_account_of_a_row_adds_up_to_its_makespan() -> None:
    use = _bound.Use(
        task(duration_s=4, memory_bytes=40),
        budget_bytes=50,
        placed_s=10.0,
        ready_s=11.0,
        ended_s=17.0,
        gone_s=17.5,
    )
    found = _bound.account([use], 10.0, 100)
    assert found == {
        "as alone": pytest.approx(4 * 0.4),
        "budgets above peaks": pytest.approx(4 * 0.1),
        "processes start": pytest.approx(1 * 0.5),
        "work takes longer than alone": pytest.approx(2 * 0.5),
        "processes end": pytest.approx(0.5 * 0.5),
        "nobody's": pytest.approx(10 - 1.6 - 0.4 - 0.5 - 1.0 - 0.25),
    }
    assert sum(found.values()) == pytest.approx(10.0)
