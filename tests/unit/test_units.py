"""`prefect_gpu.units`: bytes and seconds, to and from text."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    counted,
    format_bytes,
    format_joules,
    format_seconds,
    parse_bytes,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param("6GiB", 6 * GIB, id="a binary unit counts in 1024"),
        pytest.param("6GB", 6 * 10**9, id="a decimal unit counts in 1000"),
        pytest.param(" 1.5 tib ", 3 * TIB // 2, id="case and spaces do not matter"),
        pytest.param(".5MiB", MIB // 2, id="a leading point"),
        pytest.param("2.kib", 2 * KIB, id="a trailing point"),
        pytest.param("0.0015kb", 1, id="part of a byte is dropped"),
    ],
)
def test_sizes_are_read_as_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == parse_size(text) == size


def test_percentages_are_read_as_fractions() -> None:
    assert parse_size("40 %") == 0.4
    assert parse_size("100%") == 1.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("many", "not a number with a unit", id="a word"),
        pytest.param("-1GiB", "not a number with a unit", id="a negative size"),
        pytest.param("8", "did you mean 8GiB", id="no unit"),
        pytest.param("8 bananas", "'bananas' is not a unit", id="an unknown unit"),
        pytest.param("0GiB", "not more than zero", id="zero"),
        pytest.param("0.1kib%", "not a unit of bytes", id="two units"),
        pytest.param("0%", "not a percentage", id="no part of it"),
        pytest.param("100.1%", "not a percentage", id="more than all of it"),
    ],
)
def test_a_text_that_is_not_a_size_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600.0), ("1.5 H", 5400.0), ("500ms", 0.5), ("2d", 172800.0), ("3 s", 3.0)],
)
def test_durations_are_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("soon", "not a number with a unit", id="a word"),
        pytest.param("10", "did you mean 10s", id="no unit"),
        pytest.param("10GiB", "not a unit of time", id="a unit of bytes"),
        pytest.param("0s", "not more than zero", id="zero"),
    ],
)
def test_a_text_that_is_not_a_duration_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        pytest.param(None, "unknown", id="unknown"),
        pytest.param(0, "0B", id="nothing"),
        pytest.param(1023, "1023B", id="below the first unit"),
        pytest.param(512 * MIB, "512MiB", id="whole numbers have no decimal"),
        pytest.param(int(23.71 * GIB), "23.7GiB", id="three digits"),
        pytest.param(6 * GIB, "6GiB", id="no trailing zero"),
        pytest.param(-3 * TIB / 2, "-1.5TiB", id="what is missing"),
    ],
)
def test_bytes_are_written_as_readable_text(size_bytes: float | None, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        pytest.param(None, "unknown", id="unknown"),
        pytest.param(0.085, "85ms", id="below a second"),
        pytest.param(12.34, "12.3s", id="below a minute"),
        pytest.param(1.0, "1s", id="as a tag says it"),
        pytest.param(600, "10m", id="whole minutes"),
        pytest.param(7200, "2h", id="whole hours"),
        pytest.param(245.4, "4m 05s", id="below an hour"),
        pytest.param(7380, "2h 03m", id="hours"),
    ],
)
def test_seconds_are_written_as_readable_text(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0, "0J"),
        (850.4, "850J"),
        (999.4, "999J"),
        (999.6, "1kJ"),
        (12_440, "12.4kJ"),
        (3.1e6, "3.1MJ"),
    ],
)
def test_energy(joules: float, text: str) -> None:
    assert format_joules(joules) == text


@given(st.floats(0, 1e6))
def test_seconds_roll_over_to_the_next_unit_where_they_are_rounded(seconds: float) -> None:
    text = format_seconds(seconds)
    numbers = [float(number) for number in re.findall(r"[0-9.]+", text)]
    tops = {"ms": [1000], "s": [60], "m": [60], "m s": [60, 60], "h": [math.inf], "h m": [math.inf, 60]}  # fmt: skip
    units = " ".join(re.findall(r"[a-z]+", text))
    assert all(number < top for number, top in zip(numbers, tops[units], strict=True)), text


@given(st.integers(0, 2**50) | st.sampled_from([KIB, MIB, GIB, TIB]).map(lambda unit: unit - 1))
def test_bytes_roll_over_to_the_next_unit_where_they_are_rounded(size_bytes: int) -> None:
    text = format_bytes(size_bytes)
    assert float(text.rstrip("KMGTiB")) < 1024 or text.endswith("TiB"), text


def test_a_number_has_its_word() -> None:
    assert [counted(n, "task") for n in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]
    assert counted(2, "history", "histories") == "2 histories"
