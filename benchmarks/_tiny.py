"""Run every benchmark with `--tiny` on one Prefect server, to see that each runs.

    python benchmarks/_tiny.py [NAME...]

The figures of such a run have no meaning. The exit status is 1 if any failed; their names are printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import _common

FOLDER = _common.REPOSITORY / "benchmarks"


def main(names: Sequence[str]) -> int:
    """Run the named benchmarks, or all whose file name does not begin with `_`."""
    names = names or sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
    failed = []
    with _common.prefect_server() as url:
        for name in names:
            print(f"{name}.py --tiny", flush=True)
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, str(FOLDER / f"{name}.py"), "--tiny"],
                env={**os.environ, "PREFECT_API_URL": url},
                timeout=_common.MEASUREMENT_S,
            )
            print(f"{name}.py ended with {done.returncode}, {time.monotonic() - began:.0f} s")
            if done.returncode:
                failed.append(name)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
