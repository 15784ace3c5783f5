"""Probes that share a device: whether one more may start there, what it is given, and which one leaves it for the others.

A probe is a task of which no run has shown what it needs. A probe that has a device to itself is a matter of
`placement` alone. What a probe's cap counts for is in `memory`; which tasks are probes is in `prefect_gpu.runner.budgets`.

Pure: readings over time, reservations and times come in.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Probe, Request, Reservation
from prefect_gpu.units import MIB

#: Part of a device that a probe counts for until its growth has settled, and that must be free for one more. A
#: smaller part starts more of them and ends more of them again: the need of evaluations is 0.4 % to 29 % of an H200
#: in `benchmarks/makespan.py`.
ALLOWANCE = 1 / 4

#: A probe has settled so many seconds after the device first showed memory of it, if it has not grown for so many
#: seconds. A context is there about a second before the first step is done (H200, PyTorch).
READY_S = 3.0
QUIET_S = 1.0

#: Growth by less than the larger of these, in bytes and as a part of what it holds, is none: allocators take
#: segments of 20 MiB, and contexts grow when a library is loaded.
GROWTH_BYTES = 64 * MIB
GROWTH_PART = 0.02

#: What a probe may still take beyond its peak, as a factor: once it has settled, and before.
SETTLED_FACTOR = 1.1
GROWING_FACTOR = 1.5

#: Part of a device below which free memory is short.
SHORT = 1 / 16

#: Seconds since its placement in which a probe is ended: little is lost, and its memory is free at once. Its process
#: needs some of them to start. Later it is suspended.
FIRST_S = 15.0

#: Part of what is offered that a task gets whose framework takes its whole cap when it starts.
AT_ONCE_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class Growth:
    """How the memory of a process has grown on one device, as far as was read."""

    #: Monotonic seconds of the first reading that showed memory of it.
    ready_s: float
    #: Bytes that it held when it had last grown.
    level_bytes: int
    #: Monotonic seconds when it had last grown.
    grew_s: float
    #: The most bytes that it has held.
    peak_bytes: int

    def is_settled(self, now_s: float) -> bool:
        """Return whether it is not expected to grow."""
        return now_s - self.ready_s >= READY_S and now_s - self.grew_s >= QUIET_S


def observe(growth: Growth | None, at_s: float, held_bytes: int) -> Growth | None:
    """Return the growth of a process after one more reading; `None`: it has held nothing yet.

    Args:
        growth: Before that reading; `None`: nothing was held.
        at_s: Monotonic seconds of the reading.
        held_bytes: What the process holds.
    """
    if growth is None:
        return Growth(at_s, held_bytes, at_s, held_bytes) if held_bytes > 0 else None
    step = max(GROWTH_BYTES, int(growth.level_bytes * GROWTH_PART))
    peak = max(growth.peak_bytes, held_bytes)
    if held_bytes <= growth.level_bytes + step:
        return Growth(growth.ready_s, growth.level_bytes, growth.grew_s, peak)
    return Growth(growth.ready_s, held_bytes, at_s, peak)


def counted_bytes(reservation: Reservation, growth: Growth | None, now_s: float) -> int:
    """Return the bytes at which a shared probe counts for another probe.

    Args:
        reservation: Of a probe.
        growth: Of its process; `None`: it has held nothing yet.
        now_s: Monotonic seconds.
    """
    assert reservation.probe is not None
    least = reservation.probe.counts_bytes
    if growth is not None and growth.is_settled(now_s):
        return min(int(growth.peak_bytes * SETTLED_FACTOR), reservation.reserved_bytes)
    peak = 0 if growth is None else growth.peak_bytes
    return min(max(least, int(peak * GROWING_FACTOR)), reservation.reserved_bytes)


class Leaving(NamedTuple):
    """A probe that leaves its device for the others."""

    request_id: str
    #: Its process is ended, and runs again. Otherwise it is suspended, and loses nothing.
    ends: bool


def allowance_bytes(state: DeviceState) -> int:
    """Return the bytes of a device that must be free for one more probe beside other tasks."""
    return int(state.capacity_bytes * ALLOWANCE)


def offered_bytes(request: Request, state: DeviceState, least_alone_bytes: int) -> int | None:
    """Return the cap that a shared probe would get on a device now; `None`: it must wait.

    Args:
        request: Of a probe that may share a device.
        state: The device. It works, and no task there is exclusive.
        least_alone_bytes: Bytes that must be free where no task is on the device.
    """
    free = state.free_for_probes_bytes
    alone = not state.reservations
    least = least_alone_bytes if alone else allowance_bytes(state)
    if request.confirms_probe:
        cap = request.need_bytes(state.device) or 0
        # The broker that decided has seen the other probes a moment earlier. A budget is not passed in any case.
        most = free if alone or state.has_budgets else max(free, cap)
        return cap if min(least, cap) <= free and cap <= most else None
    if free < least:
        return None
    part = request.probe_fraction * (0.5 if state.has_budgets else 1.0)
    return max(min(least, free), int(free * part))


def probe_of(request: Request, state: DeviceState, cap_bytes: int, now_s: float) -> Probe:
    """Return what is noted of a shared probe in its reservation.

    Args:
        request: Of the probe.
        state: Its device.
        cap_bytes: What it was given, from `offered_bytes`.
        now_s: Monotonic seconds.
    """
    # What takes its cap when it starts counts for it from the beginning.
    at_once = request.probe_fraction < 1.0
    return Probe(now_s, cap_bytes if at_once else min(cap_bytes, allowance_bytes(state)))


def choose_leaving(
    state: DeviceState,
    growths: Mapping[str, Growth],
    now_s: float,
    headroom_bytes: int,
    away: Container[str] = (),
    fixed: Container[str] = (),
) -> Leaving | None:
    """Return which probe of a device leaves it so that the others go on; `None`: none does.

    It is the newest, if the device runs short of memory and a probe there grows. Where a task with a budget is on the
    device, or no other probe, the caps keep each to what it was given. One with nearly the whole device as its cap is not
    suspended: the device might never have so much again.

    Args:
        state: The device, from a reading.
        growths: Of the processes of its probes, by request id; those that have held nothing are left out.
        now_s: Monotonic seconds of the reading.
        headroom_bytes: Kept free on the device.
        away: Request ids of tasks whose memory is not there, or on its way.
        fixed: Request ids of those that cannot be suspended now. They can be ended.
    """
    here = [r for r in state.reservations if r.request_id not in away]
    if state.snapshot.error or state.has_budgets or len(here) < 2:
        return None
    if state.snapshot.free_bytes - headroom_bytes >= state.capacity_bytes * SHORT:
        return None
    if all(now_s - growth.grew_s >= QUIET_S for growth in growths.values()):
        return None
    # Of those that were placed together, each later one has a smaller cap.
    probes = [(r.probe.since_s, -r.reserved_bytes, r.request_id) for r in here if r.probe]
    for since_s, cap_bytes, request_id in sorted(probes, reverse=True):
        if now_s - since_s < FIRST_S:
            return Leaving(request_id, ends=True)
        if request_id not in fixed and -cap_bytes <= state.capacity_bytes * (1 - SHORT):
            return Leaving(request_id, ends=False)
    return None
