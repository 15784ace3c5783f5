"""Pieces of GitHub markdown that a user's text cannot break: escaped words, tables, pictures.

It knows nothing of reports: what is said is in `markdown`, `advice` and `next_tags`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from prefect_gpu.reports.canvas import clean

#: Characters of a name that are shown.
NAME_LIMIT = 80

#: What has a meaning in the middle of a line; a user's text never starts one.
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")
#: GitHub's markdown makes a link of these wherever they stand.
_AUTOLINK = re.compile(r"(?i)(https?|ftp)://|www\.|@")


def escape(text: str, limit: int = NAME_LIMIT) -> str:
    """Make a user's text safe inside a paragraph or a table cell: one line, no markup, no links."""
    line = clean(text)
    if len(line) > limit:
        line = line[: limit - 1] + "…"
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    # A zero-width joint keeps an address from turning into a link.
    return _AUTOLINK.sub(lambda match: match[0][:-1] + "&#8203;" + match[0][-1], line)


def image(alt: str, svg: str) -> str:
    """Write a chart as a markdown image that carries its own data.

    Both of Prefect's UIs strip inline `<svg>`, `style` and `class`, but show an image given as a
    `data:` URI (Prefect 3.8.8).
    """
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f"![{escape(alt)}](data:image/svg+xml;base64,{data})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Write a table.

    Args:
        heads: One for each column.
        rows: Cells, escaped where they hold a user's text.
        right: Columns of numbers.
    """
    aligned = ["--:" if column in right else "---" for column in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, aligned, *rows))
