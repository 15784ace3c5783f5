"""Serialise the context of a task run for its child process. The child's side is `child.prefect_context`."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
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


def context_for_child(task_run: TaskRunContext, task: Task[..., Any]) -> dict[str, Any]:
    """Return the Prefect context of this thread's task run, of the user's `task`, serialised for its child process."""
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
        # A task submitted by the child's body has GPU tags of its own.
        tags["current_tags"] = {t for t in tags["current_tags"] if not is_gpu_tag(t)}
    assets = AssetContext.get()
    context["asset_context"] = assets.serialize() if assets is not None else {}
    context["transactions"] = [_as_values(each) for each in _transactions()]
    return context


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


def without_parameters(
    context: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a child's context without parameters, then separately the task's parameters and the flow's parameters."""
    # The parameters are the call's own argument objects. Pickled with the call, each object is sent once.
    parameters: dict[str, dict[str, Any]] = {}
    for name in ("task_run_context", "flow_run_context"):
        run = context.get(name) or {}
        parameters[name] = run.get("parameters") or {}
        if parameters[name]:
            context = {**context, name: {**run, "parameters": {}}}
    return context, parameters["task_run_context"], parameters["flow_run_context"]


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
