"""Which standby a task gets, and which no longer suit their own kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.standby_kind import (
    Kind,
    LentDevice,
    Stage,
    Standby,
    changes_for,
    choose_standby,
)

KIND = Kind(("ours",), ("users",), (), False, 1, 1)
FLAGS = ("-X", "utf8")


def standby(
    kind: Kind = KIND,
    modules: tuple[str, ...] = ("ours", "users"),
    environment: dict[str, str] | None = None,
    flags: tuple[str, ...] = FLAGS,
    **state: Any,
) -> Standby:
    return Standby(
        kind,
        WarmSpec(modules, environment or {}, "", (), ()),
        flags,
        0.0,
        **{"stage": Stage.WAITING, **state},
    )


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(standby(), standby(stage=Stage.IMPORTING), id="one that is ready"),
        pytest.param(standby(), standby(stage=Stage.ASKING), id="one that asks for no device"),
        pytest.param(standby(), standby(modules=("ours",)), id="one that has imported more"),
        pytest.param(standby(), standby(), id="one that has waited longer"),
        pytest.param(
            standby(stage=Stage.ASKING),
            standby(stage=Stage.IMPORTING),
            id="one that is ready, though a device is asked for",
        ),
    ],
)
def test_the_standby_that_is_further_along_is_taken(better: Standby, worse: Standby) -> None:
    for standbys in ([better, worse], [worse, better]):
        assert choose_standby(standbys, KIND, {}, FLAGS) == ((better, {}), [])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(standby(stage=Stage.ENDING), id="one that ends"),
        pytest.param(standby(lent=LentDevice("GPU-1", {})), id="one that has a device"),
        pytest.param(standby(modules=("ours", "users", "more")), id="one that imported more"),
        pytest.param(standby(replace(KIND, always=("others",))), id="one of another framework"),
    ],
)
def test_a_task_does_not_get(other: Standby) -> None:
    assert choose_standby([other], KIND, {}, FLAGS) == (None, [])


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        pytest.param({"LANG": "C"}, FLAGS, id="the environment has changed"),
        pytest.param({}, ("-O",), id="it was started with other flags"),
    ],
)
def test_of_those_that_suit_no_more_the_kinds_own_are_named(
    environment: dict[str, str], flags: tuple[str, ...]
) -> None:
    own = standby(environment=environment, flags=flags)
    others = standby(KIND.without_users(), ("ours",), environment, flags)
    good = standby()
    assert choose_standby([own, others, good], KIND, {}, FLAGS) == ((good, {}), [own])


def test_what_may_still_change_is_changed() -> None:
    waits = standby(environment={"PREFECT_A": "1", "PREFECT_B": "2"})
    changes = {"PREFECT_A": "3", "PREFECT_B": None}
    assert choose_standby([waits], KIND, {"PREFECT_A": "3"}, FLAGS) == ((waits, changes), [])
    assert changes_for(waits, KIND, {"PREFECT_A": "3"}, FLAGS) == changes


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
    best, _ = choose_standby(
        [waits], replace(KIND, cpus_stated=tasks), {"OMP_NUM_THREADS": "4"}, FLAGS
    )
    assert (best is not None) == suits


def test_a_kept_one_with_other_flags_or_another_device_does_not_suit() -> None:
    lent = LentDevice("GPU-1", {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    waits = standby(replace(KIND, hot="torch"), lent=lent)
    assert changes_for(waits, KIND, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, FLAGS) == {}
    assert changes_for(waits, KIND, {"CUDA_VISIBLE_DEVICES": "GPU-2"}, FLAGS) is None
    assert changes_for(waits, KIND, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, ()) is None
