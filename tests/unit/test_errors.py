"""`prefect_gpu.errors`: every error says what it must, and crosses a pipe unchanged."""

from __future__ import annotations

import pickle

import pytest

from prefect_gpu import errors


def _subclasses(base: type[Exception]) -> set[type[Exception]]:
    return {base}.union(*(_subclasses(each) for each in base.__subclasses__()))


ERRORS: list[tuple[Exception, list[str]]] = [
    (errors.PrefectGPUError("anything"), ["anything"]),
    (errors.PolicyError("gpu:memory=8", "no unit", "6GiB"), ["gpu:memory=8: no unit; accepted: 6GiB"]),
    (errors.ResultError("return value", "result['model'].lock", "_thread.lock", "no way"), ["return value", "result['model'].lock is a _thread.lock", "no way", "return the path"]),
    (errors.ResultError("argument", "x", errors.NO_ROOM, "2GiB: no"), ["the argument of a GPU task finds no memory", "(2GiB: no)", "path of a file"]),
    (errors.SettingError("standby=-1: too few"), ["standby=-1: too few"]),
    (errors.CapacityError("too small"), ["too small"]),
    (errors.PlacementError("80GiB is too much"), ["80GiB is too much"]),
    (errors.PlacementError("too much", ("GPU-1: 24GiB", "GPU-2: 8GiB")), ["too much [GPU-1: 24GiB; GPU-2: 8GiB]"]),
    (errors.PlacementTimeoutError("none in 10m", ("GPU-1: full",)), ["none in 10m [GPU-1: full]"]),
    (errors.DeviceError("no driver answers"), ["no driver answers"]),
    (errors.FrameworkError("torch", "finds no device"), ["torch: finds no device"]),
    (errors.ChildDiedError("train", 7, "killed by SIGKILL"), ["GPU task 'train' (pid 7)", "killed by SIGKILL"]),
    (errors.ChildDiedError("train", 7, "killed by SIGKILL", "perhaps the OOM killer", "Killed"), ["GPU task 'train' (pid 7) killed by SIGKILL; perhaps the OOM killer"]),
    (errors.ChildTimeoutError("train", 1.5), ["'train'", "timeout_seconds=1.5"]),
    (errors.BudgetExceededError("train", 2 << 30, 3 << 30), ["'train'", "held 3GiB", "budget of 2GiB"]),
    (errors.NodeRefusedError("n1", "1GiB free"), ["node n1", "refused the task: 1GiB free"]),
    (errors.ProtocolError("odd frame"), ["odd frame"]),
    (errors.ReportError("no flow run"), ["no flow run"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "parts"), [pytest.param(*each, id=type(each[0]).__name__) for each in ERRORS]
)
def test_an_error_crosses_a_pipe_unchanged(error: Exception, parts: list[str]) -> None:
    text = str(error)
    for part in parts:
        assert part in text
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == text
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    "error", [each for each, _ in ERRORS], ids=lambda each: type(each).__name__
)
def test_the_repr_of_an_error_is_short(error: Exception) -> None:
    shown = repr(error)
    assert shown.startswith(type(error).__name__)
    if isinstance(error, errors.ChildTimeoutError):
        assert shown.endswith(str(error))
    else:
        assert len(shown) < len(type(error).__name__) + errors.REPR_LIMIT + 5


def test_every_error_is_tested_here() -> None:
    ours = {
        each
        for each in _subclasses(errors.PrefectGPUError)
        if each.__module__ == "prefect_gpu.errors"
    }
    assert ours == {type(error) for error, _ in ERRORS}


def test_errors_are_also_the_builtin_errors_of_their_kind() -> None:
    assert issubclass(errors.PolicyError, ValueError)
    assert issubclass(errors.ChildTimeoutError, TimeoutError)
