"""What a request asks of a device, whether it can have it now, later or never, and what to say of it.

Pure. `Board` has the devices of one scheduling pass, sorted by preference, from which a request gets one or
several. Which request is considered when is in `scheduling_pass`, which devices are held back for blocked
requests in `backfill`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, TypeAlias

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, ModelBudgets, Placement, Request, Reservation
from prefect_gpu.units import GIB, MIB, format_bytes

#: A device that computes for more of the time than this is chosen only if no other fits: one more task
#: would slow down all that run there.
BUSY_FRACTION = 0.8

#: Returns whether a request may have the device at a position of the board.
Allows: TypeAlias = Callable[[int, Request], bool]


class Board:
    """All devices as one scheduling pass sees them. It is made anew for each pass.

    Placements of the pass are booked on it. Those of its devices that can take another task are sorted by free
    memory, so that choosing one costs little however many devices there are. A device is named by its position
    in `states`.

    Args:
        states: All devices, from one reading.
        style: `spread` prefers the device with most free memory: on large devices tasks slow each other down
            long before memory runs out. `pack` prefers the one with least.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        held_by_parent: What the GPU task around this process holds. It does not count as a task.
        least_bytes: No request asks for less; a device with less free is not considered.
    """

    def __init__(
        self,
        states: Iterable[DeviceState],
        style: PlacementStyle = "spread",
        max_tasks: int | None = None,
        held_by_parent: Iterable[Reservation] = (),
        least_bytes: int = 0,
    ) -> None:
        self.states = list(states)
        self.held_by_parent = tuple(held_by_parent)
        self._max_tasks = max_tasks
        self._parents = {r.device_key for r in self.held_by_parent}
        self._sign = -1 if style == "spread" else 1
        self._least_bytes = least_bytes
        #: Devices that can take another task, the preferred first, as a sort key and a position. First those
        #: that are not busy, then those that are.
        self._open: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for at, state in enumerate(self.states):
            if state.free_bytes >= least_bytes and self._takes_more(state):
                self._open[is_busy(state)].append((self._sign * state.free_bytes, at))
        for order in self._open:
            order.sort()
        #: Bytes that each device could give if it were empty, the largest first.
        self._capacities = sorted([state.capacity_bytes for state in self.states], reverse=True)

    @cached_property
    def positions(self) -> Mapping[DeviceKey, int]:
        """Each device's position in `states`."""
        return {state.snapshot.device.key: at for at, state in enumerate(self.states)}

    def named(self, request: Request) -> list[int] | None:
        """Return the devices that a request's tag names, in the tag's order; `None`: any.

        Raises:
            PlacementError: A device that was named is not there.
        """
        if not request.devices:
            return None
        return [self.positions[s.device.key] for s in select_devices(request, self.states)]

    def surely_fits(self, request: Request, count: int) -> bool:
        """Return whether `count` devices or more could hold a request if they were empty.

        False where that depends on the device: it has a name, a model, or a task around this process.
        """
        memory = request.memory
        if self.held_by_parent or request.devices or isinstance(memory, ModelBudgets):
            return False
        least_bytes = memory if type(memory) is int else 0
        return count <= len(self._capacities) and least_bytes <= self._capacities[count - 1] > 0

    def could_hold(self, request: Request, at: int) -> bool:
        """Return whether a device could hold a request once all but the task around this process has ended."""
        return could_hold(request, self.states[at], self.held_by_parent)

    def max_tasks_on(self, state: DeviceState) -> float:
        """Return the most reservations that a device may have; infinite: as many as fit."""
        if self._max_tasks is None:
            return math.inf
        return self._max_tasks + (state.device.key in self._parents)

    def most_free_bytes(self) -> int:
        """Return the most free bytes of a device that can take another task; less than 0: none can."""
        ends = 0 if self._sign < 0 else -1
        return max((self._sign * order[ends][0] for order in self._open if order), default=-1)

    def choose(
        self,
        request: Request,
        named: Sequence[int] | None = None,
        kept: Container[int] = (),
        allows: Allows = lambda at, request: False,
    ) -> list[int] | None:
        """Choose devices that can hold a request now: busy ones only if the others are too few.

        Args:
            request: `check_possible` has passed.
            named: The devices that its tag names, in the tag's order; `None`: any.
            kept: Devices that not every request may have.
            allows: Returns whether it may have one of these.

        Returns:
            As many as it asks for, or `None`: it must wait.
        """
        count = request.count
        if named is None:
            found = self._prefer(request, self._open[False], count, kept, allows)
            if len(found) < count and self._open[True]:
                found += self._prefer(request, self._open[True], count - len(found), kept, allows)
            return found if len(found) == count else None
        fitting = [
            at
            for at in named
            if (at not in kept or allows(at, request))
            and fits_now(request, self.states[at])
            and self._takes_more(self.states[at])
        ]
        # Those that are not busy first; the sort is stable.
        chosen = sorted(fitting, key=lambda at: is_busy(self.states[at]))[:count]
        return [at for at in fitting if at in chosen] if len(chosen) == count else None

    def place(self, request: Request, chosen: Sequence[int], now_s: float = 0.0) -> Placement:
        """Book a request on the devices that `choose` has returned, and return its placement.

        Args:
            request: What is asked.
            chosen: The devices that it gets, in order; each can hold it now.
            now_s: Monotonic seconds.
        """
        ends_s = None if request.expected_s is None else now_s + request.expected_s
        reservations: list[Reservation] = []
        for at in chosen:
            state = self.states[at]
            need = need_bytes(request, state)
            device = state.snapshot.device
            reservation = Reservation(
                request.id,
                *device.key,
                state.free_bytes if need is None else need,
                request.exclusive or need is None,
                request.task_name,
                ends_s,
            )
            reservations.append(reservation)
            self._book(at, reservation)
        return Placement(
            request.id,
            tuple(self.states[at].snapshot.device for at in chosen),
            tuple(reservation.reserved_bytes for reservation in reservations),
            tuple(reservations),
        )

    def _book(self, at: int, reservation: Reservation) -> None:
        state = self.states[at]
        order = self._open[is_busy(state)]
        place = bisect.bisect_left(order, (self._sign * state.free_bytes, at))
        if place < len(order) and order[place][1] == at:
            del order[place]
        self.states[at] = state = state.after(reservation)
        if state.free_bytes >= self._least_bytes and self._takes_more(state):
            bisect.insort(order, (self._sign * state.free_bytes, at))

    def _prefer(
        self,
        request: Request,
        order: Sequence[tuple[int, int]],
        wanted: int,
        kept: Container[int],
        allows: Allows,
    ) -> list[int]:
        """Return the positions of up to `wanted` devices of a sorted list that fit, the preferred first."""
        memory = request.memory
        # The same bytes of each device: those that fit are all at one end of the list.
        same = type(memory) is int
        least_bytes = memory if type(memory) is int else 0
        first = 0 if self._sign < 0 else bisect.bisect_left(order, (least_bytes, -1))
        found: list[tuple[int, int]] = []
        for key, at in order[first:] if first else order:
            if self._sign < 0 and -key < least_bytes:
                break
            if at in kept and not allows(at, request):
                continue
            state = self.states[at]
            if not fits_now(request, state):
                continue
            # Sorted by what stays free, where devices are asked for different amounts.
            found.append((key - self._sign * (need_bytes(request, state) or 0), at))
            if same and len(found) == wanted:
                break
        if not same:
            found.sort()
        return [at for _, at in found[:wanted]]

    def _takes_more(self, state: DeviceState) -> bool:
        """Return whether a device can take another task, as far as its memory allows."""
        if self._max_tasks is not None and len(state.reservations) >= self.max_tasks_on(state):
            return False
        return is_open(state)


def is_busy(state: DeviceState) -> bool:
    """Return whether a device computes so much that another task is better placed elsewhere."""
    busy = state.snapshot.busy_fraction
    return busy is not None and busy > BUSY_FRACTION


#: Which device is chosen among those that fit: the one with most free memory, or with least.
PlacementStyle = Literal["spread", "pack"]

#: A task that has a device to itself is not started with less than this: a context alone takes
#: 0.5 to 1.2 GiB (measured on an H200 with PyTorch and TensorFlow); smaller devices: a quarter.
LEAST_WHOLE_BYTES = 2 * GIB


def select_devices(request: Request, states: Sequence[DeviceState]) -> list[DeviceState]:
    """Return the devices that a request may use, in the order of its tag.

    Raises:
        PlacementError: A device that was named is not there.
    """
    if not request.devices:
        return list(states)
    chosen: dict[DeviceKey, DeviceState] = {}
    for name in request.devices:
        matches = _find_named(name, states)
        if len(matches) != 1:
            problem = "names no device" if not matches else "names more than one device"
            raise PlacementError(
                f"gpu:device={name} {problem} of this runner; accepted: an index from 0 to "
                f"{len(states) - 1}, or the beginning of a UUID",
                tuple(f"{state.device.index}: {state.device.uuid}" for state in states),
            )
        (match,) = matches
        if match.device.key in chosen:
            raise PlacementError(
                f"gpu:device={','.join(request.devices)} names device {match.device.uuid} "
                f"twice; name each device once"
            )
        chosen[match.device.key] = match
    return list(chosen.values())


def _find_named(name: str, states: Sequence[DeviceState]) -> list[DeviceState]:
    if name.isdigit():
        return [state for state in states if state.device.index == int(name)]
    name = name.lower()
    found = [state for state in states if state.device.uuid.lower().startswith(name)]
    # SIM-1 is all of one name and the beginning of SIM-10.
    return [state for state in found if state.device.uuid.lower() == name] or found


def need_bytes(request: Request, state: DeviceState) -> int | None:
    """Return the bytes that a request asks of one device; `None`: all that is free.

    A percentage is of the device's total, but never more than can be reserved: 100 % is everything
    that the driver and the headroom leave.
    """
    if type(request.memory) is int:
        # The common case; a pass asks this of each shape.
        return request.memory
    need = request.need_bytes(state.device)
    if need is not None and isinstance(request.memory, float):
        return min(need, state.capacity_bytes)
    return need


def check_possible(
    request: Request, states: Sequence[DeviceState], held_by_parent: Iterable[Reservation] = ()
) -> None:
    """Check that a request could be placed on the empty machine.

    Args:
        request: What is asked.
        states: All devices of the runner.
        held_by_parent: What the GPU task holds that submitted this one from inside.

    Raises:
        PlacementError: It can never be placed; the message says what the largest device is.
    """
    eligible = select_devices(request, states)
    if request.count > len(eligible):
        among = f"{len(eligible)} named" if request.devices else f"{len(eligible)} here"
        raise PlacementError(
            f"gpu:count={request.count} asks for more devices than there are ({among}); lower the "
            f"count or name other devices",
            tuple(describe_capacity(state) for state in eligible),
        )
    fitting = [state for state in eligible if could_hold(request, state)]
    if len(fitting) < request.count:
        if request.memory is None and not fitting:
            raise PlacementError(
                f"no device here has memory left to give beside its headroom, so "
                f"{request.task_name!r} can never start; lower the headroom or name other devices",
                tuple(describe_capacity(state) for state in eligible),
            )
        need = max(need_bytes(request, state) or 0 for state in eligible)
        largest = max(eligible, key=lambda state: state.capacity_bytes)
        problem = (
            f"larger than any device here (largest: {largest.device.uuid}, "
            f"{format_bytes(largest.capacity_bytes)} usable)"
            if not fitting
            else f"asked on {request.count} devices, and only {len(fitting)} could hold it"
        )
        raise PlacementError(
            f"gpu:memory={format_bytes(need)} is {problem}; lower the tag or name other devices",
            tuple(describe_capacity(state) for state in eligible),
        )
    held = {reservation.device_key: reservation for reservation in held_by_parent}
    if not held:
        return
    if sum(could_hold(request, state, held.values()) for state in fitting) < request.count:
        raise PlacementError(
            f"{request.task_name!r} was submitted from inside a GPU task and could never start "
            f"while that one holds what it holds; give the outer task a smaller gpu:memory or "
            f"another device",
            tuple(
                f"{state.device.uuid}: the outer task holds "
                f"{format_bytes(held[state.device.key].reserved_bytes)} of "
                f"{format_bytes(state.capacity_bytes)}"
                for state in fitting
                if state.device.key in held
            ),
        )


def could_hold(
    request: Request, state: DeviceState, held_by_parent: Iterable[Reservation] = ()
) -> bool:
    """Return whether a device could hold a request once all has ended there but a task around this process."""
    need = need_bytes(request, state)
    if not 0 < state.capacity_bytes >= (need or 0):
        return False
    for held in held_by_parent:
        if held.device_key == state.device.key:
            if need is None or request.exclusive or held.exclusive:
                return False
            if need + held.reserved_bytes > state.capacity_bytes:
                return False
    return True


def fits_now(request: Request, state: DeviceState) -> bool:
    """Return whether a device can hold a request now."""
    if not is_open(state):
        return False
    need = need_bytes(request, state)
    if (need is None or request.exclusive) and state.reservations:
        return False
    return state.free_bytes >= (least_whole_bytes(state) if need is None else need)


def least_whole_bytes(state: DeviceState) -> int:
    """Return the free bytes below which a device is not given to a task that asks for all of it."""
    return min(LEAST_WHOLE_BYTES, state.capacity_bytes // 4)


def is_open(state: DeviceState) -> bool:
    """Return whether a device can take any task: it works, and no task there is exclusive."""
    if state.snapshot.error:
        return False
    for reservation in state.reservations:  # noqa: SIM110 - `any` takes twice as long, at every step
        if reservation.exclusive:
            return False
    return True


def describe_capacity(state: DeviceState) -> str:
    """Return how large a device is, as text for a refusal."""
    if state.snapshot.error:
        return f"{state.device.uuid}: {state.snapshot.error}"
    return f"{state.device.uuid}: {format_bytes(state.capacity_bytes)} usable"


def describe_wait(
    request: Request, states: Sequence[DeviceState], max_tasks: int | None = None
) -> str:
    """Return what a request waits for: `6.6GiB on any of 2 devices; most free 3.1GiB`.

    Args:
        request: What is asked.
        states: The devices that it may use.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
    """
    needs = {need_bytes(request, state) for state in states}
    amount = (
        "a device to itself"
        if None in needs
        else " or ".join(format_bytes(need) for need in sorted(n for n in needs if n is not None))
    )
    if request.exclusive and None not in needs:
        amount += " and no other task"
    where = (
        states[0].device.uuid
        if len(states) == 1
        else f"any of {len(states)} devices"
        if request.count == 1
        else f"{request.count} of {len(states)} devices"
    )
    broken = [state for state in states if state.snapshot.error]
    if len(broken) == len(states):
        return f"{amount} on {where}; {broken[0].device.uuid}: {broken[0].snapshot.error}"
    if max_tasks is not None and all(
        len(state.reservations) >= max_tasks for state in states if not state.snapshot.error
    ):
        tasks = "a task runs" if max_tasks == 1 else f"{max_tasks} tasks run"
        return f"{amount} on {where}; {tasks} on each, and max_tasks_per_device is {max_tasks}"
    alone = None in needs or request.exclusive
    if alone or not any(is_open(state) for state in states):
        holders = sorted({r.task_name for state in states for r in state.reservations})
        if holders:
            named = ", ".join(holders[:3]) + (" and others" if len(holders) > 3 else "")
            there = "running there" if alone else "running there alone"
            return f"{amount} on {where}; {there}: {named}"
    # Rounded to 64 MiB: a message that changes with every allocation of others says nothing more.
    most = max(0, max(state.free_bytes for state in states if not state.snapshot.error))
    return f"{amount} on {where}; most free {format_bytes(most - most % (64 * MIB))}"
