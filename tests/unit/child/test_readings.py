"""Whom a child asks about its memory."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prefect_gpu import testing
from prefect_gpu.child.readings import Readings
from prefect_gpu.devices.cuda_driver import PrimaryContexts
from prefect_gpu.devices.own import OwnUse
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy
from prefect_gpu.processes import mps
from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.units import GIB
from tests.fakes.memory_source import FakeSource, FakeTrace

POLICY = FrameworkPolicy("nvml", ("GPU-a", "GPU-b"), (24, 24), (6, 6))


class FakeOwn:
    def __init__(self, *uses: OwnUse) -> None:
        self.uses = uses

    def read(self) -> tuple[OwnUse, ...]:
        return self.uses


def readings(kind: DeviceKind = "nvml", *uses: OwnUse) -> Readings:
    own: Any = FakeOwn(*uses)
    return Readings(replace(POLICY, device_kind=kind), (), own)


@pytest.mark.parametrize("kind", ["nvml", "host"])
def test_frameworks_are_read_for_real_devices(
    kind: DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Counters(1, 2, 3, 4)
    monkeypatch.setattr(hooks, "sample", lambda adapters: (1, 0))
    monkeypatch.setattr(hooks, "collect_counters", lambda adapters: found)
    trace = FakeTrace(FakeSource())
    monkeypatch.setattr(hooks, "begin_trace", lambda adapters: trace)
    assert readings(kind).begin_trace() is trace
    assert readings(kind).sample() == (1, 0)
    assert readings(kind).counters() is found


def test_the_tally_is_read_for_simulated_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = testing._Tally()
    monkeypatch.setattr(testing, "_tally", tally)
    asked = readings("simulated")
    assert (asked.sample(), asked.counters()) == (None, None)
    assert asked.begin_trace() is None
    tally.count("SIM-0", 5)
    testing.note_allocation_retry()
    assert asked.sample() == (5, 1)
    assert asked.counters() == Counters(5, 5, 5, 5, 1)
    end = asked.begin_trace()
    assert end is not None and end() == 5


@pytest.mark.parametrize("module", [None, ModuleType("prefect_gpu.testing")], ids=["no", "half"])
def test_simulated_memory_that_is_not_imported_completely_reports_nothing(
    module: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "prefect_gpu.testing")
    if module is not None:
        monkeypatch.setitem(sys.modules, "prefect_gpu.testing", module)
    asked = readings("simulated")
    assert (asked.sample(), asked.counters(), asked.begin_trace()) == (None, None, None)


def test_counters_that_cannot_be_read_are_reported_once_and_fail_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(adapters: object) -> Any:
        raise RuntimeError("half imported")

    monkeypatch.setattr(hooks, "sample", fail)
    monkeypatch.setattr(hooks, "collect_counters", fail)
    monkeypatch.setattr(hooks, "begin_trace", fail)
    asked = readings()
    assert (asked.counters(), asked.sample(), asked.begin_trace()) == (None, None, None)
    assert capsys.readouterr().err.count("half imported") == 1


class FakeAdapter:
    """A framework that has a page and a snapshot, unless it fails."""

    def __init__(self, name: str = "torch", started: bool = True) -> None:
        self.name, self.started = name, started
        self.fails: Exception | None = None

    def _answer(self) -> None:
        if self.fails is not None:
            raise self.fails

    def memory_summary(self) -> str:
        self._answer()
        return f"page of {self.name}" if self.started else ""

    def write_snapshot(self, path: str) -> bool:
        self._answer()
        if self.started:
            Path(path).write_text(self.name)
        return self.started


def with_snapshots(path: Path | str, *adapters: FakeAdapter) -> Readings:
    known: Any = adapters
    return Readings(replace(POLICY, device_kind="host", snapshot_path=str(path)), known)


def test_the_page_and_the_snapshot_are_those_of_the_framework_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "of" / "a-task.pickle"
    asked = with_snapshots(path, FakeAdapter("jax"), FakeAdapter("torch"))
    assert asked.memory_summary("torch") == "page of torch"
    assert asked.memory_summary("cupy") == ""
    assert asked.write_snapshot("cupy") == "" and not path.parent.exists()
    assert asked.write_snapshot("torch") == str(path)
    assert path.read_text() == "torch"


def test_without_a_device_in_use_or_a_path_there_is_no_snapshot(tmp_path: Path) -> None:
    asked = with_snapshots(tmp_path / "a.pickle", FakeAdapter(started=False))
    assert (asked.memory_summary("torch"), asked.write_snapshot("torch")) == ("", "")
    assert with_snapshots("", FakeAdapter()).write_snapshot("torch") == ""


def test_a_page_or_snapshot_that_fails_fails_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = FakeAdapter()
    adapter.fails = RuntimeError("the context is lost")
    asked = with_snapshots(tmp_path / "a.pickle", adapter)
    assert (asked.memory_summary("torch"), asked.write_snapshot("torch")) == ("", "")
    (tmp_path / "file").touch()
    adapter.fails = None
    in_a_file = with_snapshots(tmp_path / "file" / "a.pickle", adapter)
    assert in_a_file.write_snapshot("torch") == ""
    assert capsys.readouterr().err.count("the context is lost") == 1
    first, second = caplog.messages
    assert first == f"no memory snapshot is in {tmp_path / 'a.pickle'}: the context is lost"
    assert second.startswith(f"no memory snapshot is in {tmp_path / 'file' / 'a.pickle'}: ")


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        pytest.param("nvml", (3, 4), 7, id="the sum over the devices"),
        pytest.param("nvml", (3, None), 3, id="it may not be on all of them yet"),
        pytest.param("nvml", (None, None), None, id="the driver tells nothing"),
        pytest.param("host", (3, 4), None, id="there is no driver"),
    ],
)
def test_the_driver_reports_the_memory_of_the_process(
    kind: DeviceKind, sizes: tuple[int | None, ...], expected: int | None
) -> None:
    uses = [OwnUse(uuid, size) for uuid, size in zip(POLICY.device_uuids, sizes, strict=True)]
    assert readings(kind, *uses).process_bytes() == expected


class FakeContexts:
    """The first is destroyed at a given reading."""

    def __init__(self, lost_at: int) -> None:
        self.lost_at = lost_at
        self.readings = 0
        self.lost = False

    def read(self) -> bool:
        self.readings += 1
        self.lost = self.readings >= self.lost_at
        return self.lost


def test_what_is_counted_after_a_context_was_destroyed_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "sample", lambda adapters: (5, 0))
    monkeypatch.setattr(hooks, "collect_counters", lambda adapters: Counters(5, 7, 5, 7))
    monkeypatch.setattr(hooks, "begin_trace", lambda adapters: FakeTrace(FakeSource()))
    contexts: Any = FakeContexts(lost_at=3)
    monkeypatch.setattr(hooks, "frameworks_in_use", lambda: ("torch",))
    asked = Readings(POLICY, (), contexts=contexts)
    assert (asked.counters(), asked.sample()) == (Counters(5, 7, 5, 7), (5, 0))
    assert not caplog.records
    assert (asked.sample(), asked.counters(), asked.begin_trace()) == (None, None, None)
    (warning,) = caplog.messages
    assert "destroyed its CUDA context while torch held 7B in it" in warning


class Releases:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.released = fails, 0

    def release_unused(self) -> None:
        if self.fails:
            raise RuntimeError("a capture is under way")
        self.released += 1


@pytest.mark.parametrize(
    ("changes", "unbound", "released"),
    [
        pytest.param({}, True, 1, id="on GPUs"),
        pytest.param({}, False, 0, id="the driver does not say that it disturbs no capture"),
        pytest.param({"allocation": "all"}, True, 0, id="the task keeps all"),
        pytest.param({"device_kind": "host"}, True, 0, id="on the host"),
    ],
)
def test_unused_memory_is_released_where_that_is_safe(
    changes: dict[str, Any], unbound: bool, released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "prefect_gpu.child.readings.unbound_by_captures", lambda: contextlib.nullcontext(unbound)
    )
    own: Any = FakeOwn()
    adapters: Any = (Releases(fails=True), Releases())
    asked = Readings(replace(POLICY, **changes), adapters, own)
    asked.release_unused()
    assert adapters[1].released == released


def test_nothing_is_released_once_the_body_destroyed_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "prefect_gpu.child.readings.unbound_by_captures", lambda: contextlib.nullcontext(True)
    )
    own: Any = FakeOwn()
    contexts = PrimaryContexts(0)
    contexts.lost = True
    adapters: Any = (Releases(),)
    Readings(POLICY, adapters, own, contexts).release_unused()
    assert adapters[0].released == 0


@pytest.mark.parametrize(
    ("counters", "left", "context"),
    [
        pytest.param(Counters(1, 2 * GIB, 3, 4), GIB // 2, 3 * GIB // 2, id="what the rest is"),
        pytest.param(Counters(1, 4 * GIB, 3, 4), GIB // 2, 0, id="counted more than there is"),
        pytest.param(Counters(1, None, 3, None), GIB // 2, None, id="the allocator does not count"),
        pytest.param(None, GIB // 2, None, id="no framework has used the device"),
        pytest.param(Counters(1, 2, 3, 4), None, None, id="the context is gone"),
    ],
)
def test_a_client_of_mps_knows_its_context(
    counters: Counters | None,
    left: int | None,
    context: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefect_gpu.child.readings.free_bytes", lambda: left)
    monkeypatch.setattr(hooks, "collect_counters", lambda adapters: counters)
    assert readings().context_bytes() is None
    for name, value in mps.client_environment("/run/mps", 4 * GIB, None).items():
        monkeypatch.setenv(name, value or "")
    assert readings().context_bytes() == context
