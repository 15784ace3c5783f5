from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prefect import task_engine

from prefect_gpu import tag_limits
from prefect_gpu.clock import FakeClock
from prefect_gpu.tag_limits import KNOWN_S, TagLimits, asked_first


class Api:
    """An API with limits, as far as it is asked here."""

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


def test_more_limits_than_a_page_are_all_read() -> None:
    api = Api(*(f"tag:{i}" for i in range(450)))
    assert TagLimits(api.lend).among(["tag:0", "tag:449", "tag:450"]) == ["tag:0", "tag:449"]
    assert api.asked == 3


def test_a_task_without_tags_asks_nothing() -> None:
    api = Api()
    assert TagLimits(api.lend).among([]) == []
    assert api.asked == 0


def test_the_engine_is_told_only_in_threads_of_ours() -> None:
    told: list[Any] = []
    ask = tag_limits._only_limited(lambda names, **rest: told.append((names, rest)))
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
    assert task_engine._concurrency.__wrapped__ is not None, "see tag_limits: the name changed"
