"""How `benchmarks/overhead.py` holds what it measured against its targets."""

from __future__ import annotations

from typing import Any

import overhead


def run(row: str, part: str = "rows", **figures: Any) -> dict[str, Any]:
    tasks = figures.setdefault("tasks", 100)
    made = {"part": part, "row": row, "flow": "sync", "finished": tasks, "tasks_per_s": 1.0}
    return {**made, "parent_cpu_per_task_s": 0.005, **figures}


def verdicts(*runs: dict[str, Any]) -> dict[str, bool | None]:
    """By the first words of each check that was measured."""
    return {c.name[:20]: c.met for c in overhead.checks(runs) if c.met is not None}


def test_what_was_not_measured_is_not_said_to_be_met() -> None:
    assert {check.met for check in overhead.checks([])} == {None}
    absent = {"part": "rows", "row": "ray", "flow": "sync", "problem": "not installed"}
    assert {check.met for check in overhead.checks([absent])} == {None}


def test_standbys_are_held_to_the_median_beyond_serialising() -> None:
    for beyond, met in (([0.009, 0.009, 0.5], True), ([0.009, 0.011, 0.012], False)):
        (check, *_) = overhead.checks([run("standby", beyond_s=beyond)])
        assert check.met is met
    assert "11.0 (9.0–12.0) ms" in check.found
    assert check.line().startswith("MISSED: a ready standby")


def test_throughput_is_compared_with_fresh_interpreters() -> None:
    fast, slow = run("forks", tasks_per_s=10.0), run("cold", tasks_per_s=2.0)
    assert verdicts(fast, slow)["forks do 5 times the"] is True
    assert verdicts(fast, {**slow, "tasks_per_s": 2.1})["forks do 5 times the"] is False


def test_cpu_is_what_is_above_threads_with_as_many_tasks() -> None:
    threads = run("threads", parent_cpu_per_task_s=0.005)
    few = run("threads-few", parent_cpu_per_task_s=0.010)
    made = overhead.checks(
        [
            *(threads, few),
            run("forks", parent_cpu_per_task_s=0.029),
            run("cold", parent_cpu_per_task_s=0.034),
            run("standby", parent_cpu_per_task_s=0.036),
        ]
    )
    cpu = [(check.met, check.found) for check in made if "own CPU" in check.name]
    assert cpu == [(True, "24.0 ms"), (False, "26.0 ms"), (True, "24.0 ms")]


def test_memory_is_what_the_crowd_keeps_above_threads() -> None:
    threads = run("threads-untagged", "crowd", parent_kept_per_task_bytes=9_000.0)
    ours = run("forks", "crowd", parent_kept_per_task_bytes=18_900.0)
    kept = [c.met for c in overhead.checks([threads, ours]) if "keeps" in c.name]
    assert kept == [True, None]
    ours["parent_kept_per_task_bytes"] = 19_100.0
    assert [c.met for c in overhead.checks([threads, ours]) if "keeps" in c.name] == [False, None]


def test_every_task_must_finish() -> None:
    assert overhead.checks([run("pool")])[-1].met is True
    lost = overhead.checks([run("pool"), run("cold", tasks=24, finished=23)])[-1]
    assert (lost.met, lost.found) == (False, "1 of cold")
    ended = {"part": "rows", "row": "pool", "flow": "sync", "problem": "ended", "failed": True}
    assert overhead.checks([run("cold"), ended])[-1].met is False
