from __future__ import annotations

import base64

import pytest

from prefect_gpu.reports.markup import NAME_CHARS, clean_name, escape, image, percent, table

JOINED = "می\u200cخواهم 👩\u200d🔬"
NAMES = {
    "letters of any script stay": ("évaluer 模型", "évaluer 模型"),
    "joined letters and emoji stay": (JOINED, JOINED),
    "NUL, which no argument of a process may have": ("a\x00b", "a�b"),
    "line breaks": (" a\nb\tc", "a b c"),
    "a lone surrogate, which cannot be encoded": ("a\ud800", "a�"),
    "a mark that reverses text": ("a\u202eb", "a�b"),
    "nothing": ("", ""),
    "the longest name": ("x" * NAME_CHARS, "x" * NAME_CHARS),
    "a longer name": ("x" * 200_000, "x" * (NAME_CHARS - 1) + "…"),
}


@pytest.mark.parametrize(("name", "shown"), NAMES.values(), ids=NAMES)
def test_a_name_is_shown_and_encoded(name: str, shown: str) -> None:
    assert clean_name(name) == shown
    clean_name(name).encode()


def test_escaped_text_is_one_bounded_line() -> None:
    assert escape("x" * 500) == "x" * 79 + "…"
    assert escape("a & b_c _d_ e__f") == r"a &amp; b_c \_d\_ e\_\_f"
    assert escape("see https://x.org") == "see https:/&#8203;/x.org"
    assert escape("two\nlines | <b>") == r"two lines \| &lt;b&gt;"


def test_an_image_contains_its_data() -> None:
    data = base64.b64encode(b"<svg/>").decode()
    assert image("a]b", "<svg/>") == rf"![a\]b](data:image/svg+xml;base64,{data})"


def test_a_table_aligns_numbers_to_the_right_and_a_percentage_of_nothing_is_a_dash() -> None:
    text = table(("name", "size"), [("a", percent(1, 3)), ("b", percent(1, 0))], right=(1,))
    assert text.splitlines() == ["| name | size |", "| --- | --: |", "| a | 33% |", "| b | – |"]
