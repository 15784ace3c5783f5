"""`docs/settings.md` says what `prefect_gpu.settings` says."""

from __future__ import annotations

import re

from prefect_gpu.settings import GPUSettings
from tests.settings_table import page_table, settings_table


def test_the_page_has_the_table_of_the_settings() -> None:
    assert page_table() == settings_table(), "python tests/settings_table.py writes it"


def test_the_table_has_every_setting_with_its_type_and_default() -> None:
    rows = dict(
        re.findall(r"^\| `PREFECT_INTEGRATIONS_GPU_(\w+)` \| (.*?`.*?` \|)", settings_table(), re.M)
    )
    assert {name.lower() for name in rows} == {*GPUSettings.model_fields}
    assert rows["MAX_PROCESSES"] == "integer ≥ 1, or None | `None` |"
    assert rows["STANDBY"] == "`auto`, or `hot`, or integer ≥ 0 | `auto` |"
