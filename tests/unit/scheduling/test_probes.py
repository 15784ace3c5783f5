"""Probes beside other tasks: when one more may start, what it is given, and which one leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_gpu.scheduling.backfill import ready_s, spare_bytes
from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import ModelBudgets, Placement, Probe, Request, Reservation
from prefect_gpu.scheduling.placement import Board, device_reason, fits_now
from prefect_gpu.scheduling.probes import (
    AT_ONCE_FRACTION,
    FIRST_S,
    Growth,
    Leaving,
    choose_leaving,
    counted_bytes,
    observe,
)
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.scheduling.scheduling_pass import RequestQueue, decide
from prefect_gpu.units import GIB, MIB
from tests.cases import cases
from tests.unit.scheduling.values import host, request, reserved, snapshot, state


def probe(name: str = "", fraction: float = 1.0, **others: object) -> Request:
    return request(name=name, probe_fraction=fraction, **others)


def held_by(name: str, cap_gib: float, counts_gib: float = 6, since_s: float = 0.0) -> Reservation:
    about = Probe(since_s, int(counts_gib * GIB))
    return replace(reserved(0, cap_gib, name), probe=about)


def place(asked: Request, on: DeviceState) -> Placement | None:
    board = Board([on])
    chosen = board.choose(asked)
    return None if chosen is None else board.place(asked, chosen, 5.0)


def grown(held_gib: float, ready_s: float = 0.0, grew_s: float = 0.0) -> Growth:
    return Growth(ready_s, int(held_gib * GIB), grew_s, int(held_gib * GIB))


# What one is given.


def test_the_first_on_an_empty_device_may_take_all_of_it_and_counts_for_a_quarter() -> None:
    placement = place(probe(), state(0, 24))
    assert placement is not None and placement.budget_bytes == (24 * GIB,)
    (reservation,) = placement.reservations
    assert reservation.probe == Probe(5.0, 6 * GIB)
    assert not reservation.exclusive


def test_four_start_at_once_on_an_empty_device_each_within_what_the_others_leave() -> None:
    queue = RequestQueue([probe(f"p{number}") for number in range(6)])
    decisions = decide(queue, Board([state(0, 24)]), host())
    caps = [placement.budget_bytes[0] // GIB for _, placement in decisions.placements]
    assert caps == [24, 18, 12, 6]


def test_one_whose_framework_takes_its_cap_at_once_gets_half_and_counts_at_it() -> None:
    placement = place(probe(fraction=AT_ONCE_FRACTION), state(0, 24))
    assert placement is not None and placement.budget_bytes == (12 * GIB,)
    assert placement.reservations[0].probe == Probe(5.0, 12 * GIB)


def test_beside_a_budget_it_is_capped_at_half_of_what_is_free() -> None:
    placement = place(probe(), state(0, 24, [reserved(0, 4)]))
    assert placement is not None and placement.budget_bytes == (10 * GIB,)


def test_on_several_devices_it_has_one_cap() -> None:
    board = Board([state(0, 24), state(1, 80)])
    asked = probe(count=2)
    chosen = board.choose(asked)
    assert chosen is not None
    assert board.place(asked, chosen).budget_bytes == (24 * GIB, 24 * GIB)


def test_one_that_is_exclusive_or_may_not_share_has_a_device_to_itself() -> None:
    for asked in (probe(exclusive=True), request()):
        placement = place(asked, state(0, 24))
        assert placement is not None and placement.reservations[0].exclusive
        assert placement.reservations[0].probe is None
        assert place(asked, state(0, 24, [held_by("a", 6)])) is None


def test_a_device_that_others_use_for_good_takes_one_probe_as_it_takes_one_alone() -> None:
    assert place(probe(), state(0, 24, used_gib=20)) is not None
    assert place(probe(), state(0, 24, used_gib=23)) is None


def test_where_a_confirmed_cap_is_above_what_is_free_beside_a_budget_it_waits() -> None:
    asked = replace(probe(), memory=ModelBudgets((("simulated", 10 * GIB),)), confirms_probe=True)
    placement = place(asked, state(0, 24, [reserved(0, 4)]))
    assert placement is not None and placement.budget_bytes == (10 * GIB,)
    assert placement.reservations[0].probe is not None
    assert place(asked, state(0, 24, [reserved(0, 15)])) is None
    # Beside other probes the caps may add up to more.
    full = device_state(snapshot(0, 24), (held_by("a", 20),), {}, 0, {"a": 6 * GIB})
    assert place(replace(asked, memory=ModelBudgets((("simulated", 20 * GIB),))), full) is not None


# What it counts for.


@cases(
    "growth, now_s, gib",
    {
        "nothing yet: its allowance": (None, 99.0, 6),
        "not for long enough: its allowance": (grown(2, 0, 0), 2.9, 6),
        "it has just grown: its allowance": (grown(2, 0, 2.5), 3.4, 6),
        "a large one that grows: half as much again": (grown(8, 0, 2.5), 3.4, 12),
        "settled: its peak and a tenth": (grown(2, 0, 2.0), 3.0, 2.2),
        "never more than its cap": (grown(30, 0, 0), 9.0, 20),
    },
)
def test_what_a_probe_counts_for(growth: Growth | None, now_s: float, gib: float) -> None:
    assert counted_bytes(held_by("a", 20), growth, now_s) == pytest.approx(gib * GIB, abs=2)


def test_growth_is_noted_beyond_what_allocators_and_libraries_take() -> None:
    growth = observe(None, 1.0, 0)
    assert growth is None
    growth = observe(growth, 2.0, GIB)
    growth = observe(growth, 3.0, GIB + 60 * MIB)
    assert growth is not None and (growth.ready_s, growth.grew_s) == (2.0, 2.0)
    growth = observe(growth, 4.0, GIB + 70 * MIB)
    assert growth is not None and growth.grew_s == 4.0
    growth = observe(growth, 5.0, 0)
    assert growth is not None
    assert (growth.grew_s, growth.peak_bytes) == (4.0, GIB + 70 * MIB)
    assert not growth.is_settled(4.9) and growth.is_settled(5.0)


def test_one_more_starts_once_the_running_ones_have_settled() -> None:
    held = tuple(held_by(name, 24) for name in "abcd")
    measured = dict.fromkeys("abcd", 2 * GIB)
    taken = snapshot(0, 24, used_gib=8)
    growing = device_state(taken, held, measured, 0, dict.fromkeys("abcd", 6 * GIB))
    assert not fits_now(probe(), growing)
    settled = device_state(taken, held, measured, 0, dict.fromkeys("abcd", int(2.2 * GIB)))
    assert fits_now(probe(), settled)
    placement = place(probe(), settled)
    assert placement is not None
    assert placement.budget_bytes[0] == pytest.approx(15.2 * GIB, abs=8)


def test_a_task_with_a_budget_starts_beside_the_caps_only() -> None:
    held = (held_by("a", 16),)
    settled = device_state(snapshot(0, 24, used_gib=2), held, {"a": 2 * GIB}, 0, {"a": 3 * GIB})
    assert fits_now(request(8), settled) and not fits_now(request(9), settled)
    queue = RequestQueue([request(9, name="known")])
    assert not decide(queue, Board([settled]), host()).placements
    said = sentence(device_reason(request(9), [settled]))
    assert said == "9GiB on device 0; most free 8GiB, the rest reserved for first runs: task a"
    assert sentence(device_reason(probe(), [settled])) == (
        "6GiB on device 0 (first run, memory need unknown); most free 21GiB"
    )


def test_beside_a_budget_the_caps_count_for_other_probes_too() -> None:
    held = (held_by("a", 10), reserved(0, 10, "known"))
    mixed = device_state(snapshot(0, 24, used_gib=1), held, {"a": GIB}, 0, {"a": GIB})
    assert not fits_now(probe(), mixed)


# Which one leaves.


def short(*held: Reservation, left_gib: float = 1.0) -> DeviceState:
    counts = {r.request_id: GIB for r in held}
    return device_state(snapshot(0, 24, used_gib=24 - left_gib), held, counts, 0, counts)


OLD, NEW = held_by("old", 24, since_s=0.0), held_by("new", 12, since_s=50.0)
GROWS = {"old": grown(20, 1.0, 59.9), "new": grown(3, 55.0, 55.0)}


@cases(
    "on, growths, now_s, leaves",
    {
        "the newest, though another grows": (short(OLD, NEW), GROWS, 60.0, "new"),
        "in any order of the ledger": (short(NEW, OLD), GROWS, 60.0, "new"),
        "none while there is room": (short(OLD, NEW, left_gib=2), GROWS, 60.0, None),
        "none if none grows": (short(OLD, NEW), GROWS, 61.0, None),
        "none if others took the memory": (short(OLD, NEW), {}, 60.0, None),
        "none that has no other beside it": (short(OLD), GROWS, 5.0, None),
        "none beside a budget": (short(OLD, NEW, reserved(0, 4, "known")), GROWS, 60.0, None),
    },
)
def test_which_probe_leaves_for_the_others(
    on: DeviceState, growths: dict[str, Growth], now_s: float, leaves: str | None
) -> None:
    found = choose_leaving(on, growths, now_s, 0)
    assert found == (None if leaves is None else Leaving(leaves, ends=True))


def test_after_its_first_seconds_it_is_suspended_and_not_ended() -> None:
    growths = {"old": grown(20, 1.0, 70.0)}
    at_s = NEW.probe.since_s + FIRST_S if NEW.probe else 0.0
    assert choose_leaving(short(OLD, NEW), growths, at_s - 0.1, 0) == Leaving("new", ends=True)
    assert choose_leaving(short(OLD, NEW), growths, at_s, 0) == Leaving("new", ends=False)


THIRD = held_by("third", 20, since_s=40.0)


def test_one_that_cannot_be_suspended_keeps_no_other_from_it() -> None:
    on, growths = short(OLD, NEW, THIRD), {"old": grown(20, 1.0, 70.0)}
    assert choose_leaving(on, GROWS, 60.0, 0, fixed={"new"}) == Leaving("new", ends=True)
    assert choose_leaving(on, growths, 70.0, 0, fixed={"new"}) == Leaving("third", ends=False)
    assert choose_leaving(on, growths, 70.0, 0, fixed={"old", "new", "third"}) is None


def test_those_that_are_away_neither_leave_nor_count() -> None:
    growths = {"old": grown(20, 1.0, 70.0)}
    on = short(OLD, NEW, THIRD)
    assert choose_leaving(on, growths, 70.0, 0, away={"new"}) == Leaving("third", ends=False)
    assert choose_leaving(on, growths, 70.0, 0, away={"new", "third"}) is None


def test_one_with_the_whole_device_as_its_cap_is_not_suspended() -> None:
    # Even what the driver keeps for it would keep it from coming back.
    whole = held_by("whole", 24, since_s=50.0)
    growths = {"old": grown(20, 1.0, 70.0)}
    assert choose_leaving(short(OLD, whole), growths, 70.0, 0) is None
    assert choose_leaving(short(THIRD, whole), growths, 70.0, 0) == Leaving("third", ends=False)


def test_of_those_that_were_placed_together_the_one_with_the_smallest_cap_leaves() -> None:
    nine, ten = (held_by(name, cap, since_s=0.0) for name, cap in (("id-9", 18), ("id-10", 6)))
    growths = {"id-9": grown(20, 1.0, 70.0)}
    assert choose_leaving(short(nine, ten), growths, 70.0, 0) == Leaving("id-10", ends=False)


def test_a_device_that_is_held_back_for_a_probe_is_so_until_its_quarter_is_free() -> None:
    full = state(0, 24, [replace(reserved(0, 12, "a"), ends_s=50.0), reserved(0, 12, "b")])
    assert ready_s(probe(), full, 0.0, 99) == 50.0
    assert ready_s(request(), full, 0.0, 99) is None
    assert spare_bytes(full, probe(), 50.0, 99) == 6 * GIB
