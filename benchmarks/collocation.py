"""Sixty training loops on four GPUs of 40 GB: one task a GPU, or several side by side?

The setting is the one in which collocation is published: 60 real trainings of 0.6 to 29 GiB, a few on two
GPUs, on four GPUs of 40 GB, against exclusive assignment; the best published makespan is 0.65 of it.
Here each training takes seconds instead of minutes, and of larger GPUs all but 40 GB are withheld by the
runner's `headroom`. All are submitted at once, in the same order.

    python benchmarks/collocation.py --scheme exclusive --out exclusive.json     # about three minutes
    python benchmarks/collocation.py --scheme ours --work exclusive.json --out ours.json
    python benchmarks/collocation.py --compare exclusive.json ours.json
    python benchmarks/collocation.py --tiny                                      # that it runs

Both schemes run under `GPUTaskRunner`, so that only the sharing of devices differs: `gpu:exclusive` (a task
on two GPUs has both), or budgets from tags. The exclusive scheme settles how many steps each training
does and measures its peak; the other does the same steps, with budgets of that peak, 1 % and 256 MiB, and
900 MiB on each of two GPUs, which the runner leaves to NCCL. The trainings (`_trainings.py`) prepare their
data on the CPU; for how much of the time they keep a GPU busy is printed, and bounds what sharing can win.
Before it is timed, a scheme runs one small task, as a machine that is in use has done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import _bound
import _common
import _devices
import _trainings

SCHEMES = {"exclusive": "one task a GPU", "ours": "side by side, by budget"}

#: Bytes of each device that may be used.
CAP_BYTES = 40 * 10**9

MIB, GIB = _devices.MIB, 2**30

#: How much less than the cap a task has that has a GPU to itself.
EXCLUSIVE_LESS_BYTES = 3 * GIB // 2

#: What is aimed for: of the exclusive scheme's makespan. The best published is 0.65.
MOST_OF_EXCLUSIVE = 0.6

#: Where there is no GPU: processes are real, and their memory is not counted. The host is only one
#: device, and some tasks want two.
TINY_DEVICES = "simulated:4x40GB"


# One scheme, in a process of its own.


def measure(
    scheme: str,
    jobs: list[_trainings.Training],
    work: dict[str, dict[str, Any]],
    given: argparse.Namespace,
    settings: dict[str, Any],
) -> None:
    """Run all trainings in one flow; tell each, and the whole."""
    from prefect import flow, task
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner, gpu

    on_gpu: bool = given.on_gpu
    more = dict(settings)
    if given.max_tasks_per_device is not None and scheme == "ours":
        more["max_tasks_per_device"] = given.max_tasks_per_device
    if on_gpu:
        usable = _devices.usable_bytes()[: given.devices]
        more |= {
            "devices": list(range(given.devices)),
            "headroom": _devices.headroom(usable, int(given.cap * 1e9)),
        }
    else:
        more |= {"devices": TINY_DEVICES}
    runner = GPUTaskRunner(**more)
    body = task(_trainings.train, name="train")
    seen: dict[str, Any] = {}

    def submit(job: _trainings.Training) -> Any:
        arguments = {**dataclasses.asdict(job), "on_gpu": on_gpu, "steps": 0}
        tags: dict[str, Any] = {"framework": "torch", "cpus": 1, "count": job.devices}
        if scheme == "exclusive":
            # What the cap leaves beside the contexts of processes that stand by.
            tags |= {
                "exclusive": True,
                "memory": f"{(int(given.cap * 1e9) - EXCLUSIVE_LESS_BYTES) // MIB}MiB",
            }
        else:
            known = work[job.name]
            arguments["steps"] = known["steps"]
            needs = _bound.budget_bytes(known["peak_bytes"] or job.size_bytes, job.devices)
            tags["memory"] = f"{-(-needs // MIB)}MiB"
        return body.with_options(tags=gpu(**tags)).submit(**arguments)

    @flow(name=f"collocation-{scheme}", task_runner=runner)
    def train_all() -> None:
        seen["flow_run_id"] = str(flow_run.id)
        energy_j = _devices.energy_j(given.devices) if on_gpu else None
        seen["began"] = began = time.time()
        futures = [(job, submit(job)) for job in jobs]
        seen["results"] = results = []
        for job, future in futures:
            results.append((job, future.result(raise_on_failure=False)))
            if len(results) % 10 == 0:
                _common.say(f"{scheme}: {len(results)} of {len(jobs)} have ended")
        seen["makespan_s"] = time.time() - began
        after_j = None if energy_j is None else _devices.energy_j(given.devices)
        seen["energy_j"] = None if energy_j is None or after_j is None else after_j - energy_j

    used_before = _devices.used_by_device()
    if on_gpu:
        _common.warm_up(runner, ["torch"], on_gpu)
    with _devices.Sampler(on_gpu) as sampler:
        train_all()
    failed, out_of_memory = 0, 0
    for job, found in seen["results"]:
        if not isinstance(found, dict):
            error = f"{type(found).__name__}: {found}"[:500]
            failed += 1
            out_of_memory += _common.says_out_of_memory(error)
            _common.tell({"kind": "task", "name": job.name, "error": error})
            continue
        peak = sampler.peak_bytes(found["pid"]) if on_gpu else 0
        _common.tell({"kind": "task", **found, "error": "", "peak_bytes": peak})
    reports = _common.read_reports(seen["flow_run_id"], len(jobs))
    summary = _common.summarise_reports(reports)
    record = {
        "kind": "row",
        "makespan_s": seen["makespan_s"],
        "energy_j": seen["energy_j"],
        "failed": failed,
        # A task that ran out of memory and then ended well is in the reports alone.
        "out_of_memory": max(out_of_memory, summary["out_of_memory"]),
        "reports": summary,
        "busy_fraction": sampler.busy_fraction(seen["began"], time.time()),
        "leaked_bytes": _devices.settled_difference_bytes(sum(used_before)),
        "used_peak_bytes": max(
            (peak - before for peak, before in zip(sampler.used_peaks, used_before, strict=False)),
            default=0,
        ),
    }
    _common.tell(record)


# Both schemes.


def read_scheme(path: Path, what: str) -> dict[str, Any]:
    """Read what a scheme has written.

    Raises:
        SystemExit: It is not there, or its scheme did not end.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not found["row"]["makespan_s"]:
            raise ValueError("no makespan")
        return found
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(
            f"{what} {path}: no complete scheme in it ({type(error).__name__}); accepted is a file "
            f"that collocation.py --scheme NAME --out FILE has written to its end"
        ) from None


def run_scheme(
    scheme: str, given: argparse.Namespace, on_gpu: bool, url: str, out: Path | None
) -> dict[str, Any]:
    """Run one scheme in a process of its own; give what it found."""
    jobs = _trainings.plan(given.seed, given.tasks, given.scale, given.tiny)
    if scheme == "ours":
        if given.work is None:
            raise SystemExit(
                "--scheme ours does the steps that the other did: give --work FILE, which "
                "collocation.py --scheme exclusive --out FILE has written"
            )
        earlier = read_scheme(given.work, "--work")
        if earlier["tasks"] != [dataclasses.asdict(job) for job in jobs]:
            raise SystemExit(
                f"--work {given.work}: it has other trainings (seed {earlier['seed']}); give the "
                f"same --seed, --tasks and --scale"
            )
    head = {
        "scheme": scheme,
        "versions": _common.versions("torch", "nvidia-ml-py"),
        **_devices.nvidia(),
        "on_gpu": on_gpu,
        "used_devices": given.devices,
        "cap_gb": given.cap,
        "seed": given.seed,
        "scale": given.scale,
        "settings": given.settings,
        "max_tasks_per_device": given.max_tasks_per_device,
        "tasks": [dataclasses.asdict(job) for job in jobs],
    }
    print(json.dumps({k: v for k, v in head.items() if k != "tasks"}), flush=True)
    results = _common.Results(out, head)

    def take(found: dict[str, Any]) -> None:
        if found["kind"] == "row":
            results.put("row", found)
        else:
            results.add(found)

    options = ["--tasks", given.tasks, "--seed", given.seed, "--scale", given.scale]
    options += ["--devices", given.devices, "--cap", given.cap]
    options += ["--work", given.work] if given.work is not None else []
    if given.max_tasks_per_device is not None:
        options += ["--max-tasks-per-device", given.max_tasks_per_device]
    for pair in given.settings:
        options += ["--with", pair]
    options += ["--on-gpu"] if on_gpu else []
    options += ["--tiny"] if given.tiny else []
    left_s = given.budget - (time.monotonic() - _common.STARTED_S)
    problem = _common.stream(
        __file__,
        ["--row", scheme, *map(str, options)],
        url,
        max(10.0, left_s),
        take,
        dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    )
    results.put("problem", problem)
    if "row" not in results.found:
        raise SystemExit(f"{SCHEMES[scheme]}: {problem or 'it told nothing'}")
    row = results.found["row"]
    _common.say(
        f"{SCHEMES[scheme]}: makespan {row['makespan_s']:.1f} s, {row['failed']} failed, "
        f"{row['out_of_memory']} out of memory"
    )
    return results.found


def work_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results of a scheme's trainings by name, without those that failed."""
    return {run["name"]: run for run in found["runs"] if not run["error"]}


def compare(exclusive: dict[str, Any], ours: dict[str, Any]) -> list[_bound.Check]:
    """Print both schemes side by side; give the checks.

    Raises:
        SystemExit: They did not do the same.
    """
    pair = {found["scheme"]: found for found in (exclusive, ours)}
    same = ("tasks", "seed", "cap_gb", "used_devices", "on_gpu")
    if set(pair) != set(SCHEMES) or any(exclusive[k] != ours[k] for k in same):
        raise SystemExit(
            "--compare: accepted are two files, one of each scheme, of the same trainings, seed, "
            "devices and cap"
        )
    base = pair["exclusive"]["row"]["makespan_s"]
    devices = {task["name"]: task["devices"] for task in exclusive["tasks"]}
    alone = work_of(pair["exclusive"])
    table = []
    for scheme, name in SCHEMES.items():
        found = pair[scheme]
        done = work_of(found)
        took = {n: run["ended"] - run["ready"] for n, run in done.items()}
        slower = [took[n] / (alone[n]["ended"] - alone[n]["ready"]) for n in took if n in alone]
        row = found["row"]
        same_steps = sum(
            n in alone and run["steps"] == alone[n]["steps"] for n, run in done.items()
        )
        held_s = sum(took[n] * devices[n] for n in took)
        table.append(
            [
                name,
                f"{row['makespan_s']:.1f}",
                f"{row['makespan_s'] / base:.2f}",
                f"{held_s / row['makespan_s'] / found['used_devices']:.2f}",
                _common.spread(slower, 2),
                f"{row['busy_fraction']:.0%}" if found["on_gpu"] else "no GPU",
                f"{row['energy_j'] / 1000:.1f}" if row.get("energy_j") else "not told",
                f"{row['used_peak_bytes'] / 1e9:.1f}" if found["on_gpu"] else "no GPU",
                str(row["out_of_memory"]),
                str(row["failed"]),
                f"{row['leaked_bytes'] / MIB:.0f}" if found["on_gpu"] else "no GPU",
                f"{same_steps} of {len(found['tasks'])}",
            ]
        )
    peaks = [run["peak_bytes"] / GIB for run in alone.values()]
    print(
        f"\n{len(exclusive['tasks'])} trainings, {sum(n > 1 for n in devices.values())} on two GPUs, "
        f"on {exclusive['used_devices']} of {exclusive['cap_gb']:g} GB; seed {exclusive['seed']}; "
        f"peaks GiB {_common.spread(peaks)}; seconds alone "
        f"{_common.spread([r['ended'] - r['ready'] for r in alone.values()])}\n"
    )
    _common.print_table(
        [
            "scheme",
            "makespan, s",
            "of exclusive",
            "tasks a GPU",
            "times as long as alone",
            "GPUs busy",
            "kJ",
            "most used of one, GB",
            "out of memory",
            "failed",
            "left, MiB",
            "same steps",
        ],
        table,
    )
    row = pair["ours"]["row"]
    return [
        _bound.Check(
            "makespan, of the exclusive one's (the best published: 0.65)",
            row["makespan_s"] / base,
            MOST_OF_EXCLUSIVE,
        ),
        _bound.Check("out of memory", row["out_of_memory"], 0),
        _bound.Check("failed", row["failed"] + pair["exclusive"]["row"]["failed"], 0),
        _bound.Check(
            "most used of one device", row["used_peak_bytes"] / 1e9, exclusive["cap_gb"], "GB"
        ),
    ]


def main() -> None:
    """Run a scheme, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--scheme", choices=tuple(SCHEMES))
    parser.add_argument("--work", type=Path, help="what the exclusive scheme wrote")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE")
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--devices", type=int, default=4, help="how many GPUs")
    parser.add_argument("--cap", type=float, default=40.0, help="GB of each that may be used")
    parser.add_argument("--scale", type=float, default=1.0, help="of each training's seconds")
    parser.add_argument("--max-tasks-per-device", type=int, default=None)
    _common.add_settings(parser)
    _common.add_arguments(
        parser, SCHEMES, budget_s=540.0, seed_of="sizes, kinds, seconds and order"
    )
    given = parser.parse_args()
    settings = _common.read_settings(given.settings)
    if given.compare:
        print_checks(compare(*(read_scheme(path, "--compare") for path in given.compare)))
        return
    if given.tiny:
        # However loaded the machine is: it shows that everything runs.
        given.tasks, given.budget = 3, 600.0
    if given.row:
        jobs = _trainings.plan(given.seed, given.tasks, given.scale, given.tiny)
        work = work_of(read_scheme(given.work, "--work")) if given.work is not None else {}
        # What failed alone says nothing of its steps.
        jobs = [job for job in jobs if given.row == "exclusive" or job.name in work]
        measure(given.row, jobs, work, given, settings)
        return
    if not _common.installed("torch"):
        print("not installed: torch")
        return
    wanted = [*settings, *(["max_tasks_per_device"] if given.max_tasks_per_device else [])]
    if wanted and (problem := _common.runner_lacks(*wanted)):
        raise SystemExit(problem)
    if given.tiny:
        with tempfile.TemporaryDirectory() as folder, _common.prefect_server(given.api_url) as url:
            first = Path(folder, "exclusive.json")
            exclusive = run_scheme("exclusive", given, False, url, first)
            given.work = first
            compare(exclusive, run_scheme("ours", given, False, url, given.out))
        print("no GPU: simulated devices, and nothing is judged")
        return
    if given.scheme is None:
        parser.error("give --scheme exclusive or ours, --compare FILE FILE, or --tiny")
    there = len(_devices.handles())
    if there < given.devices:
        raise SystemExit(
            f"no GPU: {given.devices} are wanted and NVML shows {there}; --devices takes fewer "
            f"(at least 2), --tiny tries it out on the CPU"
        )
    with _common.prefect_server(given.api_url) as url:
        found = run_scheme(given.scheme, given, True, url, given.out)
    if given.json:
        print(json.dumps(found, indent=1))
    if given.scheme == "ours":
        print_checks(compare(read_scheme(given.work, "--work"), found))


def print_checks(checks: list[_bound.Check]) -> None:
    """Print each verdict."""
    print()
    for check in checks:
        print(check)


if __name__ == "__main__":
    main()
