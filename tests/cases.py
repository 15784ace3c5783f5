"""Tables of test cases: the sentence that names a case, and its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def cases(names: str, rows: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Run a test with each of `rows`, by id: values of the arguments in `names` ("budget, cause")."""
    return pytest.mark.parametrize(names, rows.values(), ids=rows)
