"""Ctrl-C, as a terminal sends it to this process."""

from __future__ import annotations

import signal
import threading


def press_ctrl_c() -> None:
    """Interrupt the main thread, from any thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
