"""Markdown in a terminal whose tables wrap long names in place of cutting them."""

from __future__ import annotations

from typing import ClassVar

from rich.console import JustifyMethod
from rich.markdown import Markdown, MarkdownElement, TableDataElement


class _Cell(TableDataElement):
    """A cell that wraps a word which is too long for its column."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class TerminalMarkdown(Markdown):
    """See the module."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "td_open": _Cell}
