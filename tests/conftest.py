"""Settings that hold for all tests, and for the programs that they start."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# A standby costs a start of a process for each kind of task, and competes with the tests that run
# beside it: only tests about standbys start them, with an argument of the runner.
os.environ["PREFECT_INTEGRATIONS_GPU_STANDBY"] = "0"

# Tests that run side by side must not see each other's tasks.
_ledger = tempfile.mkdtemp(prefix="prefect-gpu-ledger-")
os.environ["PREFECT_INTEGRATIONS_GPU_LEDGER"] = _ledger
atexit.register(shutil.rmtree, _ledger, ignore_errors=True)
