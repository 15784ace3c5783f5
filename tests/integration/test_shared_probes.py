"""First runs of tasks without a budget that share a device, in real flows on simulated devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.scheduling import probes
from prefect_gpu.testing import SimulatedDevices
from prefect_gpu.units import GIB
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")


def runner() -> GPUTaskRunner:
    simulated = SimulatedDevices("1x16GiB", context="512MiB")
    return GPUTaskRunner(devices=simulated, headroom="0", standby=0)


def reports(task_run_id: Any, count: int) -> list[dict[str, str]]:
    """Return the metadata of a task run's processes in their order."""
    found = api.artifacts(task_run_id=task_run_id, count=count)
    metadata = [artifact.metadata_ or {} for artifact in found]
    return sorted(metadata, key=lambda m: int(m["attempt"]))


def meet(folder: Path, name: str, count: int) -> bool:
    """Wait until so many tasks hold memory at the same time; return whether they did."""
    (folder / name).touch()
    until_s = time.monotonic() + DEADLOCK_S
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


@task(tags=gpu(learn_by="name"))
def evaluate(name: str, folder: str, size: str, count: int) -> tuple[bool, int | None]:
    """Take memory, and wait for the others."""
    from prefect_gpu import current_allocation
    from prefect_gpu.testing import allocate

    allocation = current_allocation()
    assert allocation is not None
    with allocate(size):
        return meet(Path(folder), name, count), allocation.cap_bytes


def test_first_runs_of_different_tasks_are_on_one_device_together(tmp_path: Path) -> None:
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
        (report,) = reports(future.task_run_id, 1)
        assert (report["budget_source"], report["outcome"]) == ("probe", "completed")


def test_first_runs_of_one_task_are_together_too_and_the_rest_learns_from_them(
    tmp_path: Path,
) -> None:
    futures: list[Any] = []

    @task
    def mapped(name: str) -> bool:
        from prefect_gpu.testing import allocate

        with allocate("1GiB"):
            return meet(tmp_path, name, 3)

    def maps() -> list[bool]:
        unknown = mapped.with_options(tags=gpu())
        futures.extend(unknown.submit(str(n)) for n in range(3))
        found = [futures[0].result()]
        # The runs of the others, and of this one, are not in the history yet.
        futures.extend(unknown.submit(str(n)) for n in range(3, 6))
        return [*found, *(future.result() for future in futures[1:])]

    assert flow(task_runner=runner())(maps)() == [True] * 6
    sources = [reports(future.task_run_id, 1)[0]["budget_source"] for future in futures]
    assert sources == ["probe"] * 3 + ["learned"] * 3


@task(tags=gpu(learn_by="name"))
def grow(name: str, folder: str, sizes: list[str]) -> int:
    """Take memory piece by piece, once another task holds its own; tell which process this is."""
    from prefect_gpu import current_allocation
    from prefect_gpu.testing import allocate

    allocation = current_allocation()
    assert allocation is not None
    held = [allocate("256MiB")]
    if allocation.exclusive:
        held += [allocate(size) for size in sizes]
        return allocation.attempt
    meet(Path(folder), name, 2)
    for size in sizes:
        held.append(allocate(size))
        time.sleep(0.1)
    # As long as it takes to be seen: it is ended, or the other one has ended.
    until_s = time.monotonic() + DEADLOCK_S
    while not Path(folder, "over").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert held
    return allocation.attempt


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
    first, second = reports(futures[1].task_run_id, 2)
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
            met = meet(tmp_path, "known", 2)
            # The probe has run out of memory of its own by now.
            until_s = time.monotonic() + DEADLOCK_S
            while not (tmp_path / "full").exists() and time.monotonic() < until_s:
                time.sleep(0.02)
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
                meet(tmp_path, "unknown", 2)
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
    first, second, third = reports(futures[1].task_run_id, 3)
    for each in (first, second):
        assert (each["outcome"], each["cause"]) == ("oom", "own_cap")
    assert int(first["cap_bytes"]) <= 10 * GIB
    # What its error has said, and then a device to itself.
    assert int(second["budget_bytes"]) == int(int(first["wanted_bytes"]) * 1.1)
    assert (third["outcome"], third["cap_bytes"]) == ("completed", "none")


@task
def steps(name: str) -> None:
    """Take the same in each step."""
    from prefect_gpu import step
    from prefect_gpu.testing import allocate

    size = 256 * (1 + int(name.rpartition("-")[2]))
    for _ in range(4):
        with allocate(f"{size}MiB"):
            # Long enough to be read on a busy machine.
            time.sleep(0.2)
        step()


def test_what_is_learned_is_the_same_as_alone() -> None:
    budgets: dict[bool, list[int]] = {}
    for exclusive in (False, True):

        def measure(exclusive: bool = exclusive) -> None:
            chosen = steps.with_options(tags=gpu(learn_by="name", exclusive=exclusive))
            futures = [chosen.submit(f"{exclusive}-{n}") for n in range(4)]
            for future in futures:
                future.result()
            again = [chosen.submit(f"{exclusive}-{n}") for n in range(4)]
            for future in again:
                future.result()
            found = [reports(future.task_run_id, 1)[0] for future in again]
            assert [report["budget_source"] for report in found] == ["learned"] * 4
            budgets[exclusive] = [int(report["budget_bytes"]) for report in found]

        flow(task_runner=runner())(measure)()
    assert budgets[False] == pytest.approx(budgets[True], rel=0.1)
    assert all(0 < budget < 4 * GIB for budget in budgets[False])
