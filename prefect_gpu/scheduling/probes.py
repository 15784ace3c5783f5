"""Probes that share a device: whether one more may start there, its cap, and which probe leaves if memory runs short.

Pure. A probe is the first run of a task: no run has shown how much memory the task needs. `placement` places a probe
with a device to itself like any task, `memory` counts caps, `prefect_gpu.runner.budgets` decides which tasks are probes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Probe, Request, Reservation
from prefect_gpu.units import MIB

#: Fraction of a device that must be free for one more probe, and at which a probe counts until its memory has settled.
#: With a smaller fraction more probes start, and more of them are ended: evaluations need 0.4 % to 29 % of an H200 in
#: `benchmarks/makespan.py`.
ALLOWANCE = 1 / 4

#: A probe's memory has settled `READY_S` seconds after the device first showed it, if it has not grown for `QUIET_S`
#: seconds. The context shows about a second before the first step is done (H200, PyTorch).
READY_S = 3.0
QUIET_S = 1.0

#: Growth counts only above the larger of these two, bytes and a fraction of the held memory: allocators take segments
#: of 20 MiB, and contexts grow when a library is loaded.
GROWTH_BYTES = 64 * MIB
GROWTH_PART = 0.02

#: Expected largest memory of a probe as a multiple of its peak so far, once its memory has settled and before.
SETTLED_FACTOR = 1.1
GROWING_FACTOR = 1.5

#: Fraction of a device below which free memory is short.
SHORT = 1 / 16

#: Seconds after its placement, process start included, in which a leaving probe is ended: little work is lost, and its
#: memory is free at once. Later it is suspended instead.
FIRST_S = 15.0

#: Fraction of the offered memory for a probe whose framework takes its whole cap when it starts.
AT_ONCE_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a process's memory on one device, over the readings so far."""

    #: Monotonic seconds of the first reading that showed memory of the process.
    ready_s: float
    #: Bytes held after the last growth.
    level_bytes: int
    #: Monotonic seconds of the last growth.
    grew_s: float
    peak_bytes: int

    def is_settled(self, now_s: float) -> bool:
        """Return whether no further growth of the memory is expected."""
        return now_s - self.ready_s >= READY_S and now_s - self.grew_s >= QUIET_S


def observe(growth: Growth | None, at_s: float, held_bytes: int) -> Growth | None:
    """Return the growth after one more reading, at `at_s` monotonic seconds; `None`: no memory held yet."""
    if growth is None:
        return Growth(at_s, held_bytes, at_s, held_bytes) if held_bytes > 0 else None
    step = max(GROWTH_BYTES, int(growth.level_bytes * GROWTH_PART))
    peak = max(growth.peak_bytes, held_bytes)
    if held_bytes <= growth.level_bytes + step:
        return Growth(growth.ready_s, growth.level_bytes, growth.grew_s, peak)
    return Growth(growth.ready_s, held_bytes, at_s, peak)


def counted_bytes(reservation: Reservation, growth: Growth | None, now_s: float) -> int:
    """Return the bytes at which a shared probe counts for other probes. `growth` is `None` while it holds no memory."""
    assert reservation.probe is not None
    least = reservation.probe.counts_bytes
    if growth is not None and growth.is_settled(now_s):
        return min(int(growth.peak_bytes * SETTLED_FACTOR), reservation.reserved_bytes)
    peak = 0 if growth is None else growth.peak_bytes
    return min(max(least, int(peak * GROWING_FACTOR)), reservation.reserved_bytes)


class Leaving(NamedTuple):
    """A probe that gives up its memory so that the other probes on the device continue."""

    request_id: str
    #: `True`: the process is ended, and the task runs again. `False`: the process is suspended, and no work is lost.
    ends: bool


def allowance_bytes(state: DeviceState) -> int:
    """Return the bytes of a device that must be free for one more probe beside other tasks."""
    return int(state.capacity_bytes * ALLOWANCE)


def offered_bytes(request: Request, state: DeviceState, least_alone_bytes: int) -> int | None:
    """Return the cap in bytes of a shared probe that starts on a device now; `None`: the probe must wait.

    The caller has checked `placement.is_open`. `least_alone_bytes` must be free on a device without tasks.
    """
    free = state.free_for_probes_bytes
    alone = not state.reservations
    least = least_alone_bytes if alone else allowance_bytes(state)
    if request.confirms_probe:
        cap = request.need_bytes(state.device) or 0
        # The broker that chose the cap saw the other probes a moment earlier, so its cap counts, except beside budgets.
        most = free if alone or state.has_budgets else max(free, cap)
        return cap if min(least, cap) <= free and cap <= most else None
    if free < least:
        return None
    part = request.probe_fraction * (0.5 if state.has_budgets else 1.0)
    return max(min(least, free), int(free * part))


def probe_of(request: Request, state: DeviceState, cap_bytes: int, now_s: float) -> Probe:
    """Return the mark for the reservation of a probe that starts now. `cap_bytes` is the result of `offered_bytes`."""
    # A probe whose framework takes its whole cap at its start counts at the cap from the beginning.
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
    """Return the probe that must give up its memory so that the other probes on a device continue; `None`: no probe.

    The newest probe leaves if the device is short of memory and one of its probes grows. No probe leaves beside a task
    with a budget, or alone: caps are enough there. A probe whose cap is nearly the whole device is not suspended: so
    much memory might never be free again.

    `growths` has the growth of each probe that holds memory, by request id. `away` has the ids of suspended requests,
    also while their memory is moved. The requests of `fixed` cannot be suspended now, but can be ended.
    """
    here = [r for r in state.reservations if r.request_id not in away]
    if state.snapshot.error or state.has_budgets or len(here) < 2:
        return None
    if state.snapshot.free_bytes - headroom_bytes >= state.capacity_bytes * SHORT:
        return None
    if all(now_s - growth.grew_s >= QUIET_S for growth in growths.values()):
        return None
    # Of probes placed at the same time, each later one has a smaller cap: sorting by cap keeps their order.
    probes = [(r.probe.since_s, -r.reserved_bytes, r.request_id) for r in here if r.probe]
    for since_s, cap_bytes, request_id in sorted(probes, reverse=True):
        if now_s - since_s < FIRST_S:
            return Leaving(request_id, ends=True)
        if request_id not in fixed and -cap_bytes <= state.capacity_bytes * (1 - SHORT):
            return Leaving(request_id, ends=False)
    return None
