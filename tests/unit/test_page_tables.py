"""Tables of the documentation say what the code says."""

from __future__ import annotations

import inspect
import re

import pytest

from prefect_gpu import gpu
from prefect_gpu.settings import GPUSettings
from tests.page_tables import TABLES, settings_table, table_in_page, tags_table


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table(name: str) -> None:
    assert table_in_page(name) == TABLES[name][1](), "python tests/page_tables.py writes it"


def test_the_table_has_every_tag_with_what_it_accepts() -> None:
    rows = tags_table().splitlines()[2:]
    assert "| `gpu:count=` | once | a whole number from 1, as in gpu:count=2 |" in rows
    assert "| `gpu:exclusive` |  | no value |" in rows
    tags = {row.split("`")[1].rstrip("=") for row in rows}
    parameters = inspect.signature(gpu).parameters.values()
    assert {tag.partition(":")[2].partition(".")[0] for tag in tags} == {
        each.name for each in parameters if each.kind is not each.VAR_KEYWORD
    }


def test_the_table_has_every_setting_with_its_type_and_default() -> None:
    rows = dict(
        re.findall(r"^\| `PREFECT_INTEGRATIONS_GPU_(\w+)` \| (.*?`.*?` \|)", settings_table(), re.M)
    )
    assert {name.lower() for name in rows} == {*GPUSettings.model_fields}
    assert rows["MAX_PROCESSES"] == "integer ≥ 1, or None | `None` |"
    assert rows["STANDBY"] == "`auto`, or integer ≥ 0 | `auto` |"
