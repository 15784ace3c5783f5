"""Standbys of one flow on one node: what is kept for tasks to come, what a task is started from, what is ready."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

from prefect_gpu.cluster.node_agent import NodeStandbys
from prefect_gpu.cluster.wire import Expect
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.processes.standby_kind import Kind

#: As a flow elsewhere knows it.
KIND = Kind(("ours",), ("library",), (("HOME", "/flow"),), False, 1, 1)
POLICY = FrameworkPolicy("simulated", (), (), ())


class FakeAnnouncement:
    def __init__(self, pool: FakePool, kind: Kind) -> None:
        self.pool, self.kind = pool, kind

    def retract(self) -> None:
        self.pool.announced.remove(self)


class FakePool:
    """Notes what is announced."""

    def __init__(self) -> None:
        self.announced: list[FakeAnnouncement] = []
        self.ready_by_kind: Counter[Kind] = Counter()

    def announce(self, kind: Kind) -> FakeAnnouncement:
        self.announced.append(FakeAnnouncement(self, kind))
        return self.announced[-1]


def make(fresh: Any = None, most: int = 2) -> tuple[FakePool, NodeStandbys]:
    pool = FakePool()
    standbys = NodeStandbys(pool, fresh)  # type: ignore[arg-type]
    standbys.most = most
    return pool, standbys


def test_as_many_are_announced_as_are_to_come_and_the_node_keeps_at_most() -> None:
    pool, standbys = make()
    for count, announced in ((1, 1), (9, 2), (0, 0)):
        standbys.expect(Expect(KIND, POLICY, count))
        assert len(pool.announced) == announced


def test_a_task_gets_an_announcement_of_its_kind_also_if_it_came_before_its_number() -> None:
    fresh: Any = object()
    pool, standbys = make(fresh)
    placed = Expect(KIND, POLICY, 0)
    # The node keeps a standby for the next task after it.
    assert standbys.launcher_for(placed) is pool.announced[0]
    standbys.expect(Expect(KIND, POLICY, 1))
    assert standbys.launcher_for(placed) is pool.announced[1]
    assert standbys.launcher_for(placed) is pool.announced[2]
    assert len({each.kind for each in pool.announced}) == 1
    assert standbys.launcher_for(None) is fresh


def test_without_standbys_each_task_gets_a_fresh_process() -> None:
    fresh: Any = object()
    pool, standbys = make(fresh, most=0)
    standbys.expect(Expect(KIND, POLICY, 1))
    assert standbys.launcher_for(Expect(KIND, POLICY, 0)) is fresh and not pool.announced


def test_ready_standbys_are_named_as_the_flow_names_its_kinds() -> None:
    pool, standbys = make()
    standbys.expect(Expect(KIND, POLICY, 1))
    (announced,) = pool.announced
    assert announced.kind != KIND, "the node's environment is another"
    assert standbys.ready() == {}
    pool.ready_by_kind.update({announced.kind: 2, replace(KIND, libraries=("of others",)): 1})
    assert standbys.ready() == {KIND.key: 2}
    standbys.expect(Expect(KIND, POLICY, 0))
    assert standbys.ready() == {KIND.key: 2}, "one is kept for the next task"


def test_equal_kinds_have_one_key() -> None:
    # It does not depend on what is not compared, nor on the process.
    same = pickle.loads(pickle.dumps(replace(KIND, cpus=7, size_bytes=9)))
    assert same.key == KIND.key == "bd466932e5064921"
    others = [replace(KIND, libraries=()), replace(KIND, cpus_stated=True)]
    assert len({KIND.key, *(each.key for each in others)}) == 3
