"""The guardian: a small process that kills every child process when the parent is gone.

The parent starts the guardian and registers each child with it (`Guardian`). The guardian runs this file as a script
with `-I -S` and the standard library only, so that it starts fast and stays small. It reads lines `+PID TOKEN` and
`-PID` from standard input. Only the parent holds the other end of that pipe, so a closed pipe means a dead parent. The
guardian then kills the process group of every registered child, and the processes that these children started
elsewhere (`find_strays`).

`PR_SET_PDEATHSIG` is no substitute: it fires when the *thread* that started the child ends, and does not reach
grandchildren. `launcher` decides which children exist.
"""

from __future__ import annotations

import os
import signal
import sys
import time

# `collections.abc` is loaded by `os` already; `-S` leaves `typing` out.
from collections.abc import Callable, Iterable, Mapping

# Type checkers take this name for `typing.TYPE_CHECKING`, which would import `typing`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import selectors
    import subprocess

#: Variable that marks all processes of one child. Its value is a path of tokens, outermost first.
TOKEN_VARIABLE = "PREFECT_GPU_CHILD"

#: Option of `prctl`: the signal at the parent's end (`linux/prctl.h`).
_PR_SET_PDEATHSIG = 1

#: Most searches for processes to kill; each follows a search that found new processes.
_MOST_SEARCHES = 20

#: Least seconds between two starts of a guardian: a guardian that cannot start must not be started all the time.
_RESTART_S = 0.5


# Tokens of children, and the processes that carry them.


def with_token(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return an environment that marks a child, and everything that it executes, by its token."""
    environment = dict(environment)
    outer = environment.get(TOKEN_VARIABLE)
    environment[TOKEN_VARIABLE] = f"{outer}/{token}" if outer else token
    return environment


def find_strays(children: Mapping[int, str]) -> list[int]:
    """Return the ids of processes that belong to some children (process id to token).

    A process belongs to a child if it is in the child's session, or if the environment of its last exec has the child's
    token in its path of tokens. (For a fork of the fork server, `/proc` shows the server's environment.) Nothing is
    found without `/proc` (macOS), nor where its process ids differ (`unshare --pid` without a mount of its own).
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
        # It has ended, or belongs to another user.
        return False
    prefix = TOKEN_VARIABLE.encode() + b"="
    for variable in variables:
        if variable.startswith(prefix):
            return not tokens.isdisjoint(variable[len(prefix) :].split(b"/"))
    return False


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads, if it still exists."""
    _kill(os.killpg, pid)


def _kill(function: Callable[[int, int], None], pid: int) -> None:
    try:
        function(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def kill_strays(children: Mapping[int, str]) -> None:
    """Kill every process that belongs to `children` (process id to token), in whatever session."""
    killed: set[int] = set()
    # A process may start another one during a search.
    for _ in range(_MOST_SEARCHES):
        found = set(find_strays(children)) - killed
        if not found:
            return
        for pid in found:
            _kill(os.kill, pid)
        killed |= found


def kill_all(children: Mapping[int, str]) -> None:
    """Kill the groups of `children` (process id to token), then all their other processes."""
    for pid in children:
        kill_group(pid)
    if children:
        kill_strays(children)


# The guardian's own process.


def main() -> None:
    """Read lines from standard input until it closes, then kill the children that are left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    continue_at_parents_end()
    children: dict[int, str] = {}
    # Unbuffered: a line takes effect when it is written, and end of file at once.
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
    """Make the kernel continue this process, if it is stopped, when the parent ends (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes

    # The signal also comes when only the thread that started this process ends: SIGCONT has no effect then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def obey(line: str, children: dict[int, str]) -> None:
    """Add a child (`+PID TOKEN`) or remove it (`-PID`); raise `ValueError` or `IndexError` for a malformed line."""
    words = line.split()
    pid = int(words[0])
    # The group of process 1 or 0 is never a child's.
    if abs(pid) <= 1:
        raise ValueError(line)
    if words[0].startswith("-"):
        children.pop(-pid, None)
    else:
        children[pid] = words[1]


# The parent's side.


class Guardian:
    """The one guardian of all children of a launcher. For the launcher's thread only, except `forget`.

    `children` yields the process id and the token of every living child.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        children: Callable[[], Iterable[tuple[int, str]]],
    ) -> None:
        self._selector = selector
        self._children = children
        #: `None`: there was no child yet, or the guardian has ended and has no replacement yet.
        self.process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        #: Monotonic seconds at which `replace` is to be called; `None`: no replacement is due.
        self.due_s: float | None = None

    def ensure(self) -> None:
        """Start the guardian if it does not run, and register all living children; raise `OSError` if that fails."""
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
            # Without an outer child's token, by which an outer guardian would kill this process before its children.
            env={k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE},
            cwd="/",
        )
        assert self.process.stdin is not None
        # The pipe holds 1,000 lines: it fills only if the guardian was stopped.
        os.set_blocking(self.process.stdin.fileno(), False)
        # A pipe without a reader is reported for any mask of events.
        self._selector.register(
            self.process.stdin, selectors.EVENT_READ, lambda mask: self._replace_later()
        )
        self.due_s = None

    def replace(self) -> None:
        """Start another guardian if a replacement is due and a child lives; raise `OSError` if that fails."""
        if self.due_s is None or time.monotonic() < self.due_s:
            return
        self.due_s = None
        if any(True for _ in self._children()):
            self.ensure()

    def tell(self, line: str) -> None:
        """Send the guardian a line; see `obey`."""
        if self.process is None or self.process.stdin is None:
            return
        try:
            taken = self.process.stdin.write(line.encode() + b"\n")
        except (OSError, ValueError):
            taken = 0
        if not taken:
            self._replace_later()

    def close(self) -> None:
        """End the guardian, but no child. Another guardian may be started afterwards."""
        process, self.process = self.process, None
        if process is not None and process.stdin is not None:
            # A guardian that ended before its first line is not registered.
            if process.stdin in self._selector.get_map():
                self._selector.unregister(process.stdin)
            # A guardian that is only stopped would see its pipe close once it continues, and kill living children.
            process.kill()
            process.wait()
            process.stdin.close()

    def forget(self) -> None:
        """Close the pipe in a fork of the parent, or the guardian would not notice the parent's end."""
        process, self.process = self.process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.returncode = 0

    def _replace_later(self) -> None:
        """Note that the guardian has ended, takes no more lines, or could not be started."""
        self.close()
        self.due_s = max(time.monotonic(), self._started_s + _RESTART_S)


if __name__ == "__main__":
    main()
    sys.exit(0)
