"""Several processes on a device: those of a body keep to its cap, those of other tasks to their share."""

from __future__ import annotations

import pytest
from prefect import task

from prefect_gpu import gpu
from tests.gpu import check_sharing, check_spawned
from tests.gpu._checks import BODY_S, MIB, gather, last_of, read_processes, run_flow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml", "prefect_server", "device_is_clean"),
]


def test_a_process_that_a_body_starts_is_capped() -> None:
    torch = pytest.importorskip("torch")

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        pytest.skip("this PyTorch may not know per_process_memory_fraction")
    beyond = task(name="beyond-the-cap", tags=gpu(memory="4GiB", framework="torch"))(
        check_spawned.beyond_the_cap
    )
    flow = run_flow("beyond", lambda: gather({"it": beyond.submit(2)}, BODY_S), "nvml")
    assert "OutOfMemoryError" in (flow.value["it"].value or ""), flow.value


def test_of_three_programs_of_forty_percent_one_waits_and_none_takes_more() -> None:
    pytest.importorskip("tensorflow")
    names = range(check_sharing.PROGRAMS)
    shares = check_sharing.take_share.with_options(
        tags=gpu(memory="40%", framework="tensorflow", device=[0], oom="fail")
    )
    flow = run_flow(
        "sharing", lambda: gather({str(n): shares.submit() for n in names}, 2 * BODY_S), "nvml"
    )
    processes = read_processes(flow.id, check_sharing.PROGRAMS)
    assert all(ended.error is None for ended in flow.value.values()), flow.value
    assert check_sharing.most_at_once([ended.value for ended in flow.value.values()]) == 2
    for ended in flow.value.values():
        report = last_of(processes, ended)
        assert report is not None
        peak, budget = report.bytes("peak_process_bytes"), report.bytes("budget_bytes")
        assert peak is not None and budget is not None
        assert peak <= budget + 64 * MIB
