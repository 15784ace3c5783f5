"""The warning of GPU tasks that run without the task runner: in Prefect's own engine.

No task runner sees a direct call, and none sees a background task under Prefect's own `serve`. Both begin in a method of
Prefect's engine, which is replaced here. It is the only attribute of Prefect that this package replaces.

`prefect_gpu/__init__.py` imports this module when a process imports Prefect's task worker, so it imports neither the runner nor
devices. Checked against Prefect 3.6.20, 3.8.8 and 3.9.1.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from prefect.context import FlowRunContext
from prefect.logging.loggers import get_logger
from prefect.task_engine import AsyncTaskRunEngine, BaseTaskRunEngine, SyncTaskRunEngine

from prefect_gpu.child.channel import current_channel
from prefect_gpu.engine.flow_run import context_tags
from prefect_gpu.errors import ProtocolError
from prefect_gpu.in_task import current_allocation
from prefect_gpu.policy import is_gpu_tag

#: Prefect's own engines. GPU tasks of a task runner have another one.
_PREFECTS = (SyncTaskRunEngine, AsyncTaskRunEngine)

#: Names of GPU tasks that ran under Prefect's own `serve`; each is warned of once.
_served: set[str] = set()

#: Names of GPU tasks that ran without a `GPUTaskRunner` in this process, and were warned of.
_without_runner: set[str] = set()


def is_first_warning(task_name: str, has_runner: bool) -> bool:
    """Return whether no call of a GPU task without the task runner was warned of before.

    The process of a GPU task asks the flow's process, as several processes may call the same task.

    Args:
        task_name: Name of the task.
        has_runner: Its flow has a `GPUTaskRunner`: each flow run has warnings of its own.
    """
    context, channel = FlowRunContext.get(), current_channel()
    # Only a `GPUTaskRunner` has it.
    is_first = getattr(context and context.task_runner, "is_first_direct_call", None)
    if has_runner and is_first is not None:
        first = bool(is_first(task_name))
    else:
        first = task_name not in _without_runner
        _without_runner.add(task_name)
    if first and channel is not None:
        with contextlib.suppress(OSError, EOFError, ProtocolError, RuntimeError):
            arguments = {"task_name": task_name, "has_runner": has_runner}
            return bool(channel.ask("is_first_warning", **arguments))
    return first


def _warn_of_direct_call(log: Any, task_name: str, has_runner: bool) -> None:
    around = current_allocation() is not None
    where = "the process of the GPU task around it" if around else "the flow's own process"
    has = (
        "on its device and within its memory budget"
        if around
        else "without a device or a memory budget of its own"
    )
    if has_runner:
        text = (
            "GPU task %r was called directly: it runs in %s, %s. Call it with .submit() or .map()."
        )
        log.warning(text, task_name, where, has)
    else:
        text = (
            "GPU task %r runs in %s, and its gpu tags have no effect: its flow has another task runner. Write "
            "@flow(task_runner=GPUTaskRunner())."
        )
        log.warning(text, task_name, where)


def _warn_of_serve(task_name: str) -> None:
    # In the process of a GPU task there is a device.
    if task_name in _served or current_allocation() is not None:
        return
    _served.add(task_name)
    get_logger("task_worker").warning(
        "GPU task %r runs in the process of Prefect's own `serve`, where its gpu tags have no effect: no process, "
        "device or memory budget of its own. Serve it with prefect_gpu.serve(...).",
        task_name,
    )


def _warns(wait_for_dependencies: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the method of Prefect's engine that runs right before a task begins, with the warning after it."""

    @functools.wraps(wait_for_dependencies)
    def wait(engine: Any) -> None:
        wait_for_dependencies(engine)
        if type(engine) not in _PREFECTS:
            return
        task, task_run, context = engine.task, engine.task_run, FlowRunContext.get()
        # A background task was not called in its flow.
        if task_run.state.state_details.deferred:
            if any(map(is_gpu_tag, {*task.tags, *task_run.tags})):
                _warn_of_serve(task.name)
        elif context is not None and any(map(is_gpu_tag, {*task.tags, *context_tags()})):
            has_runner = hasattr(context.task_runner, "is_first_direct_call")
            if is_first_warning(task.name, has_runner):
                _warn_of_direct_call(engine.logger, task.name, has_runner)

    return wait


# In a version of Prefect without this name nothing warns.
if hasattr(BaseTaskRunEngine, "_wait_for_dependencies"):
    _method: Any = _warns(BaseTaskRunEngine._wait_for_dependencies)
    BaseTaskRunEngine._wait_for_dependencies = _method  # type: ignore[method-assign]
