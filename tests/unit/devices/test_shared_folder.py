"""A folder that processes of several users share."""

from __future__ import annotations

from pathlib import Path

from prefect_gpu.devices.shared_folder import SharedFolder


def test_a_name_that_leads_elsewhere_removes_no_file_there(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    precious = tmp_path / "precious.lock"
    precious.touch()
    folder = SharedFolder(tmp_path / "shared")
    assert not folder.is_held("../precious.lock")
    assert not folder.is_held(str(precious))
    assert precious.exists()


def test_a_file_that_is_held_stays_and_another_is_removed(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    hold = folder.hold("a")
    assert hold is not None and folder.is_held("a")
    hold.release()
    assert not folder.is_held("a")
    assert not (tmp_path / "a").exists()
