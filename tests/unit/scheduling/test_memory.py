"""How much is free, and what did not come back."""

from __future__ import annotations

from dataclasses import replace

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


@cases(
    "taken, promised, measured, headroom_gib, free_gib",
    {
        "an empty device is free": (snapshot(), [], {}, 0, 24),
        "headroom is kept": (snapshot(), [], {}, 1, 23),
        "the driver's part is not ours": (snapshot(reserved_gib=1), [], {}, 0, 23),
        "others count as they are": (snapshot(used_gib=5), [], {}, 0, 19),
        "what is not yet allocated counts at its reservation": (snapshot(), [6], {}, 0, 18),
        "what is within its reservation is not counted twice": (
            snapshot(used_gib=4),
            [6],
            {"t0": 4},
            0,
            18,
        ),
        "a process above its reservation counts at what it holds": (
            snapshot(used_gib=8),
            [6],
            {"t0": 8},
            0,
            16,
        ),
        "the rest of what is used is foreign": (snapshot(used_gib=9), [6], {"t0": 4}, 0, 13),
        "each of ours counts by itself": (
            snapshot(used_gib=10),
            [6, 3],
            {"t0": 4, "t1": 5},
            0,
            24 - 6 - 5 - 1,
        ),
        "ours without a reservation counts": (snapshot(used_gib=3), [], {"gone": 3}, 0, 21),
        "others that took what is reserved leave less than nothing": (
            snapshot(used_gib=20),
            [10],
            {},
            0,
            -6,
        ),
        "measured beyond what is used leaves no more than that": (
            replace(snapshot(), free_bytes=2 * GIB),
            [],
            {"t0": 24},
            0,
            0,
        ),
    },
)
def test_free_memory(
    taken: DeviceSnapshot,
    promised: list[float],
    measured: dict[str, float],
    headroom_gib: float,
    free_gib: float,
) -> None:
    reservations = [reserved(gib=gib, by=f"t{i}") for i, gib in enumerate(promised)]
    found = device_state(
        taken,
        reservations,
        {key: int(gib * GIB) for key, gib in measured.items()},
        int(headroom_gib * GIB),
    )
    assert found.free_bytes == int(free_gib * GIB)
    assert found.reservations == tuple(reservations)


def test_the_driver_is_never_promised_more_than_it_has() -> None:
    # `used` understates: the driver has less free than our sums say.
    taken = DeviceSnapshot(snapshot().device, 0.0, 3 * GIB, 0)
    assert device_state(taken, (), {"t": 2 * GIB}, 0).free_bytes == 3 * GIB


def test_a_device_has_less_free_after_a_reservation() -> None:
    after = state(gib=24).after(reserved(gib=10))
    assert (after.free_bytes, after.reservations) == (14 * GIB, (reserved(gib=10),))


@cases(
    "used_gib, processes, stand_ins, measured",
    {
        "the child itself": (3, [use(OURS, 3, OURS)], {}, {"mine": 3}),
        "and those it started": (5, [use(OURS, 3, OURS), use(CHILD, 2, OURS)], {}, {"mine": 5}),
        "a foreign process is not ours": (3, [use(OTHER, 3)], {}, {}),
        "a root that is not on this device is not ours": (3, [use(9, 3, 9)], {}, {}),
        "WSL and no counters: unknown": (3, [use(OURS, None, OURS)], {}, {}),
        "WSL: its counters stand in": (3, [use(OURS, None, OURS)], {"mine": 2}, {"mine": 2}),
        "a container: its counters stand in": (3, [], {"mine": 2}, {"mine": 2}),
        "a second device that it does not use holds nothing of it": (0, [], {"mine": 2}, {}),
        "no more than what no process is listed with": (
            3,
            [use(OTHER, 2)],
            {"mine": 2},
            {"mine": 1},
        ),
        "half of it told: the larger counts": (
            4,
            [use(OURS, 3, OURS), use(CHILD, None, OURS)],
            {"mine": 4},
            {"mine": 4},
        ),
        "what the driver tells goes first": (3, [use(OURS, 3, OURS)], {"mine": 9}, {"mine": 3}),
    },
)
def test_attributing_memory(
    used_gib: float,
    processes: list[ProcessUse],
    stand_ins: dict[str, float],
    measured: dict[str, float],
) -> None:
    taken = snapshot(used_gib=used_gib, processes=tuple(processes))
    found = measure(taken, {OURS: "mine"}, {k: int(v * GIB) for k, v in stand_ins.items()})
    assert found == {key: int(gib * GIB) for key, gib in measured.items()}


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
    "taken, before_gib, found",
    {
        "all is back": (snapshot(), 0, (True, 0)),
        "an old leak is not blamed on it": (snapshot(used_gib=2), 2, (True, 0)),
        "a new leak is": (snapshot(used_gib=3), 2, (False, 1)),
        "a process that came meanwhile is not a leak": (
            snapshot(used_gib=3, processes=(use(OTHER, 3),)),
            0,
            (True, 0),
        ),
        "an old leak that went away is no matter": (snapshot(used_gib=1), 4, (True, 0)),
        "a helper that lives on still holds it": (
            snapshot(used_gib=2, processes=(use(CHILD, 2, OURS),)),
            0,
            (False, 2),
        ),
        "a helper that holds nothing is still waited for": (
            snapshot(processes=(use(CHILD, 0, OURS),)),
            0,
            (False, 0),
        ),
        "a lost device cannot tell": (snapshot(error="lost"), 0, (False, None)),
        "without a baseline: cannot be told": (snapshot(used_gib=3), None, (True, None)),
        "WSL: a helper is still listed": (
            snapshot(used_gib=3, processes=(use(CHILD, None, OURS),)),
            None,
            (False, 0),
        ),
        "a neighbour that is just ending is listed without bytes: the next reading decides": (
            snapshot(used_gib=3, processes=(use(OTHER, None),)),
            0,
            (False, None),
        ),
    },
)
def test_recovery(
    taken: DeviceSnapshot, before_gib: float | None, found: tuple[bool, float | None]
) -> None:
    before = None if before_gib is None else int(before_gib * GIB)
    complete, missing_gib = found
    missing = None if missing_gib is None else int(missing_gib * GIB)
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
