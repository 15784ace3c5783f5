"""The guardian: a small process that kills every child process when the parent has ended.

The parent starts the guardian, and registers and removes children (`Guardian`) by the lines `+PID TOKEN` and `-PID` on
the guardian's standard input. Only the parent has the other end of this pipe. When the pipe closes, the guardian kills
the process group of every registered child, and the children's processes in other groups (`find_strays`). The guardian
runs this file with `-I -S` and the standard library only, so that it starts fast and stays small.
`PR_SET_PDEATHSIG` is no substitute: the signal comes when the *thread* that started the child ends, and does not reach
grandchildren. `launcher` starts the children.
"""

from __future__ import annotations

import os
import signal
import sys
import time

# `os` has loaded `collections.abc` already. Under `-S`, `typing` is not loaded.
from collections.abc import Callable, Iterable, Mapping

# Type checkers take this name for `typing.TYPE_CHECKING`, which would import `typing`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import selectors
    import subprocess

#: Variable that marks all processes of a child by its token; in a child's child, by both tokens: `outer/inner`.
TOKEN_VARIABLE = "PREFECT_GPU_CHILD"

#: Option of `prctl` for the signal at the parent's end (`linux/prctl.h`).
_PR_SET_PDEATHSIG = 1

#: Most searches for processes to kill. A search that finds new processes is followed by another.
_MOST_SEARCHES = 20

#: Least seconds between two starts of a guardian, which may fail to start each time.
_RESTART_S = 0.5


# Tokens of children, and the processes that carry them.


def with_token(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return an environment with a child's token added to `TOKEN_VARIABLE`, which marks all processes of the child."""
    environment = dict(environment)
    outer = environment.get(TOKEN_VARIABLE)
    environment[TOKEN_VARIABLE] = f"{outer}/{token}" if outer else token
    return environment


def find_strays(children: Mapping[int, str]) -> list[int]:
    """Return the ids of all processes that belong to `children` (process id to token), in any process group.

    A process belongs to a child if it is in the child's session, or if the environment of its last exec has the child's
    token in `TOKEN_VARIABLE`. (A fork of a warm process writes its own there.) Nothing is found without `/proc` (macOS), or if `/proc` has other process ids (`unshare --pid` without a mount of `/proc`).
    """
    tokens = {token.encode() for token in children.values()}
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return []
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return [pid for pid in pids if pid != os.getpid() and _belongs(pid, children, tokens)]


def _belongs(pid: int, children: Mapping[int, str], tokens: set[bytes]) -> bool:
    try:
        if os.getsid(pid) in children:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        # The process has ended, or belongs to another user.
        return False
    prefix = TOKEN_VARIABLE.encode() + b"="
    for variable in variables:
        if variable.startswith(prefix):
            return not tokens.isdisjoint(variable[len(prefix) :].split(b"/"))
    return False


def kill_group(pid: int) -> None:
    """Kill the process group with the leader `pid`, if the group still exists."""
    _kill(os.killpg, pid)


def _kill(function: Callable[[int, int], None], pid: int) -> None:
    try:
        function(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def kill_strays(children: Mapping[int, str]) -> None:
    """Kill every process that belongs to `children` (process id to token), as `find_strays` defines it."""
    killed: set[int] = set()
    # A process may start another process during a search.
    for _ in range(_MOST_SEARCHES):
        found = set(find_strays(children)) - killed
        if not found:
            return
        for pid in found:
            _kill(os.kill, pid)
        killed |= found


def kill_all(children: Mapping[int, str]) -> None:
    """Kill the process groups of `children` (process id to token), then all other processes of the children."""
    for pid in children:
        kill_group(pid)
    if children:
        kill_strays(children)


# The guardian's own process.


def main() -> None:
    """Run the guardian: obey lines from standard input until the pipe closes, then kill the registered children."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    continue_at_parents_end()
    children: dict[int, str] = {}
    # Unbuffered, so that a line or the end of the file takes effect at once.
    with open(0, "rb", buffering=0) as pipe:
        rest = b""
        while True:
            data = pipe.read(65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    obey(line.decode(), children)
                except (ValueError, IndexError):
                    # A malformed line must not end the guardian.
                    continue
    kill_all(children)


def continue_at_parents_end() -> None:
    """Make the kernel continue this process (SIGCONT), if it is stopped, when the parent ends (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes

    # The signal also comes when only the parent's thread ends that started this process: without effect.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def obey(line: str, children: dict[int, str]) -> None:
    """Add (`+PID TOKEN`) or remove (`-PID`) a child; raise `ValueError` or `IndexError` for a malformed line."""
    words = line.split()
    pid = int(words[0])
    # Process groups 0 and 1 never belong to a child.
    if abs(pid) <= 1:
        raise ValueError(line)
    if words[0].startswith("-"):
        children.pop(-pid, None)
    else:
        children[pid] = words[1]


# The parent's side.


class Guardian:
    """Starts, replaces and ends the guardian of living `children` (process ids, tokens), on the launcher's thread."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        children: Callable[[], Iterable[tuple[int, str]]],
    ) -> None:
        self._selector = selector
        self._children = children
        #: `None`: no guardian is needed yet, or it has ended and was not replaced yet.
        self.process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        #: Monotonic seconds from which `replace` starts another guardian; `None`: no replacement is due.
        self.due_s: float | None = None

    def ensure(self) -> None:
        """If no guardian runs, start one and register all living children; raise `OSError` if that fails."""
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        self._started_s = time.monotonic()
        try:
            self._start()
        except BaseException:
            self._replace_later()
            raise
        for pid, token in self._children():
            self.tell(f"+{pid} {token}")

    def _start(self) -> None:
        import selectors
        import subprocess

        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            # Without the token of an outer child: an outer guardian would kill this guardian before its children.
            env={k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE},
            cwd="/",
        )
        assert self.process.stdin is not None
        # The pipe holds 1,000 lines and is full only if the guardian was stopped.
        os.set_blocking(self.process.stdin.fileno(), False)
        # The selector reports a pipe without a reader for any mask of events.
        self._selector.register(
            self.process.stdin, selectors.EVENT_READ, lambda mask: self._replace_later()
        )
        self.due_s = None

    def replace(self) -> None:
        """Start another guardian, if a replacement is due and a child is alive; raise `OSError` if that fails."""
        if self.due_s is None or time.monotonic() < self.due_s:
            return
        self.due_s = None
        if any(True for _ in self._children()):
            self.ensure()

    def tell(self, line: str) -> None:
        """Send a line to the guardian; see `obey`."""
        if self.process is None or self.process.stdin is None:
            return
        try:
            taken = self.process.stdin.write(line.encode() + b"\n")
        except (OSError, ValueError):
            taken = 0
        if not taken:
            self._replace_later()

    def close(self) -> None:
        """End the guardian, but not the children. `ensure` may start another guardian later."""
        process, self.process = self.process, None
        if process is not None and process.stdin is not None:
            # Not registered if the guardian ended before its first line.
            if process.stdin in self._selector.get_map():
                self._selector.unregister(process.stdin)
            # Killed first: a stopped guardian that continues later would see the pipe closed, and kill living children.
            process.kill()
            process.wait()
            process.stdin.close()

    def forget(self) -> None:
        """Close the pipe in a fork of the parent, since an open pipe would hide the parent's end."""
        process, self.process = self.process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.returncode = 0

    def _replace_later(self) -> None:
        """End a guardian that reads no more lines or could not be started, and make a replacement due."""
        self.close()
        self.due_s = max(time.monotonic(), self._started_s + _RESTART_S)


if __name__ == "__main__":
    main()
    sys.exit(0)
