"""Standbys on the nodes of a cluster: a flow says which tasks are to come, each node keeps processes for them.

Which node a task will get is not known before it is placed, so every node is told the same numbers, at most four times
a second. How many standbys a node keeps for them is decided there, as on one machine.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_gpu.cluster.wire import Expect
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.processes.launch_spec import ChildHandle, Launcher, LaunchSpec, Listener
from prefect_gpu.processes.standby_kind import Kind, standby_changes
from prefect_gpu.processes.standby_pool import Announcement, StandbyPool

if TYPE_CHECKING:
    from prefect_gpu.cluster.flow_side import ClusterLauncher


class ExpectedTasks:
    """Counts what a flow has submitted and not started. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Kind] = Counter()
        self._policies: dict[Kind, FrameworkPolicy] = {}
        self._changed: set[Kind] = set()

    def add(self, kind: Kind, policy: FrameworkPolicy, number: int) -> None:
        """Add tasks of a kind, or with a negative number take them away."""
        with self._lock:
            self._counts[kind] += number
            self._policies[kind] = policy
            self._changed.add(kind)

    def take(self, everything: bool = False) -> tuple[Expect, ...]:
        """Return the numbers that have changed since the last call.

        Args:
            everything: Return all numbers that are not 0: a node has joined.
        """
        with self._lock:
            kinds = set(self._counts) if everything else self._changed
            found = tuple(
                Expect(kind, self._policies[kind], self._counts[kind])
                for kind in kinds
                if not everything or self._counts[kind]
            )
            if not everything:
                self._changed = set()
                for kind in [kind for kind, count in self._counts.items() if not count]:
                    del self._counts[kind], self._policies[kind]
            return found


class ClusterAnnouncement:
    """A task that was submitted to a cluster: the `Launcher` of all its processes.

    Args:
        launcher: Starts them.
        expected: Counts it until its first process starts, or it is retracted.
        kind: What can be done ahead for it.
        policy: See `Expect.policy`.
    """

    def __init__(
        self,
        launcher: ClusterLauncher,
        expected: ExpectedTasks,
        kind: Kind,
        policy: FrameworkPolicy,
    ) -> None:
        #: Names its standbys, as `Request.standby` does.
        self.standby = kind.key
        self._launcher = launcher
        self._expected = expected
        self._kind = kind
        self._policy = policy
        self._lock = threading.Lock()
        self._counted = True
        expected.add(kind, policy, 1)

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Start a process for the task on the node that it was placed on."""
        self.retract()
        return self._launcher.start(spec, listener, Expect(self._kind, self._policy, 0))

    def retract(self) -> None:
        """Count the task no longer; without effect the second time."""
        with self._lock:
            if not self._counted:
                return
            self._counted = False
        self._expected.add(self._kind, self._policy, -1)


class NodeStandbys:
    """The standbys of one flow on one node. For one thread at a time.

    Args:
        pool: Keeps them; it was opened for the node's broker.
        fresh: Starts the processes of tasks that none is kept for.
    """

    def __init__(self, pool: StandbyPool, fresh: Launcher) -> None:
        self._pool = pool
        self._fresh = fresh
        #: Standbys that the node keeps at most.
        self.most = 0
        self._lock = threading.Lock()
        #: By the flow's kind: what stands for each task that is to come.
        self._announced: dict[Kind, list[Announcement]] = {}
        #: By the flow's kind: the same with this node's environment. There are as many as a flow has kinds of tasks.
        self._here: dict[Kind, Kind] = {}

    def expect(self, command: Expect) -> None:
        """Keep standbys for so many tasks."""
        with self._lock:
            announced = self._announced.setdefault(command.kind, [])
            wanted = min(command.count, self.most)
            while len(announced) > wanted:
                announced.pop().retract()
            while len(announced) < wanted:
                announced.append(self._announce(command))
            if not announced:
                del self._announced[command.kind]

    def launcher_for(self, expected: Expect | None) -> Launcher:
        """Return what starts the process of a task: an announcement, if standbys are kept."""
        with self._lock:
            if expected is None or not self.most:
                return self._fresh
            if announced := self._announced.get(expected.kind):
                return announced.pop()
            # It was placed before the flow had said that it is to come. One of an earlier task may wait.
            return self._announce(expected)

    def _announce(self, expected: Expect) -> Announcement:
        here = self._here.get(expected.kind)
        if here is None:
            changes = standby_changes(expected.policy, os.environ)
            here = self._here[expected.kind] = replace(expected.kind, environment=changes)
        return self._pool.announce(here)

    def ready(self) -> Mapping[str, int]:
        """Return how many standbys wait for a task, by the key of the flow's kind; kinds without any are left out."""
        found = self._pool.ready_by_kind
        with self._lock:
            return {kind.key: found[here] for kind, here in self._here.items() if found[here]}
