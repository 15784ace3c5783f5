"""The launcher of this machine: one thread that starts children and carries their messages.

The thread starts each child in a session of its own, reads and writes channels and standard streams without blocking,
and notices when a child ends. `runner` decides which child is started, and what its messages mean.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import resource
import selectors
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect_gpu.errors import CapacityError, ProtocolError
from prefect_gpu.process_resources import PROCESS_RESOURCES, describe_process_limit, start_thread
from prefect_gpu.processes import guardian, messages
from prefect_gpu.processes.guardian import Guardian, with_token
from prefect_gpu.processes.interpreter import (
    Process,
    Spawner,
    SpawnRequest,
    environment_with,
    start_interpreter,
)
from prefect_gpu.processes.launch_spec import (
    STANDBY_TITLE,
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    Listener,
    ValueArrived,
    WarmSpec,
    tell,
)
from prefect_gpu.processes.messages import Accepted, BodyEnded, BodyStarted, Late, Warmed
from prefect_gpu.processes.output import ChildOutput, OutputForwarder, unwatch
from prefect_gpu.values import transport
from prefect_gpu.values.transport import Frame, FrameReader, MemoryFile

#: Seconds that a child may take to end once its value has arrived. Chosen, not measured: libraries shut down meanwhile.
EXIT_GRACE_S = 5.0

SILENT_GRACE_S = 1.0

#: Seconds between two checks for ended children where the system has no `pidfd_open` (macOS).
POLL_S = 0.05

#: Seconds between two checks whether output can be read again: the parent's stream may have stalled.
_HELD_BACK_S = 1.0

#: Receives from one channel before other channels have their turn; each is at most a socket buffer.
_TURN_RECEIVES = 32

#: Requested size of a channel's socket buffer in bytes; the kernel gives less (208 KiB by default).
_SOCKET_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class Handle:
    """A `ChildHandle` that passes calls on to the launcher's thread."""

    def __init__(self, launcher: ProcessLauncher, child: LaunchedChild) -> None:
        self._launcher = launcher
        #: Replaced if a standby ends before the body of its task begins. For the launcher's thread only.
        self.child = child

    def give(self, spec: LaunchSpec, late: Late, listener: Listener) -> Handle:
        """Assign a task to a standby, only once, and return the task's handle, which replaces the standby's.

        If the standby ends before the body has begun, a fresh process is started from `spec`, and the listener gets
        another `ChildStarted`. `late` has the changes since the standby was started.
        """
        handle = Handle(self._launcher, self.child)
        self._launcher.call(lambda: self._launcher.give_task(handle, spec, late, listener))
        return handle

    def answer(self, message: Any) -> None:
        """See `ChildHandle.answer`."""
        data = memoryview(messages.encode(message))
        self._launcher.call(lambda: self._launcher.send(self.child, data))

    def kill(self) -> None:
        """See `ChildHandle.kill`."""
        self._launcher.call(lambda: self._launcher.kill_child(self.child))


class LaunchedChild:
    """One child in the launcher's thread: process, channel, streams, deadline."""

    def __init__(
        self, spec: LaunchSpec | WarmSpec, listener: Listener, spawn: Spawner | None = None
    ) -> None:
        #: `None` once the process was started, since a call may be large.
        self.spec: LaunchSpec | WarmSpec | None = spec
        #: Starts the process; `None`, or after a failure: the launcher's default does.
        self.spawn = spawn
        self.listener = listener
        #: The task that a standby was given, until its body has begun.
        self.task: GivenTask | None = None
        self.token = uuid.uuid4().hex
        self.process: Process | None = None
        self.channel: socket.socket | None = None
        self.pidfd: int | None = None
        self.output: ChildOutput | None = None
        #: Bytes to send, each with the memory files that go with its first byte.
        self.outgoing: deque[tuple[memoryview, tuple[MemoryFile, ...]]] = deque()
        self.frames = FrameReader()
        self.value_arrived = False
        #: The owner of the handle has killed the child.
        self.unwanted = False
        self.killed = False
        self.killed_because = ""
        #: Monotonic seconds at which the child is killed if it still lives, and the reason then.
        self.deadline: float | None = None
        self.deadline_reason = ""

    def open(self, spawn: Spawner, title: str, environment: Mapping[str, str], cwd: str) -> None:
        """Make the channel and start the process; after an exception the caller closes opened descriptors."""
        while self.process is None:
            self.channel, theirs = socket.socketpair()
            with theirs:
                for end in (self.channel, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
                request = SpawnRequest(title, theirs.fileno(), environment, cwd)
                try:
                    self.process = (self.spawn or spawn)(request)
                except OSError as error:
                    if self.spawn is None:
                        raise
                    logger.debug("a GPU task gets a fresh interpreter: %s", error)
                    self.spawn = None
                    # A process that was started in spite of the error sees its channel close, and ends.
                    self.channel.close()

    def kill_in(self, seconds: float, why: str) -> None:
        """Set the deadline."""
        self.deadline, self.deadline_reason = time.monotonic() + seconds, why

    def queue(self, *pieces: memoryview, files: tuple[MemoryFile, ...] = ()) -> None:
        """Add bytes to send, and memory files that go with the first piece."""
        for piece in pieces:
            if len(piece):
                self.outgoing.append((piece, files))
                files = ()

    def queue_call(self, prepare: bytes, spec: LaunchSpec) -> None:
        """Add a task's `Prepare` and its call to the bytes to send."""
        self.queue(memoryview(prepare))
        self.queue(*spec.call.frame, files=spec.call.files)

    def drop_files(self) -> None:
        """Close the memory files that were not sent yet, or came with an incomplete frame."""
        self.outgoing.clear()
        # The reader's state stays: whether the stream ended inside a frame.
        self.frames.drop_files()


@dataclass(frozen=True, slots=True)
class GivenTask:
    """A task that was given to a standby and whose body has not begun."""

    #: A fresh process is started from it if the standby ends early.
    spec: LaunchSpec
    listener: Listener
    handle: Handle
    #: The standby's listener: called when the standby has accepted the task, or has ended before.
    standby_listener: Listener


class ProcessLauncher:
    """Starts children on this machine. A fork of the parent has a launcher without children."""

    def __init__(
        self,
        exit_grace_s: float = EXIT_GRACE_S,
        silent_grace_s: float = SILENT_GRACE_S,
        spawn: Spawner = start_interpreter,
    ) -> None:
        self._spawn_process = spawn
        self._exit_grace_s = exit_grace_s
        self._silent_grace_s = silent_grace_s
        self._reset()
        PROCESS_RESOURCES.after_fork(self, ProcessLauncher._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._own = contextlib.ExitStack()
        self._children: set[LaunchedChild] = set()
        #: Tokens of further processes that the guardian kills, by process id.
        self._guarded: dict[int, str] = {}
        self.output = OutputForwarder(on_progress=self._wake)

    # Any thread.

    def start(
        self, spec: LaunchSpec | WarmSpec, listener: Listener, spawn: Spawner | None = None
    ) -> Handle:
        """Start a child; a standby sends `Warmed` and then waits for `Handle.give`. See `Launcher.start`.

        `spawn` starts this process; `None`, or after a failure: the launcher's default does.

        Raises:
            CapacityError: No thread, or no descriptor for it, is left; the next call tries again.
        """
        child = LaunchedChild(spec, listener, spawn)
        with self._lock:
            if self._thread is None:
                try:
                    self._open()
                    self._thread = start_thread(self._run, "prefect-gpu-launcher")
                except BaseException as error:
                    self._own.close()
                    named = _name_limit(error)
                    if named is None:
                        raise
                    raise named from error
        self.call(lambda: self._launch(child))
        return Handle(self, child)

    def guard(self, pid: int, token: str) -> None:
        """Have the guardian kill a process with the children, from the first child on; an empty token removes it."""

        def register() -> None:
            if token:
                self._guarded[pid] = token
                self._guardian.tell(f"+{pid} {token}")
            elif self._guarded.pop(pid, None):
                self._guardian.tell(f"-{pid}")

        self.call(register)

    def call(self, command: Callable[[], None]) -> None:
        """Call a function on the launcher's thread, soon."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._thread is not None:
            # Full: the thread is about to wake anyway. Closed: the thread has ended.
            with contextlib.suppress(OSError):
                self._wake_in.send(b"!")

    def _open(self) -> None:
        """Open the resources that the thread waits on; a launcher without children holds no descriptor."""
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
            self._own.enter_context(end)
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._own.enter_context(self._selector)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakes)
        self._guardian = Guardian(self._selector, self._known)

    def _known(self) -> Iterator[tuple[int, str]]:
        for child in self._children:
            if child.process is not None:
                yield child.process.pid, child.token
        yield from self._guarded.items()

    def close(self, timeout_s: float = 2.0) -> None:
        """End all children, the guardian and the thread. The launcher can be used again after that."""
        thread = self._thread
        if thread is None:
            return
        self._closing = True
        self._wake()
        thread.join(timeout_s)
        if not thread.is_alive():
            self._own.close()
            self._reset()

    def _forget(self) -> None:
        """In a fork: close the parent's descriptors, or the guardian would not notice the parent's end."""
        if self._thread is None:
            self._reset()
            return
        # The selector is not asked: the kernel's set of watched files is shared with the parent.
        for child in self._children:
            if child.channel is not None:
                child.channel.close()
            child.drop_files()
            if child.pidfd is not None:
                os.close(child.pidfd)
            if child.output is not None:
                child.output.close_in_fork()
            if child.process is not None:
                # No child of the fork: nothing to wait for.
                child.process.returncode = 0
        self._guardian.forget()
        self._own.close()
        self._reset()

    # The launcher's thread.

    def _run(self) -> None:
        while True:
            key = None
            for key, mask in self._selector.select(self._longest_wait_s()):
                self._attempt(key.data, mask)
            # The key refers to a child, and so to the value of a task, which must not stay until the next event.
            del key
            while self._commands:
                self._attempt(self._commands.popleft())
            self._attempt(self._check_children)
            if self._closing and self._close_down():
                return

    @staticmethod
    def _attempt(step: Callable[..., None], *arguments: Any) -> None:
        """Call a function; log its exceptions, so that other children are still served."""
        try:
            step(*arguments)
        except Exception:
            logger.exception("the launcher of GPU tasks met an error; it goes on")

    def _close_down(self) -> bool:
        """Kill all children; return whether none is left."""
        for child in self._children:
            if not child.killed:
                self.kill_child(child, "the runner was closed")
        if self._children:
            return False
        self._guardian.close()
        return True

    def _longest_wait_s(self) -> float | None:
        now = time.monotonic()
        waits = [c.deadline - now for c in self._children if c.deadline is not None]
        if self._guardian.due_s is not None:
            waits.append(self._guardian.due_s - now)
        if any(c.pidfd is None for c in self._children):
            waits.append(POLL_S)
        if any(c.output is not None and c.output.held_back for c in self._children):
            waits.append(_HELD_BACK_S)
        return max(0.0, min(waits)) if waits else None

    def _drain_wakes(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _check_children(self) -> None:
        """Handle deadlines, held back output and ends, which no event of a descriptor announces."""
        try:
            self._guardian.replace()
        except OSError:
            # Tried again. Without a guardian children run on; tasks that cannot start say why.
            logger.debug("the guardian of GPU tasks cannot be replaced", exc_info=True)
        now = time.monotonic()
        for child in tuple(self._children):
            if child.output is not None:
                child.output.resume()
            if child.deadline is not None and now >= child.deadline:
                child.deadline = None
                self.kill_child(child, child.deadline_reason)
            process = child.process
            if child.pidfd is None and process is not None and process.poll() is not None:
                self._finish(child)

    # Starting a child, or giving a task to a standby.

    def _launch(self, child: LaunchedChild) -> None:
        # First of all: a fork in between must know what to close.
        self._children.add(child)
        try:
            self._guardian.ensure()
            self._spawn(child)
        except Exception as error:
            self._children.discard(child)
            self._drop(child)
            tell(child.listener, ChildRefused(_name_limit(error) or error))
            return
        assert child.process is not None
        tell(child.listener, ChildStarted(child.process.pid))

    def _spawn(self, child: LaunchedChild) -> None:
        spec, child.spec = child.spec, None
        assert spec is not None
        # First all that can fail because of the spec: then there is no process to undo.
        warm = {"warm": spec.modules} if isinstance(spec, WarmSpec) else {}
        boot = json.dumps({"sys_path": spec.sys_path, "argv": spec.argv, **warm}).encode()
        child.queue(memoryview(transport.frame_header(transport.BOOT, len(boot)) + boot))
        if isinstance(spec, LaunchSpec):
            child.queue_call(messages.encode(spec.prepare), spec)
            title, environment = spec.task_name, environment_with(spec.environment)
        else:
            title, environment = STANDBY_TITLE, dict(spec.environment)
        child.open(self._spawn_process, title, with_token(environment, child.token), spec.cwd)
        process = child.process
        assert process is not None and child.channel is not None
        # Before the child gets any input, without which it does nothing and ends when its channel closes.
        self._guardian.tell(f"+{process.pid} {child.token}")
        child.channel.setblocking(False)
        child.pidfd = process.open_pidfd()
        if child.pidfd is not None:
            self._selector.register(
                child.pidfd, selectors.EVENT_READ, lambda mask: self._finish(child)
            )
        assert process.stdout is not None and process.stderr is not None
        child.output = ChildOutput(
            {"stdout": process.stdout, "stderr": process.stderr}, self._selector, self.output
        )
        self._watch_channel(child)

    def _drop(self, child: LaunchedChild) -> None:
        """Undo the start of a child that failed half way."""
        self._close_pidfd(child)
        self._close_channel(child)
        if child.process is not None:
            guardian.kill_group(child.process.pid)
            child.process.wait()
            self._guardian.tell(f"-{child.process.pid}")
            for stream in filter(None, (child.process.stdout, child.process.stderr)):
                unwatch(self._selector, stream)
                stream.close()

    def give_task(self, handle: Handle, spec: LaunchSpec, late: Late, listener: Listener) -> None:
        """See `Handle.give`. The launcher's thread only."""
        child = handle.child
        task = GivenTask(spec, listener, handle, child.listener)
        if child not in self._children or child.killed or child.process is None:
            self._start_over(task)
            return
        try:
            prepare = messages.encode(replace(spec.prepare, late=late))
        except Exception:
            # It cannot be pickled; the fresh process is refused with the same error.
            self.kill_child(child)
            self._start_over(task)
            return
        child.task, child.listener = task, listener
        tell(child.listener, ChildStarted(child.process.pid))
        child.queue_call(prepare, spec)
        # At once: the next command may start a process, which takes as long as the rest of this task's start.
        self._write(child)

    def _start_over(self, task: GivenTask) -> None:
        """Start a fresh process for a task whose standby has ended."""
        child = LaunchedChild(task.spec, task.listener)
        task.handle.child = child
        self._launch(child)

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
        """Send bytes to a child; they are dropped if it has ended. The launcher's thread only."""
        if child.channel is not None:
            child.queue(data)
            self._watch_channel(child)

    def _write(self, child: LaunchedChild) -> None:
        if child.channel is None:
            return
        try:
            while child.outgoing:
                head, files = child.outgoing[0]
                sent = transport.send(child.channel, head, files)
                if sent == len(head):
                    child.outgoing.popleft()
                else:
                    child.outgoing[0] = head[sent:], ()
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._refuse(child, error, "it could not be sent its call")
            return
        except OSError:
            # The child is about to end, which is noticed elsewhere.
            child.outgoing.clear()
        self._watch_channel(child)

    def _read(self, child: LaunchedChild) -> bool:
        """Read a child's messages, for one turn; `False`: nothing more can come now."""
        for _ in range(_TURN_RECEIVES):
            if child.channel is None:
                break
            try:
                frame = child.frames.receive(child.channel)
                if frame is not None:
                    self._take_frame(child, frame)
            except BlockingIOError:
                return False
            except ProtocolError as error:
                self._refuse(child, error, "it sent what cannot be received or is no message")
            except (EOFError, OSError):
                self._close_channel(child)
                if not child.value_arrived and child.deadline is None:
                    why = "it closed its channel to the parent and lived on"
                    child.kill_in(self._silent_grace_s, why)
        return child.channel is not None

    def _refuse(self, child: LaunchedChild, error: ProtocolError, because: str) -> None:
        """End a child with which no messages can be exchanged."""
        link: BaseException | None = error
        while link is not None:
            # Frames of a traceback would keep files and their memory alive.
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        if child.task is None:
            # A standby is replaced instead, until the body of its task has begun.
            tell(child.listener, ChildRefused(error))
        # Killed before its channel closes: otherwise the child would end by itself.
        self.kill_child(child, because)
        self._close_channel(child)

    def _take_frame(self, child: LaunchedChild, frame: Frame) -> None:
        if frame.kind == transport.VALUE:
            # Unpacked at once, so that the value's files are closed in any case.
            value = transport.unpack(frame)
            child.value_arrived = True
            grace_s = self._exit_grace_s
            child.kill_in(grace_s, f"it had not ended {grace_s:g} s after its value")
            tell(child.listener, ValueArrived(value))
            return
        message = messages.decode(frame.body)
        if isinstance(message, (Accepted, Warmed)) and child.task is not None:
            # The message is about the standby's time before its task, or says that it has the task.
            tell(child.task.standby_listener, message)
            return
        if isinstance(message, (BodyStarted, BodyEnded)):
            child.task = None
        if not isinstance(message, Accepted):
            tell(child.listener, message)

    def kill_child(self, child: LaunchedChild, because: str = "") -> None:
        """Kill a child and all its processes. For the launcher's thread only.

        `because`: why the launcher does so by its own decision; empty: the owner of the handle asks for it.
        """
        if child not in self._children or child.process is None:
            return
        if not because:
            child.unwanted = True
        if not child.killed:
            child.killed_because = because
        child.killed = True
        guardian.kill_all({child.process.pid: child.token})

    def _finish(self, child: LaunchedChild) -> None:
        """Read the last output of a child that has ended, kill its remaining processes, and call its listener."""
        assert child.process is not None
        self._close_pidfd(child)
        # Before the wait, so that no other process has its id. (Forks and, where there is no pidfd, all processes were
        # reaped a moment ago: see docs/decisions.md.)
        guardian.kill_group(child.process.pid)
        code = child.process.wait()
        if child.killed or code != 0:
            guardian.kill_strays({child.process.pid: child.token})
        while self._read(child):
            pass
        tail = ""
        if child.output is not None:
            child.output.finish()
            tail = child.output.stderr_tail.decode("utf-8", errors="replace")
        truncated = child.frames.truncated
        self._close_channel(child)
        self._children.discard(child)
        self._guardian.tell(f"-{child.process.pid}")
        exited = ChildExited(code, tail, truncated, child.killed_because)
        task, child.task = child.task, None
        if task is not None and not child.unwanted and not self._closing:
            # No line of the body has run, so the task's listener is not called.
            tell(task.standby_listener, exited)
            self._start_over(task)
            return
        tell(child.listener, exited)

    def _close_pidfd(self, child: LaunchedChild) -> None:
        if child.pidfd is not None:
            unwatch(self._selector, child.pidfd)
            os.close(child.pidfd)
            child.pidfd = None

    def _close_channel(self, child: LaunchedChild) -> None:
        if child.channel is not None:
            unwatch(self._selector, child.channel)
            child.channel.close()
            child.channel = None
            child.drop_files()


def _name_limit(error: BaseException) -> CapacityError | None:
    """Return an error that names the reached limit; `None`: no limit was reached."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EAGAIN:
        limit = describe_process_limit()
    elif number == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = f"the limit of open files of this process (ulimit -n) is {soft}"
    elif number == errno.ENFILE:
        limit = "the limit of open files of this machine (sysctl fs.file-max) is reached"
    else:
        return None
    named = CapacityError(
        f"the process of a GPU task could not be started ({error}); {limit}; raise the limit or run "
        f"fewer tasks at a time"
    )
    named.__cause__ = error
    return named


def process_launcher() -> ProcessLauncher:
    """Return the only launcher of this Python process; a fork has a launcher of its own."""
    return PROCESS_RESOURCES.get(ProcessLauncher, _make)


def _make() -> ProcessLauncher:
    launcher = ProcessLauncher()
    atexit.register(launcher.close)
    return launcher
