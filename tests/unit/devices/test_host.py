"""The host's memory, what control groups leave of it, and kills for lack of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.host import (
    GroupFolder,
    GroupMemory,
    HostMemory,
    HostMemoryReader,
    HostReader,
    OomKills,
    bound_by_groups,
    host_uuid,
    parse_group_folders,
    parse_group_v1,
    parse_group_v2,
    read_host_available_bytes,
)
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.units import GIB, MIB
from tests.fakes.fake_proc import FakeProc
from tests.fakes.fake_processes import FakeProcesses

MACHINE = HostMemory(total_bytes=64 * GIB, available_bytes=40 * GIB)

V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
OTHER = (
    "22 27 0:21 / /proc rw shared:4 - proc proc rw\n32 31 0:29 / /cpu rw - cgroup cgroup rw,cpu\n"
)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "paths"),
    [
        pytest.param(
            "0::/user.slice/job\n",
            OTHER + V2,
            ["/sys/fs/cgroup/user.slice/job", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"],
            id="version 2: the group and its ancestors",
        ),
        pytest.param(
            "9:cpu:/x\n4:memory:/docker/abc\n0::/\n",
            OTHER + V1,
            [
                "/sys/fs/cgroup/memory/docker/abc",
                "/sys/fs/cgroup/memory/docker",
                "/sys/fs/cgroup/memory",
            ],
            id="version 1",
        ),
        pytest.param(
            "4:cpu,memory:/a\n0::/\n",
            V1 + V2,
            ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory", "/sys/fs/cgroup"],
            id="both",
        ),
        pytest.param(
            "4:memory:/docker/abc/in\n",
            V1.replace("0:32 /", "0:32 /docker/abc"),
            ["/sys/fs/cgroup/memory/in", "/sys/fs/cgroup/memory"],
            id="a container that sees its own part of the tree",
        ),
        pytest.param(
            "0::/../../elsewhere\n",
            V2,
            ["/sys/fs/cgroup"],
            id="a group outside of the namespace",
        ),
        pytest.param(
            "0::/a\n",
            V2.replace("/sys/fs/cgroup", "/my\\040groups"),
            ["/my groups/a", "/my groups"],
            id="a mount point with a space",
        ),
        pytest.param("", V2, [], id="no groups"),
        pytest.param("0::/a\nnonsense\n", "\n1 2\nnonsense - \n", [], id="no mounts"),
    ],
)
def test_group_folders(cgroup: str, mounts: str, paths: list[str]) -> None:
    assert [str(folder.path) for folder in parse_group_folders(cgroup, mounts)] == paths


def test_group_folders_know_their_version() -> None:
    folders = parse_group_folders("4:memory:/\n0::/\n", V1 + V2)
    assert folders == (
        GroupFolder(Path("/sys/fs/cgroup/memory"), 1),
        GroupFolder(Path("/sys/fs/cgroup"), 2),
    )


STAT = "anon 5\ninactive_file 300\nactive_file 7\ntotal_inactive_file 400\n"


@pytest.mark.parametrize(
    ("group", "available_bytes"),
    [
        (parse_group_v2("1000\n", "max\n", "800\n", STAT), 500),
        (parse_group_v2("1000\n", "900\n", "800\n", STAT), 400),
        (parse_group_v2("1000\n", "", "2000\n", ""), 0),
        (parse_group_v2("max\n", "max\n", "800\n", STAT), None),
        (parse_group_v2("", "", "", ""), None),
        (parse_group_v1("1000\n", "800\n", STAT), 600),
        (parse_group_v1("9223372036854771712\n", "800\n", STAT), None),
        (parse_group_v1("", "", ""), None),
    ],
)
def test_what_a_group_leaves(group: GroupMemory, available_bytes: int | None) -> None:
    assert group.available_bytes == available_bytes


@pytest.mark.parametrize(
    ("groups", "memory"),
    [
        ([], MACHINE),
        ([GroupMemory(None)], MACHINE),
        ([GroupMemory(8 * GIB, 3 * GIB, GIB)], HostMemory(8 * GIB, 6 * GIB)),
        ([GroupMemory(8 * GIB), GroupMemory(4 * GIB)], HostMemory(4 * GIB, 4 * GIB)),
        ([GroupMemory(60 * GIB)], HostMemory(60 * GIB, 40 * GIB)),
    ],
)
def test_the_least_bound_holds(groups: list[GroupMemory], memory: HostMemory) -> None:
    assert bound_by_groups(MACHINE, groups) == memory


@pytest.mark.parametrize(
    ("version", "files", "memory"),
    [
        (
            2,
            {"memory.max": 8 * GIB, "memory.current": GIB, "memory.stat": f"inactive_file {MIB}"},
            HostMemory(8 * GIB, 7 * GIB + MIB),
        ),
        (
            1,
            {"memory.limit_in_bytes": 8 * GIB, "memory.usage_in_bytes": GIB},
            HostMemory(8 * GIB, 7 * GIB),
        ),
    ],
)
def test_groups_are_read_from_files(
    tmp_path: Path, version: int, files: dict[str, object], memory: HostMemory
) -> None:
    proc = FakeProc(tmp_path / "proc")
    mount = tmp_path / "groups"
    (mount / "job").mkdir(parents=True)
    kind = "cgroup2 none rw" if version == 2 else "cgroup none rw,memory"
    proc.set_groups(
        "0::/job\n" if version == 2 else "4:memory:/job\n", f"1 2 0:3 / {mount} rw - {kind}\n"
    )
    for name, value in files.items():
        (mount / "job" / name).write_text(f"{value}\n")

    assert HostMemoryReader(proc.folder, lambda: MACHINE).read() == memory


def test_the_hosts_figures_are_psutils(tmp_path: Path) -> None:
    memory = HostMemoryReader(tmp_path).read()
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.available_bytes > 0


def test_this_machine_has_memory_available() -> None:
    assert read_host_available_bytes() > 0


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
    reader = HostReader(
        "node",
        HostMemoryReader(tmp_path / "absent", lambda: machine),
        ProcessTable(processes, clock),
        clock,
    )
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
