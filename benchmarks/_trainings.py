"""The training loops of `collocation.py`: which there are, and the body that runs one.

Real models in PyTorch with real steps: data are prepared on the CPU, then forward, backward and
optimiser on the GPU. Weights and data are random. Some train on two GPUs with plain data parallelism
by hand: a replica on each, gradients averaged by copies, no NCCL.

No framework is imported at the top: children of all kinds import this module.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _evaluations
from _evaluations import GIB, MIB


@dataclass(frozen=True, slots=True)
class Training(_evaluations.Job):
    """One training loop to run; `kind` is `cnn`, `transformer` or `recommender`."""

    #: Devices, all at the same time.
    devices: int


#: Least and most GiB, least and most seconds, and of 60 how many: 0.6 to 29 GiB with the context, most
#: of them small and a third large, as in the published setting.
CLASSES = (
    (0.1, 2.0, 3.0, 6.0, 20),
    (3.0, 9.0, 4.0, 9.0, 22),
    (12.0, 22.0, 6.0, 11.0, 13),
    (23.0, 28.0, 7.0, 12.0, 5),
)

#: Every so many tasks one trains on two devices; a recommender's tables are too large to be copied
#: in every step.
PAIR_EVERY = 9


def plan(seed: int, count: int, scale: float = 1.0, tiny: bool = False) -> list[Training]:
    """Draw training loops, in the order in which they are submitted; the same seed gives the same.

    Args:
        seed: Of what is drawn.
        count: How many.
        scale: Of their seconds.
        tiny: A few MiB and tenths of a second each.
    """
    draw = random.Random(seed)
    found = []
    for index, size_class in enumerate(_evaluations.spread(CLASSES, count)):
        least_gib, most_gib, least_s, most_s, _ = size_class
        gib = draw.uniform(least_gib, most_gib)
        pair = index % PAIR_EVERY == PAIR_EVERY - 1 or (tiny and index == count - 1)
        kinds = ("cnn", "transformer") if pair else ("cnn", "transformer", "recommender")
        kind = draw.choice(kinds)
        found.append(
            Training(
                name=f"{kind}-{'pair-' if pair else ''}{index:02}",
                kind=kind,
                size_bytes=int(gib * MIB * 8 if tiny else gib * GIB),
                devices=2 if pair else 1,
                seconds=0.2 if tiny else draw.uniform(least_s, most_s) * scale,
                seed=seed * 1000 + index,
            )
        )
    draw.shuffle(found)
    return found


def train(
    name: str,
    kind: str,
    size_bytes: int,
    devices: int,
    seconds: float,
    steps: int,
    seed: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """Build a model and train it.

    Args:
        name: Of the training.
        kind: Which model.
        size_bytes: About what it takes on each device.
        devices: How many to train on.
        seconds: After which it ends, if `steps` is 0.
        steps: How many; 0: as many as there is time for, at least two.
        seed: Of weights and data.
        on_gpu: Whether to use GPUs, or replicas on the CPU.

    Returns:
        Times, CPU seconds, steps done and the last loss.
    """
    line = time.time()
    import numpy as np
    import torch

    imported = time.time()
    torch.set_num_threads(1)
    places = [torch.device("cuda", i) if on_gpu else torch.device("cpu") for i in range(devices)]
    for place in places:
        torch.zeros(1, device=place)
        if on_gpu:
            torch.cuda.synchronize(place)
    ready, cpu_ready = time.time(), time.process_time()
    random_state = np.random.default_rng(seed)
    makers = {"cnn": _cnn, "transformer": _transformer, "recommender": _recommender}
    replicas, optimisers, make_batch = [], [], None
    for place in places:
        # Replicas begin alike.
        torch.manual_seed(seed)
        model, make_batch = makers[kind](torch, place, size_bytes, random_state)
        replicas.append(model)
        # Fused, or Adam makes copies of all its weights for a moment.
        optimisers.append(torch.optim.Adam(model.parameters(), lr=1e-4, fused=on_gpu))
    assert make_batch is not None
    done, loss_value = 0, 0.0
    while done < steps or (not steps and (done < 2 or time.time() - ready < seconds)):
        losses = []
        for model, place in zip(replicas, places, strict=True):
            inputs, labels = (torch.from_numpy(part).to(place) for part in make_batch())
            with torch.autocast(place.type, torch.bfloat16, enabled=on_gpu):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            losses.append(loss)
        if len(replicas) > 1:
            _average(replicas)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        # Also waits for all that was queued.
        loss_value = sum(loss.item() for loss in losses) / len(losses)
        done += 1
    ended = time.time()
    return {
        "name": name,
        "pid": os.getpid(),
        "line": line,
        "imported": imported,
        "ready": ready,
        "ended": ended,
        "cpu_s": time.process_time() - cpu_ready,
        "steps": done,
        "loss": loss_value,
        "attempt": _evaluations.attempt(),
    }


def _average(replicas: list[Any]) -> None:
    """Set the gradients of all replicas to their mean."""
    for parameter, *same in zip(*(model.parameters() for model in replicas), strict=True):
        if parameter.grad is None:
            continue
        for other in same:
            parameter.grad.add_(other.grad.to(parameter.device))
        parameter.grad.div_(len(replicas))
        for other in same:
            other.grad.copy_(parameter.grad)


Maker = Callable[[Any, Any, int, Any], tuple[Any, Callable[[], tuple[Any, Any]]]]


def _cnn(torch: Any, place: Any, size_bytes: int, random_state: Any) -> Any:
    nn = torch.nn

    def block(inner: int, outer: int) -> list[Any]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

    side = 96 if size_bytes > GIB else 64 if size_bytes > 256 * MIB else 32
    wide = 64 if size_bytes > 256 * MIB else 16
    with torch.device(place):
        model = nn.Sequential(
            *block(3, wide),
            *block(wide, wide),
            nn.MaxPool2d(2),
            *block(wide, wide * 2),
            *block(wide * 2, wide * 2),
            nn.MaxPool2d(2),
            *block(wide * 2, wide * 4),
            *block(wide * 4, wide * 4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(wide * 4, 100),
        )
    # What one image leaves for the backward pass: some 3 copies of 2 bytes in each of its layers, of
    # which the first two are half.
    one_bytes = side * side * wide * 2 * 3 * 4
    count = max(2, min(2048, size_bytes // one_bytes))

    def make_batch() -> tuple[Any, Any]:
        images = _evaluations.prepare_images(random_state, count, side)
        return images, random_state.integers(0, 100, size=count)

    return model, make_batch


def _transformer(torch: Any, place: Any, size_bytes: int, random_state: Any) -> Any:
    nn = torch.nn
    wide = 2048 if size_bytes > 4 * GIB else 768 if size_bytes > 512 * MIB else 128
    words = 16000 if wide > 128 else 2000
    # Weight, gradient and two moments of 4 bytes, and 2 for autocast's copy; some for activations.
    held = int(size_bytes * 0.85) // 18
    depth = max(1, (held - 2 * words * wide) // (12 * wide * wide))
    count, length = 4, 64

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, wide)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    wide,
                    max(2, wide // 64),
                    4 * wide,
                    dropout=0.0,
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(depth)
            )
            self.last = nn.Linear(wide, words)

        def forward(self, tokens: Any) -> Any:
            x = self.words(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.last(x).flatten(0, 1)

    with torch.device(place):
        model = Model()

    def make_batch() -> tuple[Any, Any]:
        tokens = _evaluations.prepare_text(random_state, count, length + 1) % words
        return tokens[:, :-1].copy(), tokens[:, 1:].reshape(-1).copy()

    return model, make_batch


def _recommender(torch: Any, place: Any, size_bytes: int, random_state: Any) -> Any:
    nn = torch.nn
    wide, fields, count = 128, 32, 8192 if size_bytes > GIB else 256
    # Weight, gradient and two moments; the rows of one batch come to it.
    rows = max(1000, int(size_bytes * 0.95) // (wide * 4 * 4))

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(rows, wide)
            self.tower = nn.Sequential(nn.Linear(wide * fields, 512), nn.ReLU(), nn.Linear(512, 2))

        def forward(self, features: Any) -> Any:
            return self.tower(self.table(features).flatten(1))

    with torch.device(place):
        model = Model()

    def make_batch() -> tuple[Any, Any]:
        features = _evaluations.prepare_features(random_state, count, fields, rows)
        return features, random_state.integers(0, 2, size=count)

    return model, make_batch
