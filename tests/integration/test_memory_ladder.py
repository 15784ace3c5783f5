"""Budgets that are learned, held to and raised, on simulated devices that behave as real ones do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prefect import flow, task
from prefect.context import FlowRunContext
from prefect.states import State

from prefect_gpu import BudgetExceededError, ChildDiedError, GPUTaskRunner, gpu
from prefect_gpu.devices.simulated import SimulatedReader
from prefect_gpu.testing import SimulatedDevices, SimulatedOutOfMemoryError
from prefect_gpu.units import GIB, MIB
from tests.integration import bodies
from tests.integration import engine_api as api
from tests.integration.programs import workplace

pytestmark = pytest.mark.usefixtures("prefect_server")


def runner(devices: str = "1x16GiB") -> GPUTaskRunner:
    simulated = SimulatedDevices(devices, context="512MiB")
    return GPUTaskRunner(devices=simulated, headroom="0")


def machine() -> SimulatedReader:
    """Return the devices of the flow around the caller."""
    context = FlowRunContext.get()
    assert context is not None and isinstance(context.task_runner, GPUTaskRunner)
    assert context.task_runner._run is not None
    reader = context.task_runner._run.broker().reader
    assert isinstance(reader, SimulatedReader)
    return reader


def run(body: Callable[[], Any]) -> Any:
    return flow(task_runner=runner())(body)()


fill = task(bodies.fill)
fill_when_told = task(bodies.fill_when_told, tags=gpu(memory="4GiB"))


def test_a_task_run_that_ends_out_of_memory_says_in_its_state_what_to_write() -> None:
    futures: list[Any] = []

    def fails() -> None:
        for size, asks in (("3GiB", {"oom": "fail"}), ("30GiB", {})):
            tags = gpu(memory="1GiB", **asks)  # type: ignore[arg-type]
            futures.append(fill.with_options(tags=tags).submit([size]))
            futures[-1].wait()

    run(fails)
    small, large = (api.task_run(future.task_run_id).state for future in futures)
    assert small is not None and small.message is not None
    assert small.message.startswith(
        "Out of memory: 1GiB were not enough; it would have needed 3.5GiB in all: write gpu:memory=3.9GiB (simulated devices only)"
    )
    assert "(SimulatedOutOfMemoryError: out of memory: tried to allocate 3GiB; " in small.message
    assert large is not None and large.message is not None
    assert "it asked for 30GiB at once, more than the 16GiB of a whole device" in large.message
    assert "find_batch_size" in large.message and "\n" not in large.message


def test_a_cap_that_is_too_small_is_raised_without_using_up_retries() -> None:
    futures: list[Any] = []

    def own_cap() -> Any:
        futures.append(fill.with_options(tags=gpu(memory="1GiB")).submit(["256MiB", "3GiB"]))
        return futures[0].result()

    budget, attempt = run(own_cap)
    # What it held, with its context, and what it asked for, and a tenth more.
    assert (budget, attempt) == (int((0.25 + 0.5 + 3) * GIB * 1.1), 2)
    assert api.task_run(futures[0].task_run_id).run_count == 1
    first, second = api.reports(futures[0].task_run_id, 2)
    assert (first["outcome"], first["cause"]) == ("oom", "own_cap")
    assert (second["outcome"], second["cause"]) == ("completed", "none")
    assert "Pending" in api.names(futures[0].task_run_id)


def test_gpu_oom_fail_fails_at_once() -> None:
    futures: list[Any] = []

    def fails() -> Any:
        options = gpu(memory="1GiB", oom="fail")
        futures.append(fill.with_options(tags=options).submit(["3GiB"]))
        return futures[0].wait() or futures[0].state

    state: State[Any] = flow(task_runner=runner())(fails)(return_state=True)
    assert state.is_failed()
    with pytest.raises(SimulatedOutOfMemoryError):
        state.result()
    assert [m["cause"] for m in api.reports(futures[0].task_run_id, 1)] == ["own_cap"]


def test_what_no_device_has_fails_and_says_how_much_was_wanted() -> None:
    def never() -> Any:
        return fill.with_options(tags=gpu(memory="1GiB")).submit(["30GiB"]).result()

    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        run(never)
    assert caught.value.requested_bytes == 30 * GIB


def test_memory_that_another_program_took_is_waited_for(tmp_path: Path) -> None:
    futures: list[Any] = []

    def foreign() -> Any:
        futures.append(fill_when_told.submit(str(tmp_path)))
        api.until((tmp_path / "holds-1").exists)
        devices = machine()
        other = devices.process_memory(["SIM-0"], None)
        other.attach(1)
        # It has a context too.
        other.answer("simulated_allocate", {"device_uuid": "SIM-0", "size_bytes": 13 * GIB})
        (tmp_path / "go").touch()
        # It waits with the same budget, and says so.
        api.until(lambda: futures[0].state.name == "AwaitingGPU", "AwaitingGPU")
        other.detach()
        return futures[0].result()

    assert run(foreign) == 2
    first, second = api.reports(futures[0].task_run_id, 2)
    assert (first["cause"], first["outcome"]) == ("foreign", "oom")
    assert first["budget_bytes"] == second["budget_bytes"] == str(4 * GIB)
    assert api.task_run(futures[0].task_run_id).run_count == 1


def test_memory_that_another_task_took_is_waited_for_too(tmp_path: Path) -> None:
    futures: list[Any] = []

    def crowded() -> Any:
        futures.append(fill_when_told.submit(str(tmp_path)))
        api.until((tmp_path / "holds-1").exists)
        hog = task(bodies.hog, tags=gpu(memory="1GiB", allocation="growth"))
        big = hog.submit(str(tmp_path))
        api.until(lambda: futures[0].state.name == "AwaitingGPU", "AwaitingGPU")
        (tmp_path / "enough").touch()
        big.wait()
        return futures[0].result()

    assert run(crowded) == 2
    assert [m["cause"] for m in api.reports(futures[0].task_run_id, 2)] == ["crowded", "none"]


@pytest.mark.parametrize("enforce", ["kill", "warn"])
def test_a_process_above_its_budget_is_killed_or_reported(enforce: Any) -> None:
    futures: list[Any] = []
    tags = gpu(memory="1GiB", allocation="growth", enforce=enforce)

    def passes() -> Any:
        futures.append(fill.with_options(tags=tags).submit(["2GiB"], hold_s=2.5))
        return futures[0].result()

    budget, attempt = run(passes)
    found = api.reports(futures[0].task_run_id, attempt)
    if enforce == "kill":
        # What the device showed, and a tenth more.
        assert (budget, attempt) == (int(2.5 * GIB * 1.1), 2)
        assert (found[0]["outcome"], found[0]["cause"]) == ("oom", "own_cap")
    else:
        assert (budget, attempt) == (GIB, 1)
        flow_run_id = api.task_run(futures[0].task_run_id).flow_run_id
        assert flow_run_id is not None
        over = BudgetExceededError("fill", GIB, int(2.5 * GIB))
        api.logs(flow_run_id, [f"{over}; gpu:enforce=kill would end it"])


def test_a_bare_sigkill_is_no_matter_of_memory() -> None:
    futures: list[Any] = []

    def killed() -> None:
        futures.append(task(bodies.kill_itself, tags=gpu(memory="1GiB")).submit())
        futures[0].wait()

    run(killed)
    with pytest.raises(ChildDiedError, match="cause unknown"):
        futures[0].result()
    (report,) = api.reports(futures[0].task_run_id, 1)
    assert (report["outcome"], report["cause"]) == ("died", "unknown")


def test_the_next_run_gets_what_its_steps_needed_and_more_where_that_pinched() -> None:
    # First runs beside others are the subject of `test_shared_probes`.
    @task(tags=gpu(exclusive=True))
    def train(pinches: bool) -> tuple[int, int | None]:
        from prefect_gpu import current_allocation, step
        from prefect_gpu.testing import allocate, note_allocation_retry

        allocation = current_allocation()
        assert allocation is not None
        with allocate("2GiB"):
            for index in range(5):
                if index == 0 and allocation.cap_bytes is None:
                    # There is room, so it is taken: autotuning.
                    allocate("8GiB").free()
                with allocate("1GiB"):
                    time.sleep(0.3 if pinches else 0.02)
                if pinches and index == 2:
                    note_allocation_retry()
                step()
        return allocation.budget_bytes, allocation.cap_bytes

    def learn() -> list[Any]:
        found = []
        for pinches in (False, True, False):
            future = train.submit(pinches)
            found.append(future.result())
            # It is learned from once its process is gone, shortly after its value is here.
            api.reports(future.task_run_id, 1)
        return found

    probe, learned, roomier = run(learn)
    assert probe == (16 * GIB, None)
    need = -(-int(3 * GIB * 1.3 + 512 * MIB) // (2 * MIB)) * 2 * MIB
    assert learned == (need, need - 512 * MIB)
    assert roomier[0] == pytest.approx(need * 1.25, abs=2 * MIB)


def test_siblings_wait_for_the_one_that_probes_and_histories_are_apart(tmp_path: Path) -> None:
    @task(tags=gpu(exclusive=True, learn_by="size"))
    def sized(size: str, index: int, folder: str) -> int:
        from prefect_gpu import current_allocation
        from prefect_gpu.testing import allocate

        allocation = current_allocation()
        assert allocation is not None
        with allocate(size):
            while not Path(folder, "go").exists():
                time.sleep(0.02)
        return allocation.budget_bytes

    futures: list[Any] = []

    def mapped() -> list[int]:
        futures.extend(
            sized.submit(size, i, str(tmp_path)) for size in ("1GiB", "2GiB") for i in range(3)
        )
        api.until(
            lambda: sum(f.state.name == "AwaitingGPU" for f in futures) == 5, "all but one wait"
        )
        (tmp_path / "go").touch()
        return [future.result() for future in futures]

    budgets = run(mapped)
    for size, found in ((1, budgets[:3]), (2, budgets[3:])):
        need = -(-int(size * GIB * 1.3 + 512 * MIB) // (2 * MIB)) * 2 * MIB
        assert sorted(found) == [need, need, 16 * GIB]


LEARNER = """
# {comment}
from pathlib import Path
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, current_allocation, gpu, step
from prefect_gpu.testing import SimulatedDevices, allocate

BEGUN = Path(__file__).with_suffix(".begun")

@task(name="train-{token}", tags=gpu(exclusive=True))
def train():
    with allocate("2GiB"):
        for index in range(4):
            if index == 0 and current_allocation().cap_bytes is None:
                allocate("4GiB").free()
            step()
    return current_allocation().budget_bytes

@task(name="fit-{token}", tags=gpu())
def fit(index):
    with BEGUN.open("a") as file:
        file.write("x")
    with allocate("{size}"):
        return current_allocation().budget_bytes

@flow(task_runner=GPUTaskRunner(devices=SimulatedDevices("1x16GiB", context="512MiB"), headroom="0"))
def learner():
    return train.submit().result()

@flow(name="{folder}-{token}", task_runner=GPUTaskRunner(devices=SimulatedDevices("1x48GiB"), headroom="0"))
def sweep():
    first = fit.submit(0).result()
    return [first, *fit.map([1, 2, 3]).result()]

print("budget", learner())
print("sweep", *sweep(), len(BEGUN.read_text()))
"""


class Learned(NamedTuple):
    """What a program printed."""

    budget: int
    sweep: list[int]
    said: str


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> list[Learned]:
    """Two programs, one after the other: `learner` is one flow that has moved, `sweep` one flow in each."""

    def learn(folder: str, comment: str, size: str) -> Learned:
        options = {"folder": folder, "comment": comment, "size": size, "token": place.token}
        done = place.run(str(place.write(f"{folder}/learner.py", LEARNER.format(**options))))
        found = {
            word: [int(each) for each in numbers]
            for word, *numbers in map(str.split, done.stdout.splitlines())
            if word in ("budget", "sweep")
        }
        return Learned(*found["budget"], found["sweep"], done.stdout + done.stderr)

    with workplace(tmp_path_factory.mktemp("learners"), prefect_server) as place:
        return [
            learn("here", "the first", "1GiB"),
            learn("there", "moved, and its comment edited", "6GiB"),
        ]


def test_two_flow_runs_learn_from_each_other_whatever_moved(learned: list[Learned]) -> None:
    first, second = (each.budget for each in learned)
    assert first == 16 * GIB
    assert second == -(-int(2 * GIB * 1.3 + 512 * MIB) // (2 * MIB)) * 2 * MIB


def test_tasks_of_one_name_in_two_flows_have_budgets_of_their_own_and_run_once(
    learned: list[Learned],
) -> None:
    for (_, (first, *later, begun), said), need in zip(learned, (GIB, 6 * GIB), strict=True):
        budget = -(-int(need * 1.3) // (2 * MIB)) * 2 * MIB
        assert (later, begun) == ([budget] * 3, 4), "no body runs twice"
        assert first > 6 * GIB, "nothing is learned of it in its first run"
        lines = [line for line in said.splitlines() if "'fit-" in line]
        assert any("learned from 1 run of this task in this flow" in line for line in lines), said
