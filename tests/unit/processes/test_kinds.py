"""What a pool learns of its kinds, and what it wants of them for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from prefect_gpu.processes.kind import SIMULATED, Kind
from prefect_gpu.processes.kinds import MOST_DEATHS, MOST_MISFITS, Kinds, KindState
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.spec import WarmSpec
from prefect_gpu.processes.waiting import Standby

KIND = Kind(("ours",), ("users",), (), False, 1, 100, SIMULATED)
OTHER = replace(KIND, users=("others",))


@dataclass(frozen=True)
class Devices:
    """A heater that is never asked for a device."""

    device_count: int = 1

    def lend(self, *_: Any) -> None:
        raise AssertionError


def standby(kind: Kind = KIND, **state: Any) -> Standby:
    spec = WarmSpec(kind.modules, {}, "", (), ())
    return Standby(kind, spec, (), 0.0, **{"ready": True, **state})


@pytest.fixture
def kinds() -> Kinds:
    return Kinds()


@pytest.fixture
def state(kinds: Kinds) -> KindState:
    return kinds.of(KIND)


def test_those_who_came_first_are_served_first_and_the_last_used_next(kinds: Kinds) -> None:
    used = [replace(KIND, users=(name,)) for name in ("gone", "alive", "latest")]
    for kind in used:
        kinds.use(kind)
    left = replace(KIND, users=("left",))
    demands = kinds.demands([OTHER, KIND, OTHER], [standby(left), standby(used[1])])
    assert [d.kind for d in demands] == [OTHER, KIND, used[2], used[1], left]
    assert [d.waiting for d in demands] == [2, 1, 0, 0, 0]
    assert [d.latest for d in demands] == [False, False, True, False, False]
    assert [d.used for d in demands] == [False, False, True, True, False]


def test_a_kind_that_is_used_again_is_the_latest(kinds: Kinds) -> None:
    for kind in (KIND, OTHER, KIND):
        kinds.use(kind)
    assert [d.kind for d in kinds.demands([], [standby(OTHER)])] == [KIND, OTHER]


def test_those_that_were_ended_do_not_count(kinds: Kinds) -> None:
    own = [standby(), standby(ready=False), standby(ready=False), standby(ended=True)]
    (demand,) = kinds.demands([], [*own, standby(ready=False, ended=True)])
    assert (demand.ready, demand.warming) == (1, 2)


def test_one_takes_what_was_measured_last(kinds: Kinds, state: KindState) -> None:
    sizes = []
    for warmed in (
        Warmed(resident_bytes=300),
        Warmed(),
        Warmed(touched="it opened a file", resident_bytes=500),
        Warmed(),
    ):
        sizes += [d.size_bytes for d in kinds.demands([KIND], [])]
        state.take_warmed(warmed, KIND.modules)
    assert sizes == [100, 300, 300, 300]


def test_a_problem_is_first_laid_to_the_users_modules(state: KindState) -> None:
    assert state.modules == ("ours", "users")
    for _ in range(2):
        # Two were made before the first was heard.
        state.take_warmed(Warmed(touched="it opened a file"), ("ours", "users"))
    assert state.modules == ("ours",) and not state.useless
    state.take_warmed(Warmed(touched="it started a thread"), ("ours",))
    assert "it started a thread" in state.useless


def test_a_kind_is_left_alone_after_some_deaths_and_it_is_said_once(
    kinds: Kinds, state: KindState, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(MOST_DEATHS - 1):
        state.take_death(("ours",), "it ended with 4")
    assert not state.useless
    for how in ("it ended with 5", "it ended with 6"):
        state.take_death(("ours",), how, "oh")
    (said,) = caplog.messages
    assert "for ours: 3 of them" in said and said.endswith("its stderr:\noh")
    (demand,) = kinds.demands([KIND], [])
    assert state.useless == "it ended with 5" and not demand.useful


def test_a_kind_is_left_alone_after_some_that_did_not_suit(state: KindState) -> None:
    for _ in range(MOST_MISFITS - 1):
        state.take_misfit()
    assert not state.useless
    state.take_misfit()
    assert "environment" in state.useless


@pytest.mark.parametrize(
    ("changes", "heats"),
    [
        pytest.param({}, True, id="one that is ready"),
        pytest.param({"ready": False}, False, id="not one that imports"),
        pytest.param({"ended": True}, False, id="not one that was ended"),
        pytest.param({"heating": True}, False, id="not one that has asked"),
    ],
)
def test_who_starts_on_a_device(
    kinds: Kinds, state: KindState, changes: dict[str, Any], heats: bool
) -> None:
    state.heater = Devices()
    state.cold_uuids.add("GPU-1")
    waits = standby(**changes)
    chosen = [(waits, state.heater, frozenset({"GPU-1"}))] if heats else []
    assert kinds.choose_to_heat([waits, standby(OTHER)], 0.0) == chosen


def test_with_several_devices_the_first_of_a_kind_is_kept_from_them(
    kinds: Kinds, state: KindState
) -> None:
    state.heater = Devices(2)
    assert kinds.demands([KIND], [])[0].spare == 1
    waiting = [standby(heating=True), standby(), standby(), standby()]
    assert [s for s, _, _ in kinds.choose_to_heat(waiting, 0.0)] == waiting[2:]


def test_nobody_is_asked_for_a_device_where_that_was_in_vain(
    kinds: Kinds, state: KindState
) -> None:
    state.heater = Devices()
    state.cool_until_s = 5.0
    assert [bool(kinds.choose_to_heat([standby()], now_s)) for now_s in (4.9, 5.0)] == [False, True]
    for _ in range(MOST_MISFITS):
        assert state.heater_at(5.0) is state.heater
        state.take_hot_misfit()
    assert state.heater_at(5.0) is None


def test_a_device_where_a_framework_does_not_start_is_said_once(
    state: KindState, caplog: pytest.LogCaptureFixture
) -> None:
    for uuid in ("GPU-1", "GPU-1", "GPU-2"):
        state.take_cold(uuid, "it hung")
    assert [m.split(" ahead")[0].split("device ")[1] for m in caplog.messages] == ["GPU-1", "GPU-2"]


def test_devices_of_a_runner_that_has_ended_are_not_asked_for(kinds: Kinds) -> None:
    kinds.of(KIND).heater, kinds.of(OTHER).heater = Devices(1), Devices(2)
    kinds.keep_heaters([None, Devices(2)])
    assert kinds.of(KIND).heater is None and kinds.of(OTHER).heater == Devices(2)


def test_nothing_is_held_against_a_kind_once_all_is_forgotten(
    kinds: Kinds, state: KindState
) -> None:
    kinds.use(KIND)
    state.useless = "it died"
    kinds.forget()
    assert kinds.demands([], []) == [] and not kinds.of(KIND).useless
