from pathlib import Path

import pytest

from prefect_gpu.frameworks import context
from prefect_gpu.frameworks.context import (
    FALLBACK_CONTEXT_BYTES,
    ContextStore,
    context_key,
    default_path,
    with_collectives,
)
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import GIB, MIB

KEY = '["torch", "2.11.0", "NVIDIA H200", "580.1"]'


def test_contexts_are_kept_for_other_processes_beside_theirs(tmp_path):
    path = tmp_path / "deep" / "contexts.json"
    mine, theirs = ContextStore(path), ContextStore(path)
    mine.put(KEY, 5)
    theirs.put("jax", 2)
    for store in (mine, theirs, ContextStore(path)):
        assert (store.get(KEY), store.get("jax")) == (5, 2)
    assert [p.name for p in path.parent.iterdir()] == ["contexts.json"]


def test_the_context_depends_on_the_framework_its_version_the_device_and_the_driver(monkeypatch):
    device = Device("GPU-a", 0, "NVIDIA H200", GIB, "nvml", "here", driver="580.1")
    versions = {"torch": "2.11.0"}
    monkeypatch.setattr(context, "framework_version", lambda name: versions.get(name, ""))
    assert context_key("torch", device) == '["torch", "2.11.0", "NVIDIA H200", "580.1"]'
    assert context_key("jax", device) == '["jax", "", "NVIDIA H200", "580.1"]'


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"k": "5"}', "\x00", "null"])
def test_a_broken_file_counts_as_empty_and_is_replaced(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    store = ContextStore(path)
    assert store.get(KEY) is None
    store.put(KEY, 7)
    assert ContextStore(path).get(KEY) == 7


def test_where_nothing_can_be_written_it_is_remembered_by_this_object(tmp_path):
    (tmp_path / "file").write_text("")
    store = ContextStore(tmp_path / "file" / "c.json")
    store.put(KEY, 3)
    assert store.get(KEY) == 3


def test_a_write_that_fails_midway_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    ContextStore(path).put(KEY, 5)
    write = Path.write_text

    def write_a_part(target, text, **options):
        write(target, text[:10], **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", write_a_part)
    ContextStore(path).put("jax", 7)
    assert ContextStore(path).get(KEY) == 5


@pytest.mark.parametrize("base", ["", "relative/path"])
def test_the_default_path_follows_the_xdg_specification(monkeypatch, tmp_path, base):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path({"XDG_CACHE_HOME": "/c"}).as_posix() == "/c/prefect_gpu/contexts.json"
    assert default_path({"XDG_CACHE_HOME": base}) == tmp_path / ".cache/prefect_gpu/contexts.json"


@pytest.mark.parametrize(
    ("budget_mib", "expected_mib"), [(6144, 1600), (1700, 1200), (702, 701), (500, 700)]
)
def test_nccl_is_left_900_mib_or_half_of_what_there_is(budget_mib, expected_mib):
    assert with_collectives(700 * MIB, budget_mib * MIB) == expected_mib * MIB


def test_fallbacks():
    assert FALLBACK_CONTEXT_BYTES["torch"] == 766 * MIB
    assert FALLBACK_CONTEXT_BYTES["tensorflow"] > 1200 * MIB
    assert FALLBACK_CONTEXT_BYTES["onnxruntime"] == 770 * MIB
