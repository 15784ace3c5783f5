"""Enters the task run in a child when Prefect is first imported.

Importing Prefect takes a second of CPU, and many bodies never use it. So a child imports Prefect before the body only
if the parent says so (`Call.at_once`), or if the call has imported it. Otherwise the body, its imports, or the first
record for Prefect's log handlers import Prefect. Before that `import` returns, `prefect_context` enters the task run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

from prefect_gpu.frameworks.hooks import AfterImport
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes.messages import Call, ContextChanges

if TYPE_CHECKING:
    from prefect_gpu.child.prefect_context import RunContexts

#: `True` in the context of the body and in its copies (coroutines, `asyncio.to_thread`), where Prefect's own variables
#: have the values of the task run.
_is_body: ContextVar[bool] = ContextVar("prefect_gpu_is_body", default=False)


class LatePrefect:
    """The first import of Prefect, on any thread: Prefect's logging is set up, and a task run is entered.

    Made before any of the user's modules, which may set logging up, is imported.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_imported = False
        #: Enters the run; `None`: the run has not begun, or has ended.
        self._enter: Callable[[], None] | None = None
        #: Contexts that the body may change; `None`: Prefect was not imported, or there is no run.
        self._contexts: RunContexts | None = None
        #: Levels of loggers that only this object has set.
        self._defaults = {logging.getLogger(): logging.WARNING}
        self._stand_ins: list[_StandIn] = []
        PROCESS_RESOURCES.after_fork(self, LatePrefect._renew_lock)
        AfterImport({"prefect": self._take_import}).install()
        if not self._is_imported:
            self._stand_ins += [_StandIn(logging.getLogger(n)) for n in ("", "prefect_gpu")]

    def _renew_lock(self) -> None:
        # The lock's holder may not exist in the fork.
        self._lock = threading.RLock()

    def _take_import(self) -> None:
        with self._lock:
            with _as_it_was(self._stand_ins, self._defaults):
                importlib.import_module("prefect_gpu.child.prefect_context")
            self._is_imported = True
            if self._enter is not None:
                self._enter()
            for stand_in in self._stand_ins:
                stand_in.is_relieved = True

    @contextlib.contextmanager
    def run(self, call: Call, send: Callable[[Any], None]) -> Iterator[None]:
        """Make the caller's `with` block a part of the parent's task run, once Prefect is imported.

        A call without a context has no run. `send` sends a message to the parent.
        """
        # The importing thread's context may not be the body's, so Prefect's variables get a context of their own.
        context, stack = Context(), contextlib.ExitStack()

        def enter() -> None:
            from prefect_gpu.child import prefect_context

            read = call.read_context()
            self._contexts = context.run(
                stack.enter_context, prefect_context.child_context(read, call.log_prints, send)
            )
            # A copy: threads, such as Prefect's for events, may outlive the run.
            prefect_context.share(context.copy(), _is_body.get)

        if call.context is None:
            for stand_in in self._stand_ins:
                stand_in.logger.removeHandler(stand_in)
            yield
            return
        token = _is_body.set(True)
        try:
            self._begin(call, enter)
            yield
        finally:
            _is_body.reset(token)
            with self._lock:
                self._enter = None
                context.run(stack.close)

    def commit(self) -> ContextChanges | None:
        """End the body's transactions in `run`, and return its changes to Prefect's contexts; `None`: no changes."""
        return (self._contexts.commit() if self._contexts is not None else None) or None

    def roll_back(self) -> None:
        """Roll back the transactions of a failed body in `run`."""
        if self._contexts is not None:
            self._contexts.roll_back()

    def _begin(self, call: Call, enter: Callable[[], None]) -> None:
        with self._lock:
            prefect = logging.getLogger("prefect")
            if not self._is_imported and prefect.level == logging.NOTSET:
                prefect.setLevel(call.log_level)
                self._defaults[prefect] = prefect.level
            self._enter = enter
            if self._is_imported:
                enter()
        if call.at_once:
            importlib.import_module("prefect")


class _StandIn(logging.Handler):
    """Handler in place of Prefect's, whose first record imports Prefect. Beside it `logging.basicConfig` does nothing."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger = logger
        #: Handlers that existed before Prefect's.
        self.others: list[logging.Handler] = []
        self.is_relieved = False
        logger.addHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Import Prefect and pass the record to its handlers."""
        # The handler's lock is not held: a thread that imports Prefect may log, too.
        with contextlib.suppress(Exception):
            importlib.import_module("prefect")
        if not self.is_relieved:
            # Prefect cannot be imported, or its import logs this record.
            if logging.lastResort is not None:
                logging.lastResort.handle(record)
            return True
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            for handler in logger.handlers:
                if handler not in self.others and record.levelno >= handler.level:
                    handler.handle(record)
            # Above its own logger, `logging` itself finds Prefect's handlers.
            logger = logger.parent if logger is not self.logger and logger.propagate else None
        return True


@contextlib.contextmanager
def _as_it_was(stand_ins: list[_StandIn], defaults: Mapping[logging.Logger, int]) -> Iterator[None]:
    """Set Prefect's logging up as if it came first; import the rest of Prefect in a `with` block."""
    if not stand_ins:
        # Prefect was imported before this process was forked.
        yield
        return
    root = logging.getLogger()
    found = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    before = {each: (each.level, each.propagate, each.disabled) for each in (root, *found)}
    handlers = {each: [*each.handlers] for each in before}
    # `dictConfig` replaces levels and handlers and closes handlers, so all are restored below. In new lists: `logging`
    # may iterate over the old ones. If the root logger had a handler with a format, Prefect would skip it.
    root.handlers = [handler for handler in root.handlers if handler in stand_ins]
    for stand_in in stand_ins:
        stand_in.logger.handlers = [*stand_in.logger.handlers]
    known: Any = logging
    in_order, by_name = [*known._handlerList], dict(known._handlers)
    known._handlerList.clear()
    try:
        configuration = importlib.import_module("prefect.logging.configuration")
        if not configuration.PROCESS_LOGGING_CONFIG:
            configuration.setup_logging()
    finally:
        known._handlerList[:0] = in_order
        known._handlers.update(by_name)
        for stand_in in stand_ins:
            stand_in.others = [handler for find in in_order if (handler := find()) is not None]
        for logger, had in handlers.items():
            of_prefect = [each for each in logger.handlers if each not in had]
            # Code that has removed a stand-in would have removed Prefect's handlers.
            if logger is root and not any(each in stand_ins for each in had):
                of_prefect = []
            logger.handlers = [*of_prefect, *(each for each in had if each not in stand_ins)]
    yield
    # Last: Prefect sets levels again when the rest of it is imported.
    for logger, (level, propagate, disabled) in before.items():
        if level not in (logging.NOTSET, defaults.get(logger)):
            logger.setLevel(level)
        logger.propagate = logger.propagate and propagate
        logger.disabled = disabled
