"""Bring reports to Prefect's API as artifacts, without ever delaying or failing a task.

It covers keys, the API calls and the thread that makes them. Text and numbers come from `markdown`
and `model`; a task's history is `history`, which hands its calls to the same thread.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_logger
from slugify import slugify

from prefect_gpu.reports.markdown import flow_markdown, flow_metadata, task_markdown
from prefect_gpu.reports.model import TaskReport

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

TASK_PREFIX = "gpu-memory"
FLOW_PREFIX = "gpu-flow"

#: Characters of a key: enough for any name a person would type, and a URL stays short.
KEY_LIMIT = 100

#: Reports that may wait to be published; more than a thousand processes end behind an API that
#: answers within its time limit only if it hangs.
WAITING_LIMIT = 1000

#: Seconds between the tries for one report. Prefect's own client would go on for a minute.
RETRY_DELAYS_S = (0.5, 2.0)

#: Seconds that one request may take; Prefect's default of 60 would outlive most flows' patience.
REQUEST_TIMEOUT_S = 15.0

#: What the API says about a value that is cut.
_VALUE_LIMIT = 500


def bounded_settings(of: SettingsContext, timeout_s: float) -> SettingsContext:
    """Give settings with a limit on how long one call of the API may take."""
    # Not `copy_with_update`, which reads all settings anew: 20 ms of CPU, twice for each flow.
    settings = of.settings
    client = settings.client.model_copy(update={"max_retries": 0})
    api = settings.api.model_copy(update={"request_timeout": timeout_s})
    settings = settings.model_copy(update={"client": client, "api": api})
    return SettingsContext(profile=of.profile, settings=settings)


# Slugify looks for a package that is not there each time, through all of `sys.path`: 0.3 ms.
@functools.lru_cache(256)
def artifact_key(prefix: str, name: str) -> str:
    """Make an artifact's key: lower-case letters, digits and single dashes, never empty.

    Args:
        prefix: What kind of artifact, `gpu-memory`.
        name: Any text. Other scripts are transliterated; what cannot be, or is too long, is told
            apart by a digest.
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
        Exception: Whatever the client raises when the API does not take it.
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
        reports: One for each process; compact ones will do.
        client: Prefect's client of the flow.
        flow_name: Names the artifact.
        flow_run_id: Where it shows; `None`: among all artifacts only.

    Raises:
        Exception: Whatever the client raises when the API does not take it.
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
    """Cut values to what Prefect takes."""
    return {key: value[:_VALUE_LIMIT] for key, value in metadata.items()}


class Publisher:
    """Publish reports from one daemon thread, so that no task waits for the API.

    Safe to call from any thread. No method raises because of the API. An API that does not answer
    costs a few tries for the first report and one for each that follows, until it answers again;
    reports that were lost are counted, and `close` warns once.

    Args:
        client_factory: Opens a client for the flow's API. Called in the thread, under the settings
            that held where the publisher was made.
        logger: Takes the warning; Prefect's `prefect.gpu` by default.
        retry_delays_s: Seconds between tries.
    """

    def __init__(
        self,
        client_factory: Callable[[], AbstractContextManager[SyncPrefectClient]],
        *,
        logger: Any = None,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._client_factory = client_factory
        self._logger = logger or get_logger("gpu")
        self._retry_delays_s = tuple(retry_delays_s)
        # A thread starts without Prefect's context variables. Without the flow's settings,
        # `create_artifact` would emit its event to no API, and boot a temporary server for that.
        self._settings = get_settings_context()
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        #: Jobs that wait, oldest first, by series.
        self._series: dict[Hashable, deque[_Job]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._hurry = threading.Event()
        self._given_up = False
        self._accepted = 0
        self._done = 0
        self._lost = 0
        self._last_error = ""
        self._warned = False

    @property
    def lost(self) -> int:
        """Reports given up so far."""
        return self._lost

    def publish(self, report: TaskReport) -> None:
        """Take one process's report; return at once."""
        self.put(lambda client: publish_task_report(report, client))

    def publish_flow(
        self, reports: Sequence[TaskReport], *, flow_name: str, flow_run_id: UUID | None
    ) -> None:
        """Take a flow run's report; return at once."""
        kept = tuple(reports)
        self.put(
            lambda client: publish_flow_report(
                kept, client, flow_name=flow_name, flow_run_id=flow_run_id
            )
        )

    def put(
        self, job: Callable[[SyncPrefectClient], None], series: Hashable = None, most: int = 0
    ) -> None:
        """Take any other call that brings one thing to the API; return at once.

        It may be made again after a failure, and what is lost counts as a report that is lost.

        Args:
            job: The call.
            series: Of what it is the latest part; `None`: of nothing.
            most: Parts of a series that anybody reads, from 1: where more of them wait, the oldest are
                dropped, and are not lost.
        """
        with self._lock:
            if self._closed or self._accepted - self._done >= WAITING_LIMIT:
                self._lost += 1
                self._last_error = self._last_error or (
                    "it came after the flow had closed its reports"
                    if self._closed
                    else f"{WAITING_LIMIT} others were waiting for the API"
                )
                return
            self._accepted += 1
            waiting = _Job(job, series)
            self._queue.put(waiting)
            if series is not None:
                self._line_up(waiting, most)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="prefect-gpu-publisher", daemon=True
                )
                self._thread.start()

    def _line_up(self, job: _Job, most: int) -> None:
        line = self._series.setdefault(job.series, deque())
        line.append(job)
        while len(line) > most:
            line.popleft().call = None
            self._done += 1

    def _take(self) -> Callable[[SyncPrefectClient], None] | None:
        """Wait for the next call; `None`: there is to be none."""
        while True:
            job = self._queue.get()
            if job is None:
                return None
            with self._lock:
                call, job.call = job.call, None
                if call is None:
                    # Newer ones of its series came meanwhile.
                    continue
                line = self._series.get(job.series)
                if line is not None:
                    line.popleft()
                    if not line:
                        del self._series[job.series]
            return call

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish what waits, then end the thread; give up after `timeout_s`, with one warning."""
        with self._lock:
            first = not self._closed
            self._closed = True
            thread = self._thread
            if first:
                self._queue.put(None)
        if thread is not None:
            thread.join(timeout_s)
            self._given_up = True
            self._hurry.set()
        with self._lock:
            missing = self._lost + self._accepted - self._done
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
            link = _Link(self._client_factory)
            answers = True
            while (job := self._take()) is not None and not self._given_up:
                error = self._try(job, link, self._retry_delays_s if answers else ())
                # A job holds its report; the loop would hold it until the next one comes.
                del job
                answers = error == ""
                with self._lock:
                    self._done += 1
                    if error:
                        self._lost += 1
                        self._last_error = error
            link.close()

    def _try(
        self,
        job: Callable[[SyncPrefectClient], None],
        link: _Link,
        delays_s: Sequence[float],
    ) -> str:
        """Run a job; give what went wrong the last time, or nothing."""
        for delay_s in (*delays_s, None):
            try:
                job(link.client())
                return ""
            except Exception as error:  # noqa: BLE001
                # Process boundary: the API, or a report that cannot be drawn, is not the flow's.
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                link.close()
                if delay_s is None or not may_pass(error):
                    return text
            self._hurry.wait(delay_s)
        raise AssertionError("the last try has no delay")


@dataclass(slots=True, eq=False)
class _Job:
    """A call that waits to be made."""

    #: `None`: it is not to be made.
    call: Callable[[SyncPrefectClient], None] | None
    #: See `Publisher.put`.
    series: Hashable


def may_pass(error: Exception) -> bool:
    """Tell whether trying again could help: not where the API answered that it will not."""
    if isinstance(error, PrefectHTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in (408, 425, 429)
    return True


class _Link:
    """The connection: opened when first needed, and again after a failure."""

    def __init__(self, factory: Callable[[], AbstractContextManager[SyncPrefectClient]]) -> None:
        self._factory = factory
        self._stack = ExitStack()
        self._client: SyncPrefectClient | None = None

    def client(self) -> SyncPrefectClient:
        if self._client is None:
            self._client = self._stack.enter_context(self._factory())
        return self._client

    def close(self) -> None:
        self._client = None
        try:
            self._stack.close()
        except Exception as error:  # noqa: BLE001 - a broken connection may fail to close
            get_logger("gpu").debug("closing the reports' client: %s", error)
