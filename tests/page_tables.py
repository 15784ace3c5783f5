"""Tables of the documentation that are made of the code: settings in `docs/settings.md`, tags in `docs/reference.md`.

    python tests/page_tables.py

writes them into the pages. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_gpu import policy
from prefect_gpu.settings import GPUSettings

DOCS = Path(__file__).resolve().parents[1] / "docs"


def settings_table() -> str:
    """Return the table of all settings, in markdown."""
    schema = GPUSettings.model_json_schema()["properties"]
    rows = [
        (
            f"`{each['supported_environment_variables'][0]}`",
            ", or ".join(_types(each)),
            f"`{_text(each['default'])}`",
            each["description"],
        )
        for _, each in sorted(schema.items())
    ]
    return _table(("environment variable", "type", "default", "meaning"), rows)


def tags_table() -> str:
    """Return the table of what the parser of tags accepts, in markdown."""
    rows = []
    for key in policy._KEYS:
        if key.bare:
            rows.append((f"`gpu:{key.name}`", "", "no value"))
        else:
            often = "any number of times" if key.repeats else "once"
            rows.append((f"`gpu:{key.name}=`", often, key.accepted))
    return _table(("tag", "in one source", "accepted"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a setting accepts, in the words of Prefect's own page."""
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _types(each)
    elif "const" in schema:
        yield f"`{schema['const']}`"
    elif "enum" in schema:
        yield from (f"`{word}`" for word in schema["enum"])
    else:
        words = "path" if schema.get("format") == "path" else schema["type"].replace("null", "None")
        if "minimum" in schema:
            words += f" ≥ {schema['minimum']}"
        if "exclusiveMinimum" in schema:
            words += f" > {schema['exclusiveMinimum']:g}"
        yield words


def _text(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


#: By name, which is in the marks around it: its page, and what makes it.
TABLES = {
    "settings": (DOCS / "settings.md", settings_table),
    "accepted tags": (DOCS / "reference.md", tags_table),
}


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- /{name} -->\n"


def table_in_page(name: str) -> str:
    """Return a table as its page has it."""
    begin, end = _marks(name)
    return TABLES[name][0].read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]


def write(name: str) -> None:
    """Write a table into its page."""
    page, make = TABLES[name]
    begin, end = _marks(name)
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    page.write_text(f"{before}{begin}{make()}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    for each in TABLES:
        write(each)
