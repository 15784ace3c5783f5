"""Suspending one process and resuming it, with a driver and a process that are fakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.ticket import BY_HAND, Measured
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import CapacityError
from prefect_gpu.measurements import Suspension
from prefect_gpu.processes.messages import ReleasedUnused, ReleaseUnused
from prefect_gpu.runner import suspender
from prefect_gpu.runner.process_run import AwaitsReturn, Lost, Resumed, Suspended
from prefect_gpu.runner.suspender import Suspender
from prefect_gpu.scheduling.model import Device
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.suspension.driver_calls import DriverCallError
from prefect_gpu.suspension.eligibility import HOST_MARGIN_BYTES, Candidate
from prefect_gpu.units import GIB


class FakeCalls:
    def __init__(self) -> None:
        self.made: list[str] = []
        self.words: tuple[str, ...] = ()
        self.fails: dict[str, int] = {}
        self.old = ""

    def unsupported(self) -> str:
        return self.old

    def call(self, step: str, pid: int, *words: str, deadline_s: float) -> int:
        self.made.append(step)
        self.words += words if step == "restore" else ()
        if step in self.fails:
            raise DriverCallError(step, self.fails[step])
        return 0


def device(uuid: str) -> Device:
    return Device(uuid, 0, "gpu", 80 * GIB, "nvml", "")


class FakeProcess:
    """The process and its broker; notes stages with their texts, and the messages to the engine's thread."""

    kind = "nvml"
    is_client = False
    devices = device("GPU-1"), device("GPU-2")

    def __init__(self) -> None:
        self.broker = self.call = self.plan = self.run = self.record = self
        self.ticket = SimpleNamespace(
            devices=[device("GPU-1")], held_back_for="another task", may_resume=self
        )
        self.task_key, self.started_s = "task-1a", 0.0
        self.suspender: Suspender
        self.heard: list[Any] = []
        self.said: list[str] = []
        self.changed = threading.Condition()
        self.free: int | None = 80 * GIB
        self.used = self.used_trimmed = 8 * GIB
        self.used_frameworks: tuple[str, ...] = ("torch",)
        self.may = True
        self.say = self.said.append
        self.add_suspension = self._hear

    def measure(self) -> None:
        measured = Measured(self.used, {42: self.used})
        self.suspender.take_measurement(time.monotonic(), [measured])

    def send(self, request: ReleaseUnused) -> None:
        self._hear("trimmed")
        self.used = self.used_trimmed
        self.suspender.released.put(ReleasedUnused(request.until_s))

    def refresh(self) -> None:
        self.measure()

    def free_bytes(self, device: Device) -> int | None:
        return self.free

    def get(self) -> bool:
        """Answer whether it may resume."""
        return self.may

    def _hear(self, what: Any) -> None:
        with self.changed:
            self.heard.append(what)
            self.changed.notify_all()

    def show_suspension(self, ticket: Any, trigger: Trigger, text: str) -> None:
        self._hear((trigger.value, text))

    def tell(self, message: Any) -> None:
        if not isinstance(message, AwaitsReturn):
            self._hear(message)

    def until(self, condition: Callable[[list[Any]], bool]) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.heard), DEADLOCK_S), self.heard
            return [*self.heard]


def told(heard: list[Any], stage: str, text: str = "") -> bool:
    """Return whether the last that was heard is a stage, with a text in its own."""
    last = heard[-1] if heard else None
    return isinstance(last, tuple) and last[0] == stage and text in last[1]


class Scene:
    def __init__(self) -> None:
        self.calls, self.subject = FakeCalls(), FakeProcess()
        calls: Any = self.calls
        process: Any = self.subject
        self.suspender = process.suspender = Suspender(42, process, lambda: calls)
        process.measure()

    def suspend(self) -> list[Any]:
        self.suspender.ask(True)
        return self.subject.until(lambda heard: told(heard, "away"))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(suspender, "ROOM_S", 0.001)
    room = 8 * GIB + HOST_MARGIN_BYTES
    monkeypatch.setattr(suspender, "read_host_available_bytes", lambda: room)
    return Scene()


def test_it_is_moved_out_and_back(scene: Scene) -> None:
    trimmed, moving_out, begun, _ = scene.suspend()
    assert (trimmed, moving_out) == ("trimmed", ("moving out", "moving to the host"))
    assert isinstance(begun, Suspended)
    assert scene.suspender.away and scene.suspender.away_s is not None
    scene.suspender.ask(False)
    *_, moving, suspension, resumed, state = scene.subject.until(
        lambda heard: told(heard, "running")
    )
    assert (moving, state) == (("moving in", "moving back"), ("running", ""))
    assert isinstance(resumed, Resumed)
    assert (suspension.reason, suspension.device) == ("another task", device("GPU-1").label)
    assert suspension.moved_bytes == 8 * GIB and suspension.seconds > 0
    assert scene.calls.made == ["lock", "checkpoint", "restore", "unlock"]
    assert not scene.suspender.away and scene.suspender.away_s is None


def test_it_comes_back_on_another_device_by_pairs_of_uuids(scene: Scene) -> None:
    scene.suspend()
    scene.subject.ticket.devices = [device("GPU-2")]
    scene.suspender.ask(False)
    scene.subject.until(lambda heard: told(heard, "running"))
    (said,) = scene.subject.said
    assert said.startswith("Goes on, now on device 0, after ")
    assert scene.calls.words == ("GPU-1", "GPU-2", "GPU-2", "GPU-1")


def test_what_it_does_not_use_is_not_moved(scene: Scene) -> None:
    scene.subject.used_trimmed = GIB
    assert told(scene.suspend(), "away", "away: 1GiB in host memory")
    scene.subject.free = 2 * GIB
    scene.suspender.ask(False)
    *_, suspension, _, _ = scene.subject.until(lambda heard: told(heard, "running"))
    assert suspension.moved_bytes == GIB


def test_it_is_not_touched_if_it_ends_while_it_is_trimmed(scene: Scene) -> None:
    scene.subject.used_trimmed = 0
    scene.suspender.ask(True)
    heard = scene.subject.until(lambda heard: told(heard, "refused"))
    assert heard == ["trimmed", ("refused", "not suspended: it holds no device memory yet")]
    assert not scene.calls.made


@pytest.mark.parametrize("why", ["framework", "driver"])
def test_what_is_refused_is_not_touched(scene: Scene, why: str) -> None:
    if why == "framework":
        scene.subject.used_frameworks = ("numba",)
    else:
        scene.calls.old = "the NVIDIA driver is older than 570"
    scene.suspender.ask(True)
    (refused,) = scene.subject.until(bool)
    assert told([refused], "refused", "not suspended: ")
    (said,) = scene.subject.said
    assert said == f"N{refused[1][1:]}"
    assert not scene.calls.made
    # It can be asked for again.
    scene.subject.used_frameworks, scene.calls.old = ("torch",), ""
    scene.suspend()


def test_a_process_that_cannot_be_locked_goes_on(scene: Scene) -> None:
    scene.calls.fails["lock"] = 600
    scene.suspender.ask(True)
    *_, resumed, state = scene.subject.until(lambda heard: told(heard, "refused"))
    assert isinstance(resumed, Resumed) and "not in time" in state[1]
    assert not any(isinstance(each, Suspension) for each in scene.subject.heard)
    assert not scene.suspender.away


def test_it_waits_for_room_and_says_so_once(scene: Scene) -> None:
    scene.suspend()
    scene.subject.free = 8 * GIB
    scene.suspender.ask(False)
    heard = scene.subject.until(lambda heard: told(heard, "away", "waits for 8.5GiB"))
    assert told(heard, "away", "others have taken")
    scene.subject.free = None
    heard = scene.subject.until(lambda heard: told(heard, "away", "does not answer"))
    assert "restore" not in scene.calls.made
    assert sum("others have taken" in str(each) for each in heard) == 1
    scene.subject.free = 80 * GIB
    scene.subject.until(lambda heard: told(heard, "running"))


def test_it_looks_again_where_the_answer_took_so_long_that_the_room_may_be_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspender, "OLD_S", -1.0)
    scene.suspend()
    free = [80 * GIB, 0, 0]
    monkeypatch.setattr(
        scene.subject, "free_bytes", lambda device: free.pop(0) if free else 80 * GIB
    )
    scene.suspender.ask(False)
    heard = scene.subject.until(lambda heard: told(heard, "running"))
    waits = [each for each in heard if told([each], "away", "others have taken")]
    assert len(waits) == 1 and heard.count(("moving in", "moving back")) == 2
    assert scene.calls.made.count("restore") == 1


def test_it_comes_back_where_no_thread_can_be_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CapacityError("no thread can be started")

    with monkeypatch.context() as patched:
        patched.setattr(suspender, "start_thread", refuse)
        scene.suspender.ask(True)
        assert told(scene.subject.heard, "refused", "no thread can be started")
    scene.suspend()
    monkeypatch.setattr(suspender, "start_thread", refuse)
    scene.suspender.ask(False)
    scene.subject.until(lambda heard: told(heard, "running"))


def test_an_error_before_anything_was_done_to_the_process_leaves_it_be(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise RuntimeError("an error of ours")

    monkeypatch.setattr(scene.calls, "unsupported", fail)
    scene.suspender.ask(True)
    scene.subject.until(lambda heard: told(heard, "refused", "an error of ours"))


def test_a_refusal_does_not_answer_what_is_asked_while_it_is_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = ["not yet"]

    def judge(candidate: Candidate) -> str:
        if not problems:
            return ""
        for away in (False, True):
            scene.suspender.ask(away)
        return problems.pop()

    monkeypatch.setattr(suspender, "refusal", judge)
    assert not any(told([each], "refused") for each in scene.suspend())


def test_a_refusal_is_told_if_what_is_asked_while_it_is_found_is_withdrawn(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(candidate: Candidate) -> str:
        for away in (True, False):
            scene.suspender.ask(away)
        return "not yet"

    monkeypatch.setattr(suspender, "refusal", judge)
    scene.suspender.ask(True)
    scene.subject.until(lambda heard: told(heard, "refused", "not yet"))


def test_it_stays_away_if_that_is_asked_for_while_it_waits(scene: Scene) -> None:
    scene.suspend()
    scene.subject.free = 0
    scene.suspender.ask(False)
    scene.subject.until(lambda heard: told(heard, "away", "waits for"))
    scene.suspender.ask(True)
    scene.subject.free = 80 * GIB
    scene.suspender.ask(True)
    assert scene.suspender.away
    assert "restore" not in scene.calls.made


def test_a_process_that_is_lost_is_given_up(scene: Scene) -> None:
    scene.calls.fails["restore"] = 2
    scene.suspend()
    scene.suspender.ask(False)
    lost = scene.subject.until(lambda heard: isinstance(heard[-1], Lost))[-1]
    assert "out of memory" in lost.why
    made = [*scene.calls.made]
    scene.suspender.ask(True)
    assert scene.calls.made == made


def test_a_process_that_has_ended_is_not_lost(scene: Scene) -> None:
    scene.suspend()
    scene.subject.free = 0
    scene.suspender.ask(False)
    scene.subject.until(lambda heard: told(heard, "away", "waits for"))
    thread = scene.suspender._thread
    scene.suspender.end()
    if thread is not None:
        thread.join(DEADLOCK_S)
    assert not any(isinstance(each, Lost) for each in scene.subject.heard)


def test_it_is_not_restored_before_it_may_come_back(scene: Scene) -> None:
    scene.suspend()
    scene.subject.may = False
    scene.suspender.ask(False)
    scene.subject.until(lambda heard: told(heard, "moving in"))
    assert "restore" not in scene.calls.made
    scene.subject.may = True
    scene.subject.until(lambda heard: told(heard, "running"))
    assert scene.calls.made == ["lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize(
    ("suspended_for", "kind"),
    [(BY_HAND, WaitKind.RESUME), ("task 'evaluate'", WaitKind.ROOM)],
    ids=["by hand", "for another task"],
)
def test_a_suspended_process_tells_why_it_waits(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, suspended_for: str, kind: WaitKind
) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(scene.subject, "tell", messages.append)
    scene.subject.ticket.held_back_for = suspended_for
    scene.suspend()
    reason = Reason(kind, suspended_for=suspended_for, detail="moving to the host")
    assert messages[0] == AwaitsReturn(reason)
