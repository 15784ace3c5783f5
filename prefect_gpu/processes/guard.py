"""The parent's end of the guardian: its process, the pipe to it, and that there always is one.

What the guardian does is in `guardian`, which runs alone; which children it is told of, in
`launcher`.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

from prefect_gpu.processes import guardian
from prefect_gpu.processes.interpreter import open_pidfd

#: Seconds that a guardian must have lived to be replaced at once when it ends: one that cannot
#: start must not be started again and again.
_LIVED_S = 1.0


class Guard:
    """The guardian's process and the pipe to it."""

    def __init__(self) -> None:
        # Not the guardian of an outer child: that must be able to end *us*, and leave this one to
        # end our children.
        environment = {k: v for k, v in os.environ.items() if k != guardian.TOKEN_VARIABLE}
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        assert self.process.stdin is not None
        self._pipe = self.process.stdin
        # 1,000 lines fit in the pipe: only one that was stopped lets it fill.
        os.set_blocking(self._pipe.fileno(), False)
        self.pidfd = open_pidfd(self.process.pid)

    def tell(self, line: str) -> bool:
        """Write a line, all or nothing; `False`: it does not hear."""
        try:
            return bool(self._pipe.write(line.encode() + b"\n"))
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """Let go of it; it then ends what it still knows of."""
        self._pipe.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class GuardKeeper:
    """Keeps one guardian that knows every child. On the launcher's thread only, but for `forget`.

    Args:
        selector: Tells when the guardian ends.
        children: Gives the process id and the token of every child that lives.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        children: Callable[[], Iterable[tuple[int, str]]],
    ) -> None:
        self._selector = selector
        self._children = children
        #: `None`: there was no child yet, or it ended and nobody needed another.
        self.guard: Guard | None = None

    def ensure(self) -> None:
        """Start the guardian, or start it again if somebody killed it."""
        if self.guard is not None and self.guard.process.poll() is None:
            return
        self._drop()
        self.guard = guard = Guard()
        if guard.pidfd is not None:
            self._selector.register(guard.pidfd, selectors.EVENT_READ, lambda mask: self._ended())
        for pid, token in self._children():
            self.tell(f"+{pid} {token}")

    def tell(self, line: str) -> None:
        """Tell the guardian of a child, or of its end."""
        if self.guard is not None and not self.guard.tell(line):
            # Killed or stopped; the next launch starts another and tells it all.
            self._drop()

    def close(self) -> None:
        """End it, once no child is left."""
        guard, self.guard = self.guard, None
        if guard is not None:
            self._unwatch(guard)
            guard.close()
            guard.process.wait()

    def forget(self) -> None:
        """In a fork of the parent: hold nothing of it, or it would not see the parent end."""
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.close()
            guard.process.returncode = 0

    def _ended(self) -> None:
        lived_s = time.monotonic() - self.guard.started_s if self.guard is not None else 0.0
        self._drop()
        if lived_s >= _LIVED_S and any(True for _ in self._children()):
            self.ensure()

    def _drop(self) -> None:
        guard, self.guard = self.guard, None
        if guard is not None:
            self._unwatch(guard)
            # It is dead, or deaf: then it must not see its pipe close and act on what it knew.
            guard.process.kill()
            guard.process.wait()
            guard.close()

    def _unwatch(self, guard: Guard) -> None:
        if guard.pidfd is not None:
            try:
                self._selector.unregister(guard.pidfd)
            except (KeyError, ValueError):
                return
