"""The launcher of this machine: one thread that starts children and carries their messages.

All children are started from one long-lived thread, each as a fresh interpreter by exec, in a
session of its own. The same thread reads and writes their channels and standard streams without ever
blocking on one of them, and sees them end. Which child to start, and what its messages mean, is
decided elsewhere.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import guardian, messages, passing
from prefect_gpu.processes.guard import GuardKeeper
from prefect_gpu.processes.interpreter import (
    environment_with,
    has_ended,
    open_pidfd,
    with_token,
)
from prefect_gpu.processes.launched import GivenTask, LaunchedChild, tell
from prefect_gpu.processes.messages import HEADER, Accepted, Heated, Late, Warmed
from prefect_gpu.processes.output import OutputForwarder
from prefect_gpu.processes.spawning import Spawner, spawn_fresh
from prefect_gpu.processes.spec import (
    STANDBY_TITLE,
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    Listener,
    ValueArrived,
    WarmSpec,
)
from prefect_gpu.processes.streams import StreamReader
from prefect_gpu.processes.transport import Parcel, unpack

#: Seconds that a child may take to end once its value has arrived: room for libraries to tear down
#: (chosen, not measured), and an end for a thread that would hang for ever.
EXIT_GRACE_S = 5.0

#: Seconds that a child may live after it has closed its channel without a value.
SILENT_GRACE_S = 1.0

#: Seconds between two looks for ended children where the system has no `pidfd_open` (macOS).
POLL_S = 0.05

#: Bytes read from one channel before the others have their turn.
_TURN_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class Handle:
    """A `ChildHandle`: passes what is asked on to the launcher's thread."""

    def __init__(self, launcher: ProcessLauncher, child: LaunchedChild) -> None:
        self._launcher = launcher
        self._child = child

    @property
    def child(self) -> LaunchedChild:
        """Which child; another one after a start over. For the launcher's thread only."""
        return self._child

    def give(self, spec: LaunchSpec, late: Late, listener: Listener) -> Handle:
        """Give a task to a child that was made ahead. Only once.

        Args:
            spec: The task's; a child made for it takes its place if this one ends before it has
                accepted the task.
            late: What has changed since the child was made.
            listener: Hears `ChildStarted` first, once more after a start over.

        Returns:
            The handle to steer the task by; this one is of no use any more.
        """
        handle = Handle(self._launcher, self._child)
        self._launcher.call(lambda: self._launcher.give_task(handle, spec, late, listener))
        return handle

    def start_over(self, child: LaunchedChild) -> None:
        """Steer another child from now on. For the launcher's thread only."""
        self._child = child

    def answer(self, message: Any) -> None:
        """Send a message to the child; dropped if it is gone."""
        data = memoryview(messages.encode(message))
        self._launcher.call(lambda: self._launcher.send(self._child, data))

    def terminate(self) -> None:
        """Ask the child to end."""
        self._launcher.call(lambda: self._launcher.signal_child(self._child, signal.SIGTERM))

    def kill(self) -> None:
        """End the child and all that it started."""
        self._launcher.call(lambda: self._launcher.kill_child(self._child))


class ProcessLauncher:
    """Starts children on this machine. Its thread starts with the first child and stays.

    After a fork of the parent the copy in the fork starts afresh, without children.

    Args:
        exit_grace_s: Seconds that a child may take to end once its value has arrived.
        silent_grace_s: Seconds that a child may live after it has closed its channel.
        spawn: How a process comes to be.
    """

    def __init__(
        self,
        exit_grace_s: float = EXIT_GRACE_S,
        silent_grace_s: float = SILENT_GRACE_S,
        spawn: Spawner = spawn_fresh,
    ) -> None:
        self._spawn_process = spawn
        self._exit_grace_s = exit_grace_s
        self._silent_grace_s = silent_grace_s
        self._reset()
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(itself))

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._children: set[LaunchedChild] = set()
        self.output = OutputForwarder(on_room=self._wake)

    # Any thread.

    def start(
        self, spec: LaunchSpec | WarmSpec, listener: Listener, spawn: Spawner | None = None
    ) -> Handle:
        """Start a child; `listener` hears `ChildStarted` or `ChildRefused` first.

        One that is made ahead then says `Warmed`, and waits for `Handle.give`.

        Args:
            spec: What it is made of.
            listener: Hears it.
            spawn: How this process comes to be; `None`, or where that fails: as all do.
        """
        child = LaunchedChild(spec, listener, spawn)
        with self._lock:
            if self._thread is None:
                self._open()
                self._thread = threading.Thread(
                    target=self._run, name="prefect-gpu-launcher", daemon=True
                )
                self._thread.start()
        self.call(lambda: self._launch(child))
        return Handle(self, child)

    def call(self, command: Callable[[], None]) -> None:
        """Have the launcher's thread do something soon."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            return
        try:
            self._wake_in.send(b"!")
        except (BlockingIOError, OSError):
            # Full: it is going to wake anyway. Closed: it is gone.
            return

    def _open(self) -> None:
        """Open what the thread waits on; a launcher that starts nothing holds no descriptor."""
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._keeper = GuardKeeper(self._selector, self._known)
        self._streams = StreamReader(self._selector, self.output)

    def _known(self) -> Iterator[tuple[int, str]]:
        for child in self._children:
            if child.process is not None:
                yield child.process.pid, child.token

    def close(self, timeout_s: float = 2.0) -> None:
        """End all children, the guardian and the thread. It may be used again after that."""
        thread = self._thread
        if thread is None:
            return
        self._closing = True
        self._wake()
        thread.join(timeout_s)
        if not thread.is_alive():
            self._close_own()
            self._reset()

    def forget(self) -> None:
        """After a fork of the parent: be a launcher without children, and hold nothing of theirs.

        The copy must not hold the guardian's pipe open, or the guardian would not see the parent end.
        """
        if self._thread is None:
            return
        # Closed by number and never through the selector or a buffer: the kernel's set of watched
        # files is shared with the parent, and a lock may have been held at the fork.
        for child in self._children:
            if child.channel is not None:
                child.channel.close()
            child.drop_files()
            if child.pidfd is not None:
                os.close(child.pidfd)
            for stream in child.streams.values():
                stream.close()
            if child.process is not None:
                # Not a child of the fork's: nothing to wait for, or to warn of.
                child.process.returncode = 0
        self._keeper.forget()
        self._close_own()
        self._reset()

    def _close_own(self) -> None:
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # The launcher's thread.

    def _run(self) -> None:
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakes)
        while True:
            self._turn()
            if self._closing and self._close_down():
                return

    @staticmethod
    def _attempt(step: Callable[[], None]) -> None:
        """Take one step. One child's trouble must not keep the others' from being seen to."""
        try:
            step()
        except Exception:
            logger.exception("the launcher of GPU tasks met an error; it goes on")

    def _close_down(self) -> bool:
        """End what there is; `True`: nothing is left."""
        for child in self._children:
            if not child.killed:
                self.kill_child(child, "the runner was closed")
        if self._children:
            return False
        self._keeper.close()
        return True

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._patience()):
            self._attempt(functools.partial(key.data, mask))
        while self._commands:
            self._attempt(self._commands.popleft())
        self._streams.go_on()
        self._attempt(self._look_at_clock)

    def _patience(self) -> float | None:
        now = time.monotonic()
        waits = [c.deadline - now for c in self._children if c.deadline is not None]
        if any(c.pidfd is None for c in self._children):
            waits.append(POLL_S)
        if self._streams.holds_back:
            waits.append(1.0)
        return max(0.0, min(waits)) if waits else None

    def _drain_wakes(self, mask: int) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            return

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for child in tuple(self._children):
            if child.deadline is not None and now >= child.deadline:
                child.deadline = None
                self.kill_child(child, child.deadline_reason)
            if child.pidfd is None and child.process is not None:
                if has_ended(child.process):
                    self._finish(child)

    def _launch(self, child: LaunchedChild) -> None:
        # Before there is anything of it: a fork in between must know what to let go of.
        self._children.add(child)
        try:
            self._keeper.ensure()
            self._spawn(child)
        except Exception as error:
            self._children.discard(child)
            self._drop(child)
            child.tell(ChildRefused(error))
            return
        assert child.process is not None
        child.tell(ChildStarted(child.process.pid))

    def give_task(self, handle: Handle, spec: LaunchSpec, late: Late, listener: Listener) -> None:
        """See `Handle.give`. The launcher's thread only."""
        child = handle.child

        def start_over() -> None:
            fresh = LaunchedChild(spec, listener)
            handle.start_over(fresh)
            self._launch(fresh)

        if child not in self._children or child.killed or child.process is None:
            start_over()
            return
        try:
            prepare = messages.encode(replace(spec.prepare, late=late))
        except Exception:
            # Something in it cannot travel; one made for the task says so as ever.
            self.kill_child(child)
            start_over()
            return
        child.give(GivenTask(spec, listener, child.listener, start_over))
        child.tell(ChildStarted(child.process.pid))
        self._queue_call(child, prepare, spec)
        # At once: what was asked of the launcher next may be to start a process, which takes as long
        # as all that is left until the task's first line.
        self._write(child)

    @staticmethod
    def _queue_call(child: LaunchedChild, prepare: bytes, spec: LaunchSpec) -> None:
        call = spec.call if isinstance(spec.call, Parcel) else Parcel(messages.VALUE, spec.call)
        child.queue(memoryview(prepare))
        child.queue(*call.frame, files=call.files)

    def _drop(self, child: LaunchedChild) -> None:
        """Leave nothing of a child that could not be started in full."""
        if child.pidfd is not None:
            self._unwatch(child.pidfd)
            os.close(child.pidfd)
            child.pidfd = None
        self._close_channel(child)
        process = child.process
        if process is not None:
            guardian.kill_group(process.pid)
            process.wait()
            self._keeper.tell(f"-{process.pid}")
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    self._unwatch(stream)
                    stream.close()

    def _spawn(self, child: LaunchedChild) -> None:
        spec, child.spec = child.spec, None
        assert spec is not None
        # First all that can fail for what the spec holds: then there is no process to undo.
        warm = {"warm": spec.modules} if isinstance(spec, WarmSpec) else {}
        boot = json.dumps({"sys_path": spec.sys_path, "argv": spec.argv, **warm}).encode()
        child.queue(memoryview(HEADER.pack(messages.BOOT, len(boot)) + boot))
        if isinstance(spec, LaunchSpec):
            self._queue_call(child, messages.encode(spec.prepare), spec)
            title, environment = spec.task_name, environment_with(spec.environment)
        else:
            title, environment = STANDBY_TITLE, dict(spec.environment)
        child.open(self._spawn_process, title, with_token(environment, child.token), spec.cwd)
        assert child.process is not None and child.channel is not None
        # Told before the child hears anything: it does nothing until then, and ends by itself if
        # its channel closes first.
        self._keeper.tell(f"+{child.process.pid} {child.token}")
        child.channel.setblocking(False)
        child.pidfd = open_pidfd(child.process.pid)
        if child.pidfd is not None:
            self._selector.register(
                child.pidfd, selectors.EVENT_READ, lambda mask: self._finish(child)
            )
        assert child.process.stdout is not None and child.process.stderr is not None
        child.streams = {"stdout": child.process.stdout, "stderr": child.process.stderr}
        for stream in child.streams.values():
            os.set_blocking(stream.fileno(), False)
        self._streams.watch(child)
        self._watch_channel(child)

    def _watch_channel(self, child: LaunchedChild) -> None:
        if child.channel is None:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.outgoing else 0)

        def ready(mask: int) -> None:
            if mask & selectors.EVENT_WRITE:
                self._write(child)
            if mask & selectors.EVENT_READ:
                self._read(child)

        try:
            self._selector.modify(child.channel, wanted, ready)
        except KeyError:
            self._selector.register(child.channel, wanted, ready)

    def send(self, child: LaunchedChild, data: memoryview) -> None:
        """Send bytes to a child; dropped if it is gone. The launcher's thread only."""
        if child.channel is not None:
            child.queue(data)
            self._watch_channel(child)

    def _write(self, child: LaunchedChild) -> None:
        if child.channel is None:
            # Its end was seen in the same turn.
            return
        try:
            while child.outgoing:
                head, files = child.outgoing[0]
                sent = passing.send(child.channel, head, files)
                if sent == len(head):
                    child.outgoing.popleft()
                else:
                    child.outgoing[0] = head[sent:], ()
        except BlockingIOError:
            # The rest goes when there is room, which is heard where the channel is watched for it.
            pass
        except ProtocolError as error:
            self._refuse(child, error, "it could not be sent its call")
            return
        except OSError:
            # It is dying; that it died is seen where its end is.
            child.outgoing.clear()
        self._watch_channel(child)

    def _read(self, child: LaunchedChild) -> bool:
        """Read what a child sent, for one turn; `False`: nothing more can come."""
        taken_bytes = 0
        while child.channel is not None and taken_bytes < _TURN_BYTES:
            try:
                size_bytes, files = passing.receive(child.channel, child.frames.room)
            except BlockingIOError:
                return False
            except ProtocolError as error:
                self._refuse(child, error, "what it sent could not be received")
                return False
            except OSError:
                size_bytes, files = 0, ()
            if not size_bytes:
                self._close_channel(child)
                if not child.value_arrived and child.deadline is None:
                    child.deadline = time.monotonic() + self._silent_grace_s
                    child.deadline_reason = "it closed its channel to the parent and lived on"
                return False
            taken_bytes += size_bytes
            try:
                frame = child.frames.filled(size_bytes, files)
                if frame is not None:
                    self._take_frame(child, *frame)
            except ProtocolError as error:
                self._refuse(child, error, "it sent what is no message")
        return child.channel is not None

    def _refuse(self, child: LaunchedChild, error: ProtocolError, because: str) -> None:
        """End a child that cannot be spoken with."""
        link: BaseException | None = error
        while link is not None:
            # Whoever keeps the error would keep what its frames hold: files, and their memory.
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        if child.task is None:
            # One that has not taken its task yet is replaced.
            child.tell(ChildRefused(error))
        self._close_channel(child)
        self.kill_child(child, because)

    def _take_frame(self, child: LaunchedChild, kind: int, body: messages.Body) -> None:
        if kind not in (messages.VALUE, messages.PARCEL):
            message = messages.decode(body)
            if isinstance(message, Accepted):
                task, child.task = child.task, None
                if task is not None:
                    tell(task.keeper, message)
            elif isinstance(message, (Warmed, Heated)) and child.task is not None:
                # Of what it did before the task was given to it.
                tell(child.task.keeper, message)
            else:
                child.tell(message)
            return
        # Mapped at once: a listener that is gone, or does not want it, leaves no descriptor open.
        contents = unpack(kind, body, child.frames.take_beside())
        child.value_arrived = True
        child.deadline = time.monotonic() + self._exit_grace_s
        child.deadline_reason = f"it had not ended {self._exit_grace_s:g} s after its value"
        child.tell(ValueArrived(contents))

    def signal_child(self, child: LaunchedChild, signum: int) -> None:
        """Send a signal to a child's group, if it lives. The launcher's thread only."""
        if child in self._children and child.process is not None:
            child.asked_to_end = True
            try:
                os.killpg(child.process.pid, signum)
            except (ProcessLookupError, PermissionError):
                return

    def kill_child(self, child: LaunchedChild, because: str = "") -> None:
        """Kill a child and all that it started. The launcher's thread only.

        Args:
            child: Which; one that has ended is left alone.
            because: Why, if it is the launcher's own doing.
        """
        if child not in self._children or child.process is None:
            return
        if not because:
            child.asked_to_end = True
        if not child.killed:
            child.killed_because = because
        child.killed = True
        guardian.kill_group(child.process.pid)
        guardian.kill_strays((child.token,))

    def _finish(self, child: LaunchedChild) -> None:
        """A child has ended: take what it still said, end what it left, and tell."""
        assert child.process is not None
        if child.pidfd is not None:
            self._unwatch(child.pidfd)
            os.close(child.pidfd)
            child.pidfd = None
        # Not reaped yet, so its process id, and with it the group's, cannot be somebody else's.
        guardian.kill_group(child.process.pid)
        code = child.process.wait()
        if child.killed or code != 0:
            guardian.kill_strays((child.token,))
        while self._read(child):
            pass
        self._streams.finish(child)
        truncated = child.frames.truncated
        self._close_channel(child)
        self._children.discard(child)
        self._keeper.tell(f"-{child.process.pid}")
        tail = child.stderr_tail.decode("utf-8", errors="replace")
        exited = ChildExited(code, tail, truncated, child.killed_because)
        task, child.task = child.task, None
        if task is not None and not child.asked_to_end and not self._closing:
            # Nothing of the task has run: it need not know.
            tell(task.keeper, exited)
            task.start_over()
            return
        child.tell(exited)

    def _close_channel(self, child: LaunchedChild) -> None:
        if child.channel is not None:
            self._unwatch(child.channel)
            child.channel.close()
            child.channel = None
            child.drop_files()

    def _unwatch(self, file: Any) -> None:
        try:
            self._selector.unregister(file)
        except (KeyError, ValueError):
            return


def _forget(launcher: weakref.ref[ProcessLauncher]) -> None:
    forked = launcher()
    if forked is not None:
        forked.forget()


_lock = threading.Lock()
_launcher: ProcessLauncher | None = None


def process_launcher() -> ProcessLauncher:
    """Give the one launcher of this Python process; in a fork of it, a fresh one."""
    global _launcher
    with _lock:
        if _launcher is None:
            _launcher = ProcessLauncher()
            atexit.register(_launcher.close)
        return _launcher


def _unlock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)
