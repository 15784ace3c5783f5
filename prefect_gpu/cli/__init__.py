"""The console script `prefect-gpu`. No other folder of the package imports this one; benchmarks use `simulation`."""

from prefect_gpu.cli.commands import main

__all__ = ["main"]
