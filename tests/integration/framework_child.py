"""Runs a few lines in a fresh interpreter, under a policy, as a GPU task's child would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect_gpu.frameworks.adapter import FrameworkPolicy, child_environment
from prefect_gpu.frameworks.registry import adapters_for
from prefect_gpu.units import GIB

ROOT = Path(__file__).parents[2]

#: Only to break a deadlock: TensorFlow took 11 s to import on a busy machine.
LIMIT_S = 480.0

#: What every child has before the lines of a test; `out` is what it sends back, as JSON.
PROLOGUE = """
import json, os, pickle, sys
import cloudpickle
from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory
from prefect_gpu.frameworks.registry import ADAPTERS, adapters_for

GIB, MIB = 1024**3, 1024**2
policy = FrameworkPolicy(**json.loads(sys.argv[1]))
out = {}

def threads():
    return len(os.listdir("/proc/self/task"))

def counters():
    found = hooks.collect_counters(ADAPTERS.values())
    return None if found is None else {name: getattr(found, name) for name in found.__slots__}

class ToHost(cloudpickle.Pickler):
    def reducer_override(self, value):
        for adapter in ADAPTERS.values():
            reduction = adapter.reduce_to_host(value)
            if reduction is not NotImplemented:
                return reduction
        return super().reducer_override(value)

def dumps(value):
    import io
    buffer = io.BytesIO()
    ToHost(buffer, protocol=5).dump(value)
    return buffer.getvalue()

hooks.install(adapters_for(policy), policy)
"""

EPILOGUE = "\nprint('OUT' + json.dumps(out), flush=True)\n"


def host_policy(**changes: Any) -> dict[str, Any]:
    """Return the fields of a policy on the host device."""
    return {
        "device_kind": "host",
        "device_uuids": ["HOST-test"],
        "total_bytes": [8 * GIB],
        "budget_bytes": [GIB],
        **changes,
    }


def start_child(
    lines: str, fields: dict[str, Any], extra: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the lines under a policy's environment."""
    policy = FrameworkPolicy(**fields)
    environment = {**os.environ, **(extra or {})}
    for name, value in child_environment(policy, adapters_for(policy), environment).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + lines + EPILOGUE, json.dumps(fields)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_child(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for it and give what it put in `out`."""
    try:
        stdout, stderr = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
    assert child.returncode == 0, stderr[-3000:]
    (line,) = [line for line in stdout.splitlines() if line.startswith("OUT")]
    found: dict[str, Any] = json.loads(line[3:])
    return found


def run_child(
    lines: str, fields: dict[str, Any], extra: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run the lines in a child under a policy; give what they put in `out`."""
    return finish_child(start_child(lines, fields, extra))
