from __future__ import annotations

import base64

import pytest

from prefect_gpu.reports.markup import NAME_CHARS, clean_name, escape, image, percent, table


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("évaluer 模型", "évaluer 模型", id="letters of any script stay"),
        pytest.param(
            "می\u200cخواهم 👩\u200d🔬",
            "می\u200cخواهم 👩\u200d🔬",
            id="joined letters and emoji stay",
        ),
        pytest.param("a\x00b", "a�b", id="NUL, which no argument of a process may have"),
        pytest.param("a\nb\tc", "a b c", id="line breaks"),
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


def test_escaped_text_is_one_bounded_line() -> None:
    assert escape("x" * 500) == "x" * 79 + "…"
    assert escape("a & b_c _d_ e__f") == r"a &amp; b_c \_d\_ e\_\_f"
    assert escape("see https://x.org") == "see https:/&#8203;/x.org"
    assert escape("two\nlines | <b>") == r"two lines \| &lt;b&gt;"


def test_an_image_contains_its_data() -> None:
    data = base64.b64encode(b"<svg/>").decode()
    assert image("a]b", "<svg/>") == rf"![a\]b](data:image/svg+xml;base64,{data})"


def test_a_table_aligns_numbers_to_the_right() -> None:
    text = table(("name", "size"), [("a", "1"), ("b", "2")], right=(1,))
    assert text.splitlines() == ["| name | size |", "| --- | --: |", "| a | 1 |", "| b | 2 |"]


def test_a_percentage_of_nothing_is_a_dash() -> None:
    assert percent(1, 3) == "33%"
    assert percent(1, 0) == "–"
