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
from prefect_gpu.broker.events import Event, LedgerChanged, Read
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.clock import DEADLOCK_S, FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.model import (
    DeviceSnapshot,
    Placement,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.units import GIB
from tests.fakes.fake_devices import FakeDevices


class Closing(Exception):
    """Ends the thread of a broker. In a flow it runs as long as the process."""


class WatchedBroker(Broker):
    """Says when it has nothing to do."""

    resting = False
    closing = False
    #: Readings that the sampler has begun, and how many had begun when the last one came.
    begun = 0
    came = 0

    def _roots(self) -> list[int]:
        self.begun += 1
        return super()._roots()

    def _put(self, event: Event) -> None:
        with self._arrived:
            if isinstance(event, Read):
                self.came = self.begun
            super()._put(event)

    def _wait_for_work(self) -> None:
        with self._arrived:
            self.resting = True
            self._arrived.notify_all()
            # A scheduling pass may have taken the event that wakes it.
            if not self.closing:
                super()._wait_for_work()
            self.resting = False
            if self.closing:
                raise Closing

    def _run(self) -> None:
        with contextlib.suppress(Closing):
            super()._run()

    def close(self) -> None:
        self._sampler.stop()
        self.closing = True
        self._rests_until_s = float("-inf")
        self._put(LedgerChanged())
        if self._thread is not None:
            self._thread.join()

    @property
    def started(self) -> bool:
        """Whether it has had a request."""
        return self._thread is not None

    def settle(self) -> None:
        """Block until all that has come was looked at, and the thread waits on the clock."""
        with self._arrived:
            assert self._arrived.wait_for(
                lambda: self.resting and not (self._inbox or self._machine.dirty), DEADLOCK_S
            )

    def read(self) -> None:
        """Read the devices, and block until the broker has looked at it."""
        before = self.begun
        self.refresh()
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.came > before, DEADLOCK_S)
        self.settle()

    def why(self, ticket: Ticket) -> str:
        return sentence(self.explain(ticket))


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


class Rig:
    def __init__(self, devices: str = "1x24GiB", **of_broker: Any) -> None:
        self.clock = FakeClock()
        self.reader = Reader(SimulatedDevices(devices), self.clock)
        self.host_available_bytes = 64 * GIB
        self.ledger: Ledger = of_broker.pop("ledger", None) or Ledger()
        self.pids = iter(range(1000, 2000))
        #: Name of the task to what did not come back, in that order.
        self.recovered: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
        self.brokers: list[WatchedBroker] = []
        self.broker = self.another(**of_broker)

    def another(self, **of_broker: Any) -> WatchedBroker:
        broker = WatchedBroker(
            self.reader,
            **{
                "ledger": self.ledger,
                "clock": self.clock,
                "read_host_available": lambda: self.host_available_bytes,
                "headroom_bytes": 0,
                **of_broker,
            },
        )
        self.brokers.append(broker)
        return broker

    def submit(self, name: str, gib: float | None = None, **others: Any) -> Ticket:
        memory = others.pop("memory", None if gib is None else int(gib * GIB))
        broker = others.pop("broker", self.broker)
        sequence = others.pop("sequence", None)
        sequence = next_sequence() if sequence is None else sequence
        ticket = broker.submit(Request("", name, sequence, 0.0, memory, **others))
        assert isinstance(ticket, Ticket)
        ticket.on_recovered = lambda size: self.recovered.put((name, size))
        return ticket

    def place(self, name: str, gib: float | None = None, **others: Any) -> Ticket:
        ticket = self.submit(name, gib, **others)
        decided(ticket)
        # The time of a reading under way is still now, though it shows what was.
        others.get("broker", self.broker).read()
        assert ticket.placement is not None, ticket.error
        return ticket

    def start(self, ticket: Ticket, gib: float = 0, broker: Broker | None = None) -> int:
        """Start a process that takes so much of each of its devices."""
        assert ticket.placement is not None
        pid = next(self.pids)
        uuids = [device.uuid for device in ticket.placement.devices]
        self.reader.attach(pid, uuids)
        for uuid in uuids:
            self.reader.allocate(pid, uuid, int(gib * GIB))
        (broker or self.broker).attach(ticket, pid)
        (broker or self.broker).settle()
        return pid

    def exit(self, ticket: Ticket) -> None:
        """End its process; its memory is free."""
        assert ticket.pid is not None
        self.reader.detach(ticket.pid)
        # So that a reading under way began before.
        self.clock.advance(1e-6)
        self.broker.end(ticket)

    def reservations(self) -> list[Reservation]:
        return [r for group in self.ledger.view().by_device.values() for r in group]

    def next_recovered(self) -> tuple[str, int | None]:
        return self.recovered.get(timeout=DEADLOCK_S)

    def waits(self, *tickets: Ticket) -> bool:
        self.broker.settle()
        return not any(ticket.decided for ticket in tickets)


def decided(*tickets: Ticket) -> None:
    for ticket in tickets:
        with ticket.changed:
            assert ticket.changed.wait_for(lambda t=ticket: t.decided, DEADLOCK_S)


def indices(ticket: Ticket) -> list[int]:
    assert ticket.placement is not None
    return [device.index for device in ticket.placement.devices]


class Waiter:
    """Waits for a ticket in a thread, as an engine does."""

    def __init__(
        self, rig: Rig, ticket: Ticket, limit_s: float | None = None, again_s: float = 30.0
    ) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.outcome: queue.SimpleQueue[Placement | Exception] = queue.SimpleQueue()
        self.on_waiting: Callable[[Reason], None] = lambda reason: self.told.put(sentence(reason))

        def wait() -> None:
            try:
                self.outcome.put(
                    rig.broker.wait(
                        ticket, limit_s, lambda reason: self.on_waiting(reason), again_s=again_s
                    )
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


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []
    # Runners of other tests in this process keep their shared brokers.
    before = set(threading.enumerate())

    def make(*args: Any, kind: type[Rig] = Rig, **kwargs: Any) -> Rig:
        rigs.append(kind(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.reader.during = lambda: None
        for broker in rig.brokers:
            broker.close()
    ours = {"prefect-gpu-broker", "prefect-gpu-sampler"}
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name in ours]


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
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


MakeRig = Callable[..., Rig]
