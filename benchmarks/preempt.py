"""How soon does an urgent task have a GPU that a training holds, and how much of the training is lost?

A training in one flow process holds 80 % of a device of 40 GB (the runner's `headroom` withholds the rest), and an evaluation in
another flow process, of a higher priority, needs 60 %. It waits for the training's end; or the training's flow is killed and
started again afterwards; or the training has the tag `gpu:preemptible` and is suspended.

    python benchmarks/preempt.py --out preempt.json
    python benchmarks/preempt.py --between-devices        # two devices of one model

With `--between-devices` a training holds 45 % of each of two devices, and a task of the same priority needs 90 % of one: it
waits, or one of the trainings is moved to the other device.

Measured are the seconds from `submit` until the first kernel of the urgent task has ended, the seconds of the training from its
first `submit` to its end, and the steps that were done twice. Each training notes its losses, which must be equal bit for
bit to those of a training that nothing disturbed: the one that is waited for, or else one that runs before. Such a training also
tells the scheduler how long one takes. In the rows `suspend` and `move` the first training runs to its end; later ones are
stopped once they have gone on. Before the first turn of each row a small task has run in each flow, and standbys are ready.

Needs a driver of 580 or later, PyTorch, and as much host memory as the training holds.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import _bound
import _common
import _devices
from _preempt_flow import LEFT_BYTES, LIMIT_S, STEP_S, FlowProcess, Task

MIB, GIB = _devices.MIB, 2**30

ROWS = {
    "wait": "waits for the training's end",
    "rerun": "training killed, run again afterwards",
    "suspend": "training suspended (gpu:preemptible)",
    "wait-two": "two devices: waits for a training's end",
    "move": "two devices: a training moved (gpu:preemptible)",
}

#: Rows of one device, and of two.
ONE, TWO = ("wait", "rerun", "suspend"), ("wait-two", "move")

#: Rows in which trainings are preemptible, and run several times.
PREEMPTIBLE = ("suspend", "move")

#: Bytes of each device that may be used.
USABLE_BYTES = 40 * 10**9

#: What a training and the urgent task hold, as a fraction of that, on one device and on two. Of two devices a little less than
#: half: what the driver itself keeps counts too.
FRACTIONS = {1: (0.8, 0.6), 2: (0.45, 0.9)}

#: Priority of the urgent task, on one device and on two: what is moved may have the same.
PRIORITY = {1: 10, 2: 0}

#: Seconds of a training's steps. What is left of them when the urgent task comes must be longer than the scheduler takes a move
#: to last: to the host (18 s), or, for one of the same priority, to the host, to the other device and once more to the host
#: (25 s). Otherwise the training's end is waited for.
SECONDS = {1: 26.0, 2: 32.0}

#: Seconds that the urgent task computes.
URGENT_S = 0.5

#: Steps after which the urgent task is submitted, and after which a training has gone on.
BEFORE_STEPS, AFTER_STEPS = 40, 10

#: Aims: bytes each second to the host, and through it to another device, and seconds beside that.
AIM_BYTES_S = {"suspend": 1.7 * GIB, "move": 1.3 * GIB}
AIM_FIXED_S = 2.5

#: Seconds that a row, and a turn of it, is expected to take at first, to leave out what would not end within the budget.
GUESS_S = {"wait": 50.0, "rerun": 60.0, "suspend": 70.0, "wait-two": 45.0, "move": 55.0}

#: Seconds in which trainings that have ended leave their devices.
SETTLE_S = 3.0

#: Seconds of a later turn as a fraction of those of the first.
LATER_FRACTION = 0.6

#: A time between two steps from which on a training is taken to have stood still.
PAUSE_S = 0.5


class Step(NamedTuple):
    """A line of a training's file."""

    number: int
    loss: str
    at: float


def read_steps(path: Path) -> list[Step]:
    """Read what a training has noted so far; a line that is not written to its end is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    found = (line.split() for line in whole.splitlines())
    return [Step(int(number), loss, float(at)) for number, loss, at in found]


def lost_steps(steps: Iterable[Step]) -> int:
    """Count the steps that were done more than once."""
    return sum(count - 1 for count in Counter(step.number for step in steps).values())


def differing_steps(steps: Iterable[Step], undisturbed: Mapping[int, str]) -> int:
    """Count the steps whose loss is another one than without a disturbance."""
    return sum(undisturbed.get(step.number) != step.loss for step in steps)


def longest_pause_s(steps: Sequence[Step]) -> float:
    """Return the longest time between two steps in seconds; 0: it never stood still."""
    gaps = (later.at - step.at for step, later in itertools.pairwise(steps))
    longest_s = max(gaps, default=0.0)
    return longest_s if longest_s > PAUSE_S else 0.0


def aim_s(row: str, moved_bytes: float) -> float:
    """Return within how many seconds the urgent task is to be ready."""
    return moved_bytes / AIM_BYTES_S[row] + AIM_FIXED_S


# One row, in a process of its own.


@dataclass
class Training:
    """A training that was submitted, and what it notes."""

    task: Task
    path: Path
    seed: int

    def wait_for_steps(self, count: int) -> None:
        """Wait until it has done so many steps in all.

        Raises:
            RuntimeError: It ended before, or took longer than `LIMIT_S`.
        """
        deadline = time.monotonic() + LIMIT_S
        while len(read_steps(self.path)) < count:
            if self.task.has_ended():
                raise RuntimeError(f"a training ended too soon: {self.task.ended()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a training did not do {count} steps within {LIMIT_S:g} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Let it end after the step that it is at."""
        Path(f"{self.path}.stop").touch()

    def live(self) -> tuple[int, int]:
        """Return the bytes that it has allocated, and its process id."""
        held, pid, *_ = Path(f"{self.path}.live").read_text().split()
        return int(held), int(pid)


class Row:
    """Measures one row in this process, and tells each turn as it ends.

    Args:
        row: Which.
        given: Options of the benchmark.
    """

    def __init__(self, row: str, given: argparse.Namespace) -> None:
        self._row, self._given, self._on_gpu = row, given, given.on_gpu
        self._folder = given.folder
        self._count = 2 if row in TWO else 1
        self._steps = max(BEFORE_STEPS + AFTER_STEPS, int(seconds_of(given, row) / STEP_S))
        held, urgent = FRACTIONS[self._count]
        self._held_bytes, self._urgent_bytes = (
            int(USABLE_BYTES * held),
            int(USABLE_BYTES * urgent),
        )
        self._tags: dict[str, Any] = {"memory": _size(self._held_bytes), "priority": 0}
        if row in PREEMPTIBLE:
            self._tags["preemptible"] = True
        self._trainer, self._urgent = self._make_flow("trainer"), self._make_flow("urgent")
        self._turns = 0

    def _make_flow(self, name: str) -> FlowProcess:
        log = Path(self._folder, f"{self._row}-{name}.log")
        if not self._on_gpu:
            devices = f"simulated:{self._count}x40GB@{self._folder.name}"
            return FlowProcess(devices, "256MiB", False, log)
        kept_bytes = min(_devices.usable_bytes()) - USABLE_BYTES
        return FlowProcess("nvml", _size(kept_bytes), True, log)

    def measure(self) -> None:
        """Measure all turns that there is time for; print what the flows logged if one fails."""
        try:
            self._measure()
        except Exception:
            for each in (self._trainer, self._urgent):
                print(each.log(), flush=True)
                each.kill()
            raise

    def _measure(self) -> None:
        flows = (self._trainer, self._urgent)
        small = {"memory": "3GiB"}
        for task in [
            each.submit("evaluate", small, budget_bytes=3 * GIB, seconds=0.0) for each in flows
        ]:
            if error := task.ended().get("error"):
                raise RuntimeError(error)
        if not self._reference(0).exists():
            # The row that waits disturbs no training.
            for training in [] if row_waits(self._row) else self._begin():
                self._end(training, is_undisturbed=True)
        # Standbys import what they need.
        _devices.wait_until_idle(self._given.pause)
        turns = self._given.turns if self._row in PREEMPTIBLE else 1
        deadline = _common.STARTED_S + self._given.budget
        for turn in range(turns):
            began_s = time.monotonic()
            self._turn(is_whole=turn == 0)
            took_s = time.monotonic() - began_s
            # In the first turn trainings run to their ends.
            next_s = took_s if turn else took_s * LATER_FRACTION
            if turn + 1 < turns and time.monotonic() + next_s > deadline:
                _common.tell({"row": self._row, "left_out": turns - turn - 1})
                break
        if row_waits(self._row):
            _devices.wait_until_idle(self._given.pause)
            urgent = self._submit_urgent()
            ready = urgent.ended()["value"]["ready"]
            _common.tell({"row": self._row, "free_s": ready - urgent.submitted()})
        for each in (self._trainer, self._urgent):
            each.close()

    def _submit_urgent(self) -> Task:
        return self._urgent.submit(
            "evaluate",
            {"memory": _size(self._urgent_bytes), "priority": PRIORITY[self._count]},
            budget_bytes=self._urgent_bytes,
            seconds=URGENT_S,
        )

    def _submit_training(self, path: Path, seed: int) -> Task:
        return self._trainer.submit(
            "train",
            self._tags,
            path=str(path),
            budget_bytes=self._held_bytes,
            steps=self._steps,
            seed=seed,
        )

    def _begin(self) -> list[Training]:
        """Submit a training for each device; return them once all have done steps."""
        if self._turns and self._count > 1:
            # While those before are still leaving a device, both new ones would be placed on the other.
            time.sleep(SETTLE_S)
        self._turns += 1
        found = []
        for seed in range(self._count):
            path = self._folder / f"{self._row}-{self._turns}-{seed}"
            found.append(Training(self._submit_training(path, seed), path, seed))
        for training in found:
            training.wait_for_steps(BEFORE_STEPS)
        return found

    def _reference(self, seed: int) -> Path:
        """Return where the losses of an undisturbed training are, or go to."""
        return Path(self._folder, f"undisturbed-{self._count}-{seed}.json")

    def _end(self, training: Training, is_undisturbed: bool) -> float:
        """Wait for the end of a training; return its seconds since the epoch."""
        ended = training.task.ended()
        if "error" in ended:
            raise RuntimeError(f"a training failed: {ended['error']}")
        if is_undisturbed:
            losses = {step.number: step.loss for step in read_steps(training.path)}
            self._reference(training.seed).write_text(json.dumps(losses))
        return float(ended["ended"])

    def _turn(self, is_whole: bool) -> None:
        row = self._row
        trainings = self._begin()
        began = [training.task.submitted() for training in trainings]
        live = [training.live() for training in trainings]
        where = self._devices_of(live)
        urgent = self._submit_urgent()
        submitted = urgent.submitted()
        if row == "rerun":
            self._trainer.kill()
        found = urgent.ended()
        if "error" in found:
            raise RuntimeError(f"the urgent task failed: {found['error']}")
        if row == "rerun":
            self._trainer = self._make_flow("trainer")
            (training,) = trainings
            training.task = self._submit_training(training.path, training.seed)
        moved_to: list[list[int]] = []
        logged = self._trainer.log()
        if row in PREEMPTIBLE:
            for training in trainings:
                training.wait_for_steps(len(read_steps(training.path)) + AFTER_STEPS)
            moved_to = self._devices_of(live)
        ended: list[float] = []
        for training in trainings:
            if is_whole:
                ended.append(self._end(training, is_undisturbed=row_waits(row)))
            else:
                training.stop()
                training.task.ended()
        steps = [read_steps(training.path) for training in trainings]
        pauses = [longest_pause_s(each) for each in steps]
        # Of two, the one that stood still was moved.
        moved = max(range(len(trainings)), key=pauses.__getitem__)
        if row in PREEMPTIBLE and not max(pauses):
            print(f"nothing stood still:\n{logged}{self._urgent.log()}", flush=True)
        _common.tell(
            {
                "row": row,
                "turn": self._turns,
                "ready_s": found["value"]["ready"] - submitted,
                "line_s": found["value"]["line"] - submitted,
                "live_bytes": live[moved][0],
                "pause_s": pauses[moved],
                "training_s": max(ended) - min(began) if ended else None,
                "steps": sum(map(len, steps)),
                "lost_steps": sum(map(lost_steps, steps)),
                "differing_steps": sum(
                    differing_steps(each, self._undisturbed(training.seed))
                    for each, training in zip(steps, trainings, strict=True)
                ),
                "devices": where,
                "devices_after": moved_to,
            }
        )

    def _undisturbed(self, seed: int) -> dict[int, str]:
        found: dict[str, str] = json.loads(self._reference(seed).read_text())
        return {int(number): loss for number, loss in found.items()}

    def _devices_of(self, live: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return on which devices NVML shows each training."""
        if not self._on_gpu:
            return []
        read = _devices.read_processes(True, {pid for _, pid in live})
        return [sorted(index for owner, index in read if owner == pid) for _, pid in live]


def row_waits(row: str) -> bool:
    """Return whether the urgent task waits for the end of a training in a row."""
    return row.startswith("wait")


def _size(value: int) -> str:
    return f"{value // MIB}MiB"


def seconds_of(given: argparse.Namespace, row: str) -> float:
    """Return the seconds of the steps of a row's training."""
    return float(given.seconds or SECONDS[2 if row in TWO else 1])


# All rows.


def unavailable_reason(row: str, on_gpu: bool) -> str:
    """Return why a row cannot be measured on this machine; empty if it can."""
    from prefect_gpu import gpu

    if on_gpu and not _common.installed("torch"):
        return "not installed: torch"
    if row in PREEMPTIBLE and "preemptible" not in inspect.signature(gpu).parameters:
        return "not there: gpu has no preemptible"
    if row in PREEMPTIBLE and not on_gpu:
        return "no GPU: simulated memory is not moved"
    return ""


def make_checks(runs: Sequence[Mapping[str, Any]]) -> list[_bound.Check]:
    """Judge the turns in which trainings were suspended or moved."""
    checks = []
    for row in PREEMPTIBLE:
        own = [run for run in runs if run["row"] == row]
        if not own:
            continue
        ready_s = statistics.median(run["ready_s"] for run in own)
        aim = aim_s(row, statistics.median(run["live_bytes"] for run in own))
        name = f"{row}: submit to CUDA ready, median of {len(own)}"
        checks += [
            _bound.Check(name, ready_s, aim, "s"),
            _bound.Check(f"{row}: steps lost", sum(run["lost_steps"] for run in own), 0),
            _bound.Check(
                f"{row}: trainings that stood still",
                sum(run["pause_s"] > 0 for run in own),
                len(own),
                at_least=True,
            ),
        ]
    checks.append(
        _bound.Check(
            "losses unlike those of an undisturbed training",
            sum(run["differing_steps"] for run in runs),
            0,
        )
    )
    return checks


def print_rows(
    runs: Sequence[Mapping[str, Any]], rows: Sequence[str], absent: Mapping[str, str]
) -> None:
    """Print a line for each row."""
    table = []
    for row in rows:
        own = [run for run in runs if run["row"] == row]
        if not own:
            table.append([ROWS[row], absent.get(row, "not measured"), *([""] * 7)])
            continue
        whole = [run["training_s"] for run in own if run["training_s"] is not None]
        live = [run["live_bytes"] for run in own]
        table.append(
            [
                ROWS[row],
                str(len(own)),
                _common.spread([run["ready_s"] for run in own], 2),
                f"≤ {aim_s(row, statistics.median(live)):.1f}" if row in AIM_BYTES_S else "",
                _common.spread(whole),
                _common.spread([run["pause_s"] for run in own]),
                _common.spread([run["lost_steps"] for run in own], 0),
                _common.spread([size / GIB for size in live]),
                str(sum(run["differing_steps"] for run in own)),
            ]
        )
    _common.print_table(
        [
            "the urgent task",
            "turns",
            "submit to CUDA ready, s",
            "aim",
            "training in all, s",
            "it stood still, s",
            "steps lost",
            "live, GiB",
            "losses that differ",
        ],
        table,
    )


def main() -> None:
    """Measure every row that there is time for; print a table and checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--between-devices", action="store_true", help="needs two of one model")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), help="default: all of one device")
    parser.add_argument("--turns", type=int, default=5, help="of the rows suspend and move")
    parser.add_argument("--seconds", type=float, default=None, help="of a training's steps")
    parser.add_argument("--pause", type=float, default=6.0, help="most seconds for standbys")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    _common.add_arguments(parser, ROWS, budget_s=240.0, seed_of="nothing: all of it is fixed")
    given = parser.parse_args()
    if given.row:
        Row(given.row, given).measure()
        return
    devices = _devices.nvidia()
    on_gpu = bool(devices) and not given.tiny
    rows = given.rows or list(TWO if given.between_devices else ONE)
    if given.tiny:
        # However loaded the machine is: it shows that everything runs.
        rows = given.rows or list(ROWS)
        given.seconds, given.pause, given.budget = 4.0, 1.0, 600.0
    elif not on_gpu:
        raise SystemExit("no GPU: NVML shows no device; --tiny tries it out on simulated ones")
    wanted = 2 if {*rows} & {*TWO} else 1
    if on_gpu and len(devices["devices"]) < wanted:
        raise SystemExit(f"{wanted} devices are wanted, and NVML shows {len(devices['devices'])}")
    if on_gpu and wanted == 2 and {*rows} & {*ONE}:
        raise SystemExit("rows of one device and of two are measured in runs of their own")
    if on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(wanted)))
    head = {
        "versions": _common.versions("torch", "nvidia-ml-py"),
        **devices,
        "on_gpu": on_gpu,
        "usable_bytes_each": USABLE_BYTES,
        "left_bytes": LEFT_BYTES,
        "fractions": FRACTIONS,
    }
    print(json.dumps(head), flush=True)
    results = _common.Results(given.out, head)
    absent: dict[str, str] = {}

    def take(found: dict[str, Any]) -> None:
        if "left_out" in found:
            absent[found["row"]] = f"{found['left_out']} turns left out: --budget"
            _common.say(f"{ROWS[found['row']]}: {absent[found['row']]} {given.budget:.0f}")
        elif "free_s" in found:
            results.put("free_s", found["free_s"])
        else:
            results.add(found)
            _common.say(
                f"{ROWS[found['row']]}: CUDA ready after {found['ready_s']:.2f} s, "
                f"stood still {found['pause_s']:.1f} s, {found['lost_steps']} steps lost"
            )

    with tempfile.TemporaryDirectory() as folder, _common.prefect_server(given.api_url) as url:
        _common.say("the server is there")
        used_before = _devices.used_bytes()
        for row in rows:
            left_s = given.budget - (time.monotonic() - _common.STARTED_S)
            problem = unavailable_reason(row, on_gpu)
            if not problem and not given.tiny and left_s < GUESS_S[row]:
                problem = f"no time within --budget {given.budget:.0f}"
            if problem:
                absent[row] = problem
                _common.say(f"{ROWS[row]}: {problem}")
                continue
            began_s = time.monotonic()
            options = ["--turns", given.turns, "--pause", given.pause, "--folder", folder]
            options += ["--seconds", given.seconds] if given.seconds else []
            options += ["--on-gpu"] if on_gpu else []
            problem = _common.stream(
                __file__,
                ["--row", row, "--budget", str(left_s), *map(str, options)],
                url,
                # A turn that was begun may end.
                max(10.0, left_s) + GUESS_S[row],
                take,
                {"PREFECT_INTEGRATIONS_GPU_LEDGER": folder},
            )
            if problem:
                absent[row] = problem
            _common.say(f"{ROWS[row]}: {time.monotonic() - began_s:.0f} s {problem}".rstrip())
        left_bytes = _devices.settled_difference_bytes(used_before)
    runs = results.found["runs"]
    results.put("absent", absent)
    checks = make_checks(runs)
    checks.append(_bound.Check("left on the devices", left_bytes / MIB, 0, "MiB"))
    results.put("checks", [str(check) for check in checks] if on_gpu else [])
    if given.json:
        print(json.dumps(results.found, indent=1))
    held, urgent = (f"{fraction:.0%}" for fraction in FRACTIONS[wanted])
    print(
        f"\nmedian (lowest–highest); {wanted} of {devices.get('devices', 'no GPU')}, 40 GB of each; a training holds "
        f"{held}, the urgent task needs {urgent}"
    )
    if "free_s" in results.found:
        print(f"on a free device CUDA is ready {results.found['free_s']:.2f} s after submit")
    print()
    print_rows(runs, rows, absent)
    print()
    for check in checks if on_gpu else []:
        print(check)
    if not on_gpu:
        print("no GPU: nothing is judged")
        # What runs anywhere has run: `_tiny.py` counts on the exit status.
        missing = [row for row in rows if row not in PREEMPTIBLE and row in absent]
        if missing:
            raise SystemExit(f"not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main()
