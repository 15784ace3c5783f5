"""Run the console script as `python -m prefect_gpu`."""

import sys

from prefect_gpu.cli.commands import main

sys.exit(main())
