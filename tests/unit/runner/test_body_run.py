"""What follows when the process of a task runs out of device memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.broker.broker import NeedLearned
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.engine.task_engine import CancelledByRunner
from prefect_gpu.errors import NodeRefusedError, PlacementError
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.measurements import StepFacts
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.launch_spec import ChildRefused
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.runner import submission
from prefect_gpu.runner.budgets import BudgetBook, Grant
from prefect_gpu.runner.process_run import Cancelled, Done, Ended, EndedForOthers, Lost, Shortage
from prefect_gpu.runner.process_run import OutOfMemory as OutOfMemoryEnd
from prefect_gpu.runner.submission import BodyRun
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.ladder import Evidence, OomHistory
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.units import GIB, MIB
from tests.fakes.reports import device, task_report

WHO = HistoryKey("evaluate", "evaluate")
CAPACITY = 24 * GIB


class Full(RuntimeError):
    """Stands for a framework's out-of-memory."""


def own_cap(wanted: int = GIB) -> OutOfMemory:
    return OutOfMemory("torch", wanted, GIB // 2, GIB, 20 * GIB, "", says_own_cap=True)


def device_full(wanted: int = GIB) -> OutOfMemory:
    return OutOfMemory("torch", wanted, 0, 100 * MIB, 0)


class FakeAttempt:
    """One process: what it was given, and how it ends."""

    def __init__(
        self, grant: Grant, ends: Any, late: bool, foreign: int, closed: threading.Semaphore
    ) -> None:
        self.grant, self._ends, self._late, self._foreign = grant, ends, late, foreign
        self._closed = closed
        self.finished = threading.Event()
        self.cancelled = threading.Event()
        self.shares = grant.memory is None and grant.probe_fraction > 0
        self.whole_device = grant.memory is None and not self.shares
        self._budget = grant.memory if isinstance(grant.memory, int) else CAPACITY
        self._report: TaskReport | None = None
        self._take: Callable[[TaskReport | None], None] | None = None

    def cancel(self) -> None:
        self.cancelled.set()

    def evidence(self) -> Evidence | None:
        seen = self._ends
        if not isinstance(seen, OutOfMemory):
            return None
        capped = isinstance(self.grant.memory, int)
        return Evidence(
            budget_bytes=self._budget,
            cap_bytes=self._budget - 512 * MIB if capped else None,
            context_bytes=512 * MIB,
            wanted_bytes=seen.wanted_bytes,
            held_bytes=seen.held_bytes,
            process_bytes=seen.process_bytes,
            free_bytes=seen.free_bytes,
            foreign_growth_bytes=self._foreign,
            says_own_cap=seen.says_own_cap,
            alone=self.whole_device,
            shared_probe=self.shares,
        )

    def neighbours_at_fault(self, ended: Ended) -> None:
        """It is no client of MPS."""

    def place(self) -> Placement:
        if isinstance(self._ends, (PlacementError, NeedLearned)):
            raise self._ends
        return Placement("1", (device(),), (self._budget,))

    def run(self) -> Done | Ended:
        if self._ends == "wait":
            assert self.cancelled.wait(DEADLOCK_S)
            return Ended(Cancelled(), CancelledByRunner(), "")
        failed = isinstance(self._ends, (OutOfMemory, Lost))
        outcome = "oom" if failed else "completed"
        self._report = task_report(outcome=outcome, budget_bytes=self._budget)
        full = Full("no room")
        match self._ends:
            case OutOfMemory():
                return Ended(OutOfMemoryEnd(full), full, "Full: no room")
            case NodeRefusedError():
                return Ended(ChildRefused(self._ends), self._ends, "")
            case EndedForOthers() | Lost():
                return Ended(self._ends, RuntimeError(), "")
        return Done(self._ends)

    def close(self, take: Any, shortage: Shortage | None) -> None:
        self._take = take
        if self._report is not None and shortage is not None:
            words = shortage.rung.reason if shortage.rung else ""
            self._report = replace(self._report, cause=shortage.cause, next_words=words)
        if self._report is None or not self._late:
            self.hand_on()
        self._closed.release()

    def hand_on(self) -> None:
        assert self._take is not None
        self._take(self._report)
        self.finished.set()


class Scene:
    """One call of a body, whose processes end as told."""

    def __init__(
        self,
        *ends: Any,
        late: bool = False,
        foreign: int = 0,
        climb: OomHistory | None = None,
        probe_fraction: float = 0.0,
        **asks: Any,
    ) -> None:
        self.attempts: list[FakeAttempt] = []
        self.numbers: list[int] = []
        self.told: list[str] = []
        #: Released by each attempt that is closed.
        self.closed = threading.Semaphore(0)
        self.reports: list[TaskReport] = []
        self.history = MemoryHistory()
        #: What the broker was told after each process: whether the task run is no first run any more, and what is shown.
        self.kept: list[tuple[bool, Any]] = []
        self.book = BudgetBook(MemoryHistory(), self.history)
        left = list(ends)

        def new_attempt(grant: Grant, number: int) -> FakeAttempt:
            self.numbers.append(number)
            self.attempts.append(FakeAttempt(grant, left.pop(0), late, foreign, self.closed))
            return self.attempts[-1]

        broker = SimpleNamespace(
            kind="nvml",
            capacities=lambda names, nodes=(): {device(): CAPACITY},
            runs_kept=0,
            kept=lambda sequence, over, shown: self.kept.append((over, shown)),
            new_attempt=new_attempt,
        )
        policy = GPUPolicy(**{"memory": 2 * GIB, "allocation": "limit", **asks})
        self.run = SimpleNamespace(show_awaiting=lambda why: None, warn=self.told.append)
        plan = SimpleNamespace(
            policy=policy, probe_fraction=probe_fraction, alone_because=None, sequence=7
        )
        call = TaskCall(
            plan=plan,  # type: ignore[arg-type]
            run=self.run,  # type: ignore[arg-type]
            identity=WHO,
            args=(),
            kwargs={},
            share=SimpleNamespace(),  # type: ignore[arg-type]
        )
        runner: Any = SimpleNamespace(
            broker=lambda: broker,
            book=lambda: self.book,
            report=self.reports.append,
            mps_pipes=lambda: None,
        )
        launcher: Any = SimpleNamespace()
        self.call = BodyRun(runner, call, climb or OomHistory(), itertools.count(1), launcher)

    @contextlib.contextmanager
    def running(self) -> Iterator[list[BaseException]]:
        """Run the call in a thread, which is cancelled at the end; give the errors that it raises."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                self.call.run()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield raised
        finally:
            self.call.cancel()
            thread.join(DEADLOCK_S)

    @property
    def budgets(self) -> list[Any]:
        return [attempt.grant.memory for attempt in self.attempts]


@pytest.fixture(autouse=True)
def _attempts_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(
        call: Any, grant: Grant, asked_s: float, number: int, broker: Any, *more: Any
    ) -> FakeAttempt:
        made: FakeAttempt = broker.new_attempt(grant, number)
        return made

    monkeypatch.setattr(submission, "Attempt", make)


def test_a_body_that_answers_has_one_process() -> None:
    scene = Scene(7)
    assert scene.call.run() == 7
    assert scene.budgets == [2 * GIB]
    assert [report.cause for report in scene.reports] == [""]
    assert scene.call.finished and not scene.told


def test_a_body_whose_attempt_cannot_be_cancelled_is_still_finished() -> None:
    scene = Scene(7)

    def fail(attempt: FakeAttempt) -> None:
        raise RuntimeError("no place")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeAttempt, "cancel", fail)
        scene.call.cancel()
        with pytest.raises(RuntimeError, match="no place"):
            scene.call.run()
    assert scene.call.finished


def test_a_cap_that_was_too_small_is_raised_until_it_is_not() -> None:
    scene = Scene(own_cap(), own_cap(), "done")
    assert scene.call.run() == "done"
    assert scene.budgets == [2 * GIB, 3 * GIB, int(4.5 * GIB)]
    assert [report.cause for report in scene.reports] == ["own_cap", "own_cap", ""]
    assert "2GiB were not enough; it gets 3GiB" in scene.told[0]
    assert [report.next_words for report in scene.reports] == [
        "2GiB were not enough; it gets 3GiB",
        "3GiB were not enough; it gets 4.5GiB",
        "",
    ]
    assert scene.call.climb.processes == 3
    assert scene.numbers == [1, 2, 3]


def test_a_learned_budget_that_left_first_steps_out_is_followed_by_one_that_does_not() -> None:
    scene = Scene(own_cap(wanted=1), "done", memory=None)
    first = task_report(
        peak_live_bytes=8 * GIB,
        context_bytes=GIB,
        steps=StepFacts(9, 8 * GIB, 2 * GIB),
        budget_bytes=CAPACITY,
    )
    scene.book.take(WHO, first)
    scene.call.run()
    small, whole = scene.budgets
    assert small == pytest.approx(3.6 * GIB, abs=2 * MIB)
    assert whole == pytest.approx(11.4 * GIB, abs=2 * MIB)


def test_a_whole_device_is_the_last_rung_and_the_error_says_how_much_was_wanted() -> None:
    scene = Scene(own_cap(wanted=23 * GIB), own_cap(wanted=23 * GIB))
    with pytest.raises(Full) as caught:
        scene.call.run()
    assert scene.budgets == [2 * GIB, None]
    (note,) = caught.value.__notes__
    assert "a whole device was not enough, 24GiB; it would have needed 24GiB in all" in note


def test_oom_fail_fails_at_once_and_the_report_still_says_why() -> None:
    scene = Scene(own_cap(), oom="fail")
    with pytest.raises(Full) as caught:
        scene.call.run()
    assert [report.cause for report in scene.reports] == ["own_cap"]
    (note,) = caught.value.__notes__
    assert note.startswith("prefect_gpu: 2GiB were not enough") and "gpu:oom=fail" in note


def test_an_out_of_memory_caused_by_others_keeps_the_budget_and_then_gets_a_whole_device() -> None:
    scene = Scene(*[device_full()] * 3, "done", foreign=4 * GIB)
    assert scene.call.run() == "done"
    assert scene.budgets == [2 * GIB, 2 * GIB, 2 * GIB, None]
    assert [report.cause for report in scene.reports] == ["foreign"] * 3 + [""]


def test_a_log_that_fails_ends_the_first_run() -> None:
    def fail(text: str) -> None:
        raise OSError("no log")

    scene = Scene(own_cap(), memory=None, allocation="growth")
    scene.run.warn = fail
    with pytest.raises((OSError, Full)):
        scene.call.run()
    assert [over for over, _ in scene.kept] == [True]


def test_a_rung_that_no_device_holds_ends_with_what_ran_out() -> None:
    scene = Scene(own_cap(), PlacementError("asked on 2 devices"))
    with pytest.raises(Full) as caught:
        scene.call.run()
    assert "asked on 2 devices" in caught.value.__notes__[0]


def test_a_retry_begins_at_the_rung_that_was_reached() -> None:
    scene = Scene(own_cap(), "done", climb=OomHistory(processes=2, reached_bytes=6 * GIB))
    assert scene.call.run() == "done"
    assert scene.budgets == [6 * GIB, 9 * GIB]


def test_processes_before_the_last_are_waited_for_and_cancelled_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "ENDING_S", 0.01)
    scene = Scene(own_cap(), "done", late=True)
    scene.call.run()
    scene.attempts[1].hand_on()
    assert not scene.call.finished and not scene.call.wait_finished(0)
    scene.call.cancel()
    assert scene.attempts[0].cancelled.is_set()


def test_a_report_that_comes_after_the_value_is_kept_all_the_same() -> None:
    scene = Scene("done", late=True)
    scene.call.run()
    assert not scene.reports and not scene.call.finished
    scene.attempts[0].hand_on()
    assert [report.cause for report in scene.reports] == [""]
    assert len(scene.history.runs(WHO.on(device().name))) == 1
    assert scene.call.wait_finished(1)


def test_the_next_process_begins_once_the_report_of_the_one_before_it_is_in() -> None:
    scene = Scene(own_cap(), "done", late=True)
    thread = threading.Thread(target=scene.call.run)
    thread.start()
    assert scene.closed.acquire(timeout=DEADLOCK_S)
    assert len(scene.attempts) == 1 and thread.is_alive()
    scene.attempts[0].hand_on()
    thread.join(DEADLOCK_S)
    scene.attempts[1].hand_on()
    assert [report.cause for report in scene.reports] == ["own_cap", ""]


def test_a_process_whose_end_is_never_known_holds_up_the_next_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "ENDING_S", 0.01)
    scene = Scene(own_cap(), "done", late=True)
    assert scene.call.run() == "done"
    assert len(scene.attempts) == 2


def test_a_task_run_is_the_first_run_until_its_report_is_in() -> None:
    scene = Scene("done", late=True, memory=None, allocation="growth")
    scene.call.run()
    assert scene.kept == []
    scene.attempts[0].hand_on()
    ((over, shown),) = scene.kept
    assert over and list(shown) == [WHO.on(device().name)]


def test_a_first_run_that_shared_its_device_is_over_with_its_process() -> None:
    scene = Scene(
        EndedForOthers("device 0"), 7, memory=None, allocation="growth", probe_fraction=1.0
    )
    scene.call.run()
    assert [over for over, _ in scene.kept] == [True, True]


def test_a_first_run_that_is_lost_is_the_first_run_again() -> None:
    scene = Scene(Lost("gone"), "done", memory=None, allocation="growth", late=True)
    thread = threading.Thread(target=scene.call.run)
    thread.start()
    assert scene.closed.acquire(timeout=DEADLOCK_S)
    assert scene.kept == []
    scene.attempts[0].hand_on()
    thread.join(DEADLOCK_S)
    assert scene.kept == [(False, {})]
    scene.attempts[1].hand_on()
    assert [over for over, _ in scene.kept] == [False, True]


def test_a_probe_that_was_ended_for_others_runs_again_with_a_device_to_itself() -> None:
    scene = Scene(
        EndedForOthers("device 0"), 7, memory=None, allocation="growth", probe_fraction=1.0
    )
    assert scene.call.run() == 7
    assert [attempt.shares for attempt in scene.attempts] == [True, False]
    assert [attempt.whole_device for attempt in scene.attempts] == [False, True]
    assert scene.numbers == [1, 2]
    assert "it runs again with a device to itself" in scene.told[0]


@pytest.mark.parametrize("asks", [{}, {"oom": "fail"}], ids=["escalate", "fail"])
@pytest.mark.parametrize("wanted", [6 * GIB, None], ids=["says what it needs", "does not say"])
def test_a_probe_that_ran_out_of_memory_beside_others_has_all_that_it_needs_in_the_end(
    wanted: int | None, asks: dict[str, Any]
) -> None:
    known = [own_cap(6 * GIB)] * 2 if wanted else [replace(own_cap(), wanted_bytes=None)]
    scene = Scene(*known, 7, memory=None, allocation="growth", probe_fraction=1.0, **asks)
    monkeyed = FakeAttempt.__init__

    def smaller(self: FakeAttempt, *args: Any) -> None:
        monkeyed(self, *args)
        self._budget = 6 * GIB

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeAttempt, "__init__", smaller)
        assert scene.call.run() == 7
    said = int(7 * GIB * 1.1)
    assert scene.budgets == ([None, said, None] if wanted else [None, None])
    assert [attempt.shares for attempt in scene.attempts][1:] == [False] * len(known)
    assert ("it gets 7.7GiB" in scene.told[0]) is bool(wanted)
    assert "it gets a device to itself" in scene.told[-1]


def test_a_probe_asks_again_once_another_run_has_shown_what_it_needs() -> None:
    scene = Scene(NeedLearned(), 7, memory=None, allocation="growth", probe_fraction=1.0)
    first = scene.book.grant

    def grant(*args: Any, **others: Any) -> Grant | None:
        if scene.attempts:
            scene.book.take(WHO, task_report(outcome="completed", peak_live_bytes=GIB))
        return first(*args, **others)

    scene.book.grant = grant  # type: ignore[method-assign]
    assert scene.call.run() == 7
    assert [attempt.grant.source for attempt in scene.attempts] == ["probe", "learned"]
    assert scene.numbers == [1, 1]


def test_it_can_be_cancelled_while_a_process_runs() -> None:
    scene = Scene("wait", memory=None, allocation="growth")
    with scene.running() as raised:
        while not scene.attempts:
            pass
    assert isinstance(raised[0], CancelledByRunner)
    assert scene.call.wait_finished(1)
    assert [over for over, _ in scene.kept] == [True]
