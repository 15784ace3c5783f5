"""What a task is given: by its tag, its history or a probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.policy import GPUPolicy
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.runner.budgets import BudgetBook, Grant
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, PastRun, learn
from prefect_gpu.scheduling.model import ModelBudgets
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
        self.recent, self.store = MemoryHistory(), MemoryHistory()

    def book(self, store: Any = None) -> BudgetBook:
        return BudgetBook(store or self.store, self.recent)

    def grant(
        self,
        book: BudgetBook | None = None,
        identity: HistoryKey = WHO,
        models: Mapping[str, int] = MappingProxyType({MODEL: 100 * GIB}),
        **asks: Any,
    ) -> Grant:
        """Ask for a grant on one device of each model; `asks` are fields of the policy."""
        plan = SimpleNamespace(policy=GPUPolicy(**asks), probe_fraction=1.0, alone_because=None)
        call: Any = SimpleNamespace(plan=plan, identity=identity)
        capacities = {replace(device(), name=name): size for name, size in models.items()}
        return (book or self.book()).grant(call, capacities)


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_tag_is_a_budget_and_the_history_corrects_its_context(books: Books) -> None:
    assert books.grant(memory=6 * GIB) == Grant(6 * GIB, "tag", {})
    books.store.add(WHO.on(MODEL), run())
    assert books.grant(memory=0.4) == Grant(0.4, "tag", {MODEL: 600 * MIB})


def test_a_task_without_a_history_probes_until_a_run_has_shown_its_need(books: Books) -> None:
    book = books.book()
    probe = books.grant(book)
    assert (probe.memory, probe.source, probe.probe_fraction) == (None, "probe", 1.0)
    assert probe.histories == {MODEL: WHO.on(MODEL)}
    assert book.take(WHO, task_report(outcome="failed")) is None
    assert books.grant(book) == probe, "it has shown nothing"
    learned = book.take(WHO, task_report(outcome="completed", budget_bytes=139 * GIB))
    lesson = learn(books.recent.runs(WHO.on(MODEL)))
    assert lesson is not None and learned == (WHO.on(MODEL), lesson.budget_bytes)
    granted = books.grant(book)
    assert (granted.memory, granted.source) == (lesson.budget_bytes, "learned")
    assert granted.contexts == {MODEL: lesson.context_bytes}
    assert not granted.histories and granted.probe_fraction == 0.0


def test_histories_are_of_a_task_in_a_flow_with_its_values(books: Books) -> None:
    books.book().take(WHO, task_report(outcome="completed", budget_bytes=139 * GIB))
    assert books.grant().source == "learned"
    in_a_flow = HistoryKey("evaluate", "evaluate", flow_name="nightly")
    apart = HistoryKey("evaluate", "evaluate", learn_by="ab12")
    for other in (in_a_flow, HistoryKey("train", "train"), apart):
        assert books.grant(identity=other).source == "probe"


def test_a_budget_above_any_device_is_a_device_to_itself(books: Books) -> None:
    books.store.add(WHO.on(MODEL), run(live=90 * GIB))
    granted = books.grant()
    assert (granted.memory, granted.source) == (None, "learned")


def test_of_two_models_one_is_known(books: Books) -> None:
    books.store.add(WHO.on("A"), run())
    granted = books.grant(models=BOTH)
    lesson = learn([run()])
    assert lesson is not None
    assert granted.memory == ModelBudgets((("A", lesson.budget_bytes),))
    assert (granted.source, granted.histories) == ("learned", {"B": WHO.on("B")})
    assert granted.probe_fraction == 1.0
    assert books.grant(models={"C": GIB, "D": GIB}).memory is None


class Unreachable(MemoryHistory):
    def runs(self, key: Any) -> Any:
        raise OSError("no route to host")


def test_unreadable_histories_are_logged_once_and_the_task_probes(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    book = books.book(Unreachable())
    first = books.grant(book)
    assert first.source == "probe" and books.grant(book) == first
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
    one.take(WHO, task_report(outcome="completed", budget_bytes=139 * GIB))
    granted = books.grant(other)
    assert granted.source == "learned"


def test_a_budget_that_its_own_model_cannot_hold_is_a_whole_device_there(books: Books) -> None:
    books.store.add(WHO.on("A"), run(live=20 * GIB, budget_bytes=23 * GIB))
    granted = books.grant(models={"A": 21 * GIB})
    assert granted.memory is None


def test_no_more_is_waited_for_than_a_device_had_left_beside_others(books: Books) -> None:
    books.store.add(WHO.on(MODEL), run(live=17 * GIB, budget_bytes=22 * GIB))
    granted = books.grant(models={MODEL: 23 * GIB})
    assert (granted.memory, granted.source) == (None, "learned")


@pytest.mark.parametrize("memory", [None, GIB])
def test_a_placement_has_the_expected_duration_of_its_task(
    books: Books, memory: int | None
) -> None:
    for seconds in (4.0, 8.0, 9.0):
        books.store.add(WHO.on("A"), run(at=seconds, run_s=seconds, start_s=1.0))
    books.store.add(WHO.on("B"), run(run_s=3.0))
    granted = books.grant(memory=memory, models=BOTH)
    assert granted.expected_s == 9.0, "on the slower of two models"


def test_of_a_task_that_never_completed_nothing_is_expected(books: Books) -> None:
    granted = books.grant(memory=GIB)
    assert granted.expected_s is None


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
