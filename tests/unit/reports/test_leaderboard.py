"""Leaderboards: the order of rows, and the page."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.reports.leaderboard import MOST_ROWS, LeaderboardRow, leaderboard_markdown, rank
from prefect_gpu.units import GIB

ROWS = [
    LeaderboardRow("slow", 0.9, 20.0, 2 * GIB, "NVIDIA H200"),
    LeaderboardRow("quick", 0.9, 10.0, 3 * GIB, "NVIDIA H200"),
    LeaderboardRow("broken", None, 1.0, GIB, problem="out of memory"),
    LeaderboardRow("odd", math.nan),
    LeaderboardRow("best", 0.95, None, 1 * GIB, "NVIDIA H200"),
]


def test_the_best_is_first_the_quicker_of_equals_before_and_what_has_no_number_last() -> None:
    assert [row.name for row in rank(ROWS, False)] == ["best", "quick", "slow", "broken", "odd"]
    assert [row.name for row in rank(ROWS, True)][:3] == ["quick", "slow", "best"]


def plot(text: str) -> str:
    found = re.search(r"base64,([^)]*)\)", text)
    return base64.b64decode(found[1]).decode() if found else ""


def test_a_person_reads_the_best_one_first_and_why_another_has_no_place() -> None:
    text = leaderboard_markdown(rank(ROWS, False), "accuracy")
    assert text.startswith("**Best: best, accuracy 0.95, with 1GiB.**")
    assert "| 2 | quick | 0.9 | 10s | 3GiB | NVIDIA H200 |" in text
    assert "| 4 | broken | out of memory | 1s | 1GiB |  |" in text
    drawn = plot(text)
    assert all(f"{at} {name}" in drawn for at, name in enumerate(("best", "quick", "slow"), 1))
    assert "broken" not in drawn


def test_the_use_of_the_gpu_is_shown_where_a_row_has_it() -> None:
    assert "GPU computed" not in leaderboard_markdown(ROWS, "accuracy")
    rows = [replace(ROWS[0], busy_fraction=0.034), replace(ROWS[1], energy_j=1234.0), ROWS[3]]
    text = leaderboard_markdown(rows, "accuracy")
    assert "| # | name | accuracy | time | peak memory | GPU computed | energy | device |" in text
    assert "| 1 | slow | 0.9 | 20s | 2GiB | 3% |  | NVIDIA H200 |" in text
    assert "| 2 | quick | 0.9 | 10s | 3GiB |  | 1.2kJ | NVIDIA H200 |" in text


def test_nothing_to_show_is_said() -> None:
    assert "No entry has a value" in leaderboard_markdown([], "loss")
    assert plot(leaderboard_markdown(ROWS[:1], "loss")) == "", "one point shows nothing"


def test_names_cannot_break_the_table() -> None:
    text = leaderboard_markdown([LeaderboardRow("a|b\n<i>", 1.0)], "m|x")
    assert "a\\|b" in text and "<i>" not in text and "m\\|x" in text


ANY_ROW = st.builds(
    LeaderboardRow,
    st.text("xyz|<é", max_size=8),
    st.none() | st.floats() | st.sampled_from([0.0, 1.7e308, -1.7e308]),
    st.none() | st.floats(0, 1e6),
    st.none() | st.integers(0, 2**50),
)


@given(st.lists(ANY_ROW, max_size=8), st.booleans())
def test_any_rows_are_drawn_and_none_is_lost(rows: list[LeaderboardRow], smaller: bool) -> None:
    ranked = rank(rows, smaller)
    assert len(ranked) == len(rows)
    text = leaderboard_markdown(ranked, "score")
    assert not re.search("nan|inf", plot(text), re.IGNORECASE)


def test_a_long_leaderboard_is_cut_and_says_so() -> None:
    rows = [LeaderboardRow(str(n), float(n)) for n in range(MOST_ROWS + 7)]
    assert "7 more are left out." in leaderboard_markdown(rank(rows, False), "n")
