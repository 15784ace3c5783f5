"""The parent's side of a warm process that is forked for tasks; `child.forks` is the other."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import time
from typing import IO

from prefect_gpu.process_resources import read_status
from prefect_gpu.processes.interpreter import SpawnRequest

logger = logging.getLogger(__name__)

#: Seconds in which a warm process must fork, or report the end of a fork; a slower one counts as hung.
ANSWER_S = 10.0

#: Seconds between two checks whether a warm process that does not answer was stopped (SIGSTOP).
LOOK_S = 0.1

#: Exit code of a fork whose warm process had ended or hung when the fork ended: only that process learns the real code.
UNKNOWN_CODE = 255


class ForkSource:
    """A warm process as the source of forks. For the launcher's thread, unless a method says otherwise."""

    def __init__(self) -> None:
        #: Set once the process has started.
        self.pid: int | None = None
        #: Reason why the process does not fork any more; empty: it does.
        self.problem = ""
        # SEQPACKET keeps message boundaries.
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not with the flow's default timeout.
        self._theirs.setblocking(True)

    @property
    def descriptor(self) -> int:
        """Descriptor of the process's end of the control socket, to be inherited."""
        return self._theirs.fileno()

    def started(self, pid: int) -> None:
        """Note that the process has started, and has its end."""
        self.pid = pid
        self._theirs.close()

    def retire(self) -> None:
        """Make the process end once its forks have ended. From any thread."""
        self.problem = self.problem or "it was retired"
        # For a fork of this process, too, which has a copy.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if self.pid is not None:
            # A stopped process (SIGSTOP) would not end. A parent that has changed its user since may not continue it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Close the sockets. From any thread, once the process has ended or was never started; or in a fork."""
        self.problem, self.pid = self.problem or "it has ended", None
        self._control.close()
        self._theirs.close()

    def fork(self, request: SpawnRequest) -> ForkedProcess:
        """Fork a process; a `Spawner`. Raise `OSError` if that fails or the folder does not exist."""
        if request.cwd and not os.path.isdir(request.cwd):
            raise FileNotFoundError(errno.ENOENT, "no such folder", request.cwd)
        if self.problem:
            raise OSError(errno.EPIPE, f"no fork: {self.problem}")
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            streams = []
            sent = [request.channel]
            for _ in ("stdout", "stderr"):
                reading, writing = os.pipe()
                streams.append(ours.enter_context(open(reading, "rb", buffering=0)))
                theirs.callback(os.close, writing)
                sent.append(writing)
            # A socket pair has no name, so that only the fork and the warm process can answer.
            reply, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(reply)
            theirs.enter_context(answering)
            try:
                self._control.settimeout(ANSWER_S)
                socket.send_fds(self._control, [b"!"], [*sent, answering.fileno()])
                theirs.close()
                self._wait_for_answer(reply)
                said, received, _, _ = socket.recv_fds(reply, 512, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                if not self.problem:
                    self._give_up(f"it did not fork ({type(error).__name__}: {error})")
                raise OSError(errno.EPIPE, f"no fork: {error}") from error
            if not received:
                # The system refused to fork or has no descriptor left, and later forks may succeed. Or the process has
                # ended, which the pool learns as well.
                raise OSError(errno.EAGAIN, f"no fork: {said.decode() or 'no answer'}")
            ours.pop_all()
        return ForkedProcess(self, int(said), received[0], reply, *streams)

    def read_exit_code(self, reply: socket.socket) -> int:
        """Return the exit code that the process reports for an ended fork; `UNKNOWN_CODE`: it is silent."""
        try:
            self._wait_for_answer(reply)
            return int(reply.recv(32))
        except TimeoutError:
            self._give_up(f"it did not report an end within {ANSWER_S:g} s")
        except (OSError, ValueError):
            logger.debug("a warm process ended before its fork")
        return UNKNOWN_CODE

    def _wait_for_answer(self, answer: socket.socket) -> None:
        """Wait for an answer, or raise `TimeoutError`. Kill a stopped process, which would block the launcher."""
        poll, deadline = select.poll(), time.monotonic() + ANSWER_S
        poll.register(answer, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * min(left_s, LOOK_S)):
                return
            if self.pid is not None and read_status(self.pid, "State").startswith("T"):
                self._give_up("it was stopped")
        raise TimeoutError

    def _give_up(self, problem: str) -> None:
        logger.debug("a warm process of GPU tasks is given up: %s", problem)
        self.problem = self.problem or problem
        if self.pid is not None:
            # This thread reaps the process, so its id is not another's yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkedProcess:
    """A fork of a warm process, which reaps it; implements `Process`. Its end shows by pidfd, not by process id."""

    def __init__(
        self, source: ForkSource, pid: int, pidfd: int, reply: socket.socket, *streams: IO[bytes]
    ) -> None:
        self._source = source
        self.pid = pid
        self._pidfd, self._reply = pidfd, reply
        self.stdout: IO[bytes] | None
        self.stderr: IO[bytes] | None
        self.stdout, self.stderr = streams
        self.returncode: int | None = None

    def open_pidfd(self) -> int:
        """See `Process.open_pidfd`. To be called once."""
        return self._pidfd

    def poll(self) -> int | None:
        """See `Process.poll`."""
        return self.returncode

    def wait(self) -> int:
        """Return the exit code, as the warm process reports it. To be called after the end of the process."""
        if self.returncode is None:
            with self._reply:
                self.returncode = self._source.read_exit_code(self._reply)
        return self.returncode

    def __del__(self) -> None:
        self._reply.close()
