"""The task run of an engine's thread: log, events, and states while it waits for a device. Engine: `task_engine`."""

from __future__ import annotations

import logging
from contextvars import Context, ContextVar, copy_context
from typing import Any, cast

from prefect import Task, get_run_logger
from prefect.cache_policies import CompoundCachePolicy, Inputs
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import Event, emit_event
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogHandler, emit_api_log
from prefect.states import Pending, Running
from prefect.transactions import Transaction
from prefect.utilities.engine import emit_task_run_state_change_event
from prefect.utilities.urls import url_for

from prefect_gpu.engine import child_context
from prefect_gpu.reports.events import DEVICE_ROLE, GPUEvent, device_resource
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.units import MIB, format_bytes

#: Names of a task run's states: while it waits for a device; from its placement to the body's first line.
AWAITING, STARTING = "AwaitingGPU", "Starting"

#: Size of arguments from which Prefect's hash of them is logged: the hash takes 0.75 s on two cores (Prefect 3.8.8).
LARGE_ARGUMENTS_BYTES = 256 * MIB

#: Names of GPU tasks with such a log line.
_large_arguments: set[str] = set()


def hashes_inputs(task: Task[..., Any]) -> bool:
    """Return whether Prefect hashes all arguments of a task before each run, to look for a cached result."""
    policy = task.cache_policy
    policies = policy.policies if isinstance(policy, CompoundCachePolicy) else [policy]
    return any(isinstance(each, Inputs) and not each.exclude for each in policies)


class EngineRun:
    """Log, events and states of this thread's task run, of the user's `task`. Raise `RuntimeError` without a task run.

    For this thread, unless a method says otherwise.
    """

    def __init__(self, task: Task[..., Any]) -> None:
        context = TaskRunContext.get()
        if context is None:
            raise RuntimeError("this thread runs no task")
        self._task = task
        self._context = context
        #: The engine's own object, not a copy.
        self.task_run: TaskRun = context.task_run
        self._logger = get_run_logger()
        self._around = _around_events(context)
        #: Topics of the waiting reasons logged since the last placement.
        self._told: set[object] = set()
        #: Why the task run waits; `None`: it does not wait, or has not waited long.
        self.awaits: Reason | None = None
        flow_run = FlowRunContext.get()
        flow = None if flow_run is None else flow_run.flow
        #: Name of the innermost flow in which the task was submitted; `None`: no flow.
        self.flow_name: str | None = None if flow is None else clean_name(flow.name)

    def end(self) -> None:
        """Release the task run's value and arguments. Later logs and events of the task run are still sent."""
        self.task_run = _without_value(self.task_run)
        self._context = TaskRunContext.model_construct(task_run=self.task_run)

    def say(self, text: str) -> None:
        """Log an information line on the task run. From any thread."""
        self._logger.info(text)

    def advise_no_cache(self, size_bytes: int) -> None:
        """Log once per task that Prefect hashes the task's arguments, if their size is large."""
        name = self._task.name
        if size_bytes < LARGE_ARGUMENTS_BYTES or name in _large_arguments:
            return
        if hashes_inputs(self._context.task):
            _large_arguments.add(name)
            self.say(
                f"Its arguments take {format_bytes(size_bytes)}, and Prefect hashes them before each run, to look for "
                "a cached result: @task(cache_policy=NO_CACHE) saves that time"
            )

    def say_ended(self, text: str) -> None:
        """Log how a process ended, with the address of the task run's page. From any thread."""
        # A context is entered by one thread at a time.
        url = self._around.copy().run(url_for, "task-run", self.task_run.id)
        self.say(f"{text}; {url}" if url else text)

    def warn(self, text: str) -> None:
        """Log a warning on the task run."""
        self._logger.warning(text)

    def note(self, text: str) -> None:
        """Add a warning to the task run's log in the API alone: the terminal already shows the text."""
        run = self.task_run
        record = {
            "name": self._logger.name,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": text,
            "task_run_id": str(run.id),
            "flow_run_id": run.flow_run_id and str(run.flow_run_id),
        }
        if self._logger.isEnabledFor(logging.WARNING):
            APILogHandler().handle(logging.makeLogRecord(record))

    def emit(self, event: GPUEvent) -> None:
        """Emit an event about the task run. From any thread; does not wait for the API."""
        run = self.task_run
        role = "prefect.resource.role"
        devices = [{**device_resource(device), role: DEVICE_ROLE} for device in event.devices]
        # As in Prefect's own events of a task run. Prefect adds the flow run, its flow and its tags.
        tags = [{"prefect.resource.id": f"prefect.tag.{t}", role: "tag"} for t in sorted(run.tags)]
        resource = {
            "prefect.resource.id": f"prefect.task-run.{run.id}",
            "prefect.resource.name": run.name,
            **event.labels,
        }
        # A context is entered by one thread at a time.
        payload = {**event.payload}
        self._around.copy().run(
            emit_event, event.name, resource, related=[*devices, *tags], payload=payload
        )

    def show_awaiting(self, reason: Reason) -> None:
        """Set the task run's state to `AwaitingGPU` with a reason; log the reason if its topic is new."""
        self.awaits = reason
        text = f"Waiting for {sentence(reason)}"
        if reason.topic not in self._told:
            self._told.add(reason.topic)
            self.say(text)
        self._show(Pending(name=AWAITING, message=text))

    def show_placed(self, text: str) -> None:
        """Log the task run's placement, and change a state `AwaitingGPU` to `Starting`."""
        self._told.clear()
        self.awaits = None
        self.say(text)
        if self.task_run.state_name == AWAITING:
            self._show(Pending(name=STARTING, message=f"{text}; starting its process"))

    def show_running(self) -> None:
        """Set the task run's state to `Running`, if the state is `AwaitingGPU` or `Starting`."""
        if self.task_run.state_name in (AWAITING, STARTING):
            self._show(Running())

    def _show(self, state: State[Any]) -> None:
        # The engine's `set_state` would count another run.
        task_run = self.task_run
        before = task_run.state
        state.state_details.task_run_id = task_run.id
        state.state_details.flow_run_id = task_run.flow_run_id
        if before is not None and before.type == StateType.RUNNING:
            task_run.total_run_time += state.timestamp - before.timestamp
        task_run.state = state
        task_run.state_id = state.id
        task_run.state_type = state.type
        task_run.state_name = state.name
        emit_task_run_state_change_event(
            task_run=task_run, initial_state=before, validated_state=state
        )

    def context_for_child(self) -> tuple[dict[str, Any], bool]:
        """Return the task run's context, serialised for a child process, and whether the body's prints are logged."""
        context = child_context.context_for_child(self._context, self._task)
        return context, self._context.log_prints

    def environment_for_child(self) -> dict[str, str | None]:
        """Return environment variables for a child process, with the address of the parent's Prefect server."""
        # The address of an ephemeral server is in no setting.
        return {"PREFECT_API_URL": str(self._context.client.api_url)}

    @staticmethod
    def forward_log(log: dict[str, Any]) -> None:
        """Send a child process's log record to Prefect's API."""
        emit_api_log(log)

    @staticmethod
    def forward_event(event: str) -> None:
        """Send a child process's event, given as JSON, to Prefect's API."""
        worker = EventsWorker.instance()
        context = copy_context()
        # The child has attached related resources, and this thread may be in another run by now.
        for variable in (FlowRunContext.__var__, TaskRunContext.__var__):
            context.run(cast(ContextVar[Any], variable).set, None)
        context.run(worker.send, Event.model_validate_json(event))


def _around_events(context: TaskRunContext) -> Context:
    """Return a context for emitting events, without value and arguments: Prefect keeps it until an event is sent."""
    around = copy_context()
    run = TaskRunContext.model_construct(task_run=_without_value(context.task_run))
    around.run(cast(ContextVar[Any], TaskRunContext.__var__).set, run)
    flow = FlowRunContext.get()
    if flow is not None:
        # The original holds the results of the flow's task runs.
        flow = FlowRunContext.model_construct(flow_run=flow.flow_run)
        around.run(cast(ContextVar[Any], FlowRunContext.__var__).set, flow)
    # The transaction holds the engine, which holds the value.
    around.run(cast(ContextVar[Any], Transaction.__var__).set, None)
    return around


def _without_value(task_run: TaskRun) -> TaskRun:
    """Return a copy of a task run without its state, whose data is the value."""
    return task_run.model_copy(update={"state": None})
