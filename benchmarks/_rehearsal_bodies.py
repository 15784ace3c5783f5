"""Bodies of the tasks of `rehearsal.py`. Their values depend on their arguments alone, on one model of GPU.

No framework is imported at the top: children of all kinds import this module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

#: By library: architectures of which random weights are made.
ARCHITECTURES = {
    "timm": [
        *("resnet18", "resnet50d", "convnext_tiny", "efficientnet_b0", "mobilenetv3_large_100"),
        *("vit_small_patch16_224", "deit_tiny_patch16_224", "mixer_s16_224", "regnety_004"),
        "densenet121",
    ],
    "torchvision": [
        *("resnet34", "resnet50", "densenet121", "swin_t", "regnet_y_1_6gf", "convnext_tiny"),
        *("mobilenet_v3_large", "efficientnet_b0", "squeezenet1_1", "vgg11"),
    ],
    "transformers": [
        *("bert", "gpt2", "distilbert", "roberta", "electra", "opt", "ernie", "camembert"),
        *("roformer", "xlm-roberta"),
    ],
    # Where those are not installed, and on the CPU.
    "torch": ["linear", "convolution"],
}

#: Images or texts in a batch, sides of an image in pixels, tokens of a text, known tokens.
BATCH, PIXELS, LENGTH, VOCABULARY = 64, 224, 256, 1000

#: A training notes its first loss, and then each time that it has done so many steps.
NOTED_EVERY = 100

#: Memory that a training holds beside its model, and that the leaking task and its process hold.
HELD_BYTES, LEAKED_BYTES = 12 * 2**30, 2**30

#: A process that holds memory of a device for longer than anything else lasts.
LEAKING = "import torch, time; kept = torch.zeros(2**27, device='cuda'); print(1); time.sleep(3600)"


def build(library: str, name: str) -> Any:
    """Build a model with random weights."""
    if library == "timm":
        import timm

        return timm.create_model(name, pretrained=False)
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, weights=None)
    if library == "transformers":
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.for_model(name, vocab_size=VOCABULARY, num_hidden_layers=4)
        return AutoModel.from_config(config)
    from torch import nn

    layer = nn.Linear(PIXELS, 32) if name == "linear" else nn.Conv2d(3, 8, 3)
    return nn.Sequential(layer, nn.ReLU())


def evaluate(library: str, name: str, data: int, batches: int) -> float:
    """Run batches of a data set without gradients; return the mean size of what the model says."""
    import torch

    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = BATCH if device == "cuda" else 2
    model = build(library, name).to(device).eval()
    # From the CPU's generator, which is the same on each machine.
    torch.manual_seed(1 + data)
    found = 0.0
    with torch.inference_mode():
        for _ in range(batches):
            if library == "transformers":
                inputs = torch.randint(VOCABULARY, (batch, LENGTH))
            else:
                inputs = torch.randn(batch, 3, PIXELS, PIXELS)
            said = model(inputs.to(device))
            said = said[0] if library == "transformers" else said
            found += said.abs().mean().item() / batches
    return found


def train(steps: int, until_s: float) -> list[float]:
    """Train for so many steps, and then until a time; return the losses of the first step and of each hundredth after it."""
    import torch

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device, width = ("cuda", 2048) if on_gpu else ("cpu", 16)
    kept = torch.full((HELD_BYTES // 4 if on_gpu else 1,), 1.0, device=device)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width), torch.nn.Tanh()),
        torch.nn.Linear(width, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(256, width).to(device), torch.arange(256).to(device) % 10
    losses, done = [], 0
    while not losses or done < steps or time.time() < until_s:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if done % NOTED_EVERY == 0:
            losses.append(loss.item())
        done += 1
    # What was moved to the host and back is what it was.
    return losses if kept.min().item() == kept.max().item() == 1.0 else []


def answer(number: int) -> tuple[float, float]:
    """Answer a request; return the time of the first line, and the answer."""
    line = time.time()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.full((512, 512), float(number), device=device)
    return line, (x @ x).mean().item()


def with_jax(seed: int) -> float:
    """Compute with JAX."""
    import jax

    x = jax.random.normal(jax.random.key(seed), (1024, 1024))
    for _ in range(20):
        x = jax.numpy.tanh(x @ x)
    return float(abs(x).mean())


def with_tensorflow(seed: int) -> float:
    """Compute with TensorFlow."""
    import tensorflow as tf

    x = tf.random.stateless_normal((1024, 1024), (seed, 0))
    for _ in range(20):
        x = tf.tanh(x @ x)
    return float(tf.reduce_mean(tf.abs(x)))


def fit(value: int) -> float:
    """Train a little; return the last loss."""
    return train(1500, 0.0)[-1] + value


def leak() -> float:
    """Leave memory in this process, and a process that holds more."""
    import torch

    global kept
    kept = torch.zeros(LEAKED_BYTES // 4, device="cuda")
    process = subprocess.Popen([sys.executable, "-c", LEAKING], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return float(process.stdout.readline())


def run_out() -> float:
    """Take more memory than any device has."""
    import torch

    return torch.zeros(2**40, device="cuda").sum().item()


def crash() -> float:
    """Write to an illegal address: as a client of MPS, this ends the tasks beside it, too."""
    import cupy

    time.sleep(2)
    text = 'extern "C" __global__ void put(float* at) { *at = 1.0f; }'
    cupy.RawKernel(text, "put")((1,), (1,), (cupy.uint64(16),))
    cupy.cuda.runtime.deviceSynchronize()
    return 0.0


def alone(name: str, arguments: list[Any]) -> Any:
    """Call a body by its name, without Prefect; return its value, or the type of its exception as text."""
    try:
        return globals()[name](*arguments)
    except Exception as error:
        return type(error).__name__


kept: Any = None


if __name__ == "__main__":
    import json

    # Lines of a name and arguments in, lines of values out.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    for line in sys.stdin:
        print("VALUE " + json.dumps(alone(*json.loads(line))), flush=True)
