"""One process of a task run: how it ends, what is raised, and what its report says."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from prefect_gpu import values
from prefect_gpu.broker import suspendable
from prefect_gpu.broker.ticket import BY_HAND, Measured, Ticket
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.engine.task_engine import CancelledByRunner
from prefect_gpu.errors import (
    BudgetExceededError,
    ChildDiedError,
    ChildTimeoutError,
    PlacementTimeoutError,
    ProtocolError,
    ResultError,
)
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    Listener,
    ValueArrived,
)
from prefect_gpu.processes.messages import (
    Asked,
    BodyEnded,
    BodyStarted,
    ContextChanges,
    ReleasedUnused,
    ReleaseUnused,
)
from prefect_gpu.reports.events import LEAKED, PLACED, GPUEvent
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.runner import attempt
from prefect_gpu.runner.attempt import Attempt
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.engine_threads import SubmitOrder
from prefect_gpu.runner.process_run import Done
from prefect_gpu.runner.task_plan import TaskCall, TaskPlan
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.suspension.moves import ProcessLostError
from prefect_gpu.suspension.suspended import lost_tasks
from prefect_gpu.units import GIB
from prefect_gpu.values import argument_files
from tests.cases import cases

PID = 77


def body() -> int:
    return 1


def ended(value: Any, **said: Any) -> list[Any]:
    """Messages of a body that ended with a value, or raised it."""
    raised = isinstance(value, BaseException)
    what = "exception" if raised else "return value"
    return [BodyEnded(raised, **said), ValueArrived(values.dumps(value, what, "result").open())]


class FakeRun:
    """The engine's side of a task run."""

    def __init__(self) -> None:
        self.task_run = SimpleNamespace(id=UUID(int=1), name="task-0", flow_run_id=None)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.events: list[GPUEvent] = []
        self.on_running: Callable[[], None] = lambda: None

    def show_awaiting(self, reason: Reason) -> None:
        pass

    def show_placed(self, text: str) -> None:
        self.lines.append(text)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def advise_no_cache(self, size_bytes: int) -> None:
        pass

    def say_ended(self, text: str) -> None:
        self.lines.append(text)

    def emit(self, event: GPUEvent) -> None:
        self.events.append(event)

    def show_running(self) -> None:
        self.on_running()

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def context_for_child(self) -> tuple[dict[str, Any], bool]:
        return {}, False

    def environment_for_child(self) -> dict[str, str | None]:
        return {}


class FakeBroker:
    """Places every request at once; the memory of a process is back as soon as it ends."""

    kind = "simulated"
    processes = 1

    def __init__(self) -> None:
        self.reader = SimulatedReader(SimulatedDevices("1x24GiB"))
        self.ticket: Ticket
        self.waits: Callable[[], None] = lambda: None

    def submit(self, request: Request) -> Ticket:
        self.ticket = Ticket(replace(request, id="1"))
        return self.ticket

    def wait(self, ticket: Ticket, *limits: Any, waited_s: float) -> Placement:
        self.waits()
        ticket.placement = Placement("1", self.reader.devices(), (6 * GIB,))
        return ticket.placement

    def attach(self, ticket: Ticket, pid: int) -> None:
        ticket.pid = pid

    def mark_running(self, ticket: Ticket) -> None:
        pass

    def neighbours(self, ticket: Ticket) -> tuple[str, ...]:
        return ()

    def end(self, ticket: Ticket) -> None:
        assert ticket.on_recovered is not None
        ticket.on_recovered(0)

    def refresh(self) -> None:
        pass

    def withdraw(self, ticket: Ticket) -> bool:
        return False

    def foreign_growth_bytes(self, ticket: Ticket) -> int:
        return 0


class FakeChild:
    """A process that says what a test wants, and when it is killed says that it ended."""

    def __init__(self, says: list[Any], when_killed: list[Any]) -> None:
        self._says, self._when_killed = says, when_killed
        self.answers: list[Any] = []

    def start(self, spec: Any, listener: Listener) -> FakeChild:
        self._listener = listener
        for message in self._says:
            listener(message)
        return self

    def answer(self, message: Any) -> None:
        self.answers.append(message)

    def terminate(self) -> None:
        raise AssertionError("nothing terminates it")

    def kill(self) -> None:
        for message in (*self._when_killed, ChildExited(-9, "")):
            self._listener(message)


class Scene:
    """One attempt, whose process says what it is told to."""

    def __init__(
        self,
        *says: Any,
        when_killed: tuple[Any, ...] = (),
        timeout_s: float | None = None,
        **asks: Any,
    ) -> None:
        self.run = FakeRun()
        self.broker = FakeBroker()
        self.child = FakeChild([ChildStarted(PID), BodyStarted(), *says], list(when_killed))
        self.reports: list[TaskReport | None] = []
        policy = GPUPolicy(memory=6 * GIB, **asks)
        plan = TaskPlan("task", "task-1a", body, policy, (), (), (), timeout_s, 0)
        with argument_files().share() as share:
            call = TaskCall(
                plan, self.run, HistoryKey("task", "body"), (), {}, share, SubmitOrder().add(0)
            )  # type: ignore[arg-type]
            self.attempt = Attempt(call, Grant(6 * GIB, "tag"), 1, self.broker, self.child)  # type: ignore[arg-type]

    def go(self) -> Any:
        """Run the attempt as the engine's thread does."""
        try:
            self.attempt.place()
            ended = self.attempt.run()
            if isinstance(ended, Done):
                return ended.value
            raise ended.error
        finally:
            self.attempt.close(self.reports.append)

    @property
    def report(self) -> TaskReport:
        (report,) = self.reports
        assert report is not None and self.attempt.finished.is_set()
        return report


def test_a_body_that_returns_is_completed() -> None:
    scene = Scene(*ended(7), ChildExited(0, ""))
    assert scene.go() == 7
    assert (scene.report.outcome, scene.report.error, scene.report.pid) == ("completed", "", PID)
    assert [line.partition(":")[0] for line in scene.run.lines] == [
        "Placed on device 0 with a budget of 6GiB (from its tag gpu",
        "Completed",
    ]


def test_a_process_emits_its_placement_and_what_it_leaves_behind() -> None:
    scene = Scene(*ended(7), ChildExited(0, ""))
    scene.broker.end = lambda ticket: ticket.on_recovered(GIB)  # type: ignore[method-assign, misc]
    scene.go()
    assert [event.name for event in scene.run.events] == [PLACED, LEAKED]
    assert scene.run.events[1].payload["leaked_bytes"] == GIB


@cases(
    "shortage, outcome",
    {
        "an error": (None, "failed"),
        "out of memory": (OutOfMemory("torch"), "oom"),
    },
)
def test_a_body_that_raises_is_reported_with_the_last_line_of_its_traceback(
    shortage: OutOfMemory | None, outcome: str
) -> None:
    said = {"traceback": "...\nValueError: no", "out_of_memory": shortage}
    scene = Scene(*ended(ValueError("no"), **said), ChildExited(0, ""))
    with pytest.raises(ValueError, match="no"):
        scene.go()
    assert (scene.report.outcome, scene.report.error) == (outcome, "ValueError: no")


def test_changes_of_a_body_are_applied_once_its_value_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[ContextChanges] = []
    monkeypatch.setattr(attempt, "apply_changes", applied.append)
    changes = ContextChanges(({"id": 1},), (), (), {})
    packed = values.dumps(changes, "transaction", "transaction")
    scene = Scene(*ended(7, changes=packed), ChildExited(0, ""))
    assert scene.go() == 7 and applied == [changes]
    scene = Scene(BodyEnded(False, changes=packed), ChildExited(-9, ""))
    with pytest.raises(ChildDiedError):
        scene.go()
    assert applied == [changes], "its value did not come"


def test_a_body_that_raises_system_exit_is_the_death_of_its_process() -> None:
    scene = Scene(*ended(SystemExit(3), traceback="...\nSystemExit: 3"), ChildExited(3, ""))
    with pytest.raises(ChildDiedError, match="was ended by SystemExit: 3"):
        scene.go()
    assert (scene.report.outcome, scene.report.error) == ("died", "SystemExit: 3")


def test_a_value_that_cannot_be_read_fails_though_the_process_is_gone_before_it_is_opened() -> None:
    garbage = values.dumps(b"no pickle", "return value", "result").open()
    garbage = memoryview(b"garbage") if isinstance(garbage, memoryview) else b"garbage"
    scene = Scene(BodyEnded(False), ValueArrived(garbage), ChildExited(0, ""))
    with pytest.raises(ResultError):
        scene.go()
    assert scene.report.outcome == "failed"


def test_a_process_that_dies_sending_its_value_has_died() -> None:
    scene = Scene(BodyEnded(False), ChildExited(-11, "", truncated=True))
    with pytest.raises(ChildDiedError, match="was killed by SIGSEGV; it died while sending"):
        scene.go()
    assert (scene.report.outcome, scene.report.error) == (
        "died",
        "the process was killed by SIGSEGV",
    )


def test_the_report_of_a_process_that_crashed_names_the_users_line() -> None:
    said = 'Current thread 0x1 (most recent call first):\n  File "/home/ada/train.py", line 12 in fit\n'
    scene = Scene(ChildExited(-11, said))
    with pytest.raises(ChildDiedError):
        scene.go()
    assert scene.report.error == (
        "the process was killed by SIGSEGV; it crashed in native code that fit (/home/ada/train.py:12) called"
    )


def test_a_sigkill_from_outside_has_an_unknown_cause() -> None:
    scene = Scene(ChildExited(-9, "last words"))
    with pytest.raises(ChildDiedError, match="cause unknown") as caught:
        scene.go()
    assert caught.value.stderr_tail == "last words"
    assert "\n" not in str(caught.value)
    # The terminal has shown it when the child wrote it.
    (note,) = scene.run.notes
    assert "last words" in note and not scene.run.warnings
    assert (scene.report.outcome, scene.report.cause) == ("died", "unknown")
    assert scene.report.stderr_tail == "last words"


def exceed(scene: Scene) -> None:
    """Make a reading show more than the budget, once the body runs."""

    def read() -> None:
        assert scene.broker.ticket.on_measured is not None
        scene.broker.ticket.on_measured(1.0, (Measured(8 * GIB),))

    scene.run.on_running = read


def test_a_process_killed_over_its_budget_is_no_death_of_unknown_cause() -> None:
    scene = Scene(enforce="kill")
    exceed(scene)
    with pytest.raises(BudgetExceededError):
        scene.go()
    report = scene.report
    assert (report.outcome, report.cause) == ("oom", "")
    assert report.error.endswith("held 8GiB of a device, above its budget of 6GiB")
    evidence = scene.attempt.evidence()
    assert evidence is not None and evidence.says_own_cap


def test_a_process_over_its_budget_is_warned_of_and_runs_on_unless_it_is_to_be_killed() -> None:
    scene = Scene()
    exceed(scene)
    scene.child._when_killed = ended(7)
    scene.run.warn = lambda text: (scene.run.warnings.append(text), scene.child.kill())  # type: ignore[method-assign]
    assert scene.go() == 7
    (warning,) = scene.run.warnings
    assert warning.endswith("gpu:enforce=kill would end it")
    assert scene.report.outcome == "completed"


def test_a_value_that_comes_after_the_time_is_up_does_not_count() -> None:
    scene = Scene(when_killed=tuple(ended(7)), timeout_s=0.0)
    with pytest.raises(ChildTimeoutError):
        scene.go()
    assert scene.report.outcome == "timeout"
    assert scene.report.error.startswith("GPU task 'task' ran longer")


def test_a_cancelled_attempt_kills_its_process() -> None:
    scene = Scene()
    scene.run.on_running = scene.attempt.cancel
    with pytest.raises(CancelledByRunner):
        scene.go()
    assert scene.report.outcome == "cancelled"


def test_a_process_that_cannot_be_started_has_no_report() -> None:
    scene = Scene()
    scene.child._says = [ChildRefused(OSError("no process"))]
    with pytest.raises(OSError, match="no process"):
        scene.go()
    assert scene.reports == [None]
    assert scene.attempt.finished.is_set()


@pytest.mark.parametrize("remote", [False, True])
def test_a_process_that_breaks_the_protocol_fails_its_task(remote: bool) -> None:
    # On a cluster nothing follows; here the launcher kills the process, and its end follows.
    end = [] if remote else [ChildExited(-9, "", killed_because="it sent what is no message")]
    scene = Scene(ChildRefused(ProtocolError("no message")), *end)
    scene.broker.reader.remote = remote
    with pytest.raises(ProtocolError, match="no message"):
        scene.go()
    assert (scene.report.outcome, scene.report.error) == ("failed", "no message")


def test_an_attempt_that_is_not_placed_in_time_has_no_report_even_if_a_device_comes() -> None:
    scene = Scene()

    def wait() -> None:
        raise PlacementTimeoutError("over")

    scene.broker.waits = wait
    with pytest.raises(PlacementTimeoutError):
        scene.go()
    scene.broker.end(scene.broker.ticket)
    assert scene.reports == [None]


def test_an_error_after_the_placement_releases_the_reservation() -> None:
    scene = Scene()
    released: list[Ticket] = []

    def end(ticket: Ticket) -> None:
        released.append(ticket)
        FakeBroker.end(scene.broker, ticket)

    def fail(*arguments: object) -> None:
        raise MemoryError("no memory for its simulated device")

    scene.broker.end = end  # type: ignore[method-assign]
    scene.broker.reader.process_memory = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(MemoryError):
        scene.go()
    assert released == [scene.broker.ticket]
    assert scene.reports == [None]
    assert scene.attempt.finished.is_set()


def test_memory_of_simulated_devices_is_given_to_a_process_on_them() -> None:
    ask = Asked("simulated_allocate", {"device_uuid": "SIM-0", "size_bytes": GIB})
    scene = Scene(*ended(1), ChildExited(0, ""))
    reading: list[int] = []

    def running() -> None:
        scene.child._listener(ask)
        reading.extend(s.free_bytes for s in scene.broker.reader.read((PID,)))

    scene.run.on_running = running
    scene.child._says = [ChildStarted(PID), BodyStarted()]
    scene.child._when_killed = ended(1)
    scene.run.on_running = lambda: (running(), scene.child.kill())
    assert scene.go() == 1
    assert reading == [23 * GIB]
    assert scene.report.peak_live_bytes == GIB
    assert [snapshot.free_bytes for snapshot in scene.broker.reader.read(())] == [24 * GIB]


def test_real_devices_give_no_memory_on_request() -> None:
    from prefect_gpu.devices.host import HostReader

    memory = HostReader().process_memory((), None)
    with pytest.raises(ProtocolError, match="for simulated devices; these are host"):
        memory.answer("simulated_allocate", {})


def subject_of(scene: Scene) -> suspendable.SuspendableProcess:
    assert scene.attempt._listener is not None
    assert scene.attempt._listener._suspendable is not None
    return scene.attempt._listener._suspendable


@pytest.mark.parametrize(
    ("suspended_for", "kind"),
    [(BY_HAND, WaitKind.RESUME), ("task 'evaluate'", WaitKind.ROOM)],
    ids=["by hand", "for another task"],
)
def test_a_suspended_process_tells_why_it_waits(suspended_for: str, kind: WaitKind) -> None:
    told: list[object] = []
    broker: Any = SimpleNamespace(show_suspension=lambda *_: None)
    ticket: Any = SimpleNamespace(held_back_for=suspended_for)
    process = suspendable.SuspendableProcess(
        broker, ticket, "task-1a", told.append, told.append, told.append, told.append
    )
    process.tell("moving out", "moving to the host")
    reason = Reason(kind, suspended_for=suspended_for, detail="moving to the host")
    assert told == [suspendable.AwaitsReturn(reason)]


def test_a_process_is_trimmed_before_its_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, sizes = Scene(), []

    def answer(message: Any) -> None:
        scene.child.answers.append(message)
        # One of an earlier request comes late.
        scene.child._listener(ReleasedUnused(0.0))
        scene.child._listener(ReleasedUnused(message.until_s))

    def measure(size_bytes: int) -> None:
        assert scene.broker.ticket.on_measured is not None
        measured = (Measured(size_bytes, {PID: size_bytes}),)
        scene.broker.ticket.on_measured(time.monotonic(), measured)

    def running() -> None:
        measure(5 * GIB)
        subject = subject_of(scene)
        subject.trim()
        sizes.append(subject.candidate().used_bytes)
        scene.child.kill()

    monkeypatch.setattr(scene.child, "answer", answer)
    monkeypatch.setattr(scene.broker, "refresh", lambda: measure(GIB))
    scene.child._when_killed = ended(1)
    scene.run.on_running = running
    scene.go()
    assert sizes == [GIB]
    assert [type(message) for message in scene.child.answers] == [ReleaseUnused]


@pytest.mark.parametrize("value_comes", [True, False])
def test_a_process_that_is_lost_after_its_body_has_ended_keeps_its_value(value_comes: bool) -> None:
    body_ended, *value = ended(7)
    scene = Scene(when_killed=(body_ended, *(value if value_comes else ()), ChildExited(-9, "")))
    scene.run.on_running = lambda: subject_of(scene).lost("the driver has lost it")
    try:
        if value_comes:
            assert scene.go() == 7
        else:
            with pytest.raises(ProcessLostError):
                scene.go()
    finally:
        lost_tasks().discard("task-1a")


def test_a_process_that_does_not_answer_is_not_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspendable, "RELEASE_S", 0.001)
    monkeypatch.setattr(suspendable, "READING_S", 0.001)
    scene, done = Scene(), []

    def running() -> None:
        subject_of(scene).trim()
        done.append(len(scene.child.answers))
        scene.child.kill()

    scene.child._when_killed = ended(1)
    scene.run.on_running = running
    scene.go()
    assert done == [1]


def test_a_process_whose_body_has_not_begun_is_not_asked_to_trim() -> None:
    scene = Scene(ChildExited(1, ""))
    scene.child._says = [ChildStarted(PID)]
    scene.attempt.place()
    assert scene.attempt._listener is not None
    scene.attempt._listener.start(scene.child, None)  # type: ignore[arg-type]
    subject_of(scene).trim()
    assert scene.child.answers == []
