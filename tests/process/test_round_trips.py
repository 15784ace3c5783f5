"""Values, functions, classes and exceptions of random scripts are the same in a task's process, and back in the flow's."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.process.random_scripts import describe, describe_there, make_script, raised_by
from tests.process.rig import Rig

#: In one task.
SCRIPTS = 12

#: Not imported: it would import PyTorch in each worker.
ODD_SCRIPT = Path(__file__).with_name("odd_script.py")

Load = Callable[[str, str], types.ModuleType]


@pytest.fixture
def by_value(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a script as a module that no other interpreter can import."""

    def load(name: str, text: str) -> types.ModuleType:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text, f"{name}.py", "exec", dont_inherit=True), vars(module))
        return module

    return load


@pytest.fixture
def by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a script as a module of a folder on `sys.path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str, text: str) -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        # It is taken out again at the end.
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return load


@pytest.mark.parametrize("way", ["by_value", "by_reference"])
@pytest.mark.parametrize("seed", range(3))
def test_what_random_scripts_define_is_the_same_there_and_back(
    rig: Rig, way: str, seed: int, request: pytest.FixtureRequest
) -> None:
    load: Load = request.getfixturevalue(way)
    modules = [
        load(f"fuzzed_{way}_{seed}_{number}", make_script(Random(1000 * seed + number)))
        for number in range(SCRIPTS)
    ]
    samples: list[Any] = [[m.VALUES, m.FUNCTIONS, m.CLASSES] for m in modules]
    makers = [make for m in modules for make in m.ERRORS]
    there, errors_there, back, errors_back = rig.call(describe_there, samples, makers)
    for module, sample, described, returned in zip(modules, samples, there, back, strict=True):
        assert described == describe(sample), module.__name__
        assert describe(returned) == described, module.__name__
        assert returned[2] == module.CLASSES, "the classes of the script itself come back"
    for make, described, returned in zip(makers, errors_there, errors_back, strict=True):
        here = raised_by(make)
        assert described == describe(here)
        assert type(returned) is type(here)
        assert describe(returned) == described


def test_odd_definitions_of_a_script_are_whole_there(rig: Rig, by_value: Load) -> None:
    script = by_value("fuzzed_odd", ODD_SCRIPT.read_text(encoding="utf-8"))
    here = script.look(script.LOOKS)
    assert rig.call(script.look, script.LOOKS) == here
    assert rig.call(script.look, [script.look_at_spawned]) == [4]
    # Each alone: one structure's layout brings that of those that it contains.
    for kind in (script.Leaf, script.Tree, script.Context, script.Callbacks):
        assert rig.call(ctypes.sizeof, kind) == ctypes.sizeof(kind)
    members = [each for kind in script.ENUMS for each in kind]
    things = [*members, script.SINGLE, script.BARE, script.Outer.Config.Deep]
    for back, thing in zip(rig.call(script.same, things), things, strict=True):
        assert back is thing
    single, dispatched = rig.call(script.changed)
    assert single is script.SINGLE and dispatched is script.dispatched
    assert (single.value, dispatched.info, dispatched("x")) == (3, "said", "any")


def test_the_hook_of_a_library_is_called_for_a_class_of_a_script(rig: Rig, by_value: Load) -> None:
    script = by_value(
        "fuzzed_hooks",
        "from tests.process import bodies\n"
        "class Mine(bodies.Registered): pass\n"
        "class Keyed(bodies.KeyedBase, key='k'): pass\n"
        "def look(): return [each.__name__ for each in bodies.REGISTERED], Mine.__name__, Keyed.key\n",
    )
    assert script.look() == rig.call(script.look) == (["Mine"], "Mine", "k")
