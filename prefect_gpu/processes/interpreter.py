"""An interpreter like this one: its flags, environment, folder and cores, and how its end is seen.

Small facts about processes of the system, for those who start them. Nothing here starts a child, or
decides when one must end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from prefect_gpu.processes import guardian


class _Ended(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


def import_paths() -> tuple[str, ...]:
    """Give `sys.path` for a child, which may start in another folder: `""` is this one."""
    # Python passes over entries that are not text (a `Path` that somebody appended); so do we.
    return tuple(os.path.abspath(p) if p == "" else p for p in sys.path if isinstance(p, str))


def interpreter_flags() -> list[str]:
    """Give the flags that this interpreter was started with (`-W`, `-X`, `-O`, …)."""
    # The function that multiprocessing uses for its own spawned children; there is no public one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def working_folder() -> str:
    """Give the folder that this process works in; empty: it was removed, and a child need not have it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def count_cores() -> int:
    """Say how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def has_ended(process: _Ended) -> bool:
    """Tell whether a child of ours has ended, if possible without reaping it."""
    try:
        waitid = os.waitid
    except AttributeError:
        # macOS before Python 3.13.
        return process.poll() is not None
    try:
        return waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # Reaped already, or a fork of a template, which is that one's child.
        return process.poll() is not None


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that tells when a process ends; `None`: the system has none left, or none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Give this process's environment with some variables set, or removed (`None`)."""
    environment = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def with_token(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Give an environment that marks a child, and all that it starts, by its token."""
    environment = dict(environment)
    outer = environment.get(guardian.TOKEN_VARIABLE)
    environment[guardian.TOKEN_VARIABLE] = f"{outer}/{token}" if outer else token
    return environment
