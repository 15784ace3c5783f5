"""The shell around scheduling: one thread that reads the devices' state and carries out the decisions.

It hands out placements, follows every placed process in the readings of the devices, and releases a
reservation when the device shows its memory back. What to decide is in `prefect_gpu.scheduling`, a
waiting or placed request is a `ticket`, and what a reading says is in `device_view`. How a process is
started and spoken to is in `prefect_gpu.processes`.

One `Broker` serves all runners of a Python process that have the same device specification.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import TypeAlias

from prefect_gpu.broker.device_view import DeviceView, RecoveryWatch
from prefect_gpu.broker.ledger import Changes, Entry, Ledger, LedgerView, owner_of
from prefect_gpu.broker.preempting import ask_to_leave, leave, preempt, share, withdraw
from prefect_gpu.broker.ticket import BY_HAND, FOR_FIRST_RUNS, Measured
from prefect_gpu.broker.ticket import Ticket as Ticket
from prefect_gpu.broker.ticket import Withdrawn as Withdrawn
from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.host import read_host_available_bytes
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.sampler import Sampler
from prefect_gpu.errors import (
    DeviceError,
    PlacementError,
    PlacementTimeoutError,
    PrefectGPUError,
)
from prefect_gpu.process_resources import start_thread
from prefect_gpu.scheduling.backfill import PATIENCE, BlockedStatus, Patience
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKey,
    DeviceKind,
    DeviceSnapshot,
    Placement,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.nested import Holder, Scene, refusal, rescue
from prefect_gpu.scheduling.placement import Board, PlacementStyle, select_devices
from prefect_gpu.scheduling.preemption import REST_S, aged_priority
from prefect_gpu.scheduling.scheduling_pass import (
    ClusterState,
    Decisions,
    HostState,
    RequestQueue,
    decide,
    explain,
)
from prefect_gpu.suspension.suspended import Stage
from prefect_gpu.units import GIB, MIB, format_seconds

logger = logging.getLogger(__name__)

#: Kept free on a device for memory that is not counted, by kind of device. On the host the system and
#: other programs grow at any time. On a simulated device as on a real one: what fits there must fit here.
HEADROOM_BYTES: dict[DeviceKind, int] = {
    "nvml": 256 * MIB,
    "host": GIB // 2,
    "simulated": 256 * MIB,
}

#: Seconds between two reads of the ledger while a request waits.
POLL_S = 0.05

#: Seconds after which requests of another broker count as blocked although they seem to fit. That broker may have
#: limits that are not known here.
PASSIVE_S = 2.0

#: On a cluster the broker's thread rests after each round of readings and decisions, so many times as long as it has
#: computed, and at most so many seconds. So it takes a fifth of a core at most until a round takes 1/16 s, which is
#: at about 1,000 nodes; from there on it makes fewer than four rounds a second. On ten nodes a round takes about
#: 1 ms and the rest is not felt. On one machine there is none.
REST_FACTOR = 4.0
MOST_REST_S = 0.25

#: Seconds for which a task that was placed on a node counts as taking a ready standby there. After that the node's own
#: number is without it: the task has been sent there, and a reading has come.
STANDBY_TAKEN_S = 1.0

#: Waiting requests that are looked at in one pass to suspend others for them.
MOST_BLOCKED = 32

#: Seconds after which a task that could not be suspended for another may be asked again: it may hold memory by then.
ASK_AGAIN_S = 10.0

#: Seconds for which a request must be hopeless before it is refused: processes that have just ended give up memory, and
#: other flows write what they do.
HOPELESS_S = 1.0

#: Step in bytes in which the memory of a process is written to the ledger, for flows in other containers.
HELD_STEP_BYTES = 64 * MIB

#: Makes the ids of requests unique on the machine: processes of two containers may have the same process id.
_PROCESS = uuid.uuid4().hex[:8]

#: Own requests that a pass has placed.
Made: TypeAlias = tuple[tuple[Request, Placement], ...]

_ids = itertools.count()
_last_sequence = 0


def next_sequence() -> int:
    """Return the next number in the order of arrival, for all brokers of the machine."""
    global _last_sequence
    _last_sequence = max(_last_sequence + 1, time.monotonic_ns())
    return _last_sequence


class Broker:
    """Hands out devices. Its thread starts with the first request and sleeps while idle.

    Args:
        reader: Reads the devices.
        ledger: Holds the reservations and the waiting requests of all brokers that share devices.
        style: How to choose among devices that fit.
        max_processes: Most children at a time; `None`: four for each core, at least eight.
        max_tasks_per_device: Most tasks on a device at a time; `None`: as many as fit.
        headroom_bytes: Kept free on each device; `None`: by kind of device.
        around: What the GPU task around this process holds, for a ledger that does not know it.
        ancestors: The requests of the GPU tasks around this process, by id, the outermost first.
        waits_since: Returns the monotonic seconds since when the body of the innermost waits for tasks that it has submitted;
            `None`: it does not wait.
        clock: Time.
        read_host_available: Returns the bytes of the machine's memory that new processes could use.
        patience: How far a blocked task may be passed by later ones.
        preempts: Whether others' tasks are suspended or moved for its requests.
    """

    def __init__(
        self,
        reader: DeviceReader,
        ledger: Ledger,
        style: PlacementStyle = "spread",
        max_processes: int | None = None,
        max_tasks_per_device: int | None = None,
        headroom_bytes: int | None = None,
        around: tuple[Reservation, ...] = (),
        ancestors: tuple[str, ...] = (),
        waits_since: Callable[[], float | None] = lambda: None,
        clock: Clock | None = None,
        read_host_available: Callable[[], int] = read_host_available_bytes,
        patience: Patience = PATIENCE,
        preempts: bool = True,
    ) -> None:
        self.reader = reader
        devices = reader.devices()
        if not devices:
            raise DeviceError("there is no device to run GPU tasks on")
        self.kind: DeviceKind = reader.kind
        self._ledger = ledger
        #: Most processes at a time.
        self.max_processes = max_processes or max(8, 4 * (os.cpu_count() or 1))
        self._around = around
        self._ancestors = ancestors
        self._waits_since = waits_since
        #: Whether the ledger says that the task around this process waits.
        self._told_waits = False
        #: The request that is about to be refused as hopeless, and the time of the reading that first showed it.
        self._hopeless: tuple[str, float] | None = None
        self._clock = clock or RealClock()
        #: Guards all below. Functions of others (a ticket's callbacks, and a release, which calls the
        #: ledger's watchers) are not called under it but put into `_calls`.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Why the devices will never answer again; empty: they may.
        self._lost = ""
        #: Something has changed that may let a request start.
        self._dirty = False
        #: Readings that the thread has not taken in.
        self._arrived: list[Reading] = []
        #: Called by the thread, in this order, without the lock.
        self._calls: list[Callable[[], object]] = []
        self._style = style
        self._max_tasks_per_device = max_tasks_per_device
        self._patience = patience
        self._preempts = preempts
        #: The waiting requests of this broker, and those of other brokers for the same devices.
        self._queue = RequestQueue()
        #: By request id: requests of this broker in the queue.
        self._waiting: dict[str, Ticket] = {}
        #: By request id: requests of other brokers in the queue.
        self._elsewhere: dict[str, Request] = {}
        #: By origin: the limit of processes of another broker, and the monotonic time in seconds since which its
        #: requests seem to fit and do not start.
        self._most_processes: dict[str, int] = {}
        self._passive_s: dict[str, float] = {}
        #: By id: requests of this broker that are not in the ledger yet.
        self._unwritten: dict[str, Request] = {}
        #: By request id.
        self._placed: dict[str, Ticket] = {}
        #: By request id: suspended ones that have no device and do not ask for one.
        self._parked: dict[str, Ticket] = {}
        self._recovery = RecoveryWatch()
        self._view = DeviceView(
            devices,
            self.kind,
            HEADROOM_BYTES[self.kind] if headroom_bytes is None else headroom_bytes,
            around,
            self._clock,
        )
        self._set_devices(devices)
        #: The reservations that `_note_neighbours` has seen.
        self._noted: dict[DeviceKey, tuple[Reservation, ...]] = {}
        #: A reading was requested for a pass, and has not arrived.
        self._wants_reading = False
        #: A pass was put off until a reading comes that began at these monotonic seconds or later; `None`: none was.
        self._read_after_s: float | None = None
        self._sampler = Sampler(
            reader,
            self._roots,
            self._on_reading,
            clock=self._clock,
            read_host_available=read_host_available,
        )
        #: Called with every reading.
        self._watchers: list[Callable[[Reading], None]] = []
        #: Called with each device that is set aside, and the reason.
        self._fault_watchers: set[Callable[[Device, str], None]] = set()
        #: Monotonic seconds until which the thread rests.
        self._rests_until_s = float("-inf")
        #: Changes of waiting requests in the ledger.
        self._subscription = ledger.subscribe(self._look_again)

    # Any thread.

    @property
    def processes(self) -> int:
        """Processes of tasks that hold a device now, in all flows of the machine."""
        return self._ledger.view().tasks

    @property
    def host_promised_bytes(self) -> int:
        """Bytes of the machine's memory reserved for processes that have not taken them yet, in all flows."""
        return self._ledger.view().host_promised_bytes

    @property
    def problem(self) -> str:
        """Why the ledger is not shared with other flows of the machine; empty: it is."""
        return self._ledger.problem

    @property
    def wants_host_memory(self) -> bool:
        """Whether a request waits for memory of the machine itself, which standbys may hold."""
        with self._changed:
            reading = self._view.reading
            if reading is None or not self._waiting:
                return False
            if self.kind == "host":
                # There every request does; while others run, their end may be all that it waits for.
                return not self._ledger.view().tasks
            host = self._host_state(reading, self._ledger.view())
            nodes = [host] if isinstance(host, HostState) else host.nodes.values()
            left = max((node.left_bytes for node in nodes), default=0)
            return any(t.request.host_bytes > left for t in self._waiting.values())

    def submit(self, request: Request) -> Ticket:
        """Ask for devices.

        Args:
            request: What is asked. Its `id` and `submitted_s` are set here.

        Returns:
            A ticket that is `decided` once it has a `placement` or an `error`.

        Raises:
            CapacityError: A thread that is needed could not be started. A later request tries again.
            DeviceError: `give_up` was called.
        """
        request_id = f"{_PROCESS}-{os.getpid()}-{next(_ids)}"
        now_s = self._clock.now()
        ticket = Ticket(
            replace(request, id=request_id, submitted_s=now_s, ancestors=self._ancestors)
        )
        with self._changed:
            if self._lost:
                raise DeviceError(self._lost)
            self._start()
            self._sampler.set_active(True)
            self._queue.add(ticket.request)
            self._waiting[request_id] = ticket
            self._unwritten[request_id] = ticket.request
            self._wake()
        return ticket

    def _start(self) -> None:
        """Start the thread, with the lock held."""
        if self._thread is None:
            self._thread = start_thread(self._run, "prefect-gpu-broker")

    def wait(
        self,
        ticket: Ticket,
        limit_s: float | None,
        on_waiting: Callable[[str], None],
        first_s: float = 1.0,
        again_s: float = 30.0,
        waited_s: float = 0.0,
    ) -> Placement:
        """Block until a request is placed. Where it raises, nothing is held for the request.

        Args:
            ticket: From `submit`.
            limit_s: Seconds after which to give up, as `gpu:wait` says; `None`: never.
            on_waiting: Is given the reason of the wait. What it raises ends the wait.
            first_s: Seconds after which `on_waiting` is called first.
            again_s: Seconds after which it is called again, if the reason has changed.
            waited_s: Seconds of `limit_s` that have passed already.

        Raises:
            PlacementError: It can never be placed, or was not in time.
            Withdrawn: `withdraw` was called.
        """
        now = self._clock.now
        until_s = None if limit_s is None else now() - waited_s + limit_s
        tell_s = now() + first_s
        told = ""
        try:
            while not ticket.wait(self._clock, tell_s if until_s is None else min(tell_s, until_s)):
                reason = self.explain(ticket)
                if until_s is not None and now() >= until_s:
                    if self.withdraw(ticket):
                        raise PlacementTimeoutError(
                            f"gpu:wait={format_seconds(limit_s)} is over: "
                            f"{ticket.request.task_name!r} still waited for {reason}"
                        )
                    # It was decided at the last moment.
                    break
                if reason != told:
                    on_waiting(reason)
                    told = reason
                tell_s = now() + again_s
            if ticket.error is not None:
                raise ticket.error
            if ticket.placement is None:
                raise Withdrawn(ticket.request.task_name)
            return ticket.placement
        except BaseException:
            # It may have been placed meanwhile, and no other thread would end that.
            self.withdraw(ticket)
            self.end(ticket)
            raise

    def explain(self, ticket: Ticket) -> str:
        """Return why a request waits."""
        with self._changed:
            reading, silence = self._view.reading, self._view.silence
            if reading is None or silence:
                return silence
            view = self._ledger.view()
            try:
                reason = explain(
                    ticket.request,
                    self._queue,
                    self._states(view),
                    self._host_state(reading, view),
                    self._patience,
                    self._clock.now(),
                    self._max_tasks_per_device,
                )
            except PlacementError as error:
                # The next pass refuses it.
                return error.problem
            return f"{reason}; {self.problem}" if self.problem else reason

    def device_states(self) -> list[DeviceState]:
        """Return what each device has free at the last reading, less the reservations; nothing is read for it."""
        with self._changed:
            return self._states()

    def waiting(self, longer_s: float) -> list[Request]:
        """Return own requests that have waited for longer than some seconds, as many as `max_processes` lets start."""
        with self._changed:
            until_s = self._clock.now() - longer_s
            found = [r for t in self._waiting.values() if (r := t.request).submitted_s <= until_s]
            return found[: max(0, self.max_processes - len(self._placed))]

    def withdraw(self, ticket: Ticket) -> bool:
        """Stop waiting; without effect once it was placed.

        Returns:
            Whether it still waited.
        """
        with self._changed:
            if ticket.pid is not None or self._remove(ticket.request) is None:
                return False
            ticket.decide()
            # It may have blocked others.
            self._calls.append(partial(self._ledger.release, ticket.request.id))
            self._wake()
            return True

    def give_up(self, why: str) -> None:
        """Refuse all requests from now on with a `DeviceError`, since the devices are lost for good."""
        with self._changed:
            self._lost = why
            for ticket in tuple(self._waiting.values()):
                self._refuse(ticket.request, DeviceError(why))
            self._wake()

    def attach(self, ticket: Ticket, pid: int) -> None:
        """Set which process holds what was reserved."""
        with self._changed:
            ticket.pid = pid
            if self.reader.remote:
                self._view.compute_again(ticket.devices)
        self._ledger.attach(ticket.request.id, pid)

    def watch(self, call: Callable[[Reading], None]) -> None:
        """Read the devices at all times from now on, and pass every reading to a function, on the broker's thread."""
        with self._changed:
            self._start()
            self._watchers.append(call)
            self._sampler.set_active(True)

    def watch_faults(self, call: Callable[[Device, str], None]) -> None:
        """Pass each device that is set aside from now on, with the reason, to a function, on the broker's thread."""
        with self._changed:
            self._fault_watchers.add(call)

    def unwatch_faults(self, call: Callable[[Device, str], None]) -> None:
        """End what `watch_faults` began."""
        with self._changed:
            self._fault_watchers.discard(call)

    def held_by_others(self) -> dict[str, Entry]:
        """Return what other flows hold on these devices, with what their processes were measured to hold."""
        found = {}
        known = {device.key: device for device in self.devices}
        for request_id, entry in self._ledger.held_by_others().items():
            if any(r.device_key in known for r in entry.reservations):
                with self._changed:
                    held = tuple(
                        self._view.measured_bytes(request_id, known[key]) if key in known else 0
                        for key in entry.devices
                    )
                found[request_id] = replace(entry, namespace="", held_bytes=held)
        return found

    def neighbours(self, ticket: Ticket) -> tuple[str, ...]:
        """Return the names of the tasks, of all flows, that have been on a request's devices since it was placed."""
        with self._changed:
            self._note_neighbours(ticket.devices)
            return tuple(ticket.neighbours)

    def show_suspension(self, ticket: Ticket, stage: Stage, text: str) -> None:
        """Show in the ledger how far the suspension of a request's process is.

        Args:
            ticket: Of the request.
            stage: How far it is.
            text: The same for a person; empty: it runs.
        """
        request_id, now_s = ticket.request.id, self._clock.now()
        if stage == "refused":
            rests = now_s + ASK_AGAIN_S
            self._ledger.rewrite(
                request_id,
                lambda e: replace(
                    e,
                    suspended_for="",
                    suspension=text,
                    held_back=False,
                    leaves=False,
                    rests_until_s=rests,
                ),
            )
            with self._changed:
                ticket.held_back = False
            self._use_learned(ticket)
        elif stage == "moving out":
            self._ledger.set_suspension(request_id, text, away=False)
            with self._changed:
                # It may not be wanted any more: then it is asked back.
                ticket.held_back = True
                self._wake()
        elif stage == "running":
            self._ledger.set_suspension(request_id, text, away=False, rests_until_s=now_s + REST_S)
            self._use_learned(ticket)
        else:
            self._ledger.set_suspension(request_id, text, away=True)

    def comes_back(self, ticket: Ticket) -> bool:
        """Note that the process of a request comes back from the host from now on; return whether it may.

        It may while its devices are reserved for it and no one has asked for its memory, also where this broker has not
        seen that yet.
        """
        keys = tuple(device.key for device in ticket.devices)
        rests = self._clock.now() + REST_S

        def change(entry: Entry) -> Entry:
            reserved = keys == tuple(each.device_key for each in entry.reservations)
            if not reserved or entry.suspended_for or entry.held_back or entry.leaves:
                return entry
            return replace(entry, suspension="moving back", away=False, rests_until_s=rests)

        return self._ledger.rewrite(ticket.request.id, change)

    def free_bytes(self, device: Device, patience_s: float = 2.0) -> int | None:
        """Return the bytes that a device has free at a new reading; `None`: none came, or it has failed.

        Args:
            device: Of this broker.
            patience_s: Seconds to wait for the reading.
        """
        asked_s = self._clock.now()
        self.refresh()
        with self._changed:
            if not self._wait_for_reading(asked_s, patience_s):
                return None
            reading = self._view.reading
            for snapshot in () if reading is None or reading.error else reading.snapshots:
                if snapshot.device.key == device.key and not snapshot.error:
                    return snapshot.free_bytes
            return None

    def learn_need(self, ticket: Ticket, budgets: Mapping[str, int]) -> None:
        """Count a probe that shares its devices at a budget from now on, for it is known what its task needs.

        On a cluster it has no effect: the node counts it at its cap, and would refuse what is started beside it.

        Args:
            ticket: A placed one.
            budgets: Bytes on a device, by its model. Where a model is not named, nothing changes.
        """
        placement = ticket.placement
        if placement is None or self.reader.remote:
            return
        with self._changed:
            # So little may not be enough to come back to.
            ticket.may_leave = False
            if ticket.held_back or ticket.away_s is not None:
                # One that is suspended, or about to be, comes back to what it had.
                ticket.learned = budgets
                return
        names = {device.key: device.name for device in placement.devices}
        lowered = tuple(
            each
            if each.probe is None or each.loans
            else replace(
                each,
                reserved_bytes=min(
                    each.reserved_bytes, budgets.get(names[each.device_key], each.reserved_bytes)
                ),
            )
            for each in placement.reservations
        )
        if lowered != placement.reservations:
            self._ledger.lower(ticket.request.id, lowered)
            with self._changed:
                self._wake()

    def _use_learned(self, ticket: Ticket) -> None:
        budgets, ticket.learned = ticket.learned, None
        if budgets is not None:
            self.learn_need(ticket, budgets)

    def mark_running(self, ticket: Ticket) -> None:
        """Note that the body of a request has begun: the kernel's figures include its host memory from now on."""
        self._ledger.mark_running(ticket.request.id)

    def capacities(self, names: tuple[str, ...], nodes: tuple[str, ...] = ()) -> dict[Device, int]:
        """Return the bytes that could ever be reserved on each device that a task may use.

        That is each device, where it names some, or nodes, that are not there.
        """
        with self._changed:
            return self._view.capacities(names, nodes)

    def check(self, request: Request) -> None:
        """Check that a request could be placed if nothing else ran.

        Raises:
            PlacementError: It can never be placed.
        """
        with self._changed:
            self._view.check(request)

    def foreign_growth_bytes(self, ticket: Ticket, patience_s: float = 2.0) -> int:
        """Return by how much others' memory has grown on a task's devices since it was placed.

        Args:
            ticket: A placed one.
            patience_s: Seconds to wait for a new reading; the last one counts where none comes.

        Returns:
            Bytes, on the device where they grew most; 0: they did not.
        """
        asked_s = self._clock.now()
        self.refresh()
        with self._changed:
            self._wait_for_reading(asked_s, patience_s)
            before = ticket.foreign_before
            now = {state.device.key: state.foreign_bytes for state in self._states()}
            return max(0, 0, *(now.get(key, 0) - was for key, was in before.items()))

    def refresh(self) -> None:
        """Ask for a reading of the devices now."""
        self._sampler.refresh()

    def end(self, ticket: Ticket) -> None:
        """Note that the process of a placed request is gone, or never came.

        Its reservation is released when the device shows the memory back, or after `RECOVERY_S`; then
        `on_recovered` is called. The second call, and one for a request without a placement, has no effect.
        """
        with self._changed:
            self._note_neighbours(ticket.devices)
            request_id = ticket.request.id
            suspended = self._parked.pop(request_id, None)
            if suspended is None and ticket.pid is not None:
                suspended = self._remove(ticket.request)
            if suspended is None and self._placed.pop(request_id, None) is None:
                return
            ticket.ended_s = self._clock.now()
            ticket.ended_pid, ticket.pid = ticket.pid, None
            if ticket.ended_pid is None:
                # No process ever came: no memory is missing.
                self._calls.append(partial(self._release, ticket, 0))
            else:
                self._recovery.begin(ticket, ticket.ended_s)
            self._wake()

    def _look_again(self) -> None:
        """Request another scheduling pass from the thread: the ledger has changed."""
        with self._changed:
            if self._waiting:
                # The last reading may show the memory of a process that was just released elsewhere.
                self._sampler.refresh()
            self._wake()

    def _on_reading(self, reading: Reading) -> None:
        """Take a reading, on the sampler's thread."""
        with self._changed:
            if self.reader.remote:
                # It says all that one before it says, which came while the thread rested or was busy.
                self._arrived.clear()
            self._arrived.append(reading)
            self._changed.notify_all()

    def _roots(self) -> list[int]:
        """Return the processes whose memory is not foreign, on the sampler's thread."""
        if self.reader.remote:
            # They are known where they run.
            return []
        with self._changed:
            ended = [t.ended_pid for t in self._recovery.ending if t.ended_pid is not None]
        own = [os.getpid()] if self._around else []
        return list(dict.fromkeys([*own, *self._ledger.view().processes.values(), *ended]))

    # With the lock held.

    def _wake(self) -> None:
        self._dirty = True
        self._changed.notify_all()

    def _states(self, view: LedgerView | None = None) -> list[DeviceState]:
        """Return what each device has free at the last reading, less the reservations (`None`: those of now)."""
        return self._view.states(view or self._ledger.view(), self._placed, self._recovery.ending)

    def _set_devices(self, devices: tuple[Device, ...]) -> None:
        """Use other devices from now on."""
        #: Devices that tasks may be placed on: those of the last good reading.
        self.devices = devices
        #: The node of each.
        self._node_of = {device.key: device.host for device in devices}
        #: Their keys, which the entries of all requests for any device share.
        self._device_keys = tuple(self._node_of)

    def _host_state(self, reading: Reading, view: LedgerView) -> HostState | ClusterState:
        """Return what the machine, or each node of a cluster, has left for processes."""
        if not reading.nodes:
            return HostState(
                available_bytes=reading.host_available_bytes,
                reserved_bytes=view.host_promised_bytes,
                processes=len(self._placed),
                max_processes=self.max_processes,
                all_processes=view.tasks,
            )
        tasks, promised_bytes = Counter[str](), Counter[str]()
        for key, use in view.host_use.items():
            if key in self._node_of:
                tasks[self._node_of[key]] += use.tasks
                promised_bytes[self._node_of[key]] += use.promised_bytes
        own = Counter(ticket.devices[0].host for ticket in self._placed.values())
        nodes = {
            name: HostState(
                node.available_bytes,
                promised_bytes[name],
                own[name],
                self.max_processes if node.max_processes is None else node.max_processes,
                tasks[name],
            )
            for name, node in reading.nodes.items()
        }
        return ClusterState(nodes, len(self._placed), self.max_processes)

    def _wait_for_reading(self, asked_s: float, patience_s: float) -> bool:
        """Wait for a reading that began after it was asked for; return whether one came in time."""
        while (reading := self._view.reading) is None or reading.at_s < asked_s:
            left_s = asked_s + patience_s - self._clock.now()
            if left_s <= 0:
                return False
            self._clock.wait(self._changed, left_s)
        return True

    # The broker's thread. With the lock held, but for `_run`, `_make_calls` and `_release`.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait_for_work()
                began_s = thread_time()
                self._attempt(self._take_readings)
                works = not (self._waiting and self._view.silence)
            # Reservations whose memory is back are released first, all that came together: so they are
            # one scheduling pass.
            self._make_calls()
            if works:
                # Without heartbeats other flows do not wait for its requests: its devices do not answer.
                self._attempt(self._ledger.beat)
            self._attempt(self._tell_waits)
            self._attempt(self._ledger.poll)
            with self._changed:
                self._attempt(self._schedule)
                self._attempt(self._tell_held_back)
            self._make_calls()
            if self.reader.remote:
                rest_s = min(MOST_REST_S, REST_FACTOR * (thread_time() - began_s))
                self._rests_until_s = self._clock.now() + rest_s

    def _tell_waits(self) -> None:
        """Write to the ledger whether the GPU task around this process waits, if that has changed."""
        waits = self._waits_since() is not None
        if waits != self._told_waits and self._ancestors:
            self._told_waits = waits
            self._ledger.rewrite(self._ancestors[-1], lambda entry: replace(entry, waits=waits))

    def _wait_for_work(self) -> None:
        while (rest_s := self._rests_until_s - self._clock.now()) > 0:
            self._clock.wait(self._changed, rest_s)
        until_s: float | None = None
        if self._ledger.shares and (self._waiting or self._may_be_suspended):
            until_s = self._clock.now() + POLL_S
        while not (self._arrived or self._dirty):
            times = [each for each in (until_s, self._recovery.poll_s) if each is not None]
            left_s = min(times) - self._clock.now() if times else None
            if left_s is not None and left_s <= 0:
                return
            self._clock.wait(self._changed, left_s)

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            logger.exception("the broker of GPU devices met an error; it goes on")

    def _make_calls(self) -> None:
        with self._changed:
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                # A function of one task may fail; those of the others must be called all the same.
                logger.exception("a GPU task could not take what it was told of its memory")

    # Readings.

    def _take_readings(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._dirty = self._dirty or bool(arrived)
        if self._recovery.ending:
            self._recovery.suspended = sum(e.away for e in self._ledger.running().values())
        for reading in arrived:
            self._take_reading(reading)
        now_s = self._clock.now()
        self._release_all(self._recovery.give_up(now_s, self._view.reading, self._placed.values()))
        if self._recovery.poll(now_s):
            self._sampler.refresh()

    def _take_reading(self, reading: Reading) -> None:
        self._view.take(reading)
        if self._view.devices is not self.devices:
            self._set_devices(self._view.devices)
            # Requests of other brokers are restricted to the devices of this one.
            self._take_changes({each: self._ledger.entry(each) for each in self._elsewhere})
        # Those that wait for one.
        self._changed.notify_all()
        self._wants_reading = False
        self._calls += [partial(call, reading) for call in self._watchers]
        if reading.error:
            return
        self._states()
        self._write_held_bytes()
        self._note_neighbours(self.devices)
        for request_id, ticket in self._placed.items():
            if ticket.pid is not None and ticket.on_measured is not None:
                measured = tuple(
                    Measured(
                        self._view.measured_bytes(request_id, device),
                        self._view.measured_by_pid(ticket.pid, device),
                    )
                    for device in ticket.devices
                )
                self._calls.append(partial(ticket.on_measured, reading.at_s, measured))
        self._make_probes_leave()
        for device, why in self._view.warn(reading):
            self._calls += [partial(call, device, why) for call in self._fault_watchers]
        self._release_all(self._recovery.check(reading, self._placed.values()))

    def _make_probes_leave(self) -> None:
        """End or suspend own probes for the others on their devices, if a reading has shown that one must leave."""
        fixed = {i for i, ticket in self._placed.items() if not ticket.may_leave}
        silent = self._ledger.view().silent
        asked = False
        for leaving, device in self._view.probes_to_leave(self._ledger.running, silent, fixed):
            probe = self._placed.get(leaving.request_id)
            if probe is None:
                continue
            if not leaving.ends and not asked:
                asked = True
                self._calls.append(partial(self._ledger.rewrite, leaving.request_id, ask_to_leave))
            elif leaving.ends and probe.on_short is not None:
                self._calls.append(partial(probe.on_short, device))
                probe.on_short = None

    def _note_neighbours(self, devices: Sequence[Device]) -> None:
        """Note which tasks share a device. Devices without new reservations since the last call are skipped."""
        by_device = self._ledger.view().by_device
        for device in devices:
            held = by_device.get(device.key, ())
            if held is self._noted.get(device.key, ()):
                continue
            self._noted[device.key] = held
            for at, ticket in enumerate([self._placed.get(r.request_id) for r in held]):
                if ticket is None:
                    continue
                for other in (*held[:at], *held[at + 1 :]):
                    own = self._ledger.owns(other.request_id)
                    ticket.add_neighbour(
                        other.task_name if own else f"{other.task_name} (another flow)"
                    )

    def _write_held_bytes(self) -> None:
        """Write what its own processes hold to the ledger, where others cannot identify them by process id."""
        if all(device.attributed for device in self.devices) and not self._ledger.view().held_bytes:
            return
        for request_id, ticket in self._placed.items():
            entry = self._ledger.entry(request_id)
            if entry is None or entry.pid is None:
                continue
            held = {d.key: self._view.measured_bytes(request_id, d) for d in ticket.devices}
            taken = tuple(held.get(key, 0) for key in entry.devices)
            told = entry.held_bytes or (0,) * len(taken)
            if any(abs(new - old) >= HELD_STEP_BYTES for new, old in zip(taken, told, strict=True)):
                self._calls.append(partial(self._ledger.set_held_bytes, request_id, taken))

    @property
    def _may_be_suspended(self) -> bool:
        """Whether another flow may ask for memory of a process of this broker, or wait for it to be away."""
        return bool(self._parked) or any(t.request.preemptible for t in self._placed.values())

    def _tell_held_back(self) -> None:
        """Pass on whose memory is wanted on the host, by a person or for another request, and whose may come back."""
        if self.reader.remote:
            # There may be tens of thousands, and no task of a cluster is suspended.
            return
        silent = self._ledger.view().silent
        for request_id, ticket in self._placed.items():
            entry = self._ledger.entry(request_id)
            if entry is None or ticket.on_held_back is None or ticket.pid is None:
                continue
            if entry.suspended_for:
                asker = self._ledger.entry(entry.suspended_for)
                if asker is None or asker.reservations or asker.owner in silent:
                    # It waits no longer, has found another device, or its flow was stopped.
                    self._calls.append(partial(self._ledger.rewrite, request_id, withdraw))
                    continue
                ticket.held_back_for = f"task {asker.request.task_name!r}"
            elif entry.held_back:
                ticket.held_back_for = BY_HAND
                if entry.shared and entry.away:
                    if not ticket.held_back:
                        # It is on its way back.
                        ticket.held_back = True
                        self._calls.append(partial(ticket.on_held_back, True))
                    self._let_go_of_device(request_id, share)
                    continue
            elif entry.leaves:
                ticket.held_back_for = FOR_FIRST_RUNS
                if entry.away:
                    self._let_go_of_device(request_id, leave)
                    continue
            away = entry.held_back or entry.leaves or bool(entry.suspended_for)
            if not away and not entry.reservations:
                # It has just made way, and comes back once it has a device again.
                continue
            if away != ticket.held_back:
                ticket.held_back = away
                self._calls.append(partial(ticket.on_held_back, away))
        for ticket in tuple(self._waiting.values()):
            if ticket.away_s is not None:
                self._age(ticket, ticket.was_away_s + self._clock.now() - ticket.away_s)

    def _let_go_of_device(self, request_id: str, how: Callable[..., Entry]) -> None:
        """Put the request of a suspended process into the queue again, by `preempting.share` or `preempting.leave`."""
        devices = {device.key: device for device in self.devices}
        change = partial(how, devices=devices, now_s=self._clock.now())
        self._calls.append(partial(self._ledger.rewrite, request_id, change))

    def _age(self, ticket: Ticket, away_s: float) -> None:
        """Raise the priority of a suspended process that has waited long for room."""
        assert ticket.priority is not None
        priority = aged_priority(replace(ticket.request, priority=ticket.priority), away_s)
        if priority != ticket.request.priority:
            status = self._queue.statuses.get(ticket.request.id)
            self._queue.remove(ticket.request)
            request = ticket.request = replace(ticket.request, priority=priority)
            self._queue.add(request)
            if status is not None:
                self._queue.statuses[request.id] = status
            self._calls.append(
                partial(self._ledger.rewrite, request.id, lambda e: replace(e, request=request))
            )

    def _take_suspended(self, ticket: Ticket, entry: Entry) -> None:
        """Note that a suspended process has no device: it waits for room to come back to, unless a person holds it back."""
        request_id = entry.request.id
        if ticket.away_s is None:
            ticket.away_s = self._clock.now()
            if ticket.priority is None:
                ticket.priority = entry.request.priority
            # It is asked back once it has a device.
            ticket.held_back = True
        self._placed.pop(request_id, None)
        self._parked.pop(request_id, None)
        self._remove(ticket.request)
        ticket.request = entry.request
        if entry.held_back:
            self._parked[request_id] = ticket
        else:
            self._waiting[request_id] = ticket
            self._queue.add(ticket.request)
        self._dirty = True

    def _release_all(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._calls.append(partial(self._release, ticket, ticket.missing_bytes))

    def _release(self, ticket: Ticket, leaked_bytes: int | None) -> None:
        # First, whatever becomes of the callback.
        self._ledger.release(ticket.request.id)
        if ticket.on_recovered is not None:
            ticket.on_recovered(leaked_bytes)

    # Decisions.

    def _schedule(self) -> None:
        """Make one scheduling pass, and carry out what it decides; without effect if nothing has changed."""
        if not self._dirty:
            return
        self._dirty = False
        # Also while no request waits here: they would accumulate.
        self._take_changes(self._subscription.take())
        if self._waiting:
            reading = self._view.reading
            if reading is None or not self._view.fresh:
                self._want_reading()
            elif not reading.error:
                if self._is_outdated(reading):
                    self._want_reading()
                else:
                    self._make_pass(reading)
        else:
            self._read_after_s = None
        follows = self._waiting or self._placed or self._parked or self._recovery.ending
        self._sampler.set_active(bool(follows or self._watchers))

    def _want_reading(self) -> None:
        """Ask for a reading to make a pass on, if that was not done since the last one came."""
        if not self._wants_reading:
            self._sampler.refresh()
            self._wants_reading = True

    def _is_outdated(self, reading: Reading) -> bool:
        """Return whether a reading may show memory as taken that another process has given up since.

        A pass on it would give the rest of a device to a small request, although the large one before it fits. A reading
        that began after the release that put the pass off is good enough: others may give up memory all the time.
        """
        freed_s = self._ledger.view().freed_s
        if self._read_after_s is None and reading.at_s < freed_s:
            self._read_after_s = freed_s
        if self._read_after_s is not None and reading.at_s < self._read_after_s:
            return True
        self._read_after_s = None
        return False

    def _make_pass(self, reading: Reading) -> None:
        while True:
            view = self._ledger.view()
            self._take_changes(self._subscription.take())
            states = self._states(view)
            decisions = self._decide(states, self._host_state(reading, view), view)
            made = tuple((r, placement) for r, placement in decisions.placements if not r.origin)
            suspended: Mapping[str, Entry] = {}
            if view.preemptible and self._preempts:
                suspended, made = self._preempt(decisions, made, states, view)
            changes = {**self._changes_of(decisions, made), **suspended}
            if not changes or self._ledger.try_write(view.version, changes):
                break
            # Another broker has added a reservation meanwhile.
        self._unwritten.clear()
        if suspended:
            self._calls.append(self._ledger.announce)
        self._queue.statuses.update(
            (i, status) for i, status in decisions.statuses.items() if i in self._waiting
        )
        for request, error in decisions.refusals:
            self._refuse(request, error)
        foreign = {state.device.key: state.foreign_bytes for state in states}
        for request, placement in made:
            ticket = self._placed[request.id] = self._waiting[request.id]
            self._remove(request)
            if ticket.away_s is None:
                ticket.placed_s = self._clock.now()
            else:
                ticket.was_away_s += self._clock.now() - ticket.away_s
            ticket.away_s = None
            ticket.placement = placement
            self._recovery.take_baseline(ticket, reading)
            ticket.foreign_before = {
                device.key: foreign[device.key] for device in placement.devices
            }
            ticket.decide(placement)

    def _take_changes(self, changes: Changes) -> None:
        """Apply changes of waiting requests in the ledger to the queue."""
        for request_id, entry in changes.items():
            own = self._placed.get(request_id) or self._parked.get(request_id)
            if own is not None:
                if entry is not None:
                    self._take_suspended(own, entry)
                continue
            if request_id in self._waiting:
                # Other brokers count how often they have passed it.
                if entry is not None:
                    self._take_status(entry)
                    if entry.held_back:
                        self._take_suspended(self._waiting[request_id], entry)
                continue
            known = self._elsewhere.pop(request_id, None)
            if known is not None:
                self._queue.remove(known)
                if entry is None:
                    self._passive_s.pop(known.origin, None)
            request = None if entry is None else self._seen_from_here(entry)
            if entry is not None and request is not None:
                self._elsewhere[request_id] = request
                self._queue.add(request)
                self._take_status(entry)
                self._most_processes[request.origin] = entry.max_processes

    def _take_status(self, entry: Entry) -> None:
        if entry.status != BlockedStatus():
            self._queue.statuses[entry.request.id] = entry.status

    def _seen_from_here(self, entry: Entry) -> Request | None:
        """Return another broker's request, restricted to the devices of this one; `None`: it uses none of them."""
        if entry.held_back:
            # A suspended process that does not ask for room.
            return None
        usable = set(entry.devices)
        shared = [device.uuid for device in self.devices if device.key in usable]
        if not shared:
            return None
        named = tuple(uuid for uuid in entry.request.devices if uuid in shared)
        if not named and len(shared) < len(self.devices):
            named = tuple(shared)
        return replace(
            entry.request,
            origin=entry.origin,
            devices=named,
            count=min(entry.request.count, len(shared)),
        )

    def _changes_of(self, decisions: Decisions, made: Made) -> dict[str, Entry]:
        """Return what a pass writes: new waiting requests, changed statuses of blocked ones, reservations."""
        changes: dict[str, Entry] = {}
        refused = {request.id for request, _ in decisions.refusals}
        for request_id, request in self._unwritten.items():
            if request_id in self._waiting and request_id not in refused:
                changes[request_id] = self._entry_of(request)
        for request_id, status in decisions.statuses.items():
            entry = changes.get(request_id) or self._ledger.entry(request_id)
            if entry is None or entry.status == status:
                continue
            # Only a request's own broker keeps devices for it.
            if request_id in self._waiting or entry.status.passed < status.passed:
                changes[request_id] = replace(entry, status=status)
        for request, placement in made:
            entry = changes.get(request.id) or self._ledger.entry(request.id)
            entry = entry or self._entry_of(request)
            keys = [reservation.device_key for reservation in placement.reservations]
            if entry.devices is not self._device_keys and not set(keys) <= set(entry.devices):
                # They came after the request.
                entry = replace(entry, devices=tuple(dict.fromkeys((*entry.devices, *keys))))
            placed_s = entry.placed_s or self._clock.now()
            changes[request.id] = replace(
                entry, reservations=placement.reservations, placed_s=placed_s
            )
        return changes

    def _entry_of(self, request: Request) -> Entry:
        keys, named = self._device_keys, tuple[str, ...]()
        if request.devices or request.nodes:
            states = [DeviceState(DeviceSnapshot(each, 0.0, 0), 0, 0, 0) for each in self.devices]
            devices = [state.device for state in select_devices(request, states)]
            keys = tuple(device.key for device in devices)
            named = tuple(device.uuid for device in devices)
        # Other brokers may know the nodes by other names.
        return Entry(
            replace(request, devices=named, nodes=()),
            broker=self._subscription.number,
            devices=keys,
            max_processes=self.max_processes,
        )

    def _process_slots(self, view: LedgerView, passive: Collection[str]) -> dict[str, int]:
        """Return how many processes each other broker may start.

        A broker whose process sends no heartbeats may start none, nor one that was passive for too long.
        """
        now_s, most_s = self._clock.now(), self._patience.wait_s
        return {
            origin: 0
            if owner_of(origin) in view.silent
            or (origin in passive and now_s - self._passive_s[origin] > most_s)
            else most - view.holding.get(origin, 0)
            for origin, most in self._most_processes.items()
        }

    def _passive(self) -> frozenset[str]:
        """Return the other brokers with requests that seem to fit and do not start."""
        now_s = self._clock.now()
        return frozenset(o for o, since_s in self._passive_s.items() if now_s - since_s > PASSIVE_S)

    def _note_passive(
        self, decisions: Decisions, passive: Collection[str], silent: Collection[str]
    ) -> None:
        """Note the other brokers whose requests were placed in a pass: they should start soon."""
        could = {request.origin for request, _ in decisions.placements if request.origin}
        self._passive_s = {
            origin: self._passive_s.get(origin, self._clock.now())
            for origin in (*could, *passive)
            if owner_of(origin) not in silent
        }

    def _decide(
        self, states: Sequence[DeviceState], host: HostState | ClusterState, view: LedgerView
    ) -> Decisions:
        """Decide which requests start, and which never can."""
        board = Board(
            states,
            self._style,
            self._max_tasks_per_device,
            self._reserved_around(states),
            self._queue.least_bytes,
            self._ready_standbys(),
        )
        passive = self._passive()
        decisions = decide(
            self._queue,
            board,
            host,
            self._patience,
            self._clock.now(),
            self._process_slots(view, passive),
            passive,
        )
        if self._ancestors:
            decisions = self._rescue(decisions, board, host)
        self._note_passive(decisions, passive, view.silent)
        return decisions

    def _reserved_around(self, states: Sequence[DeviceState]) -> list[Reservation]:
        """Return what the GPU tasks around this process have reserved."""
        if not self._ancestors:
            return []
        return [r for s in states for r in s.reservations if r.request_id in self._ancestors]

    def _rescue(
        self, decisions: Decisions, board: Board, host: HostState | ClusterState
    ) -> Decisions:
        """Decide about requests that wait for memory of tasks that wait for them; see `nested`."""
        reading, since_s = self._view.reading, self._waits_since()
        if reading is None or since_s is None or reading.at_s < since_s or host.full:
            # An older reading does not show what the task around this process holds now.
            return decisions
        holders = {
            i: Holder(e.request.ancestors, e.waits) for i, e in self._ledger.running().items()
        }
        for at, request_id in enumerate(self._ancestors):
            innermost = at == len(self._ancestors) - 1
            if innermost or request_id not in holders:
                holders[request_id] = Holder(self._ancestors[:at], waits=True)
        decided = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
        waiting = [r for r in self._queue if r.ancestors and r.id not in decided]
        if not all(holder.waits for holder in holders.values()):
            # What runs may give up memory of the machine.
            waiting = [r for r in waiting if r.origin or not host.refuses(r, "")]
        scene = Scene(board.states, holders, self._view.measured)
        found = rescue(waiting, scene, self._style, self._max_tasks_per_device, self._clock.now())
        placements = (*decisions.placements, *found.placements)
        if (last := found.hopeless) is None:
            self._hopeless = None
        elif self._hopeless is None or self._hopeless[0] != last.id:
            self._hopeless = last.id, reading.at_s
        elif reading.at_s - self._hopeless[1] >= HOPELESS_S:
            refused = (last, refusal(last, scene))
            return replace(decisions, refusals=(*decisions.refusals, refused))
        return replace(decisions, placements=placements)

    def _ready_standbys(self) -> Mapping[str, Mapping[str, int]]:
        """Return how many standbys of the nodes of a cluster wait for a task, by kind and node."""
        ready: dict[str, Counter[str]] = {}
        nodes = {} if self._view.reading is None else self._view.reading.nodes
        for name, node in nodes.items():
            for kind, count in node.standbys.items():
                ready.setdefault(kind, Counter())[name] = count
        since_s = self._clock.now() - STANDBY_TAKEN_S
        # The last to be placed first.
        for ticket in reversed(self._placed.values()) if ready else ():
            if ticket.placed_s < since_s:
                break
            if ticket.request.standby in ready:
                ready[ticket.request.standby][ticket.devices[0].host] -= 1
        return ready

    def _preempt(
        self,
        decisions: Decisions,
        made: Made,
        states: Sequence[DeviceState],
        view: LedgerView,
    ) -> tuple[Mapping[str, Entry], Made]:
        """Decide which running tasks are suspended for requests that must wait.

        Returns:
            What is written about those tasks, and what is placed with the requests for which they have made way.
        """
        reading = self._view.reading
        if reading is None:
            return {}, made
        host = self._host_state(reading, view)
        hosts = (
            dict.fromkeys(self._node_of.values(), host)
            if isinstance(host, HostState)
            else host.nodes
        )
        decided = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
        waits = (
            r
            for r in self._queue
            if r.id not in decided and not all(each.refuses(r) for each in hosts.values())
        )
        # What runs this process waits for it, and memory that was lent is not free for others.
        entries = {
            i: e
            for i, e in self._ledger.running().items()
            if i not in self._ancestors and not any(r.loans for r in e.reservations)
        }
        by_key = {state.device.key: at for at, state in enumerate(states)}
        rooms = {name: each.left_bytes for name, each in hosts.items() if not each.full}
        after = list(states)
        for _, placement in decisions.placements:
            for reservation in placement.reservations:
                at = by_key[reservation.device_key]
                after[at] = after[at].after(reservation)
        found = preempt(
            () if host.full else tuple(itertools.islice(waits, MOST_BLOCKED)),
            self._waiting,
            entries,
            [state for state in after if state.device.host in rooms],
            self._view.measured_bytes,
            rooms,
            self._clock.now(),
            self._max_tasks_per_device,
            view.silent,
            host.refuses,
        )
        changes = dict(found.changes)
        if decisions.placements:
            # What is free where they have made way is seen once these are written.
            self._dirty = self._dirty or bool(found.ready and made)
            return changes, made
        for plan, left in found.ready[:1]:
            gone = {
                key: tuple(r for r in held if r.request_id not in left)
                for key, held in view.by_device.items()
            }
            left_states = self._states(replace(view, by_device=gone))
            board = Board(
                left_states,
                self._style,
                self._max_tasks_per_device,
                self._reserved_around(left_states),
            )
            request = self._waiting[plan.request_id].request
            named = {by_key[key]: place for place, key in enumerate(plan.devices)}
            node = self._node_of[plan.devices[0]]
            chosen = board.choose(request, named)
            if chosen is not None and not host.refuses(request, node):
                made = ((request, board.place(request, chosen, self._clock.now())),)
                changes.update(left)
        return changes, made

    def _refuse(self, request: Request, error: PrefectGPUError) -> None:
        """Remove a request that can never be placed from the queue, and give its ticket the error."""
        ticket = self._remove(request)
        if ticket is None:
            return
        if ticket.pid is None:
            ticket.decide(error=error)
            self._calls.append(partial(self._ledger.release, request.id))
            return
        # A suspended process. It waits for its end.
        self._parked[request.id] = ticket
        if ticket.on_no_return is not None:
            self._calls.append(partial(ticket.on_no_return, error))

    def _remove(self, request: Request) -> Ticket | None:
        """Remove a waiting request; return its ticket, `None`: it does not wait."""
        ticket = self._waiting.pop(request.id, None)
        if ticket is not None:
            self._queue.remove(request)
            self._unwritten.pop(request.id, None)
        return ticket
