"""Probes that share a device: whether one more may start there, its cap, and which probe leaves if memory runs short.

A probe is a task whose need no run has shown. Pure. A probe with a device to itself is placed as any task (`placement`);
`memory` counts the caps of probes, and `prefect_gpu.runner.budgets` decides which tasks are probes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Probe, Request, Reservation
from prefect_gpu.units import MIB

#: Part of a device at which a probe counts until its growth has settled, and that must be free for one more. A smaller
#: part starts more probes and ends more of them again: evaluations need 0.4 % to 29 % of an H200 in
#: `benchmarks/makespan.py`.
ALLOWANCE = 1 / 4

#: A probe has settled `READY_S` after the device first showed its memory, if it has not grown for `QUIET_S`, both in
#: seconds. A context is there about a second before the first step is done (H200, PyTorch).
READY_S = 3.0
QUIET_S = 1.0

#: Growth below the larger of these, bytes and a part of the held memory, does not count: allocators take segments of
#: 20 MiB, and contexts grow when a library is loaded.
GROWTH_BYTES = 64 * MIB
GROWTH_PART = 0.02

#: Expected largest memory of a probe as a multiple of its peak so far: once it has settled, and before.
SETTLED_FACTOR = 1.1
GROWING_FACTOR = 1.5

#: Part of a device below which free memory is short.
SHORT = 1 / 16

#: Seconds since its placement in which a probe is ended: little is lost, and its memory is free at once. The start of
#: its process takes some of them. Later it is suspended.
FIRST_S = 15.0

#: Part of the offered memory for a task whose framework takes its whole cap when it starts.
AT_ONCE_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a process's memory on one device, as far as it was read."""

    #: Monotonic seconds of the first reading that showed its memory.
    ready_s: float
    #: Bytes held after its last growth.
    level_bytes: int
    #: Monotonic seconds of its last growth.
    grew_s: float
    #: Most bytes held so far.
    peak_bytes: int

    def is_settled(self, now_s: float) -> bool:
        """Return whether no further growth is expected."""
        return now_s - self.ready_s >= READY_S and now_s - self.grew_s >= QUIET_S


def observe(growth: Growth | None, at_s: float, held_bytes: int) -> Growth | None:
    """Return the growth after one more reading, at `at_s` monotonic seconds; `None`: no memory was held yet."""
    if growth is None:
        return Growth(at_s, held_bytes, at_s, held_bytes) if held_bytes > 0 else None
    step = max(GROWTH_BYTES, int(growth.level_bytes * GROWTH_PART))
    peak = max(growth.peak_bytes, held_bytes)
    if held_bytes <= growth.level_bytes + step:
        return Growth(growth.ready_s, growth.level_bytes, growth.grew_s, peak)
    return Growth(growth.ready_s, held_bytes, at_s, peak)


def counted_bytes(reservation: Reservation, growth: Growth | None, now_s: float) -> int:
    """Return the bytes at which a shared probe counts for others; `growth` is `None` while its process holds nothing."""
    assert reservation.probe is not None
    least = reservation.probe.counts_bytes
    if growth is not None and growth.is_settled(now_s):
        return min(int(growth.peak_bytes * SETTLED_FACTOR), reservation.reserved_bytes)
    peak = 0 if growth is None else growth.peak_bytes
    return min(max(least, int(peak * GROWING_FACTOR)), reservation.reserved_bytes)


class Leaving(NamedTuple):
    """A probe that leaves its device to the other probes."""

    request_id: str
    #: Its process is ended and runs again. `False`: it is suspended and loses nothing.
    ends: bool


def allowance_bytes(state: DeviceState) -> int:
    """Return the bytes of a device that must be free for one more probe beside other tasks."""
    return int(state.capacity_bytes * ALLOWANCE)


def offered_bytes(request: Request, state: DeviceState, least_alone_bytes: int) -> int | None:
    """Return the cap that a shared probe would get on a device now; `None`: it must wait.

    The device works, and no task there is exclusive. `least_alone_bytes` must be free on a device without tasks.
    """
    free = state.free_for_probes_bytes
    alone = not state.reservations
    least = least_alone_bytes if alone else allowance_bytes(state)
    if request.confirms_probe:
        cap = request.need_bytes(state.device) or 0
        # The broker that chose the cap saw the other probes a moment earlier. Budgets are respected in any case.
        most = free if alone or state.has_budgets else max(free, cap)
        return cap if min(least, cap) <= free and cap <= most else None
    if free < least:
        return None
    part = request.probe_fraction * (0.5 if state.has_budgets else 1.0)
    return max(min(least, free), int(free * part))


def probe_of(request: Request, state: DeviceState, cap_bytes: int, now_s: float) -> Probe:
    """Return the `Probe` (first run) that starts now under a framework cap of `cap_bytes`, the result of `offered_bytes`."""
    # A framework that takes its whole cap at its start counts at the cap from the beginning.
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
    """Return the probe that leaves a device so that the others continue; `None`: none does.

    The newest probe leaves if the device runs short of memory and a probe there grows. Beside a task with a budget, and
    without another probe, the caps are enough. A probe whose cap is nearly the whole device is not suspended: the device
    might never have so much free again.

    `growths` has the growth of probes by request id, without those that have held nothing. The tasks of `away` have
    no memory on the device, or are on their way. The tasks of `fixed` cannot be suspended now, but can be ended.
    """
    here = [r for r in state.reservations if r.request_id not in away]
    if state.snapshot.error or state.has_budgets or len(here) < 2:
        return None
    if state.snapshot.free_bytes - headroom_bytes >= state.capacity_bytes * SHORT:
        return None
    if all(now_s - growth.grew_s >= QUIET_S for growth in growths.values()):
        return None
    # Of probes that were placed together, each later one has a smaller cap.
    probes = [(r.probe.since_s, -r.reserved_bytes, r.request_id) for r in here if r.probe]
    for since_s, cap_bytes, request_id in sorted(probes, reverse=True):
        if now_s - since_s < FIRST_S:
            return Leaving(request_id, ends=True)
        if request_id not in fixed and -cap_bytes <= state.capacity_bytes * (1 - SHORT):
            return Leaving(request_id, ends=False)
    return None
