"""The shell around scheduling: one thread that feeds it and carries out what it says.

It owns the queue of requests, hands out placements, follows every placed process in the readings of
the devices, and releases a reservation when the device shows the memory back. What to decide is in
`prefect_gpu.scheduling`; how a process is started and spoken to is in `prefect_gpu.processes`.

One `Broker` serves all runners of a Python process that have the same device specification
(`shared_broker`).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import os
import queue as queues
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.sampler import Sampler
from prefect_gpu.errors import DeviceError, PlacementTimeoutError, PrefectGPUError
from prefect_gpu.ledger import PROCESS_LEDGER
from prefect_gpu.scheduling.ledger import Ledger
from prefect_gpu.scheduling.memory import (
    Room,
    judge_recovery,
    measure,
    ownerless_bytes,
    survey,
)
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKind,
    Placement,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.scheduling.queue import HostRoom, decide, explain, order_key
from prefect_gpu.units import GIB, MIB, format_bytes, format_seconds

logger = logging.getLogger(__name__)

#: Seconds for which a reservation outlives its process at most, waiting for the memory to be back.
#: Measured: 0 to 0.13 s on an H200; up to 1.5 s reported elsewhere; a zombie may keep it for ever.
RECOVERY_S = 5.0

#: Seconds between two looks while memory is waited for.
RECOVERY_POLL_S = 0.02

#: A reading older than this (seconds) is not decided on; a new one is asked for first.
FRESH_S = 0.5

#: Seconds without a reading after which a driver is said to be silent.
SILENT_S = 5.0

#: Difference between what the driver shows in use and what its processes hold, by which a device
#: may differ from before without anything having leaked: the driver's bookkeeping.
LEAK_TOLERANCE_BYTES = 2 * MIB

#: Kept free on a device for what nobody counts, by kind of device. On the host the system and
#: other programs grow at any time.
HEADROOM_BYTES: dict[DeviceKind, int] = {
    "nvml": 256 * MIB,
    "host": GIB // 2,
    "simulated": 0,
}

_ids = itertools.count()
_sequences = itertools.count()


def next_sequence() -> int:
    """Give the next place in the order of arrival, for all brokers of this process."""
    return next(_sequences)


@dataclass
class Ticket:
    """One request, from its submission until its memory is back. Made by `Broker.submit`."""

    request: Request
    #: Set when it was placed or refused, and again when it was withdrawn.
    decided: threading.Event = field(default_factory=threading.Event)
    placement: Placement | None = None
    error: PrefectGPUError | None = None
    #: Monotonic seconds when it was placed.
    placed_s: float = 0.0
    #: Process that holds what was reserved; `None`: none yet, or no longer.
    pid: int | None = None
    #: Whether the body has begun: what the process needs of the machine's memory is then taken.
    running: bool = False
    #: Bytes that its own counters (plus context) give, where the device cannot tell.
    stand_in_bytes: int = 0
    #: Called with (monotonic seconds, bytes on all its devices) at every reading while it runs.
    on_measured: Callable[[float, int], None] | None = None
    #: Called with the bytes that did not come back (`None`: cannot be told), once.
    on_recovered: Callable[[int | None], None] | None = None
    #: Ownerless bytes of its devices when it was placed.
    ownerless_before: dict[str, int | None] = field(default_factory=dict)
    #: Monotonic seconds when its process ended; `None`: it has not.
    ended_s: float | None = None
    ended_pid: int | None = None


class Broker:
    """Hands out devices. Its thread starts with the first request and sleeps while idle.

    Args:
        reader: Reads the devices.
        ledger: Where promises are written.
        style: How to choose among devices that fit.
        max_processes: Most children at a time; `None`: four for each core, at least eight.
        headroom_bytes: Kept free on each device; `None`: by kind of device.
        held_by_parent: What the GPU task around this process holds.
        clock: Time.
    """

    def __init__(
        self,
        reader: DeviceReader,
        ledger: Ledger = PROCESS_LEDGER,
        style: PlacementStyle = "spread",
        max_processes: int | None = None,
        headroom_bytes: int | None = None,
        held_by_parent: tuple[Reservation, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        self.reader = reader
        self.devices: tuple[Device, ...] = reader.devices()
        if not self.devices:
            raise DeviceError("there is no device to run GPU tasks on")
        self.kind: DeviceKind = reader.kind
        self._ledger = ledger
        self._style = style
        self._max_processes = max_processes or max(8, 4 * (os.cpu_count() or 1))
        self._headroom_bytes = (
            HEADROOM_BYTES[self.kind] if headroom_bytes is None else headroom_bytes
        )
        self._held_by_parent = held_by_parent
        self._clock = clock or RealClock()
        self._commands: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        # All below: the broker's thread only, but for reading single values.
        self._queue: list[Ticket] = []
        self._possible: set[str] = set()
        self._placed: dict[str, Ticket] = {}
        self._ending: dict[str, Ticket] = {}
        self._reading: Reading | None = None
        self._ownerless_told: dict[str, int] = {}
        self._set_aside: dict[str, str] = {}
        self._context_told = False
        self._wants_reading = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sampler = Sampler(reader, self._roots, self._on_reading, clock=self._clock)
        self._end_watch = ledger.watch(lambda: self._commands.put(self._schedule))

    # Any thread.

    @property
    def processes(self) -> int:
        """Processes that hold a device now."""
        return len(self._placed)

    def submit(
        self,
        task_name: str,
        memory: int | float | None = None,
        count: int = 1,
        devices: tuple[str, ...] = (),
        exclusive: bool = False,
        priority: int = 0,
        host_bytes: int = 0,
        sequence: int | None = None,
    ) -> Ticket:
        """Ask for devices; see `Request` for the arguments.

        Args other than those: `sequence` is from `next_sequence`, `None` takes the next.

        Returns:
            A ticket whose `decided` is set once it has a `placement` or an `error`.
        """
        ticket = Ticket(
            Request(
                id=f"{os.getpid()}-{next(_ids)}",
                task_name=task_name,
                sequence=next_sequence() if sequence is None else sequence,
                submitted_s=self._clock.now(),
                memory=memory,
                count=count,
                devices=devices,
                exclusive=exclusive,
                priority=priority,
                host_bytes=host_bytes,
            )
        )
        self._do(lambda: self._enqueue(ticket))
        return ticket

    def wait(
        self,
        ticket: Ticket,
        limit_s: float | None,
        on_waiting: Callable[[str], None],
        first_s: float = 1.0,
        again_s: float = 30.0,
    ) -> Placement:
        """Block until a request is placed.

        Args:
            ticket: From `submit`.
            limit_s: Seconds after which to give up, as `gpu:wait` says; `None`: never.
            on_waiting: Told why it waits, after `first_s` and, if the reason changed, every
                `again_s`.

        Raises:
            PlacementError: It can never be placed, or was not in time.
            Withdrawn: `withdraw` was called.
        """
        began = self._clock.now()
        patience = first_s
        told = ""
        while True:
            if limit_s is not None:
                patience = min(patience, began + limit_s - self._clock.now())
            if ticket.decided.wait(max(0.0, patience)):
                break
            if limit_s is not None and self._clock.now() - began >= limit_s:
                reason = self.explain(ticket)
                self.withdraw(ticket)
                if ticket.placement is None:
                    raise PlacementTimeoutError(
                        f"gpu:wait={format_seconds(limit_s)} is over: {ticket.request.task_name!r} "
                        f"still waited for {reason}"
                    )
                break
            reason = self.explain(ticket)
            if reason != told:
                on_waiting(reason)
                told = reason
            patience = again_s
        if ticket.error is not None:
            raise ticket.error
        if ticket.placement is None:
            raise Withdrawn(ticket.request.task_name)
        return ticket.placement

    def explain(self, ticket: Ticket) -> str:
        """Say why a request waits."""
        reading = self._reading
        if reading is None:
            return "the first reading of the devices"
        silent_s = self._clock.now() - reading.at_s
        if reading.error or silent_s > SILENT_S:
            why = reading.error or f"nothing heard for {format_seconds(silent_s)}"
            return f"the devices to answer ({why})"
        waiting = [other.request for other in tuple(self._queue)]
        return explain(ticket.request, waiting, self._survey(reading), self._host_room(reading))

    def withdraw(self, ticket: Ticket) -> None:
        """Give up waiting; without effect once it was placed."""
        done = threading.Event()
        self._do(lambda: (self._drop(ticket), done.set())[0])
        done.wait()

    def attach(self, ticket: Ticket, pid: int) -> None:
        """Say which process holds what was reserved."""
        ticket.pid = pid

    def refresh(self) -> None:
        """Ask for a reading of the devices now."""
        self._sampler.refresh()

    def end(self, ticket: Ticket) -> None:
        """Say that the process of a placed request is gone (or never came).

        Its reservation is released when the device shows the memory back, or after `RECOVERY_S`;
        then `on_recovered` is called.
        """
        self._do(lambda: self._begin_recovery(ticket))

    def close(self) -> None:
        """Stop the threads. Requests that wait are withdrawn."""
        self._end_watch()
        self._sampler.stop()
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._commands.put(self._stop)
            thread.join()
        self.reader.close()

    def _do(self, command: Callable[[], object]) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="prefect-gpu-broker", daemon=True
                )
                self._thread.start()
        self._commands.put(lambda: (command(), None)[1])

    def _on_reading(self, reading: Reading) -> None:
        self._commands.put(lambda: self._take_reading(reading))

    def _roots(self) -> list[int]:
        own = [os.getpid()] if self._held_by_parent else []
        tickets = [*tuple(self._placed.values()), *tuple(self._ending.values())]
        return own + [pid for t in tickets if (pid := t.pid or t.ended_pid) is not None]

    # The broker's thread.

    def _run(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=RECOVERY_POLL_S if self._ending else None)
            except queues.Empty:
                self._sampler.refresh()
                continue
            try:
                command()
            except _Stop:
                return
            except Exception:
                logger.exception("the broker of GPU devices met an error; it goes on")

    def _stop(self) -> None:
        for ticket in tuple(self._queue):
            self._drop(ticket)
        raise _Stop

    def _enqueue(self, ticket: Ticket) -> None:
        bisect.insort(self._queue, ticket, key=lambda t: order_key(t.request))
        self._sampler.set_active(True)
        self._schedule()

    def _drop(self, ticket: Ticket) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
            self._possible.discard(ticket.request.id)
            ticket.decided.set()
            self._schedule()

    def _begin_recovery(self, ticket: Ticket) -> None:
        request_id = ticket.request.id
        if self._placed.pop(request_id, None) is None:
            return
        ticket.ended_s = self._clock.now()
        ticket.ended_pid, ticket.pid = ticket.pid, None
        if ticket.ended_pid is None:
            # No process ever came: there is nothing to wait for.
            self._release(ticket, 0)
            return
        self._ending[request_id] = ticket
        self._sampler.refresh()

    def _take_reading(self, reading: Reading) -> None:
        self._reading = reading
        self._wants_reading = False
        if not reading.error:
            self._tell_measured(reading)
            self._tell_foreign_context(reading)
            self._tell_set_aside(reading)
            self._look_for_recovery(reading)
        elif self._ending:
            self._give_up_recovery()
        self._schedule()
        self._sampler.set_active(bool(self._queue or self._placed or self._ending))

    def _tell_measured(self, reading: Reading) -> None:
        totals: dict[str, int] = {}
        for snapshot in reading.snapshots:
            if not snapshot.error:
                for request_id, size in self._measure(reading, snapshot.device).items():
                    totals[request_id] = totals.get(request_id, 0) + size
        for request_id, ticket in self._placed.items():
            if ticket.on_measured is not None and ticket.pid is not None:
                ticket.on_measured(reading.at_s, totals.get(request_id, 0))

    def _tell_foreign_context(self, reading: Reading) -> None:
        if self._context_told or self.kind != "nvml" or self._held_by_parent:
            return
        pid = os.getpid()
        if any(p.pid == pid for s in reading.snapshots for p in s.processes):
            self._context_told = True
            logger.warning(
                "this process itself holds GPU memory, which counts as somebody else's until it "
                "ends: call GPU tasks with .submit or .map, not directly, and keep CUDA out of "
                "the flow"
            )

    def _tell_set_aside(self, reading: Reading) -> None:
        for snapshot in reading.snapshots:
            uuid = snapshot.device.uuid
            if snapshot.error and self._set_aside.get(uuid) != snapshot.error:
                logger.warning("device %s is set aside: %s", uuid, snapshot.error)
            elif not snapshot.error and uuid in self._set_aside:
                logger.info("device %s answers again", uuid)
                del self._set_aside[uuid]
            if snapshot.error:
                self._set_aside[uuid] = snapshot.error

    def _look_for_recovery(self, reading: Reading) -> None:
        by_uuid = {s.device.uuid: s for s in reading.snapshots}
        for ticket in tuple(self._ending.values()):
            assert ticket.placement is not None and ticket.ended_s is not None
            assert ticket.ended_pid is not None
            if reading.at_s < ticket.ended_s:
                continue
            looks = [
                judge_recovery(
                    by_uuid[device.uuid],
                    ticket.ended_pid,
                    ticket.ownerless_before.get(device.uuid),
                    LEAK_TOLERANCE_BYTES,
                )
                for device in ticket.placement.devices
            ]
            overdue = reading.at_s - ticket.ended_s >= RECOVERY_S
            if all(look.complete for look in looks) or overdue:
                known = [look.missing_bytes for look in looks if look.missing_bytes is not None]
                self._finish_recovery(ticket, sum(known) if len(known) == len(looks) else None)

    def _give_up_recovery(self) -> None:
        for ticket in tuple(self._ending.values()):
            assert ticket.ended_s is not None
            if self._clock.now() - ticket.ended_s >= RECOVERY_S:
                self._finish_recovery(ticket, None)

    def _finish_recovery(self, ticket: Ticket, leaked_bytes: int | None) -> None:
        del self._ending[ticket.request.id]
        if leaked_bytes:
            logger.warning(
                "%s of device memory did not come back within %s of the end of task %r "
                "(pid %s); the device's free memory is counted without it",
                format_bytes(leaked_bytes),
                format_seconds(RECOVERY_S),
                ticket.request.task_name,
                ticket.ended_pid,
            )
            # Told once: those who run beside it must not be blamed for the same bytes.
            for other in (*self._placed.values(), *self._ending.values()):
                for uuid, before in other.ownerless_before.items():
                    now = self._ownerless(uuid)
                    if before is not None and now is not None:
                        other.ownerless_before[uuid] = max(before, now)
        self._release(ticket, leaked_bytes)

    def _release(self, ticket: Ticket, leaked_bytes: int | None) -> None:
        if ticket.on_recovered is not None:
            ticket.on_recovered(leaked_bytes)
        # The ledger's watch schedules again.
        self._ledger.release(ticket.request.id)

    def _ownerless(self, uuid: str) -> int | None:
        reading = self._reading
        if reading is None:
            return None
        for snapshot in reading.snapshots:
            if snapshot.device.uuid == uuid:
                return ownerless_bytes(snapshot)
        return None

    def _schedule(self) -> None:
        if not self._queue:
            return
        reading = self._reading
        if reading is None or self._clock.now() - reading.at_s > FRESH_S:
            if not self._wants_reading:
                self._wants_reading = True
                self._sampler.refresh()
            return
        if reading.error:
            return
        while True:
            view = self._ledger.view()
            decisions = decide(
                [ticket.request for ticket in self._queue],
                self._survey(reading, view.reservations),
                self._host_room(reading),
                self._style,
                self._held_by_parent,
                self._possible,
            )
            promises = [r for _, placement in decisions.placements for r in placement.reservations]
            if not promises or self._ledger.try_reserve(view.version, promises):
                break
        tickets = {ticket.request.id: ticket for ticket in self._queue}
        for request, error in decisions.refusals:
            self._decide(tickets[request.id], None, error)
        for request, placement in decisions.placements:
            self._decide(tickets[request.id], placement, None)
        self._possible.update(ticket.request.id for ticket in self._queue)

    def _decide(
        self, ticket: Ticket, placement: Placement | None, error: PrefectGPUError | None
    ) -> None:
        self._queue.remove(ticket)
        self._possible.discard(ticket.request.id)
        ticket.placement, ticket.error = placement, error
        if placement is not None:
            ticket.placed_s = self._clock.now()
            ticket.ownerless_before = {d.uuid: self._ownerless(d.uuid) for d in placement.devices}
            self._placed[ticket.request.id] = ticket
        ticket.decided.set()

    # Readings turned into what scheduling takes.

    def _measure(self, reading: Reading, device: Device) -> dict[str, int]:
        snapshot = next(s for s in reading.snapshots if s.device.uuid == device.uuid)
        stand_ins: dict[str, int] = {}
        # The task around us, if there is one: what this process holds is not foreign.
        roots = {
            os.getpid(): r.request_id
            for r in self._held_by_parent
            if r.device_uuid == device.uuid
        }
        for ticket in (*tuple(self._placed.values()), *tuple(self._ending.values())):
            pid = ticket.pid or ticket.ended_pid
            if pid is None or ticket.placement is None:
                continue
            if all(d.uuid != device.uuid for d in ticket.placement.devices):
                continue
            roots[pid] = ticket.request.id
            if ticket.pid is not None:
                stand_ins[ticket.request.id] = ticket.stand_in_bytes // len(
                    ticket.placement.devices
                )
        return measure(snapshot, roots, stand_ins)

    def _survey(
        self, reading: Reading, reservations: tuple[Reservation, ...] | None = None
    ) -> list[Room]:
        promised = self._ledger.view().reservations if reservations is None else reservations
        return [
            survey(
                snapshot,
                (*promised, *self._held_by_parent),
                {} if snapshot.error else self._measure(reading, snapshot.device),
                self._headroom_bytes,
            )
            for snapshot in reading.snapshots
        ]

    def _host_room(self, reading: Reading) -> HostRoom:
        placed = tuple(self._placed.values())
        return HostRoom(
            available_bytes=reading.host_available_bytes,
            promised_bytes=sum(t.request.host_bytes for t in placed if not t.running),
            processes=len(placed),
            max_processes=self._max_processes,
        )


class Withdrawn(Exception):  # noqa: N818  # not an error: somebody gave up waiting
    """A request was withdrawn while it waited."""


class _Stop(Exception):  # noqa: N818
    """Ends the broker's thread."""


_shared_lock = threading.Lock()
_shared: dict[object, Broker] = {}


def shared_broker(key: object, make: Callable[[], Broker]) -> Broker:
    """Give the broker of this process for a device specification; make it if there is none.

    Args:
        key: Equal for runners that share devices, reservations and sampler.
        make: Makes it; what it raises is raised, and the next caller tries again.
    """
    # A forked copy of this process has the objects but not the threads.
    own = (os.getpid(), key)
    with _shared_lock:
        broker = _shared.get(own)
        if broker is None:
            broker = _shared[own] = make()
        return broker
