"""What children say of their interpreters in these tests. Imported by them, so nothing heavy, and no pytest."""

from __future__ import annotations

import logging
import multiprocessing
import sys
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
