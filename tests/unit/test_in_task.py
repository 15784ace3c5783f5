"""What a body says of its own course."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import prefect_gpu
from prefect_gpu import Allocation
from prefect_gpu import in_task as inside


class FakeRecorder:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.names: list[str] = []
        self.metrics: dict[str, float] = {}

    def begin_phase(self, name: str) -> str:
        self.names.append(name)
        self.heard.append(f"begin {name}")
        return name

    def end_phase(self, phase: str) -> None:
        self.heard.append(f"end {phase}")

    def mark(self, name: str) -> None:
        self.names.append(name)
        self.heard.append(f"mark {name}")

    def step(self) -> None:
        self.heard.append("step")


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    fake = FakeRecorder()
    inside.set_current_recorder(fake)
    yield fake
    inside.set_current_recorder(None)


def test_phases_marks_and_steps_reach_the_recorder_in_order(recorder: FakeRecorder) -> None:
    with prefect_gpu.phase("a"):
        prefect_gpu.mark("b")
    prefect_gpu.step()
    assert recorder.heard == ["begin a", "mark b", "end a", "step"]


def test_a_phase_that_raises_has_an_end(recorder: FakeRecorder) -> None:
    with pytest.raises(KeyError), inside.phase("a"):
        raise KeyError
    assert recorder.heard == ["begin a", "end a"]


def test_a_phase_ends_at_the_recorder_that_began_it(recorder: FakeRecorder) -> None:
    with inside.phase("a"):
        inside.set_current_recorder(None)
    assert recorder.heard == ["begin a", "end a"]


def test_outside_a_task_phases_marks_and_steps_do_nothing() -> None:
    with inside.phase("a"):
        inside.mark("b")
        inside.step()
        inside.report_metric("accuracy", 0.9)


@pytest.mark.parametrize("function", [inside.phase, inside.mark], ids=["phase", "mark"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("", r"\(''\): the name must be text", id="empty"),
        pytest.param(" \n", "the name must be text", id="blank"),
        pytest.param(7, r"\(7\): the name must be text", id="no text"),
        pytest.param("x" * 81, "has 81 characters, 80 are allowed", id="long"),
    ],
)
def test_a_name_that_is_no_text_is_refused_in_a_task_and_outside(
    function: Callable[[object], object], name: object, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        function(name)


def test_a_name_of_the_greatest_length_is_accepted(recorder: FakeRecorder) -> None:
    inside.mark("x" * 80)
    assert recorder.heard == ["mark " + "x" * 80]


class Part(str, enum.Enum):
    FORWARD = "forward"


@pytest.mark.parametrize("name", [Part.FORWARD, np.str_("forward")], ids=["enum", "numpy"])
def test_a_name_is_passed_on_as_plain_text(name: str, recorder: FakeRecorder) -> None:
    with inside.phase(name):
        inside.mark(name)
    assert [type(said) for said in recorder.names] == [str, str]
    assert recorder.names == ["forward", "forward"]


def test_an_allocation_prints_what_a_person_asks() -> None:
    shown = repr(Allocation(6 << 30, None, 2, ("GPU-1", "GPU-2"), ("torch",), shared_with=("b",)))
    assert shown == (
        "<Allocation: budget 6GiB; no cap; attempt 2; on GPU-1, GPU-2; torch; shared with b>"
    )
    assert "cap 5GiB" in repr(Allocation(6 << 30, 5 << 30, 1, ("GPU-1",), (), exclusive=True))


class InGraph:
    """As PyTorch's tensors that require a gradient, which warn when they become a number."""

    def __float__(self) -> float:
        raise RuntimeError("Converting a tensor with requires_grad=True to a scalar")

    def detach(self) -> float:
        return 0.25


def test_a_metric_is_a_number_with_a_name(recorder: FakeRecorder) -> None:
    inside.report_metric("accuracy", np.float32(0.5))
    inside.report_metric("accuracy", True)
    inside.report_metric("loss", InGraph())  # type: ignore[arg-type]
    for name, value in (("", 1.0), ("loss", "0.5"), ("loss", None), ("loss", [1, 2])):
        with pytest.raises(ValueError, match="report_metric"):
            inside.report_metric(name, value)  # type: ignore[arg-type]
    assert recorder.metrics == {"accuracy": 1.0, "loss": 0.25}
