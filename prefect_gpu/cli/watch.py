"""Show a text repeatedly in the same place of a terminal, until Ctrl-C."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text


def repeat(show: Callable[[], str], interval_s: float) -> None:
    """Print a text every few seconds; without a terminal, one text below the other.

    Args:
        show: Returns the text.
        interval_s: Seconds between two calls.
    """
    console, pause = Console(), threading.Event()
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            while True:
                print(show(), flush=True)
                pause.wait(interval_s)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                # Long lines are cut, as by `nvidia-smi` and `top`.
                live.update(Text(show(), no_wrap=True, overflow="ellipsis"), refresh=True)
                pause.wait(interval_s)
