"""A file of events, replayed by a new machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prefect_gpu.broker.phases import Trigger
from prefect_gpu.units import GIB
from tests import event_files
from tests.unit.broker.broker_rig import Rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Record what two tasks, one of which is suspended for the other, and two first runs lead to."""
    path = tmp_path / "events"
    rig = Rig("2x24GiB", record=event_files.record(path))
    low = rig.place("low", 16, preemptible=True, devices=("0",))
    rig.start(low, 15)
    low.on_held_back = lambda away: None
    low.on_measured = lambda at_s, found: None
    rig.clock.advance(100)
    urgent = rig.submit("urgent", 20, priority=1, devices=("0",))
    rig.broker.look()
    rig.broker.show_suspension(low, Trigger.MOVING_OUT, "moving to the host")
    assert low.pid is not None
    rig.reader.detach(low.pid)
    rig.broker.show_suspension(low, Trigger.MOVED_OUT, "away")
    rig.decided(urgent)
    probes = [rig.place(name, probe_fraction=1.0, devices=("1",)) for name in "ab"]
    for probe in probes:
        rig.start(probe, 4)
        probe.stand_in_bytes, probe.may_leave = 5 * GIB, True
    rig.broker.look()
    rig.learn(probes[0], 6)
    refused, withdrawn = rig.submit("refused", 99), rig.submit("withdrawn", 20)
    rig.decided(refused)
    assert rig.broker.withdraw(withdrawn)
    rig.start(urgent, 18)
    rig.broker.look()
    for ticket in (urgent, *probes):
        rig.exit(ticket)
        rig.clock.advance(1)
        rig.broker.look()
    rig.broker.end(low)
    rig.broker.look()
    assert not rig.reservations()
    return path


def test_a_new_machine_takes_the_same_decisions(recorded: Path) -> None:
    found = event_files.replay(recorded)
    assert found.events > 100 and found.differences == []


def test_a_new_machine_takes_the_decisions_of_a_broker_with_threads(
    thread_rig: Rig, tmp_path: Path
) -> None:
    broker = thread_rig.another(record=event_files.record(tmp_path / "events"))
    tickets = [thread_rig.submit(name, 10, broker=broker) for name in "abcd"]
    for ticket in tickets:
        thread_rig.decided(ticket)
        thread_rig.start(ticket, 8)
        thread_rig.exit(ticket)
        thread_rig.next_recovered()
    assert event_files.replay(tmp_path / "events").differences == []


def test_another_process_takes_the_same_decisions(recorded: Path) -> None:
    """Its hashes of texts are others, and with them the order of its sets."""
    code = f"from pathlib import Path; from tests.event_files import replay; print(replay(Path({str(recorded)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("differences=[])\n")


def test_a_decision_that_differs_is_shown(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_gpu.broker.planning.MOST_BLOCKED", 0)
    (first, *_) = event_files.replay(recorded).differences
    assert "ScheduleDue: only recorded, from character " in first and "wish=Wish(" in first
