"""Warn of GPU tasks that run in Prefect's own engine, outside `GPUTaskRunner`.

No task runner sees a direct call, or a background task under Prefect's own `serve`. Both go through a method of
Prefect's engine. This module wraps that method, the only attribute of Prefect that the package replaces.
`prefect_gpu/__init__.py` imports this module when a process imports Prefect's task worker, so neither `runner` nor
`devices` is imported here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.context import FlowRunContext
from prefect.logging.loggers import get_logger
from prefect.task_engine import AsyncTaskRunEngine, BaseTaskRunEngine, SyncTaskRunEngine

from prefect_gpu.child.channel import current_channel
from prefect_gpu.engine.flow_run import context_tags, flow_of
from prefect_gpu.errors import ProtocolError
from prefect_gpu.in_task import current_allocation
from prefect_gpu.policy import is_gpu_tag

#: Prefect's own engines. A task runner runs GPU tasks in a subclass.
_PREFECTS = (SyncTaskRunEngine, AsyncTaskRunEngine)

#: GPU tasks that were warned of, by flow run and task name; the flow run is `None` outside a flow.
_warned: dict[tuple[UUID | None, str], object] = {}


def _is_first(flow_run_id: UUID | None, task_name: str) -> bool:
    mine = object()
    # `setdefault` is atomic: several threads may call a task at the same time.
    return _warned.setdefault((flow_run_id, task_name), mine) is mine


def is_first_warning(task_name: str) -> bool:
    """Return `True` for the first direct call of a GPU task in this flow run, `False` for each later call.

    A GPU task's child process asks the flow's process, because several processes may call the same task.
    """
    first, channel = _is_first(flow_of(FlowRunContext.get())[1], task_name), current_channel()
    if first and channel is not None:
        with contextlib.suppress(OSError, EOFError, ProtocolError, RuntimeError):
            return bool(channel.ask("is_first_warning", task_name=task_name))
    return first


def _warn_of_direct_call(log: Any, task_name: str, has_runner: bool) -> None:
    where = "the flow's own process"
    has = "without a device or a memory budget of its own"
    if current_allocation() is not None:
        where = "the process of the GPU task around it"
        has = "on its device and within its memory budget"
    if has_runner:
        text = "was called directly: it runs in %s, %s. Call it with .submit() or .map()."
        log.warning(f"GPU task %r {text}", task_name, where, has)
    else:
        log.warning(
            "GPU task %r runs in %s, and its gpu tags have no effect: its flow has another task runner. Write "
            "@flow(task_runner=GPUTaskRunner()).",
            task_name,
            where,
        )


def _warn_of_serve(task_name: str) -> None:
    # Inside the process of a GPU task the body has a device.
    if current_allocation() is not None or not _is_first(None, task_name):
        return
    get_logger("task_worker").warning(
        "GPU task %r runs in the process of Prefect's own `serve`, where its gpu tags have no effect: no process, "
        "device or memory budget of its own. Serve it with prefect_gpu.serve(...).",
        task_name,
    )


def _warns(wait_for_dependencies: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a wrapper that warns after the method, which Prefect's engine calls just before a task begins."""

    @functools.wraps(wait_for_dependencies)
    def wait(engine: Any) -> None:
        wait_for_dependencies(engine)
        if type(engine) not in _PREFECTS:
            return
        task, task_run, context = engine.task, engine.task_run, FlowRunContext.get()
        # Deferred: a background task, which runs outside its flow.
        if task_run.state.state_details.deferred:
            if any(map(is_gpu_tag, {*task.tags, *task_run.tags})):
                _warn_of_serve(task.name)
        elif context is not None and any(map(is_gpu_tag, {*task.tags, *context_tags()})):
            if is_first_warning(task.name):
                # Only `GPUTaskRunner` has this method.
                has_runner = hasattr(context.task_runner, "submit_background")
                _warn_of_direct_call(engine.logger, task.name, has_runner)

    return wait


# Versions of Prefect without this method give no warning.
if hasattr(BaseTaskRunEngine, "_wait_for_dependencies"):
    _method: Any = _warns(BaseTaskRunEngine._wait_for_dependencies)
    BaseTaskRunEngine._wait_for_dependencies = _method  # type: ignore[method-assign]
