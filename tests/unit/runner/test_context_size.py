"""Contexts: measured once in a child, within a task's own reservation; else a documented figure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.frameworks.adapter import AllocationMode, FrameworkPolicy
from prefect_gpu.frameworks.context import (
    COLLECTIVES_BYTES,
    FALLBACK_CONTEXT_BYTES,
    ContextStore,
    context_key,
)
from prefect_gpu.frameworks.registry import ADAPTERS
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    Listener,
    ValueArrived,
)
from prefect_gpu.processes.messages import Asked, BodyEnded
from prefect_gpu.runner import context_size as contexts
from prefect_gpu.runner.context_size import ContextMeter
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.units import GIB, MIB
from tests.cases import cases
from tests.unit.scheduling.values import device, request

POLICY = FrameworkPolicy("nvml", ("GPU-0",), (24 * GIB,), (6 * GIB,), allocation="limit")


class Child:
    """A calibration child that says what a test wants it to, and ends when it is killed."""

    def __init__(self, says: list[Any], hear: Listener) -> None:
        self.hear = hear
        self.ended = any(isinstance(m, (ChildExited, ChildRefused)) for m in says)
        for message in says:
            hear(message)

    def answer(self, message: Any) -> None:
        raise AssertionError(f"nothing is to be answered, and {message!r} was")

    def kill(self) -> None:
        if not self.ended:
            self.ended = True
            self.hear(ChildExited(-9, ""))


class Launcher:
    def __init__(self, *says: Any) -> None:
        self.says = list(says)
        self.started: list[LaunchSpec] = []

    def start(self, spec: LaunchSpec, listener: Listener) -> Child:
        self.started.append(spec)
        return Child(self.says, listener)


class Broker:
    """Shows so many bytes at every reading, while it is asked for readings."""

    def __init__(self, ticket: Ticket, shows: int) -> None:
        self.ticket = ticket
        self.shows = shows

    def attach(self, ticket: Ticket, pid: int) -> None:
        ticket.pid = pid

    def refresh(self) -> None:
        def read() -> None:
            told: Callable[[float, tuple[Measured, ...]], None] | None = self.ticket.on_measured
            assert told is not None
            told(float("inf"), (Measured(self.shows),))

        threading.Thread(target=read).start()


def said(reserved_bytes: int) -> list[Any]:
    return [ChildStarted(77), Asked("calibrated", {"reserved_bytes": reserved_bytes})]


def raised(error: Exception) -> list[Any]:
    data = values.dump_exception(error)
    return [ChildStarted(77), BodyEnded(raised=True), ValueArrived(data.open())]


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "contexts.json")


def placed() -> Ticket:
    return Ticket(request(), placement=Placement("1", (device(),), (6 * GIB,)))


def measure(store: ContextStore, launcher: Launcher, shows: int = GIB) -> tuple[int, Ticket]:
    ticket = placed()
    meter = ContextMeter(store, launcher)
    found = meter.contexts(("torch",), None, POLICY, Broker(ticket, shows), ticket)  # type: ignore[arg-type]
    return found["torch"], ticket


def test_a_context_is_what_the_device_shows_above_the_allocator_and_is_kept(
    store: ContextStore,
) -> None:
    launcher = Launcher(*said(300 * MIB))
    size, ticket = measure(store, launcher)
    assert size == GIB - 300 * MIB
    assert ticket.pid is None and ticket.on_measured is None
    (spec,) = launcher.started
    assert spec.prepare.policy.allocation == "growth"
    again = Launcher()
    assert measure(ContextStore(store.path), again)[0] == size
    assert again.started == []


def test_other_frameworks_get_the_figure_that_is_documented(store: ContextStore) -> None:
    known = ContextMeter(store, Launcher()).known(device())
    assert known["tensorflow"] == FALLBACK_CONTEXT_BYTES["tensorflow"]


def test_a_cap_on_several_devices_leaves_space_for_nccl_until_a_run_has_shown_what_it_takes(
    store: ContextStore,
) -> None:
    store.put(context_key("torch", device()), 700 * MIB)
    two = replace(POLICY, budget_bytes=(6 * GIB, 6 * GIB))
    ticket = placed()
    ticket.placement = Placement("1", (device(), device(1)), two.budget_bytes)
    meter = ContextMeter(store, Launcher())

    def size(learned_bytes: int | None) -> int:
        broker: Any = Broker(ticket, GIB)
        return meter.contexts(("torch",), learned_bytes, two, broker, ticket)["torch"]

    assert size(None) == 700 * MIB + COLLECTIVES_BYTES
    assert size(800 * MIB) == 800 * MIB


@cases(
    "says, reason",
    {
        "it cannot be started": ([ChildRefused(OSError("no memory"))], "no memory"),
        "it dies": ([ChildStarted(77), ChildExited(-11, "boom")], "it ended with -11: boom"),
        "it raises": (raised(ValueError("no GPU")), "no GPU"),
    },
)
def test_what_cannot_be_measured_is_assumed_and_said(
    store: ContextStore, caplog: pytest.LogCaptureFixture, says: list[Any], reason: str
) -> None:
    size, ticket = measure(store, Launcher(*says))
    assert size == FALLBACK_CONTEXT_BYTES["torch"]
    assert ticket.pid is None
    assert reason in caplog.text
    assert not store.path.exists()


def test_a_calibration_that_took_too_long_is_not_repeated(
    store: ContextStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "READING_S", 0.05)
    ticket, launcher = placed(), Launcher(*said(300 * MIB))
    meter, broker = ContextMeter(store, launcher), Broker(ticket, 0)
    for _ in range(2):
        found = meter.contexts(("torch",), None, POLICY, broker, ticket)  # type: ignore[arg-type]
        assert found["torch"] == FALLBACK_CONTEXT_BYTES["torch"]
    assert len(launcher.started) == len(caplog.records) == 1


def test_a_task_run_that_is_cancelled_does_not_wait_for_anothers_calibration(
    store: ContextStore,
) -> None:
    ticket, launcher = placed(), Launcher()
    meter, key = ContextMeter(store, launcher), context_key("torch", device())
    with meter._locks.setdefault(key, threading.Lock()):
        broker: Any = Broker(ticket, GIB)
        found = meter.contexts(("torch",), None, POLICY, broker, ticket, lambda: True)
    assert found["torch"] == FALLBACK_CONTEXT_BYTES["torch"] and not launcher.started


@pytest.mark.parametrize("at_once", [True, False])
def test_a_task_run_that_is_cancelled_waits_for_no_calibration(
    store: ContextStore, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    ticket, launcher = placed(), Launcher(ChildStarted(77))
    answers = iter([at_once])
    found = ContextMeter(store, launcher).contexts(
        ("torch",),
        None,
        POLICY,
        Broker(ticket, GIB),  # type: ignore[arg-type]
        ticket,
        lambda: next(answers, True),
    )
    assert found["torch"] == FALLBACK_CONTEXT_BYTES["torch"]
    assert len(launcher.started) == (not at_once) and not caplog.records
    assert ticket.pid is None and ticket.on_measured is None


def test_no_reading_after_a_calibration_is_taken_for_the_tasks(store: ContextStore) -> None:
    ticket, told = placed(), list[int | None]()

    class Lingering(Launcher):
        """A launcher whose child is read once more when it is killed."""

        def start(self, spec: LaunchSpec, listener: Listener) -> Child:
            child = super().start(spec, listener)
            kill = child.kill

            def read_and_kill() -> None:
                assert ticket.on_measured is not None
                ticket.on_measured(0.0, (Measured(GIB),))
                kill()

            child.kill = read_and_kill  # type: ignore[method-assign]
            return child

    ticket.on_measured = lambda at_s, found: told.append(ticket.pid)
    meter = ContextMeter(store, Lingering(*said(300 * MIB)))
    meter.contexts(("torch",), None, POLICY, Broker(ticket, GIB), ticket)  # type: ignore[arg-type]
    assert told == [] and ticket.on_measured is not None


def test_a_device_that_shows_nothing_of_processes_is_not_waited_for_for_ever(
    store: ContextStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "READING_S", 0.05)
    size, _ = measure(store, Launcher(*said(300 * MIB)), shows=0)
    assert size == FALLBACK_CONTEXT_BYTES["torch"]
    assert "shows no memory" in caplog.text


def test_a_child_that_says_nothing_is_killed(
    store: ContextStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "CALIBRATION_S", 0.05)
    size, _ = measure(store, Launcher(ChildStarted(77)))
    assert size == FALLBACK_CONTEXT_BYTES["torch"]
    assert "longer than 0.05s" in caplog.text


@pytest.mark.parametrize(
    ("allocation", "learned_bytes", "frameworks", "expected", "measured"),
    [
        ("growth", None, ("torch",), {}, False),
        ("limit", 900 * MIB, ("torch",), {"torch": 900 * MIB}, False),
        ("limit", 900 * MIB, (), dict.fromkeys(("torch", "jax"), 900 * MIB), False),
        ("limit", None, ("torch",), {"torch": GIB - 300 * MIB}, True),
    ],
    ids=[
        "nothing is measured where no cap depends on it",
        "what its own runs had is closer than a calibration",
        "whichever framework it is",
        "else it is measured",
    ],
)
def test_a_tasks_contexts_come_from_the_best_source(
    store: ContextStore,
    allocation: AllocationMode,
    learned_bytes: int | None,
    frameworks: tuple[str, ...],
    expected: dict[str, int],
    measured: bool,
) -> None:
    ticket, launcher = placed(), Launcher(*said(300 * MIB))
    broker = Broker(ticket, GIB)
    policy = replace(POLICY, allocation=allocation)
    found = ContextMeter(store, launcher).contexts(
        frameworks,
        learned_bytes,
        policy,
        broker,  # type: ignore[arg-type]
        ticket,
    )
    assert {name: found[name] for name in expected} == expected
    known = {name: FALLBACK_CONTEXT_BYTES[name] for name in ADAPTERS}
    if not learned_bytes and not measured:
        assert found == known
    assert bool(launcher.started) is measured
