"""How much is free, and what did not come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect_gpu.scheduling.memory import (
    Recovery,
    device_state,
    judge_recovery,
    measure,
    ownerless_bytes,
)
from prefect_gpu.scheduling.model import DeviceSnapshot, ProcessUse
from prefect_gpu.units import GIB, MIB
from tests.cases import cases
from tests.unit.scheduling.values import request, reserved, snapshot, state

OURS, CHILD, OTHER = 100, 101, 1


def use(pid: int, gib: float | None, root: int | None = None) -> ProcessUse:
    return ProcessUse(pid, root, None if gib is None else int(gib * GIB))


def used(gib: float, *processes: ProcessUse, **others: Any) -> DeviceSnapshot:
    return snapshot(used_gib=gib, processes=processes, **others)


def in_bytes(sizes_gib: Mapping[str, float]) -> dict[str, int]:
    return {name: int(gib * GIB) for name, gib in sizes_gib.items()}


@cases(
    "free_gib, taken, promised, measured, headroom_gib",
    {
        "an empty device is free": (24, used(0)),
        "headroom is kept": (23, used(0), [], {}, 1),
        "the driver's part is not ours": (23, used(0, reserved_gib=1)),
        "others count as they are": (19, used(5)),
        "what is not yet allocated counts at its reservation": (18, used(0), [6]),
        "what is within its reservation is not counted twice": (18, used(4), [6], {"t0": 4}),
        "a process above its reservation counts at what it holds": (16, used(8), [6], {"t0": 8}),
        "the rest of what is used is foreign": (13, used(9), [6], {"t0": 4}),
        "each of ours counts by itself": (12, used(10), [6, 3], {"t0": 4, "t1": 5}),
        "ours without a reservation counts": (21, used(3), [], {"gone": 3}),
        "others that took what is reserved leave less than nothing": (-6, used(20), [10]),
        "measured beyond what is used leaves no more than that": (0, used(22), [], {"t0": 24}),
    },
    *([], {}, 0),
)
def test_free_memory(
    free_gib: float,
    taken: DeviceSnapshot,
    promised: list[float],
    measured: dict[str, float],
    headroom_gib: float,
) -> None:
    reservations = [reserved(gib=gib, by=f"t{i}") for i, gib in enumerate(promised)]
    found = device_state(taken, reservations, in_bytes(measured), int(headroom_gib * GIB))
    assert found.free_bytes == int(free_gib * GIB)
    assert found.reservations == tuple(reservations)


def test_the_driver_is_never_promised_more_than_it_has() -> None:
    # `used` understates: the driver has less free than our sums say.
    taken = DeviceSnapshot(snapshot().device, 0.0, 3 * GIB, 0)
    assert device_state(taken, (), {"t": 2 * GIB}, 0).free_bytes == 3 * GIB


def test_a_device_has_less_free_after_a_reservation() -> None:
    after = state(gib=24).after(reserved(gib=10))
    assert (after.free_bytes, after.reservations) == (14 * GIB, (reserved(gib=10),))


MINE, WSL = use(OURS, 3, OURS), use(OURS, None, OURS)


@cases(
    "taken, stand_in_gib, measured_gib",
    {
        "the child itself": (used(3, MINE), 0, 3),
        "and those it started": (used(5, MINE, use(CHILD, 2, OURS)), 0, 5),
        "a foreign process is not ours": (used(3, use(OTHER, 3)), 0, 0),
        "a root that is not on this device is not ours": (used(3, use(9, 3, 9)), 0, 0),
        "WSL and no counters: unknown": (used(3, WSL), 0, 0),
        "WSL: its counters stand in": (used(3, WSL), 2, 2),
        "a container: its counters stand in": (used(3), 2, 2),
        "a second device that it does not use holds nothing of it": (used(0), 2, 0),
        "no more than what no process is listed with": (used(3, use(OTHER, 2)), 2, 1),
        "half of it told: the larger counts": (used(4, MINE, use(CHILD, None, OURS)), 4, 4),
        "what the driver tells goes first": (used(3, MINE), 9, 3),
    },
)
def test_attributing_memory(taken: DeviceSnapshot, stand_in_gib: int, measured_gib: int) -> None:
    found = measure(taken, {OURS: "mine"}, in_bytes({"mine": stand_in_gib}))
    assert found == ({"mine": measured_gib * GIB} if measured_gib else {})


@cases(
    "listed, stand_in_gib, mine_gib",
    {
        "a number that is a child's by chance": (use(OURS, 9, OURS), 2, 2),
        "its own process under the host's number": (use(OTHER, 9), 2, 2),
        "the memory of another process, which has none": (use(OURS, 0, OURS), 2, 2),
        "no counters: nothing is known of it": (use(OURS, 9, OURS), 0, None),
    },
)
def test_where_ids_are_of_another_namespace_only_counters_are_attributed(
    listed: ProcessUse, stand_in_gib: int, mine_gib: int | None
) -> None:
    taken = snapshot(used_gib=9, processes=(listed,))
    taken = replace(taken, device=replace(taken.device, attributed=False))
    found = measure(taken, {OURS: "mine"}, {"mine": stand_in_gib * GIB})
    assert found == ({} if mine_gib is None else {"mine": mine_gib * GIB})
    assert ownerless_bytes(taken) is None


def test_memory_that_no_process_holds() -> None:
    assert ownerless_bytes(snapshot(used_gib=5, processes=(use(OTHER, 2),))) == 3 * GIB
    assert ownerless_bytes(snapshot(used_gib=5, processes=(use(OTHER, None),))) is None
    assert ownerless_bytes(snapshot(error="lost")) is None
    taken = snapshot(used_gib=5)
    host = replace(taken, device=replace(taken.device, kind="host"))
    assert ownerless_bytes(host) is None


@cases(
    "taken, before_gib, complete, missing_gib",
    {
        "all is back": (used(0), 0, True, 0),
        "an old leak is not blamed on it": (used(2), 2, True, 0),
        "a new leak is": (used(3), 2, False, 1),
        "a process that came meanwhile is not a leak": (used(3, use(OTHER, 3)), 0, True, 0),
        "an old leak that went away is no matter": (used(1), 4, True, 0),
        "a helper that lives on still holds it": (used(2, use(CHILD, 2, OURS)), 0, False, 2),
        "a helper that holds nothing is waited for": (used(0, use(CHILD, 0, OURS)), 0, False, 0),
        "a lost device cannot tell": (used(0, error="lost"), 0, False, None),
        "without a baseline: cannot be told": (used(3), None, True, None),
        "WSL: a helper is still listed": (used(3, use(CHILD, None, OURS)), None, False, 0),
        "a neighbour that ends is listed without bytes": (
            used(3, use(OTHER, None)),
            0,
            False,
            None,
        ),
    },
)
def test_recovery(
    taken: DeviceSnapshot, before_gib: int | None, complete: bool, missing_gib: int | None
) -> None:
    before, missing = (None if gib is None else gib * GIB for gib in (before_gib, missing_gib))
    assert judge_recovery(taken, OURS, before, 2 * MIB) == Recovery(complete, missing)


def test_the_drivers_own_bookkeeping_is_no_leak() -> None:
    taken = replace(snapshot(), free_bytes=24 * GIB - 2 * MIB)
    assert judge_recovery(taken, OURS, 0, 2 * MIB) == Recovery(True, 0)


def test_what_the_driver_keeps_for_each_process_it_lists_is_no_leak() -> None:
    neighbours = (use(CHILD, 1, CHILD), use(OTHER, 1))
    taken = replace(snapshot(used_gib=2, processes=neighbours), free_bytes=22 * GIB - 17 * MIB)
    assert judge_recovery(taken, OURS, 0, 2 * MIB) == Recovery(False, 17 * MIB)
    assert judge_recovery(taken, OURS, 0, 2 * MIB, 9 * MIB) == Recovery(True, 0)
    lost = replace(taken, free_bytes=taken.free_bytes - GIB)
    assert judge_recovery(lost, OURS, 0, 2 * MIB, 9 * MIB) == Recovery(False, GIB + 17 * MIB)


def test_what_the_driver_keeps_for_suspended_processes_is_no_leak() -> None:
    taken = replace(snapshot(), free_bytes=24 * GIB - 3 * MIB)
    assert judge_recovery(taken, OURS, 0, 2 * MIB) == Recovery(False, 3 * MIB)
    assert judge_recovery(taken, OURS, 0, 2 * MIB, suspended_bytes=4 * MIB) == Recovery(True, 0)


def test_host_memory_is_back_when_its_processes_are_gone() -> None:
    taken = snapshot(used_gib=9, processes=(use(CHILD, 2, OURS),))
    taken = replace(taken, device=replace(taken.device, kind="host"))
    assert judge_recovery(taken, OURS, None, 0) == Recovery(False, 2 * GIB)
    assert judge_recovery(replace(taken, processes=()), OURS, None, 0) == Recovery(True, 0)


def test_what_a_request_needs_of_a_device() -> None:
    there = snapshot(gib=10).device
    assert request(share=0.4).need_bytes(there) == 4 * GIB
    assert request(gib=3).need_bytes(there) == 3 * GIB
    assert request().need_bytes(there) is None
