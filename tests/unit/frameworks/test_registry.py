import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import framework_version, look_at
from prefect_gpu.frameworks.registry import adapters_for, detect_frameworks
from tests.cases import cases
from tests.unit.frameworks.policies import import_lazily, policy
from tests.unit.processes import kind_bodies, task_bodies


def user_module(source, name="their_module", **given):
    """Make a module as a user would write one, without importing any framework."""
    module = types.ModuleType(name)
    module.__dict__.update(given)
    exec(compile(source, f"/home/them/{name}.py", "exec"), module.__dict__)
    return module


def fake(name):
    return types.ModuleType(name)


def test_adapters_are_those_named_else_all():
    assert [a.name for a in adapters_for(policy(frameworks=("jax", "torch")))] == ["jax", "torch"]
    assert len(adapters_for(policy())) == len(registry.ADAPTERS)
    assert adapters_for(policy(frameworks=("none",))) == ()


CASES = {
    "an import in the body": "def f():\n import torch.nn as nn\n return nn",
    "an import in a nested function": "def f():\n def g():\n  from torch import nn\n return g",
    "an import in a helper": "def g():\n import torch\ndef f():\n return g()",
    "an import in a comprehension": "def f():\n return [__import__ for _ in [1]] or (lambda: h())\ndef h():\n import torchvision",
    "a class with a framework's method": "class N:\n def run(self):\n  import torch\ndef f():\n return N()",
    "a default": "def g():\n import torch\ndef f(use=g):\n return use()",
    "recursion": "def f():\n import torch\n return f()",
}


@pytest.mark.parametrize("source", CASES.values(), ids=list(CASES))
def test_finds_torch_through(source):
    assert detect_frameworks(user_module(source).f) == ("torch",)


TENSOR = type("Tensor", (), {"__module__": "torch._tensor"})()
BASE = type("Module", (), {"__module__": "torch.nn.modules.module"})


@pytest.mark.parametrize(
    ("source", "given", "found"),
    [
        pytest.param("def f(): return T", {"T": fake("torch.nn")}, "torch", id="a module"),
        pytest.param("def f(): return w", {"w": TENSOR}, "torch", id="an object of it"),
        pytest.param(
            "class Net(Base): pass\ndef f(): return Net()", {"Base": BASE}, "torch", id="a base"
        ),
        pytest.param(
            "def make(m):\n def f(): return m\n return f\nf = make(M)",
            {"M": fake("cupy")},
            "cupy",
            id="a closure's value",
        ),
        pytest.param(
            "def f(): pass", {"tf": fake("tensorflow")}, "tensorflow", id="an import of its module"
        ),
    ],
)
def test_finds_what_a_function_refers_to(source, given, found):
    assert detect_frameworks(user_module(source, **given).f) == (found,)


def test_in_main_only_what_is_referred_to_travels():
    module = user_module("def f(): return j\ndef g(): pass", "__main__", j=fake("jax"))
    assert detect_frameworks(module.f) == ("jax",)
    assert detect_frameworks(module.g) == ()


def test_looks_through_partials_methods_decorators_and_tasks():
    module = user_module("def f(self=None):\n import onnxruntime")
    task = type("Task", (), {"__module__": "prefect.tasks"})()
    task.fn = module.f

    @functools.wraps(module.f)
    def decorated():
        return None

    for fn in (functools.partial(module.f), types.MethodType(module.f, 1), decorated, task):
        assert detect_frameworks(fn) == ("onnxruntime",)


@pytest.mark.parametrize(
    ("backend", "expected"), [(None, ("tensorflow",)), ("torch", ("torch",)), ("numpy", ())]
)
def test_keras_counts_as_its_backend(monkeypatch, backend, expected):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if backend is not None:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    module = user_module("def f():\n from keras import layers")
    assert detect_frameworks(module.f) == expected


def test_finds_nothing_in_plain_code_and_odd_values():
    module = user_module("import json, os\ndef f(x=1): return json.dumps(os.environ)")
    for value in (module.f, len, 3, None, object(), types.SimpleNamespace(a=1)):
        assert detect_frameworks(value) == ()


def test_detection_imports_nothing_and_wakes_no_lazy_module():
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"woke by {name}")

    before = set(sys.modules)
    module = user_module("def f():\n import jax\n return L.x", L=Lazy("tensorflow"))
    assert detect_frameworks(module.f) == ("jax", "tensorflow")
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("fn", "uses"),
    [
        pytest.param(task_bodies.alone.fn, True, id="a task of an importable module"),
        pytest.param(kind_bodies.plain, False, id="not: a function of a module without Prefect"),
        pytest.param(
            user_module("def f():\n from prefect import get_client").f,
            True,
            id="an import in the body",
        ),
        pytest.param(task_bodies.logs.fn, True, id="a function of Prefect"),
        pytest.param(task_bodies.submits.fn, True, id="another task"),
        pytest.param(task_bodies.with_helper.fn, True, id="a function of a module that has tasks"),
        pytest.param(task_bodies.plain, True, id="a function imported from such a module"),
    ],
)
def test_whether_a_process_will_import_prefect(fn, uses):
    assert registry.uses_prefect(fn) is uses


def test_version_comes_from_metadata():
    framework_version.cache_clear()
    assert framework_version("cupy") == ""
    assert framework_version("unheard of") == ""


def test_needed_modules_are_its_own_and_what_its_code_imports():
    module = user_module(
        "def h():\n from a.b import c, d\n import e.f\n"
        "def f():\n import x\n def g():\n  import y\n return g, h, M, w",
        M=fake("m.n"),
        w=type("W", (), {"__module__": "w.v"})(),
    )
    found = registry.needed_modules(functools.partial(module.f))
    assert found[0] == "their_module"
    assert set(found) == {*("their_module", "a.b:c,d", "e.f", "x", "y", "m.n", "w.v", "builtins")}


def test_needed_modules_of_relative_imports():
    module = user_module(
        "def f():\n from . import a\n from .b import c\n from ..d import e\n import g",
        name="top.middle.leaf",
        __package__="top.middle",
    )
    assert set(registry.needed_modules(module.f)) == {
        *("top.middle.leaf", "top.middle:a", "top.middle.b:c", "top.d:e", "g")
    }


@cases(
    "lines, expected",
    {
        "an optimizer": (" o = torch.optim.SGD([])", True),
        "a class of optimizers": (" AdamW([])", True),
        "imported in the function": (" from torch import optim\n optim.SGD([])", True),
        "in a function that it calls": (" helper()", True),
        "a compiled model": (" torch.compile(0)", True),
        "checkpoints": (" torch.utils.checkpoint.checkpoint(0)", True),
        "a library that trains": (" from lightning import Trainer", True),
        "that it configures first": (" x = 'TORCH_COMPILE_DISABLE'\n torch.compile(0)", False),
        "another part": (" torch.nn.Linear(1, 1)", False),
        "another module's part": (" optim.minimize(0)", False),
    },
)
def test_what_a_library_imports_on_use_is_known_before(lines: str, expected: bool) -> None:
    module = user_module(
        f"def helper():\n torch.optim.SGD([])\ndef f():\n{lines}",
        torch=fake("torch"),
        optim=fake("scipy.optim"),
        AdamW=type("AdamW", (), {"__module__": "torch.optim.adamw"}),
    )
    assert (registry.needed_modules(module.f)[-1] == "torch._dynamo") is expected


# Whose a module is.


def import_from(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Import a module or package that lies in a folder; its name is forgotten with the test."""
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    registry.is_users.cache_clear()
    return name


@pytest.mark.parametrize(
    ("folder", "users"),
    [
        ("project", True),
        ("lib/python3.12/site-packages", False),
        ("usr/local/lib/python3.12/dist-packages", False),
    ],
)
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py", "{}/part.py"])
def test_a_modules_file_shows_whether_it_is_the_users(
    tmp_path: Path, folder: str, users: bool, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name of its own: what is known of a folder is kept.
    path = tmp_path / folder / file.format("test_whose")
    path.parent.mkdir(parents=True)
    path.write_text("")
    name = import_from(tmp_path / folder, "test_whose", monkeypatch)
    assert registry.is_users(name) is users
    assert registry.is_users(f"{name}.part") is users


def test_what_an_installer_lists_is_a_library_and_what_lies_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("test_listed_package", "test_beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "test_listed_module.py").write_text("")
    (tmp_path / "some-1.0.dist-info").mkdir()
    (tmp_path / "some-1.0.dist-info" / "RECORD").write_text(
        "test_listed_module.py,sha256=abc,0\n"
        '"test_listed_package/__init__.py",sha256=abc,0\n'
        "some-1.0.dist-info/RECORD,,\n"
    )
    for name, users in (
        ("test_listed_module", False),
        ("test_listed_package", False),
        ("test_beside", True),
    ):
        assert registry.is_users(import_from(tmp_path, name, monkeypatch)) is users, name


def test_a_list_of_an_installer_that_cannot_be_read_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_unlisted.py").write_text("")
    (tmp_path / "some-1.0.dist-info" / "RECORD").mkdir(parents=True)
    assert registry.is_users(import_from(tmp_path, "test_unlisted", monkeypatch))


def test_a_module_that_is_imported_lazily_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "test_imported_lazily"
    path = tmp_path / f"{name}.py"
    path.write_text("LOADED = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = import_lazily(name, monkeypatch)
    registry.is_users.cache_clear()
    assert registry.is_users(name)
    assert look_at(name, "__file__") == str(path)
    assert look_at(name, "LOADED") is look_at("test_not_there", "__file__") is None
    assert module.LOADED


def test_reading_a_class_does_not_load_a_lazily_loaded_module_that_it_holds():
    class Loads(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was read, which loads the module")

    class Holder:
        heavy = Loads("heavy")

        def method(self):
            return self.heavy

    def task():
        return Holder().method()

    assert detect_frameworks(task) == ()
