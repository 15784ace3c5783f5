"""What a process does before its task is known: that it starts nothing, and sees what did."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import warming

_DRIVER = """
static int initialised = ANSWER;
int cuInit(unsigned flags) { initialised = 0; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialised; }
"""


def look(*lines: str) -> str:
    """What a fresh process says after some lines."""
    program = "\n".join(
        [*lines, "from prefect_gpu.processes import warming", "print(warming.find_touched())"]
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLOCK_S,
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for the driver is compiled")
@pytest.mark.parametrize(
    ("used", "says"),
    [
        pytest.param("", "", id="loaded and no more"),
        pytest.param("d.cuInit(0)", "the CUDA driver was initialised", id="initialised"),
    ],
)
def test_the_driver_is_asked_and_not_started(tmp_path: Path, used: str, says: str) -> None:
    source, library = tmp_path / "driver.c", tmp_path / warming.DRIVER_LIBRARY
    source.write_text(_DRIVER.replace("ANSWER", "3"))
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True
    )
    load = f"import ctypes; d = ctypes.CDLL({os.fspath(library)!r})"
    assert look(load, used).startswith(says) and bool(look(load, used)) == bool(says)


def test_a_driver_that_nobody_loaded_is_not_loaded() -> None:
    def never(name: str, mode: int) -> ctypes.CDLL:
        assert mode & os.RTLD_NOLOAD
        raise OSError

    assert warming.find_touched(never) == ""


def test_tensorflow_is_started_by_its_first_operation_and_not_by_its_import() -> None:
    pytest.importorskip("tensorflow")
    assert look("import tensorflow as tf") == ""
    assert "tensorflow was started" in look("import tensorflow as tf", "tf.zeros([1])")


def test_pytorch_on_the_cpu_starts_nothing() -> None:
    pytest.importorskip("torch")
    asks = "torch.cuda.is_available(), torch.cuda.device_count(), torch.ones(3).sum()"
    assert look("import torch", asks) == ""


def test_what_a_library_added_to_the_path_stays_when_the_parents_has_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "adds_to_path.py").write_text("import sys; sys.path.append('/added')")
    program = f"""
import sys
from prefect_gpu.processes import messages, warming
before = [{os.fspath(tmp_path)!r}, *sys.path]
sys.path[:] = before
warming.registry.is_users = lambda module: False
assert not warming.warm_up(["adds_to_path"]).failed
warming.catch_up(messages.Late({{}}, "", (), ("/new", *before), ""))
assert sys.path == ["/new", *before, "/added"], sys.path
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=True,
        timeout=DEADLOCK_S,
    )


def test_private_memory_grows_with_what_is_taken() -> None:
    before = warming.private_bytes()
    # From the kernel: the allocator may have as much that an earlier test has let go of.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(bytes(len(taken)))
        assert warming.private_bytes() - before > len(taken) // 2


def test_a_title_without_a_place_is_let_be() -> None:
    with open("/proc/self/cmdline", "rb") as file:
        before = file.read()
    warming.retitle("another")
    with open("/proc/self/cmdline", "rb") as file:
        assert file.read() == before
