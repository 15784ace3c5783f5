"""How often is a learned budget too small where runs need different amounts, and how often twice in a row?

    python benchmarks/budgets.py --out budgets.json

Simulates runs of one task, one after another, in sequences of what they need. Budgets are those of
`prefect_gpu.scheduling.history`, steps are judged by `StepBook`, and what follows an out-of-memory is decided by
`prefect_gpu.scheduling.ladder`; no process is started. Rows are compared on the same sequences: as it is, without the
factor for runs that differ (`growth_factor`), and with all steps taken for alike.

A run *pinches* if its first process has too small a budget. *Again* is the share of pinched runs among those that follow
a pinched one. *Budget / need* says what the room for larger runs costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import _common

from prefect_gpu.child import recorder
from prefect_gpu.scheduling import history, ladder
from prefect_gpu.units import GIB, MIB

#: Of the simulated device, and of each process there.
DEVICE_BYTES = 139 * GIB
CONTEXT_BYTES = 600 * MIB

#: Unused parts of segments, as a share of what is live, differ by run up to this.
MOST_FRAGMENTED = 0.15

#: Runs of a sequence.
RUNS = 12

#: Draws the GiB that each step of a run has live at most. One: it gives no evidence of steps.
Draw = Callable[[random.Random], list[float]]

#: A reading every 5 ms meets at least this share of the peak of a step that is not traced.
LEAST_READ = 0.3

#: Steps that are traced, so that their peaks are exact; the first has the framework's own peak.
TRACED = (0, 1, 2)


def sizes(count: int, spread: float, power: float = 1.0) -> Draw:
    """Return how to draw inputs, the largest of which is up to `spread` times the smallest."""

    def draw(chance: random.Random) -> list[float]:
        return [0.5 + 6 * spread ** (power * (chance.random() - 1)) for _ in range(count)]

    return draw


def largest(draw: Draw) -> Draw:
    """Return how to draw the same without evidence of steps."""
    return lambda chance: [max(draw(chance))]


SEQUENCES: dict[str, Draw] = {
    "equal within 2 %": lambda chance: [chance.gauss(4, 0.04)],
    "log-normal, sigma 0.2": lambda chance: [4 * chance.lognormvariate(0, 0.2)],
    "log-normal, sigma 0.5": lambda chance: [4 * chance.lognormvariate(0, 0.5)],
    "uniform, 1 to 10": lambda chance: [chance.uniform(1, 10)],
    "Pareto, alpha 3": lambda chance: [min(100.0, 2 * chance.paretovariate(3))],
    "one in ten needs 3 x": lambda chance: [2.0 if chance.random() < 0.9 else 6.0],
    "one size a run, up to 8 x": sizes(1, 8),
    "4 texts a run, up to 8 x": largest(sizes(4, 8)),
    "8 images a run, up to 4 x, squared": largest(sizes(8, 4, 2)),
    "4 texts a run, up to 8 x, step()": sizes(4, 8),
    "8 images a run, up to 4 x, squared, step()": sizes(8, 4, 2),
    "a first step of 3.5 x, the others equal, step()": lambda chance: [13.0, *[3.7] * 7],
}


@dataclass(frozen=True)
class Run:
    """One simulated run. Bytes; `None`: a device to itself."""

    processes: int
    budget_bytes: int | None
    need_bytes: int


def simulate(drawn: Sequence[Sequence[float]], chance: random.Random) -> list[Run]:
    """Run a sequence of runs, whose steps have so many GiB live at most."""
    past: list[history.PastRun] = []
    runs = []
    for steps in drawn:
        live = int(max(steps) * GIB)
        # What a first step takes only because it is there is no need.
        tuned = len(steps) > 1 and len(set(steps[1:])) == 1
        needed = int((max(steps[1:]) if tuned else max(steps)) * GIB)
        held = int(needed * (1 + chance.uniform(0, MOST_FRAGMENTED)))
        steady = _steady_bytes(steps, chance)
        lesson = history.learn(past)
        whole = 0 if lesson is None else lesson.whole_bytes
        budget = first = None if lesson is None else lesson.budget_bytes
        climb = ladder.OomHistory()
        while budget is not None and held + CONTEXT_BYTES > budget:
            shortage = _run_out(budget, held, chance)
            kept = _kept(past, "oom", budget, budget - CONTEXT_BYTES)
            wanted = ladder.needed_bytes(shortage)
            past.append(replace(kept, cause=ladder.classify(shortage), wanted_bytes=wanted))
            rung = ladder.next_attempt(climb, "own_cap", shortage, DEVICE_BYTES, whole)
            assert isinstance(rung, ladder.NextAttempt), rung
            climb, budget = rung.climb, rung.budget_bytes
        allowed = (budget or DEVICE_BYTES) - CONTEXT_BYTES
        past.append(_kept(past, "completed", budget or DEVICE_BYTES, min(live, allowed)))
        past[-1] = replace(past[-1], steady_live_bytes=steady)
        past[-1] = replace(past[-1], floor_bytes=history.known_floor_bytes(past) or None)
        del past[: -history.KEPT_RUNS]
        runs.append(Run(climb.processes, first, held + CONTEXT_BYTES))
    return runs


def _steady_bytes(steps: Sequence[float], chance: random.Random) -> int | None:
    """Return what a child says of its steps, as far as histories keep it."""
    if len(steps) < 2:
        return None
    book = recorder.StepBook()
    for number, peak in enumerate(steps):
        share = 1.0 if number in TRACED else chance.uniform(LEAST_READ, 1)
        book.reading(int(peak * GIB * share), 0)
        book.boundary(float(number), 0, 0)
    facts = book.facts()
    return facts.steady_live_bytes if facts is not None and facts.alike else None


def _kept(
    past: Sequence[history.PastRun], outcome: str, budget_bytes: int, live_bytes: int
) -> history.PastRun:
    capped = budget_bytes < DEVICE_BYTES
    return history.PastRun(
        ended_at=past[-1].ended_at + 1 if past else 0.0,
        outcome=outcome,
        budget_bytes=budget_bytes,
        cap_bytes=budget_bytes - CONTEXT_BYTES if capped else None,
        live_bytes=live_bytes,
        context_bytes=CONTEXT_BYTES,
        run_s=1.0,
    )


def _run_out(budget_bytes: int, held_bytes: int, chance: random.Random) -> ladder.Evidence:
    cap = budget_bytes - CONTEXT_BYTES
    # One allocation of some of what is missing: it does not say what would have come after it.
    wanted = max(MIB, int((held_bytes - cap) * chance.random()))
    held = cap - int(wanted * chance.random())
    return ladder.Evidence(
        budget_bytes, cap, CONTEXT_BYTES, wanted, held, held + CONTEXT_BYTES, DEVICE_BYTES
    )


def measure(draw: Draw, chains: int, most_growth: float, alike: float) -> dict[str, float]:
    """Simulate many sequences, the same ones for each `most_growth` and each factor of steps that are alike."""
    pinched = later = again = after = twice = 0
    room = []
    with (
        mock.patch.object(history, "MOST_GROWTH", most_growth),
        mock.patch.object(recorder, "ALIKE_FACTOR", alike),
    ):
        for seed in range(chains):
            chance = random.Random(seed)
            drawn = [draw(chance) for _ in range(RUNS)]
            runs = simulate(drawn, random.Random(-seed - 1))
            short = [run.processes > 1 for run in runs]
            pairs = [b for a, b in itertools.pairwise(short) if a]
            pinched, later = pinched + sum(short), later + RUNS - 1
            again, after = again + sum(pairs), after + len(pairs)
            twice += any(pairs)
            room += [run.budget_bytes / run.need_bytes for run in runs if run.budget_bytes]
    return {
        "pinched": pinched / later,
        "again": again / after if after else 0.0,
        "twice": twice / chains,
        "room": statistics.median(room),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chains", type=int, default=2000, help="sequences of each kind")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--tiny", action="store_true", help="ten sequences, to see that it runs")
    options = parser.parse_args()
    chains = 10 if options.tiny else options.chains
    growth, alike = history.MOST_GROWTH, recorder.ALIKE_FACTOR
    ways = {
        "as it is": (growth, alike),
        "no growth": (1.0, alike),
        "all steps alike": (growth, float("inf")),
    }
    found = {
        name: {
            way: measure(draw, chains, *factors)
            for way, factors in ways.items()
            # Without steps they make no difference.
            if factors[1] == alike or "step()" in name
        }
        for name, draw in SEQUENCES.items()
    }
    text = json.dumps(
        {"release": _common.release(), "chains": chains, "runs": RUNS, "found": found}
    )
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    print(
        f"\n{'what runs need':50}{'':17}{'pinched':>9}{'again':>8}{'twice':>8}{'budget/need':>13}"
    )
    for name, rows in found.items():
        for way, row in rows.items():
            print(
                f"{name:50}{way:17}{row['pinched']:9.1%}{row['again']:8.1%}{row['twice']:8.1%}{row['room']:13.2f}"
            )
    print("\ntwice: sequences in which two runs in a row pinched")


if __name__ == "__main__":
    main()
