"""A warm process that is forked for tasks: whether that is safe, its loop, and the first steps of a fork.

The process has imported what its tasks need, has touched no device and runs no thread of Python's, so that a fork equals
a fresh interpreter after the same imports. `processes.forks` has the parent's side.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from prefect_gpu.child import bootstrap, warm_up
from prefect_gpu.child import exit as process_exit
from prefect_gpu.child.random_seeds import RandomSeeds
from prefect_gpu.processes.guardian import TOKEN_VARIABLE
from prefect_gpu.processes.messages import Late

#: Libraries whose native threads after an import were shown to serve forks: each starts its threads again in a fork
#: (OpenBLAS, jemalloc). See docs/start.md for the tests.
WITH_THREADS = frozenset({"numpy", "scipy", "torch", "sklearn"})

#: Seconds after which a fork that computes in OpenMP's threads counts as hung.
REHEARSAL_S = 5


class Source:
    """This warm process as the source of forks. Made before its imports, which it watches."""

    def __init__(self, control: socket.socket) -> None:
        #: The parent requests forks on it.
        self._control = control
        self._parent = os.getppid()
        #: Variables before the imports.
        self._environment = dict(os.environ)
        #: Files that libraries have opened.
        self._opened: list[weakref.ref[Any]] = []
        self._seeds = RandomSeeds()
        #: Handler of SIGCHLD after the imports.
        self._of_flow: Any = signal.SIG_DFL
        #: The first import that started native threads of a library outside `WITH_THREADS`; empty: no import did.
        self._threading = ""
        self._threads, self._roots = _threads_and_roots()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the imports in the `with` block, and write the files that they opened."""
        with self._seeds.watched():
            yield
        # Otherwise each fork would write the buffered output as well.
        self._opened = process_exit.write_open_files()
        process_exit.flush_streams()
        # The flow may ignore it, and then nobody could wait for a fork.
        self._of_flow = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def look(self, entry: str) -> None:
        """Look at threads and generators of random numbers after the import of `entry`."""
        threads, roots = _threads_and_roots()
        if threads > self._threads and WITH_THREADS.isdisjoint(roots - self._roots):
            self._threading = self._threading or entry
        self._threads, self._roots = threads, roots
        self._seeds.look()

    def find_problem(self) -> str:
        """Return the reason why this process must not be forked, as text; empty: forks of the process are safe.

        The reasons of `warm_up.find_started` are not looked for.
        """
        names = [thread.name for thread in threading.enumerate()]
        if len(names) > 1:
            return f"its libraries have started threads ({', '.join(names[1:])})"
        if self._threading:
            return f"{self._threading} has started threads that are not known to serve a fork"
        if not _has_usable_openmp():
            return (
                "a fork of it cannot compute in OpenMP's threads, in which a library has computed"
            )
        return ""

    def serve(self, channel: int) -> int:
        """Fork for each request of the parent; return the descriptor of the fork's own channel, in the fork.

        A request carries four descriptors, as `_begin` takes them. This process writes text to the socket `reply`: the
        fork's exit code when the fork has ended, or the reason why the system refused to fork. It ends when the parent
        closes `channel`, or has closed the control socket and no fork is left.
        """
        #: Process id and `reply` descriptor of each living fork, by its pidfd.
        forks: dict[int, tuple[int, int]] = {}
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(channel, select.POLLIN)
        retired = False
        while forks or not retired:
            for ready, _ in poll.poll():
                if ready == channel:
                    os._exit(0)
                if ready in forks:
                    pid, reply = forks.pop(ready)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _reply(reply, str(code))
                    poll.unregister(ready)
                    _close((ready, reply))
                    continue
                request, received, _, _ = socket.recv_fds(
                    self._control, 1, 4, socket.MSG_CMSG_CLOEXEC
                )
                if not request:
                    poll.unregister(self._control)
                    retired = True
                    continue
                if len(received) < 4:
                    # This process has no descriptor left. The parent sees its end of the reply socket close.
                    _close(received)
                    continue
                own, stdout, stderr, reply = received
                try:
                    pid = _fork()
                except OSError as error:
                    _reply(reply, str(error))
                    _close(received)
                    continue
                if pid == 0:
                    signal.signal(signal.SIGCHLD, self._of_flow)
                    self._control.close()
                    for pidfd, (_, other) in forks.items():
                        _close((pidfd, other))
                    self._begin(own, stdout, stderr, reply)
                    return own
                _close((own, stdout, stderr))
                pidfd = os.pidfd_open(pid)
                forks[pidfd] = pid, reply
                poll.register(pidfd, select.POLLIN)
        # Libraries may have made files at their import, which they remove in their exit functions.
        process_exit.run_exit_functions()
        return self.end()

    def end(self) -> NoReturn:
        """End this source, or fork, after its exit functions."""
        process_exit.end_unfinalised(self._opened)

    def _begin(self, channel: int, stdout: int, stderr: int, reply: int) -> None:
        """Make this new fork the process of a task, up to the task's `Prepare`. All arguments are descriptors.

        `channel` leads to the parent. `stdout` and `stderr` become the standard streams. The parent waits at the other
        end of the socket `reply` for this process's id and pidfd.
        """
        os.setsid()
        with socket.socket(fileno=reply) as answer:
            # A pidfd, since the warm process reaps this one. Sent after `setsid`: the parent kills by session.
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(answer, [str(os.getpid()).encode()], [pidfd])
            os.close(pidfd)
        for number, descriptor in ((1, stdout), (2, stderr)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._seeds.renew()
        _keep_shared_files()
        boot = bootstrap.read_boot(channel)
        environment: dict[str, str] = boot["environment"]
        _show_token(environment[TOKEN_VARIABLE])
        # Other variables stay: a library may have set them at its import.
        changed = dict(environment.items() ^ self._environment.items())
        changes = {name: environment.get(name) for name in changed}
        late = Late(changes, boot["cwd"], tuple(boot["argv"]), tuple(boot["sys_path"]))
        warm_up.become_task_process(late, self._parent)
        # Folders and archives may have changed since the imports.
        importlib.invalidate_caches()


def _threads_and_roots() -> tuple[int, set[str]]:
    """Return the number of native threads that are not Python's, and the top names of the modules."""
    threads = len(os.listdir("/proc/self/task")) - threading.active_count()
    return threads, {name.partition(".")[0] for name in tuple(sys.modules)}


def _has_usable_openmp() -> bool:
    """Return whether a fork can compute in the threads of GNU's OpenMP, by trial.

    It cannot if this process has: the pool of a fork names threads that do not exist there.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        places = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libgomp" in line}
    if not places:
        return True
    try:
        pid = _fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
                signal.alarm(REHEARSAL_S)
                for place in places:
                    # A team of two calls a function without an effect.
                    ctypes.CDLL(place).GOMP_parallel(ctypes.CDLL(None).getpid, None, 2, 0)
                os._exit(0)
            os._exit(1)
        return os.waitpid(pid, 0)[1] == 0
    except OSError:
        # The system refuses to fork.
        return False


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of any native thread; those here serve forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _keep_shared_files() -> None:
    """Take the removal of files from the exit functions of this fork's libraries: other forks need the files."""
    for remove in (shutil.rmtree, os.remove, os.unlink, os.rmdir):
        atexit.unregister(remove)
    # Among them those of `tempfile.TemporaryDirectory`.
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _show_token(new: str) -> None:
    """Write this fork's token over the warm process's in `/proc/PID/environ`, where the guardian looks for it."""
    old = os.environ.get(TOKEN_VARIABLE, "")
    # `/proc` shows the memory in which the kernel put the environment at the start of the program: proc(5), environ.
    if not old or len(old) != len(new):
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
        # Fields 50 and 51 of proc(5), of which the third is the first after the name.
        start, end = int(fields[47]), int(fields[48])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            at = memory.read(end - start).find(f"{TOKEN_VARIABLE}={old}".encode())
            if at >= 0:
                memory.seek(start + at + len(TOKEN_VARIABLE) + 1)
                memory.write(new.encode())


def _reply(reply: int, text: str) -> None:
    # The parent may have closed its end.
    with contextlib.suppress(OSError):
        os.write(reply, text.encode())


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
