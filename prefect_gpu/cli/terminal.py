"""Output for a terminal: markdown with tables that wrap long names, and output that is repeated until Ctrl-C."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import ClassVar

from rich.console import Console, JustifyMethod
from rich.live import Live
from rich.markdown import Markdown, MarkdownElement, TableDataElement
from rich.text import Text


class _Cell(TableDataElement):
    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class TerminalMarkdown(Markdown):
    """Markdown whose table cells wrap words longer than the column. Rich itself cuts such words."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "td_open": _Cell}


def repeat(show: Callable[[], str], interval_s: float) -> None:
    """Print the result of `show` every `interval_s` seconds until Ctrl-C. A terminal shows only the latest result."""
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
