"""Files that are named like modules, in a folder that nothing shall import from."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path

#: Says that it was imported, in a file beside it.
_TRAP = """
import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "imported"), "a") as file:
    file.write(__name__ + "\\n")
"""


@functools.cache
def _names() -> set[str]:
    """Names of modules. To read what each package has installed takes a second."""
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    return {name for name in names - {"prefect_gpu"} if name.isidentifier()}


class Traps:
    """A file for each module of the standard library and of the installed packages, this one excepted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in _names():
            (folder / f"{name}.py").write_text(_TRAP)

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.py").unlink(missing_ok=True)

    @property
    def imported(self) -> list[str]:
        """Names of those that were imported, by any process."""
        found = self.folder / "imported"
        return found.read_text().split() if found.exists() else []
