"""GitHub markdown that a user's text cannot break: escaped text, tables, images. `markdown` makes reports of it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence

from prefect_gpu.reports.canvas import clean

#: Most characters of a name in text.
NAME_LIMIT = 80

#: Most characters of a stored name: a task's name is an argument of its process, and part of keys and messages.
NAME_CHARS = 200

#: Table cells without a value.
BLANKS = ("", "–")

#: Characters with a meaning in markdown, without underscores in words: the v1 UI shows backslashes in a link's text.
_SPECIAL = re.compile(r"([\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
#: GitHub's markdown makes links of these texts anywhere.
_AUTOLINK = re.compile(r"(?i)(https?|ftp)://|www\.|@")

#: Names of parameters with secret values, and secret texts: addresses with passwords, values of `Authorization:`.
_SECRET_NAME = re.compile(
    r"(?i)secret|token|pass(w|phrase|code)|_pass$|pwd|credential|cookie|bearer|jwt|auth|dsn$|"
    r"(api|access|private|ssh|signing|encryption)_?key"
)
_SECRET_TEXT = re.compile(r"://[^/\s]*@|(?i:^\s*(bearer|basic)\s)")


def is_secret(name: str, text: str = "") -> bool:
    """Return whether a parameter's value must not be shown, judged by its name and its text."""
    return bool(_SECRET_NAME.search(name) or _SECRET_TEXT.search(text))


def clean_name(name: str) -> str:
    """Return the name of a task, task run or flow as one line of at most `NAME_CHARS` printable characters."""
    line = clean(name[: NAME_CHARS + 1])
    return line if len(name) <= NAME_CHARS else line[: NAME_CHARS - 1] + "…"


def escape(text: str, limit: int = NAME_LIMIT) -> str:
    """Return a user's text as one line for a paragraph or a table cell, with markup and links escaped."""
    line = clean(text)
    if len(line) > limit:
        line = line[: limit - 1] + "…"
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    # A zero-width space keeps an address from becoming a link.
    return _AUTOLINK.sub(lambda match: match[0][:-1] + "&#8203;" + match[0][-1], line)


def image(alt: str, svg: str) -> str:
    """Return an SVG chart as a markdown image that contains the chart as a `data:` URI."""
    # Prefect's UIs remove inline `<svg>`, `style` and `class`, but show an image with a `data:` URI (Prefect 3.8.8).
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f"![{escape(alt)}](data:image/svg+xml;base64,{data})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return a markdown table of escaped cells, without empty columns. `right`: indices of right-aligned columns."""
    rows, columns = list(rows), range(len(heads))
    aligned = ["--:" if column in right else "---" for column in columns]
    kept = [at for at in columns if not rows or any(row[at] not in BLANKS for row in rows)]
    lines = ([cells[at] for at in kept] for cells in (heads, aligned, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def notice(text: str) -> str:
    """Return one line of markdown as a highlighted paragraph. A user's text in the line must be escaped."""
    # Not a block quote: the v2 UI puts quotation marks around it (Prefect 3.8.8).
    return f"⚠️ {text}"


def preformatted(text: str) -> str:
    """Return text, escaped, as a `<pre>` element without blank lines: a blank line would end the block in markdown."""
    lines = ("".join(c if c.isprintable() else "�" for c in line) for line in text.splitlines())
    body = "\n".join(html.escape(line, quote=False) for line in lines if line.strip())
    return f"<pre>\n{body}\n</pre>"


def folded(title: str, text: str) -> str:
    """Return text as a `<pre>` element folded under a title. The title is not escaped: never pass a user's text."""
    # One block of HTML: the v1 UI closes `<details>` before Markdown in it (Prefect 3.8.8).
    return f"<details>\n<summary>{title}</summary>\n{preformatted(text)}\n</details>"


def percent(part: float, whole: float) -> str:
    """Return `part` as a percentage of `whole`, or a dash if `whole` is 0."""
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"
