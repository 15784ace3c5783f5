"""Devices of a machine and requests for them, as one flow process knows them.

`machine` changes the state, event by event; `planning` decides on it. It has own requests by phase, requests of other
flows and the ledger as last read, from which it computes device states and the host resources left. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from prefect_gpu.broker.device_view import DeviceView, RecoveryWatch
from prefect_gpu.broker.ledger import Entry, LedgerView
from prefect_gpu.broker.phases import WITH_DEVICES, Phase, Trigger, next_phase
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.scheduling.backfill import BlockedStatus, Patience
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKey,
    DeviceKind,
    DeviceSnapshot,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.placement import PlacementStyle, select_devices
from prefect_gpu.scheduling.scheduling_pass import ClusterState, HostState, RequestQueue


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Constants of a machine; see `Broker`."""

    kind: DeviceKind
    style: PlacementStyle
    max_processes: int
    max_tasks_per_device: int | None
    headroom_bytes: int
    patience: Patience
    preempts: bool
    around: tuple[Reservation, ...]
    ancestors: tuple[str, ...]
    #: The devices are those of a cluster's nodes, whose own brokers know the processes there.
    remote: bool
    #: Process id of this process.
    own_pid: int
    #: Number of the broker in this process, for the ledger.
    broker: int


class MachineState:
    """Current requests, devices and ledger. `devices` are all devices before the first reading."""

    def __init__(
        self, settings: MachineSettings, devices: tuple[Device, ...], ledger: LedgerView
    ) -> None:
        self.settings = settings
        #: Waiting requests of this broker, and of other brokers for the same devices.
        self.queue = RequestQueue()
        # Own requests by id: all that are not gone, those in the queue, and those with devices and no ended process.
        self.own: dict[str, Ticket] = {}
        self.waiting: dict[str, Ticket] = {}
        self.placed: dict[str, Ticket] = {}
        #: Own requests that are not in the ledger yet.
        self.unwritten: dict[str, Request] = {}
        #: By request id: requests of other brokers in the queue.
        self.elsewhere: dict[str, Request] = {}
        #: By origin: process limit of another broker, and monotonic seconds since when its requests seem to fit and do
        #: not start.
        self.most_processes: dict[str, int] = {}
        self.passive_s: dict[str, float] = {}
        #: Own requests whose process has ended.
        self.recovery = RecoveryWatch()
        #: The ledger as last read, all its entries, and the entries of tasks with devices or suspended.
        self.ledger = ledger
        self.entries: dict[str, Entry] = {}
        self.running: dict[str, Entry] = {}
        self.view = DeviceView(
            devices, settings.kind, settings.headroom_bytes, settings.around, settings.own_pid
        )
        #: Request about to be refused as hopeless, and the time of the reading that first showed it.
        self.hopeless: tuple[str, float] | None = None
        #: Monotonic seconds since when the task around this process waits for tasks that it submitted; `None`: it runs.
        self.waits_since_s: float | None = None
        self.set_devices(devices)

    def set_devices(self, devices: tuple[Device, ...]) -> None:
        """Replace the devices."""
        #: Devices of the last good reading, on which tasks may be placed.
        self.devices = devices
        #: Node by device.
        self.node_of = {device.key: device.host for device in devices}
        #: Keys of the devices, which the entries of all requests for any device share.
        self.device_keys: tuple[DeviceKey, ...] = tuple(self.node_of)

    def states(self, ledger: LedgerView | None = None) -> list[DeviceState]:
        """Return the device states at the last reading, less the reservations of a ledger (`None`: the current one)."""
        return self.view.states(ledger or self.ledger, self.placed, self.recovery.ending.values())

    def host_state(self, reading: Reading) -> HostState | ClusterState:
        """Return the resources left for processes of the machine, or of each node of a cluster."""
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
        return ClusterState(nodes, len(self.placed), most)

    def entry_of(self, request: Request) -> Entry:
        """Return the ledger's entry of an own request that is not in the ledger yet."""
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
        """Change the phase of an own request, and return its earlier phase."""
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

    def add(self, ticket: Ticket) -> None:
        """Put an own request into the queue."""
        self.own[ticket.request.id] = self.waiting[ticket.request.id] = ticket
        self.queue.add(ticket.request)

    def take_entries(self, changes: Mapping[str, Entry | None]) -> dict[str, Entry | None]:
        """Apply changes of entries; return those of requests that wait now, or waited before (`None`)."""
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
        """Note that a request of another broker waits; `None`: it waits no longer."""
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
        """Copy a waiting request's status from its entry: how many later requests overtook it, and the devices reserved for it."""
        if entry.status != BlockedStatus():
            self.queue.statuses[entry.request.id] = entry.status

    def _seen_from_here(self, entry: Entry) -> Request | None:
        """Return another broker's request, restricted to own devices; `None`: it uses none of them."""
        if entry.held_back:
            # A suspended process that does not ask to resume.
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
        """Remove an own request from the queue, if it is there."""
        if self.waiting.pop(ticket.request.id, None) is not None:
            self.queue.remove(ticket.request)
            self.unwritten.pop(ticket.request.id, None)
