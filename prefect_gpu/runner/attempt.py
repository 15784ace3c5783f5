"""One process of one task run, from the request for a device to its report.

`Attempt.place` asks for a device and waits; `Attempt.run` starts the child, follows its messages, and
returns its value or raises its error. Both block the engine's thread, which alone decides how the process
ended (`Verdict`). Facts go into a `ProcessRecord`. The report is made when that thread is done and the
device shows the memory back, whichever comes last.

It decides nothing about devices (`scheduling`), and nothing about what follows an out-of-memory
(`submission`).
"""

from __future__ import annotations

import functools
import os
import queue as queues
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from prefect_gpu import values
from prefect_gpu.broker.broker import Broker, Ticket, Withdrawn
from prefect_gpu.broker.suspendable import PAUSED, RESUMED, Awaits, SuspendableProcess
from prefect_gpu.broker.ticket import Measured
from prefect_gpu.devices.host import read_oom_kills
from prefect_gpu.devices.reader import ProcessMemory
from prefect_gpu.errors import (
    BudgetExceededError,
    ChildDiedError,
    ChildTimeoutError,
    PrefectGPUError,
    ProtocolError,
)
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import AllocationMode, FrameworkPolicy, child_environment
from prefect_gpu.in_task import Allocation
from prefect_gpu.live.progress import RunningTask
from prefect_gpu.live.table import device_label
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes.crash_site import crashed_at
from prefect_gpu.processes.interpreter import import_paths, working_folder
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildHandle,
    ChildRefused,
    ChildStarted,
    Launcher,
    LaunchSpec,
    ValueArrived,
)
from prefect_gpu.processes.messages import (
    Answered,
    Asked,
    BodyEnded,
    BodyStarted,
    CountersRead,
    EventEmitted,
    LogEmitted,
    Prepare,
)
from prefect_gpu.processes.standby_kind import OWN_MODULES
from prefect_gpu.reports.events import ended_events, placed_event
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.reports.model import BudgetSource, TaskReport, Verdict
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.context_size import context_meter
from prefect_gpu.runner.prefect_engine import CancelledByRunner, is_first_warning
from prefect_gpu.runner.process_record import ProcessRecord
from prefect_gpu.runner.run_log import ended_line, placed_line
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling.ladder import Cause, Evidence, Rung
from prefect_gpu.scheduling.model import Device, Placement, Request
from prefect_gpu.scheduling.reasons import Reason
from prefect_gpu.suspension.eligibility import MOVED_KINDS
from prefect_gpu.suspension.moves import ProcessLostError
from prefect_gpu.suspension.suspended import Suspender, lost_tasks
from prefect_gpu.units import format_bytes
from prefect_gpu.values.registrations import find_registered
from prefect_gpu.values.transport import ReceivedValue

#: Seconds between two readings of a framework's counters in the child. The reading takes
#: microseconds and did not change a step of 27 ms even every 5 ms (measured, PyTorch on an H200).
COUNTERS_INTERVAL_S = 0.1

#: Questions of a child that are answered on the engine's thread, whose flow run they may be about. To pickle an
#: attribute of a module may take long.
_ANSWERED_BY_ENGINE: Mapping[str, Callable[..., Any]] = {
    "attribute": values.attribute,
    "is_first_warning": is_first_warning,
}

#: Stands for a message that did not come in time.
_TIME_UP = object()


@dataclass(frozen=True, slots=True)
class _EndProbe:
    """Ends a probe that shares a device."""

    #: The device that is short of memory, as messages name it.
    where: str


class ProbeEnded(Exception):  # noqa: N818  # not an error: the body runs again
    """A probe that shared a device was ended for the others there."""


class NeedLearned(Exception):  # noqa: N818  # not an error: it asks again
    """While a probe waited for a device, another run has shown what it needs."""


class ChildTraceback(Exception):  # noqa: N818  # shown as a cause, never raised
    """The traceback that an exception had in the child, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nin the process of the GPU task:\n{self.text}"


def attach_traceback(error: BaseException, text: str) -> None:
    """Make a traceback in the child, as text, the first cause of an exception: it may have causes of its own."""
    seen: set[int] = set()
    while (before := _shown_before(error)) is not None and id(before) not in seen:
        seen.add(id(error))
        error = before
    error.__cause__ = ChildTraceback(text)


def _shown_before(error: BaseException) -> BaseException | None:
    """Return the exception that a traceback shows above another one: none for `raise ... from None`."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def has_traceback(error: BaseException | None) -> bool:
    """Return whether `attach_traceback` was called with an exception."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ChildTraceback):
            return True
        seen.add(id(error))
        error = _shown_before(error)
    return False


class Attempt:
    """One process of one task run. Each method is for the engine's thread, unless it says otherwise.

    Args:
        call: Whose body it runs.
        grant: What it gets of its devices.
        number: From 1: which process of the task run this is.
        broker: Hands out devices.
        launcher: Starts processes.
    """

    def __init__(
        self, call: TaskCall, grant: Grant, number: int, broker: Broker, launcher: Launcher
    ) -> None:
        self._call = call
        self._plan = call.plan
        self._policy = call.plan.policy
        self._run = call.run
        self._grant = grant
        self._number = number
        self._broker = broker
        self._launcher = launcher
        self._messages: queues.SimpleQueue[Any] = queues.SimpleQueue()
        self._ticket: Ticket | None = None
        #: What its frameworks may do with the budget; known once it was placed.
        self._allocation: AllocationMode = "growth"
        #: What the reader of its devices keeps of it; known once it was placed.
        self._memory = ProcessMemory(broker.kind)
        self._kills_before = 0
        self._cancelled = threading.Event()
        #: It waits no longer as a probe.
        self._need_learned = False
        #: It was placed as a probe that shares its devices. Where it comes back after a suspension it has a budget, its cap.
        self.shares = False
        self._handle: ChildHandle | None = None
        self._launched = threading.Event()
        #: Once there is a process on this machine.
        self._suspended: SuspendableProcess | None = None
        self._suspender: Suspender | None = None
        #: Once it was placed.
        self._record: ProcessRecord | None = None
        #: Written by the engine's thread alone, and not after `close`.
        self._verdict = Verdict("died")
        #: Guards what follows.
        self._lock = threading.Lock()
        #: Gets the report; `None`: the engine's thread is not done, or it was handed on.
        self._take_report: Callable[[TaskReport | None], None] | None = None
        #: Nothing of the process is left.
        self._gone = False
        self._leaked_bytes: int | None = None
        #: Set when nothing of the process is left and its report was handed on.
        self.finished = threading.Event()

    def cancel(self) -> None:
        """End it, wherever it is. From any thread; `run` then raises `CancelledByRunner`."""
        self._cancelled.set()
        ticket = self._ticket
        if ticket is not None:
            self._broker.withdraw(ticket)
        self._messages.put(None)
        record, handle = self._record, self._handle
        if record is not None and record.value_arrived and handle is not None:
            # The engine's thread has returned the value; the process may linger at its exit.
            handle.kill()

    def learn_need(self, device_name: str, budget_bytes: int) -> None:
        """Take what another run has shown that a probe needs. From any thread.

        Args:
            device_name: Model of the device that this is known of.
            budget_bytes: What a later process gets there.
        """
        ticket = self._ticket
        if ticket is None:
            return
        self._need_learned = True
        if not self._broker.withdraw(ticket):
            self._broker.learn_need(ticket, {device_name: budget_bytes})

    @property
    def whole_device(self) -> bool:
        """Whether it was given all that its devices had free."""
        ticket = self._ticket
        if self.shares:
            return False
        return ticket is not None and any(
            ticket.request.need_bytes(device) is None for device in ticket.devices
        )

    @property
    def has_devices(self) -> bool:
        """Whether it has its devices now, and its memory is there. From any thread."""
        ticket = self._ticket
        has_them = self._record is not None and ticket is not None and ticket.ended_s is None
        return has_them and self._away_s is None

    @property
    def _away_s(self) -> float | None:
        """For how many seconds its process has been suspended; `None`: it is not."""
        return None if self._suspender is None else self._suspender.away_s

    def running(self) -> RunningTask | None:
        """Return what is shown of it while it has its devices; `None`: it has none. From any thread."""
        ticket, record = self._ticket, self._record
        if record is None or ticket is None or not self.has_devices:
            return None
        steps = record.steps
        return RunningTask(
            name=clean_name(self._run.task_run.name),
            devices=tuple(device_label(device) for device in ticket.devices),
            budget_bytes=record.total_budget_bytes,
            used_bytes=record.seen_bytes,
            seconds=time.monotonic() - ticket.placed_s,
            started=record.started_s is not None,
            steps=0 if steps is None else steps.count,
            step_s=None if steps is None else steps.step_s,
        )

    def why_it_waits(self) -> tuple[float, Reason | None]:
        """Return for how many seconds it has waited for devices, or was suspended, and for what. From any thread."""
        ticket, away_s = self._ticket, self._away_s
        if away_s is not None:
            return away_s, self._run.awaits
        if ticket is None:
            return 0.0, None
        return time.monotonic() - ticket.request.submitted_s, self._broker.explain(ticket)

    def evidence(self) -> Evidence | None:
        """Return what is known of its out-of-memory; `None`: there was none, or nothing is known."""
        ticket, record = self._ticket, self._record
        if record is None or record.out_of_memory is None:
            return None
        if ticket is None or ticket.placement is None:
            return None
        seen, placement = record.out_of_memory, ticket.placement
        return Evidence(
            budget_bytes=min(placement.budget_bytes),
            cap_bytes=record.cap_bytes,
            context_bytes=record.context_bytes,
            wanted_bytes=seen.wanted_bytes,
            held_bytes=seen.held_bytes,
            process_bytes=seen.process_bytes,
            free_bytes=seen.free_bytes,
            foreign_growth_bytes=self._broker.foreign_growth_bytes(ticket),
            says_own_cap=seen.says_own_cap,
            alone=any(r.exclusive for r in placement.reservations),
            shared_probe=self.shares,
        )

    # Before there is a process.

    def place(self) -> Placement:
        """Wait for its devices.

        Raises:
            PlacementError: No device can hold it, or none was free in time.
            CancelledByRunner: `cancel` was called.
            NeedLearned: `learn_need` was called before it was placed.
        """
        try:
            return self._place()
        except BaseException:
            # No process came of it. What was reserved before the error is released.
            self._gone = True
            if self._ticket is not None:
                self._broker.end(self._ticket)
            raise

    def _place(self) -> Placement:
        policy = self._policy
        request = Request(
            id="",
            task_name=self._plan.task_name,
            sequence=self._plan.sequence,
            submitted_s=0.0,
            memory=self._grant.memory,
            count=policy.count,
            devices=policy.devices,
            exclusive=policy.exclusive,
            priority=policy.priority,
            # On host devices the budget is the machine's memory: it would be counted twice.
            host_bytes=0 if self._broker.kind == "host" else self._plan.host_bytes,
            expected_s=self._grant.expected_s,
            nodes=policy.nodes,
            standby=self._call.standby,
            task_run_id=str(self._run.task_run.id),
            task_run_name=clean_name(self._run.task_run.name),
            flow_run_id=str(self._run.task_run.flow_run_id or ""),
            probe_fraction=self._grant.probe_fraction,
            preemptible=policy.preemptible and self._can_be_suspended(),
        )
        self._ticket = ticket = self._broker.submit(request)
        ticket.on_recovered = self._take_recovery
        self._call.place.leave()
        if self._cancelled.is_set():
            self._broker.withdraw(ticket)
        try:
            placement = self._broker.wait(
                ticket, policy.wait_s, self._run.show_awaiting, waited_s=self._grant.waited_s
            )
        except Withdrawn:
            if self._need_learned and not self._cancelled.is_set():
                raise NeedLearned from None
            raise CancelledByRunner from None
        self.shares = any(reservation.probe for reservation in placement.reservations)
        # What it waited for another's probe, too.
        queued_s = self._grant.waited_s + ticket.placed_s - ticket.request.submitted_s
        self._run.show_placed(
            placed_line(placement, self._grant, self._call.identity, self.whole_device, queued_s)
        )
        self._run.emit(placed_event(placement, self._source, self._number, queued_s))
        # With a device to itself and no stated memory there is no budget to keep to.
        alone = any(reservation.exclusive for reservation in placement.reservations)
        self._record = ProcessRecord(
            placement,
            ticket.placed_s,
            queued_s,
            watched=self._broker.kind != "host" and (policy.memory is not None or not alone),
        )
        self._allocation = self._choose_allocation()
        self._memory = self._broker.reader.process_memory(
            tuple(device.uuid for device in placement.devices),
            None if self._allocation == "growth" else placement.budget_bytes,
        )
        self._kills_before = read_oom_kills()
        ticket.on_measured = self._take_measurement
        if self.shares:
            ticket.on_short = self._end_probe
            # On a cluster the node would have to agree, and it does not know which runs are first ones.
            local = not self._broker.reader.remote
            ticket.may_leave = local and policy.count == 1 and self._broker.kind in MOVED_KINDS
        return placement

    def _can_be_suspended(self) -> bool:
        """Return whether the tag `gpu:preemptible` has an effect on these devices; if not, it is said once."""
        why = ""
        if self._broker.kind not in MOVED_KINDS:
            why = f"devices of kind {self._broker.kind} are not suspended"
        said = PROCESS_RESOURCES.get("said of gpu:preemptible", set[str])
        if why and why not in said:
            said.add(why)
            self._run.warn(f"gpu:preemptible has no effect: {why}")
        return not why

    @property
    def _source(self) -> BudgetSource:
        """Where its budget comes from. A task that is known on one model may probe on another."""
        return "probe" if self.shares else self._grant.source

    def _end_probe(self, device: Device) -> None:
        """End the process for the others on a device; called on the broker's thread."""
        self._messages.put(_EndProbe(device.label))

    def _choose_allocation(self) -> AllocationMode:
        """Return what frameworks do with the budget: they are capped to one that is known."""
        policy = self._policy
        if "allocation" in policy.stated or not policy.caching:
            return policy.allocation
        return "growth" if self.whole_device else "limit"

    def _prepare(self, ticket: Ticket, placement: Placement) -> LaunchSpec:
        policy = replace(
            self._plan.framework_policy(self._broker.kind, self._broker.processes),
            device_uuids=tuple(device.uuid for device in placement.devices),
            total_bytes=tuple(device.total_bytes for device in placement.devices),
            budget_bytes=placement.budget_bytes,
            allocation=self._allocation,
            on_demand=self.shares,
            snapshot_path=self._snapshot_path(),
        )
        frameworks = self._plan.frameworks
        learned = self._grant.contexts.get(placement.devices[0].name)
        contexts: Mapping[str, int] = {}
        if self._broker.kind == "nvml":
            # Other devices have none.
            elsewhere = self._launcher if self._broker.reader.remote else None
            contexts = context_meter(elsewhere).contexts(
                frameworks, learned, policy, self._broker, ticket
            )
        policy = replace(policy, context_bytes=contexts)
        if self._cancelled.is_set():
            raise CancelledByRunner
        context = self._memory.context_bytes
        if context is None:
            context = learned if learned and contexts else 0
            context = context or max((contexts.get(name, 0) for name in frameworks), default=0)
        caps = self._memory.cap_bytes or _caps(frameworks, policy)
        cap = min(caps) if caps else None
        # Where nothing holds a probe to its cap (the host), its report says all the same that it had one.
        noted = min(placement.budget_bytes) if cap is None and self.shares else cap
        self._learned.set_caps(noted, context, contexts)
        allocation = Allocation(
            budget_bytes=min(placement.budget_bytes),
            cap_bytes=cap,
            attempt=self._number,
            device_uuids=policy.device_uuids,
            frameworks=frameworks,
            exclusive=any(r.exclusive for r in placement.reservations),
            shared_with=self._broker.neighbours(ticket),
            requests=(*ticket.request.ancestors, ticket.request.id),
        )
        environment = {
            **child_environment(policy, registry.adapters_for(policy), os.environ),
            **self._run.environment_for_child(),
        }
        return LaunchSpec(
            task_name=self._plan.task_name,
            environment=environment,
            prepare=Prepare(
                policy,
                allocation,
                COUNTERS_INTERVAL_S,
                libraries=OWN_MODULES if self._plan.with_prefect else (),
                private_modules=values.private_modules(),
                users_modules=values.users_modules(),
                registered=find_registered(),
            ),
            # Not before there is a device: the arguments of waiting tasks are not held twice.
            call=self._call.pack(),
            cwd=working_folder(),
            argv=tuple(sys.argv),
            sys_path=import_paths(),
            placement=placement,
            request=ticket.request,
        )

    def _snapshot_path(self) -> str:
        folder = self._plan.snapshots
        name = f"{self._run.task_run.id}-{self._number}.pickle"
        return "" if folder is None else str(folder / name)

    # While there is one: the engine's thread.

    def run(self) -> Any:
        """Run the body in a process on the devices from `place`.

        Returns:
            What the body returned.

        Raises:
            ChildDiedError: The process ended without an answer.
            ChildTimeoutError: The body ran too long.
            BudgetExceededError: It took more than its budget, and `gpu:enforce=kill` says to end it.
            ResultError: The call or the value cannot be pickled.
            ProcessLostError: The driver lost it when its memory was moved.
            CancelledByRunner: `cancel` was called.
            BaseException: What the body raised.
        """
        ticket = self._ticket
        assert ticket is not None and ticket.placement is not None, "it was placed"
        try:
            # No name for the spec: the launcher lets go of the call once the child has it.
            self._handle = self._launcher.start(self._prepare(ticket, ticket.placement), self._hear)
            self._launched.set()
            return self._follow()
        except BaseException as error:
            if not self._verdict.error:
                self._verdict = replace(self._verdict, error=first_line(error))
            if self._handle is None:
                # No process came of it.
                self._end()
            elif self._learned.ended_s is None:
                self._handle.kill()
            raise

    @property
    def _learned(self) -> ProcessRecord:
        assert self._record is not None, "it was placed"
        return self._record

    def _follow(self) -> Any:
        """Take the child's messages until its value, or its end."""
        ended: BodyEnded | None = None
        reason: BaseException | None = None
        lost: ProcessLostError | None = None
        limit = TimeLimit()
        while True:
            message = self._next(limit.left_s(time.monotonic()))
            if message is _TIME_UP:
                assert self._plan.timeout_s is not None
                reason = ChildTimeoutError(self._plan.task_name, self._plan.timeout_s)
                limit.lift()
                self._kill("timeout")
            elif message is None:
                reason = CancelledByRunner()
                limit.lift()
                self._kill("cancelled")
            elif isinstance(message, _EndProbe):
                if reason is None and ended is None:
                    reason = ProbeEnded()
                    limit.lift()
                    self._kill("cancelled")
                    self._verdict = replace(
                        self._verdict,
                        error=f"ended for other first runs on {message.where}, which ran short of memory",
                        next_words="it gets a device to itself",
                    )
            elif isinstance(message, BudgetExceededError):
                reason = self._take_overshoot(message) or reason
            elif isinstance(message, ProcessLostError):
                # One that is being ended for another reason answers no call of the driver either.
                if reason is None:
                    # What it has returned may still come.
                    lost = message
                    lost_tasks().add(self._plan.task_key)
                    limit.lift()
                    self._kill("died")
            elif message is PAUSED:
                limit.pause(time.monotonic())
            elif message is RESUMED:
                limit.resume(time.monotonic())
                self._run.show_running()
            elif isinstance(message, Awaits):
                self._run.show_awaiting(message.reason)
            elif isinstance(message, BodyStarted):
                self._run.show_running()
                started_s = self._learned.started_s
                if self._plan.timeout_s is not None and started_s is not None:
                    limit.set(started_s + self._plan.timeout_s)
            elif isinstance(message, BodyEnded):
                ended = message
                limit.lift()
            elif isinstance(message, ValueArrived) and ended is not None and reason is None:
                # The value is kept whatever becomes of the process; it ends by itself.
                return self._open_value(ended, message.data)
            elif isinstance(message, ChildRefused):
                self._verdict = Verdict("failed")
                reason = message.error
                if not isinstance(message.error, ProtocolError):
                    self._end()
                    raise message.error
            elif isinstance(message, ChildExited):
                raise reason or lost or self._take_death(message)
            elif isinstance(message, Asked):
                answer = _ANSWERED_BY_ENGINE[message.method]
                self._send_answer(functools.partial(answer, **message.arguments))
            elif isinstance(message, LogEmitted):
                self._run.forward_log(message.log)
            elif isinstance(message, EventEmitted):
                self._run.forward_event(message.event)

    def _next(self, left_s: float | None) -> Any:
        try:
            return self._messages.get(timeout=left_s)
        except queues.Empty:
            return _TIME_UP

    def _kill(self, outcome: Literal["timeout", "cancelled", "oom", "died"]) -> None:
        """End the process. Its outcome is noted first, before the process can end."""
        self._verdict = Verdict(outcome)
        assert self._handle is not None
        self._handle.kill()

    def _take_overshoot(self, error: BudgetExceededError) -> BudgetExceededError | None:
        if self._policy.enforce != "kill":
            self._run.warn(f"{error}; gpu:enforce=kill would end it")
            return None
        self._learned.add_overshoot(error.seen_bytes)
        self._kill("oom")
        return error

    def _take_death(self, exited: ChildExited) -> ChildDiedError:
        """Return the error of a process that ended without an answer."""
        cause = _kill_cause(exited, self._kills_before)
        said = f"the process {_describe_exit(exited.code)}"
        if line := crashed_at(exited.stderr_tail):
            said += f"; it crashed in native code that {line} called"
        self._verdict = Verdict("died", said, cause, stderr_tail=exited.stderr_tail)
        if exited.stderr_tail:
            self._run.note(f"The process died; end of its standard error:\n{exited.stderr_tail}")
        return _death_by_exit(self._plan.task_name, exited, self._learned, cause)

    def _open_value(self, ended: BodyEnded, data: ReceivedValue) -> Any:
        """Return the value of the body, or raise its error."""
        try:
            value = values.loads(data, "exception" if ended.raised else "return value")
            if ended.changes is not None:
                self._run.apply_changes(values.loads(ended.changes, "transaction"))
        except Exception as problem:
            self._verdict = Verdict("failed")
            if ended.traceback:
                problem.__cause__ = ChildTraceback(ended.traceback)
            raise
        if not ended.raised:
            self._verdict = Verdict("completed")
            return value
        error, said = value, ended.traceback.strip().rpartition("\n")[2]
        self._verdict = Verdict("oom" if ended.out_of_memory else "failed", said)
        if not isinstance(error, BaseException):
            raise ProtocolError(f"a child announced an exception and sent {error!r}")
        if not isinstance(error, Exception):
            # SystemExit and its like are meant for the process, which ends by them. Raised here they
            # would end the flow.
            self._verdict = Verdict("died", said)
            raise _death_by_exception(self._plan.task_name, error, ended.traceback, self._learned)
        if ended.traceback:
            attach_traceback(error, ended.traceback)
        raise error

    # While there is one: other threads.

    def _hear(self, message: Any) -> None:
        """Take a message of the child, on the launcher's thread."""
        # Facts are noted here, in order: the engine's thread may have returned the value before the
        # process is gone.
        if self._suspended is not None:
            self._suspended.hear(message)
        if isinstance(message, ChildStarted):
            self._attach(message.pid)
        elif isinstance(message, BodyStarted):
            self._learned.add_first_line()
            if self._ticket is not None:
                self._broker.mark_running(self._ticket)
        elif isinstance(message, CountersRead):
            self._take_counters(message)
        elif isinstance(message, Asked) and message.method not in _ANSWERED_BY_ENGINE:
            answer = functools.partial(self._memory.answer, message.method, message.arguments)
            self._send_answer(answer)
            return
        elif isinstance(message, BodyEnded):
            self._learned.add_end(message)
        elif isinstance(message, ValueArrived):
            self._learned.add_value()
            # Once more while it still holds what it used.
            self._broker.refresh()
            if self._cancelled.is_set() and self._handle is not None:
                # Neither the value is wanted, nor a process that lingers at its exit.
                self._handle.kill()
        elif isinstance(message, ChildExited):
            self._end()
        self._messages.put(message)

    def _attach(self, pid: int) -> None:
        self._learned.add_start(pid)
        ticket = self._ticket
        assert ticket is not None
        if not self._broker.reader.remote:
            suspended = self._suspended = SuspendableProcess(
                self._broker,
                ticket,
                self._plan.task_key,
                self._send,
                self._messages.put,
                self._run.say,
                self._learned.add_suspension,
            )
            self._suspender = Suspender(pid, suspended)
            ticket.on_no_return = self._lose
            ticket.on_held_back = self._suspender.ask
        self._broker.attach(ticket, pid)
        self._memory.attach(pid)

    def _lose(self, error: PrefectGPUError) -> None:
        """End the suspended process: there is no device for it any more. Called on the broker's thread."""
        why = f"it was suspended and cannot come back: {first_line(error)}"
        self._messages.put(ProcessLostError(why))

    def _send_answer(self, make: Callable[[], Any]) -> None:
        try:
            answer = Answered(result=make())
        except Exception as error:  # noqa: BLE001 - process boundary: the child raises it
            answer = Answered(error=error)
        self._send(answer)

    def _send(self, message: Any) -> None:
        """Send a message to the process, which has started."""
        # `start` returns before the child can have asked anything, but for one turn of a thread.
        self._launched.wait()
        assert self._handle is not None
        self._handle.answer(message)

    def _take_counters(self, read: CountersRead) -> None:
        self._learned.add_steps(read.steps, read.marks)
        if (counters := read.counters) is None:
            return
        self._learned.add_counters(counters, read.frameworks)
        if self._ticket is not None and counters.reserved_bytes is not None:
            self._ticket.stand_in_bytes = counters.reserved_bytes + self._learned.context_bytes

    def _take_measurement(self, at_s: float, measured: tuple[Measured, ...]) -> None:
        """Take a reading of the process's devices, on the broker's thread."""
        if self._suspender is not None and self._suspender.away:
            # On its way it holds a part, which says nothing of what it needs.
            self._learned.add_absence(at_s)
            return
        sizes_bytes = tuple(each.total_bytes for each in measured)
        over = self._learned.add_reading(at_s, sizes_bytes, self._memory.live_bytes())
        self._learned.add_processes([each.by_pid for each in measured])
        if self._suspended is not None:
            self._suspended.take_measurement(at_s, measured)
        if over is not None:
            # The engine's thread notes it, and kills the process if it is to be killed.
            seen_bytes, budget_bytes = over
            self._messages.put(BudgetExceededError(self._plan.task_name, budget_bytes, seen_bytes))

    # After it.

    def _end(self) -> None:
        """Release the devices at the broker: the process has ended, or was never started."""
        assert self._ticket is not None
        if self._suspender is not None:
            self._suspender.end()
        if self._learned.pid is not None:
            peaks = self._memory.detach()
            if peaks is not None:
                live, devices = peaks
                self._learned.add_peaks(live, live + self._learned.context_bytes * devices)
        self._broker.end(self._ticket)

    def _take_recovery(self, leaked_bytes: int | None) -> None:
        """Note that nothing of the process is left, on the broker's thread."""
        with self._lock:
            self._gone, self._leaked_bytes = True, leaked_bytes
        self._hand_on()

    def close(
        self,
        take_report: Callable[[TaskReport | None], None],
        cause: Cause | Literal[""] = "",
        wanted_bytes: int | None = None,
        rung: Rung | None = None,
    ) -> None:
        """Note that the engine's thread is done with it.

        Args:
            take_report: Gets its report, or `None` if there was no process: now, or on the broker's
                thread once nothing of the process is left.
            cause: Of its out-of-memory; empty: there was none.
            wanted_bytes: Bytes on one device that it would have needed; `None`: unknown.
            rung: What the next process of the task run gets; `None`: there is none.
        """
        if cause:
            self._verdict = replace(self._verdict, cause=cause, wanted_bytes=wanted_bytes)
        if rung is not None:
            self._verdict = replace(
                self._verdict, next_words=rung.reason, next_budget_bytes=rung.budget_bytes
            )
        # Threads that wait may keep the last attempt for as long as nothing comes.
        self._call = self._call.without_arguments()
        with self._lock:
            self._take_report = take_report
        self._hand_on()

    def _hand_on(self) -> None:
        """Hand on the report, once: at the later of `close` and `_take_recovery`."""
        with self._lock:
            if self._take_report is None or not self._gone:
                return
            take_report, self._take_report = self._take_report, None
        report = None
        try:
            if self._record is not None and self._record.pid is not None:
                assert self._ticket is not None
                report = self._record.report(
                    self._call,
                    self._broker.kind,
                    self._number,
                    self._source,
                    tuple(name for name in self._plan.named if name != registry.NO_FRAMEWORK),
                    self._verdict,
                    self._leaked_bytes,
                    self._ticket.ended_s,
                    tuple(self._ticket.neighbours),
                    self._grant.capacity_bytes,
                )
                if line := ended_line(report):
                    self._run.say_ended(line)
                for event in ended_events(report):
                    self._run.emit(event)
        finally:
            try:
                take_report(report)
            finally:
                self.finished.set()


class TimeLimit:
    """When a body's time is over. Time in which its process is suspended does not count."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        #: Monotonic seconds when the process was suspended; `None`: it runs.
        self._paused_s: float | None = None

    def set(self, at_s: float) -> None:
        """Set when it is over, in monotonic seconds; also of a process that is suspended before its body begins."""
        self._at_s = at_s

    def lift(self) -> None:
        """Remove the limit."""
        self._at_s = None

    def pause(self, now_s: float) -> None:
        """Note that the process is suspended."""
        self._paused_s = now_s

    def resume(self, now_s: float) -> None:
        """Note that the process runs again."""
        if self._at_s is not None and self._paused_s is not None:
            self._at_s += now_s - self._paused_s
        self._paused_s = None

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds that are left, at least 0; `None`: there is no limit now."""
        if self._at_s is None or self._paused_s is not None:
            return None
        return max(0.0, self._at_s - now_s)


def _caps(frameworks: tuple[str, ...], policy: FrameworkPolicy) -> tuple[int, ...] | None:
    """Return bytes that frameworks may take on each device, the smallest cap; `None`: no cap."""
    # Where none was found, whichever is imported is held to one of these.
    names = frameworks or tuple(registry.ADAPTERS)
    caps = [cap for name in names if (cap := policy.cap_bytes(name)) is not None]
    return min(caps) if caps else None


# The death of a process.


def _describe_exit(code: int) -> str:
    """Return how a process ended: `was killed by SIGSEGV`, `ended with exit code 3`."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code} before it returned"


def _kill_cause(exited: ChildExited, kills_before: int) -> Cause | Literal[""]:
    """Return the cause of a SIGKILL that the runner did not send; empty: it was none.

    Args:
        exited: How the process ended.
        kills_before: What `read_oom_kills` returned before it began.
    """
    if exited.code != -signal.SIGKILL or exited.killed_because:
        return ""
    return "host" if read_oom_kills() > kills_before else "unknown"


def _death_by_exit(
    task_name: str, exited: ChildExited, record: ProcessRecord, cause: Cause | Literal[""]
) -> ChildDiedError:
    """Return the error of a process that ended without an answer."""
    detail = []
    seen = record.last_process_bytes
    if seen:
        detail.append(
            f"last seen holding {format_bytes(seen)} of its "
            f"{format_bytes(record.total_budget_bytes)} budget"
        )
    if exited.killed_because:
        detail.append(f"prefect_gpu killed it since {exited.killed_because}")
    elif cause == "host":
        detail.append(
            "the machine's own memory, or that of its container or job (control group), ran out: "
            "the kernel's counter of out-of-memory kills rose "
            "while it ran: load less data at a time, start fewer data loader workers, or let fewer "
            "tasks run at once (max_processes=)"
        )
    elif cause:
        detail.append(
            "cause unknown: possibly the kernel's out-of-memory killer, possibly a kill -9; "
            "journalctl -k shows which"
        )
    if exited.truncated:
        detail.append("it died while sending")
    if line := crashed_at(exited.stderr_tail):
        detail.append(f"it crashed in native code that {line} called")
    assert record.pid is not None
    return ChildDiedError(
        task_name, record.pid, _describe_exit(exited.code), "; ".join(detail), exited.stderr_tail
    )


def _death_by_exception(
    task_name: str, raised: BaseException, traceback: str, record: ProcessRecord
) -> ChildDiedError:
    """Return the error of a process that was ended by `SystemExit` or its like.

    Args:
        task_name: Of the task.
        raised: The exception.
        traceback: That it had in the child, as text.
        record: What was learned of the process.
    """
    said = f": {raised}" if str(raised) else ""
    assert record.pid is not None
    death = ChildDiedError(task_name, record.pid, f"was ended by {type(raised).__name__}{said}")
    death.__cause__ = ChildTraceback(traceback)
    return death


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, after the name of its class unless it is of this package."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - a user's class may have no text
        text = ""
    if isinstance(error, (PrefectGPUError, CancelledByRunner)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
