"""Faults of the ledger's files while it is in use: this process goes on alone, and says so once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from tests.unit.broker.test_ledger import all_of, entry, reserved


def ledger_of(folder: Path) -> Ledger:
    return Ledger(lambda: HostStore(folder, owners_s=0.0))


@pytest.mark.parametrize("how", ["the database", "all files", "the folder"])
def test_a_ledger_that_is_removed_while_in_use_is_given_up_by_all_who_had_it(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    mine = ledger_of(folder)
    assert mine.try_write(0, {"mine": entry("mine", reserved(by="mine"))})
    if how == "the folder":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        for path in folder.glob("ledger.db*" if how == "the database" else "*"):
            path.unlink()
    # Another process finds no file, and makes a new one.
    theirs = ledger_of(folder)
    assert theirs.try_write(0, {"theirs": entry("theirs", reserved(by="theirs"))})
    assert [r.request_id for r in all_of(mine.view())] == ["mine"]
    assert "was removed or replaced while in use" in mine.problem
    assert mine.try_write(mine.view().version, {"more": entry("more", reserved(by="more"))})
    mine.release("mine")
    (record,) = caplog.records
    assert "GPU tasks of other processes are not seen from now on" in record.getMessage()
    assert theirs.problem == ""
