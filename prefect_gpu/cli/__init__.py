"""The console script `prefect-gpu`: its commands, lists of tasks and the simulation of a schedule.

Nothing else in the package imports this folder; benchmarks use `simulation`.
"""

from prefect_gpu.cli.commands import main

__all__ = ["main"]
