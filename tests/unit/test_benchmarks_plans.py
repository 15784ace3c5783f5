"""What the benchmarks draw, order and read, before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import _common
import _devices
import _evaluations
import _trainings
import collocation
import dispatch
import makespan
import pytest
import rehearsal

GIB = 2**30


def test_evaluations_are_of_all_sizes_and_the_same_for_the_same_seed() -> None:
    jobs = _evaluations.plan(0, 40, ["torch", "jax"])
    assert jobs == _evaluations.plan(0, 40, ["torch", "jax"])
    assert jobs != _evaluations.plan(1, 40, ["torch", "jax"])
    assert len({job.name for job in jobs}) == 40
    sizes = [job.size_bytes / GIB for job in jobs]
    assert min(sizes) >= 0.5 and min(sizes) < 2 and max(sizes) > 30 and max(sizes) <= 40
    assert all(1 <= job.seconds <= 8 for job in jobs)
    assert {job.framework for job in jobs} == {"torch", "jax"}


@pytest.mark.parametrize("frameworks", [["torch"], ["jax"], ["torch", "jax", "tensorflow"]])
def test_evaluations_use_the_frameworks_there_are(frameworks: list[str]) -> None:
    jobs = _evaluations.plan(0, 40, frameworks)
    assert {job.framework for job in jobs} == set(frameworks)
    assert all(job.kind in _evaluations.KINDS[job.framework] for job in jobs)


def test_trainings_are_of_the_published_sizes_and_some_take_two_devices() -> None:
    jobs = _trainings.plan(0, 60)
    assert jobs == _trainings.plan(0, 60)
    assert len({job.name for job in jobs}) == 60
    assert max(job.size_bytes for job in jobs) <= 29 * GIB
    pairs = [job for job in jobs if job.devices == 2]
    assert 3 <= len(pairs) <= 10
    # Its gradients are copied in every step.
    assert "recommender" not in {job.kind for job in pairs}


def test_what_matters_most_is_measured_first_and_ray_last() -> None:
    rows = list(dispatch.ROWS)
    plan = dispatch.order(rows, ["torch", "tensorflow"], 2, seed=0)
    assert len(plan) == len(set(plan)) == 2 * 2 * len(rows)
    assert {row for _, _, row in plan[:8]} == set(dispatch.FIRST)
    assert {framework for _, framework, _ in plan[:3]} == {"torch"}
    assert plan[len(plan) // 2 - 1] == (0, "tensorflow", "ray")


def test_dispatch_is_judged_by_medians_of_later_tasks() -> None:
    def run(kind: str, ready_s: float, init_s: float, left_bytes: int = 0) -> dict[str, object]:
        times = {"ready_s": ready_s, "init_s": init_s, "left_bytes": left_bytes}
        return {"framework": "torch", "row": "standby", "kind": kind, **times}

    runs = [run("first", 9.0, 0.3), run("later", 0.4, 0.3), run("later", 0.5, 0.4)]
    beyond, left = dispatch.make_checks(runs)
    assert beyond.passed and beyond.measured == pytest.approx(0.1)
    assert left.passed
    assert not dispatch.make_checks([*runs, run("burst", 1.0, 0.3, 2**20)])[1].passed


@pytest.mark.parametrize(
    ("usable", "headroom"), [([40 * 10**9], "0"), ([40 * 10**9, 40 * 10**9 + 1], "1MiB")]
)
def test_headroom_leaves_no_device_more_than_the_cap(usable: list[int], headroom: str) -> None:
    assert _devices.headroom(usable, 40 * 10**9) == headroom


def test_a_device_below_the_cap_is_refused() -> None:
    with pytest.raises(SystemExit, match="24"):
        _devices.headroom([24 * 10**9], 40 * 10**9)


def test_work_leaves_out_the_start_and_counts_it_apart() -> None:
    (job,) = _evaluations.plan(0, 1, ["torch"])
    told = {
        "name": job.name,
        "error": "",
        "line": 10.0,
        "imported": 12.0,
        "ready": 12.5,
        "ended": 16.5,
        "steps": 3,
        "cpu_s": 2.0,
        "score": 0.5,
        "peak_bytes": 50,
        "busy_fraction": 0.25,
    }
    costs = makespan.make_costs([told, {"name": "other", "error": "killed"}], [job])
    assert costs.keys() == {job.name}
    bound = makespan.bound_of(costs, device_bytes=100, cores=2)
    assert bound.terms == pytest.approx(
        {
            "longest chain": 4.0,
            "memory × time": 2.0,
            "larger than half a device": 0.0,
            "GPU busy": 1.0,
            "CPU": 1.0,
        }
    )
    assert makespan.bound_of(costs, 100, 2, with_init=True).seconds == pytest.approx(4.5)


def test_settings_are_json_or_text() -> None:
    given = ["standby=auto", "max_processes=4", "headroom=1GiB"]
    assert _common.read_settings(given) == {
        "standby": "auto",
        "max_processes": 4,
        "headroom": "1GiB",
    }
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        _common.read_settings(["standby"])


def test_an_argument_that_the_runner_lacks_is_named() -> None:
    assert _common.runner_lacks("headroom") == ""
    assert "no_such_thing" in _common.runner_lacks("headroom", "no_such_thing")


def test_reports_are_counted_and_what_is_unknown_is_not_zero() -> None:
    reports = [
        {"outcome": "oom", "leaked_bytes": "0", "budget_source": "probe"},
        {"outcome": "completed", "leaked_bytes": "12", "budget_source": "learned"},
        {"outcome": "completed", "leaked_bytes": "unknown", "budget_source": "learned"},
    ]
    assert _common.summarise_reports(reports) == {
        "reports": 3,
        "outcomes": {"oom": 1, "completed": 2},
        "budget_sources": {"probe": 1, "learned": 2},
        "out_of_memory": 1,
        "leaked_bytes": 12,
        "leaked_unknown": 1,
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate", True),
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GiB", True),
        ("ResourceExhaustedError: OOM when allocating", True),
        ("ValueError: no room", False),
    ],
)
def test_out_of_memory_is_recognised_by_its_message(error: str, expected: bool) -> None:
    assert _common.says_out_of_memory(error) is expected


def test_results_are_whole_in_their_file_after_each_addition(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results = _common.Results(path, {"seed": 3})
    results.add({"a": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"seed": 3, "runs": [{"a": 1}]}
    results.put("checks", [])
    assert json.loads(path.read_text(encoding="utf-8"))["checks"] == []
    assert [file.name for file in path.parent.iterdir()] == ["out.json"]


def test_costs_of_a_run_that_did_not_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text('{"runs": []}', encoding="utf-8")
    with pytest.raises(SystemExit, match="no costs in it"):
        makespan.read_costs(path)
    with pytest.raises(SystemExit, match="no complete scheme"):
        collocation.read_scheme(path, "--work")


ALONE = {
    rehearsal.key("train", [rehearsal.ALONE_STEPS, 0.0]): [2.3, 2.1, 2.0],
    rehearsal.key("fit", [0]): 2.5,
    rehearsal.key("answer", [3]): [17.0, 4608.0],
    rehearsal.key("evaluate", ["timm", "a", 1, 2]): 0.5,
}


@pytest.mark.parametrize(
    ("name", "arguments", "value", "is_right"),
    [
        ("train", [0, 9.0], [2.3, 2.1], True),
        ("train", [0, 9.0], [2.3, 2.2], False),
        ("train", [0, 9.0], [], False),
        ("fit", [4], 6.5, True),
        ("fit", [4], 2.5, False),
        ("answer", [3], 4608.0, True),
        ("answer", [99], 4608.0, False),
        ("evaluate", ["timm", "a", 1, 2], 0.502, True),
        ("evaluate", ["timm", "a", 1, 2], 0.6, False),
        ("leak", [], 1.0, True),
        ("with_jax", [0], 1.0, False),
    ],
)
def test_values_are_compared_with_those_alone(
    name: str, arguments: list[object], value: object, is_right: bool
) -> None:
    assert rehearsal.is_right(name, arguments, value, ALONE, on_gpu=True) is is_right


def test_a_rehearsal_is_drawn_and_told_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [(float(at), [(0.5, 10**9, 100.0 * at)]) for at in range(5)]
    rehearsal.print_timeline(samples, 2)
    assert capsys.readouterr().out.splitlines()[-1] == "device 0: busy for 50% of the time, 0.4 kJ"
    found = {"samples": samples, "waits": [("id", 2.0, 0.5)], "began_s": 1.0}
    assert "device 0" in rehearsal.draw(found)
