"""The samples of `docs/migrating.md` print what their last line says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.programs import REPOSITORY, Workplace, workplace

PAGE = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")

#: By heading: the samples below it.
SAMPLES = {
    section.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.M)
    for section in PAGE.split("\n## ")[1:]
}

#: What the samples import.
MY_PROJECT = """
BATCHES = [[1, 2], [3, 4], [5, 6], [7, 8]]
_options = {"speed": "default"}


class Model:
    def __init__(self, name):
        self.name, self.steps = name, 0

    def to(self, device):
        return self

    def score(self, batch):
        return len(self.name) * sum(batch)

    def train(self, data):
        self.steps += len(data)


def load_model(name):
    return Model(name)


def option():
    return _options["speed"]


def set_option(speed):
    _options["speed"] = speed
"""


def samples_that_import(module: str) -> list[object]:
    return [
        pytest.param(sample, id=f"{heading}-{at}")
        for heading, samples in SAMPLES.items()
        for at, sample in enumerate(samples)
        if re.search(rf"^(import|from) {module}\b", sample, re.M)
    ]


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        made.write("my_project.py", MY_PROJECT)
        yield made


def run(place: Workplace, sample: str) -> None:
    (wanted,) = re.findall(r"print\(.*\)  # (.*)$", sample, re.M)
    place.write("sample.py", sample)
    assert wanted in place.run("sample.py").stdout.splitlines()


def test_every_section_has_a_sample_of_what_to_write_now() -> None:
    assert len(samples_that_import("prefect_gpu")) == len(SAMPLES)


@pytest.mark.parametrize("sample", samples_that_import("prefect_gpu"))
def test_what_to_write_now(place: Workplace, sample: str) -> None:
    place.environment["PREFECT_INTEGRATIONS_GPU_DEVICES"] = "simulated:1x24GiB"
    run(place, sample)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sample",
    [*samples_that_import("multiprocessing"), *samples_that_import("prefect.task_runners")],
)
def test_what_was_written_before(place: Workplace, sample: str) -> None:
    run(place, sample)
