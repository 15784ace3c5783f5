"""Programs whose GPU memory is moved to the host and back while they run: `python -m tests.gpu.suspension_bodies NAME`.

Each prints `ready` once its memory is there, works until it has done its steps (a body that is idle: until a line comes on
standard input), and prints a digest of what it computed. Nothing in them knows that they are suspended.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30

#: Steps of a loop, and seconds of each at least: twenty turns fit in.
STEPS = 300
STEP_S = 0.05

Body = Callable[[], Iterator[Any]]

JAX = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.015",
    # Which product is the fastest is else measured anew by each process.
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0",
}

#: By name: what is set before anything of the framework is imported.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "torch-expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "torch-async": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "jax-idle": JAX,
    "jax-loop": JAX,
    "tensorflow-idle": {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_DETERMINISTIC_OPS": "1"},
    "tensorflow-loop": {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_DETERMINISTIC_OPS": "1"},
}


def torch_deterministic() -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    return torch


def torch_idle() -> Iterator[Any]:
    torch = torch_deterministic()
    held = torch.rand(GIB // 4, device="cuda")
    torch.cuda.synchronize()
    yield None
    yield held[::1001].cpu().numpy().tobytes(), float(held.sum(dtype=torch.float64))


def training(workers: int = 0, pinned: bool = False, graph: bool = False) -> Iterator[Any]:
    """A small convolutional network with Adam, and weight that makes it a GiB."""
    torch = torch_deterministic()
    nn = torch.nn
    held = torch.rand(200 << 20, device="cuda")
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3, stride=4), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), capturable=graph)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64 * 16, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (64 * 16,), generator=generator)
    batches: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels),
        batch_size=64,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pinned,
    )
    stream = torch.cuda.Stream() if pinned else torch.cuda.current_stream()
    x, y = images[:64].cuda(), labels[:64].cuda()

    def compute() -> Any:
        optimizer.zero_grad(set_to_none=not graph)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    work = compute
    if graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            static = compute()

        def work() -> Any:
            captured.replay()
            return static

    float(work())
    yield None
    done = 0
    while done < STEPS:
        for a, b in batches:
            with torch.cuda.stream(stream):
                a, b = a.cuda(non_blocking=pinned), b.cuda(non_blocking=pinned)
            torch.cuda.current_stream().wait_stream(stream)
            x.copy_(a)
            y.copy_(b)
            yield float(work())
            done += 1
            if done == STEPS:
                break
    yield held[::1001].cpu().numpy().tobytes()


def pipeline() -> Iterator[Any]:
    """Half of a network on each of two devices; activations and gradients go from one to the other."""
    torch = torch_deterministic()
    nn = torch.nn
    held = [torch.rand(GIB // 8, device=f"cuda:{index}") for index in (0, 1)]
    first = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU()).to("cuda:0")
    second = nn.Linear(2048, 10).to("cuda:1")
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    x, y = torch.randn(256, 1024, device="cuda:0"), torch.arange(256, device="cuda:1") % 10
    for number in range(STEPS + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(second(first(x).to("cuda:1")), y)
        loss.backward()
        optimizer.step()
        yield float(loss) if number else None
    yield [each[::1001].cpu().numpy().tobytes() for each in held]


def replicas() -> Iterator[Any]:
    """A replica of a network on each of two devices, by `DataParallel`, which uses NCCL."""
    torch = torch_deterministic()
    model = torch.nn.DataParallel(torch.nn.Linear(1024, 10).cuda())
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(256, 1024, device="cuda"), torch.arange(256, device="cuda") % 10
    for number in range(STEPS + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield float(loss) if number else None


def captures() -> Iterator[Any]:
    """Capture a graph anew in each step, so that many a move begins within a capture."""
    torch = torch_deterministic()
    held = torch.rand(GIB // 4, device="cuda")
    x = torch.rand(1 << 20, device="cuda")
    # Its kernels are loaded before a capture.
    x.copy_((x * 0.9).cos())
    yield None
    for _ in range(STEPS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 0.9
            time.sleep(STEP_S)
            x.copy_(y.cos())
        graph.replay()
        yield float(x.sum(dtype=torch.float64))
    yield held[::1001].cpu().numpy().tobytes()


def tensorflow_idle() -> Iterator[Any]:
    import tensorflow as tf

    held = tf.random.stateless_uniform((GIB // 4,), seed=(1, 2))
    float(tf.reduce_sum(held))
    yield None
    yield float(tf.reduce_sum(held)), held[::1001].numpy().tobytes()


def tensorflow_loop() -> Iterator[Any]:
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    held = tf.random.stateless_uniform((200 << 20,), seed=(1, 2))
    model = tf.keras.Sequential([
        tf.keras.layers.Conv2D(32, 3, activation="relu"), tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(10),
    ])  # fmt: skip
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = tf.random.stateless_normal((64, 32, 32, 3), seed=(3, 4))
    y = tf.constant([i % 10 for i in range(64)])
    model.train_on_batch(x, y)
    yield None
    for _ in range(STEPS):
        yield float(model.train_on_batch(x, y))
    yield held[::1001].numpy().tobytes()


def jax_idle() -> Iterator[Any]:
    import jax

    held = jax.random.uniform(jax.random.key(0), (128 << 20,))
    held.block_until_ready()
    yield None
    yield float(held.sum()), bytes(jax.device_get(held[::1001]).data)


def jax_loop() -> Iterator[Any]:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ w) - 0.5) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w = jax.random.normal(jax.random.key(0), (2048, 2048))
    x = jax.random.normal(jax.random.key(1), (256, 2048))
    w, _ = step(w, x)
    jax.block_until_ready(w)
    yield None
    for _ in range(STEPS):
        w, value = step(w, x)
        yield float(value)


def cupy_idle() -> Iterator[Any]:
    import cupy

    held = cupy.random.default_rng(0).random(GIB // 8)
    cupy.cuda.runtime.deviceSynchronize()
    yield None
    yield held[::1001].get().tobytes()


def cupy_loop() -> Iterator[Any]:
    import cupy

    held = cupy.random.default_rng(0).random(GIB // 8)
    w = cupy.random.default_rng(1).random((1024, 1024), dtype=cupy.float32)
    yield None
    for _ in range(STEPS):
        w = cupy.tanh(w @ w.T / 1024) + held[:1024].astype(cupy.float32)
        yield float(w.sum())
    yield held[::1001].get().tobytes()


def onnxruntime_idle(steps: int = 3) -> Iterator[Any]:
    import numpy as np
    import onnxruntime as ort

    ort.preload_dlls()
    session = ort.InferenceSession(
        str(Path(__file__).parent / "models" / "product.onnx"),
        providers=[("CUDAExecutionProvider", {"gpu_mem_limit": str(2 * GIB)})],
    )
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    numbers = np.random.default_rng(0)
    held = ort.OrtValue.ortvalue_from_numpy(numbers.random(GIB // 4, dtype=np.float32), "cuda", 0)
    a = numbers.random((16384, 512), dtype=np.float32)
    bs = [numbers.random((512, 512), dtype=np.float32) for _ in range(4)]
    session.run(None, {"a": a, "b": bs[0]})
    yield None
    for number in range(steps):
        (product,) = session.run(None, {"a": a, "b": bs[number % 4]})
        yield product[::101].tobytes()
    yield held.numpy()[::1001].tobytes()


BODIES: dict[str, Body] = {
    "torch-idle": torch_idle,
    "torch-loop": training,
    "torch-dataloader": lambda: training(workers=2),
    "torch-graphs": lambda: training(graph=True),
    "torch-captures": captures,
    "torch-expandable": training,
    "torch-async": training,
    "torch-pinned": lambda: training(pinned=True),
    "torch-pipeline": pipeline,
    "torch-replicas": replicas,
    "tensorflow-idle": tensorflow_idle,
    "tensorflow-loop": tensorflow_loop,
    "jax-idle": jax_idle,
    "jax-loop": jax_loop,
    "cupy-idle": cupy_idle,
    "cupy-loop": cupy_loop,
    "onnxruntime-idle": onnxruntime_idle,
    "onnxruntime-loop": lambda: onnxruntime_idle(STEPS),
}


#: Bodies that need two devices.
ON_TWO = ("torch-pipeline", "torch-replicas")


def main(name: str) -> None:
    os.environ.update(ENVIRONMENTS.get(name, {}))
    body = BODIES[name]()
    next(body)
    print("ready", flush=True)
    if name.endswith("-idle"):
        sys.stdin.readline()
    digest = hashlib.sha256()
    for value in body:
        digest.update(repr(value).encode())
        if not name.endswith("-idle"):
            time.sleep(STEP_S)
    print("digest", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
