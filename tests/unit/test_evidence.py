"""Each output in docs/evidence supports a claim of its table, and figures of pages are in the outputs that they link to.

The figures of README.md, docs/benchmarks.md and the table are looked up. A figure may be rounded to the digits shown, and be in GiB where the
output has MiB. The figures of a table's row must be together in one printed line, or in as many as `LINES` says. Those of a sentence may be anywhere
in the output. Whether a figure is the one that the sentence means is not tested.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
EVIDENCE = REPOSITORY / "docs" / "evidence"
FILES = sorted(path.name for path in EVIDENCE.iterdir() if path.name != "README.md")

HASH = r"\b[0-9a-f]{7,40}\b"
DATE = r"\d{4}-\d\d-\d\d"
HEADING = re.compile(
    rf"# prefect-gpu (\d+\.\d+\.\d+|not recorded), commits? [^;]*({HASH}|not recorded)[^;]*; "
    rf"([^;]*NVIDIA [^;]*, driver (\d[\d.]*\d|not recorded)|[^;]*not recorded[^;]*|[^;]*\bcores\b[^;]*); "
    rf"(added )?{DATE}( to {DATE})?"
)

#: Figures of a passage that its output does not have, by output and figure: where they are from.
NOT_PRINTED = {
    ("large-flow.txt", "8"): "tasks at a time: a constant of benchmarks/large_flow.py",
    ("large-flow.txt", "492"): "the others of the 500 task runs",
    ("transfer.txt", "20"): "ten arrays of 2 GB: an estimate, for a row that was not run",
}

#: Printed lines that make one row of a page's table, by output; of the others: one.
LINES = {
    "budgets.txt": 3,  # as it is, without growth, with all steps alike
    "gpu-dispatch.txt": 3,  # TensorFlow: two runs, and CUDA's own start in the row of spawn
    "ledger.txt": 3,  # a line for each figure
    "overhead.txt": 3,  # a line for each target
    "soak.txt": 2,  # what is kept above threads: a line for each target
}


class Row(NamedTuple):
    """A row of the table in docs/evidence/README.md."""

    page: str
    claim: str
    file: str
    command: str
    device: str
    date: str
    commit: str


class Passage(NamedTuple):
    """A paragraph, list item or row of a table with figures, and the outputs of its link."""

    page: str
    files: tuple[str, ...]
    text: str


def _rows() -> list[Row]:
    lines = (EVIDENCE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [Row(*line.strip("| ").split(" | ")) for line in lines if line.startswith("| `")]
    return [
        row._replace(page=row.page.strip("`"), file=row.file.partition("(")[2].strip(")"))
        for row in rows
    ]


def _passages(page: str) -> Iterator[Passage]:
    """Yield the passages that link to outputs, and the rows of the tables that follow them."""
    files: tuple[str, ...] = ()
    for block in re.split(r"\n\s*\n|\n(?=- )", (REPOSITORY / page).read_text(encoding="utf-8")):
        linked = tuple(re.findall(r"\]\((?:docs/)?evidence/([\w-]+\.txt)", block))
        if block.startswith("|"):
            yield from (Passage(page, files, row) for row in block.splitlines()[2:] if files)
        elif linked or not block.startswith("    "):
            files = linked
            if files:
                yield Passage(page, files, block)


ROWS = _rows()
PASSAGES = [each for page in ("README.md", "docs/benchmarks.md") for each in _passages(page)]


def _figures(text: str) -> list[str]:
    """Return the numbers of a text without its code, addresses of links and names such as H100."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?!\w|\.\d)", _without_commas(text))


def _without_commas(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text)


@functools.cache
def _text(file: str) -> str:
    return (EVIDENCE / file).read_text(encoding="utf-8")


@functools.cache
def _lines(file: str) -> list[tuple[bool, list[float]]]:
    """Return of each line of an output whether it was printed for people (not JSON), and its numbers."""
    return [
        (
            re.match(r'\s*[\[{\]}"]|\s+-?[\d.]+,?$', line) is None,
            [float(each) for each in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?", line)],
        )
        for line in _without_commas(_text(file)).splitlines()
    ]


def _is_in(figure: str, numbers: Iterable[float]) -> bool:
    half = 0.5 * 10 ** -len(figure.partition(".")[2]) + 1e-9
    return any(
        abs(value - float(figure)) <= half
        for number in numbers
        for value in (number, number / 1024)
    )


def _missing(text: str, files: tuple[str, ...]) -> list[str]:
    """Return the figures of a text that are nowhere in the outputs."""
    numbers = [number for file in files for _, line in _lines(file) for number in line]
    return [figure for figure in _figures(text) if not _is_in(figure, numbers)]


def _missing_in_row(row: str, files: tuple[str, ...]) -> list[str]:
    """Return the figures of a table's row that are left when those of the best printed lines are taken away."""
    # The first cell says what was measured.
    left = _figures(row.strip("|").partition(" | ")[2])
    printed = [line for file in files for is_printed, line in _lines(file) if is_printed]
    for _ in range(max(LINES.get(file, 1) for file in files)):
        left = min(([each for each in left if not _is_in(each, line)] for line in printed), key=len)
    return left


def _missing_of(passage: Passage) -> list[str]:
    find = _missing_in_row if passage.text.startswith("|") else _missing
    return find(passage.text, passage.files)


@pytest.mark.parametrize("file", FILES)
def test_an_output_begins_with_version_commit_device_and_date(file: str) -> None:
    first = _text(file).partition("\n")[0]
    assert HEADING.fullmatch(first), first


@pytest.mark.parametrize("file", FILES)
def test_an_output_supports_a_claim(file: str) -> None:
    assert file in {row.file for row in ROWS}


def test_the_table_is_sorted_by_page() -> None:
    pages = list(dict.fromkeys(row.page for row in ROWS))
    assert pages == sorted(pages)
    assert [row.page for row in ROWS] == [
        page for page in pages for row in ROWS if row.page == page
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}-{row.file}")
def test_a_row_says_what_its_page_and_its_output_say(row: Row) -> None:
    assert f"evidence/{row.file}" in (REPOSITORY / row.page).read_text(encoding="utf-8")
    text = _text(row.file)
    heading = text.partition("\n")[0]
    command = row.command.strip("`")
    assert command == "command not recorded" or f"\n$ {command}" in text
    words = rf"{HASH}|NVIDIA H\d+|\d+\.\d+\.\d+|not recorded"
    assert [each for each in re.findall(words, " ".join(row[4:])) if each not in text] == []
    dates = re.findall(DATE, heading)
    assert (
        min(dates)
        <= min(re.findall(DATE, row.date))
        <= max(re.findall(DATE, row.date))
        <= max(dates)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}-{row.file}")
def test_the_figures_of_a_claim_are_in_its_output(row: Row) -> None:
    assert _missing(row.claim, (row.file,)) == []


@pytest.mark.parametrize("passage", PASSAGES, ids=lambda each: f"{each.page}-{each.files[0]}")
def test_the_figures_of_a_passage_are_in_the_outputs_that_it_links_to(passage: Passage) -> None:
    missing = _missing_of(passage)
    assert [
        each for each in missing if not any((f, each) in NOT_PRINTED for f in passage.files)
    ] == []


@pytest.mark.parametrize(("file", "figure"), NOT_PRINTED, ids=lambda each: each)
def test_an_exception_is_needed(file: str, figure: str) -> None:
    assert any(file in each.files and figure in _missing_of(each) for each in PASSAGES)


def test_a_figure_that_no_output_has_is_found() -> None:
    row = next(each for each in PASSAGES if each.text.startswith("| **`GPUTaskRunner`**"))
    assert _missing_of(row) == []
    assert _missing_of(row._replace(text=row.text.replace("0.066 s", "0.166 s"))) == ["0.166"]
