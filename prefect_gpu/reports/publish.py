"""Publish reports to Prefect's API as artifacts, without delaying or failing a task.

It covers the keys of artifacts, the API calls and the thread that makes them. Text and numbers come from `markdown` and `model`. `history` makes its calls in the same thread.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_logger
from slugify import slugify

from prefect_gpu.errors import CapacityError
from prefect_gpu.process_resources import start_thread
from prefect_gpu.reports.markdown import flow_markdown, flow_metadata, task_markdown
from prefect_gpu.reports.model import TaskReport

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

TASK_PREFIX = "gpu-memory"
FLOW_PREFIX = "gpu-flow"

#: Characters of a key at most, so that the URL of an artifact stays short.
KEY_LIMIT = 100

#: Reports that may wait to be published. More wait only if the API hangs.
WAITING_LIMIT = 1000

#: Seconds between the tries for one report. Prefect's own client would retry for a minute.
RETRY_DELAYS_S = (0.5, 2.0)

#: Seconds that one request may take. Prefect's default of 60 is too long at the end of a flow.
REQUEST_TIMEOUT_S = 15.0

#: Characters of a metadata value that the API accepts.
_VALUE_LIMIT = 500


def bounded_settings(of: SettingsContext, timeout_s: float) -> SettingsContext:
    """Return settings under which one call of the API takes at most `timeout_s` and is not retried."""
    # `copy_with_update` would read all settings again: 20 ms of CPU, twice for each flow.
    settings = of.settings
    client = settings.client.model_copy(update={"max_retries": 0})
    api = settings.api.model_copy(update={"request_timeout": timeout_s})
    settings = settings.model_copy(update={"client": client, "api": api})
    return SettingsContext(profile=of.profile, settings=settings)


# Each call of slugify searches `sys.path` for a package that is not installed, which takes 0.3 ms.
@functools.lru_cache(256)
def artifact_key(prefix: str, name: str) -> str:
    """Return an artifact's key: lower-case letters, digits and single dashes, never empty.

    Args:
        prefix: Kind of artifact, as in `gpu-memory`.
        name: Any text. Other scripts are transliterated. A name that is too long, or that cannot be
            transliterated, gets a digest.
    """
    front = slugify(prefix)
    slug = slugify(name)
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    room = KEY_LIMIT - len(front) - 1
    if len(slug) > room:
        slug = f"{slug[: room - 9].rstrip('-')}-{digest}"
    return "-".join(part for part in (front, slug or digest) if part)


def publish_task_report(report: TaskReport, client: SyncPrefectClient) -> None:
    """Create the artifact of one process, on its task run.

    Raises:
        Exception: Any error of the client, if the API does not accept it.
    """
    client.create_artifact(
        ArtifactCreate(
            key=artifact_key(TASK_PREFIX, report.task_name),
            type="markdown",
            description="What one GPU process had, took and needed, by prefect_gpu.",
            data=task_markdown(report),
            metadata_=cut_values(report.metadata()),
            task_run_id=report.task_run_id,
            flow_run_id=report.flow_run_id,
        )
    )


def publish_flow_report(
    reports: Sequence[TaskReport],
    client: SyncPrefectClient,
    *,
    flow_name: str,
    flow_run_id: UUID | None,
) -> None:
    """Create the artifact of one flow run.

    Args:
        reports: One for each process; compact ones are enough.
        client: Prefect's client of the flow.
        flow_name: Names the artifact.
        flow_run_id: The run whose page shows it. `None`: no run.

    Raises:
        Exception: Any error of the client, if the API does not accept it.
    """
    client.create_artifact(
        ArtifactCreate(
            key=artifact_key(FLOW_PREFIX, flow_name),
            type="markdown",
            description="What ran on each device, and what to write in its tags next time.",
            data=flow_markdown(reports, flow_name=flow_name),
            metadata_=cut_values(flow_metadata(reports)),
            flow_run_id=flow_run_id,
        )
    )


def cut_values(metadata: dict[str, str]) -> dict[str, str]:
    """Return metadata with its values cut to what Prefect accepts."""
    return {key: value[:_VALUE_LIMIT] for key, value in metadata.items()}


class Publisher:
    """Publishes reports from one daemon thread, so that no task waits for the API.

    Any thread may call any method, and no method raises because of the API. While the API does not
    answer, the first report costs a few tries and each further one a single try. Lost reports are
    counted, and `close` logs one warning about them.

    Args:
        lend: Returns a client for the flow's API, for use in a `with` block. It is called for each
            try, in the publisher's thread, under the settings that were active when the publisher was
            created.
        logger: Gets the warning; Prefect's `prefect.gpu` by default.
        retry_delays_s: Seconds between tries.
    """

    def __init__(
        self,
        lend: Callable[[], AbstractContextManager[SyncPrefectClient]],
        *,
        logger: Any = None,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._lend = lend
        self._logger = logger or get_logger("gpu")
        self._retry_delays_s = tuple(retry_delays_s)
        # A thread starts without Prefect's context variables. Without the flow's settings
        # `create_artifact` would start a temporary server to emit its event.
        self._settings = get_settings_context()
        #: Set once nothing may be waited for.
        self._hurry = threading.Event()
        #: Guards everything below; notified when a job is added or the publisher is closed.
        self._changed = threading.Condition()
        #: Calls and their series (see `put`), oldest first; the one that is being made is not among them.
        self._waiting: deque[tuple[Callable[[SyncPrefectClient], None], Hashable]] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Reports that were given up so far.
        self.lost = 0
        self._last_error = ""
        self._warned = False

    def publish(self, report: TaskReport) -> None:
        """Publish the report of one process; return at once."""
        self.put(functools.partial(publish_task_report, report))

    def put(
        self, call: Callable[[SyncPrefectClient], None], series: Hashable = None, most: int = 0
    ) -> None:
        """Make any other call that publishes one thing; return at once.

        The call may be repeated after a failure. If it is given up, it counts as a lost report.

        Args:
            call: Publishes it.
            series: Jobs of one series replace each other while they wait. `None`: of no series.
            most: Jobs of the series that may wait, from 1. Older ones are dropped, and are not lost.
        """
        with self._changed:
            if self._closed or len(self._waiting) + self._busy >= WAITING_LIMIT:
                self.lost += 1
                self._last_error = self._last_error or (
                    "it came after the flow had closed its reports"
                    if self._closed
                    else f"{WAITING_LIMIT} others were waiting for the API"
                )
                return
            if series is not None:
                same = [job for job in self._waiting if job[1] == series]
                if len(same) >= most:
                    self._waiting.remove(same[0])
            self._waiting.append((call, series))
            self._changed.notify()
            if self._thread is None:
                try:
                    self._thread = start_thread(self._run, "prefect-gpu-publisher")
                except CapacityError as error:
                    # The next report tries again.
                    self._last_error = str(error)

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish what waits and end the thread; give up after `timeout_s`, with one warning."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        self._hurry.set()
        with self._changed:
            missing = self.lost + len(self._waiting) + self._busy
            if missing == 0 or self._warned:
                return
            self._warned = True
        reason = self._last_error or f"the API took longer than {timeout_s:g}s"
        reports = "1 memory report was" if missing == 1 else f"{missing} memory reports were"
        self._logger.warning(
            f"{reports} lost: {reason}. Tasks and their results are not affected; "
            "check that PREFECT_API_URL answers"
        )

    def _run(self) -> None:
        with bounded_settings(self._settings, REQUEST_TIMEOUT_S):
            answers = True
            while (call := self._next()) is not None:
                error = self._try(call, self._retry_delays_s if answers else ())
                # The call holds its report, which must not stay alive until the next one comes.
                del call
                answers = error == ""
                with self._changed:
                    self._busy = False
                    if error:
                        self.lost += 1
                        self._last_error = error

    def _next(self) -> Callable[[SyncPrefectClient], None] | None:
        """Wait for the next call; return `None` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting or self._hurry.is_set():
                return None
            self._busy = True
            return self._waiting.popleft()[0]

    def _try(self, call: Callable[[SyncPrefectClient], None], delays_s: Sequence[float]) -> str:
        """Make a call; return the last error, or an empty text."""
        for delay_s in (*delays_s, None):
            try:
                with self._lend() as client:
                    call(client)
                return ""
            except Exception as error:  # noqa: BLE001
                # Process boundary: the API, or a report that cannot be drawn, must not fail the flow.
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                if delay_s is None or not may_pass(error):
                    return text
            self._hurry.wait(delay_s)
        raise AssertionError("the last try has no delay")


def may_pass(error: Exception) -> bool:
    """Return whether another try could help: not if the API answered that it refuses."""
    if isinstance(error, PrefectHTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in (408, 425, 429)
    return True
