"""What the runner gives to scheduling: durations that were learned, and how many tasks a device takes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from prefect import flow, runtime, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.broker import opening
from prefect_gpu.broker.broker import Broker, Ticket
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PolicyError, SettingError
from prefect_gpu.testing import SimulatedDevices, allocate

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def tickets(monkeypatch: pytest.MonkeyPatch) -> list[Ticket]:
    """What is asked of the broker, in order."""
    asked: list[Ticket] = []
    submit = Broker.submit

    def spy(self: Broker, *args: Any, **kwargs: Any) -> Ticket:
        ticket = submit(self, *args, **kwargs)
        asked.append(ticket)
        return ticket

    monkeypatch.setattr(Broker, "submit", spy)
    return asked


def test_a_task_is_expected_to_take_as_long_as_its_earlier_runs(
    tickets: list[Ticket],
) -> None:
    @task(tags=gpu(memory="1GiB"))
    def naps_for_a_while() -> None:
        time.sleep(0.5)

    @flow(task_runner=GPUTaskRunner(devices=SimulatedDevices("1x9GiB"), reports=False))
    def thrice() -> None:
        # A run is in the history once its memory is back, which the second need not have waited for.
        for _ in range(3):
            naps_for_a_while.submit().result()

    thrice()
    first, *_, last = tickets
    assert first.request.expected_s is None
    expected_s = last.request.expected_s
    assert expected_s is not None and expected_s >= 0.5
    assert last.placement is not None
    (reservation,) = last.placement.reservations
    assert reservation.ends_s is not None
    assert last.request.submitted_s <= reservation.ends_s - expected_s <= last.placed_s


@pytest.mark.parametrize(
    "tags", [gpu(memory="5GiB"), gpu(exclusive=True)], ids=["budgets", "exclusive first runs"]
)
def test_tasks_start_in_the_order_in_which_they_were_submitted(
    monkeypatch: pytest.MonkeyPatch, tags: list[str]
) -> None:
    monkeypatch.setattr(opening, "PATIENCE_S", DEADLOCK_S)

    def name() -> str:
        """The engine of the first task is the slowest, and that of the second comes before it."""
        time.sleep(0.6 - 0.2 * runtime.task_run.parameters["index"])
        return "slow"

    @task
    def load() -> float:
        return 0.1

    @task(tags=tags, task_run_name=name)
    def began(index: int, naps_s: float) -> float:
        at_s = time.monotonic()
        # The device holds one at a time, once this is known.
        with allocate("3GiB"):
            time.sleep(naps_s)
        return at_s

    runner = GPUTaskRunner(devices=SimulatedDevices("1x7GiB"), reports=False)

    @flow(task_runner=runner)
    def three() -> tuple[list[float], list[float]]:
        plain = began.map([0, 1, 2], 0.1).result()
        # All of them have their inputs at the same moment.
        return plain, began.map([0, 1, 2], load.submit()).result()

    for times in three():
        assert times == sorted(times)


def test_no_more_tasks_on_a_device_than_are_allowed() -> None:
    @task(tags=gpu(memory="1GiB"))
    def when() -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(0.3)
        return began, time.monotonic()

    runner = GPUTaskRunner(
        devices=SimulatedDevices("1x11GiB"), reports=False, max_tasks_per_device=1
    )

    @flow(task_runner=runner)
    def three() -> list[tuple[float, float]]:
        return [future.result() for future in [when.submit() for _ in range(3)]]

    spans = sorted(three())
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("given", [0, -1, "two"])
def test_a_number_of_tasks_that_is_none_is_refused_at_once(given: Any) -> None:
    with pytest.raises(
        SettingError, match=r"GPUTaskRunner\(max_tasks_per_device=.*\): it should be"
    ):
        GPUTaskRunner(max_tasks_per_device=given)


def test_sharing_that_cannot_be_had_is_said_once_and_tasks_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @task(tags=gpu(memory="64MiB", framework="none", compute="50%"))
    def square(x: int) -> int:
        return x * x

    @flow(task_runner=GPUTaskRunner(devices="host", sharing="mps", standby=0))
    def compute() -> list[int]:
        return square.map([1, 2, 3]).result()

    assert compute() == [1, 4, 9]
    said = [r.getMessage() for r in caplog.records if "sharing='mps'" in r.getMessage()]
    assert said == [
        "sharing='mps' has no effect: MPS is for NVIDIA GPUs of this machine. Tasks on a GPU compute by turns."
    ]


def test_a_part_of_the_chip_is_refused_where_tasks_compute_by_turns() -> None:
    @task(tags=gpu(compute="50%"))
    def square(x: int) -> int:
        return x * x

    @flow(task_runner=GPUTaskRunner(devices="host", standby=0))
    def compute() -> None:
        with pytest.raises(
            PolicyError, match=r"gpu:compute=50%.*share a GPU by time.*sharing=\"mps\""
        ):
            square.submit(1).result()

    compute()
