"""What is known of a task when it is submitted."""

from __future__ import annotations

import pytest

from prefect_gpu.runner.task_plan import NAME_CHARS, clean_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("évaluer 模型", "évaluer 模型", id="letters of any script stay"),
        pytest.param("a\x00b", "a�b", id="NUL, which no argument of a process may have"),
        pytest.param("a\nb\tc", "a�b�c", id="line breaks"),
        pytest.param("a\ud800", "a�", id="a lone surrogate, which cannot be encoded"),
        pytest.param("a\u202eb", "a�b", id="a mark that reverses what follows"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_a_name_is_shown_and_encoded(name: str, shown: str) -> None:
    assert clean_name(name) == shown
    clean_name(name).encode()


def test_a_long_name_is_cut() -> None:
    assert clean_name("x" * NAME_CHARS) == "x" * NAME_CHARS
    assert clean_name("x" * 200_000) == "x" * (NAME_CHARS - 1) + "…"
