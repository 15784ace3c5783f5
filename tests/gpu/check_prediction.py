"""Tasks of many kinds without a memory tag, three times: what was learned of each, and what it took.

    python -m tests.gpu.check_prediction

In the first flow run each is a probe, beside others. In the second and third each has the
budget that its history teaches, and all run side by side. *Slack* is what a budget is above the most
that NVML showed for the process: what was reserved in vain.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    Ended,
    Observer,
    Process,
    gather,
    installed,
    percent,
    read_processes,
    run,
    run_flow,
    run_steps,
    say,
    size,
    table,
)

#: What must hold: half of the budgets are no more than this above what was taken.
MOST_SLACK = 0.35

#: Tasks that may need the ladder.
MOST_LADDERS = 1

ROUNDS = (1, 2, 3)


# Sizes are those on an H200, 0.3 to 8 GiB; `shrink` divides them where the script is only tried out.


def torch_mlp(shrink: int) -> int:
    """Four layers of 4096, trained with Adam."""
    import torch
    from torch import nn

    wide, device = 4096 // shrink, "cuda" if torch.cuda.is_available() else "cpu"
    layers = [layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(4096 // shrink, wide, device=device)

    def one_step() -> None:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return run_steps(one_step)


def torch_cnn(shrink: int) -> int:
    """Four convolutions at 96×96 pixels, trained with SGD."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    channels = (3, 64, 64, 64, 64)
    layers = [
        layer
        for inputs, outputs in itertools.pairwise(channels)
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(128 // shrink, 3, 96, 96, device=device)

    def one_step() -> None:
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return run_steps(one_step)


def torch_transformer(shrink: int) -> int:
    """An encoder of six layers, batch 32 of 512 tokens."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 6).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randn(32 // shrink, 512 // shrink, 512, device=device)

    def one_step() -> None:
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return run_steps(one_step)


def torch_lstm(shrink: int) -> int:
    """Two recurrent layers of 1024 over 256 moments."""
    import torch
    from torch import nn

    # In Python, PyTorch refuses a cuDNN other than its own, which TensorFlow's may have put in front.
    torch.backends.cudnn.enabled = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.LSTM(512, 1024 // shrink, 2, batch_first=True).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    series = torch.randn(128 // shrink, 256 // shrink, 512, device=device)

    def one_step() -> None:
        optimizer.zero_grad()
        loss = model(series)[0].square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return run_steps(one_step)


def torch_autoencoder(shrink: int) -> int:
    """Convolutions down and up again, 256×256 pixels."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    channels = (3, 64, 128, 256)
    down = [
        layer
        for inputs, outputs in itertools.pairwise(channels)
        for layer in (nn.Conv2d(inputs, outputs, 4, 2, 1), nn.ReLU())
    ]
    up = [
        layer
        for inputs, outputs in itertools.pairwise(channels[::-1])
        for layer in (nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.ReLU())
    ]
    model = nn.Sequential(*down, *up[:-1]).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.rand(64 // shrink, 3, 256, 256, device=device)

    def one_step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(images), images)
        loss.backward()
        optimizer.step()
        loss.item()

    return run_steps(one_step)


def torch_embedding(shrink: int) -> int:
    """A table of two million rows, of which each step changes a few."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = 2_000_000 // shrink**2
    bag = nn.EmbeddingBag(count, 512, sparse=True, device=device)
    head = nn.Linear(512, 1, device=device)
    optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], lr=0.1)
    chosen = torch.randint(count, (2048 // shrink, 50), device=device)

    def one_step() -> None:
        optimizer.zero_grad()
        loss = head(bag(chosen)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return run_steps(one_step)


def torch_products(shrink: int) -> int:
    """Inference: twelve products with matrices of half a GiB."""
    import torch

    wide, device = 16384 // shrink, "cuda" if torch.cuda.is_available() else "cpu"

    def make() -> torch.Tensor:
        return torch.randn(wide, wide, dtype=torch.bfloat16, device=device)

    weights, rows = [make() for _ in range(12)], make()

    def one_step() -> None:
        with torch.inference_mode():
            found = rows
            for weight in weights:
                found = (found @ weight).clamp_(-1, 1)
            found.sum().item()

    return run_steps(one_step)


def jax_mlp(shrink: int) -> int:
    """Four layers of 4096, a step compiled whole, with its parameters donated."""
    import jax
    import jax.numpy as jnp

    wide = 4096 // shrink
    state = {"weights": [jnp.full((wide, wide), 0.01) for _ in range(4)]}
    rows = jnp.ones((8192 // shrink, wide))

    def loss(weights: Any) -> Any:
        found = rows
        for weight in weights:
            found = jnp.tanh(found @ weight)
        return (found**2).mean()

    @jax.jit
    def train(weights: Any) -> Any:
        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda weight, change: weight - 0.01 * change, weights, gradients)

    def one_step() -> None:
        state["weights"] = train(state["weights"])
        jax.block_until_ready(state["weights"])

    return run_steps(one_step)


def jax_attention(shrink: int) -> int:
    """Scores of 2048 tokens with one another, all of them kept for the gradient."""
    import jax
    import jax.numpy as jnp

    tokens = jnp.ones((8, 8, 2048 // shrink, 64))

    def loss(given: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", given, given)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), given).sum()

    compiled = jax.jit(jax.grad(loss))

    def one_step() -> None:
        compiled(tokens).block_until_ready()

    return run_steps(one_step)


def tensorflow_mlp(shrink: int) -> int:
    """Three layers of 4096 in a compiled function."""
    import tensorflow as tf

    wide = 4096 // shrink
    weights = [tf.Variable(tf.random.normal([wide, wide]) * 0.01) for _ in range(3)]
    rows = tf.random.normal([8192 // shrink, wide])

    @tf.function(autograph=False)
    def train() -> Any:
        with tf.GradientTape() as tape:
            found = rows
            for weight in weights:
                found = tf.nn.relu(found @ weight)
            loss = tf.reduce_mean(found**2)
        for weight, change in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * change)
        return loss

    return run_steps(lambda: float(train()))


def tensorflow_cnn(shrink: int) -> int:
    """Three convolutions at 96×96 pixels, step by step."""
    import tensorflow as tf

    kernels = [tf.Variable(tf.random.normal([3, 3, inputs, 64]) * 0.1) for inputs in (3, 64, 64)]
    images = tf.random.normal([128 // shrink, 96, 96, 3])

    def one_step() -> None:
        with tf.GradientTape() as tape:
            found = images
            for kernel in kernels:
                found = tf.nn.relu(tf.nn.conv2d(found, kernel, 1, "SAME"))
            loss = tf.reduce_mean(found**2)
        for kernel, change in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(0.01 * change)
        float(loss)

    return run_steps(one_step)


def cupy_components(shrink: int) -> int:
    """The directions in which half a GiB of rows differ most."""
    import cupy

    wide = 2048
    rows = cupy.sin(cupy.arange(65536 // shrink * wide, dtype=cupy.float32)).reshape(-1, wide)
    found = cupy.ones((wide, 64), dtype=cupy.float32)

    def one_step() -> None:
        centred = rows - rows.mean(axis=0)
        directions = found
        for _ in range(3):
            directions = centred.T @ (centred @ directions)
            directions /= cupy.abs(directions).max()
        float((centred @ directions).sum())

    return run_steps(one_step)


def cupy_spectra(shrink: int) -> int:
    """Filter images by their transforms."""
    import cupy

    count = 64 // shrink
    images = cupy.sin(cupy.arange(count << 20, dtype=cupy.float32)).reshape(count, 1024, 1024)

    def one_step() -> None:
        spectra = cupy.fft.rfft2(images)
        spectra[:, 256:768] = 0
        float(cupy.abs(cupy.fft.irfft2(spectra)).sum())

    return run_steps(one_step)


BODIES: tuple[Callable[[int], int], ...] = (
    torch_mlp,
    torch_cnn,
    torch_transformer,
    torch_lstm,
    torch_autoencoder,
    torch_embedding,
    torch_products,
    jax_mlp,
    jax_attention,
    tensorflow_mlp,
    tensorflow_cnn,
    cupy_components,
    cupy_spectra,
)


def framework_of(body: Callable[[int], int]) -> str:
    return body.__name__.partition("_")[0]


def check(options: argparse.Namespace) -> list[str]:
    """Run all of them three times."""
    missing = sorted({framework_of(b) for b in BODIES if not installed(framework_of(b))})
    problems = [f"{framework} is not installed" for framework in missing]
    bodies = [body for body in BODIES if framework_of(body) not in missing]
    tasks = {
        body.__name__: task(
            name=body.__name__.replace("_", "-"), tags=gpu(), timeout_seconds=BODY_S
        )(body)
        for body in bodies
    }
    shrink = 1 if options.devices == "nvml" else 8
    ended: dict[int, dict[str, Ended]] = {}
    processes: dict[int, dict[str, list[Process]]] = {}
    with Observer() as observer:
        for number in ROUNDS:
            flow = run_flow(
                "check-prediction",
                lambda: gather(
                    {name: kind.submit(shrink) for name, kind in tasks.items()}, 2 * BODY_S
                ),
                options.devices,
            )
            say(f"run {number} of {len(tasks)} tasks took {flow.seconds:.0f} s")
            ended[number] = flow.value
            found = read_processes(flow.id, len(tasks))
            processes[number] = {
                name: found.get(one.task_run_id, []) for name, one in flow.value.items()
            }
    return problems + judge(list(tasks), ended, processes, observer)


def judge(
    names: list[str],
    ended: dict[int, dict[str, Ended]],
    processes: dict[int, dict[str, list[Process]]],
    observer: Observer,
) -> list[str]:
    """Print what was found; say what is not as it should be."""
    problems = []
    rows = []
    slacks: dict[int, list[float]] = {number: [] for number in ROUNDS[1:]}
    ladders = set()
    for name in names:
        cells: list[str] = []
        for number in ROUNDS:
            reports = processes[number][name]
            if ended[number][name].error is not None:
                problems.append(f"{name}, run {number}: {ended[number][name].words}")
            if not reports:
                problems.append(f"{name}, run {number}: no report")
            if len(reports) > 1:
                ladders.add(name)
            source = reports[-1]["budget_source"] if reports else "?"
            if reports and source != ("probe" if number == 1 else "learned"):
                problems.append(f"{name}, run {number}: its budget is from {source}")
            budget, peak = _budget_and_peak(reports, observer)
            if number == 1:
                cells += [size(peak)]
                continue
            slack = budget / peak - 1 if budget and peak else None
            if slack is not None:
                slacks[number].append(slack)
            cells += [size(budget), size(peak), percent(slack)]
        counts = "+".join(str(len(processes[number][name])) for number in ROUNDS)
        rows.append((name, *cells, counts))
    table(
        [
            "task",
            "probed",
            "budget 2",
            "peak 2",
            "slack 2",
            "budget 3",
            "peak 3",
            "slack 3",
            "processes",
        ],
        rows,
    )
    say("sizes in MiB; peaks of the process, in NVML, read from outside where it was seen")
    for number, found in slacks.items():
        if len(found) < len(names):
            problems.append(f"run {number}: the slack of {len(names) - len(found)} is not known")
        if not found:
            continue
        middle = statistics.median(found)
        say(
            f"run {number}: median slack {middle:+.1%}, from {min(found):+.1%} to {max(found):+.1%}"
        )
        if middle > MOST_SLACK:
            problems.append(f"run {number}: the median slack is {middle:.1%}")
    say(f"tasks that needed the ladder: {', '.join(sorted(ladders)) or 'none'}")
    if len(ladders) > MOST_LADDERS:
        problems.append(f"{len(ladders)} tasks needed the ladder")
    return problems


def _budget_and_peak(reports: list[Process], observer: Observer) -> tuple[int | None, int | None]:
    if not reports:
        return None, None
    last = reports[-1]
    return last.bytes("budget_bytes"), observer.peak_of(last) or last.bytes("peak_process_bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=300)


if __name__ == "__main__":
    sys.exit(main())
