"""What may be imported where: the rules that neither ruff nor import-linter can say."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import prefect_gpu.errors

PACKAGE = Path(prefect_gpu.errors.__file__).parent
PURE = [
    *(
        PACKAGE / f"{name}.py"
        for name in (
            "errors",
            "policy",
            "runner/process_run",
            "units",
        )
    ),
    *sorted((PACKAGE / "scheduling").rglob("*.py")),
]


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pure_decisions_import_the_standard_library_only(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "relative imports are banned"
            imported.add(node.module.partition(".")[0])
    # `typing_extensions` has what `typing` has in later versions.
    assert imported <= {*sys.stdlib_module_names, "prefect_gpu", "typing_extensions"}
