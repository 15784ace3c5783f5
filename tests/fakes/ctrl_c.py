"""Ctrl-C, as a terminal sends it to this process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, FunctionType, MethodType


def press_ctrl_c() -> None:
    """Interrupt the main thread, from any thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def press_ctrl_c_in(function: FunctionType | MethodType | Callable[..., object]) -> None:
    """Interrupt the main thread once it waits inside a function, however long it takes to get there."""

    def press() -> None:
        while not _waits_in(function.__code__):  # type: ignore[union-attr]
            threading.Event().wait(0.001)
        press_ctrl_c()

    threading.Thread(target=press, daemon=True).start()


def _waits_in(code: object) -> bool:
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return False
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
