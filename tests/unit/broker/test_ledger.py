"""The ledger: entries of requests, written only on the version that they were decided on."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefect_gpu.broker import host_ledger
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import (
    AGAIN_S,
    Entry,
    Ledger,
    LedgerView,
    Store,
    StoreError,
)
from prefect_gpu.broker.phases import Phase, Trigger, Wish, Wisher
from prefect_gpu.broker.preempting import lower, move
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices import shared_folder
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.scheduling.backfill import BlockedStatus
from prefect_gpu.scheduling.model import ModelBudgets, Request, Reservation
from tests.unit.scheduling.values import request, reserved
from tests.unit.test_process_resources import in_fork


def entry(name: str, *held: Reservation, **others: object) -> Entry:
    """What the ledger has of a request; without reservations it waits."""
    given = {"phase": Phase.PLACED if held else Phase.WAITING, **others}
    return Entry(request(1, name=name), reservations=held, **given)  # type: ignore[arg-type]


def attach(ledger: Ledger, name: str, pid: int, runs: bool = False) -> None:
    """Write that a request has a process, and whether its body runs."""
    fields = {"phase": Phase.RUNNING, "pid": pid, "running": runs}
    ledger.rewrite(name, lambda each: replace(each, **fields), announces=False)


def all_of(view: LedgerView) -> tuple[Reservation, ...]:
    return tuple(r for group in view.by_device.values() for r in group)


def nothing() -> None:
    pass


@pytest.fixture(params=["one process", "processes of a machine"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    shared = request.param != "one process"
    return Ledger((lambda: HostStore(tmp_path)) if shared else Store)


def test_reservations_are_written_only_on_the_version_they_were_decided_on(ledger: Ledger) -> None:
    before = ledger.view()
    first, second = reserved(0, by="a"), reserved(1, by="a")
    assert ledger.try_write(before.version, {"a": entry("a", first, second)})
    assert all_of(ledger.view()) == (first, second)
    assert not ledger.try_write(before.version, {"b": entry("b", reserved(by="b"))})
    assert all_of(ledger.view()) == (first, second)
    third = reserved(2, by="b")
    assert ledger.try_write(ledger.view().version, {"b": entry("b", third)})
    assert all_of(ledger.view()) == (first, second, third)


def test_a_decision_on_an_entry_that_another_thread_has_changed_or_released_is_not_written(
    ledger: Ledger,
) -> None:
    leaving = entry("a", reserved(by="a"), phase=Phase.LEAVING)
    ledger.try_write(0, {"a": leaving, "b": entry("b", reserved(1, by="b"))})
    before, seen = ledger.view(), ledger.running()
    ledger.rewrite("a", lambda each: move(each, Trigger.MOVED_OUT, "away", 0.0))
    ledger.release("b")
    for name in "ab":
        asked = replace(seen[name], wish=Wish(Wisher.REQUEST, "c"))
        assert not ledger.try_write(before.version, {name: asked, "c": entry("c")})
    assert ledger.running().keys() == {"a"}
    assert ledger.running()["a"].away
    asked = replace(ledger.running()["a"], wish=Wish(Wisher.PERSON))
    assert ledger.try_write(ledger.view().version, {"a": asked})


def test_a_suspended_task_that_has_left_its_device_gets_none_by_a_smaller_budget(
    ledger: Ledger,
) -> None:
    ledger.try_write(0, {"a": entry("a", reserved(by="a")), "b": entry("b", phase=Phase.RELEASED)})
    smaller = replace(reserved(by="a"), reserved_bytes=1)
    for name in "ab":
        ledger.rewrite(name, lambda each: lower(each, (smaller,)))
    assert all_of(ledger.view()) == (smaller,)


def test_a_view_is_one_moment(ledger: Ledger) -> None:
    before = ledger.view()
    assert ledger.view() is before
    ledger.try_write(before.version, {"a": entry("a", reserved(by="a"))})
    assert all_of(before) == ()
    assert ledger.view() != before


def test_the_reservations_of_a_device_are_one_object_until_they_change(ledger: Ledger) -> None:
    ledger.try_write(0, {"a": entry("a", reserved(0, by="a"))})
    (before,) = ledger.view().by_device.values()
    ledger.try_write(ledger.view().version, {"b": entry("b", reserved(1, by="b"))})
    attach(ledger, "a", 1)
    assert next(iter(ledger.view().by_device.values())) is before


def test_a_release_calls_each_watcher_once(ledger: Ledger) -> None:
    told: list[str] = []
    ledger.subscribe(lambda: told.append("one"))
    ledger.subscribe(lambda: told.append("two"))
    ledger.try_write(0, {"a": entry("a", reserved(by="a"))})
    assert told == []
    ledger.release("a")
    assert (told, all_of(ledger.view())) == (["one", "two"], ())
    ledger.release("a")
    ledger.release("unknown")
    assert told == ["one", "two"]


def test_processes_are_named_for_as_long_as_they_hold_something(ledger: Ledger) -> None:
    attach(ledger, "a", 1)
    assert ledger.view().processes == {}
    ledger.try_write(0, {"a": entry("a", reserved(by="a"))})
    attach(ledger, "a", 1)
    attach(ledger, "a", 2)
    assert ledger.view().processes == {"a": 2}
    ledger.release("a")
    assert ledger.view().processes == {}


def test_the_memory_of_the_machine_is_promised_until_a_body_runs(ledger: Ledger) -> None:
    asked = replace(request(1, name="a"), host_bytes=7)
    assert ledger.try_write(0, {"a": Entry(asked)})
    assert ledger.view().host_promised_bytes == 0, "it waits"
    ledger.try_write(
        ledger.view().version, {"a": replace(entry("a", reserved(by="a")), request=asked)}
    )
    assert ledger.view().host_promised_bytes == 7
    assert ledger.view().host_use == {("node", "SIM-0"): (1, 7)}
    attach(ledger, "a", 1, runs=True)
    assert ledger.view().host_promised_bytes == 0
    assert ledger.view().host_use == {("node", "SIM-0"): (1, 0)}
    ledger.release("a")
    assert ledger.view().host_use == {}


def test_changes_are_written_all_or_none_without_a_call_of_the_watchers(ledger: Ledger) -> None:
    told: list[str] = []
    ledger.subscribe(lambda: told.append("one"))
    ledger.try_write(0, {"b": entry("b", reserved(by="b"))})
    attach(ledger, "b", 1)
    before = ledger.view()
    changes = {"a": entry("a", reserved(by="a")), "b": entry("b", pid=1)}
    assert not ledger.try_write(0, changes)
    assert ledger.view() == before
    assert ledger.try_write(before.version, changes)
    view = ledger.view()
    assert [r.request_id for r in all_of(view)] == ["a"] and view.processes == {}
    assert told == []


def test_a_broker_is_given_all_entries_and_then_those_that_change(ledger: Ledger) -> None:
    ledger.try_write(0, {"early": entry("early")})
    subscription = ledger.subscribe(nothing)
    assert set(ledger.read(subscription)[1]) == {"early"}
    ledger.try_write(ledger.view().version, {"late": entry("late")})
    held = entry("early", reserved(by="early"))
    ledger.try_write(ledger.view().version, {"early": held})
    ledger.release("late")
    view, changes = ledger.read(subscription)
    assert view == ledger.view()
    assert changes["late"] is None
    assert changes["early"] is not None and changes["early"].reservations == held.reservations
    assert ledger.read(subscription) == (view, {})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_process_begins_with_an_empty_ledger() -> None:
    ledger = Ledger()
    ledger.try_write(0, {"a": entry("a", reserved(by="a"))})
    assert in_fork(lambda: all_of(ledger.view()) == ())
    assert len(all_of(ledger.view())) == 1


# Several processes.


@pytest.fixture
def shared(tmp_path: Path) -> Callable[[], Ledger]:
    return lambda: Ledger(lambda: HostStore(tmp_path))


def test_two_processes_never_reserve_on_the_same_version(shared: Callable[[], Ledger]) -> None:
    one, two = shared(), shared()
    before = one.view(), two.view()
    assert one.try_write(before[0].version, {"a": entry("a", reserved(by="a"))})
    assert not two.try_write(before[1].version, {"b": entry("b", reserved(by="b"))})
    assert [r.request_id for r in all_of(two.view())] == ["a"]


def test_what_a_process_writes_of_its_own_requests_disturbs_no_other(
    shared: Callable[[], Ledger],
) -> None:
    one, two = shared(), shared()
    one.try_write(0, {"a": entry("a", reserved(by="a"))})
    before = two.view()
    attach(one, "a", 1, runs=True)
    one.try_write(one.view().version, {"waits": entry("waits")})
    assert two.try_write(before.version, {"b": entry("b", reserved(by="b"))})


def test_a_release_is_seen_by_another_process_at_its_next_look(
    shared: Callable[[], Ledger],
) -> None:
    one, two = shared(), shared()
    told: list[str] = []
    one.try_write(0, {"a": entry("a", reserved(by="a"))})
    two.subscribe(lambda: told.append("two"))
    two.poll()
    assert told == []
    one.release("a")
    two.poll()
    two.poll()
    assert told == ["two"] and all_of(two.view()) == ()


def test_a_request_is_written_as_it_was_asked(shared: Callable[[], Ledger]) -> None:
    one, two = shared(), shared()
    asked = {
        "bytes": request(3, name="bytes", priority=-1, devices=("SIM-0",)),
        "a byte": Request("a byte", "a", 0, 0.0, memory=1),
        "a whole device's share": request(share=1.0, name="a whole device's share"),
        "models": replace(request(name="models"), memory=ModelBudgets((("H200", 5),))),
        "a device to itself": request(name="a device to itself", exclusive=True, expected_s=1.5),
    }
    status = BlockedStatus(3, 1.5, (("host", "SIM-0"),), 2.5)
    one.try_write(0, {i: Entry(r, status=status, devices=(("h", "u"),)) for i, r in asked.items()})
    _, found = two.read(two.subscribe(nothing))
    assert {i: e.request for i, e in found.items() if e is not None} == asked
    assert isinstance(found["a byte"].request.memory, int)
    assert isinstance(found["a whole device's share"].request.memory, float)
    assert {e.status for e in found.values() if e is not None} == {status}


def test_a_change_of_a_request_that_has_gone_meanwhile_is_not_written(
    shared: Callable[[], Ledger],
) -> None:
    one, two = shared(), shared()
    waits = entry("a")
    one.try_write(0, {"a": waits})
    version = two.view().version
    one.release("a")
    passed = replace(waits, status=BlockedStatus(passed=1))
    assert not two.try_write(version, {"a": passed})
    assert two.entry("a") is None


def test_a_process_of_another_pid_namespace_is_not_named(shared: Callable[[], Ledger]) -> None:
    one, two = shared(), shared()
    one.try_write(0, {"a": entry("a", reserved(by="a"), pid=7)})
    assert two.view().processes == {"a": 7}
    one.rewrite("a", lambda each: replace(each, namespace="pid:[1]"))
    assert two.view().processes == {}
    assert two.view().tasks == 1


# The ends of processes.


def release_lock(store: HostStore) -> None:
    """Do to a store in this process what the kernel does when a process ends."""
    nothing_open = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing_open, store._hold.descriptor, inheritable=False)
    os.close(nothing_open)


def in_process(folder: Path, *names: str) -> subprocess.Popen[str]:
    """Start a process that waits and holds something in a ledger, until it is told to end."""
    program = f"""
import sys
from pathlib import Path
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from tests.unit.broker.test_ledger import entry, reserved
ledger = Ledger(lambda: HostStore(Path({str(folder)!r})))
for name in {names!r}:
    held = (reserved(by=name),) if name.startswith("holds") else ()
    assert ledger.try_write(ledger.view().version, {{name: entry(name, *held)}})
print("written", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "written\n"
    return child


def entries(ledger: Ledger) -> set[str]:
    """Return the ids of all requests that a ledger has, once the ends of processes were looked for."""
    subscription = ledger.subscribe(nothing)
    held = {r.request_id for r in all_of(ledger.view())}
    return held | set(subscription.changes)


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_what_a_process_had_is_gone_with_it(how: str, tmp_path: Path) -> None:
    ledger = Ledger(lambda: HostStore(tmp_path, owners_s=0.0))
    ledger.try_write(0, {"mine": entry("mine", reserved(by="mine")), "waits": entry("waits")})
    with in_process(tmp_path, "holds", "waits too") as child:
        assert entries(ledger) == {"mine", "waits", "holds", "waits too"}
        # That it has noted something of another's request does not make the request its own.
        if how == "killed":
            child.kill()
        child.communicate()
    assert entries(ledger) == {"mine", "waits"}
    assert len(list(tmp_path.glob("*.lock"))) == 1


def test_a_process_that_passed_another_ones_request_does_not_take_it_along(tmp_path: Path) -> None:
    stores: list[HostStore] = []

    def open_store() -> HostStore:
        stores.append(HostStore(tmp_path, owners_s=0.0))
        return stores[-1]

    mine, theirs = Ledger(open_store), Ledger(open_store)
    mine.try_write(0, {"waits": entry("waits")})
    theirs.subscribe(nothing)
    waits = theirs.entry("waits")
    assert waits is not None
    passed = replace(waits, status=BlockedStatus(passed=1))
    assert theirs.try_write(theirs.view().version, {"waits": passed})
    release_lock(stores[1])
    assert entries(mine) == {"waits"}
    assert mine.entry("waits") == passed


def test_a_fork_does_not_keep_its_parent_alive(tmp_path: Path) -> None:
    ledger = Ledger(lambda: HostStore(tmp_path, owners_s=0.0))
    ledger.view()
    program = f"""
import os, sys
from pathlib import Path
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from tests.unit.broker.test_ledger import entry, reserved
ledger = Ledger(lambda: HostStore(Path({str(tmp_path)!r})))
assert ledger.try_write(ledger.view().version, {{"holds": entry("holds", reserved(by="holds"))}})
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.close(read)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "forked\n"
        child.wait()
        assert entries(ledger) == set()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_of_a_process_that_uses_the_ledger_use_it_too(tmp_path: Path) -> None:
    ledger = host_ledger.host_ledger(tmp_path)
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            if ledger.try_write(ledger.view().version, {"a": entry("a", reserved(by="a"))}):
                ledger.release("a")

    def uses_it() -> bool:
        own = host_ledger.host_ledger(tmp_path)
        while not own.try_write(own.view().version, {"b": entry("b", reserved(by="b"))}):
            pass
        return not own.problem

    user = threading.Thread(target=use)
    user.start()
    try:
        assert [in_fork(uses_it) for _ in range(10)] == [True] * 10
    finally:
        over.set()
        user.join()
    assert not ledger.problem
    assert entries(Ledger(lambda: HostStore(tmp_path, owners_s=0.0))) == set()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_uses_the_ledger_outlives_the_process(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
from prefect_gpu.broker.host_ledger import HostStore, host_ledger
from prefect_gpu.broker.ledger import Ledger
from tests.unit.broker.test_ledger import entry, reserved
folder = Path({str(tmp_path)!r})
def hold(name):
    ledger = host_ledger(folder)
    assert ledger.try_write(ledger.view().version, {{name: entry(name, reserved(by=name))}})
    return ledger
parents = hold("the parent's")
if os.fork() == 0:
    sys.stdin.read(1)
    hold("the fork's")
    print("holds", flush=True)
    sys.stdin.read(1)
    print(repr(hold("more").problem), flush=True)
    os._exit(0)
parents._store.close()
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.wait()
        child.stdin.write("1")
        child.stdin.flush()
        assert child.stdout.readline() == "holds\n"
        ledger = Ledger(lambda: HostStore(tmp_path, owners_s=0.0))
        assert entries(ledger) == {"the fork's"}
        child.stdin.write("2")
        child.stdin.flush()
        assert child.stdout.readline() == "''\n"


def test_two_paths_of_one_folder_are_one_ledger(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert host_ledger.host_ledger(tmp_path / "link") is host_ledger.host_ledger(tmp_path / "real")


def test_the_locks_of_processes_that_wrote_nothing_are_removed(tmp_path: Path) -> None:
    looked = [HostStore(tmp_path) for _ in range(3)]
    for each in looked:
        release_lock(each)
    store = HostStore(tmp_path)
    assert [path.name for path in tmp_path.glob("*.lock")] == [f"{store.owner}.lock"]


#: A row of schema 2. Releases with this number read and write it: a change of it needs another one, but for a new
#: field with a default, which releases without it ignore.
ROW_2 = (
    '{"request":{"id":"a","task_name":"train","sequence":7,"submitted_s":1.5,"memory":6442450944,"count":1,'
    '"devices":["SIM-0"],"exclusive":true,"priority":5,"host_bytes":3,"expected_s":60.0,"origin":"","nodes":[],'
    '"standby":"","task_run_id":"5f","task_run_name":"train-1","flow_run_id":"6e","probe_fraction":0.0,"confirms_probe":false,"preemptible":true,"returns":false,"returns_first":false,"ancestors":[],"fills":false,"client":false},"owner":"0123","node":"node-1","broker":1,"phase":"away","wish":{"by":"request","request_id":"b","shared":false},"reservations":[{"request_id":"a","machine":"node","device_uuid":'
    '"SIM-0","reserved_bytes":6442450944,"exclusive":true,"task_name":"train","ends_s":90.0,"probe":null,"loans":[],"fills":false}],'
    '"devices":[["node","SIM-0"]],"status":[2,1.0,[["node","SIM-0"]],3.0,4.0],"max_processes":8,"pid":42,'
    '"namespace":"pid:[1]","held_bytes":[1024],"waits":false,"running":true,'
    '"suspension":"away","placed_s":4.5,"rests_until_s":64.5}'
)


def test_releases_with_one_schema_read_and_write_the_same_rows() -> None:
    read = host_ledger._row(1, "a", 1, ROW_2).entry
    assert read == Entry(
        Request(
            *("a", "train", 7, 1.5, 6 << 30, 1, ("SIM-0",), True, 5),
            host_bytes=3,
            expected_s=60.0,
            task_run_id="5f",
            task_run_name="train-1",
            flow_run_id="6e",
            preemptible=True,
        ),
        owner="0123",
        node="node-1",
        broker=1,
        phase=Phase.AWAY,
        wish=Wish(Wisher.REQUEST, "b"),
        reservations=(Reservation("a", "node", "SIM-0", 6 << 30, True, "train", 90.0),),
        devices=(("node", "SIM-0"),),
        status=BlockedStatus(2, 1.0, (("node", "SIM-0"),), 3.0, 4.0),
        max_processes=8,
        pid=42,
        namespace="pid:[1]",
        held_bytes=(1024,),
        running=True,
        suspension="away",
        placed_s=4.5,
        rests_until_s=64.5,
    )
    assert host_ledger._ENTRY.dump_json(read).decode() == ROW_2
    assert host_ledger.SCHEMA == 2
    older = ROW_2.replace(',"nodes":[],"standby":""', "").replace(',"running":true', "")
    assert host_ledger._row(1, "a", 1, older).entry == replace(read, running=False)
    newer = ROW_2.replace('"owner"', '"added later":[1],"owner"')
    assert host_ledger._row(1, "a", 1, newer).entry == read


def test_entries_say_on_which_node_their_process_is(shared: Callable[[], Ledger]) -> None:
    one, other = shared(), shared()
    one.try_write(one.view().version, {"a": entry("a", reserved(by="a"))})
    other.view()
    found = other.entry("a")
    assert found is not None and found.node == socket.gethostname()


def test_a_process_that_starts_beside_another_keeps_its_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, try_lock = SharedFolder._make, shared_folder._try_lock
    second, made = list[HostStore](), list[str]()
    opens = threading.Thread(target=lambda: second.append(HostStore(tmp_path, owners_s=0.0)))
    checks, tried = threading.Event(), threading.Event()

    def make_and_let_another_open(folder: SharedFolder, name: str) -> None:
        make(folder, name)
        if name.endswith(".lock") and not opens.ident:
            # The first process has made its lock file, and has not locked it yet.
            made.append(os.path.realpath(tmp_path / name))
            opens.start()
            checks.wait(0.3)

    def lock_while_another_checks(descriptor: int) -> bool:
        locked = try_lock(descriptor)
        if threading.current_thread() is not opens:
            if opens.ident:
                tried.set()
        elif locked and os.readlink(f"/proc/self/fd/{descriptor}") in made:
            checks.set()
            tried.wait(0.3)
        return locked

    monkeypatch.setattr(SharedFolder, "_make", make_and_let_another_open)
    monkeypatch.setattr(shared_folder, "_try_lock", lock_while_another_checks)
    first = Ledger(lambda: HostStore(tmp_path, owners_s=0.0))
    assert first.try_write(first.view().version, {"a": entry("a", reserved(by="a"))})
    opens.join()
    other = Ledger(lambda: second[0])
    assert entries(other) == {"a"} and not first.problem


def test_a_lock_file_that_cannot_be_opened_counts_as_held(tmp_path: Path) -> None:
    (tmp_path / "of another user.lock").mkdir()
    one, other = (Ledger(lambda: HostStore(tmp_path)) for _ in range(2))
    assert one.try_write(one.view().version, {"a": entry("a", reserved(by="a"))})
    assert entries(other) == {"a"} and not one.problem


# Ledgers that cannot be shared.


def test_a_ledger_of_another_release_is_not_shared(tmp_path: Path) -> None:
    other = HostStore(tmp_path)
    other._db.execute("PRAGMA user_version = 99")
    ledger = Ledger(lambda: HostStore(tmp_path))
    assert ledger.try_write(ledger.view().version, {"a": entry("a", reserved(by="a"))})
    assert ledger.problem == (
        f"the ledger in {tmp_path} has schema 99 and this release of prefect-gpu uses schema 2; use one "
        f"release for all flows of this machine"
    )
    other.close()


@pytest.mark.parametrize("how", ["no folder", "no folder, but a file", "no database", "read-only"])
def test_a_ledger_that_cannot_be_used_is_named_once(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ledger"
    if how == "no folder, but a file":
        folder.touch()
    elif how == "no database":
        folder.mkdir()
        (folder / "ledger.db").write_bytes(b"something else" * 1000)
        another = SharedFolder(folder).hold("another process.lock")
        assert another is not None
    elif how == "read-only":
        folder.symlink_to("/proc")
    ledger = Ledger(lambda: HostStore(folder))
    for name in ("a", "b"):
        held = entry(name, reserved(by=name))
        assert ledger.try_write(ledger.view().version, {name: held})
    assert ledger.view().tasks == 2
    assert str(folder) in ledger.problem
    (record,) = caplog.records
    assert "GPU tasks of other processes are not seen from now on" in record.getMessage()


def spoil(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 9000)


def of_another_release(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")


def of_another_start(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA application_id = 99")


def without_its_log(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE log")


def with_a_row_that_cannot_be_read(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "INSERT INTO log (at_s, owner, request, promises, entry) VALUES (0, 'x', 'odd', 1, 'text')"
        )


@pytest.mark.parametrize(
    "change",
    [
        spoil,
        of_another_release,
        of_another_start,
        without_its_log,
        with_a_row_that_cannot_be_read,
    ],
)
def test_a_database_that_cannot_be_used_and_that_no_process_uses_is_replaced(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    past = Ledger(lambda: HostStore(tmp_path))
    assert past.try_write(past.view().version, {"past": entry("past", reserved(by="past"))})
    assert past._store is not None
    past._store.close()
    change(tmp_path / "ledger.db")
    one, other = (Ledger(lambda: HostStore(tmp_path)) for _ in range(2))
    assert one.try_write(one.view().version, {"a": entry("a", reserved(by="a"))})
    assert other.view().tasks == 1
    assert not one.problem and not other.problem
    # A start of the machine is nothing to warn of.
    assert len(caplog.records) == (change is not of_another_start)


def test_a_ledger_that_becomes_unusable_keeps_what_this_process_knows_of_itself(
    tmp_path: Path,
) -> None:
    mine, theirs = (Ledger(lambda: HostStore(tmp_path)) for _ in range(2))
    mine.try_write(0, {"mine": entry("mine", reserved(by="mine"))})
    theirs.try_write(theirs.view().version, {"theirs": entry("theirs", reserved(by="theirs"))})
    assert mine.view().tasks == 2
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("DROP TABLE log")
    database.close()
    attach(mine, "mine", 7)
    assert "no such table: log" in mine.problem
    view = mine.view()
    assert (view.tasks, [r.request_id for r in all_of(view)]) == (1, ["mine"])
    attach(mine, "mine", 7)
    assert mine.view().processes == {"mine": 7}
    mine.release("mine")
    assert mine.view().tasks == 0


def test_a_ledger_that_can_be_used_again_is_shared_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    folder = tmp_path / "ledger"
    late, other = Ledger(lambda: HostStore(folder), clock.now), Ledger(lambda: HostStore(folder))
    assert late.try_write(late.view().version, {"mine": entry("mine", reserved(by="mine"))})
    assert late.problem
    clock.advance(AGAIN_S / 2)
    folder.mkdir()
    assert late.view().tasks == 1 and late.problem, "it is not tried at each look"
    other.try_write(other.view().version, {"theirs": entry("theirs", reserved(by="theirs"))})
    version = late.view().version
    clock.advance(AGAIN_S / 2)
    assert late.view().tasks == 2 and not late.problem
    assert not late.try_write(version, {"more": entry("more", reserved(by="more"))})
    assert entries(other) == {"mine", "theirs"}
    assert "GPU tasks of other processes are seen again" in caplog.messages[-1]


def test_a_ledger_that_still_cannot_be_used_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    ledger = Ledger(lambda: HostStore(tmp_path / "not there"), clock.now)
    for _ in range(5):
        ledger.view()
        clock.advance(AGAIN_S)
    assert len(caplog.records) == 1 and ledger.problem


def test_a_process_that_exits_does_not_warn_of_its_own_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(lambda: HostStore(tmp_path))
    ledger.try_write(ledger.view().version, {"a": entry("a", reserved(by="a"))})
    assert ledger._store is not None
    # At the interpreter's exit, while the broker's thread still runs.
    ledger._store.close()
    ledger.release("a")
    assert not caplog.records


def test_a_ledger_is_closed_while_another_thread_uses_it(tmp_path: Path) -> None:
    program = f"""
import threading
from pathlib import Path
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
for _ in range(30):
    ledger = Ledger(lambda: HostStore(Path({str(tmp_path)!r}), owners_s=0.0))
    ledger.view()
    begun = threading.Event()
    def use():
        while not ledger.problem:
            ledger.view()
            begun.set()
    user = threading.Thread(target=use)
    user.start()
    begun.wait()
    # As the interpreter does at its exit.
    ledger._store.close()
    user.join()
print("closed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr[-2000:]


def test_a_process_whose_lock_was_removed_goes_on_alone(tmp_path: Path) -> None:
    mine, theirs = (Ledger(lambda: HostStore(tmp_path, owners_s=0.0)) for _ in range(2))
    mine.try_write(0, {"mine": entry("mine", reserved(by="mine"))})
    for lock in tmp_path.glob("*.lock"):
        lock.unlink()
    assert theirs.view().tasks == 0
    assert mine.view().tasks == 1
    assert "was removed" in mine.problem


def test_the_default_folder_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    monkeypatch.setattr(shared_folder, "default_folder", lambda: folder)
    HostStore()
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="belongs to this user alone"):
        HostStore()


def test_a_link_is_not_followed_to_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(shared_folder, "default_folder", lambda: tmp_path / "link")
    with pytest.raises(StoreError, match="belongs to this user alone"):
        HostStore()


def test_a_folder_of_a_group_has_files_of_the_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    old = os.umask(0o077)
    try:
        store = HostStore(tmp_path)
    finally:
        os.umask(old)
    assert store.read(0) == []
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o660}


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    monkeypatch.setattr(shared_folder.psutil, "disk_partitions", lambda **of_all: [mount])
    with pytest.raises(StoreError, match=r"network file system \(nfs4\)"):
        HostStore(tmp_path)


def test_the_log_is_cut_but_for_what_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ledger, "LOG_ROWS", 10)
    ledger = Ledger(lambda: HostStore(tmp_path))
    assert ledger.try_write(0, {"stays": entry("stays", reserved(by="stays"))})
    for number in range(1100):
        name = f"r{number}"
        assert ledger.try_write(ledger.view().version, {name: entry(name)})
        ledger.release(name)
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        (rows,) = database.execute("SELECT count(*) FROM log").fetchone()
    database.close()
    assert rows < 500
    assert Ledger(lambda: HostStore(tmp_path)).view().tasks == 1


def test_a_process_that_was_stopped_for_long_reads_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ledger, "LOG_ROWS", 10)
    mine, theirs = (Ledger(lambda: HostStore(tmp_path)) for _ in range(2))
    for name in ("mine", "gone", "stays"):
        ledger = mine if name == "mine" else theirs
        held = entry(name, reserved(by=name))
        assert ledger.try_write(ledger.view().version, {name: held})
    before = mine.view()
    theirs.release("gone")
    for number in range(1100):
        theirs.try_write(theirs.view().version, {f"r{number}": entry("r")})
        theirs.release(f"r{number}")
    assert not mine.try_write(before.version, {"late": entry("late", reserved(by="late"))})
    assert {r.request_id for r in all_of(mine.view())} == {"mine", "stays"}
    assert mine.problem == ""


@pytest.mark.parametrize("empty", [True, False], ids=["an empty ledger", "a long stop"])
def test_a_decision_from_before_rows_that_were_left_out_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    monkeypatch.setattr(host_ledger, "LOG_ROWS", 10)
    stopped, other = (Ledger(lambda: HostStore(tmp_path)) for _ in range(2))
    if not empty:
        assert other.try_write(0, {"waits": entry("waits")})
    before = stopped.view()
    assert other.try_write(other.view().version, {"a": entry("a", reserved(by="a"))})
    for pid in range(1, 15):
        attach(other, "a", pid)
    # Another thread of the process reads first, once it goes on.
    assert all_of(stopped.view()) == (reserved(by="a"),)
    assert not stopped.try_write(before.version, {"b": entry("b", reserved(by="b"))})


def test_a_watcher_that_fails_keeps_no_other_from_being_called(ledger: Ledger) -> None:
    called: list[str] = []

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    ledger.subscribe(fail)
    ledger.subscribe(lambda: called.append("second"))
    ledger.try_write(ledger.view().version, {"a": entry("a", reserved(by="a"))})
    ledger.release("a")
    assert called == ["second"]


def test_a_process_whose_lock_cannot_be_read_keeps_no_dead_one_in_the_ledger(
    tmp_path: Path,
) -> None:
    stores = [HostStore(tmp_path, owners_s=0.0) for _ in range(3)]
    ledgers = [Ledger(lambda store=store: store) for store in stores]  # type: ignore[misc]
    for name, each in zip("abc", ledgers, strict=True):
        assert each.try_write(each.view().version, {name: entry(name)})
    unreadable = tmp_path / f"{stores[0].owner}.lock"
    unreadable.unlink()
    unreadable.symlink_to("elsewhere")
    release_lock(stores[1])
    assert entries(ledgers[2]) == {"a", "c"}


def test_a_folder_that_is_a_loop_of_links_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    ledger = Ledger(lambda: HostStore(tmp_path / "a"))
    ledger.view()
    assert "cannot be used" in ledger.problem
