"""Tasks of a module: decorated, as users write them."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task


@task
def alone() -> Any:
    import colorsys

    return colorsys


@task
def with_helper() -> Any:
    return helper()


def helper() -> int:
    return 1


def plain() -> int:
    return 1


@task
def logs() -> None:
    get_run_logger().info("said")


@task
def submits() -> Any:
    return alone.submit()
