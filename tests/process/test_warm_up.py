"""A process before its task is known: it starts nothing, and reports what an import has started."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_gpu.child import warm_up
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices import cuda_driver
from prefect_gpu.process_resources import read_own_bytes
from tests.cases import needs

_DRIVER = """
static int initialised = ANSWER;
int cuInit(unsigned flags) { initialised = 0; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialised; }
"""


def report(*lines: str) -> str:
    """What a fresh process reports after some lines."""
    program = "\n".join(
        [
            *lines,
            "from prefect_gpu.child import warm_up",
            "print(warm_up.find_started())",
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
        timeout=4 * DEADLOCK_S,  # to import TensorFlow takes half a minute on a busy machine
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for the driver is compiled")
@pytest.mark.parametrize(
    ("used", "says"),
    [
        pytest.param("", "", id="loaded and no more"),
        pytest.param("d.cuInit(0)", "the CUDA driver was initialised", id="initialised"),
    ],
)
def test_the_driver_is_reported_only_if_it_was_initialised(
    tmp_path: Path, used: str, says: str
) -> None:
    source, library = tmp_path / "driver.c", tmp_path / cuda_driver.DRIVER_LIBRARY
    source.write_text(_DRIVER.replace("ANSWER", "3"))
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True
    )
    load = f"import ctypes; d = ctypes.CDLL({os.fspath(library)!r})"
    assert report(load, used).startswith(says) and bool(report(load, used)) == bool(says)


def test_a_driver_that_is_not_loaded_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str, mode: int) -> ctypes.CDLL:
        assert mode & os.RTLD_NOLOAD
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", never)
    assert warm_up.find_started() == ""


@needs("tensorflow")
def test_tensorflow_is_reported_after_its_first_operation_and_not_after_its_import() -> None:
    # In one process, for TensorFlow takes seconds to import.
    first = "from prefect_gpu.child.warm_up import find_started; first = find_started()"
    found = report("import tensorflow as tf", first, "tf.zeros([1])", "print([first])")
    assert found.startswith("['']\n") and "tensorflow was started" in found


@needs("torch")
def test_pytorch_on_the_cpu_is_not_reported() -> None:
    asks = "torch.cuda.is_available(), torch.cuda.device_count(), torch.ones(3).sum()"
    assert report("import torch", asks) == ""


def test_a_path_that_a_library_added_is_kept_when_the_parents_paths_have_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "adds_to_path.py").write_text("import sys; sys.path.append('/added')")
    program = f"""
import os, sys
from prefect_gpu.processes import messages
from prefect_gpu.child import warm_up
before = [{os.fspath(tmp_path)!r}, *sys.path]
sys.path[:] = before
warm_up.registry.is_users = lambda module: False
assert not warm_up.warm_up(["adds_to_path"]).failed
warm_up.become_task_process(messages.Late({{}}, "", (), ("/new", *before)), os.getppid())
assert sys.path == ["/new", *before, "/added"], sys.path
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=True,
        timeout=DEADLOCK_S,
    )


def test_private_memory_grows_with_an_allocation() -> None:
    before = read_own_bytes("RssAnon")
    # From the kernel: the allocator may have as much that an earlier test has let go of.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(bytes(len(taken)))
        assert read_own_bytes("RssAnon") - before > len(taken) // 2
