"""The code blocks of the documentation: README, and each page of `docs/`.

A block that cannot run here has a comment on the line before its fence, which the page does not show:
`<!-- not run: REASON -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.integration.programs import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

#: Pictures, tables and formulas: nothing that a reader types.
TEXT = ("", "mermaid", "text")


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        page: Relative to the repository.
        line: Of its first line of code, from 1.
        language: The first word after its fence; `console` for an indented block that begins with `$ `.
        code: Without the fence.
        mark: The text of the comment before it; `None`: there is none.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a console block, and what the block shows that it prints (empty if nothing)."""

    words: tuple[str, ...]
    output: str


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page, in their order."""
    return list(_read(str(page.relative_to(REPOSITORY)), page.read_text(encoding="utf-8")))


def _read(page: str, text: str) -> Iterator[Block]:
    mark = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map
            fenced = token.type == "fence"
            language = (token.info.split() or [""])[0]
            if token.content.startswith("$ "):
                language = "console"
            yield Block(page, token.map[0] + 1 + fenced, language, token.content, mark)
        comment = re.fullmatch(r"\s*<!--(.*)-->\s*", token.content)
        mark = comment[1].strip() if comment and token.type == "html_block" else None


def problem(block: Block) -> str | None:
    """Return what is wrong with a block's mark; `None`: it has none, or a right one."""
    if runs(block) or re.fullmatch(r"not run: .*\w.*", block.mark or ""):
        return None
    return f"{block}: <!-- {block.mark} --> is not <!-- not run: REASON -->"


def runs(block: Block) -> bool:
    """Return whether a block is not marked as one that does not run."""
    return not (block.mark or "").startswith("not run")


def at_their_lines(parts: Sequence[Block], first: str) -> str:
    """Return one program of blocks of a page, each at its lines in the page: errors then name these.

    Args:
        parts: In their order.
        first: A statement for the program's first line.
    """
    lines = [first]
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block: lines after `$ `, or every line if there is no `$ `."""
    code = block.code.replace("\\\n", " ")
    if not code.startswith("$ "):
        code = "".join(f"$ {line}\n" for line in code.splitlines())
    parts = [part.partition("\n") for part in re.split(r"^\$ ", code, flags=re.M)[1:]]
    split = [(shlex.split(line, comments=True), output) for line, _, output in parts]
    return [Command(tuple(words), output) for words, output in split if words]
