"""How good are budgets that are estimated from other values of a parameter, and what does a sweep gain by them?

    python -m tests.gpu.check_estimates [--models 25] [--sweep 12]

First, each of 25 models of torchvision and timm trains with five batch sizes, each in a first run. From every two sizes the
other three are estimated. The error is the difference between the estimated budget and the one that is learned from the
run itself, as a part of NVML's peak of that run. A run would need a *second process* if its framework had allocated more
than the estimated budget leaves it. Then a model trains with 12 batch sizes that are all new, with a number in
`gpu:learn_by` and, for comparison, with the same number as text.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from prefect import task

from prefect_gpu import gpu, step
from prefect_gpu.scheduling.history import PastRun, estimate, learn
from tests.gpu._checks import (
    gather,
    installed,
    percent,
    read_histories,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

#: Of torchvision, and of timm.
MODELS = (
    *("alexnet", "vgg11", "resnet18", "resnet50", "squeezenet1_1", "densenet121", "googlenet"),
    *("mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x1_0", "mnasnet1_0", "efficientnet_b0"),
    *("regnet_y_400mf", "convnext_tiny", "swin_t", "vit_b_32"),
    *("timm/vit_tiny_patch16_224", "timm/vit_small_patch16_224", "timm/deit_small_patch16_224"),
    *("timm/mixer_b16_224", "timm/resmlp_12_224", "timm/poolformer_s12", "timm/convmixer_768_32"),
    *("timm/ghostnet_100", "timm/repvgg_a0"),
)

BATCHES = (4, 8, 16, 32, 64)

#: Of a sweep: sizes between the least and the largest.
SWEEP = (64, 2, 48, 4, 40, 8, 32, 12, 24, 16, 20, 28)

STEPS = 6

#: Seconds that all trainings of one flow may take.
LIMIT_S = 240.0


def train(model: str, batch: int | str) -> None:
    """Train a model on random images."""
    import torch

    name = model.rpartition("/")[2]
    if model.startswith("timm/"):
        from timm import create_model

        net = create_model(name, num_classes=10)
    else:
        from torchvision.models import get_model

        net = get_model(name, num_classes=10)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = net.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters())
    images = torch.randn(int(batch), 3, 224, 224, device=device)
    labels = torch.randint(10, (int(batch),), device=device)
    for _ in range(STEPS):
        answer = net(images)
        # GoogLeNet has three answers in training.
        loss = torch.nn.functional.cross_entropy(getattr(answer, "logits", answer), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()


def estimates_of(runs: Mapping[int, PastRun]) -> list[tuple[int, float, bool]]:
    """Return the size, error and need of a second process of each estimate from two of a model's sizes."""
    found = []
    lessons = {batch: lesson for batch, run in runs.items() if (lesson := learn([run]))}
    for pair in itertools.combinations(sorted(lessons), 2):
        known = {float(batch): lessons[batch] for batch in pair}
        for batch in sorted(lessons.keys() - set(pair)):
            made, past = estimate(float(batch), known, known.get), runs[batch]
            if made is not None:
                budget = made.budget
                off = budget.need_bytes - lessons[batch].need_bytes
                live = past.live_bytes if past.steady_live_bytes is None else past.steady_live_bytes
                short = budget.need_bytes - budget.context_bytes < (live or 0)
                found.append((batch, off / (past.process_bytes or 1), short))
    return found


def measure(models: tuple[str, ...], devices: str) -> list[str]:
    """Measure each model with each size, and print what is estimated from every two sizes."""
    tasks: dict[str, Any] = {}
    for model in models:
        for batch in BATCHES:
            # No parameter in `gpu:learn_by`, so that each has a first run.
            name = f"{model} {batch}"
            tasks[name] = task(name=name, tags=gpu(framework="torch"))(train)

    def submit() -> Any:
        futures = {name: t.submit(*parted(name)) for name, t in tasks.items()}
        return gather(futures, LIMIT_S)

    ended = run_flow("sizes", submit, devices)
    failed = [f"{name}: {each.words}" for name, each in ended.value.items() if each.error]
    say(f"{len(tasks)} first runs took {ended.seconds:.0f} s")
    runs: dict[str, dict[int, PastRun]] = {model: {} for model in models}
    read_processes(ended.id, len(tasks))
    for name, kept in read_histories().items():
        model, batch = parted(name)
        if model in runs:
            runs[model][batch] = PastRun.from_texts(kept[-1])
    rows, every = [], []
    for model, found in runs.items():
        estimates = estimates_of(found)
        every += estimates
        errors = [abs(error) for _, error, _ in estimates]
        peaks = [size(found[b].process_bytes) if b in found else "?" for b in BATCHES]
        middle = percent(statistics.median(errors)) if errors else "?"
        most = percent(max(errors)) if errors else "?"
        rows.append((model, *peaks, middle, most, str(sum(short for *_, short in estimates))))
    heads = [f"peak-{batch}" for batch in BATCHES]
    table(["model", *heads, "median-error", "largest-error", "second-process"], rows)
    if not every:
        return [*failed, "nothing was estimated"]
    median = statistics.median(abs(error) for _, error, _ in every)
    second = sum(short for *_, short in every) / len(every)
    say(f"{len(every)} estimates: median error {percent(median)}, second process {percent(second)}")
    problems = [] if median <= 0.08 else [f"the median error is {percent(median)}, above 8 %"]
    problems += [] if second <= 0.05 else [f"{percent(second)} need a second process, above 5 %"]
    return failed + problems


def parted(name: str) -> tuple[str, int]:
    """Return the model and the size in a task's name."""
    model, _, batch = name.rpartition(" ")
    return model, int(batch) if batch.isdigit() else 0


def sweep(batches: tuple[int, ...], devices: str) -> list[str]:
    """Train one model with sizes that are all new, as numbers and as text."""
    problems, rows = [], []
    ways: dict[str, Callable[[int], int | str]] = {"numbers": int, "text": str}
    for way, made in ways.items():
        trains: Any = task(
            name="sweep", timeout_seconds=LIMIT_S, tags=gpu(framework="torch", learn_by="batch")
        )(train)

        def submit(trains: Any = trains, made: Callable[[int], int | str] = made) -> Any:
            futures = {str(b): trains.submit("resnet50", made(b)) for b in batches}
            return gather(futures, LIMIT_S)

        ended = run_flow(f"sweep of {way}", submit, devices)
        problems += [f"{way}, {b}: {each.words}" for b, each in ended.value.items() if each.error]
        reports = list(read_processes(ended.id, len(batches)).values())
        sources = [each[0]["budget_source"] for each in reports]
        counts = [str(sources.count(kind)) for kind in ("probe", "estimated", "learned")]
        second = str(sum(len(each) > 1 for each in reports))
        rows.append((way, f"{ended.seconds:.1f}", *counts, second))
        if (way == "numbers") != ("estimated" in sources):
            problems.append(f"of the sweep of {way} {sources.count('estimated')} were estimated")
    table(["sweep", "seconds", "first-runs", "estimated", "learned", "second-process"], rows)
    return problems


def check(options: argparse.Namespace) -> list[str]:
    """Measure, estimate, and sweep."""
    models = tuple(
        model
        for model in MODELS[: options.models]
        if installed("timm" if model.startswith("timm/") else "torchvision")
    )
    problems = measure(models, options.devices) if models else ["no library of models is installed"]
    return problems + sweep(SWEEP[: options.sweep], options.devices)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=len(MODELS), help="measure the first so many")
    parser.add_argument("--sweep", type=int, default=len(SWEEP), help="sizes of the sweep")
    return run(check, parser, limit_s=560)


if __name__ == "__main__":
    sys.exit(main())
