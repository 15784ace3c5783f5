"""The table of `docs/settings.md`, made of `prefect_gpu.settings`.

    python tests/settings_table.py

writes it into the page. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect_gpu.settings import GPUSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

BEGIN, END = "<!-- settings -->\n", "<!-- /settings -->\n"

_HEADS = ("environment variable", "type", "default", "meaning")


def settings_table() -> str:
    """Return the table, in markdown."""
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
    lines = [_HEADS, ("---",) * len(_HEADS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a setting accepts, in the words of Prefect's own page."""
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _types(each)
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


def page_table() -> str:
    """Return the table that the page has."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{settings_table()}{END}{after}", encoding="utf-8")
