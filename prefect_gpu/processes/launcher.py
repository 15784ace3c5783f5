"""The launcher of this machine: one thread that starts children and carries their messages.

All children are started from one long-lived thread, each as a fresh interpreter by exec, in a
session of its own. The same thread reads and writes their channels and standard streams without ever
blocking on one of them, and sees them end. Which child to start, and what its messages mean, is
decided elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import guardian, messages
from prefect_gpu.processes.messages import HEADER, FrameReader
from prefect_gpu.processes.output import OutputForwarder, StreamName, decoder
from prefect_gpu.processes.spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    Listener,
    ValueArrived,
)

#: Bytes of standard error kept for the message about a death.
STDERR_TAIL_BYTES = 64 * 1024

#: Seconds that a child may take to end once its value has arrived. Tearing down a CUDA context
#: takes up to half a second; a thread that hangs at exit takes for ever.
EXIT_GRACE_S = 5.0

#: Seconds that a child may live after it has closed its channel without a value.
SILENT_GRACE_S = 1.0

#: Seconds between two looks for ended children where the system has no `pidfd_open` (macOS).
POLL_S = 0.05

_READ_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class _Child:
    """One child, as the launcher's thread knows it."""

    def __init__(self, spec: LaunchSpec, listener: Listener) -> None:
        self.spec = spec
        self.listener = listener
        self.token = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None
        self.pidfd: int | None = None
        self.streams: dict[StreamName, IO[bytes]] = {}
        self.decoders = {name: decoder() for name in ("stdout", "stderr")}
        self.outgoing: deque[memoryview] = deque()
        self.frames = FrameReader()
        self.stderr_tail = bytearray()
        self.value_arrived = False
        self.killed = False
        #: Monotonic seconds at which it is killed if it still lives.
        self.deadline: float | None = None


class _Handle:
    """A `ChildHandle`: passes what is asked on to the launcher's thread."""

    def __init__(self, launcher: ProcessLauncher, child: _Child) -> None:
        self._launcher = launcher
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
    """Starts children on this machine. Its thread starts with the first child and stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._children: set[_Child] = set()
        self._guardian: subprocess.Popen[bytes] | None = None
        self.output = OutputForwarder(on_room=self._wake)
        self._held_back: set[_Child] = set()
        os.register_at_fork(after_in_child=self._forget)

    # Any thread.

    def start(self, spec: LaunchSpec, listener: Listener) -> _Handle:
        """Start a child; `listener` hears `ChildStarted` or `ChildRefused` first."""
        child = _Child(spec, listener)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="prefect-gpu-launcher", daemon=True
                )
                self._thread.start()
        self.call(lambda: self._launch(child))
        return _Handle(self, child)

    def call(self, command: Callable[[], None]) -> None:
        """Have the launcher's thread do something soon."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"!")
        except (BlockingIOError, OSError):
            # Full: it is going to wake anyway. Closed: it is gone.
            return

    def _forget(self) -> None:
        """After a fork of the parent: the copy must not hold the guardian's pipe open."""
        guard = self._guardian
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()

    # The launcher's thread.

    def _run(self) -> None:
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakes)
        while True:
            try:
                self._turn()
            except Exception:
                # One child's trouble must not take the others' channels with it.
                logger.exception("the launcher of GPU tasks met an error; it goes on")

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._patience()):
            key.data(mask)
        while self._commands:
            self._commands.popleft()()
        if self._held_back and not self.output.full:
            for child in tuple(self._held_back):
                self._watch_streams(child)
            self._held_back.clear()
        self._look_at_clock()

    def _patience(self) -> float | None:
        waits = [c.deadline - time.monotonic() for c in self._children if c.deadline is not None]
        if any(c.pidfd is None for c in self._children):
            waits.append(POLL_S)
        if self._held_back:
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
                self.kill_child(child)
            if child.pidfd is None and child.process is not None:
                if _has_ended(child.process.pid):
                    self._finish(child)

    def _launch(self, child: _Child) -> None:
        try:
            self._guard()
            self._spawn(child)
        except Exception as error:
            child.listener(ChildRefused(error))
            return
        assert child.process is not None
        self._children.add(child)
        child.listener(ChildStarted(child.process.pid))

    def _guard(self) -> None:
        """Start the guardian, or start it again if somebody killed it."""
        if self._guardian is not None and self._guardian.poll() is None:
            return
        environment = {k: v for k, v in os.environ.items() if k != guardian.TOKEN_VARIABLE}
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        for child in self._children:
            if child.process is not None:
                self._tell_guardian(f"+{child.process.pid} {child.token}")

    def _tell_guardian(self, line: str) -> None:
        guard = self._guardian
        assert guard is not None and guard.stdin is not None
        try:
            guard.stdin.write(line.encode() + b"\n")
            guard.stdin.flush()
        except (BrokenPipeError, ValueError):
            # It was killed; the next launch starts another and tells it all.
            return

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        ours, theirs = socket.socketpair()
        try:
            environment = dict(os.environ)
            for name, value in spec.environment.items():
                if value is None:
                    environment.pop(name, None)
                else:
                    environment[name] = value
            outer = environment.get(guardian.TOKEN_VARIABLE)
            environment[guardian.TOKEN_VARIABLE] = (
                f"{outer}/{child.token}" if outer else child.token
            )
            child.process = subprocess.Popen(
                [
                    sys.executable,
                    *interpreter_flags(),
                    str(Path(__file__).with_name("bootstrap.py")),
                    str(theirs.fileno()),
                    spec.task_name,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
                cwd=spec.cwd or None,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        # Told before the child hears anything: it does nothing until then, and ends by itself if
        # its channel closes first.
        self._tell_guardian(f"+{child.process.pid} {child.token}")
        ours.setblocking(False)
        child.channel = ours
        try:
            child.pidfd = os.pidfd_open(child.process.pid)
        except (AttributeError, OSError):
            child.pidfd = None
        else:
            self._selector.register(
                child.pidfd, selectors.EVENT_READ, lambda mask: self._finish(child)
            )
        assert child.process.stdout is not None and child.process.stderr is not None
        child.streams = {"stdout": child.process.stdout, "stderr": child.process.stderr}
        for stream in child.streams.values():
            os.set_blocking(stream.fileno(), False)
        self._watch_streams(child)
        boot = json.dumps({"sys_path": spec.sys_path, "argv": spec.argv}).encode()
        child.outgoing.append(memoryview(HEADER.pack(messages.BOOT, len(boot)) + boot))
        child.outgoing.append(memoryview(messages.encode(spec.prepare)))
        call = memoryview(spec.call)
        child.outgoing.append(memoryview(messages.value_header(len(call))))
        child.outgoing.append(call)
        self._watch_channel(child)

    def _watch_channel(self, child: _Child) -> None:
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

    def _watch_streams(self, child: _Child) -> None:
        for name, stream in child.streams.items():
            if stream.fileno() not in self._selector.get_map():
                self._selector.register(
                    stream,
                    selectors.EVENT_READ,
                    lambda mask, name=name: self._read_stream(child, name),
                )

    def send(self, child: _Child, data: memoryview) -> None:
        """Send bytes to a child; dropped if it is gone. The launcher's thread only."""
        if child.channel is not None:
            child.outgoing.append(data)
            self._watch_channel(child)

    def _write(self, child: _Child) -> None:
        assert child.channel is not None
        try:
            while child.outgoing:
                head = child.outgoing[0]
                sent = child.channel.send(head) if len(head) else 0
                if sent == len(head):
                    child.outgoing.popleft()
                else:
                    child.outgoing[0] = head[sent:]
        except BlockingIOError:
            return
        except OSError:
            # It is dying; that it died is seen where its end is.
            child.outgoing.clear()
        self._watch_channel(child)

    def _read(self, child: _Child) -> bool:
        """Read what a child sent; `False`: nothing more can come."""
        if child.channel is None:
            return False
        try:
            data = child.channel.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_channel(child)
            if not child.value_arrived and child.deadline is None:
                child.deadline = time.monotonic() + SILENT_GRACE_S
            return False
        try:
            for kind, body in child.frames.feed(data):
                if kind == messages.VALUE:
                    child.value_arrived = True
                    child.deadline = time.monotonic() + EXIT_GRACE_S
                    child.listener(ValueArrived(body))
                else:
                    child.listener(messages.decode(body))
        except ProtocolError as error:
            child.listener(ChildRefused(error))
            self._close_channel(child)
            self.kill_child(child)
            return False
        return True

    def _read_stream(self, child: _Child, name: StreamName, last: bool = False) -> bool:
        """Read what a child printed; `False`: nothing more can come now."""
        stream = child.streams.get(name)
        if stream is None:
            return False
        # What a pipe still holds at the end (64 KiB) is taken in any case.
        if self.output.full and not last:
            self._hold_back(child)
            return False
        try:
            data = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.output.offer(name, child.decoders[name].decode(data, final=not data))
        if not data:
            self._unwatch(stream)
            stream.close()
            del child.streams[name]
            return False
        if name == "stderr":
            child.stderr_tail += data
            del child.stderr_tail[:-STDERR_TAIL_BYTES]
        return True

    def _hold_back(self, child: _Child) -> None:
        for stream in child.streams.values():
            self._unwatch(stream)
        self._held_back.add(child)

    def signal_child(self, child: _Child, signum: int) -> None:
        """Send a signal to a child's group, if it lives. The launcher's thread only."""
        if child in self._children and child.process is not None:
            try:
                os.killpg(child.process.pid, signum)
            except (ProcessLookupError, PermissionError):
                return

    def kill_child(self, child: _Child) -> None:
        """Kill a child and all that it started. The launcher's thread only."""
        if child not in self._children or child.process is None:
            return
        child.killed = True
        guardian.kill_group(child.process.pid)
        self._kill_strays(child)

    def _kill_strays(self, child: _Child) -> None:
        for pid in guardian.pids_with_token(child.token):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def _finish(self, child: _Child) -> None:
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
            self._kill_strays(child)
        while self._read(child):
            pass
        for name in tuple(child.streams):
            while self._read_stream(child, name, last=True):
                pass
        self._held_back.discard(child)
        for stream in child.streams.values():
            self._unwatch(stream)
            stream.close()
        child.streams.clear()
        truncated = child.frames.truncated
        self._close_channel(child)
        self._children.discard(child)
        self._tell_guardian(f"-{child.process.pid}")
        tail = child.stderr_tail.decode("utf-8", errors="replace")
        child.listener(ChildExited(code, tail, truncated))

    def _close_channel(self, child: _Child) -> None:
        if child.channel is not None:
            self._unwatch(child.channel)
            child.channel.close()
            child.channel = None
            child.outgoing.clear()

    def _unwatch(self, file: Any) -> None:
        try:
            self._selector.unregister(file)
        except (KeyError, ValueError):
            return


def interpreter_flags() -> list[str]:
    """Give the flags that this interpreter was started with (`-W`, `-X`, `-O`, …)."""
    # The function that multiprocessing uses for its own spawned children; there is no public one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def _has_ended(pid: int) -> bool:
    """Tell whether a child of ours has ended, without reaping it."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return result is not None


_lock = threading.Lock()
_launcher: tuple[int, ProcessLauncher] | None = None


def process_launcher() -> ProcessLauncher:
    """Give the one launcher of this Python process; a fork of it gets its own."""
    global _launcher
    with _lock:
        if _launcher is None or _launcher[0] != os.getpid():
            _launcher = os.getpid(), ProcessLauncher()
        return _launcher[1]
