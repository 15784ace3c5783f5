"""One call of a task's body, as it travels to the child.

It covers the value and how the child runs it (`run_body`); what surrounds it in the child is in
`child`, what Prefect needs around it in `prefect_gpu.prefect_bridge`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A body and what it is called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Prefect's serialised context; `None`: run without Prefect.
    context: dict[str, Any] | None = None
    #: `print` goes to the run's log.
    log_prints: bool = False


def run_body(call: Call) -> Any:
    """Run the body to its end.

    Returns:
        What it returns; of a coroutine its result, of a generator (sync or async) the list of what
        it yields, as Prefect returns it for a submitted task.
    """
    result = call.function(*call.args, **call.kwargs)
    if inspect.isawaitable(result):
        return asyncio.run(_await(result))
    if inspect.isasyncgen(result):
        return asyncio.run(_collect(result))
    if inspect.isgenerator(result):
        return list(result)
    return result


async def _await(awaitable: Any) -> Any:
    return await awaitable


async def _collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]
