"""Train and evaluate six models, side by side, on scikit-learn's handwritten digits.

Each model is one GPU task: a process of its own with a memory budget, on whichever device has room.
The same file runs on a laptop (the processor), on simulated devices and on GPUs:

    python flows/evaluate_models.py
    python flows/evaluate_models.py --devices simulated:2x8GiB
    python flows/evaluate_models.py --devices nvml --epochs 30

It prints a leaderboard and publishes it as an artifact. Needs scikit-learn, torch
and tensorflow (`pip install prefect-gpu[examples]`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from typing import Any

from prefect import flow, task, unmapped

from prefect_gpu import (
    GPUTaskRunner,
    current_allocation,
    gpu,
    publish_leaderboard,
    report_metric,
)

# With oneDNN on, each process of TensorFlow 2.21 says so in four lines that no log level hides.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

#: Budgets hold the CUDA context too: about 0.7 GiB for PyTorch and 1.2 GiB for TensorFlow.
TORCH = gpu(memory="1.5GiB", framework="torch")
KERAS = gpu(memory="2.5GiB", framework="tensorflow")

TORCH_MODELS = ["torch-linear", "torch-mlp", "torch-cnn"]
KERAS_MODELS = ["keras-linear", "keras-mlp", "keras-cnn"]

BATCH_SIZE = 64


@task
def load_digits(seed: int) -> dict[str, Any]:
    """Load 1797 images of 8x8 pixels, a quarter of them held out. No tag: it runs in a thread."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype("float32")[:, None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=seed, stratify=digits.target
    )
    return {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}


@task
def evaluate(name: str, data: dict[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    """Train one model and measure it on the digits that it has not seen."""
    framework, _, kind = name.partition("-")
    train = train_torch if framework == "torch" else train_keras
    accuracy, seconds = train(kind, data, epochs, seed)
    report_metric("accuracy", accuracy)
    allocation = current_allocation()
    return {
        "model": name,
        "framework": framework,
        "accuracy": accuracy,
        "seconds": seconds,
        "peak": peak_memory(framework),
        "device": ", ".join(allocation.device_uuids) if allocation else "none",
    }


def train_torch(kind: str, data: dict[str, Any], epochs: int, seed: int) -> tuple[float, float]:
    """Train a PyTorch model; give its accuracy on the held-out digits, and the seconds it took."""
    import torch
    from torch import nn

    started = time.perf_counter()
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers: dict[str, list[nn.Module]] = {
        "linear": [nn.Flatten(), nn.Linear(64, 10)],
        "mlp": [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)],
        "cnn": [
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 10),
        ],
    }
    model = nn.Sequential(*layers[kind]).to(device)
    x, y, test_x, test_y = (
        torch.from_numpy(data[key]).to(device) for key in ("train_x", "train_y", "test_x", "test_y")
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), device=device).split(BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.inference_mode():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return accuracy, time.perf_counter() - started


def train_keras(kind: str, data: dict[str, Any], epochs: int, seed: int) -> tuple[float, float]:
    """Train a Keras model on TensorFlow; give its accuracy and seconds, as `train_torch` does."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    from keras import layers

    started = time.perf_counter()
    keras.utils.set_random_seed(seed)
    stacks: dict[str, list[Any]] = {
        "linear": [layers.Flatten(), layers.Dense(10)],
        "mlp": [
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10),
        ],
        "cnn": [
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ],
    }
    model = keras.Sequential([keras.Input((8, 8, 1)), *stacks[kind]])
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # Compiling takes longer than the training that it would speed up.
        jit_compile=False,
    )
    # Channels last: what TensorFlow convolves on a processor too.
    x, test_x = (data[key].transpose(0, 2, 3, 1) for key in ("train_x", "test_x"))
    model.fit(x, data["train_y"], BATCH_SIZE, epochs, verbose=0)
    accuracy = float(model.evaluate(test_x, data["test_y"], 256, verbose=0)[1])
    return accuracy, time.perf_counter() - started


def peak_memory(framework: str) -> str:
    """Return the peak memory: of the framework on a GPU, else of the whole process."""
    if framework == "torch":
        import torch

        if torch.cuda.is_available():
            return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB on the GPU"
    else:
        import tensorflow as tf

        if tf.config.list_physical_devices("GPU"):
            peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
            return f"{peak / 2**20:.0f} MiB on the GPU"
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return "unknown"
    return f"{kib / 2**10:.0f} MiB of the process"


@task
def rank(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order the models, best first; of equals the quicker."""
    return sorted(rows, key=lambda row: (-row["accuracy"], row["seconds"]))


def leaderboard(rows: list[dict[str, Any]]) -> str:
    """Write the ranking as a Markdown table."""
    lines = [
        "| | model | framework | accuracy | seconds | peak memory | device |",
        "|---|---|---|---|---|---|---|",
    ]
    for place, row in enumerate(rows, 1):
        lines.append(
            f"| {place} | {row['model']} | {row['framework']} | {row['accuracy']:.4f} "
            f"| {row['seconds']:.1f} | {row['peak']} | {row['device']} |"
        )
    return "\n".join(lines)


@flow(name="evaluate-models", task_runner=GPUTaskRunner())
def evaluate_models(epochs: int = 15, seed: int = 0) -> list[dict[str, Any]]:
    """Evaluate every model at once, as far as devices have room, and rank them."""
    data = load_digits.submit(seed)
    rest = {"data": unmapped(data), "epochs": epochs, "seed": seed}
    # The slower ones first: of tasks that are ready, the first submitted starts first.
    futures = [
        *evaluate.with_options(tags=KERAS, task_run_name="{name}").map(KERAS_MODELS[::-1], **rest),
        *evaluate.with_options(tags=TORCH, task_run_name="{name}").map(TORCH_MODELS[::-1], **rest),
    ]
    rows = rank.submit([future.result() for future in futures]).result()
    publish_leaderboard(futures, "accuracy")
    return rows


def check_installed(*modules: str) -> None:
    """End the program with one line if a library is not installed."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        sys.exit(
            f'not installed: {", ".join(missing)}; the examples need pip install ".[examples]"'
        )


def main() -> None:
    """Read the arguments, run the flow, print its leaderboard."""
    check_installed("sklearn", "torch", "tensorflow")
    parser = argparse.ArgumentParser(description=evaluate_models.__doc__)
    parser.add_argument("--devices", default="auto", help="auto, host, nvml, simulated:2x8GiB, 0,1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    listed = options.devices.split(",") if options.devices[:1].isdigit() else options.devices
    run = evaluate_models.with_options(task_runner=GPUTaskRunner(devices=listed))
    rows = run(options.epochs, options.seed)
    print(leaderboard(rows))
    print(f"best: {rows[0]['model']} with {rows[0]['accuracy']:.4f} on held-out digits")


if __name__ == "__main__":
    main()
