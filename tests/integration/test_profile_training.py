"""The profiling flow, at its smallest, as a user runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.programs import REPOSITORY, Workplace, workplace

pytest.importorskip("torch", reason="torch is not installed")

SMALL = ("--batch", "2", "--hidden", "8", "--vocabulary", "50", "--length", "4")
PHASES = ["zero_grad", "forward", "loss", "backward", "step"]


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        yield made


@pytest.mark.slow
def test_it_prints_the_phases_of_its_report(place: Workplace) -> None:
    script = str(REPOSITORY / "flows" / "profile_training.py")
    done = place.run(script, "--devices", "host", "--device-memory", "1GiB", *SMALL)
    lines = done.stdout.splitlines()
    headline = next(line for line in lines if line.startswith("Completed in "))
    assert headline.endswith("%).") and "of its 1GiB budget" in headline
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert cells[0][:3] == ["step", "phase", "allocated"] and cells[0][-2:] == ["process", "took"]
    phases = [(row[0], row[1]) for row in cells[2:]]
    assert phases == [("0", "model"), *((str(i), name) for i in range(3) for name in PHASES)]
    # Nobody counts what PyTorch allocates on a processor, and it is not made up.
    assert {size for row in cells[2:] for size in row[2:6]} == {"unknown"}
    assert any("No GPU took part" in line for line in lines)
    losses = next(line for line in lines if line.startswith("loss by step: "))
    assert len([float(loss) for loss in losses.partition(": ")[2].split(", ")]) == 3
