from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import task_engine
from prefect.client.orchestration import PrefectClient, SyncPrefectClient
from prefect.concurrency.services import ConcurrencySlotAcquisitionWithLeaseService

from prefect_gpu.clock import FakeClock
from prefect_gpu.runner import engine_threads
from prefect_gpu.runner.engine_threads import KNOWN_S, RETRY_DELAYS_S, TagLimits, asked_first


class Api:
    """An API that lists limits."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.asked = 0
        self.down = False

    def read_global_concurrency_limits(self, limit: int, offset: int) -> list[Any]:
        self.asked += 1
        if self.down:
            raise ConnectionError
        return [SimpleNamespace(name=name) for name in self.names[offset : offset + limit]]

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        yield self


def test_only_tags_that_have_a_limit_are_left() -> None:
    limits = TagLimits(Api("tag:slow", "database").lend)
    assert limits.among(["tag:gpu", "tag:slow", "tag:gpu:memory=1GiB"]) == ["tag:slow"]
    assert limits.among(["tag:gpu"]) == []


def test_an_answer_holds_for_a_while() -> None:
    api, clock = Api(), FakeClock()
    limits = TagLimits(api.lend, clock)
    assert limits.among(["tag:a"]) == [] == limits.among(["tag:a"])
    assert api.asked == 1
    api.names.append("tag:a")
    clock.advance(KNOWN_S - 1)
    assert limits.among(["tag:a"]) == []
    clock.advance(1)
    assert limits.among(["tag:a"]) == ["tag:a"]
    assert api.asked == 2


def test_where_the_api_does_not_answer_nothing_is_left_out() -> None:
    api = Api()
    limits = TagLimits(api.lend)
    api.down = True
    assert limits.among(["tag:a", "tag:b"]) == ["tag:a", "tag:b"]
    api.down = False
    assert limits.among(["tag:a", "tag:b"]) == []


class BusyServer:
    """Refuses so many of the questions, then answers."""

    def __init__(self, refusals: int, body: Any) -> None:
        self.refusals = refusals
        self.body = body

    def answer(self, request: httpx.Request) -> httpx.Response:
        if "/concurrency_limits/" not in request.url.path:
            return httpx.Response(404)
        self.refusals -= 1
        return httpx.Response(503) if self.refusals >= 0 else httpx.Response(200, json=self.body)

    async def answer_async(self, request: httpx.Request) -> httpx.Response:
        return self.answer(request)


def rounded(waits: list[float]) -> list[float]:
    """Leave out what Prefect's client adds at random, up to a fifth."""
    return [next(d for d in (*RETRY_DELAYS_S, 16.0) if 0.8 * d <= w <= 1.2 * d) for w in waits]


@pytest.mark.parametrize(
    ("refusals", "delays"), [(1, [0.1]), (3, [0.1, 0.3, 1.0]), (4, [0.1, 0.3, 1.0, 16.0])]
)
def test_a_server_too_busy_to_list_limits_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch, refusals: int, delays: list[float]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("prefect.client.base.time.sleep", waits.append)
    transport = httpx.MockTransport(BusyServer(refusals, []).answer)

    @contextlib.contextmanager
    def lend() -> Iterator[SyncPrefectClient]:
        with SyncPrefectClient("http://server/api", httpx_settings={"transport": transport}) as it:
            yield it

    assert TagLimits(lend).among(["tag:a"]) == []
    assert rounded(waits) == delays


def test_a_server_too_busy_to_give_a_slot_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)

    monkeypatch.setattr("prefect.client.base.anyio.sleep", sleep)
    server = BusyServer(2, {"lease_id": str(uuid4()), "limits": []})

    async def acquire() -> Any:
        settings = {"transport": httpx.MockTransport(server.answer_async)}
        async with PrefectClient("http://server/api", httpx_settings=settings) as client:
            service: Any = object.__new__(ConcurrencySlotAcquisitionWithLeaseService)
            service._client, service.concurrency_limit_names = client, ["tag:a"]
            return await service.acquire(1, "concurrency")

    assert asyncio.run(acquire()).status_code == 200
    assert rounded(waits) == [0.1, 0.3]


def test_more_limits_than_a_page_are_all_read() -> None:
    api = Api(*(f"tag:{i}" for i in range(450)))
    assert TagLimits(api.lend).among(["tag:0", "tag:449", "tag:450"]) == ["tag:0", "tag:449"]
    assert api.asked == 3


def test_a_task_without_tags_asks_nothing() -> None:
    api = Api()
    assert TagLimits(api.lend).among([]) == []
    assert api.asked == 0


def test_tag_limits_are_filtered_only_in_engine_threads() -> None:
    told: list[Any] = []
    ask = engine_threads._only_limited(lambda names, **rest: told.append((names, rest)))
    ask(["tag:a"], occupy=1)
    with asked_first(TagLimits(Api("tag:b").lend)):
        ask(["tag:a", "tag:b"], occupy=1)
        ask(names="one name", occupy=2)
    ask(names=["tag:a"])
    assert told == [
        (["tag:a"], {"occupy": 1}),
        (["tag:b"], {"occupy": 1}),
        ("one name", {"occupy": 2}),
        (["tag:a"], {}),
    ]


def test_prefects_engine_asks_through_it() -> None:
    assert task_engine._concurrency.__wrapped__ is not None, "see engine_threads: the name changed"
