"""What the benchmark on two nodes draws and judges."""

from __future__ import annotations

from typing import Any

import cluster
import pytest

GIB = 2**30


@pytest.mark.parametrize("device_gib", [80, 141])
def test_evaluations_fit_the_device_in_proportion(device_gib: int) -> None:
    jobs = cluster.plan(0, 40, 0.4, device_gib * GIB, tiny=False)
    assert len(jobs) == 40
    assert [job.seconds for job in jobs] == sorted((job.seconds for job in jobs), reverse=True)
    sizes = [job.size_bytes / device_gib / GIB for job in jobs]
    assert 0.3 < max(sizes) <= 30 / 80
    assert all(cluster.budget_bytes(job) < device_gib * GIB / 2 for job in jobs)
    assert all(cluster.steps(job) >= 2 for job in jobs)


def runs_of(row: str, ready_s: float, score: float = 0.5, left: int = 0) -> list[dict[str, Any]]:
    task = {"name": "a", "score": score}
    return [
        {"row": row, "kind": "ready", "seconds": [ready_s, ready_s]},
        {"row": row, "kind": "returned", "seconds": [0.3]},
        {"row": row, "kind": "evaluations", "seconds": [10.0], "tasks": [task]},
        {"row": row, "kind": "left", "bytes": [0, left]},
    ]


def test_two_nodes_are_judged_by_the_other_rows() -> None:
    machine, nodes = runs_of("machine", 0.30), runs_of("nodes", 0.39, left=2**30)
    checks = {
        c.name: c.passed for c in cluster.make_checks([*machine, *nodes, *runs_of("ray", 1.9, 0.6)])
    }
    assert checks == {
        "ready later than on one machine": True,
        "ready so many times sooner than RayTaskRunner": False,
        "evaluations: of one machine's makespan": True,
        "evaluations: of RayTaskRunner's makespan": False,
        "array: of RayTaskRunner's time": True,
        "machine: left on a GPU": True,
        "nodes: left on a GPU": False,
        "machine: evaluations without the right value": True,
        "nodes: evaluations without the right value": True,
        "ray: evaluations without the right value": False,
    }


def test_a_failed_evaluation_has_no_right_value() -> None:
    run = {"row": "nodes", "kind": "evaluations", "seconds": [1.0]}
    assert (
        cluster.wrong_values([{**run, "tasks": [{"name": "a", "error": "it died"}]}], "nodes") == 1
    )


def test_what_was_not_measured_is_not_judged() -> None:
    assert cluster.make_checks([]) == []
    names = [check.name for check in cluster.make_checks(runs_of("nodes", 0.3)[:1])]
    assert names == []
