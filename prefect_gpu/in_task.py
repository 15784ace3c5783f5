"""Functions for a task's body: its allocation, and names for its phases, marks and steps.

The child sets the allocation and the recorder before the body runs; `child.recorder` measures phases and steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from prefect_gpu.units import format_bytes

#: Characters that a name may have: it is printed in a table and on a chart.
LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices and the memory of the GPU task that the caller runs in."""

    #: Bytes on each of its devices, the context included (the smallest, where they differ).
    budget_bytes: int
    #: Bytes that a framework's allocator may take; `None`: no cap is set.
    cap_bytes: int | None
    #: Number of the process among all processes of this task run, from 1.
    attempt: int
    #: In the task's order: the framework's device 0 is the first.
    device_uuids: tuple[str, ...]
    #: Frameworks whose adapters were applied, as named by tags or found in the task.
    frameworks: tuple[str, ...]
    #: No other task of `prefect_gpu` is on its devices.
    exclusive: bool = False
    #: Names of the tasks, of all flows of the machine, that were on its devices when its process started.
    shared_with: tuple[str, ...] = ()
    #: Ids of the requests of the GPU tasks around the caller, the outermost first and this task's own last.
    requests: tuple[str, ...] = ()

    def __repr__(self) -> str:
        parts = [
            f"budget {format_bytes(self.budget_bytes)}",
            "no cap" if self.cap_bytes is None else f"cap {format_bytes(self.cap_bytes)}",
            f"attempt {self.attempt}",
            f"on {', '.join(self.device_uuids)}",
            *self.frameworks,
            *(["exclusive"] if self.exclusive else []),
            *([f"shared with {', '.join(self.shared_with)}"] if self.shared_with else []),
        ]
        return f"<Allocation: {'; '.join(parts)}>"


_current: Allocation | None = None


def current_allocation() -> Allocation | None:
    """Return the devices and the memory of the GPU task that the caller runs in; `None` outside a GPU task."""
    if _asked_early is not None:
        _asked_early.append("current_allocation")
    return _current


def set_current_allocation(allocation: Allocation | None) -> None:
    """Set the allocation of this process. For the child's start only."""
    global _current
    _current = allocation


#: In a standby that imports before its task is known: functions called that need the task.
_asked_early: list[str] | None = None


@contextmanager
def before_the_task() -> Iterator[list[str]]:
    """Yield a list of the functions of this module that are called while there is no task yet."""
    global _asked_early
    asked: list[str] = []
    _asked_early = asked
    try:
        yield asked
    finally:
        _asked_early = None


#: The `child.recorder.Recorder` of this process; `None`: it runs no GPU task.
_recorder: Any = None


def set_current_recorder(recorder: Any) -> None:
    """Set the recorder of phases, marks and steps. For the child's start and end only."""
    global _recorder
    _recorder = recorder


def phase(name: str) -> AbstractContextManager[None]:
    """Name a part of the body: the report shows its allocated and reserved memory.

        with phase("forward"):
            loss = model(batch)

    Phases may nest and repeat. The first name that occurs a second time begins a new step at each occurrence,
    unless the body calls `step`. The report keeps the first three steps and the newest measured step (measuring
    takes 1 % of the time at most). The device is not synchronised: seconds are CPU time, which a GPU lags
    behind. Outside a GPU task the call does nothing.

    Raises:
        ValueError: The name is empty, longer than 80 characters or no text.
    """
    return _phase(_check_name("phase", name))


@contextmanager
def _phase(name: str) -> Iterator[None]:
    recorder = _recorder
    if recorder is None:
        yield
        return
    begun = recorder.begin_phase(name)
    try:
        yield
    finally:
        recorder.end_phase(begun)


def mark(name: str) -> None:
    """Name a moment of the body: the report shows the allocated and reserved memory then.

    The peaks are those since the last mark. For steps and seconds see `phase`. Outside a GPU task the call does nothing.

    Raises:
        ValueError: The name is empty, longer than 80 characters or no text.
    """
    plain = _check_name("mark", name)
    if _recorder is not None:
        _recorder.mark(plain)


def step() -> None:
    """End a step: call it at the end of each iteration of a training or inference loop.

    Steps show the memory of a body after its first step, so that the next budget may be smaller than the memory of the
    first step on an empty device. Outside a GPU task the call does nothing.
    """
    if _recorder is not None:
        _recorder.step()


def report_metric(name: str, value: float) -> None:
    """Report a result of the body, as in `report_metric("accuracy", 0.97)`: it is in the report and in leaderboards.

    Of several values of one name the last counts. A process that dies loses its values. Outside a GPU task the call
    does nothing.

    Args:
        name: Name of the metric.
        value: A number, or an argument of `float`: a tensor with one element.

    Raises:
        ValueError: The name is empty, longer than 80 characters or no text, or the value is no number.
    """
    plain = _check_name("report_metric", name)
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("it is text")
        # PyTorch warns of a tensor that still belongs to its graph.
        detach = getattr(value, "detach", None)
        number = float(detach() if callable(detach) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"report_metric({name!r}, {value!r}): {error}; accepted: a number"
        ) from None
    if _recorder is not None:
        _recorder.metrics[plain] = number


def _check_name(function: str, name: object) -> str:
    # An enum or a `numpy.str_` is refused: the parent may lack the class to unpickle it.
    plain = str.__add__("", name) if isinstance(name, str) else ""
    if not plain.strip():
        raise ValueError(f"{function}({name!r}): the name must be text and not empty")
    if len(plain) > LONGEST_NAME:
        raise ValueError(
            f"{function}({name!r}): the name has {len(plain)} characters, {LONGEST_NAME} are "
            f"allowed; give a shorter one"
        )
    return plain
