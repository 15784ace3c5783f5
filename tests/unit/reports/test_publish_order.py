"""Reports of one task run, whichever of its processes ends first."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.publish import ReportsInOrder
from tests.fakes.reports import task_report

REPORTS = [task_report(attempt=number) for number in range(1, 7)]


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_reports_are_handed_on_in_the_order_of_their_processes(
    order: list[int], none: set[int]
) -> None:
    handed_on: list[TaskReport] = []
    reports = ReportsInOrder(handed_on.append)
    takes = [reports.expect() for _ in REPORTS]
    came: set[int] = set()
    for number in order:
        takes[number](None if number in none else REPORTS[number])
        came.add(number)
        before_a_gap = next(n for n in range(7) if n not in came)
        assert handed_on == [REPORTS[n] for n in range(before_a_gap) if n not in none]


def test_a_report_is_handed_on_at_once_if_those_before_it_were() -> None:
    handed_on: list[TaskReport] = []
    reports = ReportsInOrder(handed_on.append)
    reports.expect()(REPORTS[0])
    second = reports.expect()
    assert handed_on == REPORTS[:1]
    second(REPORTS[1])
    assert handed_on == REPORTS[:2]


def test_reports_that_are_there_can_be_handed_on_without_the_missing_ones() -> None:
    handed_on: list[TaskReport] = []
    reports = ReportsInOrder(handed_on.append)
    takes = [reports.expect() for _ in REPORTS[:4]]
    takes[1](REPORTS[1])
    takes[3](REPORTS[3])
    assert not handed_on
    reports.wait_no_longer()
    assert handed_on == [REPORTS[1], REPORTS[3]]
    takes[2](REPORTS[2])
    takes[0](REPORTS[0])
    assert handed_on == [REPORTS[1], REPORTS[3], REPORTS[2], REPORTS[0]]


def test_an_error_while_handing_on_does_not_hold_up_the_next_report() -> None:
    handed_on: list[TaskReport] = []

    def take(report: TaskReport) -> None:
        if report.attempt == 1:
            raise OSError("full")
        handed_on.append(report)

    reports = ReportsInOrder(take)
    first, second = reports.expect(), reports.expect()
    with pytest.raises(OSError, match="full"):
        first(REPORTS[0])
    second(REPORTS[1])
    assert handed_on == [REPORTS[1]]


def test_reports_from_several_threads_are_handed_on_one_at_a_time() -> None:
    handed_on: list[TaskReport] = []
    inside = threading.Lock()

    def take(report: TaskReport) -> None:
        assert inside.acquire(blocking=False)
        handed_on.append(report)
        inside.release()

    reports = ReportsInOrder(take)
    expected = [task_report(attempt=number) for number in range(1, 41)]
    calls = [(reports.expect(), report) for report in expected]
    threads = [threading.Thread(target=t, args=(r,)) for t, r in reversed(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert handed_on == expected
