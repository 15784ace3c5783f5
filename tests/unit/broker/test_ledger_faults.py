"""A ledger whose file is full, damaged, removed or held by a process that is stopped: no flow is held up by it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.broker import host_ledger
from prefect_gpu.broker import ledger as ledger_module
from prefect_gpu.broker.host_ledger import HostStore, Owner
from prefect_gpu.broker.ledger import Ledger, Written
from prefect_gpu.clock import DEADLOCK_S, FakeClock
from tests.unit.broker.broker_rig import Rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig
from tests.unit.broker.test_ledger import all_of, attach, entry
from tests.unit.scheduling.values import reserved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ledger"
    made.mkdir()
    return made


@pytest.fixture
def make(folder: Path) -> Callable[[], Ledger]:
    return lambda: Ledger(lambda: HostStore(folder, owners_s=0.0))


def hold(ledger: Ledger, name: str, pid: int | None = None) -> None:
    """Reserve memory, as a broker does: again where the decision was made on what has changed."""
    while not ledger.try_write(ledger.view().version, {name: entry(name, reserved(by=name))}):
        pass
    if pid is not None:
        attach(ledger, name, pid)


def held(ledger: Ledger) -> set[str]:
    return {reservation.request_id for reservation in all_of(ledger.view())}


def store_of(ledger: Ledger) -> HostStore:
    store = ledger._open()
    assert isinstance(store, HostStore)
    return store


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def use_alone(ledger: Ledger) -> None:
    """Do all that a broker does with a ledger, which must share nothing and say why."""
    hold(ledger, "late", 11)
    ledger.poll()
    assert ledger.view().processes["late"] == 11
    ledger.release("late")
    assert "late" not in held(ledger)
    assert ledger.problem


# Disk full.


def test_a_full_database_is_left_with_one_warning_and_others_see_nothing_of_the_process_any_more(
    make: Callable[[], Ledger], caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = make(), make()
    hold(theirs, "theirs")
    hold(mine, "mine", 7)
    assert held(theirs) == {"mine", "theirs"}
    database = store_of(mine)._db
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    number = 0
    while not mine.problem:
        hold(mine, f"r{number}")
        number += 1
    assert "database or disk is full" in mine.problem
    assert held(mine) == {"mine", *(f"r{each}" for each in range(number))}
    assert mine.view().processes == {"mine": 7}, "it was started while the ledger was shared"
    use_alone(mine)
    assert len(warnings(caplog)) == 1
    # Its memory shows where it is measured.
    assert held(theirs) == {"theirs"} and theirs.problem == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mount = shutil.which("mount")
    done = None if mount is None else subprocess.run([mount, *options], capture_output=True)
    if done is None or done.returncode:
        pytest.skip("this user or container may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("how", ["full", "full in use", "read-only"])
def test_a_disk_that_takes_no_more_costs_one_warning(
    how: str, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fill() -> None:
        with (small_disk / "other data").open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096) == 4096:
                    pass
            except OSError:
                pass

    ledger = Ledger(lambda: HostStore(small_disk, owners_s=0.0))
    if how == "full in use":
        hold(ledger, "mine", 7)
        assert ledger.problem == ""
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    else:
        fill()
    number = 0
    while not ledger.problem:
        hold(ledger, f"r{number}", number)
        number += 1
    use_alone(ledger)
    assert len(warnings(caplog)) == 1 and str(small_disk) in ledger.problem


# Garbage.


def test_garbage_in_the_file_of_a_ledger_in_use_costs_one_warning(
    make: Callable[[], Ledger], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = make(), make()
    hold(mine, "mine", 7)
    hold(theirs, "theirs")
    for name in ("ledger.db", "ledger.db-wal"):
        with (folder / name).open("r+b") as file:
            file.write(os.urandom(1 << 16))
    hold(theirs, "more")
    number = 0
    while not mine.problem and number < 2000:
        hold(mine, f"r{number}")
        number += 1
    use_alone(mine)
    assert {"mine", *(f"r{each}" for each in range(number))} == held(mine)
    assert len(warnings(caplog)) <= 2, "one of each process"


def text_of(**fields: Any) -> str:
    odd = entry("odd", reserved(by="odd"), **fields)
    return host_ledger._ENTRY.dump_json(odd).decode()


GARBAGE: dict[str, object] = {
    "no JSON": "text",
    "another form": '{"request": 1}',
    "a number": 7,
    "bytes": b"\xff\x00",
    "more sizes than devices": text_of(owner="x", pid=1, held_bytes=(1, 2, 3)),
}


def insert(folder: Path, owner: str, text: object) -> None:
    """Write a row for a request `odd`, as another program does."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as database, database:
        database.execute(
            "INSERT INTO log (at_s, owner, request, promises, entry) VALUES (0, ?, 'odd', 1, ?)",
            (owner, text),
        )


@pytest.mark.parametrize("what", GARBAGE)
def test_rows_that_a_process_that_is_alive_cannot_have_written_cost_one_warning_of_one_line(
    what: str, make: Callable[[], Ledger], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    mine, other = Ledger(lambda: HostStore(folder, owners_s=0.0), clock.now), make()
    hold(mine, "mine", 7)
    hold(other, "other")
    insert(folder, store_of(other).owner, GARBAGE[what])
    assert held(mine) == {"mine"}
    use_alone(mine)
    for _ in range(3):
        clock.advance(ledger_module.AGAIN_S)
        use_alone(mine)
    assert held(mine) == {"mine"}
    (warning,) = warnings(caplog)
    assert "\n" not in warning and "are not seen from now on" in warning
    # With the process its rows are gone.
    store_of(other).close()
    clock.advance(ledger_module.AGAIN_S)
    assert held(mine) == {"mine"} and not mine.problem
    assert warnings(caplog)[1:] == ["GPU tasks of other processes are seen again"]
    newcomer = make()
    assert held(newcomer) == {"mine"} and not newcomer.problem


@pytest.mark.parametrize(
    ("text", "first"),
    [
        *(
            (text, first)
            for text in GARBAGE.values()
            for first in ("a read", "a write", "a newcomer")
        ),
        (text_of(owner="x"), "a newcomer"),
    ],
)
def test_rows_of_no_process_that_is_alive_are_dropped_with_one_warning(
    text: object,
    first: str,
    make: Callable[[], Ledger],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, theirs, newcomer = make(), make(), make()
    hold(mine, "mine", 7)
    hold(theirs, "theirs")
    insert(folder, "x", text)
    if first == "a read":
        assert held(mine) == {"mine", "theirs"}
    elif first == "a write":
        hold(mine, "more")
        mine.release("more")
    assert held(newcomer) == held(mine) == held(theirs) == {"mine", "theirs"}
    hold(theirs, "late")
    assert held(newcomer) == held(mine) == {"mine", "theirs", "late"}
    assert [each.problem for each in (mine, theirs, newcomer)] == [""] * 3
    (warning,) = warnings(caplog)
    assert "\n" not in warning and "were dropped" in warning


def test_what_a_process_has_said_of_itself_may_be_unreadable(folder: Path) -> None:
    store = HostStore(folder)
    store._db.execute("INSERT INTO owners VALUES ('x', 'text'), ('y', '{\"pid\": 7, \"more\": 1}')")
    assert store.read_owners() == {"x": Owner(), "y": Owner(pid=7)}
    store.close()


# Removed and replaced.


def remove_database(folder: Path) -> None:
    for path in folder.glob("ledger.db*"):
        path.unlink()


def remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replace_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()


@pytest.mark.parametrize("how", [remove_database, remove_all, replace_folder])
@pytest.mark.parametrize("first", ["a process that has it open", "a new process"])
def test_processes_meet_again_in_a_database_that_was_removed_while_they_used_it(
    how: Callable[[Path], None],
    first: str,
    make: Callable[[], Ledger],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two, new = make(), make(), make()
    told: list[str] = []
    two.subscribe(lambda: told.append("two"))
    hold(one, "one", 7)
    hold(two, "two", 8)
    before = one.view(), two.view()
    how(folder)
    if first == "a new process":
        hold(new, "new")
    # Nothing is promised on what was seen in the old file.
    late = {"late": entry("late", reserved(by="late"))}
    for ledger, view in zip((one, two), before, strict=True):
        assert not ledger.try_write(view.version, late)
    hold(new, "new")
    for ledger in (one, two, new, one):
        ledger.poll()
    for ledger in (one, two, new):
        assert held(ledger) == {"one", "two", "new"} and ledger.problem == ""
    assert told, "a broker that waits looks again"
    # What each process has is its own as before, and is written where the others read.
    one.release("one")
    attach(two, "two", 9)
    assert held(two) == held(new) == {"two", "new"}
    assert new.view().processes == {"two": 9}
    assert not one.try_write(before[0].version, late), "decided on the old file"
    assert all("were removed or replaced" in text for text in warnings(caplog))
    assert len(warnings(caplog)) <= 3


@pytest.mark.parametrize("name", ["ledger.db-wal", "ledger.db-shm"])
def test_processes_that_share_see_each_other_when_one_file_of_the_database_was_removed(
    name: str, make: Callable[[], Ledger], folder: Path
) -> None:
    ledgers = [make() for _ in range(3)]
    for number, ledger in enumerate(ledgers):
        hold(ledger, str(number))
    (folder / name).unlink()
    for _ in range(2):
        for ledger in ledgers:
            ledger.poll()
    sharing = {str(number) for number, ledger in enumerate(ledgers) if not ledger.problem}
    for number, ledger in enumerate(ledgers):
        assert held(ledger) == ({str(number)} if ledger.problem else sharing)


def test_a_process_that_leaves_a_removed_database_does_no_harm_to_the_new_one(
    make: Callable[[], Ledger], folder: Path
) -> None:
    old = make()
    hold(old, "old")
    remove_database(folder)
    new, other = make(), make()
    hold(new, "new")
    del old
    hold(new, "more")
    assert held(other) == {"new", "more"}
    assert new._opened == 0, "its files are still there"


def test_a_folder_that_is_removed_costs_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(lambda: HostStore(folder, owners_s=0.0))
    hold(ledger, "mine", 7)
    shutil.rmtree(folder)
    assert held(ledger) == {"mine"} and ledger.view().processes == {"mine": 7}
    use_alone(ledger)
    assert len([text for text in warnings(caplog) if "are not seen from now on" in text]) == 1


def test_a_file_system_whose_files_change_their_numbers_is_given_up(
    make: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make()
    hold(ledger, "mine")
    monkeypatch.setattr(HostStore, "_is_replaced", lambda store: True)
    assert held(ledger) == {"mine"}
    use_alone(ledger)
    assert ledger._opened == ledger_module.MOST_OPENED + 1


# A process that is stopped.

STOPS = """
import os, signal, sys
from pathlib import Path
from prefect_gpu.broker.host_ledger import HostStore
store = HostStore(Path(sys.argv[1]))
store._db.execute("BEGIN IMMEDIATE")
store._db.execute("INSERT INTO owners VALUES ('x', '')")
print("begun", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
store._db.execute("ROLLBACK")
"""


def test_a_process_that_is_stopped_in_the_middle_of_a_write_is_waited_for_once(
    make: Callable[[], Ledger],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_ledger, "BUSY_S", 0.05)
    monkeypatch.setattr(host_ledger, "LEAVING_S", 0.05)
    writes, only_waits = make(), make()
    hold(writes, "mine", 7)
    only_waits.subscribe(lambda: None)
    with subprocess.Popen(
        [sys.executable, "-c", STOPS, str(folder)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        try:
            hold(writes, "more")
            assert "locked" in writes.problem and held(writes) == {"mine", "more"}
            use_alone(writes)
            # It writes nothing but that the other process has left, and is held up no more than once.
            only_waits.poll()
            assert "locked" in only_waits.problem
            assert len(warnings(caplog)) == 2
            newcomer = make()
            use_alone(newcomer)
        finally:
            child.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGKILL], ids=["continued", "killed"])
def test_requests_and_questions_do_not_wait_for_a_process_that_is_stopped_inside_a_write(
    thread_rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(host_ledger, "BUSY_S", DEADLOCK_S)
    writes, write = threading.Event(), HostStore.write

    def note(store: HostStore, *arguments: Any) -> Written:
        writes.set()
        return write(store, *arguments)

    rig = thread_rig
    broker = rig.another(ledger=Ledger(lambda: HostStore(folder)))
    rig.place("a", 20, broker=broker)
    with subprocess.Popen(
        [sys.executable, "-c", STOPS, str(folder)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        try:
            monkeypatch.setattr(HostStore, "write", note)
            fits = rig.submit("b", 4, broker=broker)
            assert writes.wait(DEADLOCK_S)
            late = rig.submit("c", 20, broker=broker)
            assert rig.why(late).startswith("20GiB on device 0; most free ")
            assert not fits.decided
        finally:
            child.send_signal(how)
    rig.decided(fits)
    assert broker.problem == ""


def test_a_ledger_of_another_release_is_named_where_a_task_waits(folder: Path) -> None:
    other = HostStore(folder)
    other._db.execute("PRAGMA user_version = 99")
    rig = Rig(ledger=Ledger(lambda: HostStore(folder)))
    rig.place("a", 20)
    waiting = rig.submit("b", 20)
    assert rig.waits(waiting)
    said = rig.why(waiting)
    assert "has schema 99 and this release of prefect-gpu uses schema 2" in said
    other.close()
