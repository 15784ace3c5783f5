"""Each task is warned of once in each flow run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from prefect_gpu.engine import direct_calls
from prefect_gpu.engine.direct_calls import is_first_warning
from prefect_gpu.errors import ProtocolError


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "_warned", {})


def in_flow_run(monkeypatch: pytest.MonkeyPatch, flow_run_id: UUID | None) -> None:
    run = SimpleNamespace(id=flow_run_id, name="brave-owl")
    around = flow_run_id and SimpleNamespace(flow=None, flow_run=run)
    monkeypatch.setattr(direct_calls.FlowRunContext, "get", lambda: around)


def test_a_task_is_warned_of_once_in_each_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for flow_run_id in (uuid4(), uuid4(), None):
        in_flow_run(monkeypatch, flow_run_id)
        assert [is_first_warning(name) for name in "aba"] == [True, True, False]


class Channel:
    """A channel to a process that has warned of a task, or is gone."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def ask(self, question: str, **arguments: Any) -> bool:
        self.asked.append((question, arguments))
        if self.answer is None:
            raise ProtocolError("the flow's process is gone")
        return self.answer


@pytest.mark.parametrize(("answer", "first"), [(False, False), (True, True), (None, True)])
def test_the_process_of_a_task_asks_the_flows_process_once(
    monkeypatch: pytest.MonkeyPatch, answer: bool | None, first: bool
) -> None:
    channel = Channel(answer)
    monkeypatch.setattr(direct_calls, "current_channel", lambda: channel)
    in_flow_run(monkeypatch, uuid4())
    assert [is_first_warning("inner") for _ in range(2)] == [first, False]
    assert channel.asked == [("is_first_warning", {"task_name": "inner"})]
