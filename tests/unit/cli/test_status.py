"""`prefect-gpu status`: who holds the devices, who waits and why."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefect_gpu.broker.host_ledger import HostStore, Owner
from prefect_gpu.broker.ledger import Entry, Row
from prefect_gpu.broker.phases import Phase
from prefect_gpu.cli import terminal
from prefect_gpu.cli.commands import main
from prefect_gpu.cli.status import Found, HeldBy, Status, machine_status, status_lines
from prefect_gpu.devices.spec import DeviceSpec, parse_spec
from prefect_gpu.scheduling.model import (
    Device,
    DeviceSnapshot,
    DeviceWork,
    Probe,
    ProcessUse,
    Request,
    Reservation,
)
from prefect_gpu.units import GIB
from tests.fakes.ctrl_c import press_ctrl_c

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]

HERE = "pid:[1]"
DEVICES = [Device(f"GPU-{at}", at, "NVIDIA H200", 100 * GIB, "nvml", "here", at) for at in range(2)]


def snapshot(at: int, free_gib: int, *uses: ProcessUse, **more: Any) -> DeviceSnapshot:
    return DeviceSnapshot(DEVICES[at], 0.0, free_gib * GIB, processes=uses, **more)


def entry(
    name: str, gib: int | None, number: int, on: tuple[int, ...] = (), **more: Any
) -> tuple[str, Entry]:
    """Return an entry of a task, on devices or waiting."""
    memory = None if gib is None else gib * GIB
    request = Request(name, name, number, submitted_s=100.0 - number, memory=memory)
    request = replace(request, priority=more.pop("priority", 0))
    reservations = tuple(
        Reservation(name, "here", f"GPU-{at}", memory or 0, task_name=name) for at in on
    )
    given: dict[str, Any] = {"owner": "flow", "namespace": HERE, "max_processes": 99}
    given |= {"devices": tuple(device.key for device in DEVICES)} | more
    given.setdefault("phase", Phase.RUNNING if on else Phase.WAITING)
    return name, Entry(request, reservations=reservations, **given)


def look(*entries: tuple[str, Entry], snapshots: Any = None, **more: Any) -> Status:
    owners = {"flow": Owner(7, HERE, "ada"), "boxed": Owner(7, "pid:[2]", "bo")}
    given: dict[str, Any] = {
        "owners": owners,
        "placed_s": {},
        "namespace": HERE,
        "available_bytes": 64 * GIB,
        "now_s": 160.0,
        "spec": DeviceSpec("auto"),
        "describe": lambda pid: (f"program-{pid}", "eve"),
    }
    found = [snapshot(0, 100), snapshot(1, 100)] if snapshots is None else snapshots
    return machine_status(Found(found, dict(entries), **{**given, **more}))


def test_a_suspended_task_is_not_shown_as_running() -> None:
    for suspension, state in (("away: 1GiB", "away: 1GiB"), ("not suspended: it uses jax", "runs")):
        (task,) = look(entry("a", 20, 1, (0,), running=True, suspension=suspension)).tasks
        assert task.state == state


def test_a_task_shows_what_it_may_take_and_what_it_has_on_each_of_its_devices() -> None:
    status = look(
        entry("both", 20, 1, (0, 1), pid=50, running=True),
        entry("early", 10, 2, (1,)),
        snapshots=[
            snapshot(0, 88, ProcessUse(50, 50, 8 * GIB), ProcessUse(51, 50, 4 * GIB)),
            snapshot(1, 97, ProcessUse(50, 50, 3 * GIB)),
        ],
        placed_s={"both": 100.0},
    )
    early, both = status.tasks
    assert both.devices == (HeldBy(0, 20 * GIB, 12 * GIB), HeldBy(1, 20 * GIB, 3 * GIB))
    assert (both.state, both.seconds, both.pid) == ("runs", 60.0, 50)
    assert (both.flow_pid, both.user) == (7, "ada")
    assert (early.state, early.seconds, early.pid) == ("starts", None, None)
    assert [device.reserved_bytes for device in status.devices] == [20 * GIB, 30 * GIB]
    # Free: what is neither used by others nor reserved, less the headroom of a quarter of a GiB.
    free_gib = [(device.free_bytes or 0) / GIB for device in status.devices]
    assert free_gib == [79.75, 69.75]
    assert status.others == ()


def test_a_task_shows_how_much_it_computes() -> None:
    (by_mps, entry_of_client) = entry("client", 20, 2, (0,), pid=60, running=True)
    client = replace(entry_of_client, request=replace(entry_of_client.request, client=True))
    status = look(
        entry("busy", 20, 1, (0, 1), pid=50, running=True),
        (by_mps, client),
        entry("early", 10, 3, (1,)),
        snapshots=[
            snapshot(0, 60, work=DeviceWork({50: 0.25, None: 0.5}), busy_fraction=0.75),
            snapshot(1, 60, work=DeviceWork()),
        ],
    )
    found = {t.task: ([held.busy_fraction for held in t.devices], t.sharing) for t in status.tasks}
    assert found == {
        "busy": ([0.25, 0.0], "time"),
        "client": ([None], "mps"),
        "early": ([None], "time"),
    }
    text = "\n".join(status_lines(status))
    assert "runs, MPS" in text and "25%" in text


def test_first_runs_and_tasks_with_a_whole_device_are_told_from_those_with_a_budget() -> None:
    name, first = entry("first", None, 1, (0,), running=True)
    (reservation,) = first.reservations
    probe = replace(reservation, reserved_bytes=40 * GIB, probe=Probe(100.0, 25 * GIB))
    status = look(
        (name, replace(first, reservations=(probe,))),
        entry("whole", None, 2, (1,), running=True),
        entry("known", 8, 3, (1,), running=True),
    )
    marks = {task.task: task.mark for task in status.tasks}
    assert marks == {"first": "first run", "whole": "whole device", "known": ""}
    lines = "\n".join(status_lines(status))
    assert "runs, first run" in lines and "runs, whole device" in lines


def test_other_programs_are_named() -> None:
    status = look(
        entry("own", 1, 1, (0,), pid=50),
        snapshots=[
            snapshot(0, 59, ProcessUse(50, 50, GIB), ProcessUse(60, None, 40 * GIB)),
            snapshot(1, 100, ProcessUse(60, None, None), busy_fraction=0.5),
        ],
    )
    assert status.devices[0].free_bytes == 59 * GIB - GIB // 4
    others = [(other.pid, other.index, other.used_bytes) for other in status.others]
    assert others == [(60, 0, 40 * GIB), (60, 1, None)]
    text = "\n".join(status_lines(status))
    assert "program-60" in text and "eve" in text and "50%" in text


def test_what_waits_is_in_the_order_of_the_queue_with_the_reason_of_each() -> None:
    status = look(
        entry("holder", 90, 1, (0,), running=True),
        entry("other holder", 90, 2, (1,), running=True),
        entry("second", 20, 4),
        entry("alone", None, 5),
        entry("first", 20, 6, priority=3),
    )
    first, second, alone = status.waiting
    assert [each.task for each in status.waiting] == ["first", "second", "alone"]
    assert first.reason == "20GiB on any of 2 devices; most free 9.8GiB"
    assert second.reason.endswith("; 1 ahead in the queue: first")
    assert alone.reason.startswith("a device to itself on any of 2 devices")
    assert second.seconds == 160.0 - 96.0
    lines = status_lines(status)
    assert any("priority 3: 20GiB on any" in line for line in lines)


def test_a_task_that_may_use_one_device_waits_for_that_one_alone() -> None:
    status = look(
        entry("holder", 90, 1, (0,), running=True),
        entry("pinned", 20, 2, devices=(DEVICES[0].key,)),
    )
    (waiting,) = status.waiting
    assert waiting.reason.startswith("20GiB on device 0; ")


def test_the_limit_of_processes_and_the_machines_own_memory_are_reasons_too() -> None:
    status = look(
        entry("holder", 10, 1, (0,), running=True), entry("limited", 10, 2, max_processes=1)
    )
    assert status.waiting[0].reason.startswith("another process to end (max_processes is 1)")
    name, large = entry("large", 10, 3)
    large = replace(large, request=replace(large.request, host_bytes=100 * GIB))
    status = look(entry("holder", 10, 1, (0,), running=True), (name, large))
    assert "100GiB of host memory" in status.waiting[0].reason


def test_numbers_of_processes_in_another_container_are_not_shown() -> None:
    status = look(
        entry(
            *("boxed", 20, 1, (0,)),
            owner="boxed",
            namespace="pid:[2]",
            pid=50,
            running=True,
            devices=(DEVICES[0].key,),
            held_bytes=(12 * GIB,),
        ),
        snapshots=[snapshot(0, 88), snapshot(1, 100)],
    )
    (task,) = status.tasks
    assert (task.pid, task.flow_pid, task.user) == (None, None, "bo")
    assert task.devices == (HeldBy(0, 20 * GIB, 12 * GIB),), "as its own flow has measured it"
    assert "boxed" in "\n".join(status_lines(status))


def test_a_device_that_fails_says_why_and_those_of_other_tasks_are_left_out() -> None:
    elsewhere = entry("elsewhere", 10, 1, devices=(("here", "GPU-9"),))
    status = look(elsewhere, snapshots=[snapshot(0, 0, error="fell off the bus")])
    assert status.waiting == () and status.devices[0].used_bytes is None
    text = "\n".join(status_lines(status))
    assert "fell off the bus" in text and "no tasks waiting" in text


def write_entries(folder: Path, *entries: tuple[str, Entry]) -> HostStore:
    store = HostStore(folder)
    rows = [
        Row(0, name, bool(each.reservations), replace(each, owner=store.owner))
        for name, each in entries
    ]
    store.write(0, rows, lambda row: False)
    return store


def test_the_command_reads_the_ledger(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_LEDGER", str(tmp_path))
    given = ["status", "--devices", "simulated:2x8GiB@status", "--json"]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == found["waiting"] == []
    from prefect_gpu.devices.spec import open_reader, parse_spec

    devices = open_reader(parse_spec(given[2]), {}, shared=tmp_path).devices()
    name, held = entry("held", 3, 1, (0,), running=True)
    keys = tuple(device.key for device in devices)
    machine, uuid = keys[0]
    reservation = replace(held.reservations[0], machine=machine, device_uuid=uuid)
    store = write_entries(
        tmp_path,
        (name, replace(held, reservations=(reservation,), devices=keys)),
        entry("waits", 7, 2, devices=keys),
        entry("waits more", 7, 3, devices=keys),
    )
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    (task,) = found["tasks"]
    assert (task["task"], task["flow_pid"]) == ("held", os.getpid())
    assert 0 <= task["seconds"] < 600
    assert [each["task"] for each in found["waiting"]] == ["waits", "waits more"]
    assert found["devices"][0]["reserved_bytes"] == 3 * GIB
    store.close()
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == [], "its process has left"


def test_an_unusable_ledger_is_one_line(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_LEDGER", str(tmp_path / "missing"))
    assert main(["status", "--devices", "host"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prefect-gpu: the ledger in ") and error.count("\n") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_watch_repeats_until_ctrl_c(is_terminal: bool, monkeypatch: Patch, capsys: Capture) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        terminal, "Console", lambda: Console(file=shown, force_terminal=is_terminal, width=20)
    )
    times: list[int] = []

    def show() -> str:
        times.append(len(times))
        if len(times) == 4:
            press_ctrl_c()
        return f"reading {len(times)} is longer than the line"

    terminal.repeat(show, 0.01)
    printed = shown.getvalue() if is_terminal else capsys.readouterr().out
    assert "reading 1" in printed and "reading 3" in printed
    assert ("the line" in printed) is not is_terminal, "a terminal's lines are cut"


HOST = Device("HOST-1", 0, "memory of here", 64 * GIB, "host", "here", 0)
PRIVATE = "simulated:2x8GiB is private to each process, so no tasks of flows are shown; write simulated:2x8GiB@NAME in the flow and for --devices"
NOT_SHOWN = "flows on simulated devices are not shown here; write simulated:2x24GiB@NAME in the flow and for --devices"


@pytest.mark.parametrize(
    ("devices", "device", "entries", "hint"),
    [
        pytest.param("simulated:2x8GiB", replace(HOST, kind="simulated"), [], PRIVATE, id="simulated devices without a name"),
        pytest.param("auto", HOST, [], NOT_SHOWN, id="the memory of the machine"),
        pytest.param("auto", HOST, ["task"], None, id="the memory of the machine with a task"),
        pytest.param("simulated:2x8GiB@demo", replace(HOST, kind="simulated"), [], None, id="a name"),
        pytest.param("auto", DEVICES[0], [], None, id="a GPU"),
    ],
)  # fmt: skip
def test_status_says_which_flows_it_cannot_see(
    devices: str, device: Device, entries: list[str], hint: str | None
) -> None:
    reservation = Reservation("task", "here", device.uuid, GIB, task_name="task")
    found = [
        (request_id, replace(each, reservations=(reservation,), devices=(device.key,)))
        for request_id, each in (entry(name, 1, 1) for name in entries)
    ]
    snapshots = [DeviceSnapshot(device, 0.0, GIB)]
    status = look(*found, snapshots=snapshots, spec=parse_spec(devices))
    assert len(status.tasks) == len(entries)
    assert status.hint == hint
    lines = status_lines(status)
    assert hint is None or hint in lines
