from __future__ import annotations

import base64

from prefect_gpu.reports.markup import escape, image, percent, table


def test_escaped_text_is_one_bounded_line() -> None:
    assert escape("x" * 500) == "x" * 79 + "…"
    assert escape("a & b_c") == r"a &amp; b\_c"
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
