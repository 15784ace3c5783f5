"""NVIDIA's Multi-Process Service (MPS), whose clients compute on a GPU at the same time, not by turns.

One control daemon serves all flows of a user on a machine. The first flow starts it, together with a *keeper*: this file,
run with `-I -S`. Each flow holds a shared lock, for which the keeper waits exclusively: it ends the daemon once the last
flow has ended, in whichever way. A daemon of the user's own is used and left alone.

`client_environment` and `is_fault` are pure. The variables are NVIDIA's (Multi-Process Service, release 580, appendix A).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

# `typing` is not loaded under `-S`.
from collections.abc import Mapping

#: The daemon and its control program; a part of the driver.
CONTROL = "nvidia-cuda-mps-control"

PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"

#: Most memory of a client on each of its devices, and part of the multiprocessors that it may use.
MEMORY, THREADS = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

#: File of the daemon's process id, in the folder of its pipes.
PID_FILE = f"{CONTROL}.pid"

#: Where a daemon is that was started without `PIPES`.
DEFAULT_PIPES = "/tmp/nvidia-mps"

#: A folder without a daemon: a process with it is no client.
NO_PIPES = "/dev/null/no-mps"

#: Seconds in which the daemon must start, answer or end.
ANSWER_S = 10.0

#: Seconds to wait for other flows that start or end the daemon: one that was stopped must not hold this one up.
TURN_S = 30.0

#: The driver's name of a failed assertion. The kernels of other clients may hang for good after it (H200, driver 580), also
#: if its context is destroyed at once.
ASSERTION = "CUDA_ERROR_ASSERT"

#: Parts of the texts of errors after which the server ends all its clients, and of those that a client then gets.
FAULTS = (
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "hardware stack error",
    "invalid program counter",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchFailure",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    # A client that starts while the server ends.
    "cudaErrorDevicesUnavailable",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "cudaErrorMps",
    "CUDA_ERROR_MPS",
    "MPS server",
    "MPS client",
)


class MpsError(Exception):
    """MPS cannot be used; the message says why."""


def client_environment(
    pipes: str, budget_bytes: int | None, compute: float | None
) -> dict[str, str | None]:
    """Return the variables of a client of the daemon with the folder `pipes`.

    `budget_bytes` is the most that it may take of its device, context included (`None`: no limit), and `compute` the
    part of the multiprocessors that it may use (`None`: all).
    """
    limit = None if budget_bytes is None else f"0={budget_bytes >> 20}M"
    threads = None if compute is None else f"{compute * 100:g}"
    return {PIPES: pipes, MEMORY: limit, THREADS: threads}


def outside_environment() -> dict[str, str | None]:
    """Return the variables of a process that is no client of any daemon."""
    return {PIPES: NO_PIPES, MEMORY: None, THREADS: None}


def limit_bytes(environ: Mapping[str, str]) -> int | None:
    """Return the most that a client with these variables may take of its device; `None`: no client, or no limit."""
    limit = environ.get(MEMORY) if is_client(environ) else None
    return int(limit.removeprefix("0=").removesuffix("M")) << 20 if limit else None


def is_client(environ: Mapping[str, str]) -> bool:
    """Return whether a process with these variables, set by the functions above, is a client."""
    return environ.get(PIPES, NO_PIPES) != NO_PIPES


def is_fault(text: str) -> bool:
    """Return whether an error's text names a fault that ends all clients of a server, or its effect on a client."""
    lower = text.lower()
    return any(fault.lower() in lower for fault in FAULTS)


def ask(command: str, pipes: str) -> str | None:
    """Send a command to a daemon; return what it prints, or `None`: there is no daemon, or it does not answer."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=command + "\n",
            env={**os.environ, PIPES: pipes},
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode or "Cannot find" in done.stdout + done.stderr else done.stdout


def end_servers(pipes: str) -> None:
    """Kill the server of a daemon that a flow has started; the daemon starts another for its next client."""
    if not os.path.exists(os.path.join(os.path.dirname(pipes), "keeper")):
        return
    for pid in filter(str.isdigit, (ask("get_server_list", pipes) or "").split()):
        # `ProcessLookupError`: another client of the same server had an assertion, too.
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


class MpsDaemon:
    """The use of a daemon by one flow; `folder` is the user's own, for a daemon that is started here.

    Raises `MpsError` if there is no daemon and none can be started.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        #: Shared lock while the daemon is used; `None`: it is the user's own, or not used any more.
        self._used: int | None = None
        if shutil.which(CONTROL) is None:
            raise MpsError(f"{CONTROL}, a part of NVIDIA's driver, is not found in PATH")
        for pipes in filter(None, (environ.get(PIPES), DEFAULT_PIPES)):
            if _runs_here(pipes):
                #: Folder by which clients find the daemon.
                self.pipes = pipes
                return
        self._folder, self.pipes = folder, os.path.join(folder, "pipe")
        for path in (folder, self.pipes, os.path.join(folder, "log")):
            os.makedirs(path, mode=0o700, exist_ok=True)
        self._used = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # A keeper may be ending the last daemon.
            _lock(self._used, fcntl.LOCK_SH)
            _start(folder, self.pipes)
        except BaseException:
            self.leave()
            raise

    def revive(self) -> None:
        """Start the daemon again if it was killed: without one, PyTorch finds no GPU. Raise `MpsError` if that fails."""
        if not _was_killed(self.pipes):
            return
        if self._used is None:
            raise MpsError(f"the daemon in {self.pipes} has ended")
        _start(self._folder, self.pipes)

    def leave(self) -> None:
        """Stop using the daemon. The keeper ends it if no other flow uses it."""
        used, self._used = self._used, None
        if used is not None:
            os.close(used)


def _runs_here(pipes: str) -> bool:
    """Return whether a daemon that this user may use has its pipes in a folder; raise `MpsError`: another user's has."""
    try:
        owner = os.stat(os.path.join(pipes, "control")).st_uid
    except OSError:
        return False
    if ask("get_server_list", pipes) is not None:
        return True
    if owner != os.getuid():
        raise MpsError(f"the daemon of another user (id {owner}) has the GPUs, in {pipes}")
    return False


def _was_killed(pipes: str) -> bool:
    """Return whether a daemon's process has ended, but has not removed its files."""
    try:
        with open(os.path.join(pipes, PID_FILE), encoding="utf-8") as file:
            os.kill(int(file.read()), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        # It is another user's, or in a container of its own.
        return False
    return False


def _start(folder: str, pipes: str) -> None:
    """Start a daemon and its keeper unless they run; raise `MpsError` if that fails."""
    turn = os.open(os.path.join(folder, "start"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(turn, fcntl.LOCK_EX)
        if ask("get_server_list", pipes) is None:
            _start_daemon(folder, pipes)
        if not _has_keeper(folder):
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
                cwd="/",
            )
    finally:
        os.close(turn)


def _lock(descriptor: int, operation: int) -> None:
    """Lock a file; raise `MpsError` if that takes longer than `TURN_S`."""
    deadline, pause = time.monotonic() + TURN_S, threading.Event()
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                problem = f"another process starts or ends its daemon for more than {TURN_S:g} s"
                raise MpsError(problem) from None
            pause.wait(0.02)


def _environment() -> dict[str, str]:
    """Return this process's environment without what belongs to one flow: its devices, and the task that it runs in."""
    # Imported late: the keeper has no package.
    from prefect_gpu.processes.guardian import TOKEN_VARIABLE

    left_out = ("CUDA_VISIBLE_DEVICES", TOKEN_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _start_daemon(folder: str, pipes: str) -> None:
    logs = os.path.join(folder, "log")
    # A file, since the daemon may keep it open.
    with open(os.path.join(logs, "start"), "w+", encoding="utf-8", errors="replace") as said:
        try:
            code = subprocess.run(
                [CONTROL, "-d"],
                env={**_environment(), PIPES: pipes, LOGS: logs},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd="/",
                timeout=ANSWER_S,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{CONTROL} does not start: {error}") from error
        if ask("get_server_list", pipes) is None:
            said.seek(0)
            why = " ".join(said.read(500).split()) or f"exit code {code}"
            raise MpsError(f"{CONTROL} does not start: {why}")


def _has_keeper(folder: str) -> bool:
    kept = os.open(os.path.join(folder, "keeper"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(kept)
    return False


def keep(folder: str) -> None:
    """End the daemon in `folder` once no flow uses it, in a process of its own, which is nobody's child."""
    if os.fork():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept = os.open(os.path.join(folder, "keeper"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(kept, fcntl.LOCK_EX)
    users = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(users, fcntl.LOCK_EX)
    # Flows that begin now wait, and then start another daemon.
    # Processes of a flow that was killed may still be clients.
    ask("quit -t 3", os.path.join(folder, "pipe"))


if __name__ == "__main__":
    keep(sys.argv[1])
