"""Several processes on one ledger that end at any moment: memory is never promised twice, and none stays promised."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger, LedgerView
from prefect_gpu.scheduling.model import Reservation
from tests.unit.broker.test_ledger import attach, entry, release_lock

CAPACITY = 10
DEVICES = ("SIM-0", "SIM-1")


class Process:
    """What one process knows, and what it has decided on an earlier view."""

    def __init__(self, folder: Path) -> None:
        self.store = HostStore(folder, owners_s=0.0)
        self.ledger = Ledger(lambda: self.store)
        self.ledger.subscribe(lambda: None)
        self.view: LedgerView = self.ledger.view()
        self.held: set[str] = set()

    def free(self, device: str) -> int:
        reserved = self.view.by_device.get(("node", device), ())
        return CAPACITY - sum(r.reserved_bytes for r in reserved)

    def crash(self) -> None:
        """Do what `kill -9` does: the kernel releases the lock, and nothing else happens."""
        release_lock(self.store)


class Machine(RuleBasedStateMachine):
    """Rules are steps of processes; each may look, decide on what it saw, write, or end between any two."""

    processes = Bundle("processes")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.observer = Process(self.folder)
        self.alive: list[Process] = []
        self.crashed: list[Process] = []
        self.made = 0

    def teardown(self) -> None:
        # While the files are there: SQLite's connection to a file that was removed stays open.
        for process in (self.observer, *self.alive, *self.crashed):
            process.store.close()
        shutil.rmtree(self.folder)

    @precondition(lambda self: len(self.alive) < 4)
    @rule(target=processes)
    def start(self) -> Process:
        self.alive.append(Process(self.folder))
        return self.alive[-1]

    @rule(process=processes)
    def look(self, process: Process) -> None:
        process.view = process.ledger.view()

    @rule(process=processes, sizes=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=2))
    def reserve(self, process: Process, sizes: list[int]) -> None:
        """Reserve what was free when the process looked last."""
        if any(size > process.free(device) for device, size in zip(DEVICES, sizes, strict=False)):
            return
        self.made += 1
        name = f"r{self.made}"
        reservations = tuple(
            Reservation(name, "node", device, size)
            for device, size in zip(DEVICES, sizes, strict=False)
        )
        if process.ledger.try_write(process.view.version, {name: entry(name, *reservations)}):
            process.held.add(name)
        process.view = process.ledger.view()

    @rule(process=processes)
    def wait(self, process: Process) -> None:
        """Write a request that waits."""
        self.made += 1
        name = f"r{self.made}"
        process.ledger.try_write(process.view.version, {name: entry(name)})

    @rule(process=processes, pid=st.integers(1, 9))
    def attach(self, process: Process, pid: int) -> None:
        for name in process.held:
            attach(process.ledger, name, pid, runs=True)

    @precondition(lambda self: any(process.held for process in self.alive))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([p for p in self.alive if p.held]))
        name = data.draw(st.sampled_from(sorted(process.held)))
        process.held.remove(name)
        process.ledger.release(name)

    @rule(target=processes, process=consumes(processes))
    def crash(self, process: Process) -> object:
        if process not in self.alive:
            return multiple()
        self.alive.remove(process)
        process.crash()
        self.crashed.append(process)
        return multiple()

    @rule()
    def all_see_the_same(self) -> None:
        first = self.observer.ledger.view()
        for process in self.alive:
            mine = process.ledger.view()
            assert {k: set(v) for k, v in mine.by_device.items()} == {
                k: set(v) for k, v in first.by_device.items()
            }
            assert (mine.processes, mine.holding) == (first.processes, first.holding)

    # The processes themselves do not look after each step.

    @invariant()
    def no_memory_is_promised_twice(self) -> None:
        for reservations in self.observer.ledger.view().by_device.values():
            assert sum(r.reserved_bytes for r in reservations) <= CAPACITY

    @invariant()
    def what_is_promised_is_what_the_living_hold(self) -> None:
        held = Counter(name for process in self.alive for name in process.held)
        view = self.observer.ledger.view()
        found = {r.request_id for group in view.by_device.values() for r in group}
        assert found == set(held)
        assert not any(process.ledger.problem for process in (self.observer, *self.alive))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
