"""Execution of steps in order, although some steps are slow.

One thread passes on the messages of all children. A large value takes seconds to move, so another thread moves it, and
only later messages of the same child wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from prefect_gpu.errors import CapacityError
from prefect_gpu.process_resources import start_thread

logger = logging.getLogger(__name__)


class InOrder:
    """Runs steps one after the other, in the order in which threads pass them to `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Steps that wait behind a slow step; `None`: no slow step is running.
        self._waiting: deque[Callable[[], object]] | None = None

    def take(self, step: Callable[[], object], slow: bool = False) -> None:
        """Run a step at once, or after waiting steps; log its exceptions. A `slow` step runs on a thread of its own."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(step)
                return
            if slow:
                self._waiting = deque([step])
        if not slow:
            _try(step)
            return
        try:
            start_thread(self._run, "prefect-gpu-value")
        except CapacityError:
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._waiting = None
                    return
                step = self._waiting.popleft()
            _try(step)


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:
        logger.exception("a message of a GPU task's process could not be passed on")
