"""A process above its budget, as readings show it."""

from __future__ import annotations

import pytest

from prefect_gpu.overshoot import BudgetWatch, Overshoot
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.scheduling.model import Placement, Reservation
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import device


def watch(exclusive: bool = False, states_memory: bool = True) -> BudgetWatch:
    held = Reservation("1", "host", "GPU-0", 6 * GIB, exclusive, "a task")
    return BudgetWatch(Placement("1", (device(),), (6 * GIB, 4 * GIB), (held,)), states_memory)


def test_what_the_driver_may_round_up_is_no_overshoot() -> None:
    assert watch().look((6 * GIB + OVERSHOOT_BYTES, 4 * GIB + OVERSHOOT_BYTES)) is None


def test_one_device_above_its_own_budget_is_told_once() -> None:
    watched = watch()
    assert watched.look((6 * GIB, 4 * GIB)) is None
    assert watched.look((6 * GIB, 5 * GIB)) == Overshoot(5 * GIB, 4 * GIB)
    assert watched.look((7 * GIB, 5 * GIB)) is None


@pytest.mark.parametrize(
    ("exclusive", "states_memory", "told"),
    [(True, False, False), (True, True, True), (False, False, True)],
    ids=["a device to itself", "a device to itself, and its tags say how much", "shared, learned"],
)
def test_a_process_alone_on_a_device_has_nothing_to_keep_to_but_its_tags(
    exclusive: bool, states_memory: bool, told: bool
) -> None:
    assert bool(watch(exclusive, states_memory).look((9 * GIB, 0))) is told
