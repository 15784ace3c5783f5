"""A ResNet-50 in training. It knows nothing of this package, nor of Prefect.

The network is that of He et al. (2015) as torchvision builds it (stride in the 3×3 convolution),
written out here since torchvision need not be installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Blocks and channels of the four stages.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))

#: Of a block's inner channels, what it gives on.
EXPANSION = 4


def convolve(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution followed by its normalisation."""
    padding = kernel // 2
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Bottleneck(nn.Module):
    """Three convolutions beside a way past them."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * EXPANSION
        self.way = nn.Sequential(
            *convolve(inputs, channels, 1),
            nn.ReLU(inplace=True),
            *convolve(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *convolve(channels, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.past = nn.Identity() if same else nn.Sequential(*convolve(inputs, outputs, 1, stride))
        self.end = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.end(self.way(images) + self.past(images))
        return out


def resnet50(classes: int = 1000) -> nn.Module:
    """Build the network."""
    layers = [*convolve(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for index, (blocks, channels) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if index > 0 and block == 0 else 1
            layers.append(Bottleneck(inputs, channels, stride))
            inputs = channels * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def train(
    steps: int,
    after_step: Callable[[], object] = lambda: None,
    *,
    batch: int = 512,
    pixels: int = 64,
    benchmark: bool = True,
    exact_peak: bool = False,
) -> dict[str, Any]:
    """Train on images that stay the same, in float32 with SGD and momentum, on the GPU if there is one.

    Args:
        steps: How many.
        after_step: Called at the end of each, within its time.
        batch: Images of a step.
        pixels: Of their height and width.
        benchmark: Whether cuDNN tries out its algorithms in the first step.
        exact_peak: Reset PyTorch's peak counter after the first step, and read it at the end.

    Returns:
        Seconds of each step, and the peak since the first one (0: not asked for).
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = benchmark
    model = resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    seconds = []
    began_s = time.perf_counter()
    for index in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        after_step()
        ended_s = time.perf_counter()
        seconds.append(ended_s - began_s)
        began_s = ended_s
        if index == 0 and exact_peak and on_gpu:
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() if exact_peak and on_gpu else 0
    return {"seconds": seconds, "peak_live_bytes": peak}
