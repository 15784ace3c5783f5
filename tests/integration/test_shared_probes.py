"""First runs of tasks without a budget that share a device, in real flows on simulated devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.broker import opening
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.scheduling import probes
from prefect_gpu.testing import SimulatedDevices
from prefect_gpu.units import GIB
from tests.integration import bodies
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")


def runner() -> GPUTaskRunner:
    simulated = SimulatedDevices("1x16GiB", context="512MiB")
    return GPUTaskRunner(devices=simulated, headroom="0", standby=0)


evaluate, grow = (task(body, tags=gpu(learn_by="name")) for body in (bodies.evaluate, bodies.grow))


def test_first_runs_of_different_tasks_are_on_one_device_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None goes before the first, whose history may be read for some seconds on a busy machine.
    monkeypatch.setattr(opening, "PATIENCE_S", DEADLOCK_S)
    futures: list[Any] = []

    def flow_of_unknown() -> list[Any]:
        futures.extend(evaluate.submit(f"t{n}", str(tmp_path), "1GiB", 6) for n in range(6))
        return [future.result() for future in futures]

    found = flow(task_runner=runner())(flow_of_unknown)()
    assert [met for met, _ in found] == [True] * 6
    # Four at once, the others once these have settled.
    caps = [cap for _, cap in found]
    assert caps[0] is not None and all(cap is not None and cap < caps[0] for cap in caps[1:])
    for future in futures:
        (report,) = api.reports(future.task_run_id, 1)
        assert (report["budget_source"], report["outcome"]) == ("probe", "completed")


def test_first_runs_of_one_task_are_together_too_and_the_rest_learns_from_them(
    tmp_path: Path,
) -> None:
    futures: list[Any] = []

    @task
    def mapped(name: str) -> bool:
        from prefect_gpu.testing import allocate

        with allocate("1GiB"):
            return bodies.meet(tmp_path, name, 3)

    def maps() -> list[bool]:
        unknown = mapped.with_options(tags=gpu())
        futures.extend(unknown.submit(str(n)) for n in range(3))
        found = [futures[0].result()]
        # The runs of the others, and of this one, are not in the history yet.
        futures.extend(unknown.submit(str(n)) for n in range(3, 6))
        return [*found, *(future.result() for future in futures[1:])]

    assert flow(task_runner=runner())(maps)() == [True] * 6
    sources = [api.reports(future.task_run_id, 1)[0]["budget_source"] for future in futures]
    assert sources == ["probe"] * 3 + ["learned"] * 3


def test_the_newest_is_ended_when_the_device_runs_short_and_runs_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that is loaded the start alone of a process may take its first seconds.
    monkeypatch.setattr(probes, "FIRST_S", 600.0)
    futures: list[Any] = []

    def crowded() -> list[int]:
        futures.append(grow.submit("old", str(tmp_path), ["8GiB"]))
        api.until((tmp_path / "old").exists)
        futures.append(grow.submit("new", str(tmp_path), ["2GiB", "2GiB", "2GiB"]))
        api.until(lambda: futures[1].state.name == "AwaitingGPU", "AwaitingGPU")
        (tmp_path / "over").touch()
        return [future.result() for future in futures]

    assert flow(task_runner=runner())(crowded)() == [1, 2]
    first, second = api.reports(futures[1].task_run_id, 2)
    assert (first["outcome"], second["outcome"]) == ("cancelled", "completed")
    # No retry of Prefect's was used.
    run = api.task_run(futures[1].task_run_id)
    assert run.run_count == 1 and run.flow_run_id is not None
    said = "Ended, since first runs beside it grow and its device runs short of memory; it runs again with a device to itself"
    api.logs(run.flow_run_id, [said])


def test_a_budget_beside_a_probe_keeps_its_room_and_the_probe_has_all_it_needs_in_the_end(
    tmp_path: Path,
) -> None:
    futures: list[Any] = []

    @task(tags=gpu(memory="6GiB"))
    def known() -> bool:
        from prefect_gpu.testing import allocate

        with allocate("1GiB"):
            met = bodies.meet(tmp_path, "known", 2)
            # The probe has run out of memory of its own by now.
            bodies.wait_for_file(tmp_path / "full")
            with allocate("4GiB"):
                return met

    @task(tags=gpu(oom="fail"))
    def unknown() -> int:
        from prefect_gpu import current_allocation
        from prefect_gpu.testing import SimulatedOutOfMemoryError, allocate

        allocation = current_allocation()
        assert allocation is not None
        held = []
        try:
            if not allocation.exclusive:
                bodies.meet(tmp_path, "unknown", 2)
            held += [allocate("1GiB") for _ in range(12)]
        except SimulatedOutOfMemoryError:
            (tmp_path / "full").touch()
            raise
        return allocation.attempt

    def both() -> tuple[bool, int]:
        futures.append(known.submit())
        api.until((tmp_path / "known").exists)
        futures.append(unknown.submit())
        return futures[0].result(), futures[1].result()

    assert flow(task_runner=runner())(both)() == (True, 3)
    first, second, third = api.reports(futures[1].task_run_id, 3)
    for each in (first, second):
        assert (each["outcome"], each["cause"]) == ("oom", "own_cap")
    assert int(first["cap_bytes"]) <= 10 * GIB
    # What its error has said, and then a device to itself.
    assert int(second["budget_bytes"]) == int(int(first["wanted_bytes"]) * 1.1)
    assert (third["outcome"], third["cap_bytes"]) == ("completed", "none")


def test_what_is_learned_is_the_same_as_alone() -> None:
    budgets: dict[bool, list[int]] = {}
    steps = task(bodies.steps)
    for exclusive in (False, True):

        def measure(exclusive: bool = exclusive) -> None:
            chosen = steps.with_options(tags=gpu(learn_by="name", exclusive=exclusive))
            futures = [chosen.submit(f"{exclusive}-{n}") for n in range(2)]
            for future in futures:
                future.result()
            again = [chosen.submit(f"{exclusive}-{n}") for n in range(2)]
            for future in again:
                future.result()
            found = [api.reports(future.task_run_id, 1)[0] for future in again]
            assert [report["budget_source"] for report in found] == ["learned"] * 2
            budgets[exclusive] = [int(report["budget_bytes"]) for report in found]

        flow(task_runner=runner())(measure)()
    assert budgets[False] == pytest.approx(budgets[True], rel=0.1)
    assert all(0 < budget < 4 * GIB for budget in budgets[False])


def test_new_values_of_a_sweep_have_a_budget_from_others() -> None:
    sweep, futures = task(bodies.hold_batch, tags=gpu(learn_by="batch")), list[Any]()

    def sweeps() -> None:
        for batches in ([1, 2], [3, 4, 6]):
            these = [sweep.submit(batch) for batch in batches]
            for future in these:
                future.result()
                # A result may be there before the run is in the history; the report is not.
                api.reports(future.task_run_id, 1)
            futures.extend(these)

    state = flow(task_runner=runner())(sweeps)(return_state=True)
    found = [api.reports(future.task_run_id, 1)[0] for future in futures]
    assert [report["budget_source"] for report in found] == ["probe"] * 2 + ["estimated"] * 3
    assert found[-1]["estimated_from"] == "batch 1, 2"
    # 1.3 times the memory that the body takes, and the context.
    budgets = [int(report["budget_bytes"]) for report in found[2:]]
    assert budgets == pytest.approx([(n * 0.65 + 0.5) * GIB for n in (3, 4, 6)], rel=0.02)
    (page,) = api.artifacts(task_run_id=futures[-1].task_run_id, count=1)
    assert "estimated from batch 1, 2" in str(page.data)
    assert state.state_details.flow_run_id is not None
    flow_run_id = state.state_details.flow_run_id
    # Before that, the message has the seconds for which the task waited, if they are more than one.
    last = "on device 0 with a budget of 4.4GiB (estimated from runs with batch 1, 2)"
    api.until(lambda: any(last in log.message for log in api.all_logs(flow_run_id, ())), last)
