"""What a task is given: by its tag, its history or a probe."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.policy import GPUPolicy
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.runner.budgets import BudgetBook, Grant
from prefect_gpu.scheduling.history import KEPT_RUNS, MOST_LOOKS, HistoryKey, PastRun, learn
from prefect_gpu.scheduling.model import ModelBudgets
from prefect_gpu.units import GIB, MIB
from tests.cases import cases
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


@pytest.mark.parametrize(
    ("fraction", "setting", "fills"), [(0.9, "1", True), (0.89, "1", False), (0.99, "0", False)]
)
def test_a_task_that_kept_its_gpu_busy_fills_one(
    books: Books, monkeypatch: pytest.MonkeyPatch, fraction: float, setting: str, fills: bool
) -> None:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_ONE_BUSY_TASK_PER_DEVICE", setting)
    books.book().take(WHO, task_report(outcome="completed", run_s=60.0, busy_fraction=fraction))
    assert books.grant().fills is fills
    assert books.grant(memory=6 * GIB).fills is fills


def test_a_task_without_a_history_probes_until_a_run_has_shown_its_need(books: Books) -> None:
    book = books.book()
    probe = books.grant(book)
    assert (probe.memory, probe.source, probe.probe_fraction) == (None, "probe", 1.0)
    assert probe.histories == {MODEL: WHO.on(MODEL)}
    assert book.take(WHO, task_report(outcome="failed")) == {}
    assert books.grant(book) == probe, "it has shown nothing"
    learned = book.take(WHO, task_report(outcome="completed", budget_bytes=139 * GIB))
    lesson = learn(books.recent.runs(WHO.on(MODEL)))
    assert lesson is not None and learned == {WHO.on(MODEL): lesson.budget_bytes}
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


def sized(value: float, **changes: Any) -> HistoryKey:
    """The identity of a call whose `batch` is a number."""
    line = ["batch", "0" * 12, value]
    known: dict[str, Any] = {"learn_by": f"batch-{value:g}", "learn_by_lines": json.dumps([line])}
    return HistoryKey("evaluate", "evaluate", **{**known, **changes})


def test_a_new_value_has_an_estimated_budget(books: Books) -> None:
    for value, live in ((16, 2), (32, 3)):
        books.store.add(sized(value).on(MODEL), run(live * GIB))
    granted = books.grant(identity=sized(64))
    lesson = learn([run(5 * GIB)])
    assert lesson is not None and granted.memory == pytest.approx(lesson.need_bytes, abs=4 * MIB)
    assert granted.estimated_from == {MODEL: "batch 16, 32"} and granted.source == "learned"
    assert not granted.histories and granted.probe_fraction == 0.0, "it is no first run"
    assert granted.whole_bytes == {MODEL: granted.memory} and granted.learned_runs == {MODEL: 0}
    # What it shows itself counts from then on.
    books.store.add(sized(64).on(MODEL), run(4 * GIB))
    again, known = books.grant(identity=sized(64)), learn([run(4 * GIB)])
    assert known is not None and again.memory == known.need_bytes
    assert again.estimated_from == {} and again.learned_runs == {MODEL: 1}


@cases(
    "others",
    {
        "one value": [sized(16)],
        "another task": [sized(16), replace(sized(32), task_name="train")],
        "another flow": [sized(16), replace(sized(32), flow_name="nightly")],
        "another of its other values": [
            sized(16),
            sized(32, learn_by_lines=json.dumps([["batch", "1" * 12, 32]])),
        ],
        "another parameter": [
            sized(16),
            sized(32, learn_by_lines='[["width", "000000000000", 32]]'),
        ],
        "no number": [sized(16), sized(32, learn_by_lines="")],
        "what another program has written": [sized(16), sized(32, learn_by_lines="[[1], {")],
    },
)
def test_too_little_is_known_for_an_estimate(books: Books, others: list[HistoryKey]) -> None:
    for other in others:
        books.store.add(other.on(MODEL), run())
    granted = books.grant(identity=sized(64))
    assert granted.source == "probe" and granted.histories == {MODEL: sized(64).on(MODEL)}


def test_runs_that_showed_nothing_are_no_values(books: Books) -> None:
    books.store.add(sized(16).on(MODEL), run())
    books.store.add(sized(32).on(MODEL), run(outcome="failed"))
    assert books.grant(identity=sized(64)).source == "probe"


def test_runs_on_another_model_count_where_too_few_are_of_its_own(books: Books) -> None:
    for value, live in ((16, 2), (32, 3)):
        books.store.add(sized(value).on("A"), run(live * GIB))
    books.store.add(sized(16).on("B"), run(3 * GIB))
    both = books.grant(identity=sized(64), models=BOTH)
    assert both.estimated_from == dict.fromkeys("AB", "batch 16, 32")
    assert isinstance(both.memory, ModelBudgets)
    of_a, of_b = (dict(both.memory.by_model)[name] for name in "AB")
    lesson = learn([run(5 * GIB)])
    assert lesson is not None and of_a == pytest.approx(lesson.need_bytes, abs=4 * MIB)
    # On B the smaller value needs as much as the larger one on A.
    lesson = learn([run(3 * GIB)])
    assert lesson is not None and of_b == pytest.approx(lesson.need_bytes, abs=4 * MIB)


def test_an_estimate_is_not_below_what_was_too_little_for_its_own_values(books: Books) -> None:
    for value in (16, 32):
        books.store.add(sized(value).on(MODEL), run(GIB))
    short = run(outcome="oom", cause="own_cap", budget_bytes=4 * GIB, cap_bytes=3 * GIB)
    books.store.add(sized(64).on(MODEL), short)
    assert books.grant(identity=sized(64)).memory == 6 * GIB


def test_an_estimate_above_any_device_is_a_device_to_itself(books: Books) -> None:
    for value in (16, 32):
        books.store.add(sized(value).on(MODEL), run(value * GIB))
    granted = books.grant(identity=sized(256))
    assert (granted.memory, granted.source, granted.probe_fraction) == (None, "learned", 0.0)


def test_those_that_can_be_estimated_now_are_told(books: Books) -> None:
    book, other = books.book(), replace(sized(64), task_name="train")
    for identity in (sized(16), sized(64), sized(128), sized(1024), other):
        assert books.grant(book, identity).source == "probe"

    def completes(identity: HistoryKey) -> set[HistoryKey]:
        report = task_report(outcome="completed", budget_bytes=139 * GIB)
        shown = book.take(identity, report)
        assert shown.pop(identity.on(MODEL))
        assert set(shown.values()) <= {None}
        return set(shown)

    assert completes(sized(16)) == set()
    # 1024 is too far off.
    assert completes(sized(32)) == {sized(64).on(MODEL), sized(128).on(MODEL)}
    assert completes(sized(8)) == set(), "each is told once"
    assert books.grant(book, sized(64)).estimated_from == {MODEL: "batch 8, 16, 32"}
    # What has asked meanwhile is told again.
    assert completes(sized(512)) == {sized(64).on(MODEL), sized(1024).on(MODEL)}


def test_only_the_nearest_values_are_read(books: Books) -> None:
    asked: list[HistoryKey] = []

    class Watched(MemoryHistory):
        def runs(self, key: HistoryKey) -> Any:
            asked.append(key)
            return super().runs(key)

    store = Watched()
    for value in range(1, 1000):
        store.add(sized(value).on(MODEL), run(outcome="failed"))
    assert books.grant(books.book(store), sized(50.5)).source == "probe"
    assert len(asked) == 1 + 2 * MOST_LOOKS


def test_histories_are_listed_once_for_all_threads(books: Books) -> None:
    listed: list[HistoryKey] = []

    class Watched(MemoryHistory):
        def siblings(self, key: HistoryKey) -> Any:
            listed.append(key)
            time.sleep(0.01)
            return super().siblings(key)

    book = books.book(Watched())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda value: books.grant(book, sized(value)), range(1, 40)))
    assert len(listed) == 1
    books.grant(book, replace(sized(1), task_name="train"))
    assert len(listed) == 2


def test_the_parameter_with_the_nearest_values_counts(books: Books) -> None:
    def of(a: float, b: float) -> HistoryKey:
        lines = [["a", f"b={b}", a], ["b", f"a={a}", b]]
        return sized(0, learn_by=f"{a} {b}", learn_by_lines=json.dumps(lines))

    for a, b in ((1, 8), (2, 8), (16, 7), (16, 9)):
        books.store.add(of(a, b).on(MODEL), run())
    assert books.grant(identity=of(16, 8)).estimated_from == {MODEL: "b 7, 9"}
    assert books.grant(identity=of(4, 8)).estimated_from == {MODEL: "a 1, 2"}


def test_a_task_that_keeps_to_its_budget_has_a_first_run(books: Books) -> None:
    for value in (16, 32):
        books.store.add(sized(value).on(MODEL), run())
    assert books.grant(identity=sized(64), oom="fail").source == "probe"
    assert books.grant(identity=sized(32), oom="fail").source == "learned"


def test_one_who_was_estimated_meanwhile_takes_no_notice_from_another(books: Books) -> None:
    book = books.book()
    first = books.grant(book, sized(64))
    books.recent.add(sized(16).on(MODEL), run())
    books.recent.add(sized(32).on(MODEL), run())
    other = books.book()
    assert books.grant(other, sized(64)).estimated_from
    shown = book.take(sized(8), task_report(outcome="completed", budget_bytes=139 * GIB))
    assert first.histories[MODEL] not in shown, "this book knows one value"
    shown = book.take(sized(16), task_report(outcome="completed", budget_bytes=139 * GIB))
    assert shown[first.histories[MODEL]] is None


def test_a_run_concerns_only_the_nearest_of_many_that_wait(books: Books) -> None:
    book = books.book()
    for value in range(1, 400):
        books.grant(book, sized(value))
    report = task_report(outcome="completed", budget_bytes=139 * GIB)
    book.take(sized(100), report)
    shown = book.take(sized(200), report)
    assert shown.keys() == {sized(value).on(MODEL) for value in range(192, 209)}


def test_a_list_of_histories_that_cannot_be_read_is_logged_once(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    class Unlisted(MemoryHistory):
        def siblings(self, key: Any) -> Any:
            raise OSError("no route to host")

    book = books.book(Unlisted())
    assert books.grant(book, sized(1)).source == books.grant(book, sized(2)).source == "probe"
    assert caplog.text.count("no route to host") == 1
