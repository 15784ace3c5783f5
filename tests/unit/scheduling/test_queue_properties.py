"""What holds for any devices, requests and endings."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import DeviceSnapshot, Placement, Request, Reservation
from prefect_gpu.scheduling.placement import Board, PlacementStyle
from prefect_gpu.scheduling.scheduling_pass import HostState, RequestQueue, decide, shape_of
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import snapshot

SIZES_GIB = (8, 24, 80)


@dataclass
class Simulation:
    """Devices, waiting and running requests, without time: the test says which ends."""

    snapshots: list[DeviceSnapshot]
    style: PlacementStyle
    max_processes: int
    host_bytes: int
    queue: RequestQueue = field(default_factory=RequestQueue)
    running: dict[str, tuple[Request, Placement]] = field(default_factory=dict)
    started: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)

    @property
    def reservations(self) -> list[Reservation]:
        return [r for _, placement in self.running.values() for r in placement.reservations]

    def states(self) -> list[DeviceState]:
        held = self.reservations
        return [
            device_state(s, [r for r in held if r.device_key == s.device.key], {}, 0)
            for s in self.snapshots
        ]

    def step(self) -> None:
        promised = sum(r.host_bytes for r, _ in self.running.values())
        host = HostState(self.host_bytes, promised, len(self.running), self.max_processes)
        board = Board(self.states(), self.style)
        decisions = decide(self.queue, board, host)
        self.queue.statuses.update(decisions.statuses)
        for asked, placement in decisions.placements:
            assert self.queue.remove(asked)
            self.running[asked.id] = (asked, placement)
            self.started.append(asked)
        for asked, _ in decisions.refusals:
            assert self.queue.remove(asked)
            self.refused.append(asked)
        self.check()

    def check(self) -> None:
        assert len(self.running) <= self.max_processes
        for state in self.states():
            promised = sum(r.reserved_bytes for r in state.reservations)
            assert promised <= state.capacity_bytes, "more is reserved than there is"
            if any(r.exclusive for r in state.reservations):
                assert len(state.reservations) == 1, "a task joined an exclusive one"
        for asked, placement in self.running.values():
            uuids = [device.uuid for device in placement.devices]
            assert len(set(uuids)) == len(uuids) == asked.count, "all devices or none"
            if asked.devices:
                allowed = [f"SIM-{name}" for name in asked.devices]
                assert [uuid for uuid in allowed if uuid in uuids] == uuids, "in the author's order"


requests = st.builds(
    Request,
    id=st.uuids().map(str),
    task_name=st.just("t"),
    sequence=st.integers(0, 50),
    submitted_s=st.just(0.0),
    memory=st.one_of(
        st.none(),
        st.sampled_from([0.1, 0.4, 1.0]),
        st.sampled_from([1, 6, 20, 60, 200]).map(lambda gib: gib * GIB),
    ),
    count=st.sampled_from([1, 1, 1, 2, 3]),
    devices=st.lists(st.sampled_from("01234"), max_size=3, unique=True).map(tuple),
    exclusive=st.booleans(),
    priority=st.integers(0, 1),
    host_bytes=st.sampled_from([0, GIB, 100 * GIB]),
)

simulations = st.builds(
    Simulation,
    snapshots=st.lists(st.sampled_from(SIZES_GIB), min_size=1, max_size=4).map(
        lambda sizes: [snapshot(i, gib) for i, gib in enumerate(sizes)]
    ),
    style=st.sampled_from(["spread", "pack"]),
    max_processes=st.integers(1, 6),
    host_bytes=st.sampled_from([0, 4 * GIB, 1000 * GIB]),
)


@given(simulations, st.lists(requests, max_size=15), st.data())
def test_everything_possible_runs_and_nothing_is_reserved_twice(
    simulation: Simulation, asked: list[Request], data: st.DataObject
) -> None:
    coming = list(asked)
    while coming or simulation.running or simulation.queue:
        if coming and data.draw(st.booleans(), "another comes"):
            simulation.queue.add(coming.pop())
        elif simulation.running:
            ends = data.draw(st.sampled_from(sorted(simulation.running)), "which ends")
            del simulation.running[ends]
        elif coming:
            simulation.queue.add(coming.pop())
        simulation.step()
        # With nothing running, one starts or none is left: none waits for ever.
        assert simulation.running or not simulation.queue
    assert len(simulation.started) + len(simulation.refused) == len(asked)


@given(simulations, st.lists(requests, max_size=15), st.data())
def test_of_one_shape_the_first_in_order_starts_first(
    simulation: Simulation, asked: list[Request], data: st.DataObject
) -> None:
    for each in asked:
        simulation.queue.add(each)
    order = list(simulation.queue)
    while simulation.queue or simulation.running:
        simulation.step()
        if simulation.running:
            ends = data.draw(st.sampled_from(sorted(simulation.running)), "which ends")
            del simulation.running[ends]
    for shape in {shape_of(each) for each in asked}:
        mine = [r.id for r in simulation.started if shape_of(r) == shape]
        assert mine == [r.id for r in order if shape_of(r) == shape][: len(mine)]


@given(simulations, st.lists(requests, max_size=15))
def test_deciding_twice_changes_nothing(simulation: Simulation, asked: list[Request]) -> None:
    for each in asked:
        simulation.queue.add(each)
    simulation.step()
    started = len(simulation.started)
    simulation.step()
    assert len(simulation.started) == started
