"""Devices of several nodes: each request gets its devices on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE, Patience
from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import NEVER_BYTES, DeviceSnapshot, Request, Reservation
from prefect_gpu.scheduling.placement import (
    MOST_LISTED,
    Board,
    PlacementStyle,
    check_possible,
    device_reason,
    select_devices,
)
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.scheduling.scheduling_pass import (
    Decisions,
    HostState,
    RequestQueue,
    decide,
    explain,
)
from prefect_gpu.units import GIB
from tests.unit.scheduling.test_queue_properties import requests
from tests.unit.scheduling.values import host, request, snapshot


def on(
    node: str, index: int, held_gib: float = 0, gib: float = 24, **others: object
) -> DeviceState:
    """A device of a node on a machine that all share, on which a task holds memory."""
    taken = snapshot(index, gib, host=node, **others)  # type: ignore[arg-type]
    device = replace(taken.device, uuid=f"SIM-{node}-{index}", machine="machine", in_cluster=True)
    held = Reservation("other", *device.key, int(held_gib * GIB), task_name="other")
    return device_state(replace(taken, device=device), (held,) if held_gib else (), {}, 0)


def named(placed: Sequence[object]) -> list[str]:
    return [f"{each.host}:{each.index}" for each in placed]  # type: ignore[attr-defined]


def take(
    states: Sequence[DeviceState], asked: Request, style: PlacementStyle = "spread", **ready: int
) -> list[str] | None:
    board = Board(states, style, standbys={"kind": ready})
    chosen = board.choose(asked, board.named(asked))
    return None if chosen is None else named(board.place(asked, chosen).devices)


def started(decisions: Decisions) -> list[tuple[str, list[str]]]:
    return [(r.id, named(p.devices)) for r, p in decisions.placements]


TWO_BY_TWO = [on("a", 0), on("a", 1), on("b", 0), on("b", 1)]
#: Of each node one device is full.
HALVES = [on("a", 0, 24), on("a", 1), on("b", 0), on("b", 1, 24)]


@pytest.mark.parametrize(
    ("states", "asked", "style", "devices"),
    [
        pytest.param(HALVES, request(6), "spread", ["a:1"], id="one device of any"),
        pytest.param(HALVES, request(6, count=2), "spread", None, id="two devices are not of two nodes"),
        pytest.param(HALVES, request(share=0.5, count=2), "spread", None, id="nor with a share"),
        pytest.param([on("a", 0), on("a", 1, 9), on("b", 0, 4), on("b", 1, 4)], request(6, count=2), "spread", ["b:0", "b:1"], id="the node whose fullest device is emptiest"),
        pytest.param([on("a", 0), on("a", 1, 9), on("b", 0, 4), on("b", 1, 4)], request(6, count=2), "pack", ["b:0", "b:1"], id="pack: whose emptiest device is fullest"),
        pytest.param([on("a", 0), on("b", 0, 1), on("b", 1, 1)], request(share=0.5, count=2), "spread", ["b:0", "b:1"], id="a share of each"),
        pytest.param(TWO_BY_TWO, request(6, devices=("1",)), "spread", ["a:1"], id="an index is of any node"),
        pytest.param([on("a", 1, 9), *TWO_BY_TWO[2:]], request(6, devices=("1",)), "spread", ["b:1"], id="the node that the style prefers"),
        pytest.param(TWO_BY_TWO, request(6, devices=("b:1",)), "spread", ["b:1"], id="the device of a node"),
        pytest.param(TWO_BY_TWO, request(6, count=2, devices=("1", "0")), "spread", ["a:1", "a:0"], id="in the tag's order"),
        pytest.param([on("a", 0, 24), *TWO_BY_TWO[1:]], request(6, count=2, devices=("1", "0")), "spread", ["b:1", "b:0"], id="in the tag's order on another node"),
        pytest.param([on("a", 0, 9), *TWO_BY_TWO[1:]], request(6, devices=("a:0", "b:0")), "spread", ["a:0"], id="the first that fits, whatever its node"),
        pytest.param(TWO_BY_TWO, request(6, nodes=("b",)), "spread", ["b:0"], id="only on its node"),
        pytest.param([*TWO_BY_TWO[:2], on("b", 0, 9), on("b", 1)], request(6, nodes=("b",)), "spread", ["b:1"], id="there by the style"),
        pytest.param(TWO_BY_TWO, request(6, count=2, nodes=("b",)), "spread", ["b:0", "b:1"], id="two on its node"),
        pytest.param(TWO_BY_TWO, request(6, devices=("1",), nodes=("b",)), "spread", ["b:1"], id="an index on its node"),
        pytest.param(TWO_BY_TWO, request(6, nodes=("a", "b")), "pack", ["a:0"], id="all nodes are any"),
    ],
)  # fmt: skip
def test_which_devices_of_which_node(
    states: list[DeviceState], asked: Request, style: PlacementStyle, devices: list[str] | None
) -> None:
    check_possible(asked, states)
    assert take(states, asked, style) == devices


def of_kind(gib: float | None = 6, **others: object) -> Request:
    return request(gib, standby="kind", **others)  # type: ignore[arg-type]


def busy(state: DeviceState) -> DeviceState:
    return replace(state, snapshot=replace(state.snapshot, busy_fraction=0.9))


#: The devices of node b have less free.
B_FULLER = [on("a", 0), on("a", 1), on("b", 0, 9), on("b", 1, 9)]


@pytest.mark.parametrize(
    ("states", "asked", "style", "ready", "devices"),
    [
        pytest.param(B_FULLER, of_kind(), "spread", {"b": 1}, ["b:0"], id="a ready standby before the emptiest"),
        pytest.param(B_FULLER, of_kind(), "pack", {"a": 1}, ["a:0"], id="a ready standby before the fullest"),
        pytest.param(B_FULLER, of_kind(), "spread", {"a": 1, "b": 2}, ["a:0"], id="of two such nodes the emptiest"),
        pytest.param(B_FULLER, of_kind(), "spread", {"b": 0}, ["a:0"], id="none is ready"),
        pytest.param(B_FULLER, request(6), "spread", {"b": 1}, ["a:0"], id="of another kind"),
        pytest.param(B_FULLER, of_kind(20), "spread", {"b": 1}, ["a:0"], id="no room beside it: it does not wait"),
        pytest.param(B_FULLER, of_kind(None), "spread", {"b": 1}, ["a:0"], id="nor for a device to itself"),
        pytest.param([*TWO_BY_TWO[:2], busy(on("b", 0)), busy(on("b", 1))], of_kind(), "spread", {"b": 1}, ["a:0"], id="a device that is not busy comes first"),
        pytest.param([busy(on("a", 0)), busy(on("b", 0, 9))], of_kind(), "spread", {"b": 1}, ["b:0"], id="among busy ones too"),
        pytest.param(B_FULLER, of_kind(count=2), "spread", {"b": 1}, ["b:0", "b:1"], id="for several devices"),
        pytest.param([*TWO_BY_TWO[:2], on("b", 0)], of_kind(count=2), "spread", {"b": 1}, ["a:0", "a:1"], id="never fewer than were asked for"),
        pytest.param(B_FULLER, of_kind(nodes=("a",)), "spread", {"b": 1}, ["a:0"], id="never on a node that is not named"),
        pytest.param([*B_FULLER, on("c", 0)], of_kind(nodes=("a", "b")), "spread", {"b": 1}, ["b:0"], id="among named nodes"),
        pytest.param(B_FULLER, of_kind(devices=("a:1", "b:0")), "spread", {"b": 1}, ["a:1"], id="never before the order of gpu:device"),
        pytest.param(B_FULLER, of_kind(devices=("1",)), "spread", {"b": 1}, ["b:1"], id="an index on any node"),
    ],
)  # fmt: skip
def test_a_node_with_a_ready_standby_is_preferred(
    states: list[DeviceState],
    asked: Request,
    style: PlacementStyle,
    ready: dict[str, int],
    devices: list[str],
) -> None:
    assert take(states, asked, style, **ready) == devices


def test_a_ready_standby_is_counted_for_one_task() -> None:
    board = Board(B_FULLER, standbys={"kind": {"b": 1}})
    decisions = decide(RequestQueue([of_kind(name="x"), of_kind(name="y")]), board, host())
    assert started(decisions) == [("x", ["b:0"]), ("y", ["a:0"])]


def test_a_device_kept_for_a_blocked_task_is_not_given_away_for_a_standby() -> None:
    held = tuple(replace(each, ends_s=100.0) for each in on("b", 0, 9).reservations)
    states = [on("a", 0, 9), replace(on("b", 0, 9), reservations=held)]
    queue = RequestQueue([request(20, name="large"), of_kind(name="x")])
    decisions = decide(queue, Board(states, standbys={"kind": {"b": 1}}), host())
    assert started(decisions) == [("x", ["a:0"])]
    assert [uuid for _, uuid in decisions.statuses["large"].kept] == ["SIM-b-0"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        pytest.param(request(1, nodes=("c",)), "gpu:node=c names no node of this runner; accepted: a, b", id="no such node"),
        pytest.param(request(1, devices=("7",)), "gpu:device=7 names no device of this runner; accepted: an index from 0 to 1, a node and an index as in a:0, or the beginning of a UUID [a:0: SIM-a-0;", id="no such index"),
        pytest.param(request(1, devices=("c:0",)), "gpu:device=c:0 names no device", id="no such device of a node"),
        pytest.param(request(1, devices=("b:0",), nodes=("a",)), "of this runner on node a", id="not on its node"),
        pytest.param(request(1, devices=("SIM-a",)), "names more than one device", id="a UUID is of one device"),
        pytest.param(request(1, devices=("0", "a:0")), "names a:0 twice", id="an index and its device"),
        pytest.param(request(1, count=3), "gpu:count=3 asks for more devices than one node has (2 here, on a)", id="more than a node has"),
        pytest.param(request(1, count=2, devices=("a:0", "b:0")), "(1 named, on a)", id="named on two nodes"),
        pytest.param(request(25), "largest: a:0, 24GiB usable", id="larger than each"),
    ],
)  # fmt: skip
def test_never(asked: Request, says: str) -> None:
    with pytest.raises(PlacementError) as caught:
        check_possible(asked, TWO_BY_TWO)
    assert says in str(caught.value)


def test_never_on_one_node_though_on_two() -> None:
    states = [on("a", 0, gib=80), on("a", 1), on("b", 0, gib=80), on("b", 1)]
    asked = request(40, count=2)
    with pytest.raises(PlacementError, match=r"on 2 devices of one node, and only 1 could hold it"):
        check_possible(asked, states)
    decisions = decide(RequestQueue([asked]), Board(states), host())
    assert [r for r, _ in decisions.refusals] == [asked]


def test_the_error_of_a_large_cluster_is_short() -> None:
    states = [on(f"n{i}", 0) for i in range(100)]
    with pytest.raises(PlacementError) as caught:
        select_devices(request(1, nodes=("c",)), states)
    assert str(caught.value).endswith(f"n{MOST_LISTED - 1}, and {100 - MOST_LISTED} more")
    with pytest.raises(PlacementError) as caught:
        check_possible(request(99), states)
    assert len(caught.value.per_device) == MOST_LISTED + 1


def test_what_is_waited_for_names_the_node() -> None:
    states = [on("a", 0, 20), on("a", 1, 20), on("b", 0, 20), on("b", 1, 18)]
    assert sentence(device_reason(request(9), states)) == (
        "9GiB on any of 4 devices on 2 nodes; most free 6GiB (b:1)"
    )
    assert sentence(device_reason(request(9, count=2), states)) == (
        "9GiB on 2 of 4 devices on one of 2 nodes; most free 6GiB (b:1)"
    )
    lost = [on("a", 0, error="lost"), on("b", 0, error="lost")]
    assert sentence(device_reason(request(9), lost)).endswith("on 2 nodes; a:0: lost")
    assert sentence(device_reason(request(9), states[2:])) == (
        "9GiB on any of 2 devices on node b; most free 6GiB (b:1)"
    )
    assert sentence(device_reason(request(9), states[3:])) == "9GiB on b:1; most free 6GiB"


def test_what_is_waited_for_stays_short_on_a_large_cluster() -> None:
    states = [on(f"n{i}", 0, 20) for i in range(1000)]
    assert sentence(device_reason(request(9), states)) == (
        "9GiB on any of 1000 devices on 1000 nodes; most free 4GiB (n0:0)"
    )


def test_a_change_of_less_than_is_shown_names_no_other_device() -> None:
    states = [on("a", 0, 20), on("a", 1, 20 - 0.01)]
    assert sentence(device_reason(request(9), states)).endswith("most free 4GiB (a:0)")


def test_one_node_of_a_cluster_is_named_in_errors() -> None:
    states = [on("a", i) for i in range(20)]
    for asked in request(1, devices=("77",)), request(99):
        with pytest.raises(PlacementError, match="a:0") as caught:
            check_possible(asked, states)
        assert len(caught.value.per_device) == MOST_LISTED + 1


def test_devices_are_kept_on_one_node() -> None:
    def until(state: DeviceState, ends_s: float) -> DeviceState:
        held = tuple(replace(each, ends_s=ends_s) for each in state.reservations)
        return replace(state, reservations=held)

    ends = [("a", 0, 10.0), ("a", 1, 400.0), ("b", 0, 200.0), ("b", 1, 300.0)]
    states = [until(on(node, at, 20), ends_s) for node, at, ends_s in ends]
    head = request(23, count=2, name="head")
    queue = RequestQueue([head, request(4, name="later")])
    decisions = decide(queue, Board(states), host(), Patience(2, 60.0, 1), 0.0)
    assert started(decisions) == [("later", ["a:0"])]
    queue.statuses.update(decisions.statuses)
    status = queue.statuses["head"]
    assert [uuid for _, uuid in status.kept] == ["SIM-b-0", "SIM-b-1"]
    assert status.starts_s == 300.0
    assert "b:0, b:1 kept for it" in sentence(explain(head, queue, states, host()))


def test_a_request_for_several_devices_drains_no_node_that_has_too_few() -> None:
    states = [on("a", 0, 9), on("a", 1), on("b", 0)]
    waiting = [request(20, count=2, name="head"), request(1, name="later")]
    decisions = decide(RequestQueue(waiting), Board(states), host(), NO_BACKFILL)
    assert started(decisions) == [("later", ["b:0"])]


# Memory and processes of each node.


def cluster(max_processes: int = 99, **nodes: HostState) -> HostState:
    processes = sum(each.processes for each in nodes.values())
    return HostState(NEVER_BYTES, 0, processes, max_processes, nodes=nodes)


def hungry(host_gib: int, name: str, gib: float = 1, **others: object) -> Request:
    return request(gib, name=name, host_bytes=host_gib * GIB, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waiting", "limits", "starts"),
    [
        pytest.param([hungry(9, "x")], cluster(a=host(8, 1), b=host(16, 1)), [("x", ["b:0"])], id="another node has the memory"),
        pytest.param([hungry(9, "x", count=2)], cluster(a=host(8, 1), b=host(16, 1)), [("x", ["b:0", "b:1"])], id="for several devices too"),
        pytest.param([hungry(9, "x", devices=("0",))], cluster(a=host(8, 1), b=host(16, 1)), [("x", ["b:0"])], id="for named devices too"),
        pytest.param([request(1, name="x"), request(1, name="y")], cluster(a=host(processes=1, max_processes=2), b=host(processes=2, max_processes=2)), [("x", ["a:0"])], id="processes of each node"),
        pytest.param([request(1, name="x")], cluster(a=host(max_processes=0)), [("x", ["b:0"])], id="a node without limits"),
        pytest.param([request(1, name="x"), request(1, name="y")], cluster(2, a=host(processes=1)), [("x", ["a:0"])], id="processes of the broker"),
        pytest.param([hungry(9, "x"), hungry(1, "y", gib=2)], cluster(a=host(8, 1), b=host(6, 1)), [("y", ["b:0"])], id="one node is left to a blocked one"),
        pytest.param([hungry(9, "x"), hungry(9, "z", gib=3), hungry(1, "y", gib=2)], cluster(a=host(8, 1), b=host(6, 1)), [], id="two blocked ones, two nodes"),
        pytest.param([hungry(9, "x", nodes=("a",)), hungry(1, "y", gib=2)], cluster(a=host(8, 1), b=host(6, 1)), [("y", ["b:0"])], id="its node is left to it"),
        pytest.param([hungry(9, "x")], cluster(a=host(8), b=host(6)), [("x", ["a:0"])], id="an estimate alone stops no task"),
    ],
)  # fmt: skip
def test_limits_of_nodes(
    waiting: list[Request], limits: HostState, starts: list[tuple[str, list[str]]]
) -> None:
    decisions = decide(RequestQueue(waiting), Board(TWO_BY_TWO), limits, NO_BACKFILL)
    assert started(decisions) == starts


def test_the_reason_of_a_wait_for_nodes() -> None:
    asked = hungry(9, "x")

    def says(limits: HostState) -> str:
        return sentence(explain(asked, RequestQueue([asked]), TWO_BY_TWO, limits))

    assert says(cluster(a=host(3, 1), b=host(6, 1))) == (
        "9GiB of host memory for its process on any of 2 nodes; 6GiB available (b)"
    )
    full = host(processes=2, max_processes=2)
    assert says(cluster(a=full, b=full)) == (
        "another process to end on any of 2 nodes (max_processes is 2)"
    )
    assert says(cluster(4, a=full, b=full)) == "another process to end (max_processes is 4)"
    assert says(cluster(a=host(3, 1))).startswith("1GiB on any of 4 devices on 2 nodes")


# What holds for any cluster.

styles = st.sampled_from(["spread", "pack"])
sizes = st.lists(st.sampled_from([8, 24, 80]), min_size=1, max_size=3)
#: By node.
standbys = st.dictionaries(st.sampled_from(["n0", "n1", "n2", "gone"]), st.integers(0, 2))


@given(st.lists(sizes, min_size=1, max_size=3), st.lists(requests, max_size=6), styles, standbys)
def test_standbys_change_where_a_task_starts_and_not_whether(
    nodes: list[list[int]], asked: list[Request], style: PlacementStyle, ready: dict[str, int]
) -> None:
    states = [
        on(f"n{node}", at, gib=gib)
        for node, each in enumerate(nodes)
        for at, gib in enumerate(each)
    ]
    for each in asked:
        try:
            check_possible(each, states)
        except PlacementError:
            continue
        plain, board = Board(states, style), Board(states, style, standbys={"kind": ready})
        named = plain.named(each)
        otherwise = plain.choose(each, named)
        chosen = board.choose(replace(each, standby="kind"), named)
        assert (chosen is None) == (otherwise is None)
        if chosen is None or otherwise is None:
            continue
        has = [ready.get(states[at[0]].device.host, 0) > 0 for at in (chosen, otherwise)]
        assert has[0] or not has[1], "one was there and was not preferred"
        assert chosen == otherwise or has[0], "the choice differs without a reason"
        plain.place(each, otherwise)
        states = plain.states


@given(
    st.lists(sizes, min_size=1, max_size=3),
    st.lists(requests, max_size=12),
    styles,
    st.sampled_from([PATIENCE, NO_BACKFILL]),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 4, 1000])), min_size=3, max_size=3),
    standbys,
)
def test_devices_of_a_request_are_always_on_one_node(
    nodes: list[list[int]],
    asked: list[Request],
    style: PlacementStyle,
    patience: Patience,
    has: list[tuple[int, int]],
    ready: dict[str, int],
) -> None:
    asked = [replace(each, standby="kind") for each in asked]
    states = [
        on(f"n{node}", at, gib=gib)
        for node, each in enumerate(nodes)
        for at, gib in enumerate(each)
    ]
    by_name = {f"n{node}": host(gib, 1, 1 + most) for node, (most, gib) in enumerate(has)}
    queue = RequestQueue(asked)
    board = Board(states, style, standbys={"kind": ready})
    decisions = decide(queue, board, cluster(9, **by_name), patience)
    booked = {state.device.key: 0 for state in states}
    for each, placement in decisions.placements:
        (node,) = {device.host for device in placement.devices}
        assert len(set(placement.devices)) == each.count
        assert not by_name[node].full
        assert not by_name[node].refuses(each)
        by_name[node] = by_name[node].after(each)
        for reservation in placement.reservations:
            booked[reservation.device_key] += reservation.reserved_bytes
    assert all(booked[state.device.key] <= state.capacity_bytes for state in states)
    assert len(decisions.placements) <= 6
    for status in decisions.statuses.values():
        assert len({s.device.host for s in states if s.device.key in status.kept}) <= 1
    for each, _ in decisions.refusals:
        with pytest.raises(PlacementError):
            check_possible(each, states)


@given(
    st.lists(sizes, min_size=1, max_size=1),
    st.lists(requests, max_size=12),
    styles,
    st.sampled_from([PATIENCE, NO_BACKFILL]),
    st.integers(0, 3),
    st.sampled_from([0, 4, 1000]),
    st.booleans(),
)
def test_a_cluster_of_one_node_is_one_machine(
    nodes: list[list[int]],
    asked: list[Request],
    style: PlacementStyle,
    patience: Patience,
    most: int,
    gib: int,
    names_it: bool,
) -> None:
    snapshots: list[DeviceSnapshot] = [snapshot(at, each) for at, each in enumerate(nodes[0])]
    states = [device_state(each, (), {}, 0) for each in snapshots]
    machine = host(gib, 1, 1 + most)
    alone = decide(RequestQueue(asked), Board(states, style), machine, patience)
    asked = [replace(each, nodes=("node",) if names_it else (), standby="kind") for each in asked]
    of_cluster = cluster(node=machine)
    board = Board(states, style, standbys={"kind": {"node": 1}})
    there = decide(RequestQueue(asked), board, of_cluster, patience)
    assert [(r.id, p) for r, p in there.placements] == [(r.id, p) for r, p in alone.placements]
    assert {r.id for r, _ in there.refusals} == {r.id for r, _ in alone.refusals}
    assert there.statuses == alone.statuses


def test_several_devices_surely_fit_only_if_one_node_has_them() -> None:
    board = Board([on("a", 0), on("a", 1, gib=16), on("b", 2)])
    assert board.surely_fits(request(16, count=2)) and not board.surely_fits(request(20, count=2))
    assert not board.surely_fits(request(1, count=3))
