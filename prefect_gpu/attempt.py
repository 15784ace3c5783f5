"""One process of one task run, from the request for a device to its report.

`Attempt.run` is the flow of it in plain order: ask for a device, wait, start the child, hear it, give
back its value or raise what it raised. It blocks the engine's thread on one queue. What it learns
goes into a `TaskReport`, finished when the device shows the memory back.

It decides nothing about devices (`scheduling`), and knows no Prefect: what Prefect needs comes in as
`Surroundings`.
"""

from __future__ import annotations

import os
import queue as queues
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect_gpu.broker import Broker, Ticket, Withdrawn
from prefect_gpu.budgets import Grant
from prefect_gpu.contexts import ContextMeter
from prefect_gpu.deaths import (
    ChildTraceback,
    death_by_exception,
    death_by_exit,
    describe_exit,
    kernel_kills,
    kill_cause,
)
from prefect_gpu.devices.simulated import SimulatedReader
from prefect_gpu.errors import (
    BudgetExceededError,
    ChildTimeoutError,
    PrefectGPUError,
    ProtocolError,
)
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import AllocationMode, Counters, FrameworkPolicy
from prefect_gpu.frameworks.environment import child_environment
from prefect_gpu.frameworks.host_memory import host_bytes_of
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.inside import Allocation
from prefect_gpu.overshoot import BudgetWatch, Overshoot
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes import values
from prefect_gpu.processes.interpreter import count_cores, import_paths, working_folder
from prefect_gpu.processes.kind import OWN_MODULES
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
from prefect_gpu.processes.spec import (
    ChildExited,
    ChildHandle,
    ChildRefused,
    ChildStarted,
    Launcher,
    LaunchSpec,
    ValueArrived,
)
from prefect_gpu.processes.transport import Contents, Parcel
from prefect_gpu.record import ProcessRecord, TaskFacts
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.simulated_child import SimulatedChild

#: Seconds between two readings of a framework's counters in the child. The reading takes
#: microseconds and did not change a step of 27 ms even every 5 ms (measured, PyTorch on an H200).
COUNTERS_INTERVAL_S = 0.1


class CancelledByRunner(BaseException):
    """The runner ends this task: its flow failed or was cancelled."""

    def __str__(self) -> str:
        return "the flow ended first; the process of this GPU task was killed"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an attempt needs of whoever runs it, as functions. Called on the engine's thread.

    `on_report` alone is called on the broker's.
    """

    #: Pickles the call. Called once a device is had, so that arguments of waiting tasks are not
    #: held twice.
    dump_call: Callable[[], Parcel]
    #: Variables for the child.
    environment: Callable[[], Mapping[str, str | None]]
    #: Told what the task waits for.
    on_waiting: Callable[[str], None]
    #: Told that the body begins.
    on_running: Callable[[], None]
    on_log: Callable[[dict[str, Any]], None]
    on_event: Callable[[str], None]
    #: Told where it was placed.
    on_placed: Callable[[Placement], None]
    #: Logs a warning on the task run.
    tell: Callable[[str], None]
    #: Given the report of the process, on a thread that must not be held up; `None`: none could be
    #: made.
    on_report: Callable[[TaskReport | None], None]


class Attempt:
    """One process of one task run.

    Args:
        facts: Which task run.
        policy: What its tags ask for.
        grant: What it gets of its devices.
        number: From 1: which process of the task run this is.
        sequence: Place of the task in the order of arrival: a retry does not go to the end.
        timeout_s: Seconds that the body may run; `None`: any.
        detected: Frameworks that the task was found to use, where tags name none.
        sharing: Those of them that its own code uses: they share the budget.
        broker: Hands out devices.
        launcher: Starts processes.
        meter: Knows or measures contexts.
        surroundings: What it needs of whoever runs it.
        hot: Kind of the hot standbys that suit it; `None`: none does.
    """

    def __init__(
        self,
        facts: TaskFacts,
        policy: GPUPolicy,
        grant: Grant,
        number: int,
        sequence: int,
        timeout_s: float | None,
        detected: tuple[str, ...],
        sharing: tuple[str, ...],
        broker: Broker,
        launcher: Launcher,
        meter: ContextMeter,
        surroundings: Surroundings,
        hot: Hashable = None,
    ) -> None:
        self._facts = facts
        self._policy = policy
        self._grant = grant
        self._number = number
        self._sequence = sequence
        self._timeout_s = timeout_s
        self._named = tuple(share.name for share in policy.frameworks)
        self._frameworks = tuple(n for n in self._named or detected if n != "none")
        self._sharing = sharing
        self._broker = broker
        self._launcher = launcher
        self._meter = meter
        self._surroundings = surroundings
        self._hot = hot
        self._messages: queues.SimpleQueue[Any] = queues.SimpleQueue()
        self._ticket: Ticket | None = None
        #: What its frameworks may do with the budget; known once it was placed.
        self._allocation: AllocationMode = "growth"
        #: `None`: its devices are real, or it was not placed yet.
        self._simulated: SimulatedChild | None = None
        self._kills_before = 0
        #: `None`: there is no budget to keep to.
        self._watch: BudgetWatch | None = None
        self._cancelled = threading.Event()
        self._handle: ChildHandle | None = None
        self._launched = threading.Event()
        #: Once it was placed.
        self._record: ProcessRecord | None = None
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
            # The engine's thread has gone on; the process may linger at its exit.
            handle.kill()

    @property
    def ticket(self) -> Ticket | None:
        """Its request for devices; `None`: it has not asked yet."""
        return self._ticket

    @property
    def has_process(self) -> bool:
        """Whether there was a process: only then is there a report."""
        return self._record is not None and self._record.pid is not None

    @property
    def whole_device(self) -> bool:
        """Whether it was given all that its devices had free."""
        ticket = self._ticket
        if ticket is None or ticket.placement is None:
            return False
        return any(ticket.request.need_bytes(d) is None for d in ticket.placement.devices)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """What the child saw when device memory ran out; `None`: it did not, or nobody knows."""
        return None if self._record is None else self._record.out_of_memory

    @property
    def cap_bytes(self) -> int | None:
        """Bytes that its frameworks could allocate on each device; `None`: no cap."""
        return None if self._record is None else self._record.cap_bytes

    @property
    def context_bytes(self) -> int:
        """Bytes of the budget that were left for what no framework counts."""
        return 0 if self._record is None else self._record.context_bytes

    def run(self) -> Any:
        """Run the body in a process of its own.

        Returns:
            What the body returned.

        Raises:
            PlacementError: No device can hold it, or none was had in time.
            ChildDiedError: The process ended without an answer.
            ChildTimeoutError: The body ran too long.
            BudgetExceededError: It took more than its budget, and `gpu:enforce=kill` says to end it.
            ResultError: The call or the value cannot travel.
            CancelledByRunner: `cancel` was called.
            BaseException: What the body raised.
        """
        try:
            placement = self._place()
        except BaseException:
            self.finished.set()
            raise
        try:
            # No name for the spec: the launcher lets go of the call once the child has it.
            self._handle = self._launcher.start(self._prepare(placement), self._hear)
            self._launched.set()
            return self._follow()
        except BaseException as error:
            self._learned.error = self._learned.error or _first_line(error)
            if self._handle is not None:
                if self._learned.ended_s is None:
                    self._handle.kill()
            else:
                # No process came of it.
                self._learned.outcome = "cancelled" if self._cancelled.is_set() else "failed"
                self._end()
            raise

    @property
    def _learned(self) -> ProcessRecord:
        assert self._record is not None, "it was placed"
        return self._record

    # Before there is a process.

    def _place(self) -> Placement:
        policy = self._policy
        self._ticket = ticket = self._broker.submit(
            self._facts.task_name,
            memory=self._grant.memory,
            count=policy.count,
            devices=policy.devices,
            exclusive=policy.exclusive,
            priority=policy.priority,
            # On host devices the budget is the machine's memory: it would be counted twice.
            host_bytes=0 if self._broker.kind == "host" else host_bytes_of(self._frameworks),
            expected_s=self._grant.expected_s,
            sequence=self._sequence,
            standby=self._hot,
        )
        ticket.on_recovered = self._finish
        if self._cancelled.is_set():
            self._broker.withdraw(ticket)
        try:
            placement = self._broker.wait(
                ticket,
                policy.wait_s,
                self._surroundings.on_waiting,
                waited_s=self._grant.waited_s,
            )
        except Withdrawn:
            raise CancelledByRunner from None
        self._record = ProcessRecord(
            placement, ticket.placed_s, ticket.placed_s - ticket.request.submitted_s
        )
        self._allocation = self._choose_allocation()
        if isinstance(self._broker.reader, SimulatedReader):
            self._simulated = SimulatedChild(
                self._broker.reader, placement, capped=self._allocation != "growth"
            )
        if self._broker.kind != "host":
            self._watch = BudgetWatch(placement, states_memory=policy.memory is not None)
        self._kills_before = kernel_kills().read()
        ticket.on_measured = self._take_measurement
        self._surroundings.on_placed(placement)
        return placement

    def _choose_allocation(self) -> AllocationMode:
        """Say what frameworks do with the budget: they are held to one that is known."""
        policy = self._policy
        if "allocation" in policy.stated or not policy.caching:
            return policy.allocation
        return "growth" if self.whole_device else "limit"

    def _prepare(self, placement: Placement) -> LaunchSpec:
        policy = self._policy
        assert self._ticket is not None
        framework_policy = FrameworkPolicy(
            device_kind=self._broker.kind,
            device_uuids=tuple(device.uuid for device in placement.devices),
            total_bytes=tuple(device.total_bytes for device in placement.devices),
            budget_bytes=placement.budget_bytes,
            allocation=self._allocation,
            allocator_options=dict(policy.allocator_options),
            caching=policy.caching,
            cpus=policy.cpus or max(1, count_cores() // max(1, self._broker.processes)),
            cpus_stated=policy.cpus is not None,
            frameworks=self._named,
            detected=self._sharing,
            shares={s.name: s.fraction for s in policy.frameworks if s.fraction is not None},
        )
        learned = self._grant.contexts.get(placement.devices[0].name)
        contexts = self._meter.contexts_of_task(
            self._frameworks,
            learned,
            placement.devices[0],
            framework_policy,
            self._broker,
            self._ticket,
        )
        framework_policy = replace(framework_policy, context_bytes=contexts)
        if self._cancelled.is_set():
            raise CancelledByRunner
        self._learned.known_contexts = contexts
        self._learned.context_bytes = (
            learned
            if learned and contexts
            else max((contexts.get(name, 0) for name in self._frameworks), default=0)
        )
        cap = self._cap(framework_policy)
        self._learned.cap_bytes = min(cap) if cap else None
        if self._simulated is not None:
            self._learned.context_bytes = self._simulated.context_bytes
        allocation = Allocation(
            budget_bytes=min(placement.budget_bytes),
            cap_bytes=min(cap) if cap else None,
            attempt=self._number,
            device_uuids=framework_policy.device_uuids,
            frameworks=self._frameworks,
            exclusive=any(r.exclusive for r in placement.reservations),
        )
        environment = {
            **child_environment(
                framework_policy, registry.adapters_for(framework_policy), os.environ
            ),
            **self._surroundings.environment(),
        }
        return LaunchSpec(
            task_name=self._facts.task_name,
            environment=environment,
            prepare=Prepare(
                framework_policy, allocation, COUNTERS_INTERVAL_S, libraries=OWN_MODULES
            ),
            call=self._surroundings.dump_call(),
            cwd=working_folder(),
            argv=tuple(sys.argv),
            sys_path=import_paths(),
            standby="" if self._ticket.standby is None else self._ticket.standby.id,
        )

    def _cap(self, policy: FrameworkPolicy) -> tuple[int, ...] | None:
        """Bytes that this child's allocations may take on each device; `None`: no cap."""
        if self._simulated is not None:
            return self._simulated.cap_bytes
        # Where none was found, whichever turns up is held to one of these.
        names = self._frameworks or tuple(registry.ADAPTERS)
        caps = [cap for name in names if (cap := policy.cap_bytes(name)) is not None]
        return min(caps) if caps else None

    # While there is one.

    def _hear(self, message: Any) -> None:
        """Take a message of the child, on the launcher's thread."""
        # What is learned is taken down here, in order: the engine's thread may have gone on with the
        # value, and the broker's may ask for the report, before the process is gone.
        if isinstance(message, ChildStarted):
            self._attach(message.pid)
        elif isinstance(message, BodyStarted):
            self._learned.started_s = time.monotonic()
            if self._ticket is not None:
                self._ticket.running = True
        elif isinstance(message, CountersRead):
            self._take_counters(message.counters, message.frameworks)
            self._learned.add_steps(message.steps, message.marks)
        elif isinstance(message, Asked):
            self._answer(message)
        elif isinstance(message, BodyEnded):
            self._learned.add_end(message)
        elif isinstance(message, ValueArrived):
            self._learned.add_value()
            # Once more while it still holds what it used.
            self._broker.refresh()
            if self._cancelled.is_set() and self._handle is not None:
                # Nobody waits for the value, nor for a process that lingers at its exit.
                self._handle.kill()
        elif isinstance(message, ChildExited):
            if self._learned.outcome == "died":
                self._learned.error = describe_exit(message.code)
                self._learned.cause = kill_cause(message, self._kills_before)
            self._end()
        self._messages.put(message)

    def _follow(self) -> Any:
        """Hear the child to its end, or to its value."""
        ended: BodyEnded | None = None
        reason: BaseException | None = None
        deadline: float | None = None
        while True:
            message = self._next(deadline)
            if isinstance(message, _TimeUp):
                assert self._timeout_s is not None
                self._learned.outcome = "timeout"
                reason = ChildTimeoutError(self._facts.task_name, self._timeout_s)
                deadline = None
                self._kill()
            elif message is None:
                self._learned.outcome = "cancelled"
                reason = CancelledByRunner()
                deadline = None
                self._kill()
            elif isinstance(message, Overshoot):
                reason = self._take_overshoot(message) or reason
            elif isinstance(message, BodyStarted):
                self._surroundings.on_running()
                started_s = self._learned.started_s
                if self._timeout_s is not None and started_s is not None:
                    deadline = started_s + self._timeout_s
            elif isinstance(message, BodyEnded):
                ended = message
                deadline = None
            elif isinstance(message, ValueArrived) and ended is not None and reason is None:
                # The value is kept whatever becomes of the process; it ends by itself.
                return self._open_value(ended, message.data)
            elif isinstance(message, ChildRefused):
                self._learned.outcome = "failed"
                reason = message.error
                if not isinstance(message.error, ProtocolError):
                    self._end()
                    raise message.error
            elif isinstance(message, ChildExited):
                raise reason or death_by_exit(self._facts.task_name, message, self._learned)
            elif isinstance(message, LogEmitted):
                self._surroundings.on_log(message.log)
            elif isinstance(message, EventEmitted):
                self._surroundings.on_event(message.event)

    def _take_overshoot(self, over: Overshoot) -> BudgetExceededError | None:
        error = BudgetExceededError(self._facts.task_name, over.budget_bytes, over.seen_bytes)
        if self._policy.enforce != "kill":
            self._surroundings.tell(f"{error}; gpu:enforce=kill would end it")
            return None
        self._learned.outcome = "oom"
        self._learned.out_of_memory = OutOfMemory(
            "", wanted_bytes=0, process_bytes=over.seen_bytes, says_own_cap=True
        )
        return error

    def _next(self, deadline: float | None) -> Any:
        if deadline is None:
            return self._messages.get()
        try:
            return self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
        except queues.Empty:
            return _TimeUp()

    def _kill(self) -> None:
        assert self._handle is not None
        self._handle.kill()

    def _attach(self, pid: int) -> None:
        self._learned.pid = pid
        assert self._ticket is not None
        self._broker.attach(self._ticket, pid)
        if self._simulated is not None:
            self._simulated.attach(pid)

    def _answer(self, question: Asked) -> None:
        try:
            if self._simulated is None:
                raise ProtocolError(
                    f"{question.method} is for simulated devices; these are {self._broker.kind}"
                )
            result = self._simulated.answer(question)
        except Exception as error:  # noqa: BLE001 - process boundary: the child raises it
            answer = Answered(error=error)
        else:
            answer = Answered(result=result)
        # `start` returns before the child can have asked anything, but for one turn of a thread.
        self._launched.wait()
        assert self._handle is not None
        self._handle.answer(answer)

    # What it learns.

    def _take_measurement(self, at_s: float, sizes_bytes: tuple[int, ...]) -> None:
        """Take a reading of the process's devices, on the broker's thread."""
        live = None if self._simulated is None else self._simulated.live_bytes()
        self._learned.add_reading(at_s, sum(sizes_bytes), live)
        over = None if self._watch is None else self._watch.look(sizes_bytes)
        if over is not None:
            if self._policy.enforce == "kill" and self._handle is not None:
                self._handle.kill()
            self._messages.put(over)

    def _take_counters(self, counters: Counters, frameworks: tuple[str, ...]) -> None:
        self._learned.add_counters(counters, frameworks)
        if self._ticket is not None and counters.reserved_bytes is not None:
            self._ticket.stand_in_bytes = counters.reserved_bytes + self._learned.context_bytes

    def _open_value(self, ended: BodyEnded, data: Contents) -> Any:
        try:
            value = values.loads(data, "exception" if ended.raised else "return value")
        except Exception as problem:
            self._learned.outcome, self._learned.error = "failed", _first_line(problem)
            raise
        if not ended.raised:
            return value
        error = value
        if not isinstance(error, BaseException):
            raise ProtocolError(f"a child announced an exception and sent {error!r}")
        if not isinstance(error, Exception):
            # SystemExit and its like are meant for the process, which ends by them. In the parent
            # they would end the flow.
            self._learned.outcome = "died"
            raise death_by_exception(self._facts.task_name, error, ended.traceback, self._learned)
        if ended.traceback:
            error.__cause__ = ChildTraceback(ended.traceback)
        raise error

    # After it.

    def _end(self) -> None:
        """The process is gone, or never came: have its memory waited for."""
        assert self._ticket is not None
        if self._simulated is not None and self._learned.pid is not None:
            live, devices = self._simulated.detach()
            self._learned.add_peaks(live, live + self._learned.context_bytes * devices)
        self._broker.end(self._ticket)

    def _finish(self, leaked_bytes: int | None) -> None:
        """Nothing of it is left: hand on the report, on the broker's thread."""
        try:
            if self._learned.pid is not None:
                assert self._ticket is not None
                if self._learned.ended_s is None:
                    self._learned.ended_s = self._ticket.ended_s
                report: TaskReport | None = None
                try:
                    report = self._learned.report(
                        self._facts,
                        self._broker.kind,
                        self._number,
                        self._grant.source,
                        tuple(name for name in self._named if name != "none"),
                        leaked_bytes,
                    )
                finally:
                    self._surroundings.on_report(report)
        finally:
            self.finished.set()


class _TimeUp:
    """Stands for a message that did not come in time."""


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    if isinstance(error, PrefectGPUError):
        return text
    return f"{name}: {text}" if text else name
