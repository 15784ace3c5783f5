"""One call of a task's body: process after process, until one answers or more would not help.

Almost always it is one process. After an out-of-memory it asks `scheduling.ladder` whose fault it was
and what the next process gets; these do not use up Prefect's retries. One process is `attempt`, what it
is given at first is `budgets`.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from prefect_gpu.attempt import Attempt, CancelledByRunner
from prefect_gpu.broker import Broker
from prefect_gpu.budgets import BudgetBook, Grant, TaskIdentity
from prefect_gpu.errors import PlacementError, PlacementTimeoutError
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.reports.in_order import ReportsInOrder
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.scheduling.ladder import (
    Climb,
    Evidence,
    Rung,
    classify,
    needed_bytes,
    next_rung,
)
from prefect_gpu.scheduling.model import Placement

#: Characters of an error's text that a log line repeats.
LONGEST_LINE = 160


class Escalation:
    """One call of a body.

    Args:
        identity: Whose history it uses.
        policy: What the task's tags ask for.
        climb: How far earlier calls of the same task run have climbed.
        broker: Of the runner's devices.
        book: Gives budgets.
        make: Makes the process of a grant; it calls the functions given with its placement and with
            its report.
        on_waiting: Told what the task waits for.
        tell: Logs a warning on the task run.
        reports: Takes the report of each process, from any thread.
    """

    def __init__(
        self,
        identity: TaskIdentity,
        policy: GPUPolicy,
        climb: Climb,
        broker: Broker,
        book: BudgetBook,
        make: Callable[
            [Grant, Callable[[Placement], None], Callable[[TaskReport | None], None]], Attempt
        ],
        on_waiting: Callable[[str], None],
        tell: Callable[[str], None],
        reports: ReportsInOrder,
    ) -> None:
        self._identity = identity
        self._policy = policy
        #: How far it has climbed.
        self.climb = climb
        self._broker = broker
        self._book = book
        self._make = make
        self._on_waiting = on_waiting
        self._tell = tell
        #: Of this call's task run.
        self.reports = reports
        self._lock = threading.Lock()
        self._cancelled = False
        #: In order; at most `ladder.MOST_PROCESSES`.
        self._attempts: list[Attempt] = []
        self._over = threading.Event()

    def cancel(self) -> None:
        """End it, wherever it is. From any thread; `run` then raises `CancelledByRunner`."""
        with self._lock:
            self._cancelled = True
            attempts = tuple(self._attempts)
        self._book.wake()
        for attempt in attempts:
            # Those before the last may linger at their exit.
            attempt.cancel()

    @property
    def finished(self) -> bool:
        """Whether nothing of its processes is left and their reports were handed on."""
        return self._over.is_set() and all(a.finished.is_set() for a in self._attempts)

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until `finished`; `False`: it was not in time."""
        deadline = time.monotonic() + timeout_s
        events = (self._over, *(attempt.finished for attempt in self._attempts))
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)

    def run(self) -> object:
        """Run the body until a process answers.

        Returns:
            What the body returned.

        Raises:
            CancelledByRunner: `cancel` was called.
            BaseException: What `Attempt.run` raises for the last process.
        """
        try:
            return self._climb_up()
        finally:
            self._over.set()

    def _climb_up(self) -> object:
        grant = self._first_grant()
        shortage: Exception | None = None
        while True:
            filing = _Filing(self._file, self.reports.expect(), self._book, grant)
            attempt: Attempt | None = None
            go_on = False
            try:
                attempt = self._make(grant, filing.take_placement, filing.take_report)
                self._begin(attempt)
                return attempt.run()
            except PlacementTimeoutError:
                raise
            except PlacementError as error:
                if shortage is None:
                    raise
                # What ran out is what went wrong; that there is no more is why it ends.
                _add_note(shortage, f"prefect_gpu: {error}")
                raise shortage from None
            except Exception as error:
                rung = None if attempt is None else self._next(attempt, filing, error)
                if rung is None:
                    raise
                self._tell(f"{_first_line(error)}: {rung.reason}")
                shortage, go_on = error, True
            finally:
                # The grant goes on to the next process, if there is one.
                reported = attempt is not None and attempt.has_process
                filing.close(release=not go_on, reported=reported)
            grant = replace(filing.grant, memory=rung.budget_bytes, waited_s=0.0)
            self.climb = rung.climb

    def _begin(self, attempt: Attempt) -> None:
        with self._lock:
            cancelled = self._cancelled
            self._attempts.append(attempt)
        if cancelled:
            attempt.cancel()

    def _first_grant(self) -> Grant:
        policy, broker = self._policy, self._broker
        devices = broker.eligible(policy.devices)
        grant = self._book.grant(
            self._identity,
            policy.memory,
            [device.name for device in devices],
            count=policy.count,
            capacity_bytes=broker.model_capacities(policy.devices),
            limit_s=policy.wait_s,
            on_waiting=self._on_waiting,
            cancelled=lambda: self._cancelled,
        )
        if grant is None:
            raise CancelledByRunner
        if self.climb.whole_device:
            return replace(grant, memory=None)
        if isinstance(grant.memory, int) and grant.memory < self.climb.reached_bytes:
            # An earlier call has found out that it needs more.
            return replace(grant, memory=self.climb.reached_bytes)
        return grant

    def _next(self, attempt: Attempt, filing: _Filing, error: Exception) -> Rung | None:
        """Say what comes after a process that failed; `None`: nothing, the error stands."""
        evidence = self._evidence(attempt)
        if evidence is None:
            return None
        cause = classify(evidence)
        filing.take_cause(cause, needed_bytes(evidence))
        if self._policy.oom == "fail":
            return None
        whole = replace(self.climb, whole_device=attempt.whole_device)
        capacity = self._broker.capacity_bytes(self._policy.devices, self._policy.count)
        rung = next_rung(whole, cause, evidence, capacity)
        if isinstance(rung, Rung):
            return rung
        _add_note(error, f"prefect_gpu: {rung}")
        return None

    def _evidence(self, attempt: Attempt) -> Evidence | None:
        seen = attempt.out_of_memory
        ticket = attempt.ticket
        if seen is None or ticket is None or ticket.placement is None:
            return None
        placement = ticket.placement
        return Evidence(
            budget_bytes=min(placement.budget_bytes),
            cap_bytes=attempt.cap_bytes,
            context_bytes=attempt.context_bytes,
            wanted_bytes=seen.wanted_bytes,
            held_bytes=seen.held_bytes,
            process_bytes=seen.process_bytes,
            free_bytes=seen.free_bytes,
            foreign_growth_bytes=self._broker.foreign_growth_bytes(ticket),
            says_own_cap=seen.says_own_cap,
            alone=any(r.exclusive for r in placement.reservations),
        )

    def _file(self, report: TaskReport | None, grant: Grant, release: bool) -> None:
        """Take in what became of a process."""
        try:
            if report is not None:
                self._book.take(self._identity, report)
        finally:
            if release:
                self._book.release(grant)


class _Filing:
    """Brings together the report of a process and what its out-of-memory is put down to.

    Either may come first: the report comes when the device shows the memory back, on another thread.
    """

    def __init__(
        self,
        file: Callable[[TaskReport | None, Grant, bool], None],
        on_report: Callable[[TaskReport | None], None],
        book: BudgetBook,
        grant: Grant,
    ) -> None:
        self._file = file
        self._on_report = on_report
        self._book = book
        #: What the process was given.
        self.grant = grant
        self._lock = threading.Lock()
        self._report: TaskReport | None = None
        self._arrived = False
        self._cause = ""
        self._wanted_bytes: int | None = None
        self._closed = False
        self._release = False

    def take_placement(self, placement: Placement) -> None:
        """Say where it was placed: it tells nothing of other models."""
        self.grant = self._book.keep(self.grant, placement.devices[0].name)

    def take_cause(self, cause: str, wanted_bytes: int | None) -> None:
        """Say what it is put down to."""
        self._cause, self._wanted_bytes = cause, wanted_bytes

    def take_report(self, report: TaskReport | None) -> None:
        """Take the report of the process; `None`: none could be made."""
        with self._lock:
            self._report, self._arrived = report, True
            closed = self._closed
        if closed:
            self._hand_on()

    def close(self, release: bool, reported: bool) -> None:
        """Say that nothing more will be known.

        Args:
            release: The grant ends with this process.
            reported: A report comes, or has come.
        """
        with self._lock:
            self._closed, self._release = True, release
            ready = self._arrived or not reported
        if ready:
            self._hand_on()

    def _hand_on(self) -> None:
        report = self._report
        if report is not None and self._cause:
            report = replace(report, cause=self._cause, wanted_bytes=self._wanted_bytes)
        try:
            self._file(report, self.grant, self._release)
        finally:
            self._on_report(report)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    # PyTorch goes on for six sentences, the first of which says it.
    short = textwrap.shorten(text, LONGEST_LINE, placeholder=" …")
    return f"{type(error).__name__}: {short}" if text else type(error).__name__


def _add_note(error: Exception, note: str) -> None:
    """Add a line to what is shown of an error; Python 3.10 keeps it without showing it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
