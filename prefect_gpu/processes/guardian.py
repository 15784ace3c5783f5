"""The guardian: ends every child when the parent is gone, however it went.

A small process of its own (standard library only, no Prefect, started with `-I -S`). It reads lines
`+PID TOKEN` and `-PID` from standard input. When that pipe closes, the parent is dead, for only the
parent holds the other end: the guardian kills the process group of every child that is still
registered, and whatever carries a child's token in its environment (processes that a task started
in sessions of their own).

`PR_SET_PDEATHSIG` would not do: it fires when the *thread* that launched the child ends, so it kills
children of a living parent, and it does not reach grandchildren.
"""

from __future__ import annotations

import os
import signal
import sys
import time

#: Variable that marks all processes of one child: its value is a path of tokens, outermost first.
TOKEN_VARIABLE = "PREFECT_GPU_CHILD"


def pids_with_token(token: str) -> list[int]:
    """Find processes whose environment carries `token`, anywhere in its path of tokens.

    Reads `/proc`; where there is none (macOS) it finds nothing.
    """
    found: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        prefix = TOKEN_VARIABLE.encode() + b"="
        for variable in variables:
            if variable.startswith(prefix):
                if token.encode() in variable[len(prefix) :].split(b"/"):
                    found.append(int(name))
                break
    return found


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads; it may be gone already."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def kill_all(children: dict[int, str]) -> None:
    """Kill the groups of `children` (process id to token), then what else carries their tokens."""
    for pid in children:
        kill_group(pid)
    # Twice more, since a process may start another while it is being found.
    for _ in range(3):
        stray = {pid for token in children.values() for pid in pids_with_token(token)}
        if not stray:
            return
        for pid in stray:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.05)


def main() -> None:
    """Watch the pipe on standard input until it closes, then kill what is left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    children: dict[int, str] = {}
    # Unbuffered: a line must be acted on when it was written, and end of file at once.
    with open(0, "rb", buffering=0) as pipe:
        rest = b""
        while True:
            data = pipe.read(65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                words = line.decode().split()
                if words[0].startswith("+"):
                    children[int(words[0])] = words[1]
                else:
                    children.pop(-int(words[0]), None)
    kill_all(children)


if __name__ == "__main__":
    main()
    sys.exit(0)
