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

# `collections.abc` is loaded by `os` already; `-S` leaves `typing` out.
from collections.abc import Collection, Mapping

#: Variable that marks all processes of one child: its value is a path of tokens, outermost first.
TOKEN_VARIABLE = "PREFECT_GPU_CHILD"

#: Looks for processes that carry a token, each finding new ones, before it is left at that.
_MOST_LOOKS = 20


def pids_with_tokens(tokens: Collection[str]) -> list[int]:
    """Find processes whose environment carries one of `tokens`, anywhere in its path of tokens.

    Reads `/proc`; where there is none (macOS) it finds nothing.
    """
    wanted = {token.encode() for token in tokens}
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
                if wanted.intersection(variable[len(prefix) :].split(b"/")):
                    found.append(int(name))
                break
    return found


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads; it may be gone already."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def kill_strays(tokens: Collection[str]) -> None:
    """Kill whatever carries one of `tokens` in its environment, in whatever session it is.

    Looks again until it finds nothing new, since a process may start another while it is being
    found. What cleared its environment *and* left its group is not found.
    """
    killed: set[int] = set()
    for _ in range(_MOST_LOOKS):
        found = set(pids_with_tokens(tokens)) - killed
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        killed |= found


def kill_all(children: Mapping[int, str]) -> None:
    """Kill the groups of `children` (process id to token), then what else carries their tokens."""
    for pid in children:
        kill_group(pid)
    if children:
        kill_strays(children.values())


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
                try:
                    obey(line.decode(), children)
                except (ValueError, IndexError):
                    # Whatever it is, it must not end the one who ends the others.
                    continue
    kill_all(children)


def obey(line: str, children: dict[int, str]) -> None:
    """Take one line: `+PID TOKEN` or `-PID`.

    Raises:
        ValueError: It is none.
        IndexError: It is none.
    """
    words = line.split()
    pid = int(words[0])
    # The group of process 1 or 0 is never a child's.
    if abs(pid) <= 1:
        raise ValueError(line)
    if words[0].startswith("-"):
        children.pop(-pid, None)
    else:
        children[pid] = words[1]


if __name__ == "__main__":
    main()
    sys.exit(0)
