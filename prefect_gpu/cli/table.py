"""Plain tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are two spaces apart.

    Args:
        rows: All of one length, the heads first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
