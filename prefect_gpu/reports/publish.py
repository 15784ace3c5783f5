"""Publish reports to Prefect's API as artifacts, without delaying or failing a task.

This module has artifact keys, API calls, their thread (also used by `history`), and files of unpublished reports. Text
and numbers come from `markdown` and `model`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_logger
from prefect.utilities.urls import url_for
from slugify import slugify

from prefect_gpu.errors import CapacityError
from prefect_gpu.live.progress import RunCounts, progress_words
from prefect_gpu.process_resources import start_thread
from prefect_gpu.reports.markdown import (
    flow_headline,
    flow_markdown,
    flow_metadata,
    task_markdown,
    task_summary,
)
from prefect_gpu.reports.model import TaskReport, UnstartedRun
from prefect_gpu.units import counted

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

TASK_PREFIX = "gpu-memory"
FLOW_PREFIX = "gpu-flow"
PROGRESS_PREFIX = "gpu-progress"

#: Seconds from one progress call to the next, and after a failed call. A shorter flow has no progress artifact.
PROGRESS_S = 5.0
PROGRESS_FAILED_S = 60.0

#: Most characters of a key, so that the URL of an artifact stays short.
KEY_LIMIT = 100

#: Items in one answer of the API.
PAGE = 200

#: Most reports that wait to be published. So many wait only if the API hangs.
WAITING_LIMIT = 1000

#: First and longest pause in seconds after a failed call. The pause doubles while all calls fail.
RETRY_DELAYS_S = (0.5, 8.0)

#: Most calls for one report that end in a timeout or a server error. Each of these may have created the artifact.
TRIES = 3

#: Seconds for one request. Prefect's default of 60 is too long at the end of a flow.
REQUEST_TIMEOUT_S = 15.0

#: Longest pause in seconds that the API may ask for.
LONGEST_WAIT_S = 300.0

#: Most characters of a metadata value that the API accepts.
_VALUE_LIMIT = 500


def bounded_settings(of: SettingsContext, timeout_s: float) -> SettingsContext:
    """Return settings under which one API call takes at most `timeout_s` seconds and is not retried."""
    # `copy_with_update` would read all settings again: 20 ms of CPU, twice for each flow.
    settings = of.settings
    client = settings.client.model_copy(update={"max_retries": 0})
    api = settings.api.model_copy(update={"request_timeout": timeout_s})
    settings = settings.model_copy(update={"client": client, "api": api})
    # Validation would change settings that other threads use.
    return SettingsContext.model_construct(profile=of.profile, settings=settings)


# Cached: slugify searches `sys.path` for a package that is not installed, 0.3 ms a call.
@functools.lru_cache(256)
def artifact_key(prefix: str, name: str) -> str:
    """Return an artifact's key from a kind (`gpu-memory`) and any name: lower-case letters, digits and single dashes.

    Other scripts are transliterated. A digest replaces text that is too long or has no transliteration.
    """
    front = slugify(prefix)
    slug = slugify(name)
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    room = KEY_LIMIT - len(front) - 1
    if len(slug) > room:
        slug = f"{slug[: room - 9].rstrip('-')}-{digest}"
    return "-".join(part for part in (front, slug or digest) if part)


def task_artifact(report: TaskReport, earlier: Sequence[TaskReport] = ()) -> ArtifactCreate:
    """Return the artifact of one process; `earlier`: (compact) reports of earlier processes of its task run."""
    return ArtifactCreate(
        key=artifact_key(TASK_PREFIX, report.task_name),
        type="markdown",
        description=task_summary(report),
        data=task_markdown(report, earlier),
        metadata_=cut_values(report.metadata()),
        task_run_id=report.task_run_id,
        flow_run_id=report.flow_run_id,
    )


def flow_artifact(
    reports: Sequence[TaskReport],
    unstarted: Sequence[UnstartedRun] = (),
    *,
    flow_name: str,
    flow_run_id: UUID | None,
) -> ArtifactCreate:
    """Return the artifact of one flow run from a (compact) report of each process; see `flow_markdown`."""
    return ArtifactCreate(
        key=artifact_key(FLOW_PREFIX, flow_name),
        type="markdown",
        description=f"Flow report · {flow_headline(reports, unstarted)}",
        # `url_for` returns `None` if Prefect has no address of a UI.
        data=flow_markdown(
            reports, unstarted, flow_name=flow_name, link=functools.partial(url_for, "task-run")
        ),
        metadata_=cut_values(flow_metadata(reports, unstarted)),
        flow_run_id=flow_run_id,
    )


class ProgressArtifact:
    """The progress artifact of one flow run; `read` returns the counts to show. For one thread at a time."""

    def __init__(
        self, read: Callable[[], RunCounts], *, flow_name: str, flow_run_id: UUID | None
    ) -> None:
        self._read = read
        self._key = artifact_key(PROGRESS_PREFIX, flow_name)
        self._flow_run_id = flow_run_id
        #: Id of the artifact; `None`: not created yet.
        self.id: UUID | None = None
        #: Last published progress.
        self._said: tuple[float, str] | None = None

    def publish(self, client: SyncPrefectClient, may_create: bool = True) -> None:
        """Create the artifact, or update it if the progress has changed."""
        if self.id is None and not may_create:
            return
        counts = self._read()
        said = counts.percent, progress_words(counts)
        if said == self._said:
            return
        content: dict[str, Any] = {"data": said[0], "description": said[1]}
        if self.id is None:
            artifact = ArtifactCreate(
                key=self._key, type="progress", flow_run_id=self._flow_run_id, **content
            )
            self.id = client.create_artifact(artifact).id
        else:
            # Not `update_artifact`: it emits an event, and at exit Prefect waits for events with a warning (3.8.8).
            which = {"id": self.id}
            client.request("PATCH", "/artifacts/{id}", path_params=which, json=content)
        self._said = said


def read_pages(
    client: SyncPrefectClient, what: str, asked: Mapping[str, Any], **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield all items of a kind (`artifacts`, `task_runs`) that match the API filter `asked`, with a call a page."""
    for offset in itertools.count(0, PAGE):
        body = {**asked, "limit": PAGE, "offset": offset}
        page = client.request("POST", f"/{what}/filter", json=body, **options).json()  # type: ignore[arg-type]
        yield from page
        if len(page) < PAGE:
            return


def cut_values(metadata: dict[str, str]) -> dict[str, str]:
    """Return metadata with values cut to the length that Prefect accepts."""
    return {key: value[:_VALUE_LIMIT] for key, value in metadata.items()}


@dataclass(frozen=True, slots=True)
class Job:
    """An API call that the publisher's thread makes."""

    #: Makes the API call; repeated after a failure.
    call: Callable[[SyncPrefectClient], object]
    #: Series whose number of waiting jobs is limited, see `Publisher.put`. `None`: no series.
    series: Hashable = None
    #: Returns the artifact, whose text goes to a file if the job is given up. `None`: a given-up job is lost.
    artifact: Callable[[], ArtifactCreate] | None = None
    #: Number of failed calls that the API may have carried out.
    tries: int = 0
    #: The job is tried once, after all other jobs, and dropped silently if the call fails.
    optional: bool = False


class Publisher:
    """Publishes reports from one daemon thread, so that no task waits for the API.

    Any thread may call any method, and no method raises because of the API. While the API does not answer, reports wait
    in their order. Reports that the API refuses, or that still wait at the end, are written to files; `close` logs one
    warning with the folder. For each try the thread calls `lend`, which returns a client for the flow's API, under the
    Prefect settings of the publisher's creation.
    """

    def __init__(
        self,
        lend: Callable[[], AbstractContextManager[SyncPrefectClient]],
        *,
        logger: Any = None,
        retry_delays_s: tuple[float, float] = RETRY_DELAYS_S,
    ) -> None:
        self._lend = lend
        self._logger = logger or get_logger("gpu")
        self._first_delay_s, self._most_delay_s = retry_delays_s
        # Without the flow's settings `create_artifact` would start a temporary server to emit its event.
        self._settings = get_settings_context()
        #: Guards the attributes below; notified when a job is added or done, and on `close`.
        self._changed = threading.Condition()
        #: Waiting jobs, oldest first, and the job of the call in progress, which is not among the waiting jobs.
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._thread: threading.Thread | None = None
        #: Monotonic seconds of the earliest next call.
        self._next_call_s = 0.0
        #: Pause in seconds after the last call; 0: the call succeeded.
        self._delay_s = 0.0
        #: Progress to publish (`None`: there is none), and monotonic seconds of its next call.
        self._progress: ProgressArtifact | None = None
        self._progress_s = 0.0
        #: Closed: new jobs are refused, waiting jobs are still published. Ended: nothing is published any more.
        self._closed = False
        self._ended = False
        #: Number of reports written to files in `folder`, and of reports that were lost.
        self.saved = 0
        self.lost = 0
        #: Folder of unpublished reports; `None`: none was written yet.
        self.folder: Path | None = None
        #: Id of the artifact of `publish_flow`, once the API has created it.
        self.flow_report_id: UUID | None = None
        self._last_error = ""
        self._warned = False

    def publish(self, report: TaskReport, earlier: Sequence[TaskReport] = ()) -> None:
        """Publish the report of one process; return at once. See `task_artifact`."""
        make = functools.partial(task_artifact, report, earlier)
        self._put(Job(lambda client: client.create_artifact(make()), artifact=make))

    def publish_flow(
        self,
        reports: Sequence[TaskReport],
        unstarted: Sequence[UnstartedRun] = (),
        *,
        flow_name: str,
        flow_run_id: UUID | None,
    ) -> None:
        """Publish the report of one flow run; return at once. See `flow_artifact`."""
        make = functools.partial(
            flow_artifact, reports, unstarted, flow_name=flow_name, flow_run_id=flow_run_id
        )

        def create(client: SyncPrefectClient) -> None:
            self.flow_report_id = client.create_artifact(make()).id

        self._put(Job(create, artifact=make))

    def show_progress(self, progress: ProgressArtifact) -> None:
        """Publish a flow's progress every `PROGRESS_S` seconds unless other jobs wait; return at once."""
        with self._changed:
            if self._progress is None and not self._closed:
                self._progress = progress
                self._progress_s = time.monotonic() + PROGRESS_S
                self._start()
                self._changed.notify_all()

    def put(
        self, call: Callable[[SyncPrefectClient], object], series: Hashable = None, most: int = 0
    ) -> None:
        """Queue an API call, which is repeated after a failure; return at once.

        At most `most` calls of a series wait: the oldest is dropped. A call that is given up counts as a lost report.
        """
        self._put(Job(call, series), most)

    def _put(self, job: Job, most: int = 0) -> None:
        with self._changed:
            if self._closed:
                self._give_up(job, "it came after the flow had closed its reports")
                return
            if len(self._waiting) + (self._current is not None) >= WAITING_LIMIT:
                self._give_up(job, f"{WAITING_LIMIT} others were waiting for the API")
                return
            if job.series is not None:
                same = [each for each in self._waiting if each.series == job.series]
                if len(same) >= most:
                    self._waiting.remove(same[0])
            self._waiting.append(job)
            self._changed.notify_all()
            self._start()

    def _start(self) -> None:
        """Start the thread if there is none. The caller holds the lock."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._run, "prefect-gpu-publisher")
            except CapacityError as error:
                # The next report tries to start the thread again.
                self._last_error = str(error)

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish waiting jobs and end the thread; after `timeout_s` seconds write the rest to files, with one warning.

        If Ctrl-C or a signal interrupts this call, the thread continues: call `close` again to wait, or `end`.
        """
        with self._changed:
            progress = self._progress
            if not self._closed and progress is not None:
                # The last progress shows how the flow ended; a short flow has no artifact. The call that creates the
                # artifact may be in progress, so only the publisher's thread knows whether there is one.
                last = functools.partial(progress.publish, may_create=False)
                self._waiting.append(Job(last, optional=True))
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
            # Not `Thread.join`: before Python 3.13 an interrupted `join` marks the thread as ended.
            # After `end` nothing waits for the thread, which may still wait for the API.
            if (
                thread is None
                or self._ended
                or not self._changed.wait_for(self._is_done, timeout_s)
            ):
                self.end(f"the API took longer than {timeout_s:g}s")
                return
        thread.join()
        self.end("")

    def _is_done(self) -> bool:
        return self._current is None and not self._waiting

    def end(self, reason: str) -> None:
        """End the thread and write waiting reports to files, with one warning that has the `reason`. Idempotent."""
        with self._changed:
            self._ended = self._closed = True
            self._changed.notify_all()
            for job in filter(None, (self._current, *self._waiting)):
                self._give_up(job, self._last_error or reason)
            self._current = None
            self._waiting.clear()
            if self._warned or not self.saved + self.lost:
                return
            self._warned = True
            ends = (self.saved, f"not published but written to {self.folder}"), (self.lost, "lost")
            said = [
                f"{counted(number, 'memory report was', 'memory reports were')} {end}"
                for number, end in ends
                if number
            ]
            reason = self._last_error
        self._logger.warning(
            f"{' and '.join(said)}: {reason}. Tasks and their results are not affected; "
            "check that PREFECT_API_URL answers"
        )

    def _run(self) -> None:
        with bounded_settings(self._settings, REQUEST_TIMEOUT_S):
            while (job := self._next()) is not None:
                error = None
                try:
                    with self._lend() as client:
                        job.call(client)
                except Exception as raised:  # noqa: BLE001
                    # Process boundary: the API, or an error in drawing a report, must not fail the flow.
                    error = raised
                self._take_answer(job, error)
                # The job's report must not stay alive until the next job.
                del job, error

    def _next(self) -> Job | None:
        """Wait until the next job is due, and return the job; `None`: the publisher has ended."""
        with self._changed:
            while not self._ended and (self._waiting or not self._closed):
                wait_s = None
                if self._waiting:
                    if self._waiting[0].optional and self._delay_s:
                        # No call for an optional job while the API is away.
                        self._waiting.popleft()
                        self._changed.notify_all()
                        continue
                    wait_s = self._next_call_s - time.monotonic()
                    if wait_s <= 0:
                        self._current = self._waiting.popleft()
                        return self._current
                elif self._progress is not None:
                    wait_s = self._progress_s - time.monotonic()
                    if wait_s <= 0:
                        self._progress_s = time.monotonic() + PROGRESS_S
                        self._current = Job(self._progress.publish, optional=True)
                        return self._current
                self._changed.wait(wait_s)
        return None

    def _take_answer(self, job: Job, error: Exception | None) -> None:
        with self._changed:
            self._current = None
            self._changed.notify_all()
            if self._ended:
                return
            if error is not None and job.optional:
                pause_s = max(PROGRESS_FAILED_S, read_retry_after(error))
                self._progress_s = time.monotonic() + pause_s
                return
            if error is None:
                self._delay_s = self._next_call_s = 0.0
                if not self.saved + self.lost:
                    self._last_error = ""
                return
            tries = job.tries + (not is_away(error))
            if not may_pass(error) or tries >= TRIES:
                self._give_up(job, first_line(error))
                return
            self._last_error = first_line(error)
            self._waiting.appendleft(replace(job, tries=tries))
            self._delay_s = min(self._delay_s * 2 or self._first_delay_s, self._most_delay_s)
            self._next_call_s = time.monotonic() + max(self._delay_s, read_retry_after(error))

    def _give_up(self, job: Job, reason: str) -> None:
        """Write an unpublished report to a file, or count the report as lost. The caller holds the lock."""
        if job.optional:
            return
        self._last_error = reason
        try:
            if job.artifact is not None:
                self._save(job.artifact())
                self.saved += 1
                return
        except Exception as error:  # noqa: BLE001
            # Process boundary: a full disk, or an error in drawing a report, must not fail the flow.
            self._last_error = f"{reason}; {first_line(error)}"
        self.lost += 1

    def _save(self, artifact: ArtifactCreate) -> None:
        if self.folder is None:
            name = str(artifact.flow_run_id or f"{datetime.now():%Y-%m-%d-%H%M%S}")
            folder = self._settings.settings.home / "prefect-gpu" / "reports" / name
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = folder
        for number in itertools.count(self.saved + 1):
            # Another runner of the flow run may write to the same folder.
            with contextlib.suppress(FileExistsError):
                path = self.folder / f"{artifact.key}-{number}.md"
                with path.open("x", encoding="utf-8", errors="replace") as file:
                    file.write(str(artifact.data))
                return


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def may_pass(error: Exception) -> bool:
    """Return whether another try could succeed: the API has not refused the call."""
    if isinstance(error, PrefectHTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in (408, 425, 429)
    return True


def is_away(error: Exception) -> bool:
    """Return whether a call was certainly not carried out: the API does not answer, or accepts no calls now."""
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code in (425, 429, 502, 503, 504)
    timeout = isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout))
    return isinstance(error, (httpx.TransportError, OSError)) and not timeout


def read_retry_after(error: Exception) -> float:
    """Return the pause in seconds that the API asks for; 0: none."""
    if not isinstance(error, PrefectHTTPStatusError):
        return 0.0
    try:
        # Prefect does not send the header's other form, a date.
        return min(max(float(error.response.headers.get("Retry-After", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0
