"""Standbys (processes started ahead of their tasks) on the nodes of a cluster.

The node of a task is not known before placement, so all nodes get the same numbers of expected tasks. Each node decides
how many standbys it keeps, as on one machine.
"""

from __future__ import annotations

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
    """Counts a flow's submitted tasks that have no process yet, by kind of standby. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Kind] = Counter()
        self._policies: dict[Kind, FrameworkPolicy] = {}
        self._changed: set[Kind] = set()

    def add(self, kind: Kind, policy: FrameworkPolicy, number: int) -> None:
        """Change the count of a kind's tasks by a number, which may be negative."""
        with self._lock:
            self._counts[kind] += number
            self._policies[kind] = policy
            self._changed.add(kind)

    def take(self, everything: bool = False) -> tuple[Expect, ...]:
        """Return the counts that changed since the last call; `everything`: all counts except 0, for a new node."""
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
    """The `Launcher` of one task on a cluster. The task counts as expected until its first process starts."""

    def __init__(
        self,
        launcher: ClusterLauncher,
        expected: ExpectedTasks,
        kind: Kind,
        policy: FrameworkPolicy,
    ) -> None:
        #: Name of the task's kind of standby, as in `Request.standby`.
        self.standby = kind.key
        self._launcher = launcher
        self._expected = expected
        self._kind = kind
        self._policy = policy
        self._lock = threading.Lock()
        self._counted = True
        expected.add(kind, policy, 1)

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Start a process for the task on the node of its placement."""
        self.retract()
        return self._launcher.start(spec, listener, Expect(self._kind, self._policy, 0))

    def retract(self) -> None:
        """Remove the task from the expected tasks; a second call does nothing."""
        with self._lock:
            if not self._counted:
                return
            self._counted = False
        self._expected.add(self._kind, self._policy, -1)


class NodeStandbys:
    """The standbys of one flow on one node, in the pool of the node's broker. Any thread may use it."""

    def __init__(self, pool: StandbyPool, fresh: Launcher) -> None:
        self._pool = pool
        self._fresh = fresh
        self.most = 0
        self._lock = threading.Lock()
        #: Announcements of the expected tasks, by the flow's kind.
        self._announced: dict[Kind, list[Announcement]] = {}
        #: Kinds with this node's environment, by the flow's kind.
        self._here: dict[Kind, Kind] = {}

    def expect(self, command: Expect) -> None:
        """Keep a standby for each expected task of a kind, at most `most` for the kind."""
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
        """Return a task's launcher: an announcement in the standby pool or, without standbys, of fresh processes."""
        with self._lock:
            if expected is None or not self.most:
                return self._fresh
            if announced := self._announced.get(expected.kind):
                return announced.pop()
            # The task was placed before it was announced. A standby of an earlier task may wait.
            return self._announce(expected)

    def _announce(self, expected: Expect) -> Announcement:
        here = self._here.get(expected.kind)
        if here is None:
            changes = standby_changes(expected.policy)
            here = self._here[expected.kind] = replace(expected.kind, environment=changes)
        return self._pool.announce(here)

    def ready(self) -> Mapping[str, int]:
        """Return the numbers of waiting standbys by the key of the flow's kind, without zeros."""
        found = self._pool.ready_by_kind
        with self._lock:
            return {kind.key: found[here] for kind, here in self._here.items() if found[here]}
