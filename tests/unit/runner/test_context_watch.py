"""The context of a process, from what its devices show and what its allocators hold."""

from __future__ import annotations

from prefect_gpu.runner.process_record import ContextWatch
from prefect_gpu.units import MIB
from tests.cases import cases


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


@cases(
    "before, after, context",
    {
        "nothing was given back": (5, 5, 600),
        "something was": (5, 6, None),
        "the body reset the count": (5, 0, None),
        "a framework that counts came into use": (None, 5, None),
        "nothing is counted: only the peaks are known": (None, None, 600),
    },
)
def test_a_reading_counts_where_the_allocators_gave_nothing_back(
    before: int | None, after: int | None, context: int | None
) -> None:
    watch = ContextWatch()
    watch.add_reserved(1000 * MIB, 1000 * MIB, before)
    watch.add_reading(2600 * MIB)
    watch.add_reserved(2000 * MIB, 2000 * MIB, after)
    assert watch.seen_bytes == (None if context is None else context * MIB)


@cases(
    "events, context",
    {
        "nothing": ([], None),
        "before the first counters": ([("shown", 600)], None),
        "after the last counters": ([("held", 100), ("shown", 5700)], None),
        "nothing changed": ([("held", 100), ("shown", 700), ("held", 100)], 600),
        "a reading between two counters is never set against the smaller": (
            [("held", 100), ("shown", 5600), ("held", 5000), ("shown", 5650), ("held", 5000)],
            650,
        ),
        "a peak that no reading saw takes nothing away": (
            [("held", 5000), ("shown", 1600), ("held", 1000), ("shown", 1600), ("held", 1000)],
            600,
        ),
        "the device tells nothing": ([("held", 9), ("shown", 0), ("held", 9)], None),
    },
)
def test_a_context_is_seen_whatever_the_two_readers_miss(
    events: list[tuple[str, int]], context: int | None
) -> None:
    assert seen_after(*events) == context
