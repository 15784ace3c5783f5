"""Libraries that have a training loop of their own: what a first run, a learned run and a run out of memory come to.

    python -m tests.gpu.check_libraries [--only NAME]...

For each library (`library_bodies`) there are at least three task runs:

- *first*: without a memory tag, so it has the device to itself;
- *learned*: the same with the budget that the first one taught. It ends in one process, within its budget, with the
  same result;
- *too small*: with a budget that cannot be enough and `gpu:oom=fail`. However the library wraps the error, the report
  says that its own cap was the cause.

Two more run with the same small budget and `gpu:oom=escalate`, and two have a library that catches the out-of-memory
itself and tries a smaller batch. All but the first runs share the device. Processes that bodies started (compilers of
`torch.compile`, data loaders) must have ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu import library_bodies as bodies
from tests.gpu._checks import (
    BODY_S,
    MIB,
    Ended,
    Observer,
    Process,
    gather,
    installed,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

#: Too little for each of the bodies: a context, and about 0.9 GiB.
TOO_SMALL = "1.5GiB"

#: Of data and sizes. Those of this one are large enough.
SEED = 2

#: A process may have so much more than its budget. JAX takes up to 254 MiB beside its pool for moments that the
#: readings of a first run may miss (JAX 0.11, H200).
MOST_OVER_BYTES = 64 * MIB
MOST_OVER_JAX_BYTES = 320 * MIB

#: Results of two runs may differ by this fraction: kernels add in another order each time.
RESULT_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Library:
    """A library, and the body that uses it."""

    body: Callable[..., bodies.Found]
    #: Name of its distribution, for its version.
    distribution: str
    #: Modules that the body imports.
    modules: tuple[str, ...]
    #: Also run it with a budget that is too small and `gpu:oom=escalate`.
    escalates: bool = False
    #: The library catches an out-of-memory itself: it completes under a small budget.
    catches: bool = False


LIBRARIES: Mapping[str, Library] = {
    "timm": Library(bodies.timm, "timm", ("torch", "timm")),
    "torchvision": Library(bodies.detection, "torchvision", ("torch", "torchvision")),
    "trainer": Library(
        bodies.trainer, "transformers", ("torch", "transformers", "accelerate"), escalates=True
    ),
    "generate": Library(bodies.generate, "transformers", ("torch", "transformers")),
    "lightning": Library(bodies.lightning, "lightning", ("torch", "lightning"), escalates=True),
    "accelerate": Library(bodies.accelerate, "accelerate", ("torch", "accelerate")),
    "torch-geometric": Library(bodies.graphs, "torch-geometric", ("torch", "torch_geometric")),
    "torch-compile": Library(bodies.compiled, "torch", ("torch",)),
    "flax": Library(bodies.flax, "flax", ("jax", "flax", "optax")),
    "optax": Library(bodies.optax, "optax", ("jax", "optax")),
    "cupy": Library(bodies.cupy, "cupy", ("cupy",)),
    "find-batch-size": Library(
        bodies.accelerate_finds_batch_size, "accelerate", ("torch", "accelerate"), catches=True
    ),
    "auto-find-batch-size": Library(
        bodies.trainer_finds_batch_size,
        "transformers",
        ("torch", "transformers", "accelerate"),
        catches=True,
    ),
}


def missing_for(name: str, on_gpu: bool) -> str:
    """Return why a library cannot be tried here; empty: it can."""
    library = LIBRARIES[name]
    missing = [module for module in library.modules if not installed(module)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if library.body is bodies.compiled and on_gpu:
        if not installed("triton"):
            return "triton is not installed"
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            return "there is no C compiler, which Triton needs"
    return ""


def version_of(name: str) -> str:
    # CuPy's distribution is named after the version of CUDA.
    for distribution in (LIBRARIES[name].distribution, "cupy-cuda13x", "cupy-cuda12x"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


@dataclass(frozen=True, slots=True)
class Tried:
    """One task run, and what was reported of its processes."""

    name: str
    kind: str
    ended: Ended
    reports: list[Process]

    @property
    def last(self) -> Process | None:
        return self.reports[-1] if self.reports else None

    @property
    def found(self) -> bodies.Found:
        return self.ended.value or {}


def make_task(name: str, kind: str) -> Any:
    """Make the task of one kind of run. The first and the learned run are of one task, with one history."""
    tags: dict[str, Any] = {}
    if kind not in ("first", "learned"):
        tags = {"memory": TOO_SMALL, "oom": "escalate" if kind == "escalates" else "fail"}
    suffix = f"-{kind.replace(' ', '-')}" if tags else ""
    return task(name=name + suffix, timeout_seconds=BODY_S, tags=gpu(**tags))(LIBRARIES[name].body)


def try_all(what: str, kinds: list[tuple[str, str]], devices: str) -> list[Tried]:
    """Run tasks in one flow run: by name of the library, and kind of the run.

    All flow runs are of one flow, which learns from one to the next.
    """
    shrink = 1 if devices == "nvml" else 8
    flow = run_flow(
        "libraries",
        lambda: gather(
            {" ".join(pair): make_task(*pair).submit(shrink, SEED) for pair in kinds},
            1.5 * BODY_S,
        ),
        devices,
    )
    say(f"{what}: {len(kinds)} task runs took {flow.seconds:.0f} s")
    processes = read_processes(flow.id, len(kinds))
    return [
        Tried(*pair, ended, processes.get(ended.task_run_id, []))
        for pair, ended in zip(kinds, flow.value.values(), strict=True)
    ]


# What is not as it should be.


def judge_first(first: Tried) -> list[str]:
    problems = []
    if first.ended.error is not None:
        problems.append(first.ended.words)
    if first.last is None or first.last["budget_source"] != "probe":
        problems.append("it was no probe")
    if len(first.reports) != 1:
        problems.append(f"{len(first.reports)} processes")
    return problems


def judge_learned(learned: Tried, first: Tried, observer: Observer) -> list[str]:
    problems = [] if learned.ended.error is None else [learned.ended.words]
    if len(learned.reports) != 1:
        problems.append(f"{len(learned.reports)} processes")
    report = learned.last
    if report is None or report["budget_source"] != "learned":
        return [*problems, "its budget was not learned"]
    budget = report.bytes("budget_bytes") or 0
    over = MOST_OVER_JAX_BYTES if report["framework"] == "jax" else MOST_OVER_BYTES
    for peak, source in (
        (report.bytes("peak_process_bytes"), "its report says"),
        (observer.peak_of(report), "NVML showed"),
    ):
        if peak is not None and peak > budget + over:
            problems.append(f"{source} {size(peak)} MiB, with a budget of {size(budget)}")
    if not is_same(learned.found.get("result"), first.found.get("result")):
        problems.append(f"{learned.found.get('result')}, not {first.found.get('result')}")
    return problems


def is_same(one: list[float] | None, other: list[float] | None) -> bool:
    if one is None or other is None:
        return False
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=RESULT_TOLERANCE) for a, b in pairs)


def judge_too_small(tried: Tried, catches: bool) -> list[str]:
    if catches and tried.ended.error is None:
        # It has found a smaller batch. If there is none, that is an out-of-memory too.
        return [] if len(tried.reports) == 1 else [f"{len(tried.reports)} processes"]
    report = tried.last
    said = ("?", "?") if report is None else (report["outcome"], report["cause"])
    problems = [] if said == ("oom", "own_cap") else [f"its report says {said[0]}, {said[1]}"]
    if tried.ended.error is None:
        problems.append(f"{TOO_SMALL} were enough")
    elif problems:
        problems += traceback.format_exception(tried.ended.error)
    return problems


def judge_escalation(tried: Tried, first: Tried) -> list[str]:
    problems = [] if tried.ended.error is None else [tried.ended.words]
    if len(tried.reports) < 2:
        problems.append("it needed one process only")
    if not is_same(tried.found.get("result"), first.found.get("result")):
        problems.append(f"{tried.found.get('result')}, not {first.found.get('result')}")
    return problems


def judge(name: str, runs: Mapping[str, Tried], observer: Observer) -> list[str]:
    """Return what is not as it should be with one library."""
    first, learned, small = runs["first"], runs["learned"], runs["too small"]
    found = {
        "first": judge_first(first),
        "learned": judge_learned(learned, first, observer),
        "too small": judge_too_small(small, LIBRARIES[name].catches),
    }
    if "escalates" in runs:
        found["escalates"] = judge_escalation(runs["escalates"], first)
    for kind, tried in runs.items():
        left = [pid for pid, began in tried.found.get("descendants", ()) if is_alive(pid, began)]
        if left:
            found[kind].append(f"processes that it started are left: {left}")
    return [f"{name}, {kind}: {problem}" for kind in found for problem in found[kind]]


def is_alive(pid: int, began: int) -> bool:
    """Return whether a process with that id and that start time exists."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == began and fields[0] != "Z"


def row_of(tried: Tried, observer: Observer) -> tuple[str, ...]:
    report = tried.last
    version = f"{tried.name} {version_of(tried.name)}"
    if report is None:
        return (version, tried.kind, *["?"] * 9, tried.ended.words)
    outcome = report["outcome"] + (f", {report['cause']}" if report["cause"] != "none" else "")
    found = tried.found
    return (
        version,
        tried.kind,
        size(report.bytes("budget_bytes")),
        size(report.bytes("peak_process_bytes")),
        size(observer.peak_of(report)),
        size(report.bytes("peak_live_bytes")),
        size(report.bytes("steady_live_bytes")),
        str(len(tried.reports)),
        str(found.get("retries", "")),
        report["start_s"],
        report["run_s"],
        outcome + (f", batch {found['batch']}" if "batch" in found else ""),
    )


HEADS = [
    "library",
    "run",
    "budget",
    "reported",
    "NVML-peak",
    "live",
    "steady",
    "processes",
    "retries",
    "start-s",
    "run-s",
    "outcome",
]


def check(options: argparse.Namespace) -> list[str]:
    """Try each library."""
    on_gpu = options.devices == "nvml"
    names = []
    for name in options.only or LIBRARIES:
        missing = missing_for(name, on_gpu)
        if missing:
            say(f"not tried: {name}, since {missing}")
        else:
            names.append(name)
    later = [(name, kind) for name in names for kind in ("learned", "too small")]
    later += [(name, "escalates") for name in names if LIBRARIES[name].escalates]
    with Observer() as observer:
        tried = try_all("first-runs", [(name, "first") for name in names], options.devices)
        tried += try_all("later-runs", later, options.devices)
    problems = []
    for name in names:
        runs = {each.kind: each for each in tried if each.name == name}
        try:
            problems += judge(name, runs, observer)
        except Exception:
            problems.append(f"{name}: {traceback.format_exc()}")
    table(HEADS, [row_of(each, observer) for name in names for each in tried if each.name == name])
    say(
        "sizes in MiB: the last process's budget, its peak as reported and as NVML showed it from outside, the"
    )
    say(
        "most that was allocated, in all and in steady steps; retries: times the allocator released its cache"
    )
    print_facts(tried, observer)
    return problems


def print_facts(tried: list[Tried], observer: Observer) -> None:
    """Print which processes bodies have started, and all that became of those that failed."""
    for each in tried:
        if each.found.get("descendants"):
            pids = [pid for pid, _ in each.found["descendants"]]
            on_device = [pid for pid in pids if pid in observer.peaks]
            kernels = (
                f", {each.found['kernels']} generated files" if "kernels" in each.found else ""
            )
            say(
                f"{each.name}, {each.kind}: it started {len(pids)} processes{kernels}; "
                f"{len(on_device)} of them had memory of the device"
            )
        if each.found.get("refusals"):
            say(f"{each.name}, {each.kind}: the allocator refused {each.found['refusals']} times")
        if each.ended.error is not None:
            causes, error = [], each.ended.error
            while error is not None and len(causes) < 4:
                if type(error).__name__ != "ChildTraceback":
                    causes.append(f"{type(error).__module__}.{type(error).__name__}")
                error = error.__cause__ or error.__context__
            text = " ".join(str(each.ended.error).split())[:120]
            say(f"{each.name}, {each.kind}: {' from '.join(causes)}: {text}")
        if each.last is None:
            continue
        wrong = each.kind in ("first", "learned") and len(each.reports) > 1
        if each.ended.error is not None and (
            each.kind != "too small" or each.last["cause"] != "own_cap"
        ):
            wrong = True
        if wrong:
            for report in each.reports:
                say(f"report of {each.name}, {each.kind}: {dict(report.fields)}")
            say("".join(traceback.format_exception(each.ended.error)) if each.ended.error else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=list(LIBRARIES), help="a library; may repeat"
    )
    return run(check, parser, limit_s=300, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
