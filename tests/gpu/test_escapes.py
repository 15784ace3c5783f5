"""What a body does to its cap and to its CUDA context: seen, and neither missed nor counted wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu import BudgetExceededError
from tests.gpu import check_escapes, check_reset
from tests.gpu._checks import BODY_S, MIB, gather, last_of, logs_of, read_processes, run_flow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml", "prefect_server", "device_is_clean"),
]


@pytest.mark.parametrize("way", check_escapes.WAYS)
def test_what_passes_a_cap_is_ended(way: str) -> None:
    if missing := check_escapes.missing_for(way, check_escapes.WAYS[way][0]):
        pytest.skip(missing)
    flow = run_flow(
        "escapes",
        lambda: gather({way: check_escapes.make_task(way, "kill").submit()}, BODY_S),
        "nvml",
    )
    ended = flow.value[way]
    report = last_of(read_processes(flow.id, 1), ended)
    assert report is not None
    if way in check_escapes.UNSEEN:
        assert ended.value.rose_bytes >= check_escapes.WANTED_BYTES, "nor is it seen on the device"
    elif way in check_escapes.HELD:
        assert ended.value.refused, ended
        assert (report.bytes("peak_process_bytes") or 0) <= check_escapes.MOST_BYTES
    else:
        assert isinstance(ended.error, BudgetExceededError), ended
        assert (report["outcome"], report["cause"]) == ("oom", "own_cap")


@pytest.mark.parametrize("end", [check_reset.reset, check_reset.close])
def test_memory_of_a_context_that_was_destroyed_is_not_counted(end: Any) -> None:
    pytest.importorskip("numba")
    name = next(name for name, case in check_reset.CASES.items() if case[1] is end)
    flow = run_flow(
        "reset",
        lambda: gather({name: check_reset.make_task(name).submit(end)}, BODY_S),
        "nvml",
    )
    ended = flow.value[name]
    report = last_of(read_processes(flow.id, 1), ended)
    assert report is not None and report["outcome"] == "completed", ended
    assert report.bytes("peak_live_bytes") == 1024 * MIB
    assert logs_of(ended.task_run_id, check_reset.WARNING)
