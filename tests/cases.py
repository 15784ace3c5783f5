"""Tables of test cases: the sentence that names a case, and its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def cases(names: str, rows: Mapping[str, Any], *defaults: Any) -> pytest.MarkDecorator:
    """Run a test with each of `rows`, by id: values of the arguments in `names` ("budget, cause").

    `defaults` are values of the last arguments, for rows that are shorter.
    """
    count, known = names.count(",") + 1, len(defaults)
    values = list(rows.values())
    if defaults:
        values = [(*row, *defaults[known - count + len(row) :]) for row in values]
    return pytest.mark.parametrize(names, values, ids=rows)
