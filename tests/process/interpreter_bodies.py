"""What children say of their interpreters in these tests. Imported by them, so nothing heavy, and no pytest."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from typing import Any


def state() -> dict[str, Any]:
    """Return what a flow's process has set, as the body finds it."""
    mine = logging.getLogger("of_a_test.mine")
    return {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "name": multiprocessing.current_process().name,
        "method": multiprocessing.get_start_method(),
        "limit": sys.getrecursionlimit(),
        "level": mine.getEffectiveLevel(),
        "propagates": mine.propagate,
        "raises": raises(UserWarning("raised: of the test")),
        "ignores": not shows(DeprecationWarning("of the test")),
    }


def choose_spawn() -> str:
    """Choose a start method, as a module does that is imported once."""
    multiprocessing.set_start_method("spawn")
    return multiprocessing.get_start_method()


def raises(warning: Warning) -> bool:
    try:
        warnings.warn(warning, stacklevel=1)
    except Warning:
        return True
    return False


def shows(warning: Warning) -> bool:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn(warning, stacklevel=1)
    return bool(seen)


def signals() -> dict[str, Any]:
    """Return what signals do in this process, and in a program that it starts."""
    look = ["bash", "-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status"]
    return {
        "handlers": {each.name: str(signal.getsignal(each)) for each in signal.Signals},
        "program": subprocess.run(look, capture_output=True, text=True, check=True).stdout,
        "spawned": os.waitstatus_to_exitcode(
            os.waitpid(os.posix_spawn("/bin/bash", ["bash", "-c", "kill -INT $$"], os.environ), 0)[
                1
            ]
        ),
    }


def wait_for_interrupt(ready: str) -> None:
    with open(ready, "w"):
        pass
    time.sleep(600)


def sharing_of_tensors() -> str:
    import torch.multiprocessing

    strategy: str = torch.multiprocessing.get_sharing_strategy()
    return strategy
