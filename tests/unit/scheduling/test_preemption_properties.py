"""What holds of every plan: it is compared with a search of all single tasks on each device.

That suspensions end, and what happens between them, is in `broker/test_hours_of_suspensions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.preemption import HOST_MARGIN_BYTES, Plan, Running, in_s, out_s, plan
from prefect_gpu.units import GIB
from tests.unit.scheduling.values import HOST, request, reserved, state

NOW_S, DEVICE_GIB = 1000.0, 24


@dataclass(frozen=True)
class Scene:
    """Devices, the tasks on them, and the requests that wait."""

    #: GiB of each device that other programs hold.
    foreign_gib: tuple[int, ...]
    tasks: Mapping[str, Running]
    held: Mapping[str, Reservation]
    blocked: Sequence[Request]
    host_room_bytes: int

    def states(self, left: Sequence[str] = ()) -> dict[DeviceKey, DeviceState]:
        """Return the devices once some tasks have left."""
        found = [
            state(
                at,
                DEVICE_GIB,
                [r for i, r in self.held.items() if r.device_uuid == f"SIM-{at}" and i not in left],
                used_gib=foreign,
            )
            for at, foreign in enumerate(self.foreign_gib)
        ]
        return {each.device.key: each for each in found}

    def plans(self) -> list[Plan]:
        rooms = {HOST: self.host_room_bytes}
        return plan(self.blocked, list(self.states().values()), self.tasks, rooms, NOW_S)

    def fits(self, asked: Request, key: DeviceKey, left: Sequence[str] = ()) -> bool:
        """Return whether a device has the room for a request once some tasks have left."""
        found = self.states(left)[key]
        alone = asked.memory is None or asked.exclusive
        if any(r.exclusive for r in found.reservations) or (alone and found.reservations):
            return False
        assert not isinstance(asked.memory, float)
        need = 2 * GIB if asked.memory is None else asked.need_bytes(found.device) or 0
        return found.free_bytes >= need

    def has_room_elsewhere(self, name: str, taken: Sequence[DeviceKey]) -> bool:
        held, states = self.held[name], self.states()
        return any(
            key not in taken
            and key != held.device_key
            and not any(r.exclusive for r in states[key].reservations)
            and not (held.exclusive and states[key].reservations)
            and states[key].free_bytes >= held.reserved_bytes
            for key in self.tasks[name].devices
        )

    def cost_s(self, name: str) -> float:
        task = self.tasks[name]
        return 0.0 if task.suspended_for else out_s(task.moved_bytes) + in_s(task.moved_bytes)

    def cheapest_s(self, asked: Request, key: DeviceKey) -> float | None:
        """Return what the cheapest single task on a device costs for a request; 0: it fits; `None`: there is none."""
        if self.fits(asked, key):
            return 0.0
        costs = [
            self.cost_s(name)
            for name, held in self.held.items()
            if held.device_key == key
            and self.may_go(name, asked)
            and self.fits(asked, key, [name])
            and (self.tasks[name].priority < asked.priority or self.has_room_elsewhere(name, [key]))
        ]
        return min(costs, default=None)

    def may_go(self, name: str, asked: Request) -> bool:
        task = self.tasks[name]
        if task.suspended_for:
            return task.suspended_for == asked.id
        rested = task.preemptible and not task.away and task.rests_until_s <= NOW_S
        # It has run for as long as it is expected to run on.
        lasts = NOW_S - task.since_s >= out_s(task.moved_bytes)
        room_bytes = self.host_room_bytes - HOST_MARGIN_BYTES - asked.host_bytes
        on_way = sum(t.moved_bytes for t in self.tasks.values() if t.suspended_for and not t.away)
        return rested and lasts and task.moved_bytes <= room_bytes - on_way


@st.composite
def scenes(draw: st.DrawFn, requests: int, lasting: bool = False) -> Scene:
    """Draw a scene; `lasting`: no request starts soon by waiting."""
    devices = draw(st.integers(1, 3))
    foreign = draw(st.tuples(*[st.sampled_from([0, 0, 0, 5])] * devices))
    blocked = [
        request(
            draw(st.sampled_from([1, 6, 12, 16, 20, 24, None])),
            name=f"r{number}",
            count=draw(st.sampled_from([1, 1, 1, 2])) if devices > 1 else 1,
            priority=draw(st.integers(0, 3)),
            exclusive=draw(st.sampled_from([False] * 5 + [True])),
            host_bytes=draw(st.sampled_from([0, 2 * GIB])),
        )
        for number in range(requests)
    ]
    blocked.sort(key=lambda each: -each.priority)
    tasks: dict[str, Running] = {}
    held: dict[str, Reservation] = {}
    for at in range(devices):
        free = DEVICE_GIB - foreign[at]
        exclusive = False
        for number in range(draw(st.integers(0, 4))):
            gib = draw(st.integers(1, 12))
            if gib > free or exclusive:
                break
            free -= gib
            name = f"t{at}{number}"
            exclusive = not number and draw(st.sampled_from([False] * 5 + [True]))
            held[name] = reserved(at, gib, name, exclusive)
            homes = range(devices) if draw(st.booleans()) else [at]
            tasks[name] = Running(
                name,
                draw(st.integers(0, 3)),
                draw(st.sampled_from([True, True, True, False])),
                tuple((HOST, f"SIM-{home}") for home in homes),
                draw(st.integers(1, gib)) * GIB,
                0.0 if lasting else draw(st.sampled_from([0.0, NOW_S - 1])),
                draw(st.sampled_from([0.0, 0.0, NOW_S + 1])),
                draw(st.sampled_from(["", "", "", "r0", "another"])),
                draw(st.sampled_from([False, False, True])),
            )
    return Scene(foreign, tasks, held, blocked, draw(st.sampled_from([8, 100])) * GIB)


@settings(max_examples=300, deadline=None)
@given(scenes(requests=3))
def test_every_plan_suspends_at_most_one_task_a_device_that_may_be_and_then_its_request_fits(
    scene: Scene,
) -> None:
    gone: list[str] = []
    for found in scene.plans():
        asked = next(each for each in scene.blocked if each.id == found.request_id)
        assert len({*found.devices}) == len(found.devices) == asked.count
        assert found.suspended and not {*found.suspended} & {*gone}, "a task has one request"
        places = [scene.held[name].device_key for name in found.suspended]
        assert len({*places}) == len(places) and {*places} <= {*found.devices}
        for name, moved in found.suspended.items():
            assert scene.may_go(name, asked)
            assert moved or scene.tasks[name].priority < asked.priority
            assert not moved or scene.has_room_elsewhere(name, found.devices)
        gone += found.suspended
        assert all(scene.fits(asked, key, gone) for key in found.devices)


@settings(max_examples=300, deadline=None)
@given(scenes(requests=1, lasting=True))
def test_the_cheapest_task_of_each_device_and_the_cheapest_devices_are_chosen(scene: Scene) -> None:
    (asked,) = scene.blocked
    keys = scene.states()
    costs = [scene.cheapest_s(asked, key) for key in keys]
    known = sorted(each for each in costs if each is not None)
    found = scene.plans()
    if asked.count == 1:
        assert bool(found) == (bool(known) and not any(scene.fits(asked, key) for key in keys))
    for each in found:
        suspended = [scene.cost_s(name) for name in each.suspended]
        assert sum(suspended) == sum(known[: asked.count])
        assert len(suspended) == sum(not scene.fits(asked, key) for key in each.devices)


@settings(max_examples=100, deadline=None)
@given(scenes(requests=3))
def test_a_plan_stays_while_its_tasks_are_on_their_way(scene: Scene) -> None:
    for found in scene.plans()[:1]:
        asked = {
            i: replace(scene.tasks[i], suspended_for=found.request_id) for i in found.suspended
        }
        later = replace(scene, tasks={**scene.tasks, **asked})
        assert found in later.plans()
