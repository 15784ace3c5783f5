"""The driver of a `Machine`: one thread that feeds it device readings and ledger rows, and carries out its commands.

`machine` makes all decisions. Other threads send requests, ends of processes and steps of suspensions as events;
questions are answered from the machine's state. `prefect_gpu.processes` starts processes and talks to them. One `Broker`
serves all runners of a Python process that have the same device specification.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import thread_time

from typing_extensions import assert_never

from prefect_gpu.broker import events, opening
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.machine import Machine
from prefect_gpu.broker.machine_state import MachineSettings
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.ticket import NeedLearned as NeedLearned
from prefect_gpu.broker.ticket import Ticket as Ticket
from prefect_gpu.broker.ticket import Withdrawn as Withdrawn
from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.host import read_host_available_bytes
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.sampler import Sampler
from prefect_gpu.errors import DeviceError, PlacementTimeoutError
from prefect_gpu.process_resources import start_thread
from prefect_gpu.scheduling.backfill import PATIENCE, Patience
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKind,
    Placement,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.scheduling.scheduling_pass import explain
from prefect_gpu.units import GIB, MIB, format_seconds

logger = logging.getLogger(__name__)

#: Bytes kept free on a device for uncounted memory, by kind of device. Programs on the host may grow at any time. A
#: simulated device has the headroom of a real one, so that both hold the same tasks.
HEADROOM_BYTES: dict[DeviceKind, int] = {
    "nvml": 256 * MIB,
    "host": GIB // 2,
    "simulated": 256 * MIB,
}

#: Seconds between two reads of the ledger while a request waits.
POLL_S = 0.05

#: Seconds until a task's log first says why the task waits, and until it says so again.
FIRST_S = 1.0
AGAIN_S = 30.0

#: On a cluster the broker's thread sleeps after each round: `REST_FACTOR` times the round's CPU time, `MOST_REST_S` seconds
#: at most. So it uses at most a fifth of a core up to rounds of 1/16 s, at about 1,000 nodes; with longer rounds it makes
#: fewer than four a second. With ten nodes a round takes about 1 ms. On one machine the thread does not sleep.
REST_FACTOR = 4.0
MOST_REST_S = 0.25

#: Part of all request ids, to make them unique on the machine: processes in two containers may have the same process id.
_PROCESS = uuid.uuid4().hex[:8]

_ids = itertools.count()
_last_sequence = 0


def next_sequence() -> int:
    """Return a number that orders a new request after all earlier ones on the machine (monotonic nanoseconds)."""
    global _last_sequence
    _last_sequence = max(_last_sequence + 1, time.monotonic_ns())
    return _last_sequence


class Places:
    """Places of one broker's task runs (`Request.sequence`) in the order of `submit`. Safe to use from several threads.

    A task run keeps its place from `open` until `Broker.submit` or `leave`.
    """

    def __init__(
        self,
        arrived: threading.Condition,
        start: Callable[[], None],
        put: Callable[[events.Event], None],
    ) -> None:
        #: The lock of the broker's inbox, so that no place is kept after the request.
        self._arrived = arrived
        self._start = start
        self._put = put
        #: Task runs that have not made their request yet.
        self._expected: set[int] = set()

    def expect(self, sequence: int) -> None:
        """Note that a task run will call `Broker.submit` or `leave`; it has no place yet.

        Raises:
            CapacityError: The broker's thread could not be started.
        """
        self._start()
        with self._arrived:
            self._expected.add(sequence)

    def open(self, sequence: int) -> None:
        """Keep the place of an expected task run from now on: its inputs are there."""
        with self._arrived:
            if sequence in self._expected:
                self._put(events.Opened(sequence))

    def leave(self, sequence: int) -> None:
        """Note that a task run makes no request. Without effect if it has made one, or was not expected."""
        with self._arrived:
            if self.give_up(sequence):
                self._put(events.Left(sequence))

    def give_up(self, sequence: int) -> bool:
        """Expect a task run no longer; return whether it was expected. With the lock of the inbox."""
        expected = sequence in self._expected
        self._expected.discard(sequence)
        return expected


class Broker:
    """Assigns devices to requests, on one thread that starts with the first request and sleeps while idle.

    Args:
        ledger: Reservations and waiting requests of all brokers that share devices.
        style: How to choose among devices that fit.
        max_processes: Most task processes at a time; `None`: four for each core, at least eight.
        max_tasks_per_device: Most tasks on a device at a time; `None`: as many as fit.
        headroom_bytes: Kept free on each device; `None`: `HEADROOM_BYTES` of its kind.
        around: Reservations of the GPU task that this process runs inside, for a ledger that does not list them.
        ancestors: Request ids of the GPU tasks that this process runs inside, the outermost first.
        waits_since: Returns the monotonic seconds since when the innermost of these tasks has waited for tasks that it
            submitted; `None`: it does not wait.
        read_host_available: Returns the bytes of host memory that new processes could use.
        patience: How often, and for how long, later requests may be placed before a blocked one.
        preempts: Whether tasks are suspended or moved for requests of this broker.
        stepped: For simulated time: the broker starts no thread, does all work in `look`, and raises errors.
        record: Returns a wrapper of the machine's `handle` that sees each event and its commands.
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
        stepped: bool = False,
        record: Callable[[Machine], events.Handle] = lambda machine: machine.handle,
    ) -> None:
        self.reader = reader
        devices = reader.devices()
        if not devices:
            raise DeviceError("there is no device to run GPU tasks on")
        self.kind: DeviceKind = reader.kind
        self._ledger = ledger
        self.max_processes = max_processes or max(8, 4 * (os.cpu_count() or 1))
        self._waits_since = waits_since
        self._clock = clock or RealClock()
        self._stepped = stepped
        #: Guards the inbox. No event is handled while this lock is held.
        self._arrived = threading.Condition()
        self._inbox: deque[events.Event] = deque()
        #: Guards the machine's state. Never held while the ledger or the devices are read, or a callback runs.
        self._known = threading.Condition()
        #: Places of task runs in the order of `submit`, until they make their requests.
        self.places = Places(self._arrived, partial(self._start, sampling=False), self._put)
        #: Number of calls of `kept`.
        self.runs_kept = 0
        self._thread: threading.Thread | None = None
        self._watchers: list[Callable[[Reading], None]] = []
        #: Functions of runners, called on the broker's thread with each device that has failed, and the error.
        self.fault_watchers: set[Callable[[Device, str], None]] = set()
        #: Monotonic seconds until which the thread sleeps; see `REST_FACTOR`.
        self._rests_until_s = float("-inf")
        self._sampler = Sampler(
            reader,
            self._roots,
            lambda reading: self._put(events.Read(reading)),
            clock=self._clock,
            read_host_available=read_host_available,
        )
        self._subscription = ledger.subscribe(lambda: self._put(events.LedgerChanged()))
        settings = MachineSettings(
            reader.kind,
            style,
            self.max_processes,
            max_tasks_per_device,
            HEADROOM_BYTES[self.kind] if headroom_bytes is None else headroom_bytes,
            patience,
            preempts,
            around,
            ancestors,
            reader.remote,
            os.getpid(),
            self._subscription.number,
        )
        self._machine = Machine(settings, devices, ledger.view())
        self._decide = record(self._machine)

    # Any thread.

    @property
    def processes(self) -> int:
        """Number of requests that hold devices now, in all flows of the machine."""
        return self._ledger.view().tasks

    @property
    def host_promised_bytes(self) -> int:
        """Bytes of host memory reserved for task bodies that have not begun, in all flows of the machine."""
        return self._ledger.view().host_promised_bytes

    @property
    def problem(self) -> str:
        """Reason why the ledger is not shared with other flows of the machine; empty: the ledger is shared."""
        return self._ledger.problem

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices in the last good reading, on which tasks may be placed."""
        return self._machine.known.devices

    @property
    def wants_host_memory(self) -> bool:
        """Whether a request waits for host memory, which idle standby processes may hold."""
        with self._known:
            known = self._machine.known
            reading = known.view.reading
            if reading is None or not known.waiting:
                return False
            if self.kind == "host":
                # Every request for the host device needs host memory. While tasks run there, their end may be enough.
                return not known.ledger.tasks
            host = known.host_state(reading)
            left = max(node.left_bytes for node in host.nodes.values() or [host])
            return any(t.request.host_bytes > left for t in known.waiting.values())

    def submit(
        self, request: Request, histories: Mapping[str, HistoryKey] | None = None, as_of: int = 0
    ) -> Ticket:
        """Ask for devices, and return the request's ticket. `id` and `ancestors` are set here, and `submitted_s` if it is 0.

        `histories` are the request's histories without a known need, by device model, and `as_of` is `runs_kept` before they
        were read.

        Raises:
            CapacityError: A needed thread could not be started. A later request tries again.
            DeviceError: `give_up` was called.
        """
        request_id = f"{_PROCESS}-{os.getpid()}-{next(_ids)}"
        since_s = request.submitted_s or self._clock.now()
        around = self._machine.known.settings.ancestors
        ticket = Ticket(replace(request, id=request_id, submitted_s=since_s, ancestors=around))
        if self._machine.lost:
            raise DeviceError(self._machine.lost)
        self._start()
        with self._arrived:
            self.places.give_up(request.sequence)
            self._put(events.Submitted(ticket, histories or {}, as_of))
        return ticket

    def kept(self, sequence: int, over: bool, shown: Mapping[HistoryKey, int | None]) -> None:
        """Note that the run of a task run's last process was kept; see `events.Kept`."""
        with self._arrived:
            self.runs_kept += 1
            number = self.runs_kept
        self._put(events.Kept(sequence, over, shown, number))

    def _start(self, sampling: bool = True) -> None:
        if self._stepped:
            return
        with self._arrived:
            if self._thread is None:
                self._thread = start_thread(self._run, "prefect-gpu-broker")
        if sampling:
            self._sampler.set_active(True)

    def _put(self, event: events.Event) -> None:
        with self._arrived:
            if event == events.LedgerChanged() and self._inbox and self._inbox[-1] == event:
                # An idle broker may have no thread, and its inbox would grow for as long as others change the ledger.
                return
            self._inbox.append(event)
            self._arrived.notify_all()

    def wait(
        self, ticket: Ticket, limit_s: float | None, on_waiting: Callable[[Reason], None]
    ) -> Placement:
        """Wait until a request is placed, and return its placement. After an exception nothing is reserved for the request.

        Args:
            ticket: From `submit`.
            limit_s: Most seconds to wait since `Request.submitted_s`, from `gpu:wait`; `None`: no limit.
            on_waiting: Called with the reason why the request waits after `FIRST_S` seconds and, if the reason has changed,
                every `AGAIN_S`. An exception of this function ends the wait.

        Raises:
            PlacementError: The request can never be placed, or was not placed in time.
            Withdrawn: `withdraw` was called.
            NeedLearned: Another run has shown the need, so that the request is to be made again.
        """
        now = self._clock.now
        until_s = None if limit_s is None else ticket.request.submitted_s + limit_s
        tell_s = now() + FIRST_S
        told: Reason | None = None
        try:
            while not ticket.wait(self._clock, tell_s if until_s is None else min(tell_s, until_s)):
                reason = self.explain(ticket)
                if until_s is not None and now() >= until_s:
                    if self.withdraw(ticket):
                        raise PlacementTimeoutError(
                            f"gpu:wait={format_seconds(limit_s)} is over: "
                            f"{ticket.request.task_name!r} still waited for {sentence(reason)}"
                        )
                    break
                if reason != told:
                    on_waiting(reason)
                    told = reason
                tell_s = now() + AGAIN_S
            if ticket.error is not None:
                raise ticket.error
            if ticket.withdrawn or ticket.placement is None:
                raise Withdrawn(ticket.request.task_name)
            return ticket.placement
        except BaseException:
            # The request may have been placed meanwhile, and no other thread would release its reservation.
            self.withdraw(ticket)
            self.end(ticket)
            raise

    def explain(self, ticket: Ticket) -> Reason:
        """Return the reason why a request waits."""
        with self._known:
            known, now_s = self._machine.known, self._clock.now()
            if ticket.request.id in known.open:
                return opening.explain(known, ticket)
            if (silence := known.view.silence(now_s)) is not None:
                return silence
            assert known.view.reading is not None
            states, host = known.states(), known.host_state(known.view.reading)
            patience, most = known.settings.patience, known.settings.max_tasks_per_device
            reason = explain(ticket.request, known.queue, states, host, patience, now_s, most)
            return replace(reason, ledger_problem=self.problem or None)

    def device_states(self) -> list[DeviceState]:
        """Return the state of each device, from the last reading and the current reservations."""
        with self._known:
            return self._machine.known.states()

    def waiting(self, longer_s: float) -> list[Request]:
        """Return requests that have waited longer than `longer_s`, at most as many as `max_processes` has room for."""
        with self._known:
            known, until_s = self._machine.known, self._clock.now() - longer_s
            found = [r for t in known.waiting.values() if (r := t.request).submitted_s <= until_s]
            return found[: max(0, self.max_processes - len(known.placed))]

    def withdraw(self, ticket: Ticket) -> bool:
        """Withdraw a request, and return `True`; return `False` without effect if it was already decided."""
        waited = ticket.withdraw()
        if waited:
            self._put(events.Withdrawn(ticket))
        return waited

    def give_up(self, why: str) -> None:
        """Refuse all waiting and later requests with a `DeviceError`: the devices are lost for good."""
        self._put(events.DevicesLost(why))

    def attach(self, ticket: Ticket, pid: int) -> None:
        """Note that the process `pid` has started for a placed request."""
        ticket.pid = pid
        self._put(events.Attached(ticket, pid))

    def watch(self, call: Callable[[Reading], None]) -> None:
        """Read the devices at intervals from now on, and call `call` with every reading, on the broker's thread."""
        self._watchers.append(call)
        self._machine.watched = True
        self._start()

    def held_by_others(self) -> dict[str, Entry]:
        """Return other flows' ledger entries on the broker's devices, by request id, with `held_bytes` as measured here."""
        found, owner = {}, self._ledger.view().owner
        known = {device.key: device for device in self.devices}
        for request_id, entry in self._ledger.running().items():
            if entry.owner != owner and any(r.device_key in known for r in entry.reservations):
                with self._known:
                    view = self._machine.known.view
                    held = tuple(
                        view.measured_bytes(request_id, known[key]) if key in known else 0
                        for key in entry.devices
                    )
                found[request_id] = replace(entry, namespace="", held_bytes=held)
        return found

    def show_suspension(self, ticket: Ticket, stage: Trigger, text: str) -> None:
        """Report the stage of the suspension of a request's process; `text` is for people, empty if the process runs.

        The stage `MOVING_IN` asks whether the process may resume: its devices are reserved for it, and no suspension is
        wanted, by the ledger's newest entry. The answer is put into `Ticket.may_resume`.
        """
        self._put(events.Moved(ticket, stage, text))

    def free_bytes(self, device: Device, patience_s: float = 2.0) -> int | None:
        """Return a device's free bytes at a new reading; `None`: none came in `patience_s`, or the device has failed."""
        if not self._read_anew(patience_s):
            return None
        with self._known:
            reading = self._machine.known.view.reading
            for snapshot in () if reading is None or reading.error else reading.snapshots:
                if snapshot.device.key == device.key and not snapshot.error:
                    return snapshot.free_bytes
            return None

    def mark_running(self, ticket: Ticket) -> None:
        """Note that a request's task body has begun: the kernel's figure of used memory now includes its host memory."""
        self._put(events.BodyBegan(ticket))

    def capacities(self, names: tuple[str, ...], nodes: tuple[str, ...] = ()) -> dict[Device, int]:
        """Return the bytes that could be reserved on each named device if empty; an unknown name: on all devices."""
        with self._known:
            return self._machine.known.view.capacities(names, nodes)

    def check(self, request: Request) -> None:
        """Raise `PlacementError` if a request could not be placed even on empty devices."""
        with self._known:
            self._machine.known.view.check(request)

    def foreign_growth_bytes(self, ticket: Ticket, patience_s: float = 2.0) -> int:
        """Return the bytes by which memory of other programs has grown since a ticket's placement: the most on any device.

        A new reading is used if it comes within `patience_s`, otherwise the last one.
        """
        self._read_anew(patience_s)
        with self._known:
            before = ticket.foreign_before
            now = {state.device.key: state.foreign_bytes for state in self._machine.known.states()}
            return max(0, 0, *(now.get(key, 0) - was for key, was in before.items()))

    def refresh(self) -> None:
        """Request a device reading now, and return without waiting for it."""
        if not self._stepped:
            self._sampler.refresh()

    def returned(self, ticket: Ticket) -> None:
        """Note that the outcome of a placed request's process is known: later first runs of its history wait for `kept`."""
        self._put(events.Returned(ticket))

    def end(self, ticket: Ticket) -> None:
        """Note that the process of a placed request has ended or never started. Without effect if the call is repeated.

        Once the memory is free, or after `RECOVERY_S`, the reservation is released and `Ticket.on_recovered` is called.
        Without a placement the call has no effect.
        """
        self._put(events.Ended(ticket))

    def _roots(self) -> list[int]:
        """Return the ids of processes whose memory is not foreign; called on the sampler's thread."""
        if self.reader.remote:
            # Each node's own broker knows the processes there.
            return []
        with self._known:
            known = self._machine.known
            ended = [t.ended_pid for t in known.recovery.ending.values() if t.ended_pid is not None]
        own = [os.getpid()] if known.settings.around else []
        return list(dict.fromkeys([*own, *self._ledger.view().processes.values(), *ended]))

    def _read_anew(self, patience_s: float) -> bool:
        """Request a device reading and wait for it; return whether it came within `patience_s`."""
        asked_s = self._clock.now()
        self.refresh()
        with self._known:
            view = self._machine.known.view
            while view.reading is None or view.reading.at_s < asked_s:
                if self._clock.now() >= asked_s + patience_s:
                    return False
                self._clock.wait(self._known, asked_s + patience_s)
        return True

    # The broker's thread; for a stepped broker, the caller's.

    def look(self) -> None:
        """Read the devices of a stepped broker, and handle all events that result."""
        # Started processes are attached first, so that the reading attributes their memory.
        self._take_arrived()
        self._put(events.Read(self._sampler.read()))
        while self._inbox or self._machine.dirty:
            self._step()

    def _run(self) -> None:
        while True:
            self._wait_for_work()
            self._step()

    def _step(self) -> None:
        """Handle the events in the inbox and the ledger's changes, then make a scheduling pass."""
        known, began_s = self._machine.known, thread_time()
        # All reservations whose memory is free again are released first, so that one pass sees them all.
        self._take_arrived()
        self._handle(events.Tick())
        if not (known.waiting and known.view.silence(self._clock.now())):
            # With silent devices the broker sends no heartbeats, so that other flows do not wait for its requests.
            self._attempt(self._ledger.beat)
        self._attempt(self._ledger.poll)
        # Ledger changes by the releases above.
        self._take_arrived()
        self._read_ledger()
        self._attempt(lambda: self._handle(events.Waits(self._waits_since())))
        self._handle(events.ScheduleDue())
        self._handle(events.SuspensionsDue())
        if self.reader.remote:
            rest_s = min(MOST_REST_S, REST_FACTOR * (thread_time() - began_s))
            self._rests_until_s = self._clock.now() + rest_s

    def _wait_for_work(self) -> None:
        known = self._machine.known
        # Another flow may ask for a process's memory, or wait for its suspension.
        outside = len(known.own) > len(known.waiting) + len(known.placed)
        suspends = outside or any(t.request.preemptible for t in known.placed.values())
        # The ledger says that the body waits, and nothing else tells this thread when it goes on.
        waits = bool(known.settings.ancestors) and known.waits_since_s is not None
        until_s: float | None = None
        if self._ledger.shares and (known.waiting or suspends or waits):
            until_s = self._clock.now() + POLL_S
        with self._arrived:
            while self._clock.now() < self._rests_until_s:
                self._clock.wait(self._arrived, self._rests_until_s)
            while not (self._inbox or self._machine.dirty):
                patient_s = known.held[0][1] + opening.PATIENCE_S if known.held else None
                soon = until_s, known.recovery.poll_s, patient_s
                due_s = min((each for each in soon if each is not None), default=None)
                if due_s is not None and due_s <= self._clock.now():
                    return
                self._clock.wait(self._arrived, due_s)

    def _take_arrived(self) -> None:
        with self._arrived:
            arrived = tuple(self._inbox)
            self._inbox.clear()
        if self.reader.remote:
            # The last reading replaces earlier ones, which came while the thread rested or was busy.
            last = next((e for e in reversed(arrived) if isinstance(e, events.Read)), None)
            arrived = tuple(e for e in arrived if not isinstance(e, events.Read) or e is last)
        for event in arrived:
            if isinstance(event, events.Read):
                for watch in tuple(self._watchers):
                    self._attempt(partial(watch, event.reading))
            if isinstance(event, events.Read | events.Ended):
                self._read_ledger()
            self._handle(event)

    def _read_ledger(self) -> None:
        self._attempt(lambda: self._handle(events.Rows(*self._ledger.read(self._subscription))))

    def _handle(self, event: events.Event) -> None:
        """Have the machine handle an event, and carry out its commands."""
        queue = deque([event])
        while queue:
            self._attempt(partial(self._handle_next, queue))

    def _handle_next(self, queue: deque[events.Event]) -> None:
        with self._known:
            try:
                commands = self._decide(queue.popleft(), self._clock.now())
            finally:
                self._known.notify_all()
        for command in commands:
            self._attempt(partial(self._carry_out, command, queue))

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception:
            if self._stepped:
                raise
            # A callback of one task may fail; the callbacks of other tasks must still be called.
            logger.exception("the broker of GPU devices met an error; it goes on")

    def _carry_out(self, command: events.Command, queue: deque[events.Event]) -> None:
        """Carry out a command, and append the resulting events to `queue`."""
        ledger = self._ledger
        match command:
            case events.Append(plan):
                done = ledger.try_write(plan.version, plan.changes)
                if done and plan.suspends:
                    ledger.announce()
                rows = events.Rows(*ledger.read(self._subscription))
                outcome = events.Appended(plan, done)
                queue += (outcome, rows) if done else (rows, outcome)
            case events.Decide(ticket, placement, error):
                ticket.decide(placement, error)
            case events.ReadDevices():
                self.refresh()
            case events.SampleDevices(active):
                if not self._stepped:
                    self._sampler.set_active(active)
            case events.Log(note):
                logger.log(logging.WARNING if note.warns else logging.INFO, "%s", note.text)
            case events.Rewrite(request_id, change, announces, asks):
                changed = False
                try:
                    changed = ledger.rewrite(request_id, change, announces)
                    if asks is not None:
                        # The machine learns of the change before the process's next step.
                        queue.append(events.Rows(*ledger.read(self._subscription)))
                finally:
                    # The suspension's thread waits for the answer, also if there was an error.
                    if asks is not None:
                        asks.may_resume.put(changed)
            case events.Release(request_id, ticket, leaked_bytes):
                # Released first, since the callback may raise.
                ledger.release(request_id)
                if ticket is not None and ticket.on_recovered is not None:
                    ticket.on_recovered(leaked_bytes)
            case events.TellMeasured(ticket, at_s, measured):
                if ticket.on_measured is not None:
                    ticket.on_measured(at_s, measured)
            case events.TellHeldBack(ticket, away):
                if ticket.on_held_back is not None:
                    ticket.on_held_back(away)
            case events.TellNoReturn(ticket, error):
                if ticket.on_no_return is not None:
                    ticket.on_no_return(error)
            case events.TellShort(ticket, device):
                on_short, ticket.on_short = ticket.on_short, None
                if on_short is not None:
                    on_short(device)
            case events.SetAside(device, why):
                for tell in tuple(self.fault_watchers):
                    self._attempt(partial(tell, device, why))
            case _:
                assert_never(command)
