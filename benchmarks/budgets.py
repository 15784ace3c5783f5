"""How often is a learned budget too small where runs need different amounts, and how often twice in a row?

    python benchmarks/budgets.py --out budgets.json

Simulates runs of one task, one after another, in sequences of what they need. Budgets are those of
`prefect_gpu.scheduling.history`, and what follows an out-of-memory is decided by `prefect_gpu.scheduling.ladder`; no
process is started. Rows are compared on the same sequences: with the factor for runs that differ (`growth_factor`), and
without it.

A run *pinches* if its first process has too small a budget. *Again* is the share of pinched runs among those that follow
a pinched one. *Budget ÷ need* says what the room for larger runs costs.
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

from prefect_gpu.scheduling import history, ladder
from prefect_gpu.units import GIB, MIB

#: Of the simulated device, and of each process there.
DEVICE_BYTES = 139 * GIB
CONTEXT_BYTES = 600 * MIB

#: Unused parts of segments, as a share of what is live, differ by run up to this.
MOST_FRAGMENTED = 0.15

#: Runs of a sequence.
RUNS = 12

Draw = Callable[[random.Random], float]


def largest_of(count: int, spread: float, power: float = 1.0) -> Draw:
    """Return how to draw what a run needs: of its largest input, of so many, `spread` times the smallest at most."""
    return lambda chance: (
        0.5 + 6 * max((spread ** (chance.random() - 1)) ** power for _ in range(count))
    )


#: GiB that a run has live at most.
SEQUENCES: dict[str, Draw] = {
    "equal within 2 %": lambda chance: chance.gauss(4, 0.04),
    "log-normal, sigma 0.2": lambda chance: 4 * chance.lognormvariate(0, 0.2),
    "log-normal, sigma 0.5": lambda chance: 4 * chance.lognormvariate(0, 0.5),
    "uniform, 1 to 10": lambda chance: chance.uniform(1, 10),
    "Pareto, alpha 3": lambda chance: min(100.0, 2 * chance.paretovariate(3)),
    "longest of 4 texts, up to 8 x": largest_of(4, 8),
    "largest of 8 images, up to 4 x, squared": largest_of(8, 4, 2),
    "one size a run, up to 8 x": largest_of(1, 8),
    "one in ten needs 3 x": lambda chance: 2.0 if chance.random() < 0.9 else 6.0,
}


@dataclass(frozen=True)
class Run:
    """One simulated run. Bytes; `None`: a device to itself."""

    processes: int
    budget_bytes: int | None
    need_bytes: int


def simulate(lives_bytes: Sequence[int], chance: random.Random) -> list[Run]:
    """Run a sequence of runs that have so much live at most."""
    past: list[history.PastRun] = []
    runs = []
    for live in lives_bytes:
        lesson = history.learn(past)
        held = int(live * (1 + chance.uniform(0, MOST_FRAGMENTED)))
        budget = first = None if lesson is None else lesson.budget_bytes
        climb = ladder.Climb()
        while budget is not None and held + CONTEXT_BYTES > budget:
            shortage = _run_out(budget, held, chance)
            kept = _kept(past, "oom", budget, budget - CONTEXT_BYTES)
            wanted = ladder.needed_bytes(shortage)
            past.append(replace(kept, cause=ladder.classify(shortage), wanted_bytes=wanted))
            rung = ladder.next_rung(climb, "own_cap", shortage, DEVICE_BYTES)
            assert isinstance(rung, ladder.Rung), rung
            climb, budget = rung.climb, rung.budget_bytes
        past.append(_kept(past, "completed", budget or DEVICE_BYTES, live))
        past[-1] = replace(past[-1], floor_bytes=history.known_floor_bytes(past) or None)
        del past[: -history.KEPT_RUNS]
        runs.append(Run(climb.processes, first, held + CONTEXT_BYTES))
    return runs


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


def measure(draw: Draw, chains: int, most_growth: float) -> dict[str, float]:
    """Simulate many sequences; the same ones for each `most_growth`."""
    pinched = later = again = after = twice = 0
    room = []
    with mock.patch.object(history, "MOST_GROWTH", most_growth):
        for seed in range(chains):
            chance = random.Random(seed)
            lives = [int(draw(chance) * GIB) for _ in range(RUNS)]
            runs = simulate(lives, random.Random(-seed - 1))
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
    ways = {"with growth": history.MOST_GROWTH, "without": 1.0}
    found = {
        name: {way: measure(draw, chains, most) for way, most in ways.items()}
        for name, draw in SEQUENCES.items()
    }
    text = json.dumps(
        {"release": _common.release(), "chains": chains, "runs": RUNS, "found": found}
    )
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    print(
        f"\n{'what runs need':42}{'':14}{'pinched':>9}{'again':>8}{'twice':>8}{'budget/need':>13}"
    )
    for name, rows in found.items():
        for way, row in rows.items():
            print(
                f"{name:42}{way:14}{row['pinched']:9.1%}{row['again']:8.1%}{row['twice']:8.1%}{row['room']:13.2f}"
            )
    print("\ntwice: sequences in which two runs in a row pinched")


if __name__ == "__main__":
    main()
