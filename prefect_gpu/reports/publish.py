"""Publish reports to Prefect's API as artifacts, without delaying or failing a task.

It covers the keys of artifacts, the API calls, the thread that makes them, and the folder for reports that the API
does not take. Text and numbers come from `markdown` and `model`. `history` makes its calls in the same thread.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
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

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

TASK_PREFIX = "gpu-memory"
FLOW_PREFIX = "gpu-flow"
PROGRESS_PREFIX = "gpu-progress"

#: Seconds between two calls that publish a flow's progress, and after one that has failed. A flow that is over before the
#: first has no such artifact.
PROGRESS_S = 5.0
PROGRESS_FAILED_S = 60.0

#: Characters of a key at most, so that the URL of an artifact stays short.
KEY_LIMIT = 100

#: Reports that may wait to be published. More wait only if the API hangs.
WAITING_LIMIT = 1000

#: Seconds between a failed call and the next one. They double up to the second number while all calls fail.
RETRY_DELAYS_S = (0.5, 8.0)

#: Calls for one report that the API may answer with an error of its own, or not in time. It may have created the
#: artifact all the same, so more calls could create many.
TRIES = 3

#: Seconds that one request may take. Prefect's default of 60 is too long at the end of a flow.
REQUEST_TIMEOUT_S = 15.0

#: Seconds at most for which the API may ask not to be called again.
LONGEST_WAIT_S = 300.0

#: Characters of a metadata value that the API accepts.
_VALUE_LIMIT = 500


def bounded_settings(of: SettingsContext, timeout_s: float) -> SettingsContext:
    """Return settings under which one call of the API takes at most `timeout_s` and is not retried."""
    # `copy_with_update` would read all settings again: 20 ms of CPU, twice for each flow.
    settings = of.settings
    client = settings.client.model_copy(update={"max_retries": 0})
    api = settings.api.model_copy(update={"request_timeout": timeout_s})
    settings = settings.model_copy(update={"client": client, "api": api})
    # Validation would change settings that other threads use.
    return SettingsContext.model_construct(profile=of.profile, settings=settings)


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


def task_artifact(report: TaskReport, earlier: Sequence[TaskReport] = ()) -> ArtifactCreate:
    """Return the artifact of one process, on its task run.

    Args:
        report: Of the process.
        earlier: Of the processes that the task run had before it; compact ones are enough.
    """
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
    """Return the artifact of one flow run.

    Args:
        reports: One for each process; compact ones are enough.
        unstarted: Task runs that never got a process.
        flow_name: Names the artifact.
        flow_run_id: The run whose page shows it. `None`: no run.
    """
    return ArtifactCreate(
        key=artifact_key(FLOW_PREFIX, flow_name),
        type="markdown",
        description=f"Flow report · {flow_headline(reports, unstarted)}",
        data=flow_markdown(reports, unstarted, flow_name=flow_name, link=_task_run_url),
        metadata_=cut_values(flow_metadata(reports, unstarted)),
        flow_run_id=flow_run_id,
    )


class ProgressArtifact:
    """The progress of one flow run, as an artifact that its page lists. For one thread at a time.

    Args:
        read: Returns how far the flow is.
        flow_name: Names the artifact.
        flow_run_id: The run whose page shows it.
    """

    def __init__(
        self, read: Callable[[], RunCounts], *, flow_name: str, flow_run_id: UUID | None
    ) -> None:
        self._read = read
        self._key = artifact_key(PROGRESS_PREFIX, flow_name)
        self._flow_run_id = flow_run_id
        #: `None`: it was not created.
        self.id: UUID | None = None
        #: What it says.
        self._said: tuple[float, str] | None = None

    def publish(self, client: SyncPrefectClient) -> None:
        """Create it, or change it where there is news."""
        counts = self._read()
        said = counts.percent, progress_words(counts)
        if said == self._said:
            return
        share, words = said
        if self.id is None:
            artifact = ArtifactCreate(
                key=self._key,
                type="progress",
                data=share,
                description=words,
                flow_run_id=self._flow_run_id,
            )
            self.id = client.create_artifact(artifact).id
        else:
            # Not `update_artifact`, which emits an event for each change. At the end of a program Prefect waits for
            # those that are not sent, with a warning (3.8.8).
            client.request(
                "PATCH",
                "/artifacts/{id}",
                path_params={"id": self.id},
                json={"data": share, "description": words},
            )
        self._said = said


def _task_run_url(task_run_id: UUID) -> str | None:
    """Return the address of a task run's page; `None`: no address of a UI is known."""
    return url_for("task-run", task_run_id)


def cut_values(metadata: dict[str, str]) -> dict[str, str]:
    """Return metadata with its values cut to what Prefect accepts."""
    return {key: value[:_VALUE_LIMIT] for key, value in metadata.items()}


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for the publisher's thread to do."""

    #: Publishes it. It may be called again after a failure.
    call: Callable[[SyncPrefectClient], object]
    #: Jobs of one series replace each other while they wait. `None`: of no series.
    series: Hashable = None
    #: Makes the artifact whose text is written to a file if it cannot be published. `None`: it is dropped then.
    artifact: Callable[[], ArtifactCreate] | None = None
    #: Failed calls that the API may have carried out.
    tries: int = 0
    #: It is made once, after all others, and dropped without a word if it fails.
    optional: bool = False


class Publisher:
    """Publishes reports from one daemon thread, so that no task waits for the API.

    Any thread may call any method, and no method raises because of the API. While the API is away, reports wait, and
    are published in their order once it is back. A report that the API refuses, or that still waits when the
    publisher is closed, is written to a file. `close` logs one warning, which names the folder.

    Args:
        lend: Returns a client for the flow's API, for use in a `with` block. It is called for each
            try, in the publisher's thread, under the settings that were active when the publisher was
            created.
        logger: Gets the warning; Prefect's `prefect.gpu` by default.
        retry_delays_s: See `RETRY_DELAYS_S`.
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
        # A thread starts without Prefect's context variables. Without the flow's settings
        # `create_artifact` would start a temporary server to emit its event.
        self._settings = get_settings_context()
        #: Guards everything below; notified when a job is added or done, and when the publisher is closed.
        self._changed = threading.Condition()
        #: Oldest first; the one that is being done is not among them.
        self._waiting: deque[Job] = deque()
        #: The one that is being done.
        self._current: Job | None = None
        self._thread: threading.Thread | None = None
        #: No call is made before this time of the monotonic clock.
        self._next_call_s = 0.0
        #: Seconds waited after the last call, if it failed; 0: it did not.
        self._delay_s = 0.0
        #: `None`: no progress is published.
        self._progress: ProgressArtifact | None = None
        #: Monotonic seconds of its next call.
        self._progress_s = 0.0
        #: Nothing more is published than what waits.
        self._closed = False
        #: Nothing more is published.
        self._ended = False
        #: Reports that were written to files of `folder`, and those that were given up.
        self.saved = 0
        self.lost = 0
        #: Where reports are written that cannot be published; `None`: none was yet.
        self.folder: Path | None = None
        #: The artifact of `publish_flow`, once the API has created it.
        self.flow_report_id: UUID | None = None
        self._last_error = ""
        self._warned = False

    def publish(self, report: TaskReport, earlier: Sequence[TaskReport] = ()) -> None:
        """Publish the report of one process; return at once. See `task_artifact`."""
        self._put_artifact(functools.partial(task_artifact, report, earlier))

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
        """Publish a flow's progress from now on, every few seconds in which nothing else waits; return at once."""
        with self._changed:
            if self._progress is None and not self._closed:
                self._progress = progress
                self._progress_s = time.monotonic() + PROGRESS_S
                self._start()
                self._changed.notify_all()

    def put(
        self, call: Callable[[SyncPrefectClient], object], series: Hashable = None, most: int = 0
    ) -> None:
        """Make any other call that publishes one thing; return at once.

        The call may be repeated after a failure. If it is given up, it counts as a lost report.

        Args:
            call: Publishes it.
            series: Jobs of one series replace each other while they wait. `None`: of no series.
            most: Jobs of the series that may wait, from 1. Older ones are dropped, and are not lost.
        """
        self._put(Job(call, series), most)

    def _put_artifact(self, make: Callable[[], ArtifactCreate]) -> None:
        self._put(Job(lambda client: client.create_artifact(make()), artifact=make))

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
        """Start the thread if there is none, with the lock held."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._run, "prefect-gpu-publisher")
            except CapacityError as error:
                # The next report tries again.
                self._last_error = str(error)

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish what waits and end the thread; after `timeout_s` write what is left to files, with one warning.

        Interrupted by Ctrl-C or a signal, it leaves the thread publishing: call it again to wait for it, or `end`.
        """
        with self._changed:
            progress = self._progress
            if not self._closed and progress is not None and progress.id is not None:
                # How the flow has ended.
                self._waiting.append(Job(progress.publish, optional=True))
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
            # Not `Thread.join`: before Python 3.13 an interrupted one takes the thread for ended.
            if thread is None or not self._changed.wait_for(self._is_done, timeout_s):
                self.end(f"the API took longer than {timeout_s:g}s")
                return
        thread.join()
        self.end("")

    def _is_done(self) -> bool:
        return self._current is None and not self._waiting

    def end(self, reason: str) -> None:
        """End the thread and write what waits to files, with one warning. Without effect the second time.

        Args:
            reason: Why, for the warning.
        """
        with self._changed:
            self._ended = self._closed = True
            self._changed.notify_all()
            left = ([] if self._current is None else [self._current], self._waiting)
            for job in itertools.chain(*left):
                self._give_up(job, self._last_error or reason)
            self._current = None
            self._waiting.clear()
            if self._warned or not self.saved + self.lost:
                return
            self._warned = True
            said = []
            if self.saved:
                said.append(f"{_count(self.saved)} not published but written to {self.folder}")
            if self.lost:
                said.append(f"{_count(self.lost)} lost")
            reason = self._last_error
        self._logger.warning(
            f"{' and '.join(said)}: {reason}. Tasks and their results are not affected; "
            "check that PREFECT_API_URL answers"
        )

    def _run(self) -> None:
        with bounded_settings(self._settings, REQUEST_TIMEOUT_S):
            while (job := self._next()) is not None:
                self._take_answer(job, self._try(job))
                # It holds its report, which must not stay alive until the next one comes.
                del job

    def _next(self) -> Job | None:
        """Wait for the next job and its time; return `None` at the end."""
        with self._changed:
            while not self._ended and (self._waiting or not self._closed):
                wait_s = None
                if self._waiting:
                    if self._waiting[0].optional and self._delay_s:
                        # The API is away.
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

    def _try(self, job: Job) -> Exception | None:
        try:
            with self._lend() as client:
                job.call(client)
        except Exception as error:  # noqa: BLE001
            # Process boundary: the API, or a report that cannot be drawn, must not fail the flow.
            return error
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
                self._give_up(job, _first_line(error))
                return
            self._last_error = _first_line(error)
            self._waiting.appendleft(replace(job, tries=tries))
            self._delay_s = min(self._delay_s * 2 or self._first_delay_s, self._most_delay_s)
            self._next_call_s = time.monotonic() + max(self._delay_s, read_retry_after(error))

    def _give_up(self, job: Job, reason: str) -> None:
        """Write what is not published to a file, or count it as lost. Called with the lock held."""
        if job.optional:
            return
        self._last_error = reason
        try:
            if job.artifact is not None:
                self._save(job.artifact())
                self.saved += 1
                return
        except Exception as error:  # noqa: BLE001
            # Process boundary: a full disk, or a report that cannot be drawn, must not fail the flow.
            self._last_error = f"{reason}; {_first_line(error)}"
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


def _count(reports: int) -> str:
    return "1 memory report was" if reports == 1 else f"{reports} memory reports were"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def may_pass(error: Exception) -> bool:
    """Return whether another try could help: not if the API answered that it refuses."""
    if isinstance(error, PrefectHTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in (408, 425, 429)
    return True


def is_away(error: Exception) -> bool:
    """Return whether a call cannot have been carried out: the API does not answer, or takes no calls now."""
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code in (425, 429, 502, 503, 504)
    timeout = isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout))
    return isinstance(error, (httpx.TransportError, OSError)) and not timeout


def read_retry_after(error: Exception) -> float:
    """Return the seconds for which the API asks not to be called again; 0: it does not say."""
    if not isinstance(error, PrefectHTTPStatusError):
        return 0.0
    try:
        # The other form, a date, is not sent by Prefect.
        return min(max(float(error.response.headers.get("Retry-After", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0
