"""Tasks that are suspended for others, as brokers and the ledger see them; what suspends them is this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import MakeRig, WatchedBroker, decided
from tests.unit.broker.broker_rig import make_rig as make_rig


class Scene:
    """A task that may be suspended on a device of 8 GiB, and another broker whose tasks are urgent."""

    def __init__(self, make_rig: MakeRig, **of_other: Any) -> None:
        self.rig = make_rig("1x8GiB", ledger=of_other.pop("own_ledger", None))
        self.other: WatchedBroker = self.rig.another(**of_other)
        #: What was asked of the task that may be suspended.
        self.asked: list[bool] = []
        self.task = self.rig.place("task", 6, preemptible=True)
        self.task.on_held_back = self.asked.append
        self.pid = self.rig.start(self.task, 5)
        self.rig.clock.advance(1000.0)

    @property
    def id(self) -> str:
        return self.task.request.id

    @property
    def entry(self) -> Any:
        return self.rig.ledger.entry(self.id)

    def urgent(self, gib: float = 6, priority: int = 5, **others: Any) -> Ticket:
        ticket = self.rig.submit(
            f"urgent {priority}", gib, priority=priority, broker=self.other, **others
        )
        self.settle()
        return ticket

    def settle(self) -> None:
        """Let both look at all that has come, and at what follows of it."""
        for _ in range(3):
            for broker in self.rig.brokers:
                if broker.started:
                    broker.read()

    def moves_out(self) -> None:
        """Its memory goes to the host, as it was asked."""
        self.moves_out_without_a_look()
        self.settle()

    def moves_out_without_a_look(self) -> None:
        """The same, and no broker looks at it."""
        assert self.asked[-1]
        freed = {"device_uuid": "SIM-0", "size_bytes": 5 * GIB}
        self.rig.reader.attached[self.pid].answer("simulated_free", freed)
        self.rig.broker.show_suspension(self.task, "away", "away")

    def comes_back(self) -> bool:
        return self.rig.broker.comes_back(self.task)


@pytest.fixture
def scene(make_rig: MakeRig) -> Scene:
    return Scene(make_rig)


def test_a_task_makes_way_and_comes_back(scene: Scene) -> None:
    urgent = scene.urgent()
    assert scene.asked == [True] and not urgent.decided
    scene.moves_out()
    decided(urgent)
    assert not scene.entry.reservations
    scene.other.end(urgent)
    scene.settle()
    assert scene.asked == [True, False] and scene.entry.reservations
    assert scene.comes_back()


# A process comes back under a reservation alone, also where its flow does not know yet that it has none.


def test_no_process_comes_back_while_its_memory_is_wanted_or_its_device_is_anothers(
    scene: Scene,
) -> None:
    urgent = scene.urgent()
    assert not scene.comes_back()
    scene.moves_out()
    decided(urgent)
    assert not scene.comes_back()
    assert scene.entry.away


def test_what_is_on_its_way_back_gives_its_device_to_no_other(scene: Scene) -> None:
    ledger = scene.rig.ledger
    ledger.hold_back(scene.id, away=True)
    scene.settle()
    scene.moves_out()
    ledger.hold_back(scene.id, away=False)
    scene.settle()
    assert scene.asked == [True, False] and scene.comes_back()
    ledger.hold_back(scene.id, away=True, shared=True)
    scene.settle()
    assert scene.asked[-1] and scene.entry.reservations
    urgent = scene.urgent()
    assert not urgent.decided
    scene.rig.broker.show_suspension(scene.task, "away", "away")
    scene.settle()
    assert urgent.decided and not scene.entry.reservations


# A task that is in no plan any more goes on.


def test_it_goes_on_if_something_else_keeps_the_urgent_one_from_its_start(
    make_rig: MakeRig,
) -> None:
    scene = Scene(make_rig, max_processes=1)
    urgent = scene.urgent()
    scene.rig.place("another", 1, priority=9, broker=scene.other)
    scene.settle()
    assert scene.entry.reservations and not scene.entry.suspended_for
    assert scene.asked == [True, False] and not urgent.decided


class Shared:
    """Ledgers of two processes that share one, and what the first one believes of the other."""

    def __init__(self, folder: Path) -> None:
        self.stores: list[HostStore] = []
        self.one, self.other = Ledger(lambda: self.open(folder)), Ledger(lambda: self.open(folder))

    def open(self, folder: Path) -> HostStore:
        # Once at the beginning it looks at whether the other process is alive.
        self.stores.append(HostStore(folder, owners_s=1e9))
        return self.stores[-1]

    def stopped(self, which: int) -> None:
        """One process sends no heartbeats any more, as the other sees it."""
        self.stores[1 - which].silent = frozenset({self.stores[which].owner})


def test_it_goes_on_while_the_flow_of_the_urgent_one_is_stopped(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    shared = Shared(tmp_path)
    scene = Scene(make_rig, own_ledger=shared.one, ledger=shared.other)
    scene.urgent()
    scene.moves_out_without_a_look()
    shared.stopped(1)
    scene.rig.broker.read()
    scene.rig.broker.read()
    assert scene.asked == [True, False] and not scene.entry.suspended_for


def test_what_a_stopped_flow_does_not_suspend_is_waited_for_no_longer(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    shared = Shared(tmp_path)
    scene = Scene(make_rig, own_ledger=shared.one, ledger=shared.other)
    scene.urgent()
    assert scene.entry.suspended_for
    shared.stopped(0)
    scene.settle()
    assert not scene.entry.suspended_for


# Tasks within tasks.


def test_a_task_that_waits_for_one_within_it_does_not_make_way_for_that(make_rig: MakeRig) -> None:
    scene = Scene(make_rig)
    inner = scene.rig.another(ancestors=(scene.id,))
    scene.rig.place("filler", 1)
    scene.rig.submit("inner", 2, priority=5, broker=inner)
    scene.settle()
    assert not scene.asked
