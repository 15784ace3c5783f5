"""Moves of a process by the driver's calls: in order, with each step failing, hanging, or losing the driver process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefect_gpu.suspension import driver_calls, driver_process
from prefect_gpu.suspension.driver_calls import (
    DriverCallError,
    DriverCalls,
    NotSuspendedError,
    ProcessLostError,
    move_in,
    move_out,
)
from tests.process.rig import eventually

FAKE = Path(__file__).parents[1] / "fakes" / "fake_driver.py"


class Scene:
    """A process that counts, and a fake driver."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.folder = folder
        self.calls = DriverCalls([sys.executable, str(FAKE), str(folder), *faults])
        self.process = subprocess.Popen(
            [sys.executable, "-uc", "import time\nwhile True: print(1); time.sleep(0.01)"],
            stdout=subprocess.DEVNULL,
        )
        self.pid = self.process.pid

    def stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def made(self) -> list[str]:
        path = self.folder / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        self.calls.close()
        self.process.kill()
        self.process.wait()


def there_and_back(one: Scene) -> None:
    move_out(one.calls, one.pid, 1 << 20)
    move_in(one.calls, one.pid, 1 << 20)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*faults: str) -> Scene:
        made.append(Scene(tmp_path, *faults))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_process_goes_to_the_host_and_comes_back(scene: Callable[..., Scene]) -> None:
    one = scene()
    assert one.calls.unsupported() == ""
    move_out(one.calls, one.pid, 1 << 20)
    assert eventually(one.stopped)
    move_in(one.calls, one.pid, 1 << 20, {"GPU-a": "GPU-b"})
    assert eventually(lambda: not one.stopped())
    assert one.made() == ["lock", "checkpoint", "restore", "unlock"]
    assert "restore GPU-a GPU-b" in (one.folder / "calls").read_text()


def test_a_failed_lock_leaves_the_process_as_it_was(scene: Callable[..., Scene]) -> None:
    one = scene("lock=600")
    with pytest.raises(NotSuspendedError, match=r"lock failed with 600 \(not in time\)"):
        move_out(one.calls, one.pid, 1 << 20)
    assert not one.stopped() and one.process.poll() is None
    # Nothing keeps it from being suspended later.
    move_out(one.calls, one.pid, 1 << 20)


@pytest.mark.parametrize("step", ["checkpoint", "restore", "unlock"])
def test_a_failed_move_loses_the_process(scene: Callable[..., Scene], step: str) -> None:
    one = scene(f"{step}=2")
    with pytest.raises(ProcessLostError, match=rf"{step} failed with 2 \(out of memory\)"):
        there_and_back(one)


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_a_move_that_hangs_loses_the_process(
    scene: Callable[..., Scene], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene(f"{step}=hang")
    assert not one.calls.unsupported()
    monkeypatch.setattr(driver_calls, "move_deadline_s", lambda used_bytes: 0.5)
    with pytest.raises(ProcessLostError, match=r"no answer after 0\.5s"):
        there_and_back(one)


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
def test_the_driver_process_is_killed_within_each_step(
    scene: Callable[..., Scene], step: str
) -> None:
    one = scene(f"{step}=die")
    move_out(one.calls, one.pid, 1 << 20)
    assert eventually(one.stopped)
    move_in(one.calls, one.pid, 1 << 20)
    assert eventually(lambda: not one.stopped())
    assert one.made() == ["lock", "checkpoint", "restore", "unlock"]


def test_a_machine_without_a_driver_says_so() -> None:
    calls = DriverCalls()
    try:
        why = calls.unsupported()
        if not why:
            pytest.skip("there is a driver that suspends")
        assert "driver" in why
        with pytest.raises(DriverCallError):
            calls.call("state", 1, deadline_s=20.0)
    finally:
        calls.close()


def test_an_old_driver_is_named(scene: Callable[..., Scene]) -> None:
    assert (
        scene("start=999").calls.unsupported() == "the CUDA driver cannot be used here (result 999)"
    )


def test_a_driver_process_that_cannot_start_is_named() -> None:
    calls = DriverCalls(["/nonexistent/python"])
    assert "cannot be started" in calls.unsupported()
    with pytest.raises(DriverCallError, match="cannot be started"):
        calls.call("lock", 1, deadline_s=1.0)


#: Four devices, whose UUIDs are one byte sixteen times. A restore succeeds with a whole permutation of them alone.
_DRIVER = """
#include <string.h>
struct pairs { unsigned char (*uuids)[2][16]; unsigned count; unsigned char rest[52]; };
int cuInit(unsigned flags) { return 0; }
int cuCheckpointProcessLock(int pid, void *arguments) { return 0; }
int cuDeviceGetCount(int *count) { *count = 4; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, device + 1, 16); return 0; }
int cuCheckpointProcessRestore(int pid, struct pairs *map) {
    if (!map) return 0;
    int seen = 0;
    for (unsigned i = 0; i < map->count; i++) seen += 1 << 4 * map->uuids[i][0][0];
    int swapped = map->uuids[0][1][0] == 2 && map->uuids[1][1][0] == 1 && map->uuids[2][1][0] == map->uuids[2][0][0];
    return map->count == 4 && seen == 0x11110 && swapped ? 0 : 1;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for the driver is compiled")
def test_the_driver_gets_a_map_of_all_devices_of_the_machine(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    driver = driver_process.CudaDriver(str(library))
    assert driver.start() == (0, 1)
    first, second = ("GPU-" + f"{number:02}" * 16 for number in (1, 2))
    assert driver.call("restore", 1, [first, second, second, first]) == (0, 0)
    assert driver.call("restore", 1, [first, second]) == (1, 0), "the second has no place"
    assert driver.call("restore", 1, []) == (0, 0)


def test_the_driver_process_sees_all_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("KEPT", "yes")
    told = tmp_path / "told"
    program = f"import os; open({str(told)!r}, 'w').write(os.getenv('KEPT') + str(os.getenv('CUDA_VISIBLE_DEVICES')))"
    assert "ended" in DriverCalls([sys.executable, "-c", program]).unsupported()
    assert told.read_text() == "yesNone"
