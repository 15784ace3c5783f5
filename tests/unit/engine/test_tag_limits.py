"""Prefect's memory of sets of tags without a limit, as it is filled here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.concurrency import services

from prefect_gpu.clock import FakeClock
from prefect_gpu.engine.task_engine import KNOWN_S, TagLimits


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


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[frozenset[str], bool]:
    """Prefect's memory."""
    found: dict[frozenset[str], bool] = {}
    monkeypatch.setattr(services, "_no_limits_cache", found)
    return found


def test_only_tags_without_a_limit_are_noted(memory: dict[frozenset[str], bool]) -> None:
    limits = TagLimits(Api("tag:slow", "database").lend)
    limits.note_unlimited(["gpu", "slow"])
    assert memory == {}
    limits.note_unlimited(["gpu", "database"])
    assert memory == {frozenset({"tag:gpu", "tag:database"}): True}


def test_an_answer_holds_for_a_while(memory: dict[frozenset[str], bool]) -> None:
    api, clock = Api(), FakeClock()
    limits = TagLimits(api.lend, clock)
    for seconds, noted, asked in ((0.0, 1, 1), (KNOWN_S - 1, 1, 1), (1.0, 0, 2)):
        memory.clear()
        clock.advance(seconds)
        limits.note_unlimited(["a"])
        assert (len(memory), api.asked) == (noted, asked)
        api.names = ["tag:a"]


def test_where_the_api_does_not_answer_nothing_is_noted(
    memory: dict[frozenset[str], bool],
) -> None:
    api = Api()
    limits = TagLimits(api.lend)
    for api.down in (True, False):
        limits.note_unlimited(["a"])
        assert len(memory) == (not api.down)


def test_more_limits_than_a_page_are_all_read(memory: dict[frozenset[str], bool]) -> None:
    api = Api(*(f"tag:{i}" for i in range(450)))
    limits = TagLimits(api.lend)
    for tag in ("0", "449", "450"):
        limits.note_unlimited([tag])
    assert [*memory] == [frozenset({"tag:450"})] and api.asked == 3
