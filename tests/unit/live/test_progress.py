"""What is shown of a flow while it runs: the words, and the lines of a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.live.progress import (
    FlowProgress,
    RunCounts,
    RunningTask,
    WaitingTask,
    combine,
    progress_words,
    view_lines,
)
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, Reservation
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import GIB

WORDS = {
    "nothing has ended": (RunCounts(3, 1, 2), "0 of 3 ended, 1 running, 2 waiting for a device"),
    "some wait for their inputs": (
        RunCounts(40, 4, 20, {"Completed": 12}),
        "12 of 40 ended, 4 running, 20 waiting for a device, 4 waiting for their inputs or a retry",
    ),
    "some have failed": (
        RunCounts(9, 1, 0, {"Completed": 5, "Failed": 1, "Crashed": 2}),
        "8 of 9 ended, 1 running, 0 waiting for a device (2 Crashed, 1 Failed)",
    ),
    "all have ended": (
        RunCounts(2000, 0, 0, {"Failed": 1, "Completed": 1999}, over=True),
        "2,000 of 2,000 ended: 1,999 Completed, 1 Failed",
    ),
    "the flow ended first": (
        RunCounts(40, 4, 0, {"Completed": 12}, over=True),
        "12 of 40 ended: 12 Completed; the flow ended before the other 28",
    ),
}


@pytest.mark.parametrize(("counts", "words"), WORDS.values(), ids=WORDS)
def test_the_words_count_every_task_run(counts: RunCounts, words: str) -> None:
    assert progress_words(counts) == words


def test_a_hundred_percent_are_all_task_runs_and_no_fewer() -> None:
    assert RunCounts(1000, 1, 0, {"Completed": 999}).percent == 99
    assert RunCounts(1000, 0, 0, {"Completed": 999, "Failed": 1}).percent == 100
    assert RunCounts().percent == 0


def device(index: int, error: str = "", in_cluster: bool = False) -> DeviceState:
    total = 140 * GIB
    known = Device(
        f"GPU-{index}", index, "NVIDIA H200", total, "nvml", "gpu-2", in_cluster=in_cluster
    )
    snapshot = DeviceSnapshot(known, 0.0, 107 * GIB, error=error, busy_fraction=0.84)
    held = Reservation("a", *known.key, 40 * GIB)
    return DeviceState(snapshot, 100 * GIB, 0, total, (held,))


def running(number: int, **changes: Any) -> RunningTask:
    known: dict[str, Any] = {
        "name": f"evaluate-{number}",
        "devices": ("0",),
        "budget_bytes": 6 * GIB,
        "used_bytes": 3 * GIB,
        "seconds": 71.6 - number,
        "started": True,
    }
    return RunningTask(**(known | changes))


def waiting(number: int) -> WaitingTask:
    reason = Reason(WaitKind.DEVICE_MEMORY, (6 * GIB,), GIB, devices=2)
    return WaitingTask((0, number), f"train-{number}", 40.2, reason)


def test_a_view_shows_devices_and_what_runs_and_waits() -> None:
    progress = FlowProgress(
        RunCounts(40, 3, 25, {"Completed": 12}),
        [device(0), device(1, error="fell off the bus")],
        [
            running(0, devices=("0", "1")),
            running(1, steps=1200, step_s=0.35),
            running(2, used_bytes=None, started=False),
        ],
        [waiting(number) for number in range(3)],
    )
    assert view_lines(progress, 40) == [
        "GPU task runs: 12 of 40 ended, 3 running, 25 waiting for a device",
        "index  device       total   used   reserved  free    busy",
        "0      NVIDIA H200  140GiB  33GiB  40GiB     100GiB  84%",
        "1      NVIDIA H200  140GiB  ?      40GiB     ?       84%   fell off the bus",
        "running     device  used  budget  for     step",
        "evaluate-0  0,1     3GiB  6GiB    1m 12s",
        "evaluate-1  0       3GiB  6GiB    1m 11s  1,200 (350ms each)",
        "evaluate-2  0             6GiB    1m 10s  its process starts",
        "waiting  for  what it waits for",
        "train-0  40s  6GiB on any of 2 devices; most free 1GiB",
        "train-1  40s  6GiB on any of 2 devices; most free 1GiB",
        "train-2  40s  6GiB on any of 2 devices; most free 1GiB",
        "and 22 other waiting task runs",
    ]


@pytest.mark.parametrize("height", range(2, 60))
def test_a_view_is_lower_than_its_terminal_and_says_how_much_it_leaves_out(height: int) -> None:
    progress = FlowProgress(
        RunCounts(500, 40, 460),
        [device(number) for number in range(30)],
        [running(number) for number in range(10)],
        [waiting(number) for number in range(3)],
    )
    lines = view_lines(progress, height)
    assert len(lines) < height
    if height > 24:
        shown = sum(line.startswith("evaluate-") for line in lines)
        assert f"and {40 - shown} other running task runs" in lines
        assert "and 22 other devices" in lines
        assert lines[-1] == "and 457 other waiting task runs"


def test_flows_of_one_process_are_shown_together_and_their_devices_once() -> None:
    first = FlowProgress(
        RunCounts(3, 1, 1, {"Completed": 1}), [device(0)], [running(5)], [waiting(9)]
    )
    second = FlowProgress(
        RunCounts(2, 1, 0, {"Completed": 1}), [device(0), device(1)], [running(1)], [waiting(2)]
    )
    both = combine([first, second])
    assert both.counts == RunCounts(5, 2, 1, {"Completed": 2})
    assert [each.device.index for each in both.devices] == [0, 1]
    assert [each.name for each in both.running] == ["evaluate-1", "evaluate-5"]
    assert [each.name for each in both.waiting] == ["train-2", "train-9"]


def test_the_devices_of_a_cluster_are_named_with_their_node() -> None:
    lines = view_lines(FlowProgress(RunCounts(1, 1), [device(0, in_cluster=True)]), 40)
    assert lines[2].startswith("gpu-2:0  NVIDIA H200")
