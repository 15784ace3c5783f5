"""The state machine of a broker: events go in, commands come out.

`Machine.handle` takes one event and returns commands. Only this method changes the state and the phases of requests
(`phases`). A machine uses no thread, lock, clock, file or log: `broker` sends the events and carries out the commands.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from typing_extensions import assert_never

from prefect_gpu.broker import events, opening, preempting
from prefect_gpu.broker.ledger import Changes, Entry, LedgerView
from prefect_gpu.broker.machine_state import MachineSettings, MachineState
from prefect_gpu.broker.phases import Phase, Trigger, Wisher
from prefect_gpu.broker.planning import Plan, make_plan
from prefect_gpu.broker.ticket import (
    BY_HAND,
    FOR_FIRST_RUNS,
    MOST_NEIGHBOURS,
    Measured,
    NeedLearned,
    Ticket,
)
from prefect_gpu.errors import DeviceError, PrefectGPUError
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Device, Reading, Reservation
from prefect_gpu.scheduling.preemption import aged_priority
from prefect_gpu.units import MIB

#: Bytes by which a process's memory must change to be written to the ledger again, for flows in other containers.
HELD_STEP_BYTES = 64 * MIB


class Machine:
    """Makes the decisions of one broker about its machine's devices. `devices` are used until the first reading."""

    def __init__(
        self, settings: MachineSettings, devices: tuple[Device, ...], ledger: LedgerView
    ) -> None:
        #: State of the machine, changed only by `handle`.
        self.known = MachineState(settings, devices, ledger)
        #: Reason why the devices are lost for good; empty: they are not lost.
        self.lost = ""
        #: Whether the state has changed so that a request may start.
        self.dirty = False
        #: Whether a watcher wants readings although no request needs them.
        self.watched = False
        #: By device: reservations at the last call of `_note_neighbours`.
        self._noted: dict[object, tuple[Reservation, ...]] = {}
        #: Whether a reading was requested for a pass and has not arrived.
        self._wants_reading = False
        #: A pass waits for a reading that began at these monotonic seconds or later; `None`: no pass waits.
        self._read_after_s: float | None = None
        self._commands: list[events.Command] = []
        self._now_s = 0.0

    def handle(self, event: events.Event, now_s: float) -> list[events.Command]:
        """Handle an event at `now_s` (monotonic seconds), and return commands in order."""
        self._now_s = now_s
        match event:
            case events.Opened(sequence):
                bisect.insort(self.known.to_come, sequence)
            case events.Left(sequence):
                self.known.leave(sequence)
            case events.Submitted(ticket, histories, as_of):
                self._submit(ticket, histories, as_of)
            case events.Withdrawn(ticket):
                self._end(ticket, Trigger.WITHDRAWN)
            case events.DevicesLost(why):
                self.lost = why
                for ticket in (*self.known.open.values(), *self.known.waiting.values()):
                    self._refuse(ticket, DeviceError(why))
                self.dirty = True
            case events.Attached(ticket, pid):
                self.known.advance(ticket, Trigger.STARTED)
                change = partial(preempting.start, pid=pid)
                self._do(events.Rewrite(ticket.request.id, change, announces=False))
                if self.known.settings.remote:
                    self.known.view.compute_again(ticket.devices)
            case events.BodyBegan(ticket):
                change = partial(replace, running=True)
                self._do(events.Rewrite(ticket.request.id, change, announces=False))
            case events.Returned(ticket):
                self._claim_again(ticket)
            case events.Ended(ticket):
                self._end(ticket, Trigger.ENDED)
            case events.Moved(ticket, step, text):
                self._move(ticket, step, text)
            case events.Kept():
                self._take_kept(event)
            case events.Read(reading):
                self._read(reading)
            case events.Rows(ledger, changes):
                self._take_rows(ledger, changes)
            case events.LedgerChanged():
                if self.known.waiting:
                    # The last reading may include memory that another broker has just released.
                    self._do(events.ReadDevices())
                self.dirty = True
            case events.Waits(since_s):
                self._take_waits(since_s)
            case events.Tick():
                self._tick()
            case events.ScheduleDue():
                self._admit()
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
        # If an earlier event raised an error, its commands are included.
        commands, self._commands = self._commands, []
        return commands

    def _do(self, command: events.Command) -> None:
        self._commands.append(command)

    # Requests.

    def _submit(self, ticket: Ticket, histories: Mapping[str, HistoryKey], as_of: int) -> None:
        known = self.known
        known.leave(ticket.request.sequence)
        if self.lost:
            self._do(events.Decide(ticket, error=DeviceError(self.lost)))
        elif any(known.learned.get(key, 0) > as_of for key in histories.values()):
            self._do(events.Decide(ticket, error=NeedLearned()))
        else:
            ticket.histories = histories
            known.open_request(ticket)

    def _admit(self) -> None:
        """Let open requests join the queue."""
        known = self.known
        for ticket, request in opening.admit(known, self._now_s):
            known.advance(ticket, Trigger.ADMITTED)
            ticket.request = known.unwritten[request.id] = request
            known.add(ticket)
            self.dirty = True

    def _take_kept(self, kept: events.Kept) -> None:
        known = self.known
        if kept.over:
            known.first_runs.pop(kept.sequence, None)
        if not kept.shown:
            return
        known.learned |= dict.fromkeys(kept.shown, kept.number)
        for ticket in (*known.open.values(), *known.first_runs.values()):
            shown = {n: kept.shown[key] for n, key in ticket.histories.items() if key in kept.shown}
            if shown and ticket.phase in (Phase.OPEN, Phase.WAITING):
                self._refuse(ticket, NeedLearned())
            elif needs := {name: need for name, need in shown.items() if need is not None}:
                self._learn(ticket, needs)

    def _refuse(self, ticket: Ticket, error: PrefectGPUError | NeedLearned) -> None:
        """Remove a request that is not placed from the queue, and give its ticket the error."""
        self.known.remove(ticket)
        self.known.advance(ticket, Trigger.REJECTED)
        if ticket.phase is Phase.GONE:
            self._do(events.Decide(ticket, error=error))
            self._do(events.Release(ticket.request.id))
        elif isinstance(error, PrefectGPUError):
            # The request has a suspended process, which will be ended.
            self._do(events.TellNoReturn(ticket, error))

    def _end(self, ticket: Ticket, trigger: Trigger) -> None:
        known, request_id = self.known, ticket.request.id
        before = known.advance(ticket, trigger)
        if ticket.phase is before:
            return
        known.remove(ticket)
        self._claim_again(ticket)
        ticket.ended_s = self._now_s
        ticket.ended_pid, ticket.pid = ticket.pid, None
        if ticket.ended_pid is not None:
            known.recovery.begin(ticket, ticket.ended_s)
        else:
            # No memory is missing: no process was started, or only a calibration, whose end its caller has seen.
            if ticket.phase is Phase.ENDING:
                known.advance(ticket, Trigger.RECOVERED)
            placed = None if before in (Phase.OPEN, Phase.WAITING) else ticket
            self._do(events.Release(request_id, placed, 0))
        # A request may have blocked others, also while it waited.
        self.dirty = True

    def _claim_again(self, ticket: Ticket) -> None:
        """Let later first runs wait until the run of this process, whose outcome is known, is kept."""
        if ticket.placement is not None:
            ticket.claims = opening.claims(ticket.placement, ticket.histories, over=True)

    def _move(self, ticket: Ticket, step: Trigger, text: str) -> None:
        known, now_s = self.known, self._now_s
        if step is Trigger.MOVING_IN:
            # The newest entry decides: see `take_entries`.
            keys = tuple(device.key for device in ticket.devices)
            change = partial(preempting.resume, keys=keys, text=text, now_s=now_s)
            self._do(events.Rewrite(ticket.request.id, change, asks=ticket))
            return
        known.advance(ticket, step)
        if ticket.phase in (Phase.ENDING, Phase.GONE):
            return
        change = partial(preempting.move, step=step, text=text, now_s=now_s)
        self._do(events.Rewrite(ticket.request.id, change))
        if step is Trigger.MOVING_OUT:
            # If the suspension is not wanted any more, the process is told to resume.
            ticket.held_back = True
            self.dirty = True
        elif ticket.phase is Phase.RUNNING:
            ticket.held_back = ticket.held_back and step is not Trigger.NOT_MOVED
            budgets, ticket.learned = ticket.learned, None
            if budgets is not None:
                self._learn(ticket, budgets)

    def _learn(self, ticket: Ticket, budgets: Mapping[str, int]) -> None:
        """Lower a probe's reservations to its learned need, except on a cluster: the node would refuse tasks beside it."""
        placement = ticket.placement
        if placement is None or self.known.settings.remote:
            return
        # The probe is not suspended from now on: the learned budget may be too small to resume with.
        ticket.may_leave = False
        if ticket.held_back or ticket.phase not in (Phase.PLACED, Phase.RUNNING):
            # A process resumes with the reservation that it had before its suspension.
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
            self._do(
                events.Rewrite(ticket.request.id, partial(preempting.lower, reservations=lowered))
            )
            self.dirty = True

    # Readings.

    def _tick(self) -> None:
        known = self.known
        given_up, notes = known.recovery.give_up(
            self._now_s, known.view.reading, known.placed.values()
        )
        self._commands += map(events.Log, notes)
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
        self._note_neighbours()
        for request_id, ticket in known.placed.items():
            if ticket.pid is not None and ticket.on_measured is not None:
                measured = tuple(
                    Measured(
                        known.view.measured_bytes(request_id, device),
                        known.view.measured_by_pid(ticket.pid, device),
                        known.view.work(device),
                    )
                    for device in ticket.devices
                )
                self._do(events.TellMeasured(ticket, reading.at_s, measured))
        self._make_probes_leave()
        set_aside, notes = known.view.compare(reading)
        self._commands += map(events.Log, notes)
        for device, why in set_aside:
            self._do(events.SetAside(device, why))
        self._release_all(known.recovery.check(reading, known.placed.values()))

    def _release_all(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self.known.advance(ticket, Trigger.RECOVERED)
            self._do(events.Release(ticket.request.id, ticket, ticket.missing_bytes))

    def _make_probes_leave(self) -> None:
        """End or suspend own probes on devices that are short of memory by the last reading."""
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
                self._do(events.Rewrite(leaving.request_id, preempting.ask_to_leave))
            elif leaving.ends:
                self._do(events.TellShort(probe, device))

    def _note_neighbours(self) -> None:
        """Add to own tickets the names of other tasks on their devices, where reservations have changed."""
        known = self.known
        for device in known.devices:
            held = known.ledger.by_device.get(device.key, ())
            if held == self._noted.get(device.key, ()):
                continue
            self._noted[device.key] = held
            for at, ticket in enumerate([known.placed.get(r.request_id) for r in held]):
                if ticket is None:
                    continue
                for other in (*held[:at], *held[at + 1 :]):
                    entry = known.entries.get(other.request_id)
                    own = entry is not None and entry.owner == known.ledger.owner
                    name = other.task_name if own else f"{other.task_name} (another flow)"
                    if len(ticket.neighbours) < MOST_NEIGHBOURS:
                        ticket.neighbours[name] = None

    def _write_held_bytes(self) -> None:
        """Write the memory of own processes to the ledger where other flows cannot find them by process id."""
        known = self.known
        if all(device.attributed for device in known.devices):
            # Another container's flow may only wait: its requests show that it is there.
            if len({entry.namespace for entry in known.entries.values()}) < 2:
                return
        for request_id, ticket in known.placed.items():
            entry = known.entries.get(request_id)
            if entry is None or entry.pid is None:
                continue
            held = {d.key: known.view.measured_bytes(request_id, d) for d in ticket.devices}
            taken = tuple(held.get(key, 0) for key in entry.devices)
            told = entry.held_bytes or (0,) * len(taken)
            if any(abs(new - old) >= HELD_STEP_BYTES for new, old in zip(taken, told, strict=True)):
                change = partial(replace, held_bytes=taken)
                self._do(events.Rewrite(request_id, change, announces=False))

    # The ledger.

    def _take_rows(self, ledger: LedgerView, changes: Changes) -> None:
        self.known.ledger = ledger
        self._take_queue(self.known.take_entries(changes))
        self._note_neighbours()

    def _take_queue(self, changes: Changes) -> None:
        """Update the queue by changed ledger entries of requests without devices."""
        for request_id, entry in changes.items():
            own = self.known.own.get(request_id)
            if own is None:
                self.known.take_elsewhere(request_id, entry)
            elif entry is not None:
                self._take_own(own, entry)

    def _take_own(self, ticket: Ticket, entry: Entry) -> None:
        """Update an own ticket by its request's ledger entry, which has no devices."""
        known = self.known
        if entry.phase is Phase.RELEASED and ticket.phase is not Phase.RELEASED:
            known.advance(ticket, Trigger.RELEASED)
            if ticket.phase is Phase.ENDING:
                return
            ticket.away_s = self._now_s
            if ticket.priority is None:
                ticket.priority = entry.request.priority
            # The process is told to resume once its request has a device.
            ticket.held_back = True
        elif ticket.request.id in known.waiting and not entry.held_back:
            # Other brokers count how often they have placed later requests first.
            known.take_status(entry)
            return
        known.remove(ticket)
        ticket.request = entry.request
        if not entry.held_back:
            known.add(ticket)
        self.dirty = True

    def _take_waits(self, since_s: float | None) -> None:
        """Note since when the GPU task that this process runs inside waits, and write a change to the task's entry."""
        known, around = self.known, self.known.settings.ancestors
        if around and (since_s is None) != (known.waits_since_s is None):
            self._do(events.Rewrite(around[-1], partial(replace, waits=since_s is not None)))
        known.waits_since_s = since_s

    # Decisions.

    def _schedule(self) -> None:
        """If the state has changed, make a scheduling pass, or request the new reading that the pass needs."""
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
        """Start or stop readings at intervals, which own requests and watchers need."""
        known = self.known
        self._do(events.SampleDevices(active=bool(known.own or self.watched)))

    def _want_reading(self) -> None:
        if not self._wants_reading:
            self._do(events.ReadDevices())
            self._wants_reading = True

    def _is_outdated(self, reading: Reading) -> bool:
        """Return whether a reading may show memory as used that another process has released since."""
        # A pass on such a reading would give the rest of a device to a small request although an earlier large one fits.
        # The pass waits for a reading after the first such release only: others release memory all the time.
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
        """Apply a plan to the state, after its changes were written to the ledger."""
        known = self.known
        reading = known.view.reading
        assert reading is not None
        known.unwritten.clear()
        self.dirty = self.dirty or plan.again
        known.queue.statuses.update(
            (i, status) for i, status in plan.statuses.items() if i in known.waiting
        )
        for request, error in plan.refusals:
            if request.id in known.waiting:
                self._refuse(known.waiting[request.id], error)
        for request, placement in plan.made:
            ticket = known.waiting[request.id]
            known.remove(ticket)
            if known.advance(ticket, Trigger.PLACED) is Phase.RELEASED:
                ticket.was_away_s += self._now_s - ticket.away_s
            else:
                ticket.placed_s = self._now_s
                ticket.claims = opening.claims(placement, ticket.histories, over=False)
            ticket.placement = placement
            # Another first run of its history may be allowed now.
            self.dirty = self.dirty or bool(ticket.histories)
            known.recovery.take_baseline(ticket, reading)
            ticket.foreign_before = {
                device.key: plan.foreign_bytes[device.key] for device in placement.devices
            }
            self._do(events.Decide(ticket, placement))
        self._sample()

    def _ask_for_memory(self) -> None:
        """Tell this broker's tickets whether the ledger wants their processes suspended, or lets them resume."""
        known = self.known
        if known.settings.remote:
            # There may be tens of thousands of tickets, and no task of a cluster is suspended.
            return
        for request_id, ticket in known.placed.items():
            entry = known.entries.get(request_id)
            started = ticket.phase is not Phase.PLACED
            if entry is not None and ticket.on_held_back is not None and started:
                self._ask(ticket, entry)
        for ticket in tuple(known.waiting.values()):
            if ticket.phase is Phase.RELEASED:
                self._age(ticket, ticket.was_away_s + self._now_s - ticket.away_s)

    def _ask(self, ticket: Ticket, entry: Entry) -> None:
        known, request_id, wish = self.known, entry.request.id, entry.wish
        if wish is not None and wish.request_id is not None:
            asker = known.entries.get(wish.request_id)
            if asker is None or asker.reservations or asker.owner in known.ledger.silent:
                # The asking request was removed or placed, or its flow was stopped.
                self._do(events.Rewrite(request_id, partial(preempting.withdraw, wish=wish)))
                return
            ticket.held_back_for = f"task {asker.request.task_name!r}"
        elif wish is not None:
            ticket.held_back_for = BY_HAND if wish.by is Wisher.PERSON else FOR_FIRST_RUNS
        away = wish is not None
        # A process without a device resumes once its request has one again.
        if (away or entry.reservations) and away != ticket.held_back:
            ticket.held_back = away
            self._do(events.TellHeldBack(ticket, away))
        if wish is not None and wish.shared and entry.phase is Phase.AWAY:
            devices = {each.key: each for each in known.devices}
            change = partial(preempting.share, wish=wish, devices=devices, now_s=self._now_s)
            self._do(events.Rewrite(request_id, change))

    def _age(self, ticket: Ticket, away_s: float) -> None:
        """Raise a request's priority if its suspended process has waited long for a device (`away_s`)."""
        assert ticket.priority is not None
        queue = self.known.queue
        priority = aged_priority(replace(ticket.request, priority=ticket.priority), away_s)
        if priority != ticket.request.priority:
            status = queue.statuses.get(ticket.request.id)
            self.known.remove(ticket)
            request = ticket.request = replace(ticket.request, priority=priority)
            self.known.add(ticket)
            if status is not None:
                queue.statuses[request.id] = status
            self._do(events.Rewrite(request.id, partial(replace, request=request)))
