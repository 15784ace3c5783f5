"""Which standby a task gets, and which no longer suit their own kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.standby_kind import (
    Kind,
    Stage,
    Standby,
    choose_standby,
)

KIND = Kind(("ours",), ("users",), (), False, 1, 1)


def standby(
    kind: Kind = KIND,
    modules: tuple[str, ...] = ("ours", "users"),
    environment: dict[str, str] | None = None,
    **state: Any,
) -> Standby:
    return Standby(
        kind,
        WarmSpec(modules, environment or {}, "", (), ()),
        0.0,
        **{"stage": Stage.WAITING, **state},
    )


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(standby(), standby(stage=Stage.IMPORTING), id="one that is ready"),
        pytest.param(standby(), standby(modules=("ours",)), id="one that has imported more"),
        pytest.param(standby(), standby(), id="one that has waited longer"),
    ],
)
def test_the_standby_that_is_further_along_is_taken(better: Standby, worse: Standby) -> None:
    for standbys in ([better, worse], [worse, better]):
        assert choose_standby(standbys, KIND, {}) == ((better, {}), [])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(standby(stage=Stage.ENDING), id="one that ends"),
        pytest.param(standby(modules=("ours", "users", "more")), id="one that imported more"),
        pytest.param(standby(replace(KIND, always=("others",))), id="one of another framework"),
    ],
)
def test_a_task_does_not_get(other: Standby) -> None:
    assert choose_standby([other], KIND, {}) == (None, [])


def test_of_those_that_suit_no_more_the_kinds_own_are_named() -> None:
    own = standby(environment={"LANG": "C"})
    others = standby(KIND.without_users(), ("ours",), {"LANG": "C"})
    good = standby()
    assert choose_standby([own, others, good], KIND, {}) == ((good, {}), [own])


def test_what_may_still_change_is_changed() -> None:
    waits = standby(environment={"PREFECT_A": "1", "PREFECT_B": "2"})
    changes = {"PREFECT_A": "3", "PREFECT_B": None}
    assert choose_standby([waits], KIND, {"PREFECT_A": "3"}) == ((waits, changes), [])


@pytest.mark.parametrize(
    ("standbys", "tasks", "suits"),
    [
        pytest.param(False, False, True, id="both computed"),
        pytest.param(True, False, False, id="stated as it was made"),
        pytest.param(False, True, False, id="stated by the task"),
    ],
)
def test_a_stated_number_of_threads_cannot_be_set_late(
    standbys: bool, tasks: bool, suits: bool
) -> None:
    waits = standby(replace(KIND, cpus_stated=standbys), environment={"OMP_NUM_THREADS": "2"})
    best, _ = choose_standby([waits], replace(KIND, cpus_stated=tasks), {"OMP_NUM_THREADS": "4"})
    assert (best is not None) == suits
