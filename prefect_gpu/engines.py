"""The threads that Prefect's engine runs in: one for each GPU task, gone when the task is over.

Not a `ThreadPoolExecutor`: that keeps every thread until it is shut down, and a flow that maps two
thousand tasks would keep two thousand threads to its end. How many may run or wait is decided by
others (`start_gate`, `broker`); a bound here would deadlock as soon as waiting tasks fill it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

#: Begins the names of the threads.
NAME = "prefect-gpu-engine"


class EngineThreads:
    """Runs each call in a thread of its own. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._started = 0

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call in a new thread; give what will have its result, or what it raised.

        Raises:
            RuntimeError: `close` was called, or the system has no thread left.
        """
        future: Future[Any] = Future()
        # It can no longer be cancelled by whoever holds it.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RuntimeError("the task runner has ended; it takes no more tasks")
            thread = threading.Thread(
                target=self._run, args=(future, call), name=f"{NAME}_{self._started}"
            )
            thread.start()
            self._started += 1
            self._threads.add(thread)
        return future

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the thread's last frame
                future.set_exception(error)
            else:
                future.set_result(result)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
            # What it raised holds this frame.
            del future, call

    def close(self, wait: bool) -> None:
        """Take no more calls.

        Args:
            wait: Until those that run are over; else they are left behind.
        """
        with self._lock:
            self._closed = True
            threads = tuple(self._threads)
        if wait:
            for thread in threads:
                thread.join()
