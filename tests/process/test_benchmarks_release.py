"""What a benchmark says it measured: a version and a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import _common
import pytest


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project without its git repository."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "7.8.9"\n', encoding="utf-8")
    monkeypatch.setattr(_common, "REPOSITORY", tmp_path)
    monkeypatch.delenv("PREFECT_GPU_COMMIT", raising=False)
    return tmp_path


def test_the_header_names_version_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_GPU_COMMIT", "0123abc")
    found = _common.versions()
    assert found["prefect-gpu"]
    assert found["commit"] == "0123abc"


def test_the_version_is_that_of_the_project_file_whatever_is_installed(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_GPU_COMMIT", "0123abc")
    assert _common.release() == ("7.8.9", "0123abc")


def test_a_copy_without_a_repository_takes_its_commit_from_the_environment(copied: Path) -> None:
    with pytest.raises(SystemExit, match="set PREFECT_GPU_COMMIT"):
        _common.release()


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *names, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_changes_that_are_not_committed_show_in_the_commit(copied: Path) -> None:
    git(copied, "init")
    git(copied, "add", ".")
    git(copied, "commit", "-m", "all of it")
    commit = git(copied, "rev-parse", "HEAD")
    assert _common.release() == ("7.8.9", commit)
    with (copied / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert _common.release() == ("7.8.9", f"{commit}+changes")
