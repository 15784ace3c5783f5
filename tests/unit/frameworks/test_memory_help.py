"""What a task can do when memory is short: give back what is cached, find a batch size that fits."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu import in_task as inside
from prefect_gpu.devices.own import OwnUse
from prefect_gpu.frameworks import memory_help as remedies
from prefect_gpu.frameworks.memory_help import find_batch_size, memory_snapshot, release_cached
from prefect_gpu.units import GIB

NAME = "framework_for_remedies"


class FakeAdapter:
    def __init__(self, module: str = NAME) -> None:
        self.name = module
        self.released = 0

    def release_cached(self) -> None:
        self.released += 1


class Node:
    pass


def circle() -> weakref.ref[Node]:
    """Make garbage that only the collector finds."""
    node = Node()
    node.self = node  # type: ignore[attr-defined]
    return weakref.ref(node)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Release what some frameworks cache; the driver shows one size after the other."""
    monkeypatch.setitem(sys.modules, NAME, object())  # type: ignore[arg-type]

    def act(adapters: list[Any], *shown: dict[str, int]) -> int:
        left = list(shown) or [{}, {}]
        monkeypatch.setattr(remedies, "ADAPTERS", dict(enumerate(adapters)))
        monkeypatch.setattr(remedies, "_read_own", lambda: left.pop(0))
        return release_cached()

    return act


@pytest.mark.parametrize(
    ("before", "after", "freed"),
    [
        pytest.param({"a": 5}, {"a": 2}, 3, id="what went"),
        pytest.param({"a": 5, "b": 4}, {"a": 2, "b": 1}, 6, id="on all devices"),
        pytest.param({"a": 5, "b": 4}, {"a": 2, "b": 9}, 3, id="growth elsewhere hides nothing"),
        pytest.param({"a": 5}, {"a": 5}, 0, id="nothing came back"),
        pytest.param({}, {}, 0, id="the driver does not tell"),
        pytest.param({"a": 5}, {}, 0, id="the driver stopped telling"),
    ],
)
def test_freed_is_what_the_driver_shows_less(
    release: Callable[..., int], before: dict[str, int], after: dict[str, int], freed: int
) -> None:
    assert release([FakeAdapter()], before, after) == freed


def test_only_frameworks_that_are_imported_are_asked(release: Callable[..., int]) -> None:
    there, missing = FakeAdapter(), FakeAdapter("framework_not_there")
    release([there, missing])
    assert (there.released, missing.released) == (1, 0)


def test_garbage_goes_before_the_caches_and_what_they_held_after(
    release: Callable[..., int],
) -> None:
    seen: list[bool] = []

    class Cache(FakeAdapter):
        def release_cached(self) -> None:
            seen.append(garbage() is None)
            self.held = circle()

    gc.disable()
    try:
        garbage, cache = circle(), Cache()
        release([cache])
        assert seen == [True]
        assert cache.held() is None
    finally:
        gc.enable()


def test_outside_a_gpu_task_caches_go_too_and_nothing_is_said() -> None:
    assert inside.current_allocation() is None
    assert release_cached() == 0


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process look like a GPU task's first, second, … process."""

    def enter(number: int) -> None:
        allocation = inside.Allocation(GIB, None, number, ("GPU-a", "GPU-b"), ())
        monkeypatch.setattr(inside, "_current", allocation)

    return enter


def test_in_a_gpu_task_the_driver_is_asked_about_its_devices(
    attempt: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [9, 4]

    class Own:
        def __init__(self, device_uuids: tuple[str, ...]) -> None:
            assert device_uuids == ("GPU-a", "GPU-b")

        def read(self) -> tuple[OwnUse, ...]:
            return OwnUse("GPU-a", held.pop(0)), OwnUse("GPU-b")

    monkeypatch.setattr(remedies, "_own_memory", Own)
    attempt(1)
    assert release_cached() == 5


class Fits:
    """Runs out of memory above a size, and keeps what was tried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def __call__(self, size: int) -> str:
        self.tried.append(size)
        if size > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "thrown away"


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Count the times that caches are given back: collecting garbage takes long in a large process."""
    times: list[None] = []
    monkeypatch.setattr(remedies, "release_cached", lambda: times.append(None))
    return times


@pytest.mark.parametrize(
    ("number", "most", "start", "least", "tried"),
    [
        (1, 1000, 64, 1, [64]),
        (1, 20, 64, 1, [64, 32, 16]),
        (1, 1, 7, 1, [7, 3, 1]),
        (1, 30, 100, 30, [100, 50, 30]),
        (1, 8, 8, 8, [8]),
        (2, 16, 64, 4, [32, 16]),
        (3, 16, 64, 4, [16]),
        (9, 16, 64, 4, [4]),
    ],
    ids=[
        *("it fits", "halves", "odd halves", "the least is no half", "one size only"),
        *("the second process begins lower", "the third", "the ninth, not below the least"),
    ],
)
def test_the_first_that_fits(
    attempt: Callable[[int], None],
    releases: list[None],
    number: int,
    most: int,
    start: int,
    least: int,
    tried: list[int],
) -> None:
    attempt(number)
    fn = Fits(most)
    assert find_batch_size(fn, start, least=least) == tried[-1]
    assert fn.tried == tried
    # Between two tries.
    assert len(releases) == len(tried) - 1


def test_out_of_memory_at_the_least_is_raised(releases: list[None]) -> None:
    fn = Fits(3)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        find_batch_size(fn, 16, least=4)
    assert fn.tried == [16, 8, 4]


def as_cause(error: Exception) -> Exception:
    failed = ValueError("the step failed")
    failed.__cause__ = error
    return failed


def simulated(error: Exception) -> Exception:
    short = ValueError("no memory")
    short.__prefect_gpu_out_of_memory__ = True  # type: ignore[attr-defined]
    return short


@pytest.mark.parametrize("becomes", [as_cause, simulated])
def test_out_of_memory_counts_as_a_cause_and_on_simulated_devices(
    releases: list[None], becomes: Callable[[Exception], Exception]
) -> None:
    fits = Fits(8)

    def wrapped(size: int) -> None:
        failed = None
        try:
            fits(size)
        except RuntimeError as error:
            failed = becomes(error)
        # Outside the handler, so that the error is no context.
        if failed is not None:
            raise failed

    assert find_batch_size(wrapped, 16) == 8


def test_any_other_error_passes_at_once_even_while_an_out_of_memory_is_handled() -> None:
    tried = []

    def fn(size: int) -> None:
        tried.append(size)
        raise ValueError("bad shape")

    with pytest.raises(ValueError, match="bad shape"):
        find_batch_size(fn, 16)
    try:
        Fits(0)(1)
    except RuntimeError:
        with pytest.raises(ValueError, match="bad shape"):
            find_batch_size(fn, 16)
    assert tried == [16, 16]


def test_what_a_try_held_is_gone_before_caches_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[Node]] = []
    gone: list[bool] = []
    monkeypatch.setattr(remedies, "release_cached", lambda: gone.append(held[-1]() is None))

    def fn(size: int) -> None:
        tensor = Node()
        held.append(weakref.ref(tensor))
        Fits(4)(size)

    assert find_batch_size(fn, 16) == 4
    assert gone == [True, True]


@pytest.mark.parametrize(
    ("start", "least", "message"),
    [
        (0, 1, "start=0 is no batch size"),
        (-4, 1, "start=-4"),
        (4.0, 1, "start=4.0"),
        (True, 1, "start=True"),
        (4, 0, "least=0"),
        (4, 8, "least=8 is more than start=4"),
    ],
)
def test_bad_arguments(start: Any, least: int, message: str) -> None:
    fn = Fits(100)
    with pytest.raises(ValueError, match=message):
        find_batch_size(fn, start, least=least)
    assert fn.tried == []


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_whose_text_raises_is_no_out_of_memory() -> None:
    def fn(size: int) -> None:
        raise Wordless

    with pytest.raises(Wordless):
        find_batch_size(fn, 8)


def test_a_snapshot_is_pytorchs_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    assert memory_snapshot(path) is False, "PyTorch is on no device"
    assert not path.exists()
    written: list[str] = []
    monkeypatch.setattr(
        type(remedies.ADAPTERS["torch"]),
        "write_snapshot",
        lambda self, path: not written.append(path),
    )
    assert memory_snapshot(path) is True
    assert written == [str(path)]
