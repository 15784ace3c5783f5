"""What the keeper asks of Ray, when a cluster has an autoscaler, and what a flow reports."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.cluster import autoscaler
from prefect_gpu.cluster.autoscaler import SILENT_S, FlowRequest, Keeper, has_autoscaler


class KeeperRig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.asked: list[list[float]] = []
        self.keeper = Keeper(self._ask, self.clock.now)

    def _ask(self, bundles: list[dict[str, float]]) -> None:
        self.asked.append([each["GPU"] for each in bundles])


@pytest.fixture
def rig() -> KeeperRig:
    return KeeperRig()


def test_requests_of_flows_add_up_and_are_told_once(rig: KeeperRig) -> None:
    rig.keeper.report("one", {"a": 4.0}, {1: 2})
    rig.keeper.report("two", {"a": 4.0}, {2: 1})
    rig.keeper.report("two", {"a": 4.0}, {2: 1})
    assert rig.asked == [[4.0, 1, 1], [4.0, 2, 1, 1]]


def test_a_silent_flow_is_dropped(rig: KeeperRig) -> None:
    rig.keeper.report("killed", {}, {4: 1})
    rig.clock.advance(SILENT_S - 1)
    rig.keeper.report("alive", {}, {1: 1})
    assert rig.keeper.check()
    rig.clock.advance(2)
    assert rig.keeper.check()
    assert rig.asked == [[4], [4, 1], [1]]


def test_it_withdraws_and_ends(rig: KeeperRig) -> None:
    rig.keeper.report("one", {"a": 1.0}, {1: 1})
    rig.keeper.report("one", {"a": 1.0}, {})
    assert rig.asked == [[1.0, 1], []]
    assert rig.keeper.check()
    rig.clock.advance(SILENT_S + 1)
    assert not rig.keeper.check()
    assert rig.asked == [[1.0, 1], []]


def test_started_again_it_withdraws_only_when_no_flow_has_reported(rig: KeeperRig) -> None:
    assert rig.keeper.check()
    rig.clock.advance(SILENT_S)
    assert rig.keeper.check()
    assert rig.asked == []
    rig.clock.advance(1)
    assert not rig.keeper.check()
    assert rig.asked == [[]]


def test_what_could_not_be_asked_is_asked_again(rig: KeeperRig) -> None:
    ask, rig.keeper._ask = rig.keeper._ask, lambda bundles: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rig.keeper.report("one", {}, {1: 1})
    rig.keeper._ask = ask
    assert rig.keeper.check()
    assert rig.asked == [[1]]


class FakeRay:
    """A cluster whose keeper has the reports in `reports`."""

    def __init__(self, status: Any = None) -> None:
        self.status = status
        self.reports: list[tuple[Any, Any]] = []
        self.failure: Exception | None = None
        self.taken = True
        self.experimental = SimpleNamespace(
            internal_kv=SimpleNamespace(
                _internal_kv_get=lambda key: status and json.dumps(status).encode()
            )
        )
        self.report = SimpleNamespace(remote=lambda flow, *what: self.reports.append(what) or "ref")

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (references, []) if self.taken else ([], references)

    def get(self, reference: Any) -> None:
        if self.failure:
            raise self.failure


def status_of(*types: str) -> dict[str, Any]:
    return {"autoscaler_report": {"node_type_mapping": dict(zip("abc", types, strict=False))}}


HEAD = {"NodeID": "0", "Alive": True, "Labels": {}}
OF_A_GROUP = {"NodeID": "1", "Alive": True, "Labels": {autoscaler.GROUP_LABEL: "workers"}}


@pytest.mark.parametrize(
    ("status", "nodes", "expected"),
    [
        pytest.param(None, [HEAD], False, id="no status and no group"),
        pytest.param(None, [HEAD, OF_A_GROUP], True, id="a node of a group"),
        pytest.param(None, [{**OF_A_GROUP, "Alive": False}], False, id="a dead node of a group"),
        pytest.param(status_of("ray.head.default"), [HEAD], True, id="types of a configuration"),
        pytest.param(status_of("node_0af", "node_1"), [HEAD], False, id="a type for each node"),
        pytest.param(status_of("node_0af"), [OF_A_GROUP], False, id="groups without an autoscaler"),
        pytest.param({"autoscaler_report": None}, [HEAD], False, id="nothing known yet"),
    ],
)
def test_signs_of_an_autoscaler(status: Any, nodes: list[Any], expected: bool) -> None:
    assert has_autoscaler(FakeRay(status), nodes) is expected


def flow_request(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> tuple[FlowRequest, list[Any]]:
    """Return the request of a flow, and the keepers that it has asked for."""
    started: list[Any] = []
    monkeypatch.setattr(
        autoscaler,
        "start_keeper",
        lambda ray, ask: started.append(ask) or SimpleNamespace(report=ray.report),
    )
    return FlowRequest(ray, print), started


def test_without_an_autoscaler_there_is_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    request, started = flow_request(monkeypatch, FakeRay())
    assert request.report([HEAD], {}, {1: 1}) == ""
    request.withdraw()
    assert started == []


def test_while_nothing_waits_there_is_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    request, started = flow_request(monkeypatch, FakeRay())
    assert request.report([OF_A_GROUP], {}, {}) == ""
    assert started == []


def test_a_flow_reports_while_something_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    request, started = flow_request(monkeypatch, ray)
    text = "the autoscaler was asked for 5 more GPUs"
    assert request.report([OF_A_GROUP], {"1": 1.0}, {1: 1, 4: 1}) == text
    assert request.report([OF_A_GROUP], {"1": 1.0}, {1: 1}).endswith("1 more GPU")
    assert request.report([OF_A_GROUP], {"1": 1.0}, {}) == ""
    assert request.report([OF_A_GROUP], {"1": 1.0}, {}) == ""
    assert ray.reports == [({"1": 1.0}, {1: 1, 4: 1}), ({"1": 1.0}, {1: 1}), ({"1": 1.0}, {})]
    assert len(started) == 1


def test_reports_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    request, _ = flow_request(monkeypatch, ray)
    request.report([OF_A_GROUP], {}, {1: 1})
    ray.taken = False
    request.report([OF_A_GROUP], {}, {1: 2})
    assert len(ray.reports) == 1


def test_a_keeper_that_is_gone_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay()
    request, started = flow_request(monkeypatch, ray)
    request.report([OF_A_GROUP], {}, {1: 1})
    ray.failure = RuntimeError("The actor died.")
    for _ in range(3):
        text = request.report([OF_A_GROUP], {}, {1: 1})
    assert "could not be asked: The actor died." in text
    assert len(caplog.records) == 1
    ray.failure = None
    request.report([OF_A_GROUP], {}, {1: 1})
    assert request.report([OF_A_GROUP], {}, {1: 1}).endswith("1 more GPU")
    assert len(started) > 1


def test_at_the_end_the_request_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    request, _ = flow_request(monkeypatch, ray)
    request.report([OF_A_GROUP], {}, {1: 1})
    request.withdraw()
    request.withdraw()
    assert ray.reports == [({}, {1: 1}), ({}, {})]
