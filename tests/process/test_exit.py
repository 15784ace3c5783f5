"""How the process of a task ends: the user's modules are finalised, and libraries are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prefect_gpu.processes.standby_kind import OWN_MODULES
from tests.process import bodies
from tests.process.rig import PREPARE, Rig, spec_of


@pytest.mark.parametrize("libraries", [(), OWN_MODULES], ids=["without Prefect", "with Prefect"])
def test_text_in_files_that_modules_hold_open_is_written(
    rig: Rig, importable: str, libraries: tuple[str, ...]
) -> None:
    Path(importable, "test_holds_files.py").write_text(bodies.HOLDS_FILES)
    module = bodies.ImportedAtLoad("test_holds_files")
    spec = spec_of(bodies.write_to_held_files, module, "all of it")
    child = rig.launch(replace(spec, prepare=replace(PREPARE, libraries=libraries)))
    assert child.value() is None
    assert child.exit().code == 0
    found = {path.stem: path.read_text().strip() for path in Path(importable).glob("*.txt")}
    assert len(found) == 8 and set(found.values()) == {"all of it"}, found


def test_libraries_are_frozen_before_the_users_modules_which_are_finalised_at_the_end(
    rig: Rig, importable: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    Path(importable, "test_a_library.py").write_text(bodies.TELLS_ITS_END.format(str(told)))
    Path(importable, "test_a_users_module.py").write_text(
        "import gc, test_a_library\nSET_ASIDE = gc.get_freeze_count()\n"
        + bodies.TELLS_ITS_END.format(str(told))
    )
    module = bodies.ImportedAtLoad("test_a_users_module")
    spec = spec_of(getattr, module, "SET_ASIDE")
    child = rig.launch(replace(spec, prepare=replace(PREPARE, libraries=("test_a_library",))))
    assert child.value() > 1000
    assert child.exit().code == 0
    assert told.read_text() == "test_a_users_module\n"


@pytest.fixture
def library(importable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a library that notes its end in the file whose path is returned."""
    told = tmp_path / "told"
    installed = Path(importable, "site-packages")
    installed.mkdir()
    (installed / "test_a_library.py").write_text(
        "class Base: pass\nHELD = []\n" + bodies.TELLS_ITS_END.format(str(told))
    )
    monkeypatch.syspath_prepend(str(installed))
    return told


def run_module(rig: Rig, importable: str, told: Path, text: str) -> None:
    """Run a task of one of the user's modules to the end of its process."""
    written = text + bodies.TELLS_ITS_END.format(str(told))
    Path(importable, "test_a_users_module.py").write_text(written)
    child = rig.start(getattr, bodies.ImportedAtLoad("test_a_users_module"), "__name__")
    assert child.value() == "test_a_users_module"
    assert child.exit().code == 0


def test_a_library_that_the_users_module_imports_is_not_finalised(
    rig: Rig, importable: str, library: Path
) -> None:
    run_module(rig, importable, library, "import test_a_library")
    assert library.read_text() == "test_a_users_module\n"


def test_a_module_is_finalised_after_its_exit_function(
    rig: Rig, importable: str, library: Path
) -> None:
    text = """
import atexit, test_a_library
@atexit.register
def at_the_end():
    with open({!r}, "a") as told:
        told.write("atexit" + chr(10))
"""
    run_module(rig, importable, library, text.format(str(library)))
    assert library.read_text() == "atexit\ntest_a_users_module\n"


def test_a_module_that_a_library_holds_is_cleared_as_in_a_script(
    rig: Rig, importable: str, library: Path
) -> None:
    text = """
import sys, test_a_library
test_a_library.HELD.append(sys.modules[__name__])
class Cleared:
    def __del__(self, file={!r}, open=open):
        with open(file, "a") as told:
            told.write("cleared" + chr(10))
CLEARED = Cleared()
"""
    run_module(rig, importable, library, text.format(str(library)))
    # The object that refers to itself is not collected, since the library holds its module.
    assert library.read_text() == "cleared\n"


def test_objects_find_the_globals_of_their_modules_when_they_are_finalised(
    rig: Rig, importable: str, library: Path
) -> None:
    text = """
import os
class Asks:
    def __init__(self):
        self.own = self
    def __del__(self):
        import json
        with open({!r}, "a") as told:
            told.write(json.dumps([os.sep, NAME]) + chr(10))
NAME = "a global"
ASKS = Asks()
"""
    run_module(rig, importable, library, text.format(str(library)))
    assert sorted(library.read_text().splitlines()) == ['["/", "a global"]', "test_a_users_module"]
