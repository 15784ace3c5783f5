"""Markdown for a terminal, with tables that wrap long names instead of cutting them."""

from __future__ import annotations

from typing import ClassVar

from rich.console import JustifyMethod
from rich.markdown import Markdown, MarkdownElement, TableDataElement


class _Cell(TableDataElement):
    """A cell that wraps words that are too long for its column."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class TerminalMarkdown(Markdown):
    """Markdown with tables of such cells."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "td_open": _Cell}
