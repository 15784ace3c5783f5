"""The body of `_bodies` in a module that imports Prefect, as a module of decorated tasks does."""

from __future__ import annotations

from typing import Any

import _bodies

# What is imported with the function.
from prefect import task  # noqa: F401


def first_use(*arguments: Any) -> dict[str, float]:
    """See `_bodies.first_use`."""
    return _bodies.first_use(*arguments)


def spawned(queue: Any, *arguments: Any) -> None:
    """See `_bodies.spawned`."""
    queue.put(first_use(*arguments))
