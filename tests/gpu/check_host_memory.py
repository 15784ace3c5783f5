"""How much of the machine's own memory a child takes before its body begins, by framework.

    python -m tests.gpu.check_host_memory

Each line is a fresh process that has imported what a child imports, then the framework, then worked
on the device as a calibration does. `private` (USS) is what one more process costs the machine;
`resident` (RSS) counts libraries that processes share. `prefect_gpu.frameworks.registry.HOST_BYTES` is chosen
from `private`, less the line without a framework.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
PROGRAM = """
import sys
import psutil
import prefect.task_engine
import prefect_gpu.child.main
def show(what):
    info = psutil.Process().memory_full_info()
    print(f"{sys.argv[1]:<12} {what:<10} private {info.uss / 2**20:7.0f} MiB  "
          f"resident {info.rss / 2**20:7.0f} MiB", flush=True)
if sys.argv[1] == "none":
    show("imported")
else:
    from prefect_gpu.frameworks.registry import ADAPTERS
    __import__(sys.argv[1])
    show("imported")
    ADAPTERS[sys.argv[1]].calibrate()
    show("on device")
"""


def main() -> int:
    failed = 0
    for framework in ("none", "torch", "tensorflow", "jax", "cupy"):
        if framework != "none" and importlib.util.find_spec(framework) is None:
            print(f"{framework:<12} is not installed", flush=True)
            continue
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, framework],
            env={**os.environ, **GROWTH},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode:
            failed = 1
            print(f"{framework} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
