"""How a body is run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import pytest

from prefect_gpu.child.main import run_body
from prefect_gpu.processes.messages import Call


def plain(a: int, b: int = 1) -> int:
    return a + b


async def coroutine(a: int, b: int = 1) -> int:
    return a + b


def generator(a: int, b: int = 1) -> Iterator[int]:
    yield a
    yield b


async def async_generator(a: int, b: int = 1) -> AsyncIterator[int]:
    yield a
    yield b


class Later:
    def __await__(self) -> Any:
        return coroutine(3).__await__()


def awaitable(a: int, b: int = 1) -> Awaitable[int]:
    return Later()


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (plain, 3),
        (coroutine, 3),
        (generator, [1, 2]),
        (async_generator, [1, 2]),
        (awaitable, 4),
    ],
)
def test_every_kind_of_body_is_run_to_its_end(function: Any, result: Any) -> None:
    assert run_body(Call(function, (1,), {"b": 2})) == result
