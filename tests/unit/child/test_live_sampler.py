"""What the child's thread sends, and when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from prefect_gpu.child.recorder import LiveSampler, Recorder
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes.messages import CountersRead, ReleasedUnused, ReleaseUnused
from tests.fakes.memory_source import FakeSource


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.came = threading.Semaphore(0)
        self.gone = False
        self.requests: list[ReleaseUnused] = []

    def take_request(self) -> ReleaseUnused | None:
        return self.requests.pop(0) if self.requests else None

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.came.release()
        if self.gone:
            raise BrokenPipeError

    def end_with_parent(self) -> None:
        pass

    def wait(self) -> CountersRead:
        assert self.came.acquire(timeout=DEADLOCK_S)
        message = self.sent[-1]
        assert isinstance(message, CountersRead)
        return message


class Rig:
    def __init__(self) -> None:
        self.source = FakeSource()
        self.recorder = Recorder(self.source)  # type: ignore[arg-type]
        self.channel = FakeChannel()
        self.sampler = LiveSampler(self.channel, self.recorder, 0.0)  # type: ignore[arg-type]


def counters(live: int) -> Counters:
    return Counters(live, live, live, live, 0)


def until(source: FakeSource, count: Callable[[], int], more: int) -> None:
    """Wait until something was asked `more` times from now."""
    reached, goal = threading.Event(), count() + more

    def look() -> None:
        if count() >= goal:
            reached.set()

    source.on_counters = look
    assert reached.wait(DEADLOCK_S)


def test_counters_are_sent_when_they_change() -> None:
    rig = Rig()
    rig.source.hold(1)
    rig.sampler.start()
    assert rig.channel.wait() == CountersRead(counters(1), rig.sampler.last()[1])
    until(rig.source, lambda: rig.source.readings, 3)
    rig.source.hold(2)
    assert rig.channel.wait().counters == counters(2)
    until(rig.source, lambda: rig.source.readings, 3)
    rig.sampler.stop()
    assert not rig.sampler._thread.is_alive()
    assert len(rig.channel.sent) == 2
    assert rig.source.samples >= rig.source.readings / 2, "each message comes after a look"


def test_marks_and_steps_are_sent_with_the_counters() -> None:
    rig = Rig()
    rig.sampler.start()
    rig.channel.wait()
    rig.recorder.mark("a")
    message = rig.channel.wait()
    assert [m.name for m in message.marks] == ["a"] and message.steps is None
    rig.recorder.step()
    message = rig.channel.wait()
    assert message.steps is not None and (message.steps.count, message.marks) == (1, ())
    rig.sampler.stop()


def test_without_counters_marks_wait_for_the_end() -> None:
    rig = Rig()
    rig.source.touched = False
    rig.recorder.mark("a")
    rig.sampler.start()
    until(rig.source, lambda: rig.source.readings, 3)
    rig.sampler.stop()
    assert rig.channel.sent == []
    found, _, steps, marks, *_ = rig.sampler.last()
    assert (found, steps, [m.name for m in marks]) == (None, None, ["a"])


def test_steps_are_sent_without_counters_too() -> None:
    rig = Rig()
    rig.source.touched = False
    rig.sampler.start()
    rig.recorder.step()
    message = rig.channel.wait()
    rig.sampler.stop()
    assert message.counters is None
    assert message.steps is not None and message.steps.count == 1


def test_unused_memory_is_released_on_request_and_the_request_is_answered() -> None:
    rig = Rig()
    rig.source.touched = False
    late, soon = ReleaseUnused(time.monotonic()), ReleaseUnused(time.monotonic() + DEADLOCK_S)
    rig.channel.requests += [late, soon]
    rig.sampler.start()
    assert rig.channel.came.acquire(timeout=DEADLOCK_S)
    rig.sampler.stop()
    assert rig.channel.sent == [ReleasedUnused(soon.until_s)], "the late one has no effect"
    assert rig.source.releases == 1


@pytest.mark.parametrize("started", [True, False])
def test_a_sampler_that_is_stopped_leaves_no_trace_open(started: bool) -> None:
    rig = Rig()
    rig.source.traceable = True
    if started:
        rig.sampler.start()
    rig.recorder.step()
    assert len(rig.source.traces) == 1
    rig.sampler.stop()
    assert rig.source.traces == []


def test_a_sampler_ends_when_the_parent_is_gone() -> None:
    rig = Rig()
    rig.channel.gone = True
    rig.sampler._run()
    assert len(rig.channel.sent) == 1


def _fail() -> None:
    raise ValueError("no number")


@pytest.mark.parametrize("asked", ["on_sample", "on_counters"])
def test_a_sampler_that_fails_logs_once_and_ends(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig()
    setattr(rig.source, asked, _fail)
    rig.sampler._run()
    assert capsys.readouterr().err.splitlines() == [
        "prefect_gpu: memory is no longer sampled: ValueError('no number')"
    ]


def test_a_body_runs_without_samples_where_no_thread_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rig = Rig()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    rig.sampler.start()
    rig.sampler.stop()
    assert "can't start new thread" in capsys.readouterr().err
