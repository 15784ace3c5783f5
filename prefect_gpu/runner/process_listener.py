"""Receive the messages of one child process and the readings of its devices, on threads other than the engine's.

`ProcessListener` passes facts to the process's record, the broker and a suspension as they come: the engine's thread
may return the value before the process has ended. Messages that decide the outcome go to the engine's thread.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from typing_extensions import assert_never

from prefect_gpu import values
from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.devices.host import read_oom_kills
from prefect_gpu.devices.reader import ProcessMemory
from prefect_gpu.engine.direct_calls import is_first_warning
from prefect_gpu.errors import BudgetExceededError, PrefectGPUError, ProtocolError
from prefect_gpu.processes import launch_spec, messages
from prefect_gpu.runner import process_run
from prefect_gpu.runner.process_record import ProcessRecord
from prefect_gpu.runner.run_log import first_line
from prefect_gpu.runner.suspender import Suspender
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling.ladder import Cause

#: Questions of a child process, answered on the engine's thread: they may be about its flow run, and pickling a
#: module's attribute may take long.
_ANSWERED_BY_ENGINE: Final[Mapping[str, Callable[..., Any]]] = {
    "attribute": values.attribute,
    "is_first_warning": is_first_warning,
}


class ProcessListener:
    """Receives the messages of one placed child process.

    `memory` reads the process's memory on its devices. `tell` puts a message into the inbox of the engine's thread.
    `cancelled` is set when the flow run ends. `is_client`: whether the process is a client of MPS; `None`: MPS is not
    used here.
    """

    def __init__(
        self,
        call: TaskCall,
        broker: Broker,
        ticket: Ticket,
        record: ProcessRecord,
        memory: ProcessMemory,
        tell: Callable[[process_run.RunMessage], None],
        cancelled: threading.Event,
        is_client: bool | None = None,
    ) -> None:
        # Without the arguments, which end with the call.
        self.call = call.without_arguments()
        self.broker, self.ticket, self.record, self.memory = broker, ticket, record, memory
        self.tell = tell
        self.is_client = is_client
        self._cancelled = cancelled
        self._kills_before = read_oom_kills()
        self._handle: launch_spec.ChildHandle | None = None
        self._launched = threading.Event()
        #: Set once there is a process on this machine.
        self.suspender: Suspender | None = None
        ticket.on_measured = self._take_measurement

    # The engine's thread.

    def start(self, launcher: launch_spec.Launcher, spec: launch_spec.LaunchSpec) -> None:
        """Start the child process."""
        self._handle = launcher.start(spec, self.hear)
        self._launched.set()

    def answer_by_engine(self, question: messages.Asked) -> None:
        """Answer a question of the process that was passed on to the engine's thread."""
        self.send(question.answer(_ANSWERED_BY_ENGINE[question.method]))

    def abandon(self) -> None:
        """Kill the process unless its body has ended; if no process was started, release the devices."""
        if self._handle is None:
            self._release()
        elif self.record.ended_s is None:
            self._handle.kill()

    # Any thread.

    @property
    def away_s(self) -> float | None:
        """Seconds since the process was suspended; `None`: it is not suspended."""
        return None if self.suspender is None else self.suspender.away_s

    def kill(self) -> None:
        """Kill the process."""
        assert self._handle is not None
        self._handle.kill()

    def kill_lingering(self) -> None:
        """Kill a cancelled process that has sent its value: it may hang at its exit."""
        if self.record.value_arrived and self._cancelled.is_set() and self._handle is not None:
            self._handle.kill()

    # The launcher's thread.

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
                self._take_counters(message)
            case messages.Asked(method) if method not in _ANSWERED_BY_ENGINE:
                self.send(message.answer(lambda **given: self.memory.answer(method, given)))
            case messages.Asked() | messages.LogEmitted() | messages.EventEmitted():
                self.tell(message)
            case messages.BodyEnded():
                self.record.add_end(message)
                self.tell(message)
            case launch_spec.ValueArrived():
                self.record.value_arrived = True
                # A last reading while the process still holds its memory.
                self.broker.refresh()
                self.kill_lingering()
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
        self.memory.attach(pid)

    def send(self, message: messages.Message) -> None:
        """Send a message to the process, or drop the message if the process has ended."""
        # `start` may return a moment after the child's first question.
        self._launched.wait()
        assert self._handle is not None
        self._handle.answer(message)

    def _take_counters(self, read: messages.CountersRead) -> None:
        self.record.add_steps(read.steps, read.marks)
        if (counters := read.counters) is None:
            return
        self.record.add_counters(counters, read.frameworks)
        if counters.reserved_bytes is not None:
            self.ticket.stand_in_bytes = counters.reserved_bytes + self.record.context_bytes

    def _release(self) -> None:
        """Release the devices at the broker: the process has ended or was never started."""
        if self.suspender is not None:
            self.suspender.end()
        if self.record.pid is not None:
            peaks = self.memory.detach()
            if peaks is not None:
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
        over = self.record.add_reading(at_s, sizes_bytes, self.memory.live_bytes())
        self.record.add_processes([each.by_pid for each in measured])
        if not self.is_client:
            # NVML shows the computing of all clients as the server's.
            self.record.add_work(at_s, [each.work for each in measured])
        if self.suspender is not None:
            self.suspender.take_measurement(at_s, measured)
        if over is not None:
            seen_bytes, budget_bytes = over
            error = BudgetExceededError(self.call.plan.task_name, budget_bytes, seen_bytes)
            self.tell(process_run.OutOfMemory(error))
