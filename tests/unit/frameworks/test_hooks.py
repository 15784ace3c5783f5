import importlib
import importlib.resources
import importlib.util
import sys
import threading
import zipfile

import pytest

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import Counters, FrameworkAdapter
from tests.unit.frameworks.policies import import_lazily, policy

NAME = "framework_for_tests"


class FakeAdapter(FrameworkAdapter):
    def __init__(self, module=NAME, error=None, counters=None, trace=None):
        self.name = module
        self.error = error
        self.applied = 0
        self.saw = None
        self.counters = lambda: counters
        self.begin_trace = lambda: trace

    def apply(self, policy):
        self.applied += 1
        self.saw = getattr(sys.modules[self.name], "READY", None)
        if self.error is not None:
            raise self.error


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """A package with a submodule, a data file and a slow start."""
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text(f"import {NAME}.sub\nREADY = True\n")
    (package / "sub.py").write_text("VALUE = 3\n")
    (package / "data.txt").write_text("data")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield package
    sys.meta_path[:] = before
    for name in [n for n in sys.modules if n.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture
def adapter(framework):
    """An adapter of the package, which is not imported yet."""
    adapter = FakeAdapter()
    hooks.install([adapter], policy())
    return adapter


@pytest.mark.parametrize("first", [NAME, f"{NAME}.sub"], ids=["the package", "a submodule"])
def test_nothing_happens_until_the_import_and_then_once(adapter, first):
    # Looking for a spec applies nothing, and spoils nothing.
    for _ in range(2):
        importlib.util.find_spec(NAME)
    assert adapter.applied == 0
    importlib.import_module(first)
    importlib.import_module(NAME)
    assert adapter.applied == 1
    assert adapter.saw is True
    assert importlib.import_module(f"{NAME}.sub").VALUE == 3


def test_a_framework_that_is_imported_already_is_applied_at_once(framework):
    importlib.import_module(NAME)
    adapter = FakeAdapter()
    hooks.install([adapter], policy())
    assert adapter.applied == 1


def test_loader_resources_and_specs_are_as_without_the_hook(framework):
    # Prefect brings libraries that put a loader of their own in the way of every import.
    plain = type(importlib.util.find_spec(NAME).loader)
    hooks.install([FakeAdapter()], policy())
    assert type(importlib.util.find_spec(NAME).loader) is plain
    module = importlib.import_module(NAME)
    assert (importlib.resources.files(NAME) / "data.txt").read_text() == "data"
    assert type(module.__loader__) is plain
    assert "exec_module" not in vars(module.__loader__)
    assert module.__loader__.get_source(NAME).endswith("READY = True\n")


def test_a_zips_shared_loader_is_hooked_for_its_module_alone(tmp_path, monkeypatch):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped_framework.py", "import zipped_other\nREADY = True\n")
        file.writestr("zipped_other.py", "")
    monkeypatch.syspath_prepend(archive)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    adapter = FakeAdapter("zipped_framework")
    hooks.install([adapter], policy())
    importlib.import_module("zipped_framework")
    assert (adapter.applied, adapter.saw) == (1, True)
    del sys.modules["zipped_framework"], sys.modules["zipped_other"]


def test_a_framework_that_is_not_installed_is_missing_as_ever(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hooks.install([FakeAdapter("framework_not_there")], policy())
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("framework_not_there")
    assert caught.value.name == "framework_not_there"


def test_a_frameworks_own_import_error_passes_and_the_next_try_applies(framework, adapter):
    (framework / "__init__.py").write_text("raise ImportError('libcuda is missing')\n")
    with pytest.raises(ImportError, match="libcuda is missing"):
        importlib.import_module(NAME)
    assert adapter.applied == 0
    (framework / "__init__.py").write_text("READY = 'repaired' # another size\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert (adapter.applied, adapter.saw) == (1, "repaired")


def test_a_failure_fails_the_import_every_time_and_the_policy_is_applied_once(adapter):
    adapter.error = FrameworkError("fake", "1 GPU(s) allotted, 0 found")
    for _ in range(2):
        with pytest.raises(FrameworkError, match="0 found"):
            importlib.import_module(NAME)
    assert adapter.applied == 1


def test_any_other_failure_becomes_a_framework_error(adapter):
    adapter.error = KeyError("x")
    with pytest.raises(FrameworkError, match="could not apply the policy: KeyError") as caught:
        importlib.import_module(NAME)
    assert isinstance(caught.value.__cause__, KeyError)


def test_threads_that_import_at_once_all_wait_for_the_policy(adapter):
    seen = []
    start = threading.Barrier(8)

    def work():
        start.wait()
        importlib.import_module(NAME)
        seen.append(adapter.applied)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [1] * 8


def test_counters_are_summed_and_unknown_only_where_all_are(monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, object())
    torch = FakeAdapter(counters=Counters(1, 4, 2, 8, 3))
    tensorflow = FakeAdapter(counters=Counters(10, None, 20, None))
    idle = FakeAdapter()
    missing = FakeAdapter("framework_not_there", counters=Counters(9, 9, 9, 9))
    assert hooks.collect_counters([torch, tensorflow, idle, missing]) == Counters(11, 14, 22, 28, 3)
    assert hooks.sample([torch, tensorflow, idle, missing]) == (11, 3)
    counting = FakeAdapter(counters=Counters(1, 1, 1, 1, 0, 7))
    assert hooks.collect_counters([torch, counting]).freed_bytes == 7
    assert hooks.collect_counters([tensorflow]) == Counters(10, None, 20, None)
    assert hooks.sample([tensorflow]) == (10, 0)
    assert hooks.collect_counters([idle, missing]) is hooks.sample([idle, missing]) is None


def test_the_first_imported_framework_that_can_be_traced_is(monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, object())
    trace = object()
    missing = FakeAdapter("framework_not_there", trace=trace)
    assert hooks.begin_trace([missing, FakeAdapter(), FakeAdapter(trace=trace)]) is trace
    assert hooks.begin_trace([FakeAdapter(), missing]) is None


def test_frameworks_in_use_are_those_imported(monkeypatch):
    for adapter in hooks.ADAPTERS.values():
        monkeypatch.delitem(sys.modules, adapter.name, raising=False)
    monkeypatch.setitem(sys.modules, "jax", object())
    assert hooks.frameworks_in_use() == ("jax",)


@pytest.mark.parametrize("installed", ["before the import", "after the import"])
def test_a_lazily_loaded_framework_is_applied_when_it_loads(framework, monkeypatch, installed):
    adapter = FakeAdapter(counters=Counters(1, 1, 1, 1))
    if installed == "before the import":
        hooks.install([adapter], policy())
    module = import_lazily(NAME, monkeypatch)
    if installed == "after the import":
        hooks.install([adapter], policy())
    assert adapter.applied == 0
    assert hooks.collect_counters([adapter]) is hooks.sample([adapter]) is None
    assert f"{NAME}.sub" not in sys.modules
    assert module.READY
    assert adapter.applied == 1
    assert hooks.sample([adapter]) == (1, 0)


@pytest.mark.parametrize("adapter", hooks.ADAPTERS.values(), ids=list(hooks.ADAPTERS))
def test_asking_an_adapter_loads_no_framework_that_is_absent_or_lazily_loaded(
    adapter, tmp_path, monkeypatch
):
    for name in (adapter.name, "loaded_by_mistake"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{adapter.name}.py").write_text("import loaded_by_mistake\n")
    (tmp_path / "loaded_by_mistake.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for _ in range(2):
        assert not adapter.has_started()
        assert adapter.counters() is adapter.begin_trace() is None
        assert adapter.reduce_to_host([1]) is NotImplemented
        adapter.release_cached()
        adapter.release_unused()
        assert adapter.name not in hooks.frameworks_in_use()
        assert "loaded_by_mistake" not in sys.modules
        import_lazily(adapter.name, monkeypatch)


def test_two_finders_that_wait_for_one_module_both_act(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    acted: list[str] = []
    for name in ("first", "second"):
        hooks.AfterImport({"colorsys": lambda name=name: acted.append(name)}).install()
    importlib.import_module("colorsys")
    assert acted == ["first", "second"]
