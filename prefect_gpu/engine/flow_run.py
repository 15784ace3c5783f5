"""Access to the flow run of submitted tasks: tags, name, log, events and API client. `task_run` is about task runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextvars import Context, copy_context
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext, SyncClientContext, TagsContext, TaskRunContext
from prefect.events import emit_event
from prefect.logging.loggers import flow_run_logger, get_logger
from prefect.settings import get_current_settings

from prefect_gpu.reports.events import GPUEvent, device_resource
from prefect_gpu.reports.markup import clean_name


def context_tags() -> set[str]:
    """Return the tags of the `prefect.tags` contexts around the caller, without the flow run's own tags."""
    tags = set(TagsContext.get().current_tags)
    flow_run_context = FlowRunContext.get()
    if flow_run_context is not None and flow_run_context.flow_run is not None:
        tags -= set(flow_run_context.flow_run.tags)
    return tags


def flow_run_goes_on(context: FlowRunContext | None, runner: object) -> bool:
    """Return whether a flow run has completed when its runner exits; `True` also if the runner has no flow run.

    Prefect passes only exceptions that end the flow *engine* to a task runner. After an exception of the flow's
    function, the engine sets the flow run's state before the runner exits: `Failed`, or for a retried flow
    `AwaitingRetry` or already `Running` again.
    """
    if context is None or context.flow_run is None or context.flow_run.state is None:
        return True
    if context.detached or context.task_runner is not runner:
        # The runner was entered by hand, or in a child's copy of the context.
        return True
    return bool(context.flow_run.state.is_completed())


def flow_of(context: FlowRunContext | None) -> tuple[str, UUID | None]:
    """Return a flow's name as shown in reports, and the id of its flow run; outside a flow "no-flow" and `None`."""
    if context is None or context.flow_run is None:
        return "no-flow", None
    name = context.flow.name if context.flow is not None else context.flow_run.name
    return clean_name(name), context.flow_run.id


def log_on_flow(context: FlowRunContext | None, text: str, level: int = logging.INFO) -> None:
    """Log a text on a flow run, even after its context has ended; without a flow run, on Prefect's console alone."""
    if context is not None and context.flow_run is not None:
        flow_run_logger(context.flow_run, context.flow).log(level, text)
    else:
        get_logger("gpu").log(level, text)


def artifact_url(artifact_id: UUID) -> str | None:
    """Return the address of an artifact's page; `None`: Prefect's settings have no UI address."""
    # `url_for` does not support artifacts (Prefect 3.8.8).
    base = get_current_settings().ui_url
    return f"{base.rstrip('/')}/artifacts/artifact/{artifact_id}" if base else None


def emit_device_event(event: GPUEvent, around: Context) -> None:
    """Emit an event about `event`'s first device. `around` is the flow run's context, with the related resources."""
    resource = {**device_resource(event.devices[0]), **event.labels}
    around.copy().run(emit_event, event.name, resource, payload={**event.payload})


class SharedClient:
    """A synchronous API client for all engine threads of a runner.

    In an async flow each task would set up its own client: 58 to 64 ms of CPU, against 2.6 ms for a shared one
    (Prefect 3.8.8).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: SyncClientContext | None = None
        #: Context in which an own client was entered; `None`: the flow's client is used, or no client is open.
        self._own: Context | None = None
        self._closed = False

    def open(self) -> SyncClientContext:
        """Return the context of the flow's client, or of a new one. Raise `RuntimeError` after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the task runner has ended; it takes no more tasks")
            if self._context is None and TaskRunContext.get() is None:
                # A surrounding task's client is not used: it is closed at the end of that task.
                self._context = SyncClientContext.get()
            if self._context is None:
                # The count of 1: engines enter this context again, and must not open or close the client.
                # `SyncClientContext` itself is not entered: it asks the API for its version, and an unreachable API
                # must fail tasks, not their `submit`.
                self._own, context = copy_context(), SyncClientContext()
                self._own.run(context.client.__enter__)
                context._context_stack = 1
                self._context = context
            return self._context

    @contextlib.contextmanager
    def lend(self) -> Iterator[SyncPrefectClient]:
        """Yield the client; it stays open after the `with` block."""
        yield self.open().client

    def close(self) -> None:
        """Close the client, unless it is the flow's client."""
        with self._lock:
            self._closed = True
            own, self._own = self._own, None
            if own is not None and self._context is not None:
                own.run(self._context.client.__exit__, None, None, None)
            self._context = None
