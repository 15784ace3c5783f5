"""The context of a process, from what its devices show and what its allocators hold."""

from __future__ import annotations

import pytest

from prefect_gpu.runner.process_record import ContextWatch
from prefect_gpu.units import MIB


def seen_after(*events: tuple[str, int]) -> int | None:
    watch = ContextWatch()
    for what, size in events:
        (watch.add_reading if what == "shown" else watch.add_reserved)(size * MIB)
    seen = watch.seen_bytes
    return None if seen is None else seen // MIB


def test_a_peak_between_two_counters_is_no_context() -> None:
    watch = ContextWatch()
    watch.add_reserved(1000 * MIB, 1000 * MIB)
    watch.add_reading(6600 * MIB)
    watch.add_reserved(1000 * MIB, 6000 * MIB)
    watch.add_reading(1600 * MIB)
    watch.add_reserved(1000 * MIB, 6000 * MIB)
    assert watch.seen_bytes == 600 * MIB


def test_a_spike_between_two_counters_is_no_context() -> None:
    # A ResNet-50 with `cudnn.benchmark` on an H200: its first step has held 13 GiB, and a later one
    # tries a workspace of 1464 MiB again and gives it up, so that no peak rises.
    watch = ContextWatch()
    watch.add_reserved(5000 * MIB, 13_000 * MIB, 8000 * MIB)
    watch.add_reading(5000 * MIB + 2226 * MIB)
    watch.add_reserved(5000 * MIB, 13_000 * MIB, 8000 * MIB + 1464 * MIB)
    assert watch.seen_bytes is None
    watch.add_reading(5000 * MIB + 762 * MIB)
    watch.add_reserved(5000 * MIB, 13_000 * MIB, 8000 * MIB + 1464 * MIB)
    assert watch.seen_bytes == 762 * MIB


@pytest.mark.parametrize(
    ("before", "after", "context"),
    [
        pytest.param(5, 5, 600, id="nothing was given back"),
        pytest.param(5, 6, None, id="something was"),
        pytest.param(5, 0, None, id="the body reset the count"),
        pytest.param(None, 5, None, id="a framework that counts came into use"),
        pytest.param(None, None, 600, id="nothing is counted: only the peaks are known"),
    ],
)
def test_a_reading_counts_where_the_allocators_gave_nothing_back(
    before: int | None, after: int | None, context: int | None
) -> None:
    watch = ContextWatch()
    watch.add_reserved(1000 * MIB, 1000 * MIB, before)
    watch.add_reading(2600 * MIB)
    watch.add_reserved(2000 * MIB, 2000 * MIB, after)
    assert watch.seen_bytes == (None if context is None else context * MIB)


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
