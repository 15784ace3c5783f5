"""How many engine threads may be between their start and their body at a time.

Before it calls a body, Prefect's engine asks the API for a slot of each of the task's tags. A thousand
mapped tasks would ask at once, which a server on SQLite answers with errors until the engine gives
up (seen: Prefect 3.8.8, 1,000 tagged tasks). It does not bound how many tasks run or wait for a
device: that is the broker's.
"""

from __future__ import annotations

import threading

#: Threads in that stage at a time. With 16, 1,000 tagged tasks all started on a server with SQLite
#: (`docs/evidence/scale-1000-sync.txt`); other numbers were not tried.
STARTS = 16

#: Seconds after which a thread goes on without a place. Those that hold one may be waiting for an
#: upstream task, which must not wait for them: the gate slows a crowd down, it never stops anybody.
PATIENCE_S = 10.0


class StartGate:
    """Lets a few through at a time. For all engine threads of a runner."""

    def __init__(self, starts: int = STARTS, patience_s: float = PATIENCE_S) -> None:
        self._places = threading.Semaphore(starts)
        self._patience_s = patience_s

    def enter(self) -> Passage:
        """Wait for a place, or until patience ends."""
        return Passage(self._places if self._places.acquire(timeout=self._patience_s) else None)


class Passage:
    """A place at the gate, or none; given back once however often `leave` is called."""

    def __init__(self, places: threading.Semaphore | None) -> None:
        self._places = places
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Make room for the next."""
        with self._lock:
            places, self._places = self._places, None
        if places is not None:
            places.release()
