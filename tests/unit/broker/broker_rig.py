"""A broker on simulated devices and a clock that the test moves, and threads that wait for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.broker.broker import Broker, Ticket, next_sequence
from prefect_gpu.broker.events import Handle
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.machine import Machine
from prefect_gpu.clock import DEADLOCK_S, FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import (
    DeviceSnapshot,
    Placement,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.units import GIB
from tests.fakes.fake_devices import FakeDevices


class Reader(FakeDevices):
    """Does on demand what drivers do."""

    #: Called within each reading.
    during: Callable[[], object] = staticmethod(lambda: None)
    #: As in a container.
    lists_processes = True

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        self.during()
        snapshots = super().read(roots)
        if self.lists_processes:
            return snapshots
        return tuple(replace(snapshot, processes=()) for snapshot in snapshots)


class WatchedClock(FakeClock):
    """A clock that shows the waits of threads, and ends each thread that waits once it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False
        #: Name of each thread that has begun to wait, and its seconds.
        self.waits: queue.SimpleQueue[tuple[str, float | None]] = queue.SimpleQueue()

    def wait(self, condition: threading.Condition, until_s: float | None) -> bool:
        left_s = None if until_s is None else until_s - self.now()
        self.waits.put((threading.current_thread().name, left_s))
        in_time = not self.stopped and super().wait(condition, until_s)
        if self.stopped:
            raise SystemExit
        return in_time


class Rig:
    """A broker that is stepped, or (`threads=True`) works in its own threads until `stop`."""

    def __init__(self, devices: str = "1x24GiB", threads: bool = False, **of_broker: Any) -> None:
        self.threads = threads
        self.clock = WatchedClock()
        self.reader = Reader(SimulatedDevices(devices), self.clock)
        self.host_available_bytes = 64 * GIB
        self.ledger: Ledger = of_broker.pop("ledger", None) or Ledger()
        self.pids = iter(range(1000, 2000))
        #: Task names and bytes that did not come back, in the order of the calls of `on_recovered`.
        self.recovered: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
        #: By request id.
        self.brokers: dict[str, Broker] = {}
        self.all: list[Broker] = []
        #: The machines of these brokers.
        self.machines: list[Machine] = []
        self.broker = self.another(**of_broker)

    def another(self, **of_broker: Any) -> Broker:
        def note(machine: Machine) -> Handle:
            self.machines.append(machine)
            return machine.handle

        broker = Broker(
            self.reader,
            **{
                "ledger": self.ledger,
                "clock": self.clock,
                "read_host_available": lambda: self.host_available_bytes,
                "headroom_bytes": 0,
                "stepped": not self.threads,
                "record": note,
                **of_broker,
            },
        )
        self.all.append(broker)
        return broker

    def submit(self, name: str, gib: float | None = None, **others: Any) -> Ticket:
        memory = others.pop("memory", None if gib is None else int(gib * GIB))
        broker = others.pop("broker", self.broker)
        sequence = others.pop("sequence", None)
        sequence = next_sequence() if sequence is None else sequence
        histories = others.pop("histories", None)
        if histories is None and others.get("probe_fraction"):
            histories = histories_of(self.reader, name)
        request = Request("", name, sequence, 0.0, memory, **others)
        ticket = broker.submit(request, histories, broker.runs_kept)
        assert isinstance(ticket, Ticket)
        ticket.on_recovered = lambda size: self.recovered.put((name, size))
        self.brokers[ticket.request.id] = broker
        return ticket

    def place(self, name: str, gib: float | None = None, **others: Any) -> Ticket:
        ticket = self.submit(name, gib, **others)
        self.decided(ticket)
        assert ticket.placement is not None, ticket.error
        return ticket

    def start(self, ticket: Ticket, gib: float = 0) -> int:
        """Start a process that uses this much of each of its devices."""
        assert ticket.placement is not None
        pid = next(self.pids)
        uuids = [device.uuid for device in ticket.placement.devices]
        self.reader.attach(pid, uuids)
        for uuid in uuids:
            self.reader.allocate(pid, uuid, int(gib * GIB))
        self.broker_of(ticket).attach(ticket, pid)
        return pid

    def learn(self, ticket: Ticket, need: float, model: str | None = None) -> None:
        """Have another run of a ticket's task show how many GiB it needs."""
        key = HistoryKey(ticket.request.task_name, "body", model or ticket.devices[0].name)
        self.broker_of(ticket).kept(next_sequence(), True, {key: int(need * GIB)})

    def exit(self, ticket: Ticket) -> None:
        """End the process of a request; its memory is free."""
        assert ticket.pid is not None
        self.reader.detach(ticket.pid)
        self.broker_of(ticket).end(ticket)

    def reservations(self) -> list[Reservation]:
        return [r for group in self.ledger.view().by_device.values() for r in group]

    def next_recovered(self) -> tuple[str, int | None]:
        if self.threads:
            return self.recovered.get(timeout=DEADLOCK_S)
        if self.recovered.empty():
            self.broker.look()
        return self.recovered.get_nowait()

    def broker_of(self, ticket: Ticket) -> Broker:
        return self.brokers[ticket.request.id]

    def look(self) -> None:
        """Let all brokers that have requests read the devices and the ledger, until none has news for another."""
        for broker in [*dict.fromkeys(self.brokers.values())] * 3:
            broker.look()

    def decided(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            if not self.threads:
                self.broker_of(ticket).look()
                assert ticket.decided
            with ticket.changed:
                assert ticket.changed.wait_for(lambda t=ticket: t.decided, DEADLOCK_S)

    def waits(self, *tickets: Ticket) -> bool:
        self.broker.look()
        return not any(ticket.decided for ticket in tickets)

    def why(self, ticket: Ticket) -> str:
        return sentence(self.broker_of(ticket).explain(ticket))

    def stop(self) -> None:
        """End the threads of the brokers."""
        self.reader.during = lambda: None
        self.clock.stopped = True
        for broker in self.all:
            broker.refresh()
            broker.give_up("the test is over")


def histories_of(reader: Reader, name: str) -> dict[str, HistoryKey]:
    """Return the histories of a task of which no run is known, by device model."""
    return {model: HistoryKey(name, "body", model) for model in {d.name for d in reader.devices()}}


def indices(ticket: Ticket) -> list[int]:
    assert ticket.placement is not None
    return [device.index for device in ticket.placement.devices]


class Waiter:
    """Waits for a ticket in a thread, as an engine does."""

    def __init__(self, rig: Rig, ticket: Ticket, limit_s: float | None = None) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.outcome: queue.SimpleQueue[Placement | Exception] = queue.SimpleQueue()
        self.on_waiting: Callable[[Reason], None] = lambda reason: self.told.put(sentence(reason))

        def wait() -> None:
            try:
                self.outcome.put(
                    rig.broker.wait(ticket, limit_s, lambda reason: self.on_waiting(reason))
                )
            except Exception as error:
                self.outcome.put(error)

        self.thread = threading.Thread(target=wait, daemon=True)
        self.thread.start()

    def result(self) -> Placement | Exception:
        result = self.outcome.get(timeout=DEADLOCK_S)
        self.thread.join(DEADLOCK_S)
        return result

    def next_told(self) -> str:
        return self.told.get(timeout=DEADLOCK_S)


@contextlib.contextmanager
def threads_refused(*names: str) -> Iterator[None]:
    """Make the start of threads fail, by the ends of their names, as under a limit of processes."""
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.endswith(names):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_fail)
        yield


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def thread_rig() -> Iterator[Rig]:
    # Runners of other tests in this process keep their shared brokers.
    before = set(threading.enumerate())
    rig = Rig(threads=True)
    yield rig
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise pytest reports each `SystemExit` of a thread.
        patch.setattr(threading, "excepthook", lambda _: None)
        rig.stop()
        for thread in set(threading.enumerate()) - before:
            if thread.name in ("prefect-gpu-broker", "prefect-gpu-sampler"):
                thread.join(DEADLOCK_S)
                assert not thread.is_alive()
