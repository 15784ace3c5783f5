"""The parent's end of the guardian: its process, and the pipe to it.

What the guardian does is in `guardian`, which runs alone; which children it is told of, in
`launcher`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from prefect_gpu.processes import guardian
from prefect_gpu.processes.interpreter import open_pidfd


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
