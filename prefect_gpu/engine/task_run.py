"""The task run of an engine's thread: log, events, states while it waits for a device, and context for its child process.

The engine is in `task_engine`, the child's side of the context in `child.prefect_context`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from contextvars import Context, ContextVar, copy_context
from typing import Any, NamedTuple, cast

from prefect import Task, get_run_logger
from prefect.cache_policies import NO_CACHE, CompoundCachePolicy, Inputs
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import (
    AssetContext,
    FlowRunContext,
    SettingsContext,
    TaskRunContext,
    serialize_context,
)
from prefect.events import Event, emit_event
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogHandler, emit_api_log
from prefect.settings import get_current_settings
from prefect.states import Pending, Running
from prefect.transactions import BaseTransaction, Transaction, get_transaction
from prefect.utilities.engine import emit_task_run_state_change_event, should_log_prints
from prefect.utilities.urls import url_for

from prefect_gpu import values
from prefect_gpu.errors import ResultError
from prefect_gpu.policy import is_gpu_tag
from prefect_gpu.processes.messages import ContextChanges, StoredValue
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


class ChildContext(NamedTuple):
    """The Prefect context of a task run for its child process."""

    #: Without the parameters of the task run and of its flow run.
    context: dict[str, Any]
    parameters: dict[str, Any]
    flow_parameters: dict[str, Any]
    #: Whether the body's prints are logged.
    log_prints: bool


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

    def context_for_child(self) -> ChildContext:
        """Return the Prefect context of this thread's task run, serialised for its child process."""
        task_run, flow_run = self._context, FlowRunContext.get()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_AsTheyAre.of_thread(str(task_run.client.api_url)))
            # The parameters are the call's own argument objects: pickled with the call, each object is sent once. Prefect
            # would also copy lists and dictionaries in them, and turn models into dictionaries.
            stack.enter_context(task_run.model_copy(update={"parameters": {}}))
            if flow_run is not None:
                stack.enter_context(flow_run.model_copy(update={"parameters": {}}))
            context = serialize_context()
        context["task_run_context"]["task"] = _travelling(self._task)
        flow_parameters: dict[str, Any] = {}
        flow_run_context = context.get("flow_run_context")
        if flow_run is not None and flow_run_context:
            flow_parameters = flow_run.parameters or {}
            if flow_run_context.get("flow") is not None:
                flow_run_context["flow"] = _travelling(flow_run_context["flow"])
        if tags := context.get("tags_context"):
            # A task submitted by the child's body has GPU tags of its own.
            tags["current_tags"] = {t for t in tags["current_tags"] if not is_gpu_tag(t)}
        assets = AssetContext.get()
        context["asset_context"] = assets.serialize() if assets is not None else {}
        context["transactions"] = [_as_values(each) for each in _transactions()]
        return ChildContext(context, task_run.parameters, flow_parameters, task_run.log_prints)

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


# The context of a task run for its child process.

#: Attributes of tasks and flows that may hold functions, which a child process never calls, and what its copy has in
#: place of a function. Its copy has no hooks either.
ONLY_HERE = {
    "retry_condition_fn": None,
    "cache_key_fn": None,
    "task_run_name": None,
    "flow_run_name": None,
    "cache_policy": NO_CACHE,
    "_user_cache_policy": NO_CACHE,
}


def apply_changes(changes: ContextChanges) -> None:
    """Apply changes of transactions and assets, made by a body in its child process, to this thread's contexts."""
    transactions = _transactions()
    for transaction, values_set in zip(transactions, changes.transactions, strict=True):
        for name, value in values_set.items():
            transaction.set(name, value)
    if transactions:
        transactions[0].on_commit_hooks.extend(changes.on_commit)
        transactions[0].on_rollback_hooks.extend(changes.on_rollback)
    assets = AssetContext.get()
    if assets is not None:
        for key, metadata in changes.metadata.items():
            assets.add_asset_metadata(key, dict(metadata))


def _transactions() -> list[BaseTransaction]:
    """Return this thread's open Prefect transactions, innermost first."""
    found: list[BaseTransaction] = []
    transaction = get_transaction()
    # A parent that has ended returns the current transaction as its own parent.
    while transaction is not None and not any(transaction is each for each in found):
        found.append(transaction)
        transaction = transaction.get_parent()
    return found


def _stored(name: str, value: Any) -> StoredValue:
    try:
        return StoredValue(values.Apart.of(value, "argument", name))
    except ResultError as error:
        return StoredValue(error)


def _as_values(transaction: BaseTransaction) -> dict[str, Any]:
    """Return the fields of a transaction that a child process needs to rebuild it (`prefect_context.RunContexts`)."""
    names = ("key", "commit_mode", "isolation_level", "overwrite", "write_on_commit", "state")
    stored = transaction._stored_values.copy()
    return {
        "fields": {name: getattr(transaction, name) for name in names},
        "holder": transaction._holder,
        "values": {name: _stored(name, value) for name, value in stored.items()},
    }


def _travelling(runnable: Any) -> Any:
    """Return a copy of a task or flow without its function and hooks, for the Prefect context of a child process."""
    light = copy.copy(runnable)
    light.__dict__.pop("__wrapped__", None)
    # A flow's function may refer to anything in its script (locks, clients, models). Pickling that for each task would
    # take long, or fail. The body itself is in the call.
    light.fn = _runs_elsewhere
    for name in [*vars(light)]:
        if name.endswith("_hooks"):
            setattr(light, name, [])
        elif name in ONLY_HERE and not isinstance(getattr(light, name), str):
            setattr(light, name, ONLY_HERE[name])
    return light


def _runs_elsewhere(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this copy only names the run; call the task or flow itself")


def logs_need_prefect(task: Task[..., Any]) -> bool:
    """Return whether a child must import Prefect before the body, for its logs and prints. On the submitting thread."""
    logs = get_current_settings().logging
    if should_log_prints(task) or logs.extra_loggers or logs.config_path.exists():
        return True
    # Without Prefect a child uses the levels of Prefect's default configuration. Prefect reads levels, handlers and
    # `propagate` of loggers from these variables.
    variables = ("PREFECT_LOGGING_ROOT_", "PREFECT_LOGGING_LOGGERS_")
    return any(name.startswith(variables) for name in os.environ)


def prefect_log_level() -> str:
    """Return the log level of Prefect's loggers in this thread's settings."""
    return get_current_settings().logging.level


class _AsTheyAre(SettingsContext):
    """Settings pickled in 0.2 ms. Prefect 3.8.8 takes 14 ms of CPU to serialise, 25 ms in the child to validate."""

    @classmethod
    def of_thread(cls, url: str) -> _AsTheyAre:
        """Return this thread's settings with `url` as the API's address: without it each child starts a server."""
        current = SettingsContext.get()
        assert current is not None, "Prefect always has settings"
        settings = current.settings
        if settings.api.url != url:
            api = settings.api.model_copy(update={"url": url})
            settings = settings.model_copy(update={"api": api})
        # Not validated: Prefect's validation briefly changes settings of all threads, and fails in two threads at once.
        return cls.model_construct(profile=current.profile, settings=settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """See `SettingsContext.serialize`."""
        profile = SettingsContext.model_construct({"profile"}, profile=self.profile)
        return {**profile.serialize(include_secrets), "settings": self.settings}
