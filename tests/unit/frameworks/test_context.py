import pytest

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import calibration
from prefect_gpu.frameworks.context import (
    ContextKey,
    ContextStore,
    ContextWatch,
    default_path,
    fallback_context_bytes,
)
from prefect_gpu.units import MIB

KEY = ContextKey("torch", "2.11.0", "NVIDIA H200", "580.1")


def test_a_context_is_kept_for_other_processes(tmp_path):
    path = tmp_path / "deep" / "contexts.json"
    ContextStore(path).put(KEY, 5)
    assert ContextStore(path).get(KEY) == 5
    assert [p.name for p in path.parent.iterdir()] == ["contexts.json"]


@pytest.mark.parametrize("field", ["framework", "version", "device_name", "driver"])
def test_every_field_of_the_key_counts(tmp_path, field):
    from dataclasses import replace

    store = ContextStore(tmp_path / "c.json")
    store.put(KEY, 5)
    assert store.get(replace(KEY, **{field: "other"})) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"k": "5"}', "\x00", "null"])
def test_a_broken_file_counts_as_empty_and_is_replaced(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    store = ContextStore(path)
    assert store.get(KEY) is None
    store.put(KEY, 7)
    assert ContextStore(path).get(KEY) == 7


def test_entries_of_others_survive_a_put(tmp_path):
    path = tmp_path / "c.json"
    mine, theirs = ContextStore(path), ContextStore(path)
    mine.put(KEY, 1)
    other = ContextKey("jax", "", "NVIDIA H200", "580.1")
    theirs.put(other, 2)
    assert (mine.get(KEY), mine.get(other)) == (1, 2)


def test_where_nothing_can_be_written_it_is_remembered_by_this_object(tmp_path):
    (tmp_path / "file").write_text("")
    store = ContextStore(tmp_path / "file" / "c.json")
    store.put(KEY, 3)
    assert store.get(KEY) == 3


@pytest.mark.parametrize("base", ["", "relative/path"])
def test_the_default_path_follows_the_xdg_specification(monkeypatch, tmp_path, base):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path({"XDG_CACHE_HOME": "/c"}).as_posix() == "/c/prefect_gpu/contexts.json"
    assert default_path({"XDG_CACHE_HOME": base}) == tmp_path / ".cache/prefect_gpu/contexts.json"


def test_fallbacks():
    assert fallback_context_bytes("torch") == 766 * MIB
    assert fallback_context_bytes("tensorflow") > 1200 * MIB
    assert fallback_context_bytes("onnxruntime") == 770 * MIB
    assert fallback_context_bytes("something else") == 700 * MIB


def test_calibration_refuses_by_name():
    with pytest.raises(FrameworkError, match="cannot be calibrated; can: torch, tensorflow"):
        calibration.run_calibration("mxnet")
    with pytest.raises(FrameworkError, match="calibration failed: ModuleNotFoundError"):
        calibration.run_calibration("cupy")


def seen_after(*events: tuple[str, int]) -> int | None:
    watch = ContextWatch()
    for what, size in events:
        (watch.add_reading if what == "shown" else watch.add_reserved)(size * MIB)
    seen = watch.seen_bytes()
    return None if seen is None else seen // MIB


def test_a_peak_between_two_counters_is_no_context() -> None:
    watch = ContextWatch()
    watch.add_reserved(1000 * MIB, 1000 * MIB)
    watch.add_reading(6600 * MIB)
    watch.add_reserved(1000 * MIB, 6000 * MIB)
    watch.add_reading(1600 * MIB)
    watch.add_reserved(1000 * MIB, 6000 * MIB)
    assert watch.seen_bytes() == 600 * MIB


def test_a_spike_between_two_counters_is_no_context() -> None:
    # A ResNet-50 with `cudnn.benchmark` on an H200: its first step has held 13 GiB, and a later one
    # tries a workspace of 1464 MiB again and gives it up, so that no peak rises.
    watch = ContextWatch()
    watch.add_reserved(5000 * MIB, 13_000 * MIB, 8000 * MIB)
    watch.add_reading(5000 * MIB + 2226 * MIB)
    watch.add_reserved(5000 * MIB, 13_000 * MIB, 8000 * MIB + 1464 * MIB)
    assert watch.seen_bytes() is None
    watch.add_reading(5000 * MIB + 762 * MIB)
    watch.add_reserved(5000 * MIB, 13_000 * MIB, 8000 * MIB + 1464 * MIB)
    assert watch.seen_bytes() == 762 * MIB


@pytest.mark.parametrize(
    ("before", "after", "context"),
    [
        pytest.param(5, 5, 600, id="nothing was given back"),
        pytest.param(5, 6, None, id="something was"),
        pytest.param(5, 0, None, id="the body reset the count"),
        pytest.param(None, 5, None, id="a framework that counts came into use"),
        pytest.param(None, None, 600, id="nobody counts: the peaks alone say"),
    ],
)
def test_a_reading_counts_where_the_allocators_gave_nothing_back(
    before: int | None, after: int | None, context: int | None
) -> None:
    watch = ContextWatch()
    watch.add_reserved(1000 * MIB, 1000 * MIB, before)
    watch.add_reading(2600 * MIB)
    watch.add_reserved(2000 * MIB, 2000 * MIB, after)
    assert watch.seen_bytes() == (None if context is None else context * MIB)


@pytest.mark.parametrize(
    ("events", "context"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([("shown", 600)], None, id="before the first counters"),
        pytest.param([("held", 100), ("shown", 5700)], None, id="after the last counters"),
        pytest.param([("held", 100), ("shown", 700), ("held", 100)], 600, id="nothing changed"),
        pytest.param(
            [("held", 100), ("shown", 5600), ("held", 5000), ("shown", 5650), ("held", 5000)],
            650,
            id="a reading between two counters is never set against the smaller",
        ),
        pytest.param(
            [("held", 5000), ("shown", 1600), ("held", 1000), ("shown", 1600), ("held", 1000)],
            600,
            id="a peak that no reading saw takes nothing away",
        ),
        pytest.param([("held", 9), ("shown", 0), ("held", 9)], None, id="the device tells nothing"),
    ],
)
def test_a_context_is_seen_whatever_the_two_readers_miss(
    events: list[tuple[str, int]], context: int | None
) -> None:
    assert seen_after(*events) == context
