"""Kills for want of the machine's memory, counted by the kernel and by control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_gpu.devices.oom_kills import OomKills
from tests.fakes.fake_proc import FakeProc


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def groups(proc: FakeProc, version: int, folder: Path) -> None:
    """Put this process into the group `slice/job` below a mount."""
    (folder / "slice" / "job").mkdir(parents=True)
    kind = "cgroup2 none rw" if version == 2 else "cgroup none rw,memory"
    number = "0::" if version == 2 else "4:memory:"
    proc.set_groups(f"{number}/slice/job\n", f"1 2 0:3 / {folder} rw - {kind}\n")


def test_the_machines_counter(proc: FakeProc) -> None:
    vmstat = proc.folder / "vmstat"
    vmstat.write_text("nr_free_pages 900\noom_kill 3\ndrop_pagecache 1\n")
    kills = OomKills(proc.folder)
    assert kills.read() == 3
    vmstat.write_text("nr_free_pages 900\noom_kill 4\ndrop_pagecache 1\n")
    assert kills.read() == 4


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        (2, "memory.events", "low 0\nhigh 9\nmax 7\noom 5\noom_kill {}\noom_group_kill 8\n"),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
)
def test_a_kill_in_our_group_or_in_one_above_it_raises_the_sum(
    proc: FakeProc, tmp_path: Path, version: int, name: str, text: str
) -> None:
    mount = tmp_path / "groups"
    groups(proc, version, mount)
    own, above, top = mount / "slice" / "job" / name, mount / "slice" / name, mount / name
    for file in (own, above, top):
        file.write_text(text.format(1))
    kills = OomKills(proc.folder)
    before = kills.read()
    for number, file in enumerate((own, above, top), start=1):
        file.write_text(text.format(2))
        assert kills.read() == before + number
    (mount / "slice" / "neighbour").mkdir()
    (mount / "slice" / "neighbour" / name).write_text(text.format(50))
    assert kills.read() == before + 3


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "oom_kill_disable 1\n"])
def test_what_is_not_there_counts_as_none(proc: FakeProc, text: str) -> None:
    assert OomKills(proc.folder).read() == 0
    (proc.folder / "vmstat").write_text(text)
    assert OomKills(proc.folder).read() == 0
