"""Devices of a machine and requests for them, as one broker knows them.

`machine` changes the state, event by event; `planning` makes decisions on it. The state has the broker's own requests by
phase, requests of other brokers, and the ledger as last read; device states and free host resources are computed. Pure.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from prefect_gpu.broker.device_view import DeviceView, RecoveryWatch
from prefect_gpu.broker.ledger import Entry, LedgerView
from prefect_gpu.broker.phases import WITH_DEVICES, Phase, Trigger, next_phase
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.scheduling.backfill import BlockedStatus, Patience
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import (
    NEVER_BYTES,
    Device,
    DeviceKey,
    DeviceKind,
    DeviceSnapshot,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.placement import PlacementStyle, select_devices
from prefect_gpu.scheduling.scheduling_pass import HostState, RequestQueue


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Constants of a machine. Fields without a comment are arguments of `Broker`."""

    kind: DeviceKind
    style: PlacementStyle
    max_processes: int
    max_tasks_per_device: int | None
    headroom_bytes: int
    patience: Patience
    preempts: bool
    around: tuple[Reservation, ...]
    ancestors: tuple[str, ...]
    #: Whether the devices are on the nodes of a cluster, whose own brokers know the processes there.
    remote: bool
    own_pid: int
    #: Number of the broker in this process, for the ledger.
    broker: int


class MachineState:
    """Requests, devices and ledger as one broker knows them. An *own* request was submitted to this broker.

    `devices` are used until the first reading.
    """

    def __init__(
        self, settings: MachineSettings, devices: tuple[Device, ...], ledger: LedgerView
    ) -> None:
        self.settings = settings
        #: Waiting requests of this broker, and of other brokers for the same devices.
        self.queue = RequestQueue()
        #: Own task runs (`Request.sequence`) that will make a request, in order, and own requests in the phase `OPEN`.
        self.to_come: list[int] = []
        self.open: dict[str, Ticket] = {}
        #: The latter as (sequence, id), in order, in groups of which none may join the queue if the first may not.
        self.open_groups: dict[Hashable, list[tuple[int, str]]] = {}
        #: Sequence numbers of open requests that wait for earlier task runs, in order, and monotonic seconds since when.
        self.held: list[tuple[int, float]] = []
        #: By task run (`Request.sequence`): last admitted request of a first run whose run is not kept yet.
        self.first_runs: dict[int, Ticket] = {}
        #: By history: number of the last event `Kept` that shows a need.
        self.learned: dict[HistoryKey, int] = {}
        # Own requests by id: all except open and gone ones; in the queue; with devices and no ended process.
        self.own: dict[str, Ticket] = {}
        self.waiting: dict[str, Ticket] = {}
        self.placed: dict[str, Ticket] = {}
        #: Own requests that are not in the ledger yet.
        self.unwritten: dict[str, Request] = {}
        #: By request id: requests of other brokers in the queue.
        self.elsewhere: dict[str, Request] = {}
        #: By broker (`Entry.origin`): process limit; monotonic seconds since when requests seem to fit but do not start.
        self.most_processes: dict[str, int] = {}
        self.passive_s: dict[str, float] = {}
        #: Own requests whose process has ended.
        self.recovery = RecoveryWatch()
        #: The ledger as last read, all its entries, and the entries of placed and suspended requests.
        self.ledger = ledger
        self.entries: dict[str, Entry] = {}
        self.running: dict[str, Entry] = {}
        self.view = DeviceView(
            devices, settings.kind, settings.headroom_bytes, settings.around, settings.own_pid
        )
        #: Id of a request to be refused as hopeless (see `nested`), and time of the first reading that showed this.
        self.hopeless: tuple[str, float] | None = None
        #: Monotonic seconds since when the GPU task that this process runs inside waits for its tasks; `None`: no wait.
        self.waits_since_s: float | None = None
        self.set_devices(devices)

    def set_devices(self, devices: tuple[Device, ...]) -> None:
        """Replace the devices on which tasks may be placed."""
        self.devices = devices
        self.node_of = {device.key: device.host for device in devices}
        #: Keys of the devices: one object, shared by the entries of all requests for any device.
        self.device_keys: tuple[DeviceKey, ...] = tuple(self.node_of)

    def states(self, ledger: LedgerView | None = None) -> list[DeviceState]:
        """Return the device states by the last reading and the reservations in `ledger` (`None`: as last read)."""
        return self.view.states(ledger or self.ledger, self.placed, self.recovery.ending.values())

    def host_state(self, reading: Reading) -> HostState:
        """Return the host resources left for new processes, on the machine or on each node of a cluster."""
        most = self.settings.max_processes
        if not reading.nodes:
            return HostState(
                available_bytes=reading.host_available_bytes,
                reserved_bytes=self.ledger.host_promised_bytes,
                processes=len(self.placed),
                max_processes=most,
                all_processes=self.ledger.tasks,
            )
        tasks, promised_bytes = Counter[str](), Counter[str]()
        for key, use in self.ledger.host_use.items():
            if key in self.node_of:
                tasks[self.node_of[key]] += use.tasks
                promised_bytes[self.node_of[key]] += use.promised_bytes
        own = Counter(ticket.devices[0].host for ticket in self.placed.values())
        nodes = {
            name: HostState(
                node.available_bytes,
                promised_bytes[name],
                own[name],
                most if node.max_processes is None else node.max_processes,
                tasks[name],
            )
            for name, node in reading.nodes.items()
        }
        return HostState(NEVER_BYTES, 0, len(self.placed), most, nodes=nodes)

    def entry_of(self, request: Request) -> Entry:
        """Return a first ledger entry for an own request."""
        keys, named = self.device_keys, tuple[str, ...]()
        if request.devices or request.nodes:
            states = [DeviceState(DeviceSnapshot(each, 0.0, 0), 0, 0, 0) for each in self.devices]
            devices = [state.device for state in select_devices(request, states)]
            keys = tuple(device.key for device in devices)
            named = tuple(device.uuid for device in devices)
        # Other brokers may know the nodes by other names.
        return Entry(
            replace(request, devices=named, nodes=()),
            broker=self.settings.broker,
            devices=keys,
            max_processes=self.settings.max_processes,
        )

    # The queue.

    def advance(self, ticket: Ticket, trigger: Trigger) -> Phase:
        """Change the phase of an own request by a trigger, and return the earlier phase."""
        before, request_id = ticket.phase, ticket.request.id
        ticket.phase = next_phase(before, trigger, ticket.triggers)
        ticket.triggers.append(trigger)
        if ticket.phase in WITH_DEVICES:
            self.placed[request_id] = ticket
        else:
            self.placed.pop(request_id, None)
        if ticket.phase is Phase.GONE:
            self.own.pop(request_id, None)
        return before

    def leave(self, sequence: int) -> None:
        """Remove a task run from `to_come`, if it is there."""
        at = bisect.bisect_left(self.to_come, sequence)
        if self.to_come[at : at + 1] == [sequence]:
            del self.to_come[at]

    def open_request(self, ticket: Ticket) -> None:
        """Add an own request in the phase `OPEN`."""
        request, histories = ticket.request, tuple(sorted(ticket.histories.items()))
        # The next process of a first run does not wait for itself.
        own = request.sequence if request.sequence in self.first_runs else None
        ticket.group = histories, request.devices, request.nodes, own
        self.open[request.id] = ticket
        members = self.open_groups.setdefault(ticket.group, [])
        bisect.insort(members, (request.sequence, request.id))

    def close(self, ticket: Ticket) -> None:
        """Remove an own request from the open ones, if it is there."""
        request = ticket.request
        if self.open.pop(request.id, None) is not None:
            members = self.open_groups[ticket.group]
            del members[bisect.bisect_left(members, (request.sequence, request.id))]
            if not members:
                del self.open_groups[ticket.group]

    def add(self, ticket: Ticket) -> None:
        """Put an own request into the queue."""
        self.own[ticket.request.id] = self.waiting[ticket.request.id] = ticket
        self.queue.add(ticket.request)

    def take_entries(self, changes: Mapping[str, Entry | None]) -> dict[str, Entry | None]:
        """Apply changed entries, and return the queue's changes: a waiting entry, or `None` where it waits no more."""
        of_queue: dict[str, Entry | None] = {}
        for request_id, entry in changes.items():
            before = self.entries.pop(request_id, None)
            self.running.pop(request_id, None)
            if entry is not None:
                self.entries[request_id] = entry
                if entry.runs:
                    self.running[request_id] = entry
                own = self.own.get(request_id)
                if own and (own.phase, entry.phase) == (Phase.AWAY, Phase.RETURNING):
                    self.advance(own, Trigger.MOVING_IN)
            if entry is not None and not entry.reservations:
                of_queue[request_id] = entry
            elif before is not None and not before.reservations:
                of_queue[request_id] = None
        return of_queue

    def take_elsewhere(self, request_id: str, entry: Entry | None) -> None:
        """Add or replace a waiting request of another broker in the queue; without an entry, remove the request."""
        known = self.elsewhere.pop(request_id, None)
        if known is not None:
            self.queue.remove(known)
            if entry is None:
                self.passive_s.pop(known.origin, None)
        request = None if entry is None else self._seen_from_here(entry)
        if entry is not None and request is not None:
            self.elsewhere[request_id] = request
            self.queue.add(request)
            self.take_status(entry)
            self.most_processes[request.origin] = entry.max_processes

    def take_status(self, entry: Entry) -> None:
        """Copy a request's status to the queue: how often later requests were placed first, and the devices kept for it."""
        if entry.status != BlockedStatus():
            self.queue.statuses[entry.request.id] = entry.status

    def _seen_from_here(self, entry: Entry) -> Request | None:
        """Return another broker's request, restricted to this broker's devices; `None`: it does not compete for them."""
        if entry.held_back:
            # A person has suspended the process: it does not ask to resume.
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

    def remove(self, ticket: Ticket) -> None:
        """Remove an own request from the queue, or from the open ones, if it is there."""
        self.close(ticket)
        if self.waiting.pop(ticket.request.id, None) is not None:
            self.queue.remove(ticket.request)
            self.unwritten.pop(ticket.request.id, None)
