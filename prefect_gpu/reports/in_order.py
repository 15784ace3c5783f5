"""The reports of one task run, handed on in the order in which its processes began.

A retry begins once the body before it is over, while that one's process still ends and its memory is
waited for: reports come in any order. Prefect shows artifacts by their age, and the newest one for all
of the same key. Bringing them to its API is `publish`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from prefect_gpu.reports.model import TaskReport


class ReportsInOrder:
    """Holds a report back until those before it are there. Safe to use from any thread.

    Args:
        hand_on: Given each report, one at a time. It must not use this object.
    """

    def __init__(self, hand_on: Callable[[TaskReport], None]) -> None:
        self._hand_on = hand_on
        self._lock = threading.Lock()
        #: In the order of their processes.
        self._expected: list[_Expected] = []
        self._patient = True

    def expect(self) -> Callable[[TaskReport | None], None]:
        """Say that a process begins.

        Returns:
            To be called once, with its report; `None`: there is none.
        """
        expected = _Expected()
        with self._lock:
            self._expected.append(expected)
        return lambda report: self._take(expected, report)

    def wait_no_longer(self) -> None:
        """Hand on what there is, and from now on whatever comes, at once."""
        with self._lock:
            self._patient = False
            self._go_on()

    def _take(self, expected: _Expected, report: TaskReport | None) -> None:
        with self._lock:
            expected.report, expected.came = report, True
            self._go_on()

    def _go_on(self) -> None:
        while ready := [each for each in self._expected if each.came or self._patient]:
            first = ready[0]
            if not first.came:
                return
            self._expected.remove(first)
            if first.report is not None:
                self._hand_on(first.report)


@dataclass(slots=True, eq=False)
class _Expected:
    """A process whose report is not handed on yet."""

    report: TaskReport | None = None
    came: bool = False
