"""`prefect-gpu` where its output cannot be written: what Python does at the end of the process, too."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("redirections", "code", "error"),
    [
        pytest.param(
            ">/dev/full",
            2,
            "prefect-gpu: the output cannot be written: No space left on device\n",
            id="a full disk",
        ),
        pytest.param(
            ">&-", 2, "prefect-gpu: the output cannot be written: it is closed\n", id="closed"
        ),
        pytest.param(">/dev/full 2>/dev/full", 2, "", id="a full disk for errors as well"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    redirections: str, code: int, error: str
) -> None:
    command = f'exec "$0" -m prefect_gpu check gpu {redirections}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)
