"""Marks of tests: tables of cases, each a sentence and its values, and the packages that a test needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
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


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests where a package is not installed, without its import, which takes seconds in each worker."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
