"""Whether a CUDA context was destroyed, asked of a stand-in for the driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.cuda_driver import DRIVER_LIBRARY, loaded_driver, unbound_by_captures
from prefect_gpu.processes import mps
from tests.process.rig import Rig

#: Two devices. `create` and `destroy` are for the test; everything else is the driver's.
_DRIVER = """
#include <unistd.h>
static unsigned long long ids[2], made; static int failing, users[2];
int create(int device) { ids[device] = ++made; users[device] = 1; return 0; }
int destroy(int device) { ids[device] = 0; return 0; }
int fail(int answer) { failing = answer; return 0; }
int count_users(int device) { return users[device]; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal > 1 ? 101 : 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *active = ids[device] != 0; return failing; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (!ids[device]) create(device); else users[device]++;
  *context = &ids[device]; return 0; }
static __thread int mode;
int mode_now() { return mode; }
int cuThreadExchangeStreamCaptureMode(int *other) {
  int before = mode; if (failing) return failing; mode = *other; *other = before; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { users[device]--; return 0; }
static int answer; int break_with(int code) { answer = code; return 0; }
static __thread int pushed; int count_pushed() { return pushed; }
int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
int cuCtxPushCurrent_v2(void *context) { pushed++; return 0; }
int cuCtxPopCurrent_v2(void **context) { pushed--; return 0; }
int cuStreamQuery(void *stream) { return pushed ? answer : 201; }
int cuGetErrorName(int code, const char **name) {
  *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_ASSERT";
  return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = pushed ? 5 : 0; return answer; }
#ifdef WITH_IDS
int cuCtxGetId(void *context, unsigned long long *id) { *id = *(unsigned long long *)context; return 0; }
#endif
"""


def _compile(folder: Path, *options: str) -> str:
    source, library = folder / "driver.c", folder / DRIVER_LIBRARY
    source.write_text(_DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *options, "-o", library, source],
        check=True,
    )
    return os.fspath(library)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the stand-in for the driver."""
    if shutil.which("cc") is None:
        pytest.skip("a stand-in for the driver is compiled")
    return _compile(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def library_with_ids(library: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the stand-in for a driver that numbers its contexts."""
    return _compile(tmp_path_factory.mktemp("driver"), "-DWITH_IDS")


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        pytest.param(["see()", "d.create(0)", "see()", "see()"], False, id="a first context"),
        pytest.param(["d.create(0)", "see()", "d.create(1)", "see()"], False, id="two devices"),
        pytest.param(["d.create(1)", "see()", "d.destroy(1)", "see()"], True, id="destroyed"),
        pytest.param(
            ["d.create(0)", "see()", "d.destroy(0)", "d.create(0)", "see()"],
            True,
            id="destroyed, and another one made before the next reading",
        ),
        pytest.param(
            ["d.create(0)", "see()", "d.destroy(0)", "see()", "d.create(0)", "see()"],
            True,
            id="what is lost stays lost",
        ),
        pytest.param(
            ["d.create(0)", "see()", "d.fail(1)", "d.destroy(0)", "see()"],
            False,
            id="the driver does not answer",
        ),
    ],
)
def test_a_context_that_was_destroyed_is_seen(
    library_with_ids: str, lines: list[str], lost: bool
) -> None:
    assert _report(library_with_ids, lines) == f"{lost} [1, 1]"


def test_a_driver_without_ids_says_nothing(library: str) -> None:
    lines = ["d.create(0)", "see()", "d.destroy(0)", "see()"]
    assert _report(library, lines) == "False [1, 1]"


def test_a_thread_is_unbound_by_captures_for_a_while(library: str) -> None:
    lines = [
        "from prefect_gpu.devices.cuda_driver import unbound_by_captures",
        "seen = []",
        "try:",
        "    with unbound_by_captures() as unbound:",
        "        seen += [unbound, d.mode_now()]",
        "        raise ValueError",
        "except ValueError: pass",
        "seen.append(d.mode_now())",
        "d.fail(1)",
        "with unbound_by_captures() as unbound: seen += [unbound, d.mode_now()]",
        "print(seen)",
    ]
    assert _report(library, lines).splitlines()[0] == "[True, 2, 0, False, 0]"


def test_the_free_memory_of_a_context(library: str) -> None:
    lines = [
        "from prefect_gpu.devices.cuda_driver import free_bytes",
        "seen = [free_bytes()]",
        "d.create(0)",
        "seen += [free_bytes(), d.count_pushed()]",
        "d.break_with(700)",
        "print([*seen, free_bytes(), d.count_pushed()])",
    ]
    assert _report(library, lines).splitlines()[0] == "[None, 5, 0, None, 0]"


def test_without_a_driver_a_thread_is_bound() -> None:
    if loaded_driver() is not None:
        pytest.skip("this process has loaded a driver")
    with unbound_by_captures() as unbound:
        assert unbound is False


def _break(library: str, code: int, message: str) -> str:
    """End the device's context as a fault does, and raise an error without the fault's name unless `message` is empty."""
    driver = ctypes.CDLL(library)
    driver.create(0)
    driver.break_with(code)
    if message:
        raise RuntimeError(message)
    return f"pushed: {driver.count_pushed()}"


def _go_on(library: str, server: int) -> bool:
    """Go on after a failed assertion; return whether the server ends meanwhile."""
    driver = ctypes.CDLL(library)
    driver.create(0)
    driver.break_with(710)
    deadline = time.monotonic() + DEADLOCK_S
    while psutil.Process(server).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    return time.monotonic() < deadline


def _hang(library: str) -> None:
    """Wait in the driver after the end of the MPS server."""
    driver = ctypes.CDLL(library)
    driver.create(0)
    driver.break_with(719)
    time.sleep(DEADLOCK_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in for the server of a daemon that a flow has started, and for the control program, which names it."""
    with subprocess.Popen(["sleep", "600"]) as started:
        (tmp_path / "keeper").touch()
        (tmp_path / mps.CONTROL).write_text(f"#!/bin/sh\necho {started.pid}\n")
        (tmp_path / mps.CONTROL).chmod(0o755)
        yield started
        started.kill()


@pytest.mark.parametrize(
    ("code", "message", "is_client", "expected"),
    [
        # cuDNN's text says nothing of what its context has met.
        (
            700,
            "EXECUTION_FAILED",
            True,
            "The device's context ended with CUDA_ERROR_ILLEGAL_ADDRESS.",
        ),
        (
            700,
            "EXECUTION_FAILED",
            False,
            "The device's context ended with CUDA_ERROR_ILLEGAL_ADDRESS.",
        ),
        (710, "failed", True, "The device's context ended with CUDA_ERROR_ASSERT."),
        # A body that catches the error must not return what it makes without a device.
        (700, "", True, "The device's context ended with CUDA_ERROR_ILLEGAL_ADDRESS."),
        (700, "", False, None),
        # An assertion is the task's own.
        (710, "", True, None),
        (0, "", True, None),
        # Kernels still run.
        (600, "", True, None),
        (2, "out of memory", True, ""),
    ],
)
def test_an_error_says_how_the_context_ended(
    rig: Rig,
    library: str,
    tmp_path: Path,
    server: subprocess.Popen[bytes],
    code: int,
    message: str,
    is_client: bool,
    expected: str | None,
) -> None:
    pipes = os.fspath(tmp_path / "pipe")
    environment: dict[str, str | None] = {}
    if is_client:
        environment |= mps.client_environment(pipes, None, None)
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    child = rig.start(_break, library, code, message, environment=environment)
    if expected is None:
        assert child.value() == "pushed: 0"
    else:
        with pytest.raises(RuntimeError, match=message or "failed while the task ran") as caught:
            child.value()
        assert "".join(getattr(caught.value, "__notes__", ())) == expected
        assert mps.is_fault(expected) is (code == 700)
    child.exit()
    # After an assertion the kernels of other clients may hang for good.
    if is_client and code == 710:
        assert server.wait(DEADLOCK_S) == -signal.SIGKILL
    else:
        assert server.poll() is None


def test_the_server_is_ended_while_a_body_goes_on_after_its_assertion(
    rig: Rig, library: str, tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    environment = mps.client_environment(os.fspath(tmp_path / "pipe"), None, None)
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    child = rig.start(_go_on, library, server.pid, environment=environment)
    assert child.value() is True
    child.exit()


def test_a_client_that_hangs_after_a_fault_is_ended(rig: Rig, library: str, tmp_path: Path) -> None:
    environment = mps.client_environment(os.fspath(tmp_path / "pipe"), None, None)
    child = rig.start(_hang, library, environment=environment)
    # A body that has ended by itself gets an error, too.
    with pytest.raises(RuntimeError, match=r"LAUNCH_FAILED.*had not ended") as caught:
        child.value()
    assert mps.is_fault(str(caught.value))
    child.exit()


def _report(library: str, lines: list[str]) -> str:
    """Return what is seen after some lines, and how many use each context."""
    program = [
        "import ctypes",
        "from prefect_gpu.devices.cuda_driver import PrimaryContexts",
        "contexts = PrimaryContexts(2)",
        "see = contexts.read",
        "assert not see()",
        f"d = ctypes.CDLL({library!r})",
        *lines,
        "before = contexts.lost",
        # A reading leaves as many users as there were.
        "[d.create(i) for i in (0, 1) if not d.count_users(i)]",
        "print(before, [d.count_users(i) for i in (0, 1)])",
    ]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLOCK_S,
    ).stdout.strip()
