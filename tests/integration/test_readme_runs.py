"""What the README tells a newcomer to type runs as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_gpu.cli.commands import main
from tests.integration.programs import REPOSITORY, Workplace, workplace

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        yield made


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs_in_its_order(place: Workplace) -> None:
    calls = 'print("RESULT", evaluate_all(["a", "b"]), rehearsal())'
    place.write("readme.py", "\n\n".join([*blocks(README, "python"), calls]))
    environment = {"PREFECT_INTEGRATIONS_GPU_DEVICES": "simulated:1x8GiB"}
    assert "RESULT [None, None] None" in place.run("readme.py", environment=environment).stdout


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_commands_that_documents_name_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8")
    written = re.findall(r"(?:^|[\s`$])prefect-gpu ([a-z]\w*)((?: --[a-z-]+)*)", text, re.MULTILINE)
    for command, options in written:
        assert main([command, "--help"]) == 0, f"{page.name}: prefect-gpu {command}"
        shown = capsys.readouterr().out
        assert all(option in shown for option in options.split()), f"{command}{options}"
    for script in re.findall(r"python ((?:flows|benchmarks)/\w+\.py)", text):
        assert (REPOSITORY / script).is_file(), f"{page.name}: {script}"
