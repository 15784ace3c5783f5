"""One process of a task run: how it ends, what is raised, and what its report says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest

from prefect_gpu import values
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.engine.task_engine import CancelledByRunner
from prefect_gpu.engine.task_run import ChildContext
from prefect_gpu.errors import (
    BudgetExceededError,
    ChildDiedError,
    ChildTimeoutError,
    PlacementTimeoutError,
    ProtocolError,
    ResultError,
    add_note,
)
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes import mps
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
from prefect_gpu.reports.events import LEAKED, PLACED
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.runner import attempt, suspender
from prefect_gpu.runner.attempt import Attempt
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_run import Done, Ended
from prefect_gpu.runner.suspender import lost_tasks
from prefect_gpu.runner.task_plan import TaskCall, TaskPlan
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.suspension.driver_calls import ProcessLostError
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
    """The engine's side of a task run. Texts, events and reasons are collected by the method that takes them."""

    def __init__(self) -> None:
        self.task_run = SimpleNamespace(id=UUID(int=1), name="task-0", flow_run_id=None)
        self.told: dict[str, list[Any]] = {}
        self.show_running: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return self.told.setdefault(name, []).append

    def context_for_child(self) -> ChildContext:
        return ChildContext({}, {}, {}, False)

    def environment_for_child(self) -> dict[str, str | None]:
        return {}


class FakeBroker:
    """Places every request at once; the memory of a process is back as soon as it ends."""

    kind = "simulated"
    processes = 1
    mark_running = returned = refresh = staticmethod(lambda *ticket: None)
    neighbours = staticmethod(lambda ticket: ())
    withdraw = staticmethod(lambda ticket: False)
    foreign_growth_bytes = staticmethod(lambda ticket: 0)

    def __init__(self) -> None:
        self.reader = SimulatedReader(SimulatedDevices("1x24GiB"))
        self.ticket: Ticket
        self.waits: Callable[[], None] = lambda: None

    def submit(self, request: Request, histories: Any, as_of: int) -> Ticket:
        self.ticket = Ticket(replace(request, id="1"))
        return self.ticket

    def wait(self, ticket: Ticket, *limits: Any) -> Placement:
        self.waits()
        ticket.placement = Placement("1", self.reader.devices(), (6 * GIB,))
        return ticket.placement

    def attach(self, ticket: Ticket, pid: int) -> None:
        ticket.pid = pid

    def end(self, ticket: Ticket) -> None:
        assert ticket.on_recovered is not None
        ticket.on_recovered(0)


class FakeChild:
    """A process that says what a test wants, and when it is killed says that it ended."""

    def __init__(self, says: list[Any], when_killed: list[Any]) -> None:
        self._says, self._when_killed = says, when_killed
        self.answers: list[Any] = []

    def start(self, spec: Any, listener: Listener) -> FakeChild:
        self._listener, self.spec = listener, spec
        for message in self._says:
            listener(message)
        return self

    def answer(self, message: Any) -> None:
        self.answers.append(message)

    def kill(self) -> None:
        for message in (*self._when_killed, ChildExited(-9, "")):
            self._listener(message)


class Scene:
    """One attempt, whose process says what it is told to."""

    def __init__(
        self,
        *says: Any,
        when_killed: Sequence[Any] = (),
        timeout_s: float | None = None,
        pipes: str | None = None,
        grant: Mapping[str, Any] = MappingProxyType({}),
        **asks: Any,
    ) -> None:
        self.run = FakeRun()
        self.broker = FakeBroker()
        self.child = FakeChild([ChildStarted(PID), BodyStarted(), *says], list(when_killed))
        self.reports: list[TaskReport | None] = []
        policy = GPUPolicy(memory=6 * GIB, **asks)
        plan = TaskPlan("task", "task-1a", body, policy, (), (), (), timeout_s, 0)
        with argument_files().share() as share:
            who, now_s = HistoryKey("task", "body"), time.monotonic()
            call = TaskCall(plan, self.run, who, (), {}, share)  # type: ignore[arg-type]
            granted = Grant(6 * GIB, "tag", **grant)
            self.attempt = Attempt(
                call,
                granted,
                now_s,
                1,
                self.broker,  # type: ignore[arg-type]
                self.child,
                lambda: pipes,
            )

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

    def fail(self, error: type[BaseException], match: str | None = None) -> Any:
        """Run the attempt, which must raise an error; return the error."""
        with pytest.raises(error, match=match) as caught:
            self.go()
        return caught.value

    def while_running(self, act: Callable[[], object], ends: Sequence[Any]) -> None:
        """Have something done once the body runs; then the process ends."""
        self.child._when_killed = list(ends)
        self.run.show_running = lambda: (act(), self.child.kill())

    @property
    def report(self) -> TaskReport:
        (report,) = self.reports
        assert report is not None and self.attempt.finished.is_set()
        return report


def test_a_body_that_returns_is_completed() -> None:
    scene = Scene(*ended(7), ChildExited(0, ""))
    assert scene.go() == 7
    assert (scene.report.outcome, scene.report.error, scene.report.pid) == ("completed", "", PID)
    placed = ["Placed on device 0 with a budget of 6GiB (from its tag gpu:memory)"]
    assert scene.run.told["show_placed"] == placed
    assert scene.run.told["say_ended"][0].startswith("Completed: ")


def test_a_process_emits_its_placement_and_what_it_leaves_behind() -> None:
    scene = Scene(*ended(7), ChildExited(0, ""))
    scene.broker.end = lambda ticket: ticket.on_recovered(GIB)  # type: ignore[method-assign, misc]
    scene.go()
    placed, leaked = scene.run.told["emit"]
    assert (placed.name, leaked.name, leaked.payload["leaked_bytes"]) == (PLACED, LEAKED, GIB)


RAISED = ValueError("no")
LINE = "...\nValueError: no"
GARBAGE = [BodyEnded(False), ValueArrived(b"garbage")]
CRASH = (
    'Current thread 0x1 (most recent call first):\n  File "/home/ada/train.py", line 12 in fit\n'
)
SIGSEGV = "the process was killed by SIGSEGV"


@cases(
    "says, ends, error, match, reported",
    {
        "an error": (ended(RAISED, traceback=LINE), (0, ""), ValueError, "no", "ValueError: no"),
        "out of memory": (
            ended(RAISED, traceback=LINE, out_of_memory=OutOfMemory("torch")),
            *((0, ""), ValueError, "no", "ValueError: no"),
        ),
        "SystemExit is the death of its process": (
            ended(SystemExit(3), traceback="...\nSystemExit: 3"),
            *((3, ""), ChildDiedError, "was ended by SystemExit: 3", "SystemExit: 3"),
        ),
        "a value that cannot be read, of a process that is gone": (
            *(GARBAGE, (0, ""), ResultError, None, None),
        ),
        "it dies while it sends its value": (
            [BodyEnded(False)],
            *((-11, "", True), ChildDiedError, "SIGSEGV; it died while sending", SIGSEGV),
        ),
        "it crashes in a line of the user": (
            [],
            *(
                (-11, CRASH),
                ChildDiedError,
                None,
                f"{SIGSEGV}; it crashed in native code that fit ",
            ),
        ),
    },
)
def test_how_an_attempt_fails_and_is_reported(
    says: list[Any],
    ends: tuple[Any, ...],
    error: type[BaseException],
    match: str | None,
    reported: str | None,
) -> None:
    scene = Scene(*says, ChildExited(*ends[:2], truncated=len(ends) > 2))
    scene.fail(error, match)
    outcome = "died" if error is ChildDiedError else "failed"
    short = says and says[0].out_of_memory is not None
    assert scene.report.outcome == ("oom" if short else outcome)
    if reported is not None:
        assert scene.report.error.startswith(reported)
    if ends[1]:
        assert scene.report.error.endswith("fit (/home/ada/train.py:12) called")


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
    scene.fail(ChildDiedError)
    assert applied == [changes], "its value did not come"


def test_a_sigkill_from_outside_has_an_unknown_cause() -> None:
    scene = Scene(ChildExited(-9, "last words"))
    died = scene.fail(ChildDiedError, "cause unknown")
    assert died.stderr_tail == "last words" and "\n" not in str(died)
    # The terminal has shown it when the child wrote it.
    (note,) = scene.run.told["note"]
    assert "last words" in note and "warn" not in scene.run.told
    assert (scene.report.outcome, scene.report.cause) == ("died", "unknown")
    assert scene.report.stderr_tail == "last words"


def exceed(scene: Scene) -> None:
    """Have a reading show more than the budget."""
    assert scene.broker.ticket.on_measured is not None
    scene.broker.ticket.on_measured(1.0, (Measured(8 * GIB),))


def test_a_process_killed_over_its_budget_is_no_death_of_unknown_cause() -> None:
    scene = Scene(enforce="kill")
    scene.run.show_running = lambda: exceed(scene)
    scene.fail(BudgetExceededError)
    assert (scene.report.outcome, scene.report.cause) == ("oom", "")
    assert scene.report.error.endswith("held 8GiB of a device, above its budget of 6GiB")
    evidence = scene.attempt.evidence()
    assert evidence is not None and evidence.says_own_cap


def test_a_process_over_its_budget_is_warned_of_and_runs_on_unless_it_is_to_be_killed() -> None:
    scene = Scene()
    scene.while_running(lambda: exceed(scene), ended(7))
    assert scene.go() == 7
    (warning,) = scene.run.told["warn"]
    assert warning.endswith("gpu:enforce=kill would end it")
    assert scene.report.outcome == "completed"


def test_a_value_that_comes_after_the_time_is_up_does_not_count() -> None:
    scene = Scene(when_killed=ended(7), timeout_s=0.0)
    scene.fail(ChildTimeoutError)
    assert scene.report.outcome == "timeout"
    assert scene.report.error.startswith("GPU task 'task' ran longer")


def test_a_cancelled_attempt_kills_its_process() -> None:
    scene = Scene()
    scene.run.show_running = scene.attempt.cancel
    scene.fail(CancelledByRunner)
    assert scene.report.outcome == "cancelled"


def test_a_process_that_cannot_be_started_has_no_report() -> None:
    scene = Scene()
    scene.child._says = [ChildRefused(OSError("no process"))]
    scene.fail(OSError, "no process")
    assert scene.reports == [None]
    assert scene.attempt.finished.is_set()


@pytest.mark.parametrize("remote", [False, True])
def test_a_process_that_breaks_the_protocol_fails_its_task(remote: bool) -> None:
    # On a cluster nothing follows; here the launcher kills the process, and its end follows.
    end = [] if remote else [ChildExited(-9, "", killed_because="it sent what is no message")]
    scene = Scene(ChildRefused(ProtocolError("no message")), *end)
    scene.broker.reader.remote = remote
    scene.fail(ProtocolError, "no message")
    assert (scene.report.outcome, scene.report.error) == ("failed", "no message")


def test_an_attempt_that_is_not_placed_in_time_has_no_report_even_if_a_device_comes() -> None:
    scene = Scene()
    scene.broker.waits = Mock(side_effect=PlacementTimeoutError("over"))
    scene.fail(PlacementTimeoutError)
    scene.broker.end(scene.broker.ticket)
    assert scene.reports == [None]


def test_an_error_after_the_placement_releases_the_reservation() -> None:
    scene = Scene()
    end = scene.broker.end = Mock(wraps=scene.broker.end)  # type: ignore[method-assign]
    error = MemoryError("no memory for its simulated device")
    scene.broker.reader.process_memory = Mock(side_effect=error)  # type: ignore[method-assign]
    scene.fail(MemoryError)
    end.assert_called_once_with(scene.broker.ticket)
    assert scene.reports == [None]
    assert scene.attempt.finished.is_set()


def test_memory_of_simulated_devices_is_given_to_a_process_on_them() -> None:
    ask = Asked("simulated_allocate", {"device_uuid": "SIM-0", "size_bytes": GIB})
    scene = Scene()
    reading: list[int] = []

    def running() -> None:
        scene.child._listener(ask)
        reading.extend(s.free_bytes for s in scene.broker.reader.read((PID,)))

    scene.while_running(running, ended(1))
    assert scene.go() == 1
    assert reading == [23 * GIB]
    assert scene.report.peak_live_bytes == GIB
    assert [snapshot.free_bytes for snapshot in scene.broker.reader.read(())] == [24 * GIB]


def test_real_devices_give_no_memory_on_request() -> None:
    from prefect_gpu.devices.host import HostReader

    memory = HostReader().process_memory((), None)
    with pytest.raises(ProtocolError, match="for simulated devices; these are host"):
        memory.answer("simulated_allocate", {})


def suspender_of(scene: Scene) -> suspender.Suspender:
    assert scene.attempt.suspender is not None
    return scene.attempt.suspender


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
        found = suspender_of(scene)
        found._trim()
        sizes.append(found._candidate().used_bytes)

    monkeypatch.setattr(scene.child, "answer", answer)
    monkeypatch.setattr(scene.broker, "refresh", lambda: measure(GIB))
    scene.while_running(running, ended(1))
    scene.go()
    assert sizes == [GIB]
    assert [type(message) for message in scene.child.answers] == [ReleaseUnused]


@pytest.mark.parametrize("value_comes", [True, False])
def test_a_process_that_is_lost_after_its_body_has_ended_keeps_its_value(value_comes: bool) -> None:
    body_ended, *value = ended(7)
    scene = Scene(when_killed=(body_ended, *(value if value_comes else ()), ChildExited(-9, "")))
    scene.run.show_running = lambda: suspender_of(scene)._lose("the driver has lost it")
    try:
        if value_comes:
            assert scene.go() == 7
        else:
            scene.fail(ProcessLostError)
    finally:
        lost_tasks().discard("task-1a")


def test_a_process_that_does_not_answer_is_not_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspender, "RELEASE_S", 0.001)
    monkeypatch.setattr(suspender, "READING_S", 0.001)
    scene, done = Scene(), []

    def running() -> None:
        suspender_of(scene)._trim()
        done.append(len(scene.child.answers))

    scene.while_running(running, ended(1))
    scene.go()
    assert done == [1]


def test_a_process_whose_body_has_not_begun_is_not_asked_to_trim() -> None:
    scene = Scene(ChildExited(1, ""))
    scene.child._says = [ChildStarted(PID)]
    scene.attempt.place()
    scene.child.start(None, scene.attempt.hear)
    suspender_of(scene)._trim()
    assert scene.child.answers == []


# As a client of MPS.


@pytest.mark.parametrize(
    ("pipes", "asks", "grant", "found"),
    [
        pytest.param(None, {}, {}, None, id="tasks share by time"),
        pytest.param("/mps", {}, {}, "/mps", id="a client"),
        pytest.param("/mps", {"exclusive": True}, {}, mps.NO_PIPES, id="exclusive"),
        pytest.param("/mps", {"preemptible": True}, {}, mps.NO_PIPES, id="preemptible"),
        pytest.param("/mps", {"count": 2}, {}, mps.NO_PIPES, id="on several devices"),
        pytest.param("/mps", {}, {"outside_mps": True}, mps.NO_PIPES, id="after a fault"),
    ],
)
def test_which_processes_are_clients_of_mps(
    pipes: str | None, asks: dict[str, Any], grant: dict[str, Any], found: str | None
) -> None:
    scene = Scene(*ended(7), ChildExited(0, ""), pipes=pipes, grant=grant, **asks)
    assert scene.go() == 7
    environment = scene.child.spec.environment
    assert environment.get(mps.PIPES) == found
    is_client = found == pipes and found is not None
    assert environment.get(mps.MEMORY) == ("0=6144M" if is_client else None)
    assert scene.report.sharing == ("mps" if is_client else None)
    assert scene.broker.ticket.request.client is is_client


@pytest.mark.parametrize("pipes", [None, "/mps"])
def test_the_driver_limits_clients_to_their_budget(pipes: str | None) -> None:
    short = ended(RAISED, traceback=LINE, out_of_memory=OutOfMemory("torch"))
    scene = Scene(*short, ChildExited(0, ""), pipes=pipes)
    with pytest.raises(type(RAISED)):
        scene.go()
    evidence = scene.attempt.evidence()
    assert evidence is not None and evidence.limited is (pipes is not None)


@pytest.mark.parametrize("pipes", [None, "/mps"])
def test_clients_do_not_keep_a_device_to_themselves(pipes: str | None) -> None:
    scene = Scene(*ended(7), ChildExited(0, ""), pipes=pipes, grant={"fills": True})
    assert scene.go() == 7
    assert scene.broker.ticket.request.fills is (pipes is None)


def test_a_fault_of_a_client_names_the_tasks_beside_it() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
    add_note(error, "The device's context ended with CUDA_ERROR_ILLEGAL_ADDRESS.")
    for pipes, beside in ((None, None), ("/mps", ("train",))):
        scene = Scene(*ended(error), ChildExited(1, ""), pipes=pipes)
        scene.attempt.place()
        outcome = scene.attempt.run()
        assert isinstance(outcome, Ended)
        scene.broker.ticket.neighbours["train"] = None
        assert scene.attempt.neighbours_at_fault(outcome) == beside
        scene.attempt.close(scene.reports.append)
    scene = Scene(ChildExited(-6, "terminate: CUDA_ERROR_ILLEGAL_ADDRESS"), pipes="/mps")
    scene.attempt.place()
    died = scene.attempt.run()
    assert isinstance(died, Ended) and scene.attempt.neighbours_at_fault(died) == ()
    scene.attempt.close(scene.reports.append)
