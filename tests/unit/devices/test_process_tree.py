"""Which of our children a process belongs to, and what it holds."""

from __future__ import annotations

import os

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.process_tree import MAX_DEPTH, SCAN_INTERVAL_S, HostProcesses, ProcessTable
from prefect_gpu.scheduling.model import ProcessUse
from tests.fakes.fake_processes import FakeProcesses

#: An id that no process has.
ABSENT = 2**22 + 1


@pytest.fixture
def processes() -> FakeProcesses:
    made = FakeProcesses()
    made.add(1, parent=0, used_bytes=9)
    made.add(100, used_bytes=50)
    made.add(101, parent=100, session=100, used_bytes=5)
    made.add(102, parent=1, session=100, used_bytes=6)
    made.add(103, parent=101, session=103, used_bytes=7)
    made.add(104, parent=1, session=103, used_bytes=8)
    made.add(106, parent=101, session=105, used_bytes=4)
    made.add(200, used_bytes=60)
    made.add(300, session=1, used_bytes=99)
    return made


@pytest.mark.parametrize(
    ("pid", "root"),
    [
        pytest.param(100, 100, id="a root is its own"),
        pytest.param(101, 100, id="a child in the session"),
        pytest.param(102, 100, id="an orphan in the session"),
        pytest.param(103, 100, id="a grandchild with a session of its own"),
        pytest.param(104, 100, id="an orphan in a grandchild's session"),
        pytest.param(106, 100, id="a grandchild in a session whose leader has ended"),
        pytest.param(300, None, id="a process of another program"),
        pytest.param(1, None, id="init"),
        pytest.param(999, None, id="a process that cannot be seen from here"),
    ],
)
def test_the_root_of_a_process(processes: FakeProcesses, pid: int, root: int | None) -> None:
    assert ProcessTable(processes).root_of(pid, {100, 200}) == root


def test_a_cycle_of_parents_ends() -> None:
    asked = []

    def parent_of(pid: int) -> int:
        asked.append(pid)
        return pid

    processes = FakeProcesses()
    processes.add(7)
    assert ProcessTable(processes).root_of(7, {8}, parent_of) is None
    assert len(asked) == MAX_DEPTH


def test_resident_lists_every_process_of_every_root(processes: FakeProcesses) -> None:
    assert ProcessTable(processes).resident([100, 200]) == (
        ProcessUse(100, 100, 50),
        ProcessUse(200, 200, 60),
        ProcessUse(101, 100, 5),
        ProcessUse(102, 100, 6),
        ProcessUse(103, 100, 7),
        ProcessUse(104, 100, 8),
        ProcessUse(106, 100, 4),
    )


def test_without_roots_no_process_is_read() -> None:
    class Unreadable(FakeProcesses):
        def pids(self) -> list[int]:
            raise AssertionError("the process table was read")

    assert ProcessTable(Unreadable()).resident(()) == ()


def test_new_roots_show_at_once_and_their_helpers_after_a_scan(processes: FakeProcesses) -> None:
    clock = FakeClock()
    table = ProcessTable(processes, clock)
    assert table.resident([200]) == (ProcessUse(200, 200, 60),)

    processes.add(201, parent=200, session=200, used_bytes=3)
    processes.add(200, used_bytes=61)
    clock.advance(0.25)
    assert table.resident([200, 100]) == (ProcessUse(200, 200, 61), ProcessUse(100, 100, 50))
    clock.advance(SCAN_INTERVAL_S)
    assert ProcessUse(201, 200, 3) in table.resident([200])


def test_processes_that_end_between_scans_are_left_out(processes: FakeProcesses) -> None:
    table = ProcessTable(processes, FakeClock())
    table.resident([100, 200])
    for pid in (101, 103, 104, 106, 200):
        processes.remove(pid)
    # Its id is that of another program now.
    processes.add(102, parent=1, session=1)

    assert [use.pid for use in table.resident([100, 200])] == [100]


def test_an_id_that_another_program_had_is_found_by_the_next_scan(processes: FakeProcesses) -> None:
    clock = FakeClock()
    table = ProcessTable(processes, clock)
    table.resident([100])
    processes.add(300, parent=100, session=300)
    clock.advance(SCAN_INTERVAL_S)
    assert 300 in [use.pid for use in table.resident([100])]


def test_a_scan_reads_one_parent_for_each_session(processes: FakeProcesses) -> None:
    for pid in range(1000, 2000):
        processes.add(pid, parent=300, session=1)
    ProcessTable(processes, FakeClock()).resident([200])
    assert len(processes.parents_read) < 20


def test_scans_take_a_bounded_share_of_the_time() -> None:
    clock = FakeClock()
    scans = []

    class Slow(FakeProcesses):
        def pids(self) -> list[int]:
            scans.append(clock.now())
            clock.advance(0.5)
            return [100]

    table = ProcessTable(Slow(), clock)
    for _ in range(50):
        table.resident([100])
        clock.advance(0.25)
    # Half a second each: one in ten seconds.
    assert len(scans) == 2


def test_a_process_that_has_ended_and_is_not_reaped_holds_nothing(processes: FakeProcesses) -> None:
    processes.add(105, parent=100, session=100, used_bytes=0)
    assert 105 not in [use.pid for use in ProcessTable(processes).resident([100])]


def test_this_process_is_read() -> None:
    host, me = HostProcesses(), os.getpid()
    assert me in host.pids()
    # In a container the session may be of a namespace that cannot be seen from here: `getsid` returns 0.
    assert (host.session_of(me), host.parent_of(me)) == (os.getsid(0) or None, os.getppid())
    assert host.resident_bytes(me) > 2**20


@pytest.mark.parametrize("pid", [ABSENT, 2**32 - 1, 0])
def test_a_process_that_does_not_exist_is_not_found(pid: int) -> None:
    host = HostProcesses()
    assert host.session_of(pid) is None
    if pid:
        assert host.parent_of(pid) is None
        assert host.resident_bytes(pid) == 0
    assert ProcessTable().root_of(pid, {os.getpid()}) is None


@pytest.mark.parametrize(
    ("link", "initial"), [("pid:[4026531836]", True), ("pid:[4026532265]", False)]
)
def test_process_ids_in_a_container(
    monkeypatch: pytest.MonkeyPatch, link: str, initial: bool
) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: link)
    assert HostProcesses().in_initial_namespace() == initial
