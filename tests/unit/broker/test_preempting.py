"""What is written about tasks that are suspended for others: from the entries of one pass to those of the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.broker.ledger import Entry
from prefect_gpu.broker.phases import Phase, Wish, Wisher
from prefect_gpu.broker.preempting import Preemption, preempt, share
from prefect_gpu.scheduling.model import Device, Probe, Request
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import HOST, device, request, reserved, state

NOW_S = 1000.0

#: A person's, for all requests.
SHARED = Wish(Wisher.PERSON, shared=True)


def entry(name: str, gib: float = 16, at: int = 0, **others: Any) -> Entry:
    """A preemptible task that has run for 1000 s on a device of two of the same model."""
    asked = request(gib, name=name, preemptible=True, **others.pop("of_request", {}))
    given: dict[str, Any] = {
        "owner": "its flow",
        "reservations": (reserved(at, gib, by=name),),
        "devices": tuple(device(index).key for index in range(2)),
        "pid": 1,
        "phase": Phase.RUNNING,
    }
    return Entry(asked, **{**given, **others})


def going(found: Entry, away: bool = False) -> Entry:
    """The same task, asked to go for `urgent`."""
    phase = Phase.AWAY if away else found.phase
    return replace(found, wish=Wish(Wisher.REQUEST, "urgent"), phase=phase)


def urgent(gib: float = 20, **others: Any) -> Request:
    return request(gib, name="urgent", **{"priority": 1, **others})


def passes(
    blocked: Request | Sequence[Request],
    *entries: Entry,
    devices: int = 1,
    measured: Mapping[str, int] | None = None,
    silent: Collection[str] = (),
    room_gib: float = 1000,
    quiet: Collection[int] = (),
    refuses: Callable[[Request, str], bool] = lambda request, node: False,
) -> Preemption:
    held = [r for each in entries for r in each.reservations]
    states = [
        state(i, held=[r for r in held if r.device_uuid == f"SIM-{i}"]) for i in range(devices)
    ]
    states = [
        replace(each, snapshot=replace(each.snapshot, error="no answer" if i in quiet else ""))
        for i, each in enumerate(states)
    ]
    requests = [blocked] if isinstance(blocked, Request) else blocked
    return preempt(
        requests,
        {each.id for each in requests if not each.origin},
        {each.request.id: each for each in entries},
        states,
        lambda request_id, _: (measured or {}).get(request_id, 0),
        {HOST: int(room_gib * GIB)},
        NOW_S,
        silent=silent,
        refuses=refuses,
    )


# Asked, away, made way.


def test_a_task_is_asked_and_keeps_its_reservation() -> None:
    running = entry("v")
    found = passes(urgent(), running)
    assert found.changes == {"v": going(running)}
    assert not found.ready


def test_nothing_is_written_while_it_is_on_its_way() -> None:
    found = passes(urgent(), going(entry("v")))
    assert (found.changes, found.ready) == ({}, [])


def test_it_makes_way_once_it_is_away() -> None:
    away = going(entry("v"), away=True)
    found = passes(urgent(), away)
    assert found.changes == {}
    ((plan, left),) = found.ready
    assert plan.request_id == "urgent" and plan.devices == (device().key,)
    made = left["v"]
    assert (made.reservations, made.wish, made.phase) == ((), None, Phase.RELEASED)
    assert made.request.returns and made.request.id == "v"
    assert made.request.sequence == away.request.sequence and not made.request.returns_first
    assert made.request.memory == 16 * GIB


def test_none_makes_way_before_all_are_away() -> None:
    both = going(entry("a", 10), away=True), going(entry("b", 10, at=1))
    found = passes(urgent(24, count=2), *both, devices=2)
    assert (found.changes, found.ready) == ({}, [])
    away = going(both[1], away=True)
    ((_, left),) = passes(urgent(24, count=2), both[0], away, devices=2).ready
    assert left.keys() == {"a", "b"}


def test_a_request_of_another_flow_is_left_to_that_flow() -> None:
    found = passes(urgent(origin="other/0"), entry("v"), going(entry("w", 4), away=True))
    assert (found.changes, found.ready) == ({}, [])


def test_a_task_that_is_not_needed_any_more_is_let_go() -> None:
    running = entry("v")
    # The request fits without it by now.
    assert passes(urgent(4), going(running)).changes == {"v": running}


@pytest.mark.parametrize(
    "running",
    [
        pytest.param(replace(entry("v"), request=request(16, name="v")), id="without the tag"),
        pytest.param(entry("v", pid=None), id="no process yet"),
        pytest.param(entry("v", wish=Wish(Wisher.PERSON)), id="a person has suspended it"),
        pytest.param(entry("v", owner="silent"), id="its flow sends no heartbeats"),
        pytest.param(entry("v", reservations=tuple(reserved(i, 16, by="v") for i in range(2))), id="on two devices"),
        pytest.param(entry("v", reservations=(replace(reserved(0, 16, by="v"), probe=Probe(0.0, GIB)),)), id="a first run beside others"),
        pytest.param(entry("v", rests_until_s=NOW_S + 1), id="it has just come back, or refused"),
    ],
)  # fmt: skip
def test_what_is_never_asked(running: Entry) -> None:
    assert passes(urgent(), running, silent=["silent"]).changes == {}


def test_what_is_moved_is_what_the_device_shows() -> None:
    # Only the small one fits the machine's memory, which keeps a margin.
    two = entry("a", 12), entry("b", 12)
    measured = {"a": 12 * GIB, "b": GIB}
    found = passes(urgent(12), *two, measured=measured, room_gib=4)
    assert list(found.changes) == ["b"]


@pytest.mark.parametrize("priority", [0, 1])
def test_the_return_of_one_that_another_device_has_the_room_for_is_placed_first(
    priority: int,
) -> None:
    running, beside = entry("v"), entry("w", 6, at=1, pid=None)
    asked = urgent(priority=priority)
    assert passes(asked, running, beside, devices=2).changes == {"v": going(running)}
    ((plan, left),) = passes(asked, going(running, away=True), beside, devices=2).ready
    assert plan.suspended == {"v": True}
    made = left["v"]
    assert made.reservations == () and made.wish is None
    assert made.request.returns and made.request.returns_first
    assert made.request.devices == ("SIM-0", "SIM-1")


# Where it may come back.


def shared(found: Entry, *devices: Device) -> Entry:
    """The entry once others may have its device."""
    freed = replace(found, wish=SHARED, phase=Phase.AWAY)
    return share(freed, SHARED, {each.key: each for each in devices}, NOW_S)


def homes(found: Entry, *devices: Device) -> list[str]:
    return list(shared(found, *devices).request.devices)


def test_it_may_come_back_on_all_devices_of_its_model() -> None:
    other_model = device(2, gib=48)
    all_keys = tuple(each.key for each in (device(), device(1), other_model))
    running = entry("v", devices=all_keys)
    assert homes(running, device(), device(1), other_model) == ["SIM-0", "SIM-1"]


def test_it_keeps_a_device_that_is_not_there() -> None:
    freed = replace(entry("v"), wish=SHARED, phase=Phase.AWAY)
    assert share(freed, SHARED, {device(1).key: device(1)}, NOW_S) is freed
    first_run = replace(freed, wish=Wish(Wisher.FIRST_RUNS, shared=True))
    assert first_run.wish is not None
    assert share(first_run, first_run.wish, {}, NOW_S) == replace(freed, wish=None)


def test_it_comes_back_on_its_own_device_where_a_tag_or_the_driver_pins_it() -> None:
    pinned = entry("v", of_request={"devices": ("SIM-0", "SIM-1")})
    assert homes(pinned, device(), device(1)) == ["SIM-0"]
    by_nvml = [replace(device(i), kind="nvml", driver="570.86.15") for i in range(2)]
    assert homes(entry("v"), *by_nvml) == ["SIM-0"]
    newer = [replace(each, driver="580.159.04", machine_gpus=4) for each in by_nvml]
    assert homes(entry("v"), *newer) == ["SIM-0", "SIM-1"]
    # Where the machine has more, it was not shown to hold.
    two_of_eight = [replace(each, machine_gpus=8) for each in newer]
    assert homes(entry("v"), *two_of_eight) == ["SIM-0"]


def test_one_that_was_away_before_may_go_where_it_could_go_then() -> None:
    once = shared(entry("v"), device(), device(1))
    back = replace(once, reservations=(reserved(1, 16, by="v"),))
    assert homes(back, device(), device(1)) == ["SIM-0", "SIM-1"]


def test_its_return_asks_for_what_it_had() -> None:
    held = replace(reserved(0, 16, by="v", exclusive=True), ends_s=NOW_S + 60)
    asked = {"host_bytes": GIB, "nodes": ("n",), "standby": "kind"}
    running = entry("v", reservations=(held,), of_request=asked)
    back = shared(running, device()).request
    assert (back.memory, back.exclusive, back.count) == (16 * GIB, True, 1)
    assert (back.host_bytes, back.nodes, back.standby) == (0, (), "")
    assert (back.expected_s, back.submitted_s) == (60, NOW_S)
    assert back.preemptible


# What may not be.


@pytest.mark.parametrize("away", [False, True])
def test_one_whose_device_does_not_answer_for_a_moment_is_not_let_go(away: bool) -> None:
    asked = going(entry("training"), away=away)
    assert not passes(urgent(), asked, quiet=[0]).changes


def test_nothing_is_asked_of_a_node_that_refuses_the_request() -> None:
    request = urgent()
    assert passes(request, entry("training")).changes
    refused = passes(request, entry("training"), refuses=lambda r, node: node == HOST)
    assert not refused.changes
    running = entry("training")
    let = passes(request, going(running), refuses=lambda r, node: True).changes
    assert let == {"training": running}
