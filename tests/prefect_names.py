"""What the subclasses of Prefect's classes rest on: names, arguments, and which method calls which.

    python tests/prefect_names.py

Prints what the installed version of Prefect has no more, and ends with 1 if there is anything. It needs Prefect alone.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from prefect import __version__, task_engine, task_worker
from prefect.concurrency.services import ConcurrencySlotAcquisitionWithLeaseService
from prefect.task_engine import (
    AsyncTaskRunEngine,
    BaseTaskRunEngine,
    SyncTaskRunEngine,
    run_task_sync,
)
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.task_worker import TaskWorker

#: Methods and functions that are overridden or called, with their arguments.
ARGUMENTS: tuple[tuple[Any, str, str], ...] = (
    # Overridden.
    (SyncTaskRunEngine, "wait_until_ready", "self"),
    (SyncTaskRunEngine, "handle_crash", "self, exc"),
    (SyncTaskRunEngine, "handle_exception", "self, exc"),
    (SyncTaskRunEngine, "log_finished_message", "self"),
    (SyncTaskRunEngine, "can_retry", "self, exc_or_state"),
    (SyncTaskRunEngine, "set_state", "self, state, force"),
    (SyncTaskRunEngine, "run_context", "self"),
    (SyncTaskRunEngine, "call_task_fn", "self, transaction"),
    (TaskWorker, "_subscribe_to_task_scheduling", "self"),
    (ThreadPoolTaskRunner, "__enter__", "self"),
    # Replaced, for the warning of direct calls.
    (BaseTaskRunEngine, "_wait_for_dependencies", "self"),
    # Called.
    (SyncTaskRunEngine, "handle_timeout", "self, exc"),
    (SyncTaskRunEngine, "is_cancelled", "self"),
    (SyncTaskRunEngine, "handle_retry", "self, exc_or_state"),
    (SyncTaskRunEngine, "start", "self, task_run_id, dependencies"),
    (SyncTaskRunEngine, "is_running", "self"),
    (SyncTaskRunEngine, "asset_context", "self"),
    (SyncTaskRunEngine, "transaction_context", "self"),
    (TaskWorker, "__init__", "self, tasks, limit"),
    (TaskWorker, "astart", "self, timeout"),
    (task_worker, "create_status_server", "task_worker"),
    (
        task_engine,
        "run_task_sync",
        "task, task_run_id, task_run, parameters, wait_for, return_type, dependencies, context",
    ),
)

#: Attributes of the engine.
FIELDS = (
    *("task", "logger", "parameters", "task_run", "retries", "wait_for", "context"),
    *("_raised", "_telemetry"),
)

#: Lines without which a method of a subclass is not called, or not given what it expects.
LINES: tuple[tuple[Any, str, str], ...] = (
    (SyncTaskRunEngine, "wait_until_ready", "self.state.state_details.scheduled_time"),
    (SyncTaskRunEngine, "handle_crash", "self._raised = exc"),
    (SyncTaskRunEngine, "handle_crash", "self._telemetry.record_exception(exc)"),
    (SyncTaskRunEngine, "handle_crash", "self._telemetry.end_span_on_failure("),
    (SyncTaskRunEngine, "initialize_run", "except BaseException as exc:"),
    (SyncTaskRunEngine, "initialize_run", "self.handle_crash(exc)"),
    (SyncTaskRunEngine, "initialize_run", "self.log_finished_message()"),
    (SyncTaskRunEngine, "run_context", "with self.setup_run_context():"),
    (
        SyncTaskRunEngine,
        "run_context",
        """if self.is_cancelled():
                        raise CancelledError("Task run cancelled by the task runner")

                    yield self
            except TimeoutError as exc:
                self.handle_timeout(exc)
            except Exception as exc:
                self.handle_exception(exc)""",
    ),
    (SyncTaskRunEngine, "handle_exception", "self.handle_retry(exc)"),
    (SyncTaskRunEngine, "handle_exception", "self.set_state(state)"),
    (SyncTaskRunEngine, "handle_retry", "self.retries < self.task.retries"),
    (SyncTaskRunEngine, "handle_retry", "self.can_retry(exc_or_state)"),
    (
        SyncTaskRunEngine,
        "call_task_fn",
        """if transaction.is_committed():
            result = transaction.read()
        else:
            result = call_with_parameters(self.task.fn, parameters)
        self.handle_success(result, transaction=transaction)
        return result""",
    ),
    (SyncTaskRunEngine, "start", "self._wait_for_dependencies()"),
    (AsyncTaskRunEngine, "start", "self._wait_for_dependencies()"),
    (
        SyncTaskRunEngine,
        "start",
        'names=[f"tag:{tag}" for tag in self.task_run.tags]',
    ),
    (SyncTaskRunEngine, "start", 'holder=ConcurrencyLeaseHolder(type="task_run"'),
    (ConcurrencySlotAcquisitionWithLeaseService, "acquire", "with _cache_lock:"),
    (
        ConcurrencySlotAcquisitionWithLeaseService,
        "acquire",
        "if _no_limits_cache.get(cache_key, False):",
    ),
    (
        ConcurrencySlotAcquisitionWithLeaseService,
        "acquire",
        "cache_key = frozenset(self.concurrency_limit_names)",
    ),
    (TaskWorker, "astart", "await self._subscribe_to_task_scheduling()"),
    (TaskWorker, "__init__", "self.tasks.append("),
    (TaskWorker, "__init__", "t.with_options("),
    (TaskWorker, "__aenter__", "enter_context(self._executor)"),
    (TaskWorker, "_submit_scheduled_task_run", "new_state.state_details.deferred = True"),
    (TaskWorker, "_submit_scheduled_task_run", "if task.isasync:"),
    (
        TaskWorker,
        "_submit_scheduled_task_run",
        """future = self._executor.submit(
                context.run,
                run_task_sync,
                task=task,
                task_run_id=task_run.id,
                task_run=task_run,
                parameters=parameters,
                wait_for=wait_for,
                return_type="state",
                context=run_context,
            )
            await asyncio.wrap_future(future)""",
    ),
    (ThreadPoolTaskRunner, "__enter__", "self._executor = ThreadPoolExecutor("),
    (
        ThreadPoolTaskRunner,
        "submit",
        """future = self._executor.submit(
                context.run,
                run_task_sync,
                **submit_kwargs,
            )""",
    ),
)

#: The loop that `prefect_gpu.engine.task_engine.run_task` is a copy of. Later versions of Prefect ask in it whether the flow run is to
#: be suspended, which the copy leaves out.
LOOP = [
    "",
    "with engine.start(task_run_id=task_run_id, dependencies=dependencies):",
    "while engine.is_running():",
    "engine.wait_until_ready()",
    "with (",
    "engine.asset_context(),",
    "engine.run_context(),",
    "engine.transaction_context() as txn,",
    "):",
    "engine.call_task_fn(txn)",
    'return engine.state if return_type == "state" else engine.result()',
    "",
][1:-1]


def changed() -> list[str]:
    """Return what the installed version of Prefect has no more, as sentences."""
    found = []
    for owner, name, arguments in ARGUMENTS:
        method = inspect.unwrap(getattr(owner, name, None) or (lambda: None))
        if not hasattr(owner, name):
            found.append(f"{owner.__name__}.{name} is gone")
        elif (now := ", ".join(inspect.signature(method).parameters)) != arguments:
            found.append(f"{owner.__name__}.{name} takes ({now}), not ({arguments})")
    fields = SyncTaskRunEngine.__dataclass_fields__
    found += [f"SyncTaskRunEngine.{name} is gone" for name in FIELDS if name not in fields]
    for owner, name, line in LINES:
        method = getattr(owner, name, None)
        if method is None or line not in inspect.getsource(inspect.unwrap(method)):
            found.append(f"{owner.__name__}.{name} has no {line!r}")
    lines = [line.strip() for line in inspect.getsource(run_task_sync).splitlines()]
    loop = [line for line in lines[lines.index(LOOP[0]) :] if line] if LOOP[0] in lines else []
    if [line for line in loop if line != "raise_if_flow_run_suspension_requested()"] != LOOP:
        found.append("task_engine.run_task_sync has another loop")
    return found


if __name__ == "__main__":
    differences = changed()
    for each in differences:
        print(f"Prefect {__version__}: {each}")
    sys.exit(bool(differences))
