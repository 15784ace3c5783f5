"""One process of one task run, from its request for a device to its report.

`Attempt.place` waits for a device. `Attempt.run` starts the child process, reads the messages to the engine's thread,
and carries out the actions of `process_run`. `Attempt.hear` receives the child's messages. The report is made once the
engine's thread is done and the device shows the memory as free. `scheduling` chooses devices, `process_run` the next
step.
"""

from __future__ import annotations

import os
import queue as queues
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from typing_extensions import assert_never

from prefect_gpu import values
from prefect_gpu.broker.broker import Broker, Ticket, Withdrawn
from prefect_gpu.broker.ticket import Measured
from prefect_gpu.devices.host import read_oom_kills
from prefect_gpu.devices.reader import ProcessMemory
from prefect_gpu.engine.direct_calls import is_first_warning
from prefect_gpu.engine.task_engine import CancelledByRunner, ChildTraceback
from prefect_gpu.engine.task_run import apply_changes
from prefect_gpu.errors import BudgetExceededError, PrefectGPUError, ProtocolError
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import AllocationMode, FrameworkPolicy, child_environment
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.in_task import Allocation
from prefect_gpu.live.progress import RunningTask
from prefect_gpu.live.table import device_label
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes import launch_spec, messages, mps
from prefect_gpu.processes.interpreter import import_paths, working_folder
from prefect_gpu.processes.standby_kind import OWN_MODULES
from prefect_gpu.reports.events import ended_events, placed_event
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.reports.model import BudgetSource, TaskReport, Verdict
from prefect_gpu.runner import process_run
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.context_size import context_meter
from prefect_gpu.runner.process_record import ProcessRecord
from prefect_gpu.runner.process_run import Ended, Shortage
from prefect_gpu.runner.run_log import conclude, ended_line, first_line, in_one_line, placed_line
from prefect_gpu.runner.suspender import Suspender, lost_tasks
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling.ladder import Cause, Evidence
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.scheduling.reasons import Reason
from prefect_gpu.suspension.eligibility import MOVED_KINDS
from prefect_gpu.values.registrations import find_registered
from prefect_gpu.values.transport import ReceivedValue

#: Seconds between two readings of a framework's counters in the child. A reading takes microseconds, and did not slow
#: a step of 27 ms even every 5 ms (measured, PyTorch on an H200).
COUNTERS_INTERVAL_S = 0.1

#: Questions of a child process, answered on the engine's thread: they may be about its flow run, and pickling a
#: module's attribute may take long.
_ANSWERED_BY_ENGINE: Final[Mapping[str, Callable[..., Any]]] = {
    "attribute": values.attribute,
    "is_first_warning": is_first_warning,
}


class Attempt:
    """Process number `number` (from 1) of one task run, which wants devices since `asked_s` (monotonic seconds).

    For the engine's thread, unless a method says otherwise.
    """

    def __init__(
        self,
        call: TaskCall,
        grant: Grant,
        asked_s: float,
        number: int,
        broker: Broker,
        launcher: launch_spec.Launcher,
        mps_pipes: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.call = call
        self._plan = call.plan
        self._policy = call.plan.policy
        self._run = call.run
        self._grant = grant
        self._asked_s = asked_s
        self._number = number
        self.broker = broker
        self._launcher = launcher
        self._mps_pipes = mps_pipes
        #: Folder of the MPS daemon of which the process is a client. Empty: it is no client. `None`: the runner does not use MPS.
        self._pipes: str | None = None
        self._inbox: queues.SimpleQueue[process_run.RunMessage] = queues.SimpleQueue()
        #: Puts a message into the inbox of the engine's thread.
        self.tell = self._inbox.put
        self._ticket: Ticket | None = None
        #: How the frameworks use the budget; chosen at the placement.
        self._allocation: AllocationMode = "growth"
        self._cancelled = threading.Event()
        #: Whether the process was placed as a probe that shares its devices. After a suspension its cap is its budget.
        self.shares = False
        # Set by the placement.
        self._record: ProcessRecord | None = None
        self._memory = ProcessMemory(broker.kind)
        self._kills_before = 0
        #: Set once a process was started on this machine.
        self.suspender: Suspender | None = None
        self._handle: launch_spec.ChildHandle | None = None
        self._launched = threading.Event()
        #: Set by the engine's thread alone, and not after `close`.
        self._verdict = Verdict("died")
        #: Guards the attributes below.
        self._lock = threading.Lock()
        #: Receives the report; `None`: the engine's thread is not done, or the report was passed on.
        self._take_report: Callable[[TaskReport | None], None] | None = None
        #: Whether the process has ended and its device memory was recovered.
        self._gone = False
        self._leaked_bytes: int | None = None
        #: Set once `_gone` is true and the report was passed on.
        self.finished = threading.Event()

    def cancel(self) -> None:
        """End the process in any state, from any thread; `place` then raises `CancelledByRunner`."""
        self._cancelled.set()
        if self._ticket is not None:
            self.broker.withdraw(self._ticket)
        self.tell(process_run.Cancelled())
        self._kill_lingering()

    @property
    def ticket(self) -> Ticket:
        """The request, once it was made."""
        assert self._ticket is not None, "it was submitted"
        return self._ticket

    @property
    def record(self) -> ProcessRecord:
        """The facts about the process, once it was placed."""
        assert self._record is not None, "it was placed"
        return self._record

    @property
    def is_client(self) -> bool | None:
        """Whether the process is a client of MPS; `None`: MPS is not used here."""
        return None if self._pipes is None else bool(self._pipes)

    @property
    def whole_device(self) -> bool:
        """Whether the process was given all free memory of its devices."""
        ticket = self._ticket
        if self.shares or ticket is None:
            return False
        return any(ticket.request.need_bytes(device) is None for device in ticket.devices)

    @property
    def has_devices(self) -> bool:
        """Whether the process has its devices now and is not suspended. From any thread."""
        has_them = self._record is not None and self.ticket.ended_s is None
        return has_them and self._away_s is None

    @property
    def _away_s(self) -> float | None:
        """Seconds since the process was suspended; `None`: not suspended."""
        return None if self.suspender is None else self.suspender.away_s

    def running(self) -> RunningTask | None:
        """Return the process's row in the live view; `None`: it has no devices now. From any thread."""
        record = self._record
        if record is None or not self.has_devices:
            return None
        ticket = self.ticket
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
        """Return the seconds since the request or suspension, and the reason for the wait. From any thread."""
        ticket, away_s = self._ticket, self._away_s
        if away_s is not None:
            return away_s, self._run.awaits
        if ticket is None:
            return 0.0, None
        return time.monotonic() - ticket.request.submitted_s, self.broker.explain(ticket)

    def evidence(self) -> Evidence | None:
        """Return the facts about the process's out-of-memory; `None`: there was none, or nothing is known."""
        record = self._record
        if record is None or record.out_of_memory is None:
            return None
        seen, ticket, placement = record.out_of_memory, self.ticket, self.ticket.placement
        assert placement is not None, "it was placed"
        return Evidence(
            budget_bytes=min(placement.budget_bytes),
            cap_bytes=record.cap_bytes,
            context_bytes=record.context_bytes,
            wanted_bytes=seen.wanted_bytes,
            held_bytes=seen.held_bytes,
            process_bytes=seen.process_bytes,
            free_bytes=seen.free_bytes,
            foreign_growth_bytes=self.broker.foreign_growth_bytes(ticket),
            says_own_cap=seen.says_own_cap,
            limited=bool(self._pipes) and not self.whole_device,
            alone=any(r.exclusive for r in placement.reservations),
            shared_probe=self.shares,
        )

    # Before the process is started.

    def place(self) -> Placement:
        """Wait for the process's devices, and return their placement.

        Raises:
            PlacementError: No device is large enough, or none was free in time.
            CancelledByRunner: `cancel` was called.
            NeedLearned: Another run has shown the task's need, so that a new request is to be made.
        """
        try:
            return self._place()
        except BaseException:
            # No process was started. A reservation made before the error is released.
            self._gone = True
            if self._ticket is not None:
                self.broker.end(self._ticket)
            raise

    def _place(self) -> Placement:
        policy = self._policy
        self._pipes = self._find_daemon()
        request = Request(
            id="",
            task_name=self._plan.task_name,
            sequence=self._plan.sequence,
            submitted_s=self._asked_s,
            memory=self._grant.memory,
            count=policy.count,
            devices=policy.devices,
            exclusive=policy.exclusive,
            priority=policy.priority,
            # On host devices the budget is the machine's memory: do not count it twice.
            host_bytes=0 if self.broker.kind == "host" else self._plan.host_bytes,
            expected_s=self._grant.expected_s,
            # Clients of MPS compute at the same time.
            fills=self._grant.fills and not self._pipes,
            nodes=policy.nodes,
            standby=self.call.standby,
            task_run_id=str(self._run.task_run.id),
            task_run_name=clean_name(self._run.task_run.name),
            flow_run_id=str(self._run.task_run.flow_run_id or ""),
            probe_fraction=self._grant.probe_fraction,
            preemptible=policy.preemptible and self._can_be_suspended(),
            client=bool(self._pipes),
        )
        self._ticket = ticket = self.broker.submit(
            request, self._grant.histories, self._grant.as_of
        )
        ticket.on_recovered = self._take_recovery
        if self._cancelled.is_set():
            self.broker.withdraw(ticket)
        try:
            placement = self.broker.wait(ticket, policy.wait_s, self._run.show_awaiting)
        except Withdrawn:
            raise CancelledByRunner from None
        self.shares = any(reservation.probe for reservation in placement.reservations)
        queued_s = ticket.placed_s - ticket.request.submitted_s
        self._run.show_placed(
            placed_line(placement, self._grant, self.call.identity, self.whole_device, queued_s)
        )
        self._run.emit(placed_event(placement, self._source(), self._number, queued_s))
        # A process alone on its device, without stated memory, has no budget to keep to.
        alone = any(reservation.exclusive for reservation in placement.reservations)
        self._record = ProcessRecord(
            placement,
            ticket.placed_s,
            queued_s,
            watched=self.broker.kind != "host" and (policy.memory is not None or not alone),
        )
        # A known budget is the frameworks' cap.
        self._allocation = "growth" if self.whole_device else "limit"
        if "allocation" in policy.stated or not policy.caching:
            self._allocation = policy.allocation
        # The daemon may have been killed while the request waited.
        self._pipes = self._find_daemon()
        self._record.is_client = bool(self._pipes)
        self._memory = self.broker.reader.process_memory(
            tuple(device.uuid for device in placement.devices),
            None if self._allocation == "growth" else placement.budget_bytes,
        )
        self._kills_before = read_oom_kills()
        ticket.on_measured = self._take_measurement
        if self.shares:
            ticket.on_short = lambda device: self.tell(process_run.EndedForOthers(device.label))
            # On a cluster the node would have to agree, and a node does not know first runs.
            local = not self.broker.reader.remote and not self._pipes
            ticket.may_leave = local and policy.count == 1 and self.broker.kind in MOVED_KINDS
        return placement

    def _can_be_suspended(self) -> bool:
        """Return whether `gpu:preemptible` has an effect on the runner's kind of devices; if not, warn once."""
        kind = self.broker.kind
        warned = PROCESS_RESOURCES.get("kinds that are not suspended", set[str])
        if kind not in MOVED_KINDS and kind not in warned:
            warned.add(kind)
            why = f"devices of kind {kind} are not suspended"
            self._run.warn(f"gpu:preemptible has no effect: {why}")
        return kind in MOVED_KINDS

    def _source(self) -> BudgetSource:
        """Return the source of the budget. A task whose need is known on one device model may probe on another."""
        return "probe" if self.shares else self._grant.source_on(self._model())

    def _model(self) -> str:
        return self.ticket.devices[0].name

    def _prepare(self) -> launch_spec.LaunchSpec:
        ticket, placement, memory = self.ticket, self.ticket.placement, self._memory
        assert placement is not None, "it was placed"
        folder, file = self._plan.snapshots, f"{self._run.task_run.id}-{self._number}.pickle"
        policy = replace(
            self._plan.framework_policy(self.broker.kind, self.broker.processes),
            device_uuids=tuple(device.uuid for device in placement.devices),
            total_bytes=tuple(device.total_bytes for device in placement.devices),
            budget_bytes=placement.budget_bytes,
            allocation=self._allocation,
            on_demand=self.shares,
            snapshot_path="" if folder is None else str(folder / file),
        )
        frameworks = self._plan.frameworks
        learned = self._grant.contexts.get(placement.devices[0].name)
        contexts: Mapping[str, int] = {}
        if self.broker.kind == "nvml":
            # Other devices have no contexts.
            elsewhere = self._launcher if self.broker.reader.remote else None
            contexts = context_meter(elsewhere).contexts(
                frameworks, learned, policy, self.broker, ticket, self._cancelled.is_set
            )
        policy = replace(policy, context_bytes=contexts)
        if self._cancelled.is_set():
            raise CancelledByRunner
        context = memory.context_bytes
        if context is None:
            context = learned if learned and contexts else 0
            context = context or max((contexts.get(name, 0) for name in frameworks), default=0)
        caps = memory.cap_bytes or _caps(frameworks, policy)
        cap = min(caps) if caps else None
        # Nothing enforces a probe's cap on the host, but its report shows one.
        noted = min(placement.budget_bytes) if cap is None and self.shares else cap
        self.record.set_caps(noted, context, contexts)
        allocation = Allocation(
            budget_bytes=min(placement.budget_bytes),
            cap_bytes=cap,
            attempt=self._number,
            device_uuids=policy.device_uuids,
            frameworks=frameworks,
            exclusive=any(r.exclusive for r in placement.reservations),
            shared_with=tuple(ticket.neighbours),
            requests=(*ticket.request.ancestors, ticket.request.id),
        )
        environment = {
            **child_environment(policy, registry.adapters_for(policy), os.environ),
            **self._mps_environment(placement),
            **self._run.environment_for_child(),
        }
        return launch_spec.LaunchSpec(
            task_name=self._plan.task_name,
            environment=environment,
            prepare=messages.Prepare(
                policy,
                allocation,
                COUNTERS_INTERVAL_S,
                libraries=OWN_MODULES if self._plan.with_prefect else (),
                private_modules=values.private_modules(),
                users_modules=values.users_modules(),
                registered=find_registered(),
            ),
            # Packed after the placement: waiting tasks do not hold their arguments twice.
            call=self.call.pack(),
            cwd=working_folder(),
            argv=tuple(sys.argv),
            sys_path=import_paths(),
            placement=placement,
            request=ticket.request,
        )

    def _find_daemon(self) -> str | None:
        """Return the value of `_pipes`; starts the daemon if it does not run."""
        policy, pipes = self._policy, self._mps_pipes()
        # The driver does not suspend clients, and a limit of memory for several devices was not tried.
        alone_by_tag = policy.exclusive or policy.preemptible or policy.count > 1
        outside = pipes is not None and (alone_by_tag or self._grant.outside_mps)
        return "" if outside else pipes

    def _mps_environment(self, placement: Placement) -> dict[str, str | None]:
        if self._pipes is None:
            return {}
        if not self._pipes:
            return mps.outside_environment()
        budget = None if self.whole_device else min(placement.budget_bytes)
        return mps.client_environment(self._pipes, budget, self._policy.compute)

    def neighbours_at_fault(self, ended: Ended) -> tuple[str, ...] | None:
        """Return the tasks beside a client of MPS that ended with a CUDA fault; `None`: it was no client, or no fault."""
        if not self._pipes or self._ticket is None:
            return None
        # The process notes how its context ended.
        notes = getattr(ended.error, "__notes__", ())
        texts = [f"{type(ended.error).__name__}: {ended.error}", *map(str, notes)]
        if isinstance(ended.outcome, process_run.Died):
            texts.append(ended.outcome.exited.stderr_tail)
        return tuple(self._ticket.neighbours) if any(map(mps.is_fault, texts)) else None

    # While the process runs.

    def run(self) -> process_run.Done | Ended:
        """Run the body in a process on the devices from `place`; return its end. Raise errors of the preparation."""
        try:
            # No local variable for the spec: the launcher releases the call once the child has it.
            self._handle = self._launcher.start(self._prepare(), self.hear)
            self._launched.set()
            outcome = self._follow()
        except BaseException as raised:
            self._verdict = Verdict("died", first_line(raised))
            self._abandon()
            raise
        if isinstance(outcome, process_run.Done):
            self._verdict = Verdict("completed")
            return outcome
        # On a cluster a process without any message may still be running.
        self._abandon()
        error, self._verdict = conclude(outcome, self._plan, self.record)
        match outcome:
            case process_run.Died(exited) if exited.stderr_tail:
                tail = exited.stderr_tail
                self._run.note(f"The process died; end of its standard error:\n{tail}")
            case process_run.OutOfMemory(BudgetExceededError() as over, None):
                self.record.out_of_memory = OutOfMemory(
                    "", wanted_bytes=0, process_bytes=over.seen_bytes, says_own_cap=True
                )
        return Ended(outcome, error, in_one_line(error))

    def _follow(self) -> process_run.Outcome:
        """Handle messages of the inbox until the outcome of the process is known; return the outcome."""
        run = process_run.ProcessRun(self._plan.timeout_s, self._policy.enforce == "kill")
        deadline_s: float | None = None
        while True:
            for action in run.handle(self._next(deadline_s)):
                match action:
                    case process_run.Finish(outcome):
                        return outcome
                    case process_run.SetDeadline(deadline_s):
                        pass
                    case process_run.OpenValue(ended, data):
                        return self._open(ended, data)
                    case process_run.Kill(bars_moves):
                        if bars_moves:
                            lost_tasks().add(self._plan.task_key)
                        self._kill()
                    case process_run.ShowRunning():
                        self._run.show_running()
                    case process_run.ShowAwaiting(reason):
                        self._run.show_awaiting(reason)
                    case process_run.Warn(text):
                        self._run.warn(text)
                    case messages.Asked():
                        self.send(action.answer(_ANSWERED_BY_ENGINE[action.method]))
                    case messages.LogEmitted(log):
                        self._run.forward_log(log)
                    case messages.EventEmitted(event):
                        self._run.forward_event(event)
                    case _:
                        assert_never(action)

    def _next(self, deadline_s: float | None) -> process_run.RunMessage:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            return self._inbox.get(timeout=left_s)
        except queues.Empty:
            return process_run.TimedOut()

    def _open(self, ended: messages.BodyEnded, data: ReceivedValue) -> process_run.Outcome:
        try:
            value = values.loads(data, "exception" if ended.raised else "return value")
            if ended.changes is not None:
                apply_changes(values.loads(ended.changes, "transaction"))
        except Exception as problem:  # noqa: BLE001 - process boundary: the task run raises it
            if ended.traceback:
                problem.__cause__ = ChildTraceback(ended.traceback)
            return process_run.Failed(problem)
        return process_run.outcome_of(ended, value)

    def _kill(self) -> None:
        assert self._handle is not None, "it was started"
        self._handle.kill()

    def _abandon(self) -> None:
        """Kill the process unless its body has ended; if no process was started, release the devices."""
        if self._handle is None:
            self._release()
        elif self.record.ended_s is None:
            self._kill()

    def _kill_lingering(self) -> None:
        """Kill a cancelled process that has sent its value, also to the engine's thread: it may hang at its exit."""
        arrived = self._record is not None and self._record.value_arrived
        if arrived and self._cancelled.is_set() and self._handle is not None:
            self._kill()

    # The launcher's thread. Facts are passed on as they come: the engine's thread may return the value before the process
    # has ended. Messages that decide the outcome go to the engine's thread.

    def hear(self, message: launch_spec.Heard) -> None:
        """Handle a message of the child process, or a launcher's message about the process."""
        remote = self.broker.reader.remote
        match message:
            case launch_spec.ChildStarted(pid):
                self._attach(pid)
            # On a cluster no `ChildExited` follows; the node kills the process.
            case launch_spec.ChildRefused(ProtocolError() as error) if not remote:
                self.tell(process_run.Failed(error))
            case launch_spec.ChildRefused():
                self._release()
                self.tell(message)
            case messages.BodyStarted():
                began_s = self.record.started_s = time.monotonic()
                self.broker.mark_running(self.ticket)
                self.tell(process_run.BodyBegan(began_s))
            case messages.CountersRead():
                self.record.add_steps(message.steps, message.marks)
                if (counters := message.counters) is not None:
                    self.record.add_counters(counters, message.frameworks)
                    if (held := counters.reserved_bytes) is not None:
                        self.ticket.stand_in_bytes = held + self.record.context_bytes
            case messages.Asked(method) if method not in _ANSWERED_BY_ENGINE:
                self.send(message.answer(lambda **given: self._memory.answer(method, given)))
            case messages.Asked() | messages.LogEmitted() | messages.EventEmitted():
                self.tell(message)
            case messages.BodyEnded():
                self.record.add_end(message)
                self.tell(message)
            case launch_spec.ValueArrived():
                self.record.value_arrived = True
                # A last reading while the process still holds its memory.
                self.broker.refresh()
                self._kill_lingering()
                self.tell(message)
            case launch_spec.ChildExited():
                self._release()
                self.tell(process_run.Died(message, self._kill_cause(message)))
            case messages.ReleasedUnused():
                if self.suspender is not None:
                    self.suspender.released.put(message)
            case messages.Message():
                # Messages of a standby.
                pass
            case _:
                assert_never(message)

    def _attach(self, pid: int) -> None:
        self.record.pid = pid
        ticket = self.ticket
        if not self.broker.reader.remote:
            self.suspender = Suspender(pid, self)
            ticket.on_no_return = self._lose
            ticket.on_held_back = self.suspender.ask
        self.broker.attach(ticket, pid)
        self._memory.attach(pid)

    def send(self, message: messages.Message) -> None:
        """Send a message to the process, or drop the message if the process has ended."""
        # `start` may return a moment after the child's first question.
        self._launched.wait()
        assert self._handle is not None
        self._handle.answer(message)

    def _release(self) -> None:
        """Release the devices at the broker: the process has ended or was never started."""
        if self.suspender is not None:
            self.suspender.end()
        if self.record.pid is not None and (peaks := self._memory.detach()) is not None:
            live, devices = peaks
            self.record.add_peaks(live, live + self.record.context_bytes * devices)
        self.broker.end(self.ticket)

    def _kill_cause(self, exited: launch_spec.ChildExited) -> Cause | None:
        """Return the cause of a SIGKILL that the runner did not send; `None`: no such signal."""
        if exited.code != -signal.SIGKILL or exited.killed_because:
            return None
        return "host" if read_oom_kills() > self._kills_before else "unknown"

    # The broker's thread.

    def _lose(self, error: PrefectGPUError) -> None:
        """End the suspended process: no device is left for it to resume on."""
        self.tell(process_run.Lost(f"it was suspended and cannot come back: {first_line(error)}"))

    def _take_measurement(self, at_s: float, measured: tuple[Measured, ...]) -> None:
        if self.record.pid is None:
            # A last reading of a calibration, which had the ticket before.
            return
        if self.suspender is not None and self.suspender.away:
            # Its memory on the device during a move does not show its need.
            self.record.add_absence(at_s)
            return
        sizes_bytes = tuple(each.total_bytes for each in measured)
        over = self.record.add_reading(at_s, sizes_bytes, self._memory.live_bytes())
        self.record.add_processes([each.by_pid for each in measured])
        if not self.is_client:
            # NVML shows the computing of all clients as the server's.
            self.record.add_work(at_s, [each.work for each in measured])
        if self.suspender is not None:
            self.suspender.take_measurement(at_s, measured)
        if over is not None:
            seen_bytes, budget_bytes = over
            error = BudgetExceededError(self._plan.task_name, budget_bytes, seen_bytes)
            self.tell(process_run.OutOfMemory(error))

    # After the end of the process.

    def _take_recovery(self, leaked_bytes: int | None) -> None:
        """Note that nothing of the process is left, except leaked bytes (`None`: not known). On the broker's thread."""
        with self._lock:
            self._gone, self._leaked_bytes = True, leaked_bytes
        self._hand_on()

    def close(
        self, take_report: Callable[[TaskReport | None], None], shortage: Shortage | None = None
    ) -> None:
        """Note that the engine's thread is done with the process.

        `take_report` is called with the report (`None`: there was no process), now or on the broker's thread once
        nothing of the process is left. `shortage` is its out-of-memory and the next budget; `None`: no out-of-memory.
        """
        if shortage is not None:
            found: dict[str, Any] = {"cause": shortage.cause, "wanted_bytes": shortage.wanted_bytes}
            if (rung := shortage.rung) is not None:
                found |= {"next_words": rung.reason, "next_budget_bytes": rung.budget_bytes}
            self._verdict = replace(self._verdict, **found)
        # Waiting threads may keep the last attempt for a long time.
        self.call = self.call.without_arguments()
        if self._ticket is not None:
            self.broker.returned(self._ticket)
        with self._lock:
            self._take_report = take_report
        self._hand_on()

    def _hand_on(self) -> None:
        """Pass on the report, once: at the later one of `close` and `_take_recovery`."""
        with self._lock:
            if self._take_report is None or not self._gone:
                return
            take_report, self._take_report = self._take_report, None
        report = None
        try:
            if self._record is not None and self._record.pid is not None:
                report = self._record.report(
                    self.call,
                    self.broker.kind,
                    self._number,
                    self._source(),
                    None if self.shares else self._grant.estimated_from.get(self._model()),
                    tuple(name for name in self._plan.named if name != registry.NO_FRAMEWORK),
                    self._verdict,
                    self._leaked_bytes,
                    self.ticket.ended_s,
                    tuple(self.ticket.neighbours),
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


def _caps(frameworks: tuple[str, ...], policy: FrameworkPolicy) -> tuple[int, ...] | None:
    """Return the frameworks' smallest cap in bytes on each device; `None`: no cap."""
    # If no framework was found, any imported one gets the smallest of these caps.
    names = frameworks or tuple(registry.ADAPTERS)
    caps = [cap for name in names if (cap := policy.cap_bytes(name)) is not None]
    return min(caps) if caps else None
