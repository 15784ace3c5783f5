"""What is made of the trace of PyTorch's allocator, and that a body's own is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.frameworks import torch_adapter
from prefect_gpu.frameworks.torch_adapter import (
    HISTORY_EVENTS,
    MAX_EVENTS,
    begin_trace,
    peak_bytes,
    record_history,
)
from prefect_gpu.units import GIB, MIB

Event = dict[str, Any]


def events(*sizes: int) -> list[Event]:
    """Blocks in bytes: positive ones are taken, negative ones given up."""
    found: list[Event] = []
    for size in sizes:
        if size > 0:
            found.append({"action": "alloc", "size": size})
        else:
            found.append({"action": "free_requested", "size": -size})
            found.append({"action": "free_completed", "size": -size})
    return found


@pytest.mark.parametrize(
    ("trace", "peak"),
    [
        pytest.param([], 9216, id="nothing happened"),
        pytest.param(events(1024, -1024), 10240, id="a peak that is gone at once"),
        pytest.param(events(-9216, 1024), 17408, id="more at the begin"),
        pytest.param(events(1024, -1024, 1024), 9216, id="one after the other is no sum"),
        pytest.param(events(1024, 1024, -1024, 2048), 9216, id="the last is the largest"),
        pytest.param(events(1, 1, -1), 9728, id="a block has 512 bytes at least"),
        pytest.param(
            [
                {"action": "segment_alloc", "size": 1 << 20},
                {"action": "oom", "size": 1 << 30, "device_free": 0},
                {"action": "snapshot", "size": 9216},
                {"action": "segment_free", "size": 1 << 20},
                {"action": "unheard_of"},
            ],
            9216,
            id="what allocates nothing",
        ),
    ],
)
def test_the_peak_is_the_largest_running_sum(trace: list[Event], peak: int) -> None:
    assert peak_bytes(9216, trace) == peak


def test_events_before_the_begin_do_not_count() -> None:
    at_us = [100, 100, 200, 300, 300, 300]
    trace = [{**e, "time_us": t} for e, t in zip(events(-4096, 1024, -2048), at_us, strict=False)]
    # Now 9216, 11264 before the last was freed, 14336 before the first.
    assert peak_bytes(9216, trace, since_us=150) == 11264
    assert peak_bytes(9216, trace, since_us=100) == peak_bytes(9216, trace) == 14336


class FakeTorch:
    """Devices whose allocators record. `recording` has the arguments of who switched it on."""

    def __init__(self, *live: int) -> None:
        self.recording: dict[str, Any] | None = None
        self.traces: list[list[Event]] = [[] for _ in live]
        self.settings: dict[str, Any] = {"roundup_power2_divisions": {1: 0, 2: 0}}
        self.broken: set[str] = set()
        self.log: list[str] = []
        stats = [{"allocated_bytes": {"all": {"current": size}}} for size in live]
        self._C = SimpleNamespace(
            _cuda_isHistoryEnabled=self._is_on,
            _cuda_record_memory_history=self._switch,
            _cuda_record_memory_history_legacy=self._switch,
        )
        self.cuda = SimpleNamespace(
            device_count=lambda: len(live),
            memory_stats_as_nested_dict=lambda i: stats[i],
            memory=SimpleNamespace(
                # As PyTorch's: looks the switch up in `torch._C`.
                _record_memory_history=lambda **given: self._C._cuda_record_memory_history(**given),
                _snapshot=self._snapshot,
            ),
        )

    def _answer(self, question: str) -> None:
        if question in self.broken:
            raise RuntimeError(f"{question}: not with this allocator")

    def _is_on(self) -> bool:
        self._answer("ask")
        return self.recording is not None

    def _switch(self, **given: Any) -> None:
        self._answer("switch")
        self.recording = given if given["enabled"] else None
        self.log.append("on" if given["enabled"] else "off")

    def _snapshot(self) -> dict[str, Any]:
        self._answer("snapshot")
        assert self.recording is not None, "to stop empties the trace"
        return {"device_traces": self.traces, "allocator_settings": self.settings}

    @property
    def switches(self) -> tuple[Any, Any]:
        return self._C._cuda_record_memory_history, self._C._cuda_record_memory_history_legacy


@pytest.fixture
def torch() -> FakeTorch:
    return FakeTorch(256 * MIB)


def begun(torch: FakeTorch) -> Callable[[], int | None]:
    trace = begin_trace(torch)
    assert trace is not None
    return trace


def test_a_trace_gives_the_peak_and_leaves_pytorch_as_it_was(torch: FakeTorch) -> None:
    before = torch.switches
    trace = begun(torch)
    assert torch.recording == {
        "enabled": "all", "context": None, "stacks": "python", "max_entries": MAX_EVENTS,
    }  # fmt: skip
    torch.traces[0] = events(512 * MIB, -512 * MIB, 128 * MIB)
    assert trace() == 640 * MIB
    assert (torch.switches, torch.log) == (before, ["on", "off"])


def test_of_several_devices_the_peaks_are_summed() -> None:
    torch = FakeTorch(1024, 2048, 4096)
    trace = begun(torch)
    # The third was never used.
    torch.traces = [events(-512), events(1024, -1024)]
    assert trace() == 1024 + 512 + 2048 + 1024 + 4096


def test_while_the_body_records_nothing_is_traced(torch: FakeTorch) -> None:
    torch.cuda.memory._record_memory_history(enabled="all", context="all")
    before = torch.switches
    assert begin_trace(torch) is None
    assert torch.switches == before
    assert torch.recording == {"enabled": "all", "context": "all"}


@pytest.mark.parametrize(
    "name", ["_cuda_record_memory_history", "_cuda_record_memory_history_legacy"]
)
@pytest.mark.parametrize(
    "theirs", [{"enabled": "all", "context": "all"}, {"enabled": None}], ids=["on", "off"]
)
def test_what_the_body_switches_meanwhile_stays_so(
    torch: FakeTorch, name: str, theirs: dict[str, Any]
) -> None:
    before = torch.switches
    trace = begun(torch)
    getattr(torch._C, name)(**theirs)
    assert trace() is None
    assert torch.recording == (theirs if theirs["enabled"] else None)
    assert (torch.switches, torch.log) == (before, ["on", "on" if theirs["enabled"] else "off"])


def test_a_value_set_over_a_switch_stays(torch: FakeTorch) -> None:
    trace = begun(torch)
    inner = torch._C._cuda_record_memory_history

    def theirs(**given: Any) -> None:
        inner(**given)

    torch._C._cuda_record_memory_history = theirs
    assert trace() is not None
    assert torch._C._cuda_record_memory_history is theirs


def test_a_pytorch_without_the_old_switch_is_traced(torch: FakeTorch) -> None:
    del torch._C._cuda_record_memory_history_legacy
    trace = begun(torch)
    assert trace() == 256 * MIB
    assert not hasattr(torch._C, "_cuda_record_memory_history_legacy")


def _too_many_events(torch: FakeTorch) -> None:
    torch.traces[0] = events(*[512] * (MAX_EVENTS + 1))


def _other_rounding(torch: FakeTorch) -> None:
    torch.settings["roundup_power2_divisions"] = {1: 0, 2: 4}


def _no_counters(torch: FakeTorch) -> None:
    torch.cuda.memory_stats_as_nested_dict = lambda i: {}


@pytest.mark.parametrize("loses", [_too_many_events, _other_rounding, _no_counters])
def test_a_trace_without_all_facts_says_nothing(
    torch: FakeTorch, loses: Callable[[FakeTorch], None]
) -> None:
    trace = begun(torch)
    loses(torch)
    assert trace() is None
    assert torch.recording is None


def _no_switch(torch: FakeTorch) -> None:
    torch.broken.add("switch")


def _no_question(torch: FakeTorch) -> None:
    del torch._C._cuda_isHistoryEnabled


@pytest.mark.parametrize("breaks", [_no_switch, _no_question])
def test_an_allocator_that_cannot_be_traced_is_not(
    torch: FakeTorch, breaks: Callable[[FakeTorch], None]
) -> None:
    before = torch.switches
    breaks(torch)
    assert begin_trace(torch) is None
    assert (torch.recording, torch.switches) == (None, before)


@pytest.mark.parametrize(("broken", "left"), [("snapshot", False), ("switch", True), ("ask", True)])
def test_what_fails_at_the_end_raises_nothing(torch: FakeTorch, broken: str, left: bool) -> None:
    before = torch.switches
    trace = begun(torch)
    torch.broken.add(broken)
    trace()
    assert (torch.recording is not None, torch.switches) == (left, before)


# While PyTorch records for a snapshot.


@pytest.fixture
def recorded(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    monkeypatch.setattr(torch_adapter, "_records_history", False)
    record_history(torch)
    return torch


def at(seconds: float, *sizes: int) -> list[Event]:
    """Blocks at a time that counts from now."""
    time_us = time.time_ns() // 1000 + round(seconds * 1e6)
    return [{**event, "time_us": time_us} for event in events(*sizes)]


def test_a_history_for_snapshots_has_stacks(recorded: FakeTorch) -> None:
    assert recorded.recording == {
        "enabled": "all", "context": "all", "stacks": "python", "max_entries": HISTORY_EVENTS,
    }  # fmt: skip


def test_the_newest_part_of_a_history_is_a_trace_and_the_history_goes_on(
    recorded: FakeTorch,
) -> None:
    before = recorded.switches
    trace = begun(recorded)
    recorded.traces[0] = at(-60, GIB, -GIB) + at(60, 512 * MIB, -512 * MIB)
    assert trace() == 768 * MIB
    assert (recorded.switches, recorded.log) == (before, ["on"])


def test_a_history_that_does_not_reach_back_says_nothing(recorded: FakeTorch) -> None:
    for kept, peak in ((at(60, 512, -512), None), ([], 256 * MIB)):
        trace = begun(recorded)
        recorded.traces[0] = kept
        assert trace() == peak


def test_a_history_that_the_body_has_stopped_leaves_room_for_a_trace(recorded: FakeTorch) -> None:
    recorded.cuda.memory._record_memory_history(enabled=None)
    trace = begun(recorded)
    recorded.traces[0] = events(512 * MIB, -512 * MIB)
    assert trace() == 768 * MIB
    assert recorded.recording is None


def test_an_allocator_that_keeps_no_history_fails_nothing(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_adapter, "_records_history", False)
    torch.broken.add("switch")
    record_history(torch)
    assert "does not record for snapshots" in capsys.readouterr().err
    assert not torch_adapter._records_history
