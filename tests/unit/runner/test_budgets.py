"""What a task is given: by its tag, its history or a probe; and which tasks wait for others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PlacementTimeoutError
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.runner import budgets
from prefect_gpu.runner.budgets import NEVER_BYTES, BudgetBook, Grant, ProbeGate
from prefect_gpu.runner.engine_threads import SubmitOrder
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, PastRun, learn
from prefect_gpu.scheduling.model import ModelBudgets
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import GIB, MIB
from tests.fakes.reports import device, task_report

WHO = HistoryKey("evaluate", "evaluate")
MODEL = device().name
BOTH = {"A": 100 * GIB, "B": 100 * GIB}


def run(live: int = GIB, at: float = 1.0, **changes: Any) -> PastRun:
    known: dict[str, Any] = {
        "outcome": "completed",
        "live_bytes": live,
        "process_bytes": live + 600 * MIB,
        "context_bytes": 600 * MIB,
    }
    return PastRun(ended_at=at, **{**known, **changes})


class Books:
    """Books of runners of one process, and what keeps their runs."""

    def __init__(self) -> None:
        self.gate, self.recent, self.store = ProbeGate(), MemoryHistory(), MemoryHistory()

    def book(self, store: Any = None) -> BudgetBook:
        return BudgetBook(store or self.store, self.gate, self.recent)

    def grant(
        self,
        book: BudgetBook | None = None,
        identity: HistoryKey = WHO,
        models: Mapping[str, int] = MappingProxyType({MODEL: 100 * GIB}),
        on_waiting: Callable[[Reason], None] = lambda why: None,
        cancelled: Callable[[], bool] = lambda: False,
        **asks: Any,
    ) -> Grant | None:
        """Ask for a grant on one device of each model; `asks` are fields of the policy."""
        policy = GPUPolicy(**asks)
        plan = SimpleNamespace(policy=policy, probe_fraction=0.0, alone_because=None)
        run, place = SimpleNamespace(show_awaiting=on_waiting), SubmitOrder().add(0)
        call: Any = SimpleNamespace(plan=plan, identity=identity, run=run, place=place)
        capacities = {replace(device(), name=name): size for name, size in models.items()}
        return (book or self.book()).grant(call, capacities, cancelled)

    @contextmanager
    def waiting(self, **changes: Any) -> Iterator[Callable[[], Grant | None]]:
        """Ask in a thread that must wait; give what waits for the answer."""
        said = threading.Event()
        answers: list[Grant | None] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                self.grant(**{"on_waiting": lambda why: said.set(), **changes})
            )
        )
        thread.start()

        def answer() -> Grant | None:
            thread.join(DEADLOCK_S)
            assert not thread.is_alive()
            return answers[0]

        assert said.wait(DEADLOCK_S)
        yield answer
        thread.join(DEADLOCK_S)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    monkeypatch.setattr(budgets, "TELL_S", 0.0)
    return Books()


def test_a_tag_is_a_budget_and_the_history_corrects_its_context(books: Books) -> None:
    assert books.grant(memory=6 * GIB) == Grant(6 * GIB, "tag", {})
    books.store.add(WHO.on(MODEL), run())
    assert books.grant(memory=0.4) == Grant(0.4, "tag", {MODEL: 600 * MIB})


def test_a_task_without_a_history_probes_and_its_siblings_wait_for_the_result(books: Books) -> None:
    book = books.book()
    probe = books.grant(book)
    assert probe is not None
    assert (probe.memory, probe.source) == (None, "probe")
    assert probe.claims == {WHO.on(MODEL)}
    with books.waiting() as sibling:
        book.take(WHO, task_report(outcome="completed", budget_bytes=139 * GIB))
        book.gate.release(probe.claims)
        granted = sibling()
    assert granted is not None
    lesson = learn(books.recent.runs(WHO.on(MODEL)))
    assert lesson is not None
    assert (granted.memory, granted.source) == (lesson.budget_bytes, "learned")
    assert granted.contexts == {MODEL: lesson.context_bytes}
    assert not granted.claims
    assert granted.waited_s > 0


def test_other_tasks_do_not_wait_for_a_probe(books: Books) -> None:
    assert books.grant() is not None
    in_a_flow = books.grant(identity=HistoryKey("evaluate", "evaluate", flow_name="nightly"))
    assert in_a_flow is not None and in_a_flow.source == "probe"
    other = books.grant(identity=HistoryKey("train", "train"))
    assert other is not None and other.source == "probe"
    apart = books.grant(identity=HistoryKey("evaluate", "evaluate", learn_by="ab12"))
    assert apart is not None and apart.source == "probe"


def test_after_a_probe_that_taught_nothing_the_next_one_probes(books: Books) -> None:
    book = books.book()
    probe = books.grant(book)
    assert probe is not None
    with books.waiting() as sibling:
        book.take(WHO, task_report(outcome="failed"))
        book.gate.release(probe.claims)
        granted = sibling()
    assert granted is not None and granted.source == "probe"


def test_a_task_that_waits_for_a_probe_can_be_cancelled(books: Books) -> None:
    assert books.grant() is not None
    over = threading.Event()
    book = books.book()
    with books.waiting(book=book, cancelled=over.is_set) as sibling:
        over.set()
        book.gate.release()
        assert sibling() is None


def test_gpu_wait_ends_the_wait_for_a_probe(books: Books) -> None:
    assert books.grant() is not None
    with pytest.raises(PlacementTimeoutError, match=r"gpu:wait=100ms .*'evaluate'.* first run"):
        books.grant(wait_s=0.1)


def test_a_budget_above_any_device_is_a_device_to_itself(books: Books) -> None:
    books.store.add(WHO.on(MODEL), run(live=90 * GIB))
    granted = books.grant()
    assert granted is not None
    assert (granted.memory, granted.source) == (None, "learned")


def test_of_two_models_one_is_known_and_one_task_at_a_time_finds_out_about_the_other(
    books: Books,
) -> None:
    books.store.add(WHO.on("A"), run())
    book = books.book()
    first, second = (books.grant(book, models=BOTH) for _ in range(2))
    assert first is not None and second is not None
    lesson = learn([run()])
    assert lesson is not None
    known = ("A", lesson.budget_bytes)
    # On B a device to itself; for the second, never there.
    assert first.memory == ModelBudgets((known,)) and first.claims == {WHO.on("B")}
    assert second.memory == ModelBudgets((known, ("B", NEVER_BYTES))) and not second.claims
    # Placed on A, it finds out nothing about B: the next one may.
    assert not book.keep(first, "A").claims
    third = books.grant(book, models=BOTH)
    assert third is not None and third.claims == {WHO.on("B")}


def test_of_two_unknown_models_two_tasks_probe_at_once(books: Books) -> None:
    book = books.book()
    first = books.grant(book, models=BOTH)
    assert first is not None and first.memory is None
    placed = book.keep(first, "A")
    assert placed.claims == {WHO.on("A")}
    second = books.grant(book, models=BOTH)
    assert second is not None
    assert second.memory == ModelBudgets((("A", NEVER_BYTES),))
    assert (second.source, second.claims) == ("probe", {WHO.on("B")})


def test_a_task_that_needs_both_devices_is_not_kept_off_the_unknown_one(books: Books) -> None:
    books.store.add(WHO.on("A"), run())
    book = books.book()
    assert books.grant(book, models=BOTH, count=2) is not None
    second = books.grant(book, models=BOTH, count=2)
    assert second is not None and isinstance(second.memory, ModelBudgets)
    assert second.memory.get("B") is None


class Unreachable(MemoryHistory):
    def runs(self, key: Any) -> Any:
        raise OSError("no route to host")


def test_unreadable_histories_are_logged_once_and_the_task_probes(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    book = books.book(Unreachable())
    first = books.grant(book)
    assert first is not None and first.source == "probe"
    book.gate.release(first.claims)
    assert books.grant(book) is not None
    assert caplog.text.count("no route to host") == 1


def test_a_run_is_kept_without_a_call_of_an_api_that_may_hang(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    store = Unreachable()
    books.book(store).take(WHO, task_report(outcome="completed", budget_bytes=GIB))
    assert len(MemoryHistory.runs(store, WHO.on(MODEL))) == 1
    assert not caplog.records, "the store was not read"


def test_runs_of_this_process_count_at_once_for_other_runners(books: Books) -> None:
    one, other = books.book(MemoryHistory()), books.book(MemoryHistory())
    probe = books.grant(one)
    assert probe is not None
    one.take(WHO, task_report(outcome="completed", budget_bytes=139 * GIB))
    one.gate.release(probe.claims)
    granted = books.grant(other)
    assert granted is not None and granted.source == "learned"


def test_a_cancellation_between_the_check_and_the_wait_is_not_lost(books: Books) -> None:
    assert books.grant() is not None
    over = threading.Event()
    told: list[Reason] = []

    def cancel(why: Reason) -> None:
        told.append(why)
        over.set()

    # Cancelled while it says why it waits, before it waits again.
    assert books.grant(cancelled=over.is_set, on_waiting=cancel) is None
    assert told == [Reason(WaitKind.FIRST_RUN, tasks=(WHO.task_name,))]


def test_a_budget_that_its_own_model_cannot_hold_is_a_whole_device_there(books: Books) -> None:
    books.store.add(WHO.on("A"), run(live=20 * GIB, budget_bytes=23 * GIB))
    granted = books.grant(models={"A": 21 * GIB})
    assert granted is not None and granted.memory is None


def test_no_more_is_waited_for_than_a_device_had_left_beside_others(books: Books) -> None:
    books.store.add(WHO.on(MODEL), run(live=17 * GIB, budget_bytes=22 * GIB))
    granted = books.grant(models={MODEL: 23 * GIB})
    assert granted is not None and (granted.memory, granted.source) == (None, "learned")


@pytest.mark.parametrize("memory", [None, GIB])
def test_a_placement_has_the_expected_duration_of_its_task(
    books: Books, memory: int | None
) -> None:
    for seconds in (4.0, 8.0, 9.0):
        books.store.add(WHO.on("A"), run(at=seconds, run_s=seconds, start_s=1.0))
    books.store.add(WHO.on("B"), run(run_s=3.0))
    granted = books.grant(memory=memory, models=BOTH)
    assert granted is not None and granted.expected_s == 9.0, "on the slower of two models"
    assert books.book().keep(granted, "A").expected_s == 9.0


def test_of_a_task_that_never_completed_nothing_is_expected(books: Books) -> None:
    granted = books.grant(memory=GIB)
    assert granted is not None and granted.expected_s is None


def test_a_floor_is_remembered_when_the_run_that_showed_it_is_forgotten(books: Books) -> None:
    book = books.book()
    small = task_report(outcome="oom", cause="own_cap", budget_bytes=4 * GIB)
    enough = task_report(outcome="completed", budget_bytes=6 * GIB, cap_bytes=5 * GIB)
    book.take(WHO, small)
    for _ in range(KEPT_RUNS + 5):
        book.take(WHO, enough)
    kept = books.store.runs(WHO.on(MODEL))
    assert all(r.outcome == "completed" for r in kept)
    lesson = learn(kept)
    assert lesson and lesson.floor_bytes == 6 * GIB
