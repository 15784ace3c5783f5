"""A suspended process comes back only once the ledger says that it may."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.suspension import suspended
from prefect_gpu.suspension.eligibility import HOST_MARGIN_BYTES, Candidate
from prefect_gpu.suspension.suspended import Suspender
from prefect_gpu.units import GIB


class FakeCalls:
    def __init__(self) -> None:
        self.made: list[str] = []

    def unsupported(self) -> str:
        return ""

    def call(self, step: str, pid: int, *words: str, deadline_s: float) -> int:
        self.made.append(step)
        return 0


class FakeSubject:
    def __init__(self) -> None:
        self.may = False
        self.refused, self.away, self.runs = (threading.Event() for _ in range(3))

    def candidate(self) -> Candidate:
        return Candidate("nvml", ("GPU-1",), GIB, 1, ("torch",), GIB + HOST_MARGIN_BYTES)

    def comes_back(self) -> bool:
        if not self.may:
            self.refused.set()
        return self.may

    def tell(self, stage: str, text: str) -> None:
        if stage == "away":
            self.away.set()
        elif stage == "running":
            self.runs.set()

    def free_bytes(self) -> int:
        return 80 * GIB

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_it_is_not_restored_before_it_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended, "ROOM_S", 0.001)
    calls, subject = FakeCalls(), FakeSubject()
    as_any: Any = (subject, calls)
    suspender = Suspender(42, as_any[0], lambda: as_any[1])
    suspender.ask(True)
    assert subject.away.wait(DEADLOCK_S)
    suspender.ask(False)
    assert subject.refused.wait(DEADLOCK_S)
    assert "restore" not in calls.made
    subject.may = True
    assert subject.runs.wait(DEADLOCK_S)
    assert calls.made == ["lock", "checkpoint", "restore", "unlock"]
