"""Serialise the context of a task run for its child process. The child's side is `child.prefect_context`."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

from prefect import Task
from prefect.context import (
    AssetContext,
    FlowRunContext,
    SettingsContext,
    TaskRunContext,
    serialize_context,
)
from prefect.settings import get_current_settings
from prefect.transactions import BaseTransaction, get_transaction
from prefect.utilities.engine import should_log_prints

from prefect_gpu import values
from prefect_gpu.errors import ResultError
from prefect_gpu.policy import is_gpu_tag
from prefect_gpu.processes.messages import ContextChanges, StoredValue

#: Functions of tasks that only the parent's engine uses, in addition to hooks of tasks and flows.
ONLY_HERE = ("retry_condition_fn", "cache_key_fn")


def context_for_child(task_run: TaskRunContext, task: Task[..., Any]) -> dict[str, Any]:
    """Serialise the context of this thread's task run, of the user's own `task`, for a child process."""
    flow_run = FlowRunContext.get()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_AsTheyAre.of_thread(str(task_run.client.api_url)))
        # Prefect would copy lists and dictionaries in the parameters, and turn models into dictionaries.
        stack.enter_context(task_run.model_copy(update={"parameters": {}}))
        if flow_run is not None:
            stack.enter_context(flow_run.model_copy(update={"parameters": {}}))
        context = serialize_context()
    task_run_context = context["task_run_context"]
    task_run_context["task"] = _travelling(task)
    task_run_context["parameters"] = task_run.parameters
    flow_run_context = context.get("flow_run_context")
    if flow_run is not None and flow_run_context:
        flow_run_context["parameters"] = flow_run.parameters or {}
        if flow_run_context.get("flow") is not None:
            flow_run_context["flow"] = _travelling(flow_run_context["flow"])
    if tags := context.get("tags_context"):
        # A task that is submitted from inside has its own tags.
        tags["current_tags"] = {t for t in tags["current_tags"] if not is_gpu_tag(t)}
    assets = AssetContext.get()
    context["asset_context"] = assets.serialize() if assets is not None else {}
    context["transactions"] = [_as_values(each) for each in _transactions()]
    return context


def apply_changes(changes: ContextChanges) -> None:
    """Apply the changes that a completed body made in its child process to the run's contexts in this thread."""
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
    """Return the transaction of this thread's task run, followed by its parents from the inside out."""
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
    """Return the fields from which a child process rebuilds a transaction (`prefect_context.RunContexts`)."""
    names = ("key", "commit_mode", "isolation_level", "overwrite", "write_on_commit", "state")
    stored = transaction._stored_values.copy()
    return {
        "fields": {name: getattr(transaction, name) for name in names},
        "holder": transaction._holder,
        "values": {name: _stored(name, value) for name, value in stored.items()},
    }


def _travelling(runnable: Any) -> Any:
    """Return a copy of a task or flow that identifies the run in a child process, without its function and hooks."""
    light = copy.copy(runnable)
    light.__dict__.pop("__wrapped__", None)
    # A flow's function may refer to anything in its script (locks, clients, models), which would be pickled for each
    # task or refuse to be. The body itself is in the call.
    light.fn = _runs_elsewhere
    for name in [*vars(light)]:
        if name.endswith("_hooks"):
            setattr(light, name, [])
        elif name in ONLY_HERE:
            setattr(light, name, None)
    return light


def _runs_elsewhere(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this copy only names the run; call the task or flow itself")


def without_parameters(
    context: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a child's context without parameters, the parameters of the task, and the parameters of its flow."""
    # The parameters are the call's own argument objects. Pickled together with the call, each object is sent once.
    parameters: dict[str, dict[str, Any]] = {}
    for name in ("task_run_context", "flow_run_context"):
        run = context.get(name) or {}
        parameters[name] = run.get("parameters") or {}
        if parameters[name]:
            context = {**context, name: {**run, "parameters": {}}}
    return context, parameters["task_run_context"], parameters["flow_run_context"]


def logs_need_prefect(task: Task[..., Any]) -> bool:
    """Return whether the child process must import Prefect before the body, for the body's logs and prints.

    Without Prefect a child uses the levels of Prefect's default configuration. Call it on the thread that submits the
    task.
    """
    logs = get_current_settings().logging
    if should_log_prints(task) or logs.extra_loggers or logs.config_path.exists():
        return True
    # Prefect reads levels, handlers and `propagate` of loggers from these variables.
    variables = ("PREFECT_LOGGING_ROOT_", "PREFECT_LOGGING_LOGGERS_")
    return any(name.startswith(variables) for name in os.environ)


def prefect_log_level() -> str:
    """Return the level of Prefect's loggers in the settings of this thread."""
    return get_current_settings().logging.level


class _AsTheyAre(SettingsContext):
    """Settings that are pickled: 0.2 ms. Serialising took 14 ms of CPU, validation in the child 25 (Prefect 3.8.8)."""

    @classmethod
    def of_thread(cls, url: str) -> _AsTheyAre:
        """Return this thread's settings with the API's address: without it each child would start a server."""
        current = SettingsContext.get()
        assert current is not None, "Prefect always has settings"
        settings = current.settings
        if settings.api.url != url:
            api = settings.api.model_copy(update={"url": url})
            settings = settings.model_copy(update={"api": api})
        # Prefect's validation changes settings that all threads share for a moment, and fails if two threads validate
        # at once.
        return cls.model_construct(profile=current.profile, settings=settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """See `SettingsContext.serialize`."""
        profile = SettingsContext.model_construct({"profile"}, profile=self.profile)
        return {**profile.serialize(include_secrets), "settings": self.settings}
