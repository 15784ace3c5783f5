"""Run the console script as `python -m prefect_gpu`, without importing from the current folder."""

import sys

# Python searches the current folder first, unless it was started with `-P` (3.11) or `-I`.
if not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]

from prefect_gpu.cli.commands import main

sys.exit(main())
