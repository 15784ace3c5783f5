"""The state machine of a broker: events go in, commands come out.

    Submitted ─▶ waiting ─▶ placed ─▶ (its process runs) ─▶ Ended ─▶ its memory is back ─▶ gone
                    ▲          │ suspended, and another request has its device
                    └──────────┘ (parked instead, while a person keeps it suspended)

`Machine.handle` takes one event and returns commands. Only this method changes the state. It uses no thread, lock, clock,
file or log: `broker` feeds it and carries out its commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import assert_never

from prefect_gpu.broker import events
from prefect_gpu.broker.device_view import Note
from prefect_gpu.broker.ledger import Changes, Entry, LedgerView
from prefect_gpu.broker.machine_state import MachineSettings, MachineState
from prefect_gpu.broker.planning import Plan, make_plan
from prefect_gpu.broker.preempting import ask_to_leave, leave, share, withdraw
from prefect_gpu.broker.ticket import BY_HAND, FOR_FIRST_RUNS, Measured, Ticket
from prefect_gpu.errors import DeviceError, PrefectGPUError
from prefect_gpu.scheduling.model import Device, Reading, Request, Reservation
from prefect_gpu.scheduling.preemption import aged_priority
from prefect_gpu.units import MIB

#: Steps in bytes in which the memory of a process is written to the ledger, for flows in other containers.
HELD_STEP_BYTES = 64 * MIB


class Machine:
    """Devices and requests of one machine as one flow process knows them, and its decisions.

    `devices` are all devices before the first reading.
    """

    def __init__(
        self, settings: MachineSettings, devices: tuple[Device, ...], ledger: LedgerView
    ) -> None:
        self._settings = settings
        #: State that all may read, and only `handle` changes.
        self.known = MachineState(settings, devices, ledger)
        #: Why the devices are lost for good; empty: they are not.
        self.lost = ""
        #: Something has changed that may let a request start.
        self.dirty = False
        #: Whether a watcher wants readings although no request needs them.
        self.watched = False
        #: The reservations that `_note_neighbours` has seen.
        self._noted: dict[object, tuple[Reservation, ...]] = {}
        #: A reading was requested for a pass, and has not arrived.
        self._wants_reading = False
        #: A pass waits for a reading that began at these monotonic seconds or later; `None`: none does.
        self._read_after_s: float | None = None
        self._commands: list[events.Command] = []
        self._now_s = 0.0

    def handle(self, event: events.Event, now_s: float) -> list[events.Command]:
        """Handle an event at `now_s` (monotonic seconds), and return commands in order."""
        self._now_s = now_s
        match event:
            case events.Submitted(ticket):
                self._submit(ticket)
            case events.Withdrawn(ticket):
                self._withdraw(ticket)
            case events.DevicesLost(why):
                self.lost = why
                for ticket in tuple(self.known.waiting.values()):
                    self._refuse(ticket.request, DeviceError(why))
                self.dirty = True
            case events.Attached(ticket, pid):
                self._do(events.SetProcess(ticket.request.id, pid))
                if self._settings.remote:
                    self.known.view.compute_again(ticket.devices)
            case events.BodyBegan(ticket):
                self._do(events.MarkRunning(ticket.request.id))
            case events.Ended(ticket):
                self._end(ticket)
            case events.MovingOut(ticket):
                # If the suspension is not wanted any more, the process is told to resume.
                ticket.held_back = True
                self.dirty = True
            case events.NotMoved(ticket, refused):
                ticket.held_back = ticket.held_back and not refused
                budgets, ticket.learned = ticket.learned, None
                if budgets is not None:
                    self._learn(ticket, budgets)
            case events.NeedLearned(ticket, budgets):
                self._learn(ticket, budgets)
            case events.Read(reading):
                self._read(reading)
            case events.Rows(ledger, changes):
                self._take_rows(ledger, changes)
            case events.LedgerChanged():
                if self.known.waiting:
                    # The last reading may show memory of a process that was just released elsewhere.
                    self._do(events.ReadDevices())
                self.dirty = True
            case events.Waits(since_s):
                self.known.waits_since_s = since_s
            case events.Tick():
                self._tick()
            case events.ScheduleDue():
                self._schedule()
            case events.SuspensionsDue():
                self._ask_for_memory()
            case events.Appended(plan, done):
                if done:
                    self._carry_out(plan)
                else:
                    self._plan()
            case _:
                assert_never(event)
        # After an error: with the commands of the earlier event.
        commands, self._commands = self._commands, []
        return commands

    def _do(self, command: events.Command) -> None:
        self._commands.append(command)

    # Requests.

    def _submit(self, ticket: Ticket) -> None:
        if self.lost:
            self._do(events.Decide(ticket, error=DeviceError(self.lost)))
            return
        request = ticket.request
        self.known.queue.add(request)
        self.known.waiting[request.id] = ticket
        self.known.unwritten[request.id] = request
        self.dirty = True

    def _withdraw(self, ticket: Ticket) -> None:
        if self.known.remove(ticket.request) is None:
            self._end(ticket)
            return
        # The withdrawn request may have blocked others.
        self._do(events.Release(ticket.request.id))
        self.dirty = True

    def _refuse(self, request: Request, error: PrefectGPUError) -> None:
        """Remove a request that can never be placed from the queue, and give its ticket the error."""
        ticket = self.known.remove(request)
        if ticket is None:
            return
        if ticket.pid is None:
            self._do(events.Decide(ticket, error=error))
            self._do(events.Release(request.id))
            return
        # A suspended process: parked until its end.
        self.known.parked[request.id] = ticket
        self._do(events.TellNoReturn(ticket, error))

    def _end(self, ticket: Ticket) -> None:
        known, request_id = self.known, ticket.request.id
        suspended = known.parked.pop(request_id, None)
        if suspended is None and ticket.pid is not None:
            suspended = known.remove(ticket.request)
        if suspended is None and known.placed.pop(request_id, None) is None:
            return
        ticket.ended_s = self._now_s
        ticket.ended_pid, ticket.pid = ticket.pid, None
        if ticket.ended_pid is None:
            # No process ever came: no memory is missing.
            self._do(events.Release(request_id, ticket, 0))
        else:
            known.recovery.begin(ticket, ticket.ended_s)
        self.dirty = True

    def _learn(self, ticket: Ticket, budgets: Mapping[str, int]) -> None:
        """Count a probe at its task's need, except on a cluster, where the node would refuse tasks beside it."""
        placement = ticket.placement
        if placement is None or self._settings.remote:
            return
        # The learned budget may be too little to resume with, so the probe is not suspended any more.
        ticket.may_leave = False
        if ticket.held_back or ticket.away_s is not None:
            # A process that is suspended, or about to be, resumes with its old reservation.
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
            self._do(events.Lower(ticket.request.id, lowered))
            self.dirty = True

    # Readings.

    def _tick(self) -> None:
        known = self.known
        given_up, notes = known.recovery.give_up(
            self._now_s, known.view.reading, known.placed.values()
        )
        self._log(notes)
        self._release_all(given_up)
        if known.recovery.poll(self._now_s):
            self._do(events.ReadDevices())

    def _read(self, reading: Reading) -> None:
        known = self.known
        self.dirty = True
        if known.recovery.ending:
            known.recovery.suspended = sum(entry.away for entry in known.running.values())
        known.view.take(reading, self._now_s)
        if known.view.devices is not known.devices:
            known.set_devices(known.view.devices)
            # Requests of other brokers are restricted to the devices of this one.
            self._take_queue({each: known.entries.get(each) for each in known.elsewhere})
        self._wants_reading = False
        if reading.error:
            return
        known.states()
        self._write_held_bytes()
        self._note_neighbours(known.devices)
        for request_id, ticket in known.placed.items():
            if ticket.pid is not None and ticket.on_measured is not None:
                measured = tuple(
                    Measured(
                        known.view.measured_bytes(request_id, device),
                        known.view.measured_by_pid(ticket.pid, device),
                    )
                    for device in ticket.devices
                )
                self._do(events.TellMeasured(ticket, reading.at_s, measured))
        self._make_probes_leave()
        set_aside, notes = known.view.compare(reading)
        self._log(notes)
        for device, why in set_aside:
            self._do(events.SetAside(device, why))
        self._release_all(known.recovery.check(reading, known.placed.values()))

    def _log(self, notes: Iterable[Note]) -> None:
        for note in notes:
            self._do(events.Log(note))

    def _release_all(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._do(events.Release(ticket.request.id, ticket, ticket.missing_bytes))

    def _make_probes_leave(self) -> None:
        """End or suspend own probes that must leave their devices by the last reading."""
        known = self.known
        fixed = {i for i, ticket in known.placed.items() if not ticket.may_leave}
        asked = False
        leaving_probes = known.view.probes_to_leave(known.running, known.ledger.silent, fixed)
        for leaving, device in leaving_probes:
            probe = known.placed.get(leaving.request_id)
            if probe is None:
                continue
            if not leaving.ends and not asked:
                asked = True
                self._do(events.Rewrite(leaving.request_id, ask_to_leave))
            elif leaving.ends:
                self._do(events.TellShort(probe, device))

    def _note_neighbours(self, devices: Sequence[Device]) -> None:
        """Note the tasks that share a device. Devices without new reservations since the last call are skipped."""
        known = self.known
        for device in devices:
            held = known.ledger.by_device.get(device.key, ())
            if held is self._noted.get(device.key, ()):
                continue
            self._noted[device.key] = held
            for at, ticket in enumerate([known.placed.get(r.request_id) for r in held]):
                if ticket is None:
                    continue
                for other in (*held[:at], *held[at + 1 :]):
                    entry = known.entries.get(other.request_id)
                    own = entry is not None and entry.owner == known.ledger.owner
                    name = other.task_name if own else f"{other.task_name} (another flow)"
                    ticket.add_neighbour(name)

    def _write_held_bytes(self) -> None:
        """Write memory of own processes to the ledger, where others cannot identify them by process id."""
        known = self.known
        if all(device.attributed for device in known.devices) and not known.ledger.held_bytes:
            return
        for request_id, ticket in known.placed.items():
            entry = known.entries.get(request_id)
            if entry is None or entry.pid is None:
                continue
            held = {d.key: known.view.measured_bytes(request_id, d) for d in ticket.devices}
            taken = tuple(held.get(key, 0) for key in entry.devices)
            told = entry.held_bytes or (0,) * len(taken)
            if any(abs(new - old) >= HELD_STEP_BYTES for new, old in zip(taken, told, strict=True)):
                self._do(events.SetHeldBytes(request_id, taken))

    # The ledger.

    def _take_rows(self, ledger: LedgerView, changes: Changes) -> None:
        self.known.ledger = ledger
        self._take_queue(self.known.take_entries(changes))
        self._note_neighbours(self.known.devices)

    def _take_queue(self, changes: Changes) -> None:
        """Apply changes of waiting requests in the ledger to the queue."""
        known = self.known
        for request_id, entry in changes.items():
            own = known.placed.get(request_id) or known.parked.get(request_id)
            if own is not None:
                if entry is not None:
                    self._take_suspended(own, entry)
            elif request_id in known.waiting:
                # Other brokers count how often they have passed it.
                if entry is not None:
                    known.take_status(entry)
                    if entry.held_back:
                        self._take_suspended(known.waiting[request_id], entry)
            else:
                known.take_elsewhere(request_id, entry)

    def _take_suspended(self, ticket: Ticket, entry: Entry) -> None:
        """Note that a suspended process has no device: it waits to resume, or is parked if a person holds it back."""
        known, request_id = self.known, entry.request.id
        if ticket.away_s is None:
            ticket.away_s = self._now_s
            if ticket.priority is None:
                ticket.priority = entry.request.priority
            # It is told to resume once it has a device.
            ticket.held_back = True
        known.placed.pop(request_id, None)
        known.parked.pop(request_id, None)
        known.remove(ticket.request)
        ticket.request = entry.request
        if entry.held_back:
            known.parked[request_id] = ticket
        else:
            known.waiting[request_id] = ticket
            known.queue.add(ticket.request)
        self.dirty = True

    # Decisions.

    def _schedule(self) -> None:
        """Make one scheduling pass; without effect if nothing has changed."""
        if not self.dirty:
            return
        self.dirty = False
        known = self.known
        reading = known.view.reading
        if not known.waiting:
            self._read_after_s = None
        elif reading is None or not known.view.is_fresh(self._now_s):
            self._want_reading()
        elif not reading.error:
            if self._is_outdated(reading):
                self._want_reading()
            else:
                self._plan()
                return
        self._sample()

    def _sample(self) -> None:
        """Have the devices read at intervals while anything depends on readings."""
        known = self.known
        follows = known.waiting or known.placed or known.parked or known.recovery.ending
        self._do(events.SampleDevices(active=bool(follows or self.watched)))

    def _want_reading(self) -> None:
        """Ask for a reading for a pass, unless one is already requested."""
        if not self._wants_reading:
            self._do(events.ReadDevices())
            self._wants_reading = True

    def _is_outdated(self, reading: Reading) -> bool:
        """Return whether a reading may show memory as taken that another process has released since."""
        # A pass on it would give the rest of a device to a small request, although the large one before it fits. A
        # reading that began after the release which put the pass off is enough: others release memory all the time.
        freed_s = self.known.ledger.freed_s
        if self._read_after_s is None and reading.at_s < freed_s:
            self._read_after_s = freed_s
        if self._read_after_s is not None and reading.at_s < self._read_after_s:
            return True
        self._read_after_s = None
        return False

    def _plan(self) -> None:
        reading = self.known.view.reading
        assert reading is not None
        plan = make_plan(self.known, reading, self._now_s)
        if plan.changes:
            self._do(events.Append(plan))
        else:
            self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        """Apply a plan, once it is in the ledger."""
        known = self.known
        reading = known.view.reading
        assert reading is not None
        known.unwritten.clear()
        self.dirty = self.dirty or plan.again
        if plan.suspends:
            self._do(events.Announce())
        known.queue.statuses.update(
            (i, status) for i, status in plan.statuses.items() if i in known.waiting
        )
        for request, error in plan.refusals:
            self._refuse(request, error)
        for request, placement in plan.made:
            ticket = known.placed[request.id] = known.waiting[request.id]
            known.remove(request)
            if ticket.away_s is None:
                ticket.placed_s = self._now_s
            else:
                ticket.was_away_s += self._now_s - ticket.away_s
            ticket.away_s = None
            ticket.placement = placement
            known.recovery.take_baseline(ticket, reading)
            ticket.foreign_before = {
                device.key: plan.foreign_bytes[device.key] for device in placement.devices
            }
            self._do(events.Decide(ticket, placement))
        self._sample()

    def _ask_for_memory(self) -> None:
        """Tell tickets to suspend their processes, for a person or another request, or to resume them."""
        known = self.known
        if self._settings.remote:
            # There may be tens of thousands of tickets, and no task of a cluster is suspended.
            return
        for request_id, ticket in known.placed.items():
            entry = known.entries.get(request_id)
            if entry is not None and ticket.on_held_back is not None and ticket.pid is not None:
                self._ask(ticket, entry)
        for ticket in tuple(known.waiting.values()):
            if ticket.away_s is not None:
                self._age(ticket, ticket.was_away_s + self._now_s - ticket.away_s)

    def _ask(self, ticket: Ticket, entry: Entry) -> None:
        known, request_id = self.known, entry.request.id
        if entry.suspended_for:
            asker = known.entries.get(entry.suspended_for)
            if asker is None or asker.reservations or asker.owner in known.ledger.silent:
                # The asker waits no longer, has found another device, or its flow was stopped.
                self._do(events.Rewrite(request_id, withdraw))
                return
            ticket.held_back_for = f"task {asker.request.task_name!r}"
        elif entry.held_back:
            ticket.held_back_for = BY_HAND
            if entry.shared and entry.away:
                if not ticket.held_back:
                    # The process is resuming.
                    self._hold_back(ticket, True)
                self._leave_device(request_id, share)
                return
        elif entry.leaves:
            ticket.held_back_for = FOR_FIRST_RUNS
            if entry.away:
                self._leave_device(request_id, leave)
                return
        away = entry.held_back or entry.leaves or bool(entry.suspended_for)
        # A process that has just left its device resumes once it has a device again.
        if (away or entry.reservations) and away != ticket.held_back:
            self._hold_back(ticket, away)

    def _hold_back(self, ticket: Ticket, away: bool) -> None:
        ticket.held_back = away
        self._do(events.TellHeldBack(ticket, away))

    def _leave_device(self, request_id: str, how: Callable[..., Entry]) -> None:
        """Put the request of a suspended process back into the queue, by `preempting.share` or `preempting.leave`."""
        change = partial(how, devices=self.known.devices_by_key, now_s=self._now_s)
        self._do(events.Rewrite(request_id, change))

    def _age(self, ticket: Ticket, away_s: float) -> None:
        """Raise the priority of a suspended process that has waited long to resume."""
        assert ticket.priority is not None
        queue = self.known.queue
        priority = aged_priority(replace(ticket.request, priority=ticket.priority), away_s)
        if priority != ticket.request.priority:
            status = queue.statuses.get(ticket.request.id)
            queue.remove(ticket.request)
            request = ticket.request = replace(ticket.request, priority=priority)
            queue.add(request)
            if status is not None:
                queue.statuses[request.id] = status
            self._do(events.Rewrite(request.id, lambda entry: replace(entry, request=request)))
