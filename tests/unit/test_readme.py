"""The README says what the code says."""

from pathlib import Path

from prefect_gpu.policy import tag_table_markdown

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_the_tag_table_of_the_parser() -> None:
    text = README.read_text(encoding="utf-8")
    table = text.partition("<!-- tags -->\n")[2].partition("<!-- /tags -->")[0]
    assert table.strip() == tag_table_markdown().strip()
