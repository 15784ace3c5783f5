"""Which template a task's process is forked from: `start_method="forkserver"`.

One pool serves all runners of a Python process; with the last of them the templates end. A task whose
environment differs in what is read at import gets a fresh interpreter instead, by the rule that
standbys follow (`frameworks.late`), and so does one whose template fails: nothing is lost but time.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading

from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.late import late_changes
from prefect_gpu.processes.forkserver import TESTED, ForkServer
from prefect_gpu.processes.interpreter import environment_with, import_paths
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.launcher import Handle, ProcessLauncher, process_launcher
from prefect_gpu.processes.spec import LaunchSpec, Listener

logger = logging.getLogger(__name__)

#: Seconds that a template may take to import: half a minute is a cold disk, ten times that a hang.
READY_S = 300.0

#: Templates of one kind that may fail before tasks of that kind get fresh interpreters.
MOST_FAILURES = 3

#: Prefect's part in a child, which every template imports first.
_ALWAYS = ("prefect_gpu.prefect_bridge", "prefect_gpu.task_runner", "prefect_gpu.processes.child")


class TemplatePool:
    """Keeps one template for each set of libraries. Safe to use from several threads."""

    def __init__(self, launcher: ProcessLauncher) -> None:
        self._launcher = launcher
        self._reset()
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._owners: set[object] = set()
        self._servers: dict[Kind, ForkServer] = {}
        self._failures: dict[Kind, int] = {}

    def open(self, owner: object) -> None:
        """Say that a runner may want forks, until `close`."""
        with self._lock:
            self._owners.add(owner)

    def close(self, owner: object) -> None:
        """Say that a runner has ended. With the last one all templates end."""
        with self._lock:
            self._owners.discard(owner)
            if self._owners:
                return
            servers, self._servers, self._failures = self._servers, {}, {}
        for server in servers.values():
            server.close()

    def announce(self, kind: Kind) -> ForkLauncher:
        """Say that a task of a kind will come: its template is started, if there is none."""
        kind = kind.without_users()
        self.server(kind)
        return ForkLauncher(self, kind)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the templates."""
        with self._lock:
            return tuple(server.process.pid for server in self._servers.values())

    def server(self, kind: Kind) -> ForkServer | None:
        """Give the template of a kind, which may import still; `None`: there will be none."""
        with self._lock:
            if not self._owners:
                return None
            server = self._servers.get(kind)
            if server is not None and server.problem:
                del self._servers[kind]
                self._failures[kind] = self._failures.get(kind, 0) + 1
                logger.warning("the template of forked GPU tasks is given up: %s", server.problem)
                server.close()
                server = None
            if server is None and self._failures.get(kind, 0) < MOST_FAILURES:
                server = self._servers[kind] = ForkServer(
                    _modules(kind), import_paths(), kind.environment_of(os.environ)
                )
            return server

    def start(self, kind: Kind, spec: LaunchSpec, listener: Listener) -> Handle:
        """Start a task's process: a fork if it can be one."""
        environment = environment_with(spec.environment)
        server = self.server(kind)
        while server is not None and server.wait_ready(READY_S):
            server = self.server(kind)
        if server is None:
            return self._launcher.start(spec, listener)
        late = late_changes(
            server.environment,
            environment,
            registry.ADAPTERS.values(),
            cpus_stated=kind.cpus_stated,
        )
        if late is None:
            return self._launcher.start(spec, listener)
        # What a template cannot do a fresh interpreter does.
        return self._launcher.start(spec, listener, server.fork)

    def _forget(self) -> None:
        """In a fork of the parent: the templates are not ours."""
        for server in self._servers.values():
            server.forget()
        self._reset()


class ForkLauncher:
    """The `Launcher` of one task."""

    def __init__(self, pool: TemplatePool, kind: Kind) -> None:
        self._pool = pool
        self._kind = kind

    def start(self, spec: LaunchSpec, listener: Listener) -> Handle:
        """Start a process for it; waits for the template while that imports."""
        return self._pool.start(self._kind, spec, listener)

    def retract(self) -> None:
        """Without effect: a template serves many."""


def _modules(kind: Kind) -> tuple[str, ...]:
    """Give what a template imports: of libraries only those that are known to survive a fork."""
    extra = [m for m in kind.always if m not in _ALWAYS]
    # Nearly every body uses it, and it is not a framework.
    if importlib.util.find_spec("numpy") is not None:
        extra.append("numpy")
    return (*_ALWAYS, *(m for m in extra if m.partition(".")[0] in TESTED))


_pool_lock = threading.Lock()
_pool: TemplatePool | None = None


def template_pool() -> TemplatePool:
    """Give the one pool of this Python process."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = TemplatePool(process_launcher())
        return _pool


def _unlock_after_fork() -> None:
    global _pool_lock
    _pool_lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)
