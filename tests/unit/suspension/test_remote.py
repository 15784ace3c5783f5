"""What a flow makes of the news of a process that is suspended on its node."""

from __future__ import annotations

from typing import Any

from prefect_gpu.suspension.remote import (
    MoveIn,
    MoveOut,
    NotReserved,
    ProcessLost,
    ReadyToReturn,
    RemoteSuspender,
    Return,
    StageReached,
)


class Subject:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.may = False

    def lost_before(self) -> bool:
        return True

    def device_uuid(self) -> str:
        return "GPU-1"

    def comes_back(self) -> bool:
        return self.may

    def wait_again(self) -> None:
        self.heard.append("waits again")

    def hold_back(self, away: bool, shared: bool) -> None:
        self.heard.append((away, shared))

    def tell(self, stage: str, text: str) -> None:
        self.heard.append(stage)

    def begun(self) -> None:
        self.heard.append("begun")

    def ended(self, suspension: Any) -> None:
        self.heard.append(suspension)

    def lost(self, why: str) -> None:
        self.heard.append(why)


def make() -> tuple[RemoteSuspender, Subject, list[Any]]:
    subject, sent = Subject(), list[Any]()
    return RemoteSuspender(subject, sent.append), subject, sent


def test_a_refusal_of_what_was_asked_before_is_no_answer_to_what_is_asked_now() -> None:
    suspender, subject, sent = make()
    for away in (True, False, True):
        suspender.ask(away)
    assert sent == [MoveOut(1, True), MoveIn("GPU-1"), MoveOut(2, True)]
    suspender.take(StageReached("refused", "not suspended", 1))
    assert subject.heard == []
    suspender.take(StageReached("refused", "not suspended", 2))
    assert subject.heard == ["refused"]


def test_a_process_that_cannot_be_locked_goes_on() -> None:
    suspender, subject, _ = make()
    suspender.ask(True)
    suspender.take(StageReached("moving out", "moving", 1))
    assert suspender.away
    suspender.take(StageReached("refused", "not suspended", 1))
    assert not suspender.away and suspender.away_s is None
    assert subject.heard == ["moving out", "begun", None, "refused"]


def test_the_flow_says_whether_it_is_restored() -> None:
    suspender, subject, sent = make()
    suspender.take(ReadyToReturn("GPU-1"))
    subject.may = True
    suspender.take(ReadyToReturn("GPU-1"))
    assert sent == [Return(may=False), Return(may=True)]


def test_it_is_not_restored_on_another_device_than_the_flow_has_for_it() -> None:
    suspender, subject, sent = make()
    subject.may = True
    suspender.take(ReadyToReturn("GPU-2"))
    assert sent == [Return(may=False)]


def test_it_waits_again_where_its_node_cannot_reserve_its_device() -> None:
    suspender, subject, _ = make()
    # It has another one by now.
    suspender.take(NotReserved("GPU-2"))
    assert subject.heard == []
    suspender.take(NotReserved("GPU-1"))
    assert subject.heard == ["waits again"]


def test_nothing_is_heard_of_a_process_that_is_gone() -> None:
    suspender, subject, sent = make()
    suspender.end()
    for news in (ProcessLost("why"), ReadyToReturn("GPU-1"), StageReached("away", "away", 0)):
        suspender.take(news)
    assert subject.heard == sent == []
