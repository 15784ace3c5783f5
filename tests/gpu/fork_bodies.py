"""Bodies that compute on a device in a fork of a warm process. Each imports its libraries by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def use_system() -> int:
    """Multiply in BLAS's threads, hear a signal and run a program."""
    import numpy as np

    blas = int((np.ones((400, 400)) @ np.ones((400, 400))).sum())
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    said = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, check=True)
    return blas + int(said.stdout) + len(heard)


def train_torch() -> tuple[float, int, bool]:
    """Train a convolution on the device, with a loader's worker, use the system, and run out of memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 900, 4)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.ones(16, 3, 32, 32)), batch_size=8, num_workers=1)
    for (batch,) in data:
        loss = model(batch.to(device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ran_out = device == "cpu"
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        ran_out = "memory" in str(error)
    return round(float(loss.detach()), 4), use_system(), ran_out


def compile_torch() -> float:
    """Train with a compiled function on the device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    compiled = torch.compile(lambda x: (x.sin() * 2).sum())
    x = torch.ones(64, 64, device=device, requires_grad=True)
    compiled(x).backward()
    assert x.grad is not None
    return round(float(x.grad.sum()), 2)


def use_torch_libraries() -> float:
    """Run models of timm and transformers, and a Gaussian process."""
    import gpytorch
    import timm
    import torch
    import transformers

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model("resnet18", num_classes=4).to(device).eval()
    found = float(model(torch.ones(2, 3, 64, 64, device=device)).sum().detach())
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    bert = transformers.BertModel(config).to(device).eval()
    found += float(bert(torch.ones(1, 8, dtype=torch.long, device=device))[0].sum().detach())
    kernel = gpytorch.kernels.RBFKernel().to(device)
    found += float(kernel(torch.ones(4, 2, device=device)).to_dense().sum().detach())
    return round(found, 1)


def train_jax() -> tuple[float, int, bool]:
    """Train a convolution with Flax and Optax on the device, use the system, and run out of memory."""
    import flax.linen as nn
    import jax
    import optax

    model = nn.Sequential(
        [nn.Conv(8, (3, 3)), nn.relu, lambda y: y.reshape((y.shape[0], -1)), nn.Dense(4)]
    )
    x = jax.numpy.ones((8, 16, 16, 3))
    params = model.init(jax.random.PRNGKey(0), x)
    rule = optax.sgd(0.1)
    state = rule.init(params)

    @jax.jit
    def step(params, state):  # type: ignore[no-untyped-def]
        loss, grads = jax.value_and_grad(lambda p: (model.apply(p, x) ** 2).mean())(params)
        updates, state = rule.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
    on_gpu = jax.default_backend() == "gpu"
    ran_out = not on_gpu
    try:
        if on_gpu:
            jax.numpy.ones((1 << 40,), jax.numpy.uint8).block_until_ready()
    except Exception as error:
        ran_out = "RESOURCE_EXHAUSTED" in str(error)
    return round(float(loss), 3), use_system(), ran_out


def train_torch_and_jax() -> tuple[float, float]:
    """Train with both frameworks on the device."""
    return train_jax()[0], train_torch()[0]


def use_cupy() -> float:
    """Multiply, solve and transform on the device."""
    import cupy

    x = cupy.ones((256, 256), dtype=cupy.float32)
    solved = cupy.linalg.solve(cupy.eye(64) * 2, cupy.ones(64))
    return round(float((x @ x).sum() + solved.sum() + abs(cupy.fft.fft(x[0])).sum()), 1)


def use_numba_and_sklearn() -> float:
    """Run a kernel of Numba's on the device, and fit a model of scikit-learn with threads."""
    import numba.cuda
    import numpy as np
    from sklearn.ensemble import RandomForestClassifier

    @numba.cuda.jit
    def double(x):  # type: ignore[no-untyped-def]
        i = numba.cuda.grid(1)
        if i < x.size:
            x[i] *= 2

    x = numba.cuda.to_device(np.ones(1000))
    double[8, 128](x)
    chance = np.random.default_rng(0)
    points = chance.random((200, 4))
    forest = RandomForestClassifier(10, n_jobs=2, random_state=0).fit(points, points[:, 0] > 0.5)
    return float(x.copy_to_host().sum() + forest.predict(points).sum())
