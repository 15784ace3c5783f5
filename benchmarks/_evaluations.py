"""The model evaluations of `makespan.py`: which there are, and the body that runs one.

Each is what a person does who evaluates a model: data are prepared on the CPU in NumPy and Python, a
batch goes through a model on the GPU, and metrics are computed on the CPU. None keeps the GPU busy by
itself, as most evaluations do not; `makespan.py` prints for how much of the time each does.

Models have the real layers with random weights: convolutional networks, transformers that score text,
recommenders with large embedding tables, retrieval from an index of vectors, and networks of dense
layers. What takes the memory is weights, tables and indices, as it is for real ones.

No framework is imported at the top: children of all kinds import this module.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
MIB = 2**20

#: Takes a step's number; gives a score.
Step = Callable[[int], float]


#: Least and most GiB, least and most seconds, and how many of all.
SizeClass = tuple[float, float, float, float, int]


@dataclass(frozen=True, slots=True)
class Job:
    """What is drawn of a task, whatever it does."""

    name: str
    #: Which model.
    kind: str
    #: About what it takes on each device, the context left out.
    size_bytes: int
    #: Seconds that it takes, alone.
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Evaluation(Job):
    """One evaluation to run; `kind` is one of `KINDS`."""

    framework: str


#: Least and most GiB, least and most seconds, and of 40 how many. Large models take longer.
CLASSES = (
    (16.0, 40.0, 3.0, 8.0, 22),
    (4.0, 12.0, 2.0, 5.0, 10),
    (0.5, 3.0, 1.0, 2.5, 8),
)

#: Letters of a document, and how many pairs of letters are joined in it: some 30 ms in Python.
LETTERS = 4000
MERGES = 30

#: Blocks of 8 pixels along a side of a compressed image.
BLOCKS = 32

KINDS = {
    "torch": ("cnn", "transformer", "recommender", "retrieval", "mlp"),
    "jax": ("mlp", "transformer"),
    "tensorflow": ("mlp", "recommender"),
}

#: GiB above which a kind is not drawn: weights of dense layers rarely fill more, activations of
#: images in evaluation even less.
MOST_GIB = {"cnn": 3.0, "mlp": 10.0}

#: GiB above which a task is PyTorch's: JAX's allocator doubles its regions, so that what it holds of
#: a device is up to twice what it needs.
OTHERS_MOST_GIB = 10.0


def spread(classes: Sequence[SizeClass], count: int) -> list[SizeClass]:
    """Return the class of each task; the shares of the classes hold for any number of tasks."""
    slots = [row for row in classes for _ in range(row[4])]
    return [slots[index * len(slots) // count] for index in range(count)]


def plan(
    seed: int, count: int, frameworks: Sequence[str], scale: float = 1.0, tiny: bool = False
) -> list[Evaluation]:
    """Draw evaluations; the same arguments always give the same.

    Args:
        seed: Of what is drawn.
        count: How many.
        frameworks: Of `KINDS`; each but PyTorch gets a share of the smaller ones.
        scale: Of their seconds.
        tiny: A few MiB and tenths of a second each.
    """
    draw = random.Random(seed)
    found = []
    for index, size_class in enumerate(spread(CLASSES, count)):
        least_gib, most_gib, least_s, most_s, _ = size_class
        gib = draw.uniform(least_gib, most_gib)
        others = [name for name in frameworks if name != "torch"]
        framework = "torch" if "torch" in frameworks else others[index % len(others)]
        if others and gib <= OTHERS_MOST_GIB and index % 2:
            framework = others[(index // 2) % len(others)]
        kinds = KINDS[framework]
        kind = draw.choice([k for k in kinds if gib <= MOST_GIB.get(k, gib)] or kinds)
        share = (gib - least_gib) / (most_gib - least_gib)
        seconds = (least_s + (most_s - least_s) * share) * scale
        found.append(
            Evaluation(
                name=f"{framework}-{kind}-{index:02}",
                framework=framework,
                kind=kind,
                size_bytes=int(gib * MIB * 4 if tiny else gib * GIB),
                seconds=0.2 if tiny else seconds,
                seed=seed * 1000 + index,
            )
        )
    return found


def evaluate(
    name: str,
    framework: str,
    kind: str,
    size_bytes: int,
    seconds: float,
    steps: int,
    seed: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """Build a model and evaluate it.

    Args:
        name: Of the evaluation.
        framework: `torch`, `jax` or `tensorflow`.
        kind: Which model.
        size_bytes: About what it takes on the device.
        seconds: After which it ends, if `steps` is 0.
        steps: How many batches; 0: as many as there is time for, at least two.
        seed: Of weights and data.
        on_gpu: Whether to use one.

    Returns:
        Times, CPU seconds, steps done and the score.
    """
    line, cpu_line = time.time(), time.process_time()
    start, build = {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}[framework](on_gpu)
    imported, cpu_imported = time.time(), time.process_time()
    start()
    ready, cpu_ready = time.time(), time.process_time()
    step = build(kind, size_bytes, seed)
    done, score = 0, 0.0
    while done < steps or (not steps and (done < 2 or time.time() - ready < seconds)):
        score += step(done)
        done += 1
    ended, cpu_ended = time.time(), time.process_time()
    return {
        "name": name,
        "pid": os.getpid(),
        "line": line,
        "imported": imported,
        "ready": ready,
        "ended": ended,
        "cpu_s": cpu_ended - cpu_ready,
        "start_cpu_s": cpu_imported - cpu_line,
        "steps": done,
        "score": score / done,
        "attempt": attempt(),
    }


def attempt() -> int:
    """Return how many processes were started for this task; 1 if they are not counted."""
    # Where nobody of ours started this process there is nothing to import, which takes time.
    inside = sys.modules.get("prefect_gpu.in_task")
    allocation = inside.current_allocation() if inside else None
    return 1 if allocation is None else int(allocation.attempt)


# What is done on the CPU.


def decode_image(random_state: Any, side: int) -> Any:
    """Make pixels of the frequencies of 8×8 blocks, as a JPEG decoder does, and scale the image."""
    import numpy as np

    at = np.arange(8)
    basis = np.cos((2 * at[None, :] + 1) * at[:, None] * np.pi / 16).astype(np.float32) / 2
    basis[0] /= 2**0.5
    quantities = (8 + 4 * (at[:, None] + at[None, :])).astype(np.float32)
    kept = random_state.integers(-16, 17, size=(3, BLOCKS, BLOCKS, 8, 8), dtype=np.int16)
    blocks = basis.T @ (kept * quantities) @ basis
    pixels = blocks.transpose(0, 1, 3, 2, 4).reshape(3, BLOCKS * 8, BLOCKS * 8)
    pixels = np.clip(pixels + 128, 0, 255).astype(np.uint8)
    chosen = np.linspace(0, BLOCKS * 8 - 1, side).astype(np.int64)
    return pixels[:, chosen[:, None], chosen]


def prepare_images(random_state: Any, count: int, side: int, decode: bool = False) -> Any:
    """Prepare images one by one, as a data loader does: crop, flip, scale, brighten, normalise.

    Args:
        random_state: NumPy's generator.
        count: How many.
        side: Pixels of a side.
        decode: Whether images come compressed, or as pixels.
    """
    import numpy as np

    images = np.empty((count, 3, side, side), dtype=np.float32)
    mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)[:, None, None]
    deviation = np.array([0.229, 0.224, 0.225], dtype=np.float32)[:, None, None]
    for index in range(count):
        if decode:
            raw = decode_image(random_state, side + 16)
        else:
            raw = random_state.integers(0, 256, size=(3, side + 16, side + 16), dtype=np.uint8)
        top, left = random_state.integers(0, 16, size=2)
        image = raw[:, top : top + side, left : left + side].astype(np.float32) / 255
        if random_state.random() < 0.5:
            image = image[:, :, ::-1]
        image = np.clip(image * random_state.uniform(0.8, 1.2), 0, 1)
        images[index] = (image - mean) / deviation
    return images


def prepare_text(random_state: Any, count: int, length: int) -> Any:
    """Cut documents into tokens in Python, pair by pair as tokenisers do; give a window of each."""
    import numpy as np

    alphabet = "etaoinshrdlu "
    tokens = np.zeros((count, length), dtype=np.int64)
    for row in range(count):
        pieces = [alphabet[i] for i in random_state.integers(0, 13, size=LETTERS)]
        for _ in range(MERGES):
            pairs = Counter(itertools.pairwise(pieces))
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            merged, index = [], 0
            while index < len(pieces):
                if tuple(pieces[index : index + 2]) == best:
                    merged.append("".join(best))
                    index += 2
                else:
                    merged.append(pieces[index])
                    index += 1
            pieces = merged
        ids = [sum(ord(c) * 31**k for k, c in enumerate(piece)) % 32000 for piece in pieces]
        tokens[row] = ids[:length]
    return tokens


def prepare_features(random_state: Any, count: int, fields: int, buckets: int) -> Any:
    """Hash categories and cut numbers into buckets, as recommenders do."""
    import numpy as np

    raw = random_state.integers(0, 2**62, size=(count, fields), dtype=np.uint64)
    for shift in (33, 29, 32):
        raw = (raw ^ (raw >> np.uint64(shift))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = np.log1p(np.abs(random_state.standard_normal((count, fields))))
    edges = np.quantile(numbers, np.linspace(0, 1, 33))
    cut = np.searchsorted(edges, numbers).astype(np.uint64)
    return ((raw + cut) % np.uint64(buckets)).astype(np.int64)


def bootstrap(random_state: Any, values: Any, resamples: int = 100) -> float:
    """Return the mean of values less half the width of its bootstrap interval."""
    import numpy as np

    flat = np.asarray(values, dtype=np.float64).ravel()[:2000]
    means = [
        flat[random_state.integers(0, len(flat), size=len(flat))].mean() for _ in range(resamples)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(flat.mean() - (high - low) / 2)


def rank_quality(scores: Any, labels: Any) -> float:
    """Return the area under the ROC curve, computed from ranks."""
    import numpy as np

    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = labels.sum()
    negative = len(labels) - positive
    if not positive or not negative:
        return 0.5
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


# Models in PyTorch.


def _torch(on_gpu: bool) -> tuple[Callable[[], None], Callable[[str, int, int], Step]]:
    import numpy  # noqa: F401  (an import, so not part of the work)
    import torch

    device = torch.device("cuda" if on_gpu else "cpu")
    # On a processor half precision is emulated.
    dtype = torch.bfloat16 if on_gpu else torch.float32
    width = 2 if on_gpu else 4

    def start() -> None:
        torch.set_num_threads(1)
        torch.zeros(1, device=device)
        if on_gpu:
            torch.cuda.synchronize()

    def build(kind: str, size_bytes: int, seed: int) -> Step:
        torch.manual_seed(seed)
        makers = {
            "cnn": _torch_cnn,
            "transformer": _torch_transformer,
            "recommender": _torch_recommender,
            "retrieval": _torch_retrieval,
            "mlp": _torch_mlp,
        }
        step = makers[kind](torch, device, dtype, size_bytes // width, seed)

        def without_gradients(index: int) -> float:
            with torch.inference_mode():
                return step(index)

        return without_gradients

    return start, build


def _torch_weights(torch: Any, device: Any, dtype: Any, *shape: int) -> Any:
    return torch.empty(shape, device=device, dtype=dtype).normal_(std=shape[-1] ** -0.5)


def _torch_cnn(torch: Any, device: Any, dtype: Any, numbers: int, seed: int) -> Step:
    import numpy as np

    random_state = np.random.default_rng(seed)
    side = 96 if numbers > 64 * MIB else 32
    # An ensemble, as is evaluated for calibration: its members are what fills the memory.
    nn = torch.nn

    def block(inner: int, outer: int) -> list[Any]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

    def member() -> Any:
        return nn.Sequential(
            *block(3, 64),
            *block(64, 64),
            nn.MaxPool2d(2),
            *block(64, 128),
            nn.MaxPool2d(2),
            *block(128, 512),
            nn.MaxPool2d(2),
            *block(512, 1024),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1024, 1000),
        )

    with torch.device(device):
        first = member().to(dtype).eval()
    held = sum(p.numel() for p in first.parameters())
    # Half for weights, half for the activations of a batch.
    members = max(1, min(8, numbers // 2 // held))
    with torch.device(device):
        models = [first, *(member().to(dtype).eval() for _ in range(members - 1))]
    count = max(2, min(96, numbers // 2 // (64 * side * side * 3)))

    def step(index: int) -> float:
        images = prepare_images(random_state, count, side, decode=True)
        labels = random_state.integers(0, 1000, size=count)
        batch = torch.from_numpy(images).to(device, dtype)
        logits = torch.stack([model(batch) for model in models]).float().mean(0)
        top = logits.topk(5).indices.cpu().numpy()
        return bootstrap(random_state, (top == labels[:, None]).any(1))

    return step


def _torch_transformer(torch: Any, device: Any, dtype: Any, numbers: int, seed: int) -> Step:
    import numpy as np

    functional = torch.nn.functional
    random_state = np.random.default_rng(seed)
    wide = 4096 if numbers > 1 << 30 else 1024 if numbers > 1 << 26 else 128
    heads = wide // 64
    words = _torch_weights(torch, device, dtype, 32000, wide)
    layers = []
    for _ in range(max(1, (numbers - words.numel()) // (12 * wide * wide))):
        layers.append(
            tuple(
                _torch_weights(torch, device, dtype, *shape)
                for shape in ((3 * wide, wide), (wide, wide), (4 * wide, wide), (wide, 4 * wide))
            )
        )
    count, length = 4, 64

    def forward(tokens: Any) -> Any:
        x = words[tokens]
        for mix, out, up, down in layers:
            h = functional.layer_norm(x, (wide,))
            q, k, v = (
                part.view(count, length, heads, 64).transpose(1, 2)
                for part in functional.linear(h, mix).chunk(3, -1)
            )
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + functional.linear(h.transpose(1, 2).reshape(count, length, wide), out)
            h = functional.linear(functional.layer_norm(x, (wide,)), up)
            x = x + functional.linear(functional.gelu(h), down)
        return functional.linear(functional.layer_norm(x, (wide,)), words)

    def step(index: int) -> float:
        tokens = torch.from_numpy(prepare_text(random_state, count, length)).to(device)
        logits = forward(tokens).float()
        losses = functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]),
            tokens[:, 1:].reshape(-1),
            reduction="none",
        )
        return bootstrap(random_state, losses.cpu().numpy())

    return step


def _torch_recommender(torch: Any, device: Any, dtype: Any, numbers: int, seed: int) -> Step:
    import numpy as np

    random_state = np.random.default_rng(seed)
    rows, wide, fields = max(1024, numbers // 128), 128, 32
    count = 8192 if rows > 1 << 20 else 512
    table = torch.empty((rows, wide), device=device, dtype=dtype).normal_()
    tower = [
        _torch_weights(torch, device, dtype, *shape)
        for shape in ((1024, fields * wide), (256, 1024), (1, 256))
    ]

    def step(index: int) -> float:
        features = prepare_features(random_state, count, fields, rows)
        labels = random_state.random(count) < 0.3
        x = table[torch.from_numpy(features).to(device)].flatten(1)
        for weights in tower:
            x = torch.nn.functional.linear(torch.relu(x), weights)
        scores = x.float().flatten().cpu().numpy()
        return rank_quality(scores, labels)

    return step


def _torch_retrieval(torch: Any, device: Any, dtype: Any, numbers: int, seed: int) -> Step:
    import numpy as np

    random_state = np.random.default_rng(seed)
    wide, queries = 256, 64
    rows = max(2048, numbers // wide)
    index_of_all = torch.empty((rows, wide), device=device, dtype=dtype).normal_()
    # As an inverted file does: a coarse look says which part to search.
    part = min(rows, 1 << 19)
    parts = max(1, rows // part)
    coarse = random_state.standard_normal((parts, wide)).astype(np.float32)

    def step(index: int) -> float:
        words = prepare_text(random_state, 1, 64).T
        asked = random_state.standard_normal((queries, wide)).astype(np.float32)
        asked += np.sin(words + np.arange(wide))
        asked /= np.linalg.norm(asked, axis=1, keepdims=True)
        begin = int((asked @ coarse.T).sum(0).argmax()) * part
        scores = torch.from_numpy(asked).to(device, dtype) @ index_of_all[begin : begin + part].T
        best = scores.float().topk(100).indices.cpu().numpy()
        relevant = random_state.integers(0, part, size=(queries, 100))
        found = [len(np.intersect1d(a, b)) / 100 for a, b in zip(best, relevant, strict=True)]
        return bootstrap(random_state, found)

    return step


def _torch_mlp(torch: Any, device: Any, dtype: Any, numbers: int, seed: int) -> Step:
    import numpy as np

    random_state = np.random.default_rng(seed)
    wide = 4096 if numbers > 1 << 28 else 512
    layers = [
        _torch_weights(torch, device, dtype, wide, wide)
        for _ in range(max(1, numbers // (wide * wide)))
    ]

    def step(index: int) -> float:
        rows = _tabular(random_state, 256, wide)
        x = torch.from_numpy(rows).to(device, dtype)
        for weights in layers:
            x = torch.relu(torch.nn.functional.layer_norm(x, (wide,)) @ weights)
        return bootstrap(random_state, x.float().mean(1).cpu().numpy())

    return step


def _tabular(random_state: Any, count: int, wide: int) -> Any:
    """Prepare rows of numbers: outliers are cut, columns scaled by their ranks."""
    import numpy as np

    rows = random_state.standard_normal((count, wide))
    rows = np.clip(rows, np.quantile(rows, 0.01, axis=0), np.quantile(rows, 0.99, axis=0))
    ranks = rows.argsort(0).argsort(0) / count
    return (rows * 0.5 + ranks * 0.5).astype(np.float32)


# Models in JAX.


def _jax(on_gpu: bool) -> tuple[Callable[[], None], Callable[[str, int, int], Step]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    width = 2 if on_gpu else 4

    def start() -> None:
        found = jax.devices("gpu" if on_gpu else "cpu")
        jax.device_put(jnp.zeros(1), found[0]).block_until_ready()

    def build(kind: str, size_bytes: int, seed: int) -> Step:
        random_state = np.random.default_rng(seed)
        numbers = size_bytes // width
        wide = 4096 if numbers > 1 << 28 else 512
        count = 256
        draw = jax.jit(lambda key: (jax.random.normal(key, (wide, wide)) / wide**0.5).astype(dtype))
        keys = jax.random.split(jax.random.PRNGKey(seed), max(4, numbers // (wide * wide)))
        weights = [draw(key) for key in keys]

        @jax.jit
        def dense(x: Any, w: Any) -> Any:
            x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)
            return jax.nn.relu(x @ w)

        @jax.jit
        def attend(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
            x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)
            heads = lambda w: (x @ w).reshape(count, wide // 64, 64)  # noqa: E731
            mix = jnp.einsum("qhd,khd->hqk", heads(q), heads(k)) / 8
            mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(mix, -1), heads(v))
            return x + mixed.reshape(count, wide) @ o

        def step(index: int) -> float:
            x = jnp.asarray(_tabular(random_state, count, wide), dtype)
            if kind == "transformer":
                x = x + jnp.asarray(
                    prepare_text(random_state, 4, 64).reshape(count, 1) / 32000, dtype
                )
                for at in range(0, len(weights) - 3, 4):
                    x = attend(x, *weights[at : at + 4])
            else:
                for w in weights:
                    x = dense(x, w)
            return bootstrap(random_state, np.asarray(x.astype(jnp.float32).mean(1)))

        return step

    return start, build


# Models in TensorFlow.


def _tensorflow(on_gpu: bool) -> tuple[Callable[[], None], Callable[[str, int, int], Step]]:
    import numpy as np
    import tensorflow as tf

    device = "/GPU:0" if on_gpu else "/CPU:0"

    def start() -> None:
        with tf.device(device):
            tf.zeros([1]).numpy()

    def build(kind: str, size_bytes: int, seed: int) -> Step:
        random_state = np.random.default_rng(seed)
        numbers = size_bytes // 4
        wide = 4096 if numbers > 1 << 28 else 512
        make = tf.random.Generator.from_seed(seed).normal
        with tf.device(device):
            if kind == "recommender":
                # In parts: one tensor of more than 2³¹ elements is refused by some operations.
                parts = max(1, numbers // (1 << 28))
                rows = max(1024, numbers // parts // 128)
                tables = [make([rows, 128]) for _ in range(parts)]
                tower = [make([128 * 32, 256]), make([256, 1])]
            else:
                layers = [make([wide, wide]) for _ in range(max(1, numbers // (wide * wide)))]

        def step(index: int) -> float:
            with tf.device(device):
                if kind == "recommender":
                    features = prepare_features(random_state, 8192, 32, rows)
                    labels = random_state.random(8192) < 0.3
                    table = tables[index % len(tables)]
                    x = tf.reshape(tf.gather(table, features), [8192, 128 * 32])
                    for w in tower:
                        x = tf.nn.relu(x) @ w / w.shape[0] ** 0.5
                    return rank_quality(x.numpy().ravel(), labels)
                x = tf.constant(_tabular(random_state, 256, wide))
                for w in layers:
                    x = tf.nn.relu(x @ w / wide**0.5)
                return bootstrap(random_state, tf.reduce_mean(x, 1).numpy())

        return step

    return start, build
