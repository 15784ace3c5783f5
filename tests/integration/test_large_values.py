"""Large values through a flow: what tasks return, what several take, what a lack of memory does."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from prefect import flow, task, unmapped
from prefect.cache_policies import NO_CACHE

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.engine.task_engine import is_hopeless
from prefect_gpu.errors import NO_ROOM, ResultError
from prefect_gpu.values import argument_files, transport
from tests.integration import bodies
from tests.integration import engine_api as api

np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system"),
]

RUNNER = GPUTaskRunner(devices=api.TWO, reports=False)
COUNT = 1 << 20


change = task(bodies.change, tags=gpu(memory="64MiB"), cache_policy=NO_CACHE)
make = task(bodies.full, tags=gpu(memory="64MiB"), cache_policy=NO_CACHE)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each file that is written for arguments."""
    sizes: list[int] = []

    def write(parts: Any) -> Any:
        sizes.append(sum(part.nbytes for part in parts))
        return transport.write_file(parts)

    monkeypatch.setattr(argument_files(), "_write", write)
    return sizes


def test_an_array_that_several_tasks_take_is_written_once_and_is_private(
    written: list[int],
) -> None:
    array = np.arange(COUNT, dtype=np.float64)
    total = float(array.sum())

    @flow(task_runner=RUNNER)
    def several() -> list[Any]:
        return change.map(unmapped(array), [1.0, 2.0, 3.0]).result()

    found = several()
    assert [was for was, _, _ in found] == [total] * 3
    assert len({pid for _, _, pid in found}) == 3
    assert len({inode for _, inodes, _ in found for inode in inodes}) == 1
    assert written == [array.nbytes], "once, though two of them wait or run while one begins"
    assert float(array.sum()) == total
    assert len(argument_files()) == 0


def test_tensors_that_several_tasks_take_are_written_once(written: list[int]) -> None:
    torch = pytest.importorskip("torch")

    @task(tags=gpu(memory="64MiB"), cache_policy=NO_CACHE)
    def fill(tensor: Any, number: float) -> tuple[float, Any]:
        was = float(tensor.sum())
        tensor.fill_(number)
        return was, tensor

    tensor = torch.ones(COUNT)

    @flow(task_runner=RUNNER)
    def several() -> list[Any]:
        return fill.map(unmapped(tensor), [5.0, 6.0]).result()

    found = [(was, back.shape, back.unique().tolist()) for was, back in several()]
    assert found == [(COUNT, (COUNT,), [number]) for number in (5.0, 6.0)]
    assert written == [4 * COUNT]
    assert float(tensor.sum()) == COUNT
    assert len(argument_files()) == 0


def test_results_go_from_task_to_task_and_stay_as_long_as_they_are_held() -> None:
    gc.collect()
    before = len(bodies.mapped())

    @flow(task_runner=RUNNER)
    def chain() -> Any:
        first = make.submit(COUNT, 2.0)
        was, _, _ = change.submit(first, 1.0).result()
        assert was == 2.0 * COUNT
        value = first.result()
        value[0] = 9
        return value

    value = chain()
    assert value[:2].tolist() == [9.0, 2.0] and value.flags.writeable
    assert len(bodies.mapped()) > before
    del value
    gc.collect()


def test_a_result_that_is_persisted_is_an_array_like_any_other() -> None:
    @task(tags=gpu(memory="64MiB"), persist_result=True, cache_policy=NO_CACHE)
    def kept() -> Any:
        return np.arange(COUNT)

    @flow(task_runner=RUNNER)
    def persist() -> Any:
        return kept.submit().result()

    assert np.array_equal(persist(), np.arange(COUNT))


def test_a_lack_of_memory_may_pass_and_a_value_that_cannot_travel_may_not() -> None:
    assert not is_hopeless(ResultError("call", "call", NO_ROOM, "2GiB"))
    assert is_hopeless(ResultError("argument", "x", "_thread.lock", "no"))


def test_a_lack_of_memory_for_an_argument_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(parts: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(argument_files(), "_write", refuse)

    @flow(task_runner=RUNNER)
    def starved() -> Any:
        return change.submit(np.ones(COUNT), 1.0).result(raise_on_failure=False)

    error = starved()
    assert isinstance(error, ResultError)
    assert "finds no memory" in str(error)
    assert len(argument_files()) == 0
