"""Each row of the tables of what a task's process has names programs and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SECTION = (
    (REPOSITORY / "docs" / "reference.md")
    .read_text(encoding="utf-8")
    .partition("## What a task's process has\n")[2]
    .partition("\n## ")[0]
)

#: The second and the last cell of each row.
ROWS = [
    pytest.param(cells[-1], id=cells[1])
    for line in SECTION.splitlines()
    if len(cells := line.strip("| ").split(" | ")) == 4 and cells[-1] != "test"
]

PROGRAMS = {path.stem for path in (REPOSITORY / "tests" / "programs").glob("[0-9]*.py")}


def _exists(name: str) -> bool:
    path, _, function = name.partition("::")
    if not function:
        return name in PROGRAMS
    file = REPOSITORY / path
    return file.is_file() and f"def {function}(" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("cell", ROWS)
def test_a_row_names_programs_and_tests_that_exist(cell: str) -> None:
    names = re.findall(r"`([^`]+)`", cell)
    assert names and [name for name in names if not _exists(name)] == []


def test_each_program_is_in_a_row() -> None:
    assert PROGRAMS - set(re.findall(r"`(\d\d_\w+)`", SECTION)) == set()
