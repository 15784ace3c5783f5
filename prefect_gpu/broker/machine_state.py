"""What one flow process knows of the devices of a machine and of the requests for them.

`machine` changes it, event by event; `planning` decides on it. It covers the own requests by their phase, those of other
flows, the ledger as last read, and what follows from these: the state of each device, and what the machine's own memory
has left. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from prefect_gpu.broker.device_view import DeviceView, RecoveryWatch
from prefect_gpu.broker.ledger import Entry, LedgerView
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
    """What stays the same for the life of a machine; see `Broker`."""

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
    #: Of this process.
    own_pid: int
    #: Number of the broker in this process, for the ledger.
    broker: int


class MachineState:
    """Requests, devices and the ledger, as known now.

    Args:
        settings: What stays the same.
        devices: All devices, before the first reading.
        ledger: The ledger.
    """

    def __init__(
        self, settings: MachineSettings, devices: tuple[Device, ...], ledger: LedgerView
    ) -> None:
        self.settings = settings
        #: The waiting requests of this broker, and those of other brokers for the same devices.
        self.queue = RequestQueue()
        # Own requests by id; each is in one of these.
        self.waiting: dict[str, Ticket] = {}
        self.placed: dict[str, Ticket] = {}
        #: Suspended ones that have no device and do not ask for one.
        self.parked: dict[str, Ticket] = {}
        #: Own requests that are not in the ledger yet.
        self.unwritten: dict[str, Request] = {}
        #: By request id: requests of other brokers in the queue.
        self.elsewhere: dict[str, Request] = {}
        #: By origin: the limit of processes of another broker, and the monotonic time in seconds since which its
        #: requests seem to fit and do not start.
        self.most_processes: dict[str, int] = {}
        self.passive_s: dict[str, float] = {}
        #: Own requests whose process has ended.
        self.recovery = RecoveryWatch()
        #: The ledger as last read: its reservations, all its entries, and those of tasks that have devices or are suspended.
        self.ledger = ledger
        self.entries: dict[str, Entry] = {}
        self.running: dict[str, Entry] = {}
        self.view = DeviceView(
            devices, settings.kind, settings.headroom_bytes, settings.around, settings.own_pid
        )
        #: The request that is about to be refused as hopeless, and the time of the reading that first showed it.
        self.hopeless: tuple[str, float] | None = None
        #: Monotonic seconds since when the body of the task around this process waits for tasks that it has submitted;
        #: `None`: it does not wait.
        self.waits_since_s: float | None = None
        self.set_devices(devices)

    def set_devices(self, devices: tuple[Device, ...]) -> None:
        """Use other devices from now on."""
        #: Devices that tasks may be placed on: those of the last good reading.
        self.devices = devices
        #: The node of each.
        self.node_of = {device.key: device.host for device in devices}
        #: Their keys, which the entries of all requests for any device share.
        self.device_keys: tuple[DeviceKey, ...] = tuple(self.node_of)

    @property
    def devices_by_key(self) -> dict[DeviceKey, Device]:
        """The devices that tasks may be placed on."""
        return {device.key: device for device in self.devices}

    def states(self, ledger: LedgerView | None = None) -> list[DeviceState]:
        """Return what each device has free at the last reading, less the reservations (`None`: those of now)."""
        return self.view.states(ledger or self.ledger, self.placed, self.recovery.ending)

    def host_state(self, reading: Reading) -> HostState | ClusterState:
        """Return what the machine, or each node of a cluster, has left for processes."""
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
        """Return the ledger's entry of an own request that is not in it yet."""
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

    def take_entries(self, changes: Mapping[str, Entry | None]) -> dict[str, Entry | None]:
        """Note changes of the ledger's entries.

        Returns:
            Those of requests that wait now (an entry) or waited before (`None`).
        """
        of_queue: dict[str, Entry | None] = {}
        for request_id, entry in changes.items():
            before = self.entries.pop(request_id, None)
            self.running.pop(request_id, None)
            if entry is not None:
                self.entries[request_id] = entry
                if entry.runs:
                    self.running[request_id] = entry
            if entry is not None and not entry.reservations:
                of_queue[request_id] = entry
            elif before is not None and not before.reservations:
                of_queue[request_id] = None
        return of_queue

    def take_elsewhere(self, request_id: str, entry: Entry | None) -> None:
        """Note that a request of another broker waits now; `None`: it waits no longer."""
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
        """Note how often a request was passed, and which devices are kept for it."""
        if entry.status != BlockedStatus():
            self.queue.statuses[entry.request.id] = entry.status

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

    def remove(self, request: Request) -> Ticket | None:
        """Remove an own waiting request; return its ticket, `None`: it does not wait."""
        ticket = self.waiting.pop(request.id, None)
        if ticket is not None:
            self.queue.remove(request)
            self.unwritten.pop(request.id, None)
        return ticket

    def reserved_around(self, states: Iterable[DeviceState]) -> list[Reservation]:
        """Return what the GPU tasks around this process have reserved."""
        around = self.settings.ancestors
        if not around:
            return []
        return [r for s in states for r in s.reservations if r.request_id in around]
