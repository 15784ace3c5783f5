"""The launcher: one thread that starts child processes on this machine and exchanges messages with them.

The thread starts each child in a new session, reads and writes channels and standard streams without blocking, and
reports when a child has ended. `runner` decides which child to start, and handles the messages.
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
    SOURCE_TITLE,
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

#: Seconds in which a child must end after its value, while libraries shut down. Chosen, not measured.
EXIT_GRACE_S = 5.0

#: Seconds in which a child must end after it closed its channel without a value.
SILENT_GRACE_S = 1.0

#: Seconds between two checks for ended children on systems without `pidfd_open` (macOS).
POLL_S = 0.05

#: Seconds between two checks whether held back output can be read again: the parent's stream may stall.
_HELD_BACK_S = 1.0

#: Most receives from one channel (each at most a socket buffer) before the next channel is read.
_TURN_RECEIVES = 32

#: Requested size of a channel's socket buffer in bytes; the kernel gives less (208 KiB by default).
_SOCKET_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class Handle:
    """A `ChildHandle` whose calls are carried out by the launcher's thread."""

    def __init__(self, launcher: ProcessLauncher, child: LaunchedChild) -> None:
        self._launcher = launcher
        #: Replaced if a standby ends before the body begins. For the launcher's thread only.
        self.child = child

    def give(self, spec: LaunchSpec, late: Late, listener: Listener) -> Handle:
        """Give a task to this standby, once, and return the task's handle, which replaces the standby's.

        If the standby ends before the body begins, a fresh process is started: another `ChildStarted`.
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
    """State of one child, for the launcher's thread: process, channel, streams, deadline."""

    def __init__(
        self, spec: LaunchSpec | WarmSpec, listener: Listener, spawn: Spawner | None = None
    ) -> None:
        #: `None` once the process was started: the call in it may be large.
        self.spec: LaunchSpec | WarmSpec | None = spec
        #: `None`, or after a failure: the launcher's default is used.
        self.spawn = spawn
        self.listener = listener
        #: Task that was given to this standby, until the body has begun.
        self.task: GivenTask | None = None
        self.token = uuid.uuid4().hex
        self.process: Process | None = None
        self.channel: socket.socket | None = None
        self.pidfd: int | None = None
        self.output: ChildOutput | None = None
        #: Bytes to send, with the memory files that are sent with their first byte.
        self.outgoing: deque[tuple[memoryview, tuple[MemoryFile, ...]]] = deque()
        self.frames = FrameReader()
        self.value_arrived = False
        #: The child was killed through its handle.
        self.unwanted = False
        self.killed = False
        self.killed_because = ""
        #: Monotonic seconds at which the child is killed if it is alive, and the reason.
        self.deadline: float | None = None
        self.deadline_reason = ""

    def open(
        self,
        spawn: Spawner,
        title: str,
        environment: Mapping[str, str],
        cwd: str,
        control: int | None,
    ) -> None:
        """Open the channel and start the process. After an exception the caller closes the opened descriptors."""
        while self.process is None:
            self.channel, theirs = socket.socketpair()
            # The flow may have set a default timeout, with which a read would not wait.
            theirs.setblocking(True)
            with theirs:
                for end in (self.channel, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
                request = SpawnRequest(title, theirs.fileno(), environment, cwd, control)
                try:
                    self.process = (self.spawn or spawn)(request)
                except OSError as error:
                    if self.spawn is None:
                        raise
                    logger.debug("a GPU task gets a fresh interpreter: %s", error)
                    self.spawn = None
                    # A process that exists in spite of the error sees its channel close, and ends.
                    self.channel.close()

    def kill_in(self, seconds: float, why: str) -> None:
        """Set the child's deadline, in seconds from now, and the reason to kill the child then."""
        self.deadline, self.deadline_reason = time.monotonic() + seconds, why

    def queue(self, *pieces: memoryview, files: tuple[MemoryFile, ...] = ()) -> None:
        """Add bytes to send, with memory files for the first piece."""
        for piece in pieces:
            if len(piece):
                self.outgoing.append((piece, files))
                files = ()

    def queue_call(self, prepare: bytes, spec: LaunchSpec) -> None:
        """Add a task's encoded `Prepare` and its call to the bytes to send."""
        self.queue(memoryview(prepare))
        self.queue(*spec.call.frame, files=spec.call.files)

    def drop_files(self) -> None:
        """Close memory files that were not sent, or were received with an incomplete frame."""
        self.outgoing.clear()
        # The reader still tells whether the stream ended inside a frame.
        self.frames.drop_files()


@dataclass(frozen=True, slots=True)
class GivenTask:
    """A task that was given to a standby and whose body has not begun."""

    #: For a fresh process, if the standby ends before the body begins.
    spec: LaunchSpec
    listener: Listener
    handle: Handle
    #: Listener of the standby, which gets the standby's `Accepted`, or its end before.
    standby_listener: Listener


class ProcessLauncher:
    """Starts children on this machine. In a fork of the parent, the launcher has no children."""

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
        self.output = OutputForwarder(on_progress=self._wake)

    # Any thread.

    def start(
        self, spec: LaunchSpec | WarmSpec, listener: Listener, spawn: Spawner | None = None
    ) -> Handle:
        """Start a child or a standby; see `Launcher.start`. A standby sends `Warmed` and waits for `Handle.give`.

        `spawn` starts the process; the launcher's default does if `spawn` is `None` or fails. Raise `CapacityError` if
        no thread, or no descriptor for the thread, is left; the next call tries again.
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

    def call(self, command: Callable[[], None]) -> None:
        """Call a function on the launcher's thread, soon, without waiting."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._thread is not None:
            # A full socket: the thread is about to wake anyway. A closed socket: the thread has ended.
            with contextlib.suppress(OSError):
                self._wake_in.send(b"!")

    def _open(self) -> None:
        """Open the resources for the thread. Before the first child, a launcher holds no descriptor."""
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

    def close(self, timeout_s: float = 2.0) -> None:
        """End all children, the guardian and the thread. `start` may be called again afterwards."""
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
        """Close the parent's descriptors in a fork, since open descriptors would hide the parent's end."""
        if self._thread is None:
            self._reset()
            return
        # Nothing is unregistered: the parent shares the kernel's set of watched files.
        for child in self._children:
            if child.channel is not None:
                child.channel.close()
            child.drop_files()
            if child.pidfd is not None:
                os.close(child.pidfd)
            if child.output is not None:
                child.output.close_in_fork()
            if child.process is not None:
                # The process is no child of the fork, which must not wait for it.
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
            # The key refers to a child and so to its task's value, which must be freed before the next event.
            del key
            while self._commands:
                self._attempt(self._commands.popleft())
            self._attempt(self._check_children)
            if self._closing and self._close_down():
                return

    @staticmethod
    def _attempt(step: Callable[..., None], *arguments: Any) -> None:
        """Call a function and log its exceptions, which must not affect other children."""
        try:
            step(*arguments)
        except Exception:
            logger.exception("the launcher of GPU tasks met an error; it goes on")

    def _close_down(self) -> bool:
        """Kill all children, and end the guardian if no child is left; return whether none is left."""
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
        """Check what no descriptor's event shows: deadlines, held back output, and ends of children without a pidfd."""
        try:
            self._guardian.replace()
        except OSError:
            # Tried again later. Children run on without a guardian; a task that cannot start gets the error.
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
        # First, so that `_forget` closes the child's descriptors in a fork.
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
        # Before the process starts: encoding may fail, and no process must be ended then.
        control, warm = None, {}
        if isinstance(spec, LaunchSpec):
            title, environment = spec.task_name, environment_with(spec.environment)
        else:
            control = spec.control
            warm = {"warm": spec.modules, "control": control}
            title = STANDBY_TITLE if control is None else SOURCE_TITLE
            environment = dict(spec.environment)
        environment = with_token(environment, child.token)
        # Environment and folder are for a fork, which does not get them with the start of a program.
        place = {"environment": environment, "cwd": spec.cwd}
        boot = json.dumps({"sys_path": spec.sys_path, "argv": spec.argv, **place, **warm}).encode()
        child.queue(memoryview(transport.frame_header(transport.BOOT, len(boot)) + boot))
        if isinstance(spec, LaunchSpec):
            child.queue_call(messages.encode(spec.prepare), spec)
        child.open(self._spawn_process, title, environment, spec.cwd, control)
        process = child.process
        assert process is not None and child.channel is not None
        # Before the child gets its input: until then it does nothing, and ends when its channel closes.
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
        """End the process of a child whose start has failed, and close its descriptors."""
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
        """See `Handle.give`. For the launcher's thread only."""
        child = handle.child
        task = GivenTask(spec, listener, handle, child.listener)
        if child not in self._children or child.killed or child.process is None:
            self._start_over(task)
            return
        try:
            prepare = messages.encode(replace(spec.prepare, late=late))
        except Exception:
            # `Prepare` cannot be pickled. The start of a fresh process reports the same error.
            self.kill_child(child)
            self._start_over(task)
            return
        child.task, child.listener = task, listener
        tell(child.listener, ChildStarted(child.process.pid))
        child.queue_call(prepare, spec)
        # At once, since the next command may start a process, which takes as long as the rest of this start.
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
        """Send bytes to a child, or drop them if the child has ended. For the launcher's thread only."""
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
        except ConnectionError:
            # The child is about to end, which `_read` or `_finish` handles.
            child.outgoing.clear()
        except (ProtocolError, OSError) as error:
            if isinstance(error, OSError):
                # The system has no memory: the child would wait for the rest for ever.
                error = ProtocolError(f"a process could not be sent its call: {error}")
            self._refuse(child, error, "it could not be sent its call")
            return
        self._watch_channel(child)

    def _read(self, child: LaunchedChild) -> bool:
        """Read a child's messages, at most `_TURN_RECEIVES` pieces; return whether more may be read now."""
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
        """Kill a child with which no messages can be exchanged, and report the error to its listener."""
        link: BaseException | None = error
        while link is not None:
            # A traceback's frames would keep files and their memory alive.
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        if child.task is None:
            # Not for a standby's task before its body begins: a fresh process is started instead.
            tell(child.listener, ChildRefused(error))
        # Before the channel closes, which would make the child end by itself.
        self.kill_child(child, because)
        self._close_channel(child)

    def _take_frame(self, child: LaunchedChild, frame: Frame) -> None:
        if frame.kind == transport.VALUE:
            # Unpacked at once, so that the value's files are always closed.
            value = transport.unpack(frame)
            child.value_arrived = True
            grace_s = self._exit_grace_s
            child.kill_in(grace_s, f"it had not ended {grace_s:g} s after its value")
            tell(child.listener, ValueArrived(value))
            return
        message = messages.decode(frame.body)
        if isinstance(message, (Accepted, Warmed)) and child.task is not None:
            # For the pool of standbys, not for the task.
            tell(child.task.standby_listener, message)
            return
        if isinstance(message, (BodyStarted, BodyEnded)):
            child.task = None
        if not isinstance(message, Accepted):
            tell(child.listener, message)

    def kill_child(self, child: LaunchedChild, because: str = "") -> None:
        """Kill a child and all its processes, on the launcher's thread. Empty `because`: the child's owner decided."""
        if child not in self._children or child.process is None:
            return
        if not because:
            child.unwanted = True
        if not child.killed:
            child.killed_because = because
        child.killed = True
        guardian.kill_all({child.process.pid: child.token})

    def _finish(self, child: LaunchedChild) -> None:
        """Read the last output of an ended child, kill its remaining processes, and report the end."""
        assert child.process is not None
        self._close_pidfd(child)
        # Before `wait`, which frees the id. (Forks and processes without pidfd were reaped: see docs/decisions.md.)
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
            # The body has not begun, so the task's listener gets no `ChildExited`.
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
    """Return an error that names the system's limit behind `error`; `None`: another cause."""
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
    """Return the only launcher of this Python process; a fork has its own."""
    return PROCESS_RESOURCES.get(ProcessLauncher, _make)


def _make() -> ProcessLauncher:
    launcher = ProcessLauncher()
    atexit.register(launcher.close)
    return launcher
