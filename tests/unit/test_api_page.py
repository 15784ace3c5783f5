"""`docs/api.md` has a row for each public name, with the first line of its docstring."""

import inspect
import re
from pathlib import Path

import prefect_gpu

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_each_public_name_has_a_row_with_the_first_line_of_its_docstring() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for name in prefect_gpu.__all__ if name != "__version__"]
    assert sorted(name for name, _ in rows) == sorted(names)
    for name, meaning in rows:
        assert inspect.getdoc(getattr(prefect_gpu, name)).splitlines()[0] == meaning  # type: ignore[union-attr]
