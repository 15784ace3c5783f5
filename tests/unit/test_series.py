from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.measurements import Sample, SeriesBuilder, largest, merge

SIZES = st.none() | st.integers(0, 2**40)
SERIES = st.lists(st.tuples(st.floats(0, 10), SIZES, SIZES, SIZES), max_size=200).map(
    lambda rows: [Sample(i * 10 + at, *sizes) for i, (at, *sizes) in enumerate(rows)]
)


def peaks(samples: tuple[Sample, ...] | list[Sample]) -> list[int | None]:
    result: list[int | None] = [None, None, None]
    for s in samples:
        values = (s.process_bytes, s.live_bytes, s.reserved_bytes)
        result = [largest(a, b) for a, b in zip(result, values, strict=True)]
    return result


@given(SERIES, st.integers(2, 50))
def test_merging_is_bounded_and_keeps_every_peak(samples: list[Sample], limit: int) -> None:
    merged = merge(samples, limit)
    assert len(merged) <= limit
    assert list(merged) == sorted(merged, key=lambda s: s.at_s)
    assert peaks(merged) == peaks(samples)
    assert merged[-1:] == tuple(samples[-1:])


@given(SERIES, st.integers(4, 20))
def test_a_builder_gives_exact_peaks_and_counts(samples: list[Sample], limit: int) -> None:
    builder = SeriesBuilder(limit=limit)
    for sample in samples:
        builder.add(sample)
        assert len(builder.samples) <= limit
    assert builder.count == len(samples)
    found = [builder.peak_process_bytes, builder.peak_live_bytes, builder.peak_reserved_bytes]
    assert found == peaks(samples) == peaks(builder.samples)


def test_a_short_series_is_left_as_it_is() -> None:
    samples = [Sample(0, 1), Sample(1, 2)]
    assert merge(samples, 2) == tuple(samples)


def test_a_merged_point_stands_where_the_process_was_largest() -> None:
    samples = [Sample(0, 5, 1), Sample(1, 9, 2), Sample(2, 3, 7), Sample(3, 1)]
    assert merge(samples, 2) == (Sample(1, 9, 7), Sample(3, 1))


def test_waste_is_reserved_minus_used_over_time_and_never_negative() -> None:
    series = SeriesBuilder(10)
    assert series.wasted_byte_seconds(3) == 30
    series.add(Sample(2, 4))
    series.add(Sample(3, None, 1))
    series.add(Sample(4, 12))
    series.add(Sample(5, 10))
    assert series.wasted_byte_seconds(8) == 2 * 10 + 2 * 6
    series.add(Sample(4.5, 0))
    assert series.wasted_byte_seconds(6) == 32 + 10
