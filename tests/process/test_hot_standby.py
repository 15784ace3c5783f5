"""Standbys that start their framework on a device ahead of their task: which task gets one, and when they end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.child.warm_up import heat
from prefect_gpu.processes import standby_kind, standby_pool
from prefect_gpu.processes.launch_spec import ChildStarted
from prefect_gpu.processes.messages import Heat, Heated
from prefect_gpu.processes.standby_kind import SIMULATED, Kind
from prefect_gpu.processes.standby_pool import Announcement
from prefect_gpu.scheduling.model import Device
from tests.process import bodies
from tests.process.rig import Rig, eventually, is_alive, spec_of
from tests.process.warm import KIND, Broker, Warm, end_all

HOT = replace(KIND, hot=SIMULATED)


class Lent:
    """A device that was lent to a standby; the words for what was said of it."""

    def __init__(self, uuid: str, give_up: Callable[[], object], standby_id: str) -> None:
        self.uuid = uuid
        self.give_up = give_up
        self.id = standby_id
        self.said: list[str] = []


class Lender(Broker):
    """Lends the devices that it is told to, one after the other."""

    def __init__(self, *uuids: str) -> None:
        super().__init__()
        self.uuids = list(uuids)
        self.lent: list[Lent] = []
        self.during: Callable[[], object] = lambda: None
        self.after_lending: Callable[[Lent], object] = lambda lent: None

    def lend_device(
        self,
        standby_id: str,
        kind: Kind,
        framework: str,
        pid: int,
        give_up: Callable[[], object],
        avoid: Container[str],
    ) -> Device | None:
        self.during()
        free = [uuid for uuid in self.uuids if uuid not in avoid]
        if not free:
            return None
        self.uuids.remove(free[0])
        self.lent.append(Lent(free[0], give_up, standby_id))
        self.after_lending(self.lent[-1])
        return Device(free[0], 0, "a device", 1, "nvml", "here")

    def offer_standby(self, standby_id: str) -> None:
        self._find(standby_id).said.append("offered")

    def end_standby(self, standby_id: str) -> None:
        self._find(standby_id).said.append("ended")

    def _find(self, standby_id: str) -> Lent:
        return next(lent for lent in self.lent if lent.id == standby_id)


class Warmth(Warm):
    """A pool whose runner lends devices."""

    def __init__(self, rig: Rig, lender: Lender, most: int = 1) -> None:
        self.lender = lender
        super().__init__(rig, most, lender)

    def announce(self, kind: Kind = HOT) -> Announcement:
        return self.pool.announce(kind, self.lender)  # type: ignore[arg-type]

    def wait_hot(self, count: int = 1) -> None:
        assert eventually(lambda: self.pool.hot == count)


@pytest.fixture
def make_warm(make_rig: Callable[..., Rig]) -> Iterator[Callable[..., Warmth]]:
    warms: list[Warmth] = []

    def make(*uuids: str, most: int = 1) -> Warmth:
        warms.append(Warmth(make_rig(), Lender(*uuids), most))
        return warms[-1]

    yield make
    end_all(warms)


def kept(lent: Lent, body: Callable[..., Any] = bodies.environment_of_self, **changes: Any) -> Any:
    own = {"CUDA_VISIBLE_DEVICES": lent.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environment = {**own, **changes}
    return replace(spec_of(body, environment=environment), standby=lent.id)


def test_a_task_runs_in_the_hot_standby_that_was_kept_for_it(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    announced = warm.announce()
    warm.wait_hot()
    (pid,), (lent,) = warm.pool.pids, warm.lender.lent
    assert lent.said == ["offered"]
    child = warm.run(announced, kept(lent))
    assert child.value()["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert child.pid == pid
    assert lent.said == ["offered"], "it is the task's"


def test_a_task_may_be_given_to_a_hot_standby_whose_framework_still_starts(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    announced = warm.announce()
    assert eventually(lambda: bool(warm.lender.lent and warm.lender.lent[0].said))
    (pid,) = warm.pool.pids
    child = warm.run(announced, kept(warm.lender.lent[0]))
    child.value()
    assert child.pid == pid


def test_a_task_on_another_device_does_not_get_a_hot_standby(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    announced = warm.announce()
    warm.wait_hot()
    (pid,) = warm.pool.pids
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1 and child.pid != pid
    assert is_alive(pid)


def test_with_several_devices_an_ordinary_standby_waits_too(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1", "GPU-2", most=2)
    warm.lender.devices = (object(), object())
    announced = warm.announce()
    warm.wait_ready(2)
    warm.wait_hot(1)
    pids = warm.pool.pids
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1 and child.pid in pids
    assert warm.pool.hot == 1


def test_a_hot_standby_whose_environment_does_not_suit_ends_and_the_task_gets_a_fresh_process(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    announced = warm.announce()
    warm.wait_hot()
    (pid,), (lent,) = warm.pool.pids, warm.lender.lent
    child = warm.run(announced, kept(lent, MY_OWN="changed"))
    assert child.value()["MY_OWN"] == "changed" and child.pid != pid
    assert eventually(lambda: not is_alive(pid))
    assert eventually(lambda: lent.said == ["offered", "ended"])


def test_where_hot_standbys_never_suit_only_ordinary_ones_are_made(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm(*["GPU-1"] * 9)
    elsewhere = {"CUDA_VISIBLE_DEVICES": "GPU-2"}
    for number in range(standby_kind.MOST_FAILURES):
        announced = warm.announce()
        warm.wait_hot()
        lent = warm.lender.lent[-1]
        spec = spec_of(bodies.add, number, environment=elsewhere)
        child = warm.run(announced, replace(spec, standby=lent.id))
        assert child.value() == number
        assert eventually(lambda lent=lent: lent.said[-1] == "ended")  # type: ignore[misc]
    announced = warm.announce()
    (pid,) = warm.wait_ready()
    assert len(warm.lender.lent) == standby_kind.MOST_FAILURES and warm.pool.hot == 0
    child = warm.run(announced, spec_of(bodies.add, 1, environment=elsewhere))
    assert child.value() == 1 and child.pid == pid


def test_a_hot_standby_that_was_given_up_ends_and_is_not_replaced_at_once(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1", "GPU-2")
    warm.announce()
    warm.wait_hot()
    (pid,), (lent,) = warm.pool.pids, warm.lender.lent
    lent.give_up()
    assert eventually(lambda: not is_alive(pid))
    assert eventually(lambda: lent.said == ["offered", "ended"])
    warm.wait_ready()
    assert warm.pool.hot == 0 and warm.lender.uuids == ["GPU-2"]


def test_a_standby_that_gets_a_task_while_a_device_is_asked_for_is_not_started_there(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    announced: list[Announcement] = []
    children: list[Any] = []
    warm.lender.during = lambda: children.append(
        warm.run(announced[0], spec_of(bodies.environment_of_self))
    )
    with warm.pool._changed:
        announced.append(warm.announce())
    assert eventually(lambda: bool(children and warm.lender.lent))
    warm.lender.during = lambda: None
    assert children[0].value()
    assert eventually(lambda: warm.lender.lent[0].said == ["ended"])


def test_a_standby_that_has_a_task_is_not_ended_for_its_device(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    announced: list[Announcement] = []
    children: list[Any] = []

    def take_and_reclaim() -> None:
        warm.lender.during = lambda: None
        children.append(warm.run(announced[0], spec_of(bodies.add, 1)))

    warm.lender.during = take_and_reclaim
    warm.lender.after_lending = lambda lent: lent.give_up()
    with warm.pool._changed:
        announced.append(warm.announce())
    assert eventually(lambda: bool(children))
    assert children[0].value() == 1
    assert [type(m) for m in children[0].messages].count(ChildStarted) == 1


def test_a_standby_that_gets_no_device_waits_as_an_ordinary_one(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm()
    announced = warm.announce()
    (pid,) = warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1 and child.pid == pid


def test_where_a_hot_standby_dies_as_it_starts_no_other_is_started_on_that_device(
    make_warm: Callable[..., Warmth], caplog: pytest.LogCaptureFixture
) -> None:
    warm = make_warm("GPU-1", "GPU-1")
    warm.lender.during = lambda: [os.kill(pid, signal.SIGSTOP) for pid in warm.pool.pids]
    warm.announce()
    assert eventually(lambda: bool(warm.lender.lent and warm.lender.lent[0].said))
    (pid,) = warm.pool.pids
    warm.lender.during = lambda: None
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: warm.lender.lent[0].said == ["offered", "ended"])
    (waits,) = warm.wait_ready()
    assert waits != pid and warm.lender.uuids == ["GPU-1"]
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "on device GPU-1" in told.getMessage()
    assert warm.pool._record(HOT).failures == 0


def test_where_a_hot_standby_hangs_as_it_starts_it_is_ended_and_no_other_is_started_there(
    make_warm: Callable[..., Warmth],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standby_pool, "START_S", 0.5)
    warm = make_warm("GPU-1")
    warm.lender.during = lambda: [os.kill(pid, signal.SIGSTOP) for pid in warm.pool.pids]
    warm.announce()
    assert eventually(lambda: bool(warm.lender.lent and warm.lender.lent[0].said))
    warm.lender.during = lambda: None
    assert eventually(lambda: "ended" in warm.lender.lent[0].said)
    (waits,) = warm.wait_ready()
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "on device GPU-1" in told.getMessage() and "0.5 s to start" in told.getMessage()
    assert is_alive(waits)


def test_a_task_that_was_given_to_a_hot_standby_that_dies_gets_a_fresh_process(
    make_warm: Callable[..., Warmth], caplog: pytest.LogCaptureFixture
) -> None:
    warm = make_warm("GPU-1")
    warm.lender.during = lambda: [os.kill(pid, signal.SIGSTOP) for pid in warm.pool.pids]
    announced = warm.announce()
    assert eventually(lambda: bool(warm.lender.lent and warm.lender.lent[0].said))
    (pid,), (lent,) = warm.pool.pids, warm.lender.lent
    child = warm.run(announced, kept(lent))
    assert child.pid == pid
    os.kill(pid, signal.SIGKILL)
    assert child.value()["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert eventually(lambda: lent.said == ["offered", "ended"])


def test_hot_standbys_end_with_the_runner_whose_devices_they_hold(
    make_warm: Callable[..., Warmth],
) -> None:
    warm = make_warm("GPU-1")
    other = object()
    warm.pool.open(other, 1, Broker())  # type: ignore[arg-type]
    warm.announce()
    warm.wait_hot()
    (pid,), (lent,) = warm.pool.pids, warm.lender.lent
    warm.pool.close(warm)
    assert eventually(lambda: not is_alive(pid) and lent.said[-1] == "ended")
    warm.pool.close(other)


# In the process.


class Framework:
    """One that starts as it is told."""

    module = "a_framework"
    can_start_early = True

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.said: list[object] = []

    def start_device(self) -> None:
        self.said.append(os.environ.get("A_DEVICE"))
        if self.error is not None:
            raise self.error

    def applies_hot(self, name: str, before: str | None, after: str | None) -> bool:
        return False


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Framework:
    made = Framework()
    monkeypatch.setattr("prefect_gpu.frameworks.registry.ADAPTERS", {"made-up": made})
    monkeypatch.setenv("A_DEVICE", "none")
    return made


def test_the_device_is_set_before_a_framework_starts_ahead(framework: Framework) -> None:
    assert heat(Heat("made-up", {"A_DEVICE": "GPU-1"})) == Heated()
    assert framework.said == ["GPU-1"]


def test_a_framework_that_does_not_start_ahead_reports_the_problem(framework: Framework) -> None:
    framework.error = RuntimeError("CUDA error: out of memory\nmore")
    assert heat(Heat("made-up", {})).problem == "RuntimeError: CUDA error: out of memory"


def test_on_simulated_devices_no_framework_starts_ahead(framework: Framework) -> None:
    assert heat(Heat(SIMULATED, {})) == Heated()
    assert framework.said == []
