"""Settings that hold for all tests, and for the programs that they start."""

from __future__ import annotations

import os

# A standby costs a start of a process for each kind of task, and competes with the tests that run
# beside it: only tests about standbys start them, with an argument of the runner.
os.environ["PREFECT_INTEGRATIONS_GPU_STANDBY"] = "0"
