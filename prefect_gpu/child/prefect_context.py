"""Prefect's contexts in a child, in which the body runs as a part of the parent's task run.

Importing this module imports Prefect; `late_prefect` decides when. All undocumented names of Prefect that the child
uses are here, except for logging; the parent's are in `prefect_gpu.engine`. Checked against Prefect 3.8.8;
`tests/integration/test_bridge.py` names the function that a change of Prefect breaks.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar, Token
from typing import Any, cast

from prefect import context as prefect_variables

# Imports `prefect.main`, which sets up logging: needed before the body continues.
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import AssetContext, hydrated_context
from prefect.events import Event
from prefect.events.worker import EventsWorker, ProcessPoolForwardingEventsClient
from prefect.logging.handlers import set_api_log_sink
from prefect.logging.loggers import patch_print
from prefect.plugins import load_prefect_collections
from prefect.transactions import BaseTransaction, Transaction

from prefect_gpu.processes.messages import ContextChanges, EventEmitted, LogEmitted


class EventQueue:
    """Queue of Prefect's events client that sends each event to the parent. Hashable, as `EventsWorker` requires."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send

    def put(self, item: tuple[str, Event]) -> None:
        """Send an event to the parent."""
        self._send(EventEmitted(item[1].model_dump_json()))


@contextlib.contextmanager
def child_context(
    context: dict[str, Any], log_prints: bool, send: Callable[[Any], None]
) -> Iterator[RunContexts]:
    """Enter the parent's task run: logs, prints, runtime ids, artifacts and nested flows then belong to the run.

    `context` is of `engine.task_run.EngineRun.context_for_child`. With `log_prints`, prints go to the run's log.
    `send` sends a message to the parent. Yields the contexts that the body may change.
    """
    # As JSON: unpickling Prefect's types for ids and times would import Prefect.
    set_api_log_sink(lambda log: send(LogEmitted(json.loads(json.dumps(log, default=str)))))
    # Prefect's own client class, since `emit_event` drops events of unknown client classes.
    EventsWorker.set_client_override(
        ProcessPoolForwardingEventsClient, event_queue=EventQueue(send)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_flush_events)
        stack.enter_context(hydrated_context(context, client=_LateClient()))
        stack.enter_context(_log_on_the_run())
        if log_prints:
            stack.enter_context(patch_print())
        yield RunContexts(context.get("transactions", ()), stack)


class RunContexts:
    """Copies of the task run's transactions and its assets, active until `stack` is closed.

    `transactions` has the task run's own transaction first, then those around it. A copy has no result store: only the
    flow's process writes the task's result and holds its lock. Transactions that the body begins end with the body.
    """

    def __init__(self, transactions: Sequence[dict[str, Any]], stack: contextlib.ExitStack) -> None:
        self._assets = AssetContext.get()
        #: Each transaction, with its values before the body.
        self._transactions: list[tuple[Transaction, dict[str, Any]]] = []
        # Read here, since `share` replaces the attribute.
        variable = cast(ContextVar[Any], BaseTransaction.__var__)
        for fields in reversed(transactions):
            own = Transaction(**fields["fields"])
            own._holder, own._stored_values = fields["holder"], dict(fields["values"])
            own._token = cast(Any, variable.set(own))
            stack.callback(variable.reset, own._token)
            self._transactions.insert(0, (own, fields["values"]))

    def commit(self) -> ContextChanges:
        """Commit the transactions that the body has begun, and return its changes for the flow's process."""
        on_commit: tuple[Callable[..., Any], ...] = ()
        on_rollback: tuple[Callable[..., Any], ...] = ()
        if self._transactions:
            own, _ = self._transactions[0]
            on_commit, on_rollback = tuple(own.on_commit_hooks), tuple(own.on_rollback_hooks)
            own.on_commit_hooks, own.on_rollback_hooks = [], []
            own.commit()
        changed = tuple(
            {k: v for k, v in each._stored_values.items() if before.get(k, _NOTHING) is not v}
            for each, before in self._transactions
        )
        metadata = self._assets.materialization_metadata if self._assets is not None else {}
        return ContextChanges(changed, on_commit, on_rollback, metadata)

    def roll_back(self) -> None:
        """Roll back the transactions that the failed body has begun."""
        if self._transactions:
            self._transactions[0][0].rollback()


class _RunHandler(logging.Handler):
    """Log handler that adds warnings to the task run's log, even from threads without the run's context."""

    def __init__(self) -> None:
        super().__init__()
        self._run_logger = get_run_logger()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno < logging.WARNING:
                logging.getLogger().handle(record)
            else:
                self._run_logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def _log_on_the_run() -> Iterator[None]:
    """Add this package's warnings to the task run's log, for a `with` block."""
    logger, handler = logging.getLogger("prefect_gpu"), _RunHandler()
    propagate = logger.propagate
    logger.addHandler(handler)
    # The run's logger prints them as well.
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def share(run: Context, is_body: Callable[[], bool]) -> None:
    """Replace Prefect's context variables, so that they have the values of `run` in the body's context and its copies.

    Needed because a value set by the thread or coroutine that imports Prefect does not show in others. `is_body`
    returns whether the caller's context is the body's or a copy of it.
    """
    module = vars(prefect_variables)
    for name, held in [*module.items(), ("", BaseTransaction)]:
        variable = getattr(held, "__var__", held) if isinstance(held, type) else held
        if not isinstance(variable, ContextVar) or variable not in run:
            continue
        shared = _SharedVariable(variable, run, is_body)
        if variable is held:
            module[name] = shared
        else:
            cast(Any, held).__var__ = shared


class _SharedVariable:
    """A `ContextVar` with a default for the body's context: its value in the context of the run."""

    def __init__(
        self, variable: ContextVar[Any], run: Context, is_body: Callable[[], bool]
    ) -> None:
        self._variable = variable
        self._run = run
        self._is_body = is_body

    def get(self, *default: Any) -> Any:
        """See `ContextVar.get`."""
        value = self._variable.get(_NOTHING)
        if value is _NOTHING and self._is_body():
            value = self._run.get(self._variable, _NOTHING)
        return self._variable.get(*default) if value is _NOTHING else value

    def set(self, value: Any) -> Token[Any]:
        """See `ContextVar.set`. `Token.old_value`, which Prefect reads, may be the run's value."""
        if self._variable.get(_NOTHING) is _NOTHING and self.get(_NOTHING) is not _NOTHING:
            self._variable.set(self.get())
        return self._variable.set(value)

    def reset(self, token: Token[Any]) -> None:
        """See `ContextVar.reset`."""
        self._variable.reset(token)


_NOTHING = object()


def rehearse() -> None:
    """Do the part of `child_context` that is the same for all runs, in a standby (15 of 45 ms, Prefect 3.8.8)."""
    # Blocks, such as result storage, need the collections. Prefect caches them.
    load_prefect_collections()
    # Sets up logging, and builds the models of the contexts.
    with hydrated_context({"tags_context": {}}, client=_LateClient()):
        pass


class _LateClient(SyncPrefectClient):
    """An API client that is created at its first use, since reading certificates takes 17 ms."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: before the client was created.
        if "_client" in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        self.__dict__.update(get_client(sync_client=True).__dict__)
        return getattr(self, name)


def _flush_events() -> None:
    with EventsWorker._instance_lock:
        started = bool(cast(Any, EventsWorker)._instances)
    if started:
        EventsWorker.instance().wait_until_empty()
