"""Prefect's context in a child: the body runs as a part of the parent's task run.

Importing this module imports Prefect; `late_prefect` decides when. This module has all undocumented names of Prefect
that the child uses, except for logging; `prefect_gpu.engine` has the parent's. Checked against Prefect 3.8.8;
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

# Imports `prefect.main`, which sets logging up: needed before the body continues.
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
    """A queue that sends events of Prefect's client to the parent. `EventsWorker` needs it to be hashable."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send

    def put(self, item: tuple[str, Event]) -> None:
        """Send an event to the parent."""
        self._send(EventEmitted(item[1].model_dump_json()))


@contextlib.contextmanager
def child_context(
    context: dict[str, Any], log_prints: bool, send: Callable[[Any], None]
) -> Iterator[RunContexts]:
    """Enter the parent's task run, to which logs, prints, runtime ids, artifacts and nested flows then belong.

    Args:
        context: The result of `context_for_child`.
        log_prints: Prints go to the run's log.
        send: Sends a message to the parent.

    Yields:
        The contexts that a body may change.
    """
    # As JSON: unpickling ids and times of Prefect's own types would import Prefect.
    set_api_log_sink(lambda log: send(LogEmitted(json.loads(json.dumps(log, default=str)))))
    # `emit_event` drops events of unknown client classes, so the client is Prefect's own class.
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
    """Copies of the task run's transactions (its own first, then the outer ones) and assets, until `stack` is closed.

    A copy has no result store: only the flow's process writes the task's result and holds its lock. Transactions that
    the body begins end in this process, with the body.
    """

    def __init__(self, transactions: Sequence[dict[str, Any]], stack: contextlib.ExitStack) -> None:
        self._assets = AssetContext.get()
        #: Each transaction has its values before the body.
        self._transactions: list[tuple[Transaction, dict[str, Any]]] = []
        # `share` replaces this variable.
        variable = cast(ContextVar[Any], BaseTransaction.__var__)
        for fields in reversed(transactions):
            own = Transaction(**fields["fields"])
            own._holder, own._stored_values = fields["holder"], dict(fields["values"])
            own._token = cast(Any, variable.set(own))
            stack.callback(variable.reset, own._token)
            self._transactions.insert(0, (own, fields["values"]))

    def commit(self) -> ContextChanges:
        """Commit the transactions that the body has begun, and return the changes for the flow's process."""
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
    """Passes warnings to the log of the task run, even from threads without its context."""

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
    """Add warnings of this package to the task run's log."""
    logger, handler = logging.getLogger("prefect_gpu"), _RunHandler()
    propagate = logger.propagate
    logger.addHandler(handler)
    # The run's logger prints them too.
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def share(run: Context, is_body: Callable[[], bool]) -> None:
    """Give Prefect's context variables the values of a run in the body's context and all its copies.

    Values set in one thread or coroutine of the body, where Prefect may be imported, do not show in others.
    `is_body` returns whether the caller's context is the body's, or a copy of it.
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
    """A `ContextVar` that has the run's value wherever the body's context has none."""

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
        """See `ContextVar.set`. The token's old value, which Prefect reads, may be the run's."""
        if self._variable.get(_NOTHING) is _NOTHING and self.get(_NOTHING) is not _NOTHING:
            self._variable.set(self.get())
        return self._variable.set(value)

    def reset(self, token: Token[Any]) -> None:
        """See `ContextVar.reset`."""
        self._variable.reset(token)


_NOTHING = object()


def rehearse() -> None:
    """In a standby: do the part of `child_context` that is the same for every run (15 of 45 ms, Prefect 3.8.8)."""
    # Blocks, such as result storage, need the collections, and Prefect keeps them.
    load_prefect_collections()
    # This sets logging up, and builds the models of the contexts.
    with hydrated_context({"tags_context": {}}, client=_LateClient()):
        pass


class _LateClient(SyncPrefectClient):
    """An API client that is made when it is first used: reading its certificates takes 17 ms."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that `__init__` would have set.
        if "_client" in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        self.__dict__.update(get_client(sync_client=True).__dict__)
        return getattr(self, name)


def _flush_events() -> None:
    with EventsWorker._instance_lock:
        started = bool(cast(Any, EventsWorker)._instances)
    if started:
        EventsWorker.instance().wait_until_empty()
