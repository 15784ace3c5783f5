"""Standbys: how many wait, on which device a hot one starts, which a task takes and which end for a task.

A standby costs host memory and, while it imports, a core; it saves a task the seconds of its imports. So there
are as many as tasks are known to come, and one for the next task, which is likely like the last.

A hot standby also has its context on one device. It never keeps a task from a device: placement counts what it
holds as free (`memory.device_state`), and `settle` says which hot standbys must end before a placement is made.

Pure. `processes.standby_pool` starts and ends the processes, `broker.hot_standbys` reserves the devices.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefect_gpu.scheduling.memory import DeviceState, StandbyHold
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Request
from prefect_gpu.scheduling.placement import PlacementStyle, could_hold, is_busy, is_open

#: Hot standbys of one kind on a device. Each holds a context (0.5 to 0.7 GiB) and saves a task 0.2 s;
#: after two in a row the next is hot again while the second's task still reads its data.
MOST_ON_DEVICE = 2


# How many wait.


@dataclass(frozen=True, slots=True)
class KindDemand:
    """One kind of standby: what wants it, and what there is of it."""

    kind: Hashable
    #: Tasks that were submitted and have no process yet.
    waiting: int
    #: The kind of the task that was started last: one is made for the next.
    latest: bool
    #: A task of this kind was started before: one that is there is kept for the next.
    used: bool
    #: Host memory that one takes, in bytes.
    size_bytes: int
    #: Standbys that wait for a task.
    ready: int
    #: Standbys that still import.
    importing: int
    #: They are of use. Not so where they died, or did not suit their tasks.
    useful: bool = True
    #: Further ones, beside those for the tasks that are wanted: a hot one may wait on another device.
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What standbys may take."""

    #: Bytes of the machine's memory that new processes could use now, as the kernel reports.
    available_bytes: int
    #: Bytes promised to tasks' processes that have not taken them yet.
    promised_bytes: int
    #: Bytes to leave free whatever is wanted.
    reserve_bytes: int
    #: Cores of this process.
    cores: int
    #: Standbys at most.
    most: int


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """What to do now. A kind may be named several times: once for each process."""

    starts: tuple[Hashable, ...] = ()
    #: One that still imports is ended before one that is ready.
    ends: tuple[Hashable, ...] = ()
    #: Some of them end because the machine's memory runs out.
    short_of_memory: bool = False


def most_by_default(cores: int, max_processes: int) -> int:
    """Return the most standbys where no setting says: half the cores, at least two."""
    return min(max_processes, max(2, cores // 2))


def most_imports(cores: int) -> int:
    """Return the most standbys that import at a time: each takes a core, and the tasks that run need theirs."""
    return max(1, cores // 2)


def plan_standbys(demands: Sequence[KindDemand], machine: Machine) -> StandbyPlan:
    """Return which standbys to start and which to end.

    Args:
        demands: Every kind that is wanted or exists, the most urgent first.
        machine: What there is state for.
    """
    have = {d.kind: d.ready + d.importing for d in demands}
    targets = _targets(demands, machine.most)
    ends = [d.kind for d in demands for _ in range(have[d.kind] - targets[d.kind])]
    left_bytes = machine.available_bytes - machine.promised_bytes - machine.reserve_bytes
    # Standbys that still import have taken a part of their memory at most.
    left_bytes -= sum(d.size_bytes * d.importing for d in demands)
    sizes = {d.kind: d.size_bytes for d in demands}
    left_bytes += sum(sizes[kind] for kind in ends)
    short_of_memory = left_bytes < 0
    # They end before the machine's memory runs out, the least urgent first.
    for demand in reversed(demands):
        kept = min(have[demand.kind], targets[demand.kind])
        while left_bytes < 0 and kept:
            ends.append(demand.kind)
            left_bytes += demand.size_bytes
            kept -= 1
    if ends:
        # What they free shows at the next reading.
        return StandbyPlan(ends=tuple(ends), short_of_memory=short_of_memory)
    return StandbyPlan(starts=_starts(demands, targets, left_bytes, machine.cores))


def _targets(demands: Sequence[KindDemand], most: int) -> dict[Hashable, int]:
    wanted = {}
    for demand in demands:
        least = max(demand.waiting, int(demand.latest))
        wanted[demand.kind] = least + demand.spare if demand.useful and least else 0
    targets = dict.fromkeys(wanted, 0)
    # In turn: one kind with a thousand tasks must not keep the others from theirs.
    while most > 0 and any(targets[kind] < wanted[kind] for kind in wanted):
        for kind in wanted:
            if targets[kind] < wanted[kind] and most > 0:
                targets[kind] += 1
                most -= 1
    for demand in demands:
        spare = demand.used and demand.useful and demand.ready + demand.importing > 0
        if spare and most > 0 and targets[demand.kind] == 0:
            targets[demand.kind] = 1
            most -= 1
    return targets


def _starts(
    demands: Sequence[KindDemand], targets: dict[Hashable, int], left_bytes: int, cores: int
) -> tuple[Hashable, ...]:
    slots = most_imports(cores) - sum(d.importing for d in demands)
    missing = {d.kind: targets[d.kind] - d.ready - d.importing for d in demands}
    starts: list[Hashable] = []
    for turn in range(max(missing.values(), default=0)):
        for demand in demands:
            if turn < missing[demand.kind] and slots > 0 and demand.size_bytes <= left_bytes:
                starts.append(demand.kind)
                slots -= 1
                left_bytes -= demand.size_bytes
    return tuple(starts)


# Hot standbys.


@dataclass(frozen=True, slots=True)
class Settled:
    """What becomes of placements that were decided as if there were no hot standby."""

    #: Those that can be made now, with the hot standby that each takes (empty: none).
    made: tuple[tuple[Request, Placement, str], ...]
    #: Hot standbys that must end first for the others. Those are decided anew after that.
    given_up: tuple[str, ...]


def settle(
    placements: Iterable[tuple[Request, Placement]],
    states: Iterable[DeviceState],
    offers: Mapping[str, Hashable],
    kinds: Mapping[str, Hashable],
) -> Settled:
    """Return which placements can be made beside the hot standbys, and which of these must end.

    Args:
        placements: As decided, in order, on devices counted as if there were no hot standby.
        states: All devices before these placements.
        offers: Hot standbys that a task of their kind may take, and the kind, in order of preference.
        kinds: By request id: the kind of standby that suits it. One that is missing, or `None`, takes none.
    """
    free: dict[DeviceKey, int] = {}
    held: dict[DeviceKey, dict[str, StandbyHold]] = {}
    for state in states:
        free[state.device.key] = state.free_bytes
        held[state.device.key] = {hold.request_id: hold for hold in state.standbys}
    made: list[tuple[Request, Placement, str]] = []
    given_up: dict[str, None] = {}
    for request, placement in placements:
        taken, kind = "", kinds.get(request.id)
        if kind is not None and len(placement.devices) == 1:
            here = held[placement.devices[0].key]
            taken = next((i for i, k in offers.items() if k == kind and i in here), "")
        must_end: list[str] = []
        for reservation in placement.reservations:
            key = reservation.device_key
            # Its context is part of the budget of the task that takes it.
            held[key].pop(taken, None)
            free[key] -= reservation.reserved_bytes
            # An exclusive task has no hot standby beside it, however much is free.
            left_bytes = -1 if reservation.exclusive else free[key]
            must_end += _too_many(held[key].values(), left_bytes, given_up)
        if must_end:
            given_up.update(dict.fromkeys(must_end))
        else:
            made.append((request, placement, taken))
    return Settled(tuple(made), tuple(given_up))


def _too_many(
    standbys: Collection[StandbyHold], left_bytes: int, given_up: Container[str]
) -> list[str]:
    """Name those that must end so that the rest fits. Those that end hold their memory until they have."""
    held_bytes = sum(hold.held_bytes for hold in standbys)
    ending: list[str] = []
    # Those that end anyway, first.
    for hold in sorted(standbys, key=lambda hold: hold.request_id not in given_up):
        if held_bytes <= left_bytes:
            break
        ending.append(hold.request_id)
        held_bytes -= hold.held_bytes
    return ending


def in_the_way(request: Request, states: Iterable[DeviceState]) -> tuple[str, ...]:
    """Name the hot standbys on devices that a blocked request could have to itself.

    A driver takes some memory for each process that it lists: 9 MiB on an H200, which belongs to no process and
    comes back with the process. A request that needs a device to the last byte would wait for it forever.

    Args:
        request: It found no device.
        states: The devices that it may use.
    """
    alone = [r for r in states if not r.reservations and is_open(r) and could_hold(request, r)]
    # The devices where the fewest must end, all of one node.
    alone.sort(key=lambda state: len(state.standbys))
    by_node: dict[str, list[DeviceState]] = {}
    for state in alone:
        on_node = by_node.setdefault(state.device.host, [])
        on_node.append(state)
        if len(on_node) == request.count:
            return tuple(hold.request_id for state in on_node for hold in state.standbys)
    return ()


def choose_device(
    states: Iterable[DeviceState],
    style: PlacementStyle,
    context_bytes: Mapping[DeviceKey, int],
    counts: Mapping[DeviceKey, int],
    avoid: Container[str] = (),
) -> Device | None:
    """Choose the device for one more hot standby: where the next task is likely to be placed.

    Args:
        states: All devices.
        style: As tasks are placed.
        context_bytes: What it will hold of each device.
        counts: How many of its kind are on each device.
        avoid: UUIDs of devices where its framework does not start.

    Returns:
        `None`: no device has the memory free. No process is ever ended for a hot standby.
    """
    sign = -1 if style == "spread" else 1
    fitting = [
        state
        for state in states
        if is_open(state)
        and state.device.uuid not in avoid
        and counts.get(state.device.key, 0) < MOST_ON_DEVICE
        and state.beside_bytes >= context_bytes[state.device.key]
    ]

    def rank(state: DeviceState) -> tuple[int, bool, int, int]:
        # One on each device before a second on any.
        count = counts.get(state.device.key, 0)
        return count, is_busy(state), sign * state.free_bytes, state.device.index

    return min(fitting, key=rank).device if fitting else None
