"""The host's memory, what control groups leave of it, and kills for lack of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.host import (
    HostMemory,
    HostReader,
    host_uuid,
    read_core_quota,
    read_host_available_bytes,
    read_host_memory,
    read_oom_kills,
)
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.units import GIB
from tests.fakes.fake_processes import FakeProcesses

MACHINE = HostMemory(total_bytes=64 * GIB, available_bytes=40 * GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SimpleNamespace(total=MACHINE.total_bytes, available=MACHINE.available_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: figures)


STAT = "anon 5\ninactive_file 300\nactive_file 7\ntotal_inactive_file 400\n"

#: Where the versions of control groups are mounted.
TOP = {1: "memory/", 2: ""}


def write(root: Path, cgroup: str, files: Mapping[str, object]) -> Path:
    """Write in which control groups this process is, and their files."""
    (root / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, value in files.items():
        file = root / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    return root


def v2(**values: object) -> tuple[str, Mapping[str, object]]:
    """Return the groups of this process, and files of its group, in version 2."""
    files = {f"job/memory.{name}": value for name, value in values.items()}
    return "0::/job\n", {"job/memory.stat": STAT, **files}


def v1(**values: object) -> tuple[str, Mapping[str, object]]:
    files = {f"memory/job/memory.{name}_in_bytes": value for name, value in values.items()}
    return "9:cpu:/x\n4:memory:/job\n0::/\n", {"memory/job/memory.stat": STAT, **files}


@pytest.mark.parametrize(
    ("groups", "total_bytes", "available_bytes"),
    [
        pytest.param(v2(max=1000, high="max", current=800), 1000, 500, id="page cache counts as free"),
        pytest.param(v2(max=1000, high=900, current=800), 900, 400, id="the high limit"),
        pytest.param(v2(max=1000, current=2000), 1000, 0, id="more than the limit is used"),
        pytest.param(v2(max="max", high="max", current=800), 64 * GIB, 40 * GIB, id="no limit"),
        pytest.param(v2(), 64 * GIB, 40 * GIB, id="no files"),
        pytest.param(v1(limit=1000, usage=800), 1000, 600, id="version 1"),
        pytest.param(v1(limit=9223372036854771712, usage=800), 64 * GIB, 40 * GIB, id="version 1 without a limit"),
        pytest.param(v1(), 64 * GIB, 40 * GIB, id="no files of version 1"),
        pytest.param(("", {}), 64 * GIB, 40 * GIB, id="no groups"),
        pytest.param(("0::/slice/job\n", {"slice/job/memory.max": 8 * GIB, "slice/memory.max": 4 * GIB}), 4 * GIB, 4 * GIB, id="an ancestor's limit is less"),
        pytest.param(("0::/job\n", {"memory.max": 60 * GIB}), 60 * GIB, 40 * GIB, id="the machine has less available than its group allows"),
        pytest.param(("4:cpu,memory:/a\n0::/b\n", {"memory/a/memory.limit_in_bytes": 8 * GIB, "b/memory.max": 4 * GIB}), 4 * GIB, 4 * GIB, id="both versions"),
        pytest.param(("4:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": 8 * GIB}), 8 * GIB, 8 * GIB, id="a container that sees its own part of the tree"),
        pytest.param(("0::/../../elsewhere\n", {"memory.max": 8 * GIB}), 8 * GIB, 8 * GIB, id="a group outside of the namespace"),
    ],
)  # fmt: skip
def test_the_least_bound_of_all_groups_holds(
    machine: None,
    tmp_path: Path,
    groups: tuple[str, Mapping[str, object]],
    total_bytes: int,
    available_bytes: int,
) -> None:
    expected = HostMemory(total_bytes, available_bytes)
    assert read_host_memory(write(tmp_path, *groups)) == expected


def test_the_hosts_figures_are_psutils(tmp_path: Path) -> None:
    memory = read_host_memory(tmp_path)
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.available_bytes > 0 and read_host_available_bytes() > 0


@pytest.mark.parametrize(
    ("hostname", "uuid"),
    [
        ("node-3.example.org", "HOST-node-3-example-org"),
        ("büro rechner_", "HOST-b-ro-rechner"),
        ("", "HOST-localhost"),
    ],
)
def test_host_uuid(hostname: str, uuid: str) -> None:
    assert host_uuid(hostname) == uuid


def test_the_host_is_one_device(tmp_path: Path) -> None:
    processes, clock = FakeProcesses(), FakeClock()
    processes.add(100, used_bytes=2)
    machine = MACHINE
    reader = HostReader("node", lambda: machine, ProcessTable(processes, clock), clock)
    (device,) = reader.devices()
    (snapshot,) = reader.read([100])

    assert (device.uuid, device.index, device.kind, device.host) == ("HOST-node", 0, "host", "node")
    assert device.total_bytes == 64 * GIB
    assert (snapshot.at_s, snapshot.free_bytes) == (1000.0, 40 * GIB)
    assert [(use.pid, use.root_pid) for use in snapshot.processes] == [(100, 100)]

    # Memory that is plugged in later: the device stays as it was listed.
    machine = HostMemory(128 * GIB, 100 * GIB)
    assert reader.devices() == (device,)
    assert reader.read(())[0].free_bytes == 64 * GIB


# Kills for lack of memory, counted by the kernel and by control groups.


def test_the_machines_counter(tmp_path: Path) -> None:
    write(tmp_path, "", {})
    vmstat = tmp_path / "proc" / "vmstat"
    vmstat.write_text("nr_free_pages 900\noom_kill 3\ndrop_pagecache 1\n")
    assert read_oom_kills(tmp_path) == 3
    vmstat.write_text("nr_free_pages 900\noom_kill 4\ndrop_pagecache 1\n")
    assert read_oom_kills(tmp_path) == 4


@pytest.mark.parametrize(
    ("version", "cgroup", "name", "text"),
    [
        (2, "0::/slice/job\n", "memory.events", "low 0\nhigh 9\nmax 7\noom 5\noom_kill {}\noom_group_kill 8\n"),
        (1, "4:memory:/slice/job\n", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
)  # fmt: skip
def test_a_kill_in_our_group_or_in_one_above_it_raises_the_sum(
    tmp_path: Path, version: int, cgroup: str, name: str, text: str
) -> None:
    files = [f"{TOP[version]}{group}{name}" for group in ("slice/job/", "slice/", "")]
    write(tmp_path, cgroup, dict.fromkeys(files, text.format(1)))
    before = read_oom_kills(tmp_path)
    for number, file in enumerate(files, start=1):
        write(tmp_path, cgroup, {file: text.format(2)})
        assert read_oom_kills(tmp_path) == before + number
    write(tmp_path, cgroup, {f"{TOP[version]}slice/neighbour/{name}": text.format(50)})
    assert read_oom_kills(tmp_path) == before + 3


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "oom_kill_disable 1\n"])
def test_what_is_not_there_counts_as_none(tmp_path: Path, text: str) -> None:
    assert read_oom_kills(tmp_path) == 0
    write(tmp_path, "", {})
    (tmp_path / "proc" / "vmstat").write_text(text)
    assert read_oom_kills(tmp_path) == 0


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        pytest.param("", {}, math.inf, id="no groups"),
        pytest.param("0::/job\n", {"job/cpu.max": "max 100000"}, math.inf, id="no limit"),
        pytest.param("0::/job\n", {"job/cpu.max": "150000 100000"}, 1.5, id="one and a half cores"),
        pytest.param("0::/slice/job\n", {"slice/job/cpu.max": "max 100000", "slice/cpu.max": "400000 100000"}, 4.0, id="an ancestor's limit holds"),
        pytest.param("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": 200000, "cpu/job/cpu.cfs_period_us": 100000}, 2.0, id="version 1"),
        pytest.param("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": -1, "cpu/job/cpu.cfs_period_us": 100000}, math.inf, id="version 1 without a limit"),
        pytest.param("0::/job\n", {"job/cpu.max": "nonsense"}, math.inf, id="what is no quota"),
    ],
)  # fmt: skip
def test_core_quotas(
    tmp_path: Path, cgroup: str, files: Mapping[str, object], cores: float
) -> None:
    assert read_core_quota(write(tmp_path, cgroup, files)) == cores
