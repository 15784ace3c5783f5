"""Functions that a task's body calls: for its allocation, and to name its phases, marks and steps.

The child process sets the allocation and the recorder before the body runs; `child.recorder` measures phases and steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from prefect_gpu.units import format_bytes

#: Most characters of a name, which is printed in tables and charts.
LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices and the memory of the GPU task that the caller runs in."""

    #: Budget on each of the task's devices, CUDA context included; the smallest, where the devices' budgets differ.
    budget_bytes: int
    #: Bytes that a framework's allocator may take; `None`: no cap is set.
    cap_bytes: int | None
    #: Number of the process among all processes of this task run, from 1.
    attempt: int
    #: UUIDs in the task's order: the first is the framework's device 0.
    device_uuids: tuple[str, ...]
    #: Frameworks whose adapters were applied, as named by tags or found in the task.
    frameworks: tuple[str, ...]
    #: Whether no other task of `prefect_gpu` may use the task's devices.
    exclusive: bool = False
    #: Names of tasks, of all flows of the machine, that were on the task's devices when its process started.
    shared_with: tuple[str, ...] = ()
    #: Ids of the requests of nested GPU tasks around the caller, the outermost first and this task's own last.
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
    """Set the allocation of this process. Only the start of a child process calls it."""
    global _current
    _current = allocation


#: In a standby that imports before its task is known: called functions that need the task. `None`: not recorded.
_asked_early: list[str] | None = None


@contextmanager
def before_the_task() -> Iterator[list[str]]:
    """Yield a list to which a call of `current_allocation` in the `with` block adds its name: no task is known yet."""
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
    """Set this process's recorder of phases, marks and steps. Only the start and end of a child process call it."""
    global _recorder
    _recorder = recorder


def phase(name: str) -> AbstractContextManager[None]:
    """Name a part of the body: the report shows its allocated and reserved memory.

        with phase("forward"):
            loss = model(batch)

    Phases may nest and repeat. The first name that occurs a second time begins a new step at each occurrence, unless
    the body calls `step`. The report keeps the first three steps and the newest measured step (measuring takes 1 % of
    the time at most). The device is not synchronised, so a GPU may still be at work when a phase ends: seconds are
    those of the CPU. Outside a GPU task the call does nothing.

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
    """Name a moment of the body: the report shows the allocated and reserved memory at that moment.

    Peaks are since the last mark. For steps and seconds see `phase`. Outside a GPU task the call does nothing.

    Raises:
        ValueError: The name is empty, longer than 80 characters or no text.
    """
    plain = _check_name("mark", name)
    if _recorder is not None:
        _recorder.mark(plain)


def step() -> None:
    """End a step: call it at the end of each iteration of a training or inference loop.

    The memory after the first step is then known, so that the next budget may be smaller than the first step's memory
    on an empty device. Outside a GPU task the call does nothing.
    """
    if _recorder is not None:
        _recorder.step()


def report_metric(name: str, value: float) -> None:
    """Report a result of the body for the report and leaderboards, as in `report_metric("accuracy", 0.97)`.

    `value` is anything that `float` accepts except text, such as a tensor with one element. The last value of a name
    counts. A process that dies loses its values. Outside a GPU task the call does nothing.

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
