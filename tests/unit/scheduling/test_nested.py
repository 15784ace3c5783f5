"""Requests from inside GPU tasks that wait for them: who is stuck, what is lent, who is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.memory import device_state
from prefect_gpu.scheduling.model import Placement, Probe, Request, Reservation
from prefect_gpu.scheduling.nested import Holder, Rescue, Scene, refusal, rescue
from prefect_gpu.scheduling.placement import Board
from prefect_gpu.scheduling.scheduling_pass import RequestQueue, decide
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import HOST, host, request, reserved, snapshot

WAITS, COMPUTES = Holder(waits=True), Holder()


def scene(
    held: Iterable[Reservation],
    holders: Mapping[str, Holder],
    uses: Mapping[str, float] | None = None,
    devices: int = 1,
) -> Scene:
    """Devices of 10 GiB, of which the tasks in `uses` hold so many GiB on device 0."""
    measured = {name: int(gib * GIB) for name, gib in (uses or {}).items()}
    states = []
    for at in range(devices):
        here = [each for each in held if each.device_uuid == f"SIM-{at}"]
        used = measured if at == 0 else {}
        taken = snapshot(at, 10, used_gib=sum(used.values()) / GIB)
        states.append(device_state(taken, here, used, 0))
    return Scene(states, holders, {(HOST, "SIM-0"): measured})


def inside(*ancestors: str, gib: float | None = 4, name: str = "inner", **others: Any) -> Request:
    return request(gib, name=name, ancestors=ancestors, **others)


def outcome(found: Rescue) -> list[str]:
    """Who is placed, with what of whom, and who is refused."""
    told = [
        f"{r.id} on {','.join(str(d.index) for d in p.devices)}"
        + "".join(f", {size / GIB:g} of {lender}" for each in p.reservations for lender, size in each.loans)
        for r, p in found.placements
    ]  # fmt: skip
    return told + ([f"{found.hopeless.id} never"] if found.hopeless else [])


def lent(gib: float, by: str, to: str, own: float | None = None) -> Reservation:
    return replace(reserved(0, own or gib, by=to), loans=((by, int(gib * GIB)),))


PROBE = replace(reserved(0, 9, by="a"), probe=Probe(0.0, GIB))
TWO = [reserved(0, 4, by="a"), reserved(0, 4, by="b")]
BOTH_WAIT = {"a": WAITS, "b": WAITS}
#: Of another process, before all others; it can never start.
OF_B = inside("b", gib=7, name="y", origin="z", priority=1)


@pytest.mark.parametrize(
    ("asked", "there", "says"),
    [
        pytest.param([inside("a", name="x"), inside("b", name="y")], scene(TWO, BOTH_WAIT), ["x on 0, 4 of a", "y on 0, 4 of b"], id="tasks that wait fill the device: each lends to its own"),
        pytest.param([inside("a", name="x"), inside("a", name="y")], scene(TWO, BOTH_WAIT), ["x on 0, 4 of a"], id="the second one waits for the first one to give it back"),
        pytest.param([inside("a")], scene([*TWO, lent(4, "a", "x")], {**BOTH_WAIT, "x": Holder(("a",))}), [], id="what is lent is not lent again"),
        pytest.param([inside("a")], scene(TWO, {"a": WAITS, "b": COMPUTES}), [], id="another task computes: nothing is stuck"),
        pytest.param([inside("a")], scene(TWO, {"a": COMPUTES, "b": WAITS}), [], id="the task around it computes: nothing is stuck"),
        pytest.param([inside("a", gib=5)], scene(TWO, BOTH_WAIT), ["inner on 0, 4 of a"], id="what is lent is too little alone, and the rest is free"),
        pytest.param([inside("a", gib=7), OF_B], scene(TWO, BOTH_WAIT), ["inner never"], id="it is larger than what is lent and free"),
        pytest.param([inside("a"), OF_B], scene(TWO, BOTH_WAIT, {"a": 3}), ["inner never"], id="the task around it uses what it holds"),
        pytest.param([inside("a", gib=3)], scene(TWO, BOTH_WAIT, {"a": 3}), ["inner on 0, 1 of a"], id="the task around it uses some of what it holds"),
        pytest.param([inside("a", gib=7, name="x"), inside("b", gib=7, name="y")], scene(TWO, BOTH_WAIT), ["y never"], id="of two that can never start the last one is refused"),
        pytest.param([inside("a", gib=7, name="x", origin="z"), inside("b", gib=7, name="y", origin="z", priority=1)], scene(TWO, BOTH_WAIT), [], id="another process refuses its own"),
        pytest.param([inside("a", gib=7), inside("b", gib=2, name="y")], scene(TWO, BOTH_WAIT), ["y on 0, 2 of b"], id="the other task will end, and then it starts"),
        pytest.param([inside("a", "m")], scene([reserved(0, 5, by="a"), reserved(0, 4, by="m")], {"a": WAITS, "m": Holder(("a",), True)}, {"m": 2}), ["inner on 0, 2 of m, 2 of a"], id="depth of three: the nearest lends first"),
        pytest.param([inside("a")], scene([reserved(0, 10, by="a", exclusive=True)], {"a": WAITS}), ["inner on 0, 4 of a"], id="an exclusive task lends to its own"),
        pytest.param([inside("b", gib=1)], scene([reserved(0, 4, by="a", exclusive=True), reserved(1, 10, by="b")], BOTH_WAIT, devices=2), ["inner on 1, 1 of b"], id="an exclusive task lends to no other"),
        pytest.param([inside("a", exclusive=True), OF_B], scene(TWO, BOTH_WAIT), ["inner never"], id="an exclusive one has no place beside other tasks"),
        pytest.param([inside("a", exclusive=True)], scene(TWO[:1], BOTH_WAIT), ["inner on 0, 4 of a"], id="an exclusive one has its place beside those around it"),
        pytest.param([inside("a", gib=None)], scene(TWO[:1], BOTH_WAIT), ["inner on 0, 4 of a"], id="one without a budget gets the device of the task around it"),
        pytest.param([inside("a", gib=None, probe_fraction=0.5)], scene([reserved(0, 10, by="a", exclusive=True)], {"a": WAITS}, {"a": 2}), ["inner on 0, 4 of a"], id="a first run shares the device of the task around it"),
        pytest.param([inside("a", name="x")], scene([PROBE, replace(PROBE, request_id="b")], BOTH_WAIT, {"a": 1, "b": 2}), ["x on 0, 4 of a"], id="first runs that wait count at what they hold"),
        pytest.param([inside("a", count=2)], scene([reserved(0, 8, by="a"), reserved(1, 8, by="a")], {"a": WAITS}, devices=2), ["inner on 0,1, 4 of a, 4 of a"], id="several devices, each lent by the same task"),
        pytest.param([inside("a", devices=("1",))], scene([*TWO, reserved(1, 8, by="c")], {**BOTH_WAIT, "c": COMPUTES}, devices=2), [], id="it names a device where a task computes"),
        pytest.param([inside("a")], scene([*TWO, reserved(1, 8, by="c")], {**BOTH_WAIT, "c": COMPUTES}, devices=2), [], id="on another device a task will end"),
        pytest.param([inside("a", gib=2)], scene([reserved(0, 8, by="a")], {"a": WAITS}), ["inner on 0, 2 of a"], id="there is room, but it was kept for one that waits for the task around it"),
        pytest.param([inside("a", gib=2)], scene([reserved(0, 6, by="a"), reserved(0, 2, by="x")], {"a": WAITS, "x": Holder(("a",))}), [], id="there is room, and a task inside the same one still runs"),
        pytest.param([inside("a", gib=2, devices=("7",))], scene(TWO, BOTH_WAIT), [], id="a device that is not there is refused elsewhere"),
    ],
)  # fmt: skip
def test_a_request_from_inside_a_task_that_waits(
    asked: list[Request], there: Scene, says: list[str]
) -> None:
    assert outcome(rescue(asked, there)) == says


def test_tasks_that_wait_do_not_count_as_tasks_of_a_device() -> None:
    asked, there = [inside("a", name="x"), inside("b", name="y")], scene(TWO, BOTH_WAIT)
    assert outcome(rescue(asked, there, max_tasks=1)) == ["x on 0, 4 of a"]
    assert outcome(rescue(asked, there, max_tasks=2)) == ["x on 0, 4 of a", "y on 0, 4 of b"]


def test_a_lender_counts_for_less_until_the_borrower_ends() -> None:
    loan = lent(3, "a", "x", own=5)
    assert scene([*TWO, loan], {}).states[0].free_bytes == 0
    assert scene([*TWO, loan], {}, {"a": 2}).states[0].free_bytes == -1 * GIB, "it goes on early"
    assert scene(TWO, {}).states[0].free_bytes == 2 * GIB
    assert scene(TWO, {}).states[0].after(loan).free_bytes == 0


def test_the_refusal_says_who_holds_what_and_what_to_write() -> None:
    asked = inside("a", gib=7)
    text = str(refusal(asked, scene(TWO, BOTH_WAIT, {"a": 3})))
    assert "the outer task 'task a' waits for it" in text
    assert (
        "7GiB asked, 10GiB usable; the outer task 'task a' holds 4GiB and uses 3GiB; 'task b' holds 4GiB"
        in text
    )
    assert "smaller gpu:memory" in text and "no gpu tag" in text and "from the flow" in text


#: A task: what it asks for, the part of that which it uses, and the tasks that it submits and waits for.
leaf = st.tuples(
    st.sampled_from([1.0, 2.0, 3.0, 4.0, 6.0, 9.0, None]),
    st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    st.fixed_dictionaries(
        {
            "count": st.sampled_from([1, 1, 1, 2]),
            "exclusive": st.sampled_from([False, False, False, True]),
            "priority": st.sampled_from([0, 0, 1]),
            "devices": st.sampled_from([(), (), (), ("0",), ("1",)]),
        }
    ).filter(lambda of: of["count"] == 1 or not of["devices"]),
)
task = st.recursive(
    st.tuples(leaf, st.just([])), lambda inner: st.tuples(leaf, st.lists(inner, max_size=3)), max_leaves=8
)  # fmt: skip


@given(st.lists(task, min_size=1, max_size=4), st.sampled_from([None, 1, 2]))
def test_no_byte_is_promised_twice_and_nobody_waits_for_ever(roots: Any, most: int | None) -> None:
    waiting: dict[str, tuple[Request, Any]] = {}
    running: dict[str, tuple[Request, Any, Placement]] = {}

    def submit(tasks: Any, ancestors: tuple[str, ...]) -> None:
        for each in tasks:
            gib, _, others = each[0]
            asked = request(gib, ancestors=ancestors, **others)
            waiting[asked.id] = asked, each

    def inside_of(name: str) -> list[str]:
        return [i for i, (r, *_) in [*waiting.items(), *running.items()] if name in r.ancestors]

    submit(roots, ())
    while waiting or running:
        measured: dict[tuple[str, str], dict[str, int]] = {}
        held: dict[str, list[Reservation]] = {"SIM-0": [], "SIM-1": []}
        for name, (_, (of, _), placement) in running.items():
            for each in placement.reservations:
                held[each.device_uuid].append(each)
                measured.setdefault(each.device_key, {})[name] = int(of[1] * each.reserved_bytes)
        states = []
        for at in range(2):
            used = measured.get((HOST, f"SIM-{at}"), {})
            taken = snapshot(at, 10, used_gib=sum(used.values()) / GIB)
            states.append(device_state(taken, held[f"SIM-{at}"], used, 0))
            # A task that was lent memory and has ended gives it back; the lender has not taken it meanwhile.
            assert states[-1].free_bytes >= -1
        board = Board(states, max_tasks=most)
        decisions = decide(RequestQueue(r for r, _ in waiting.values()), board, host())
        decided = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
        left = [r for r, _ in waiting.values() if r.ancestors and r.id not in decided]
        holders = {i: Holder(r.ancestors, bool(t[1])) for i, (r, t, _) in running.items()}
        found = rescue(left, Scene(board.states, holders, measured), max_tasks=most)
        refused = [r for r, _ in decisions.refusals] + ([found.hopeless] if found.hopeless else [])
        for asked in refused:
            del waiting[asked.id]
        for asked, placement in (*decisions.placements, *found.placements):
            _, of = waiting.pop(asked.id)
            running[asked.id] = asked, of, placement
            submit(of[1], (*asked.ancestors, asked.id))
        if not refused and not decisions.placements and not found.placements:
            ends = next((i for i in running if not inside_of(i)), None)
            assert ends is not None, "all wait, without end"
            del running[ends]
