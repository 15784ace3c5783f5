"""Whether a CUDA context was destroyed, asked of a stand-in for the driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.cuda_driver import DRIVER_LIBRARY, loaded_driver, unbound_by_captures

#: Two devices. `create` and `destroy` are for the test; everything else is the driver's.
_DRIVER = """
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
#ifdef WITH_IDS
int cuCtxGetId(void *context, unsigned long long *id) { *id = *(unsigned long long *)context; return 0; }
#endif
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for the driver is compiled")
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
def test_a_context_that_was_destroyed_is_seen(tmp_path: Path, lines: list[str], lost: bool) -> None:
    assert _report(tmp_path, lines, "-DWITH_IDS") == f"{lost} [1, 1]"


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for the driver is compiled")
def test_a_driver_without_ids_says_nothing(tmp_path: Path) -> None:
    lines = ["d.create(0)", "see()", "d.destroy(0)", "see()"]
    assert _report(tmp_path, lines) == "False [1, 1]"


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for the driver is compiled")
def test_a_thread_is_unbound_by_captures_for_a_while(tmp_path: Path) -> None:
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
    assert _report(tmp_path, lines).splitlines()[0] == "[True, 2, 0, False, 0]"


def test_without_a_driver_a_thread_is_bound() -> None:
    if loaded_driver() is not None:
        pytest.skip("this process has loaded a driver")
    with unbound_by_captures() as unbound:
        assert unbound is False


def _report(folder: Path, lines: list[str], *options: str) -> str:
    """Return what is seen after some lines, and how many use each context."""
    source, library = folder / "driver.c", folder / DRIVER_LIBRARY
    source.write_text(_DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *options, "-o", library, source],
        check=True,
    )
    program = [
        "import ctypes",
        "from prefect_gpu.devices.cuda_driver import PrimaryContexts",
        "contexts = PrimaryContexts(2)",
        "see = contexts.read",
        "assert not see()",
        f"d = ctypes.CDLL({os.fspath(library)!r})",
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
