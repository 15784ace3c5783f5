"""Whose a process is, and what it holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.roots import (
    FULL_SCAN,
    MAX_DEPTH,
    SCAN_INTERVAL_S,
    ProcessStat,
    ProcessTable,
    find_root,
    parse_stat,
)
from prefect_gpu.scheduling.model import ProcessUse
from tests.fakes.fake_proc import FakeProc

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    proc = FakeProc(tmp_path)
    proc.add(1, parent=0, session=1, pages=9)
    proc.add(100, pages=50)
    proc.add(101, parent=100, session=100, pages=5)
    proc.add(102, parent=1, session=100, pages=6)
    proc.add(103, parent=101, session=103, pages=7)
    proc.add(200, pages=60)
    proc.add(300, session=1, pages=99)
    return proc


@pytest.mark.parametrize(
    ("pid", "root"),
    [
        pytest.param(100, 100, id="a root is its own"),
        pytest.param(101, 100, id="a child in the session"),
        pytest.param(102, 100, id="an orphan in the session"),
        pytest.param(103, 100, id="a grandchild with a session of its own"),
        pytest.param(300, None, id="a stranger"),
        pytest.param(1, None, id="init"),
        pytest.param(999, None, id="a process that is not to be seen from here"),
    ],
)
def test_root_of(proc: FakeProc, pid: int, root: int | None) -> None:
    assert ProcessTable(proc.folder).root_of(pid, {100, 200}) == root


def test_a_cycle_of_parents_ends() -> None:
    asked = []

    def stat_of(pid: int) -> ProcessStat:
        asked.append(pid)
        return ProcessStat(parent_pid=pid, session_id=pid, resident_pages=0)

    assert find_root(7, {8}, stat_of) is None
    assert len(asked) == MAX_DEPTH


def test_a_command_may_look_like_the_rest_of_the_line() -> None:
    text = "7 (a) S 1 (b) R 5 6 7 " + " ".join(["0"] * 17) + " 42 0"
    assert parse_stat(text) == ProcessStat(parent_pid=5, session_id=7, resident_pages=42)


def test_resident_lists_every_process_of_every_root(proc: FakeProc) -> None:
    assert ProcessTable(proc.folder).resident([100, 200]) == (
        ProcessUse(100, 100, 50 * PAGE),
        ProcessUse(200, 200, 60 * PAGE),
        ProcessUse(101, 100, 5 * PAGE),
        ProcessUse(102, 100, 6 * PAGE),
        ProcessUse(103, 100, 7 * PAGE),
    )


def test_no_roots_read_nothing(tmp_path: Path) -> None:
    assert ProcessTable(tmp_path / "absent").resident(()) == ()


def test_new_roots_show_at_once_and_their_helpers_after_a_scan(proc: FakeProc) -> None:
    clock = FakeClock()
    table = ProcessTable(proc.folder, clock)
    assert table.resident([200]) == (ProcessUse(200, 200, 60 * PAGE),)

    proc.add(201, parent=200, session=200, pages=3)
    proc.add(200, pages=61)
    clock.advance(0.25)
    assert table.resident([200, 100]) == (
        ProcessUse(200, 200, 61 * PAGE),
        ProcessUse(100, 100, 50 * PAGE),
    )
    clock.advance(1)
    assert ProcessUse(201, 200, 3 * PAGE) in table.resident([200])


def test_processes_that_end_between_scans_are_left_out(proc: FakeProc) -> None:
    table = ProcessTable(proc.folder, FakeClock())
    table.resident([100, 200])
    proc.remove(101)
    proc.remove(200)
    # Its pid goes to a stranger.
    proc.add(102, parent=1, session=1)

    assert [use.pid for use in table.resident([100, 200])] == [100]


class _Counting(ProcessTable):
    """Notes which processes are read."""

    def __init__(self, proc: Path, clock: FakeClock) -> None:
        self.read: list[int] = []
        super().__init__(proc, clock)

    def read_stat(self, pid: int) -> ProcessStat | None:
        self.read.append(pid)
        return super().read_stat(pid)


def test_a_scan_reads_what_is_new_and_orphans(proc: FakeProc) -> None:
    clock = FakeClock()
    table = _Counting(proc.folder, clock)
    table.resident([100])
    assert {1, 101, 200, 300} <= set(table.read), "the first scan reads all"

    # A helper comes; another has lost its parent to the root, which looks after orphans.
    proc.add(104, parent=101, session=104, pages=4)
    proc.add(105, parent=106, session=105, pages=4)
    proc.add(106, parent=100, session=106)
    clock.advance(SCAN_INTERVAL_S)
    table.resident([100])
    shutil.rmtree(proc.folder / "106")
    proc.add(105, parent=100, session=105, pages=8)
    table.read.clear()
    clock.advance(SCAN_INTERVAL_S)

    uses = {use.pid: use.used_bytes for use in table.resident([100])}
    assert uses[104] == 4 * PAGE and uses[105] == 8 * PAGE
    assert not {1, 200, 300} & set(table.read), "strangers were read again"
    assert len(table.read) == len(set(table.read)) + 1, (
        "the orphan, for the scan and for its memory"
    )


def test_processes_of_a_new_root_are_found_among_those_known(proc: FakeProc) -> None:
    clock = FakeClock()
    table = _Counting(proc.folder, clock)
    table.resident([200])
    clock.advance(SCAN_INTERVAL_S)
    assert [use.pid for use in table.resident([100])] == [100, 101, 102, 103]


def test_an_id_that_was_a_strangers_is_found_in_the_end(proc: FakeProc) -> None:
    clock = FakeClock()
    table = ProcessTable(proc.folder, clock)
    table.resident([100])
    proc.add(300, parent=100, session=300)
    for _ in range(FULL_SCAN):
        clock.advance(SCAN_INTERVAL_S)
        uses = table.resident([100])
    assert 300 in [use.pid for use in uses]


def test_after_a_pause_nobody_is_taken_for_who_had_the_id(proc: FakeProc) -> None:
    clock = FakeClock()
    table = ProcessTable(proc.folder, clock)
    table.resident([100])
    # It was a stranger's at the first look.
    proc.add(300, parent=100, session=300)
    clock.advance(3600)
    assert 300 in [use.pid for use in table.resident([100])]


def test_a_damaged_stat_is_no_process(proc: FakeProc) -> None:
    (proc.folder / "200" / "stat").write_text("200 (x) S")
    assert ProcessTable(proc.folder).read_stat(200) is None


def test_who_holds_the_gpu(proc: FakeProc) -> None:
    proc.add(400, files=("/dev/null", "/dev/nvidiactl"))
    proc.add(401, files=("/dev/null",))
    table = ProcessTable(proc.folder)
    assert [table.holds_gpu(pid) for pid in (400, 401, 999)] == [True, False, False]


def test_namespaces(proc: FakeProc, tmp_path: Path) -> None:
    table = ProcessTable(proc.folder)
    assert table.in_initial_namespace()
    proc.set_namespace("pid:[4026532265]")
    assert not table.in_initial_namespace()
    assert not ProcessTable(tmp_path / "absent").in_initial_namespace()


def test_without_proc_psutil_answers(tmp_path: Path) -> None:
    table = ProcessTable(tmp_path / "absent")
    me = os.getpid()

    (use, *_) = table.resident([me, 2**22 + 1])
    assert (use.pid, use.root_pid) == (me, me)
    assert (use.used_bytes or 0) > 2**20
    assert table.root_of(me, {os.getppid()}) == os.getppid()
    assert table.root_of(me, {os.getsid(0)}) == os.getsid(0)
    assert table.root_of(2**22 + 1, {me}) is None


def test_without_proc_processes_may_end_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    class Ended:
        pid = 5

        def memory_info(self) -> object:
            raise psutil.NoSuchProcess(5)

        def children(self, recursive: bool) -> list[object]:
            return []

    monkeypatch.setattr(psutil, "Process", lambda pid: Ended())
    assert ProcessTable(tmp_path / "absent").resident([5]) == ()


def test_scans_take_a_bounded_share_of_the_time(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    def list_slowly(folder: str) -> list[str]:
        clock.advance(0.5)
        return ["100"]

    monkeypatch.setattr(os, "listdir", list_slowly)
    table = ProcessTable(proc.folder, clock)
    scans = 0
    for _ in range(50):
        before_s = clock.now()
        table.resident([100])
        scans += clock.now() > before_s
        clock.advance(0.25)
    # Half a second each: one in ten seconds.
    assert scans == 2


def test_a_dead_process_that_nobody_has_reaped_holds_nothing(proc: FakeProc) -> None:
    proc.add(104, parent=100, session=100, pages=0)
    table = ProcessTable(proc.folder)
    assert 104 not in [use.pid for use in table.resident([100])]
