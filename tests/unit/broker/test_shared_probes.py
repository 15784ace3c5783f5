"""First runs that share devices, at a broker: how they count over time, and who is told what."""

from __future__ import annotations

from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Rig
from tests.unit.broker.broker_rig import rig as rig


def test_one_more_starts_when_those_that_run_have_settled(rig: Rig) -> None:
    tickets = [rig.place(name, probe_fraction=1.0) for name in "abcd"]
    fifth = rig.submit("e", probe_fraction=1.0)
    for ticket in tickets:
        rig.start(ticket, 2)
    assert rig.waits(fifth)
    rig.clock.advance(4)
    rig.decided(fifth)
    assert fifth.placement is not None
    (reservation,) = fifth.placement.reservations
    assert reservation.probe is not None and not reservation.exclusive


def test_the_newest_is_told_to_end_once_when_the_device_runs_short(rig: Rig) -> None:
    told: list[tuple[str, Device]] = []
    old, new = (rig.place(name, probe_fraction=1.0) for name in ("old", "new"))
    for ticket in (old, new):
        ticket.on_short = lambda device, name=ticket.request.task_name: told.append((name, device))
    rig.start(new, 1)
    pid = rig.start(old, 1)
    rig.broker.look()
    rig.clock.advance(1)
    rig.reader.allocate(pid, "SIM-0", 21 * GIB)
    for _ in range(3):
        rig.broker.look()
        rig.broker.look()
    assert [name for name, _ in told] == ["new"]


def test_a_task_with_a_budget_starts_beside_a_probe_once_its_need_is_learned(rig: Rig) -> None:
    probe = rig.place("a", probe_fraction=1.0)
    known = rig.submit("b", 6)
    rig.start(probe, 2)
    assert rig.waits(known)
    rig.learn(probe, 1, "another model")
    assert rig.waits(known)
    rig.learn(probe, 3)
    rig.decided(known)
    sizes = {r.task_name: r.reserved_bytes for r in rig.reservations()}
    assert sizes == {"a": 3 * GIB, "b": 6 * GIB}
