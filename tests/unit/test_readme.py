"""The README and the table of tags in docs/reference.md say what the code says."""

import re
from pathlib import Path

import pytest
from prefect.settings import Settings

from prefect_gpu.errors import PolicyError
from prefect_gpu.policy import ALLOCATOR_OPTIONS, FRAMEWORKS, parse_tags

README = Path(__file__).parents[2] / "README.md"
REFERENCE = README.parent / "docs" / "reference.md"


def _rows() -> list[list[str]]:
    """Return the cells of the table of tags."""
    text = REFERENCE.read_text(encoding="utf-8")
    table = text.partition("<!-- tags -->\n")[2].partition("<!-- /tags -->")[0]
    return [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]


def test_the_table_has_a_row_for_every_key_that_the_parser_accepts() -> None:
    with pytest.raises(PolicyError) as unknown:
        parse_tags(["gpu:no_such_key=1"])
    accepted = set(re.findall(r"gpu:(\w+)", unknown.value.accepted))
    shown = [match[1] for row in _rows() if (match := re.match(r"`gpu:(\w+)", row[0]))]
    assert sorted(shown) == sorted(accepted)


def test_the_table_names_every_framework_and_allocator_option() -> None:
    text = " ".join(cell for row in _rows() for cell in row)
    assert [name for name in (*FRAMEWORKS, *ALLOCATOR_OPTIONS) if name not in text] == []


def test_a_flow_in_the_clone_gives_a_server_of_its_own_two_minutes_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
    monkeypatch.chdir(README.parent)
    monkeypatch.delenv(name, raising=False)
    assert Settings().server.ephemeral.startup_timeout_seconds == 120
    monkeypatch.setenv(name, "50")
    assert Settings().server.ephemeral.startup_timeout_seconds == 50
