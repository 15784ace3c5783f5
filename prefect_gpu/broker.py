"""The shell around scheduling: one thread that feeds it and carries out what it says.

It hands out placements, follows every placed process in the readings of the devices, and releases a
reservation when the device shows the memory back. What to decide is in `prefect_gpu.scheduling`; who waits
for it is in `waiting_list`; what a reading says is in `lookout`; how a process is started and spoken to is
in `prefect_gpu.processes`.

One `Broker` serves all runners of a Python process that have the same device specification
(`shared_broker`).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from functools import partial

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.host import read_host_available_bytes
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.sampler import Sampler
from prefect_gpu.errors import DeviceError
from prefect_gpu.ledger import PROCESS_LEDGER
from prefect_gpu.lending import Lending, Surroundings
from prefect_gpu.lookout import Lookout
from prefect_gpu.recovery import RecoveryWatch
from prefect_gpu.scheduling.backfill import PATIENCE, Patience
from prefect_gpu.scheduling.board import PlacementStyle
from prefect_gpu.scheduling.ledger import Ledger
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKind,
    Memory,
    Placement,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.ticket import Ticket as Ticket
from prefect_gpu.ticket import Wait
from prefect_gpu.ticket import Withdrawn as Withdrawn
from prefect_gpu.units import GIB, MIB
from prefect_gpu.waiting_list import WaitingList

logger = logging.getLogger(__name__)

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


class Broker:
    """Hands out devices. Its thread starts with the first request and sleeps while idle.

    Args:
        reader: Reads the devices.
        ledger: Where promises are written.
        style: How to choose among devices that fit.
        max_processes: Most children at a time; `None`: four for each core, at least eight.
        max_tasks_per_device: Most tasks on a device at a time; `None`: as many as fit.
        headroom_bytes: Kept free on each device; `None`: by kind of device.
        held_by_parent: What the GPU task around this process holds.
        clock: Time.
        read_host_available: Gives the bytes of the machine's memory that new processes could use.
        patience: How far a task that is blocked may be passed by later ones.
    """

    def __init__(
        self,
        reader: DeviceReader,
        ledger: Ledger = PROCESS_LEDGER,
        style: PlacementStyle = "spread",
        max_processes: int | None = None,
        max_tasks_per_device: int | None = None,
        headroom_bytes: int | None = None,
        held_by_parent: tuple[Reservation, ...] = (),
        clock: Clock | None = None,
        read_host_available: Callable[[], int] = read_host_available_bytes,
        patience: Patience = PATIENCE,
    ) -> None:
        self.reader = reader
        self.devices: tuple[Device, ...] = reader.devices()
        if not self.devices:
            raise DeviceError("there is no device to run GPU tasks on")
        self.kind: DeviceKind = reader.kind
        self._ledger = ledger
        self._max_processes = max_processes or max(8, 4 * (os.cpu_count() or 1))
        self._held_by_parent = held_by_parent
        self._clock = clock or RealClock()
        #: Guards all below. What others do not expect to be called under it (the tickets' callbacks,
        #: a release, which calls the ledger's watchers) goes into `_calls`.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Something has changed that may let a request start.
        self._dirty = False
        #: Readings that the thread has not looked at.
        self._arrived: list[Reading] = []
        #: Done by the thread, in this order, without the lock.
        self._calls: list[Callable[[], object]] = []
        self._waiting = WaitingList(
            style, max_tasks_per_device, held_by_parent, patience, self._clock
        )
        #: By request id.
        self._placed: dict[str, Ticket] = {}
        self._recovery = RecoveryWatch()
        #: What is known of the devices.
        self._lookout = Lookout(
            self.devices,
            self.kind,
            ledger,
            HEADROOM_BYTES[self.kind] if headroom_bytes is None else headroom_bytes,
            self._max_processes,
            held_by_parent,
            self._clock,
            self._placed,
            self._ours,
        )
        #: Hot standbys on our devices.
        self.lending = Lending(
            self._changed,
            ledger,
            self._recovery,
            self._clock,
            style,
            Surroundings(
                self._fresh_reading,
                self._lookout.survey_once,
                self._call_later,
                lambda: self._closed,
            ),
        )
        #: One was asked for to decide on, and has not come.
        self._wants_reading = False
        self._sampler = Sampler(
            reader,
            self._roots,
            self._on_reading,
            clock=self._clock,
            read_host_available=read_host_available,
        )
        self._end_watch = ledger.watch(self._look_again)

    # Any thread.

    @property
    def processes(self) -> int:
        """Processes that hold a device now."""
        return len(self._placed)

    @property
    def max_processes(self) -> int:
        """Most processes at a time."""
        return self._max_processes

    @property
    def host_promised_bytes(self) -> int:
        """Bytes of the machine's memory promised to processes that have not taken them yet."""
        with self._changed:
            return self._lookout.host_promised_bytes

    @property
    def wants_host_memory(self) -> bool:
        """Whether a request waits for memory of the machine itself, which standbys may hold."""
        with self._changed:
            reading = self._lookout.reading
            if reading is None or not self._waiting:
                return False
            if self.kind == "host":
                # There every request does; while others run, their end may be all that it waits for.
                return not self._placed
            left = reading.host_available_bytes - self._lookout.host_promised_bytes
            return self._waiting.wants_host_bytes(left)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit(
        self,
        task_name: str,
        memory: Memory = None,
        count: int = 1,
        devices: tuple[str, ...] = (),
        exclusive: bool = False,
        priority: int = 0,
        host_bytes: int = 0,
        expected_s: float | None = None,
        sequence: int | None = None,
        standby: Hashable = None,
    ) -> Ticket:
        """Ask for devices; see `Request` for the arguments.

        Args other than those: `sequence` is from `next_sequence`, `None` takes the next; `standby` is
        the kind of hot standby that suits it, `None`: none does.

        Returns:
            A ticket that is `decided` once it has a `placement` or an `error`.
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
                expected_s=expected_s,
            )
        )
        with self._changed:
            if self._closed:
                ticket.decide()
                return ticket
            self._start()
            self._waiting.add(ticket, standby)
            self._sampler.set_active(True)
            self._wake()
        return ticket

    def _start(self) -> None:
        """Start the thread, with the lock."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="prefect-gpu-broker", daemon=True
            )
            self._thread.start()

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

        Args other than the `ticket` from `submit`: see `Wait`.

        Raises:
            PlacementError: It can never be placed, or was not in time.
            Withdrawn: `withdraw` or `close` was called.
        """
        try:
            wait = Wait(limit_s, on_waiting, first_s, again_s, waited_s)
            return wait.until_placed(ticket, self._clock, self.explain, self.withdraw)
        except BaseException:
            # Nobody would ever end what is placed for somebody who has stopped waiting.
            self.withdraw(ticket)
            self.end(ticket)
            raise

    def explain(self, ticket: Ticket) -> str:
        """Say why a request waits."""
        with self._changed:
            reading, silence = self._lookout.reading, self._lookout.silence
            if reading is None or silence:
                return silence
            return self._waiting.explain(
                ticket, self._lookout.survey(reading), self._lookout.survey_host(reading)
            )

    def withdraw(self, ticket: Ticket) -> bool:
        """Give up waiting; without effect once it was placed.

        Returns:
            Whether it still waited.
        """
        with self._changed:
            if not self._waiting.remove(ticket):
                return False
            ticket.decide()
            # It may have been what blocked others.
            self._wake()
            return True

    def attach(self, ticket: Ticket, pid: int) -> None:
        """Say which process holds what was reserved."""
        with self._changed:
            if ticket.standby is not None and ticket.standby.ticket.pid != pid:
                self.lending.leave(ticket)
            ticket.standby = None
            ticket.pid = pid
        self._ledger.attach(ticket.request.id, pid)

    def eligible(self, names: tuple[str, ...]) -> tuple[Device, ...]:
        """Give the devices that a task may use; all, where it names some that are not there."""
        return self._lookout.eligible(names)

    def capacity_bytes(self, names: tuple[str, ...], count: int = 1) -> int:
        """Give what `count` of the devices that a task may use could each ever promise, in bytes."""
        sizes = sorted(self._capacities(names).values(), reverse=True)
        return sizes[min(count, len(sizes)) - 1]

    def model_capacities(self, names: tuple[str, ...]) -> dict[str, int]:
        """Give what the largest device of each model that a task may use could ever promise."""
        found: dict[str, int] = {}
        for device, size in self._capacities(names).items():
            found[device.name] = max(found.get(device.name, 0), size)
        return found

    def _capacities(self, names: tuple[str, ...]) -> dict[Device, int]:
        with self._changed:
            return self._lookout.capacities(names)

    def foreign_growth_bytes(self, ticket: Ticket, patience_s: float = 2.0) -> int:
        """Read by how much others' memory has grown on a task's devices since it was placed.

        Args:
            ticket: Placed.
            patience_s: Seconds to wait for a new reading; the last one counts where none comes.

        Returns:
            Bytes, on the device where they grew most; 0: they did not.
        """
        asked_s = self._clock.now()
        self.refresh()
        with self._changed:
            self._wait_for_reading(asked_s, patience_s)
            return self._lookout.foreign_growth_bytes(ticket.foreign_before)

    def refresh(self) -> None:
        """Ask for a reading of the devices now."""
        self._sampler.refresh()

    def end(self, ticket: Ticket) -> None:
        """Say that the process of a placed request is gone (or never came).

        Its reservation is released when the device shows the memory back, or after `RECOVERY_S`;
        then `on_recovered` is called. Without effect on others, and the second time.
        """
        with self._changed:
            if self._placed.pop(ticket.request.id, None) is None:
                return
            # It may have ended before it had a process.
            self.lending.leave(ticket)
            ticket.ended_s = self._clock.now()
            ticket.ended_pid, ticket.pid = ticket.pid, None
            if not self._closed:
                if ticket.ended_pid is None:
                    # No process ever came: there is nothing to wait for.
                    self._calls.append(partial(self._release, ticket, 0))
                else:
                    self._recovery.begin(ticket, ticket.ended_s)
                self._wake()
                return
        self._release(ticket, None if ticket.ended_pid else 0)

    def close(self) -> None:
        """Stop the threads. Requests that wait are withdrawn; nobody waits for memory any more."""
        with self._changed:
            self._closed = True
            thread = self._thread
            loans = self.lending.loans
            self._changed.notify_all()
        for loan in loans:
            loan.give_up()
        self._end_watch()
        self._sampler.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> None:
        self._dirty = True
        self._changed.notify_all()

    def _look_again(self) -> None:
        with self._changed:
            self._wake()

    def _on_reading(self, reading: Reading) -> None:
        with self._changed:
            self._arrived.append(reading)
            self._changed.notify_all()

    def _roots(self) -> list[int]:
        with self._changed:
            own = [os.getpid()] if self._held_by_parent else []
            pids = [pid for t in self._ours() if (pid := t.pid or t.ended_pid) is not None]
        # Those of other brokers of this process too: what they hold is not foreign.
        return list(dict.fromkeys([*own, *pids, *self._ledger.view().processes]))

    def _ours(self) -> tuple[Ticket, ...]:
        """Give all that may have a process, with the lock."""
        return (*self._placed.values(), *self._recovery.ending, *self.lending.tickets)

    # The broker's thread. With the lock held, but for `_run` and `_release`.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait_for_work()
                try:
                    self._step()
                except Exception:
                    logger.exception("the broker of GPU devices met an error; it goes on")
                calls, self._calls = self._calls, []
                closed = self._closed
            for call in calls:
                try:
                    call()
                except Exception:
                    # Whoever is told may fail; the others must be told all the same.
                    logger.exception("a GPU task could not take what it was told of its memory")
            if closed:
                return

    def _wait_for_work(self) -> None:
        while not (self._arrived or self._dirty or self._closed):
            left_s: float | None = None
            poll_s = self._recovery.poll_s
            if poll_s is not None:
                left_s = poll_s - self._clock.now()
                if left_s <= 0:
                    return
            self._clock.wait(self._changed, left_s)

    def _step(self) -> None:
        """Look at all that has come, and carry out what follows from it."""
        self._dirty = False
        self._lookout.forget()
        arrived, self._arrived = self._arrived, []
        if self._closed:
            self._shut_down()
            return
        for reading in arrived:
            self._take_reading(reading)
        self._poll_recovery()
        self._schedule()
        self._sampler.set_active(bool(self._waiting or self._placed or self._recovery.ending))

    def _shut_down(self) -> None:
        for ticket in self._waiting.clear():
            ticket.decide()
        self._release_all(self._recovery.end_all())

    # Readings.

    def _take_reading(self, reading: Reading) -> None:
        self._lookout.take(reading)
        # Those who wait for one.
        self._changed.notify_all()
        self._wants_reading = False
        if reading.error:
            return
        if self._lookout.note_usable(reading):
            self._waiting.forget_possible()
        for ticket, sizes in self._lookout.sizes(reading):
            if ticket.on_measured is not None:
                self._calls.append(partial(ticket.on_measured, reading.at_s, sizes))
        self._lookout.tell(reading)
        self._release_all(self._recovery.look(reading, self._placed.values()))

    def _poll_recovery(self) -> None:
        now_s = self._clock.now()
        self._release_all(
            self._recovery.give_up(now_s, self._lookout.reading, self._placed.values())
        )
        if self._recovery.poll(now_s):
            self._sampler.refresh()

    def _release_all(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._calls.append(partial(self._release, ticket, ticket.missing_bytes))

    def _release(self, ticket: Ticket, leaked_bytes: int | None) -> None:
        # First, whatever becomes of the telling. The ledger's watch has us look at the queue again.
        self._ledger.release(ticket.request.id)
        if ticket.on_recovered is not None:
            ticket.on_recovered(leaked_bytes)

    def _call_later(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._wake()

    def _fresh_reading(self, patience_s: float) -> Reading | None:
        """Wait for a reading to decide on, with the lock; `None`: none came, or it failed."""
        if self._closed:
            return None
        self._start()
        asked_s = self._clock.now()
        if not self._lookout.fresh:
            self._sampler.refresh()
            if not self._wait_for_reading(asked_s, patience_s):
                return None
        reading = self._lookout.reading
        return None if reading is None or reading.error else reading

    def _wait_for_reading(self, asked_s: float, patience_s: float) -> bool:
        """Wait for one that began after it was asked for, with the lock; `False`: none came in time."""
        while (reading := self._lookout.reading) is None or reading.at_s < asked_s:
            left_s = asked_s + patience_s - self._clock.now()
            if left_s <= 0 or self._closed:
                return False
            self._clock.wait(self._changed, left_s)
        return True

    # Decisions.

    def _schedule(self) -> None:
        if not self._waiting:
            self._waiting.forget_possible()
            return
        reading = self._lookout.reading
        if reading is None or not self._lookout.fresh:
            if not self._wants_reading:
                self._wants_reading = True
                self._sampler.refresh()
            return
        if reading.error:
            return
        while True:
            view = self._ledger.view()
            rooms = self._lookout.survey(reading, view)
            look = self._waiting.look(
                rooms, self._lookout.survey_host(reading), self.lending.offers
            )
            if not look.promises or self._ledger.try_reserve(
                view.version, look.promises, look.taken
            ):
                break
            # Another broker has written meanwhile: what was free may be no more.
            self._lookout.forget()
        self._waiting.note_standings(look)
        self._calls += [partial(self._ledger.reclaim, loan_id) for loan_id in look.given_up]
        for ticket, error in look.refused:
            self._waiting.remove(ticket)
            ticket.decide(error=error)
        foreign = {room.device.key: room.foreign_bytes for room in rooms}
        for ticket, placement, loan_id in look.placed:
            self._waiting.remove(ticket)
            ticket.placed_s = self._clock.now()
            ticket.placement = placement
            self._recovery.take_baseline(ticket, reading)
            ticket.foreign_before = {
                device.key: foreign[device.key] for device in placement.devices
            }
            self._placed[ticket.request.id] = ticket
            if loan_id:
                self.lending.hand_over(loan_id, ticket)
            ticket.decide(placement)
        self._waiting.note_possible()
        if look.promises:
            self._lookout.forget()


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
        if broker is None or broker.closed:
            broker = _shared[own] = make()
        return broker
