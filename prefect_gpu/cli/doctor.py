"""The checks of `prefect-gpu doctor`: whether a machine is fit for GPU tasks, and how to repair problems.

Each framework is imported in a process of its own, all at the same time: an import takes seconds, and may create a CUDA
context, which ends with the process. The `judge_…` functions evaluate measured values and are pure.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from prefect import get_client
from prefect.settings import get_current_settings

from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import StoreError
from prefect_gpu.devices.nvml import NvmlMissingError, NvmlReader
from prefect_gpu.errors import DeviceError, SettingError
from prefect_gpu.processes import mps
from prefect_gpu.processes.interpreter import import_paths
from prefect_gpu.reports.published import correct_address
from prefect_gpu.settings import read_settings
from prefect_gpu.units import GIB, counted, format_bytes

#: Severity of a finding: no problem, information, or a problem that makes tasks fail.
Level = Literal["ok", "note", "problem"]

#: Seconds in which a framework must report its devices. The first import from a cold disk takes a minute.
FRAMEWORK_S = 180.0

#: Limits that flows of many tasks need: about ten open files for each running task, a thread for each waiting task.
LEAST_FILES = 1024
LEAST_PROCESSES = 4096

#: Bytes of `/dev/shm` that PyTorch's `DataLoader` needs; containers have 64 MiB by default.
LEAST_SHARED_BYTES = GIB

#: By package: a program that sets `found` to the package's version, the CUDA or ROCm version of the build ("": a CPU
#: build), and the number of GPUs that the package can use.
PROGRAMS: Mapping[str, str] = {
    "torch": """
import torch
built = torch.version.cuda or torch.version.hip or ""
found = torch.__version__, built, torch.cuda.device_count() if torch.cuda.is_available() else 0
""",
    "tensorflow": """
import tensorflow as tf
built = tf.sysconfig.get_build_info().get("cuda_version") or ("?" if tf.test.is_built_with_gpu_support() else "")
found = tf.__version__, built, len(tf.config.list_physical_devices("GPU"))
""",
    "jax": """
import jax
gpus = sum(device.platform == "gpu" for device in jax.devices())
found = jax.__version__, "plugin" if gpus else "", gpus
""",
    "cupy": """
import cupy
version = cupy.cuda.runtime.runtimeGetVersion()
built = f"{version // 1000}.{version % 1000 // 10}"
try:
    found = cupy.__version__, built, cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    found = cupy.__version__, built, 0
""",
    "onnxruntime": """
import onnxruntime
gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
found = onnxruntime.__version__, "CUDAExecutionProvider" if gpu else "", None
""",
}

#: By package: how to install the build for NVIDIA GPUs.
GPU_BUILDS = {
    "torch": "pip install torch (its default build for Linux), or the one that pytorch.org names",
    "tensorflow": 'pip install "tensorflow[and-cuda]"',
    "jax": 'pip install "jax[cuda12]"',
    "cupy": "pip install cupy-cuda12x",
    "onnxruntime": "pip install onnxruntime-gpu",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    level: Level
    text: str
    #: How to repair the problem; empty: no repair is needed.
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Build:
    """The build of an installed framework."""

    version: str
    #: CUDA or ROCm version of the build, as in "12.8"; empty: a build without GPU support.
    cuda: str
    #: Number of GPUs that the framework can use; `None`: the framework reports no number.
    devices: int | None


def examine() -> Iterator[Finding]:
    """Run all checks; yield each finding as soon as it is known."""
    driver, gpus = check_driver()
    yield from driver
    # Without its own metadata, the package is used from its source.
    requirements = importlib.metadata.requires("prefect-gpu") if _installed("prefect-gpu") else ()
    yield from check_dependencies(requirements or (), _installed)
    installed = [name for name in PROGRAMS if importlib.util.find_spec(name) is not None]
    with ThreadPoolExecutor(len(PROGRAMS), "prefect-gpu-doctor") as pool:
        builds = {name: pool.submit(look_at, name) for name in installed}
        yield from check_server()
        yield from check_ledger()
        yield from check_limits()
        for name, build in builds.items():
            yield judge_framework(name, build.result(), gpus)
    if not installed:
        names = ", ".join(PROGRAMS)
        yield Finding("frameworks", "note", "none is installed", f"install one of: {names}")


def check_driver() -> tuple[list[Finding], int]:
    """Return the findings about the NVIDIA driver and its GPUs, and the number of working GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with contextlib.closing(NvmlReader(visible)) as reader:
            found, gpus = judge_devices(reader.read(()), visible)
            program = "" if shutil.which(mps.CONTROL) else f"{mps.CONTROL} is not found in PATH"
            if problem := reader.mps_refusal() or program:
                found.append(Finding("mps", "note", f"sharing='mps' has no effect here: {problem}"))
            return found, gpus
    except NvmlMissingError as error:
        fix = (
            "tasks run on the host's memory. On a machine with NVIDIA GPUs install the driver; start containers with "
            "--gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        return [Finding("driver", "note", str(error), fix)], 0
    except DeviceError as error:
        fix = "see nvidia-smi, dmesg and CUDA_VISIBLE_DEVICES"
        return [Finding("driver", "problem", str(error), fix)], 0


def judge_devices(snapshots: Any, visible: str | None) -> tuple[list[Finding], int]:
    """Return the findings about GPUs, and the number of working GPUs. `visible`: `CUDA_VISIBLE_DEVICES`."""
    working = [each for each in snapshots if not each.error]
    found = []
    if working:
        names = ", ".join(sorted({each.device.name for each in working}))
        count = counted(len(working), "device")
        text = f"NVIDIA driver {working[0].device.driver}, {count}: {names}"
        found.append(Finding("driver", "ok", text))
    if visible is not None:
        text = f"CUDA_VISIBLE_DEVICES={visible} limits the devices"
        found.append(Finding("driver", "note", text))
    for each in snapshots:
        if each.error:
            text = f"device {each.device.index} ({each.device.uuid}): {each.error}"
            fix = (
                "no task is placed there; reset it (nvidia-smi --gpu-reset) or restart the machine"
            )
            found.append(Finding("driver", "problem", text, fix))
    if working and not working[0].device.attributed:
        text = "this container has process ids of its own: the driver's figures of each process are not used"
        fix = "docker run --pid=host shows them (docs/memory.md)"
        found.append(Finding("driver", "note", text, fix))
    return found, len(working)


def check_dependencies(
    requirements: Any, installed: Callable[[str], str | None]
) -> Iterator[Finding]:
    """Yield the findings about required packages. `installed` returns a package's version; `None`: not installed."""
    wrong = False
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        wrong = True
        name, accepted = requirement.name, requirement.specifier
        text = f"{name} {version or 'is not installed'}; accepted: {accepted}"
        yield Finding("packages", "problem", text, f'pip install "{name}{accepted}"')
    if not wrong:
        names = ("prefect-gpu", "prefect", "fastapi")
        shown = ", ".join(f"{name} {installed(name) or 'is not installed'}" for name in names)
        yield Finding("packages", "ok", f"{shown}, Python {sys.version.split()[0]}")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_server() -> Iterator[Finding]:
    """Yield the findings about Prefect's API."""
    settings = get_current_settings()
    url = settings.api.url
    if not url:
        seconds = settings.server.ephemeral.startup_timeout_seconds
        text = f"no PREFECT_API_URL: each flow starts a server of its own, which must be up within {seconds} s"
        fix = (
            "prefect server start, then prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api; or raise "
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
        )
        yield Finding("server", "note", text, fix)
        return
    began_s = time.monotonic()
    try:
        with get_client(sync_client=True) as client:
            version = client.api_version()
    except Exception as error:  # noqa: BLE001 - whatever stops a flow's client is the finding
        text = f"{url} does not answer: {type(error).__name__}: {error}".splitlines()[0]
        fix = "start it (prefect server start), or correct PREFECT_API_URL and PREFECT_API_KEY"
        yield Finding("server", "problem", text, correct_address(url) or fix)
        return
    milliseconds = (time.monotonic() - began_s) * 1000
    yield Finding("server", "ok", f"{url} answers in {milliseconds:.0f} ms, version {version}")


def check_ledger() -> Iterator[Finding]:
    """Yield the findings about the settings, and about the ledger, in which flows see each other's reservations."""
    try:
        HostStore(read_settings().ledger).close()
    except SettingError as error:
        yield Finding("settings", "problem", str(error), "docs/settings.md has the accepted values")
    except StoreError as error:
        fix = "PREFECT_INTEGRATIONS_GPU_LEDGER names a folder of a local disk that you may write to"
        yield Finding("ledger", "problem", str(error), fix)
    else:
        yield Finding("ledger", "ok", "flows of this machine see each other's reservations")


def check_limits() -> Iterator[Finding]:
    """Yield the findings about this user's limits and about `/dev/shm`."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    yield judge_limit("open files", files, LEAST_FILES, "ulimit -n 65536")
    yield judge_limit("processes and threads", processes, LEAST_PROCESSES, "ulimit -u unlimited")
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield judge_shared(shutil.disk_usage(shared).total)


def judge_limit(what: str, limit: int, least: int, fix: str) -> Finding:
    """Return the finding about one limit; flows of many tasks need `least`."""
    unlimited = limit == resource.RLIM_INFINITY
    text = f"{what}: {'no limit' if unlimited else f'{limit:,}'}"
    if unlimited or limit >= least:
        return Finding("limits", "ok", text)
    return Finding("limits", "note", f"{text}; flows of many tasks need more", fix)


def judge_shared(total_bytes: int) -> Finding:
    """Return the finding about the size of `/dev/shm`."""
    text = f"/dev/shm holds {format_bytes(total_bytes)}"
    if total_bytes >= LEAST_SHARED_BYTES:
        return Finding("limits", "ok", text)
    text += "; PyTorch's DataLoader with workers fails with a bus error when it is full"
    return Finding("limits", "note", text, "docker run --shm-size=8g, or --ipc=host")


def look_at(framework: str) -> Build | str:
    """Import a framework in a process of its own; return its build, or the error of the import as text."""
    # Set the paths of this command: with `-c` Python searches the current folder first, and `-P` needs Python 3.11.
    program = f"""
import sys
sys.path[:] = {import_paths()!r}
import json
{PROGRAMS[framework]}
print("\\n" + json.dumps(found))
"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=FRAMEWORK_S,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        return f"its import took longer than {FRAMEWORK_S:.0f} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        return said[-1]
    return Build(*json.loads(done.stdout.splitlines()[-1]))


def judge_framework(name: str, build: Build | str, gpus: int) -> Finding:
    """Return the finding about a framework. `build` may be an import's error; `gpus`: number of working GPUs."""
    if isinstance(build, str):
        return Finding(name, "problem", f"cannot be imported: {build}", "see the error")
    if not build.cuda:
        text = f"{build.version} is a build for the CPU"
        if not gpus:
            return Finding(name, "ok", text)
        text += f": its tasks do not use the {counted(gpus, 'device')}"
        return Finding(name, "problem", text, GPU_BUILDS[name])
    text = f"{build.version} for {build.cuda if build.cuda[0].isalpha() else f'CUDA {build.cuda}'}"
    if build.devices is None:
        return Finding(name, "ok", text)
    text += f" can use {counted(build.devices, 'device')}"
    if build.devices < gpus:
        fix = "compare what it was built for with the driver: docs.nvidia.com/deploy/cuda-compatibility"
        return Finding(name, "problem", f"{text} of {gpus}", fix)
    return Finding(name, "ok", text)


def finding_lines(finding: Finding) -> list[str]:
    """Return the lines that show a finding in a terminal."""
    lines = [f"{finding.level:8}{finding.subject:12} {finding.text}"]
    if finding.fix:
        lines.append(f"{'':21}-> {finding.fix}")
    return lines
