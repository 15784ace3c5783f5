"""Bodies that use libraries as their tutorials do: each library's own training loop or API, on made-up data.

Imported by children: no pytest, and a library is imported by its own body alone. Each body has two arguments.
`shrink` divides its sizes, where it is only tried out without a GPU; `seed` determines data and sizes. On an H200 with
`shrink=1` each needs 2 to 7 GiB, and runs for a few seconds.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from prefect_gpu import step

#: What a body returns: `result` (numbers that another run with the same arguments returns too), and facts about its run.
Found: TypeAlias = dict[str, Any]

#: Training steps of each body.
STEPS = 8


def draw_sizes(seed: int, count: int, least: int, most: int) -> list[int]:
    """Draw the sizes of one run: their logarithms are evenly spread up to a largest one, which differs by run.

    So are lengths of texts and sizes of graphs, roughly, where each run has a data set of its own.
    """
    chance = random.Random(seed)
    largest = chance.uniform(0.4, 1.0)
    return [round(least * (most / least) ** (largest * chance.random())) for _ in range(count)]


def own_descendants() -> list[tuple[int, int]]:
    """Return the processes that this one has started, and theirs: id and start time, in ticks of the kernel."""
    parents: dict[int, list[tuple[int, int]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append((int(stat.parent.name), int(fields[19])))

    def below(pid: int) -> Iterator[tuple[int, int]]:
        for child in parents.get(pid, ()):
            yield child
            yield from below(child[0])

    return list(below(os.getpid()))


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_found(*result: float, **facts: object) -> Found:
    """Make what a body of PyTorch returns, with its allocator's counts of retries and refusals."""
    import torch

    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    counts = {"retries": stats.get("num_alloc_retries", 0), "refusals": stats.get("num_ooms", 0)}
    return {"result": [float(number) for number in result], **counts, **facts}


# Inputs of one size.


def timm(shrink: int, seed: int) -> Found:
    """A vision transformer, trained with mixup, timm's optimizer and its learning rate schedule."""
    import numpy
    import torch
    from timm import create_model
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    torch.manual_seed(seed)
    # How much of which images is mixed.
    numpy.random.seed(seed)
    device = torch_device()
    classes, batch = 100, max(2, 64 // shrink)
    name = "vit_small_patch16_224" if shrink == 1 else "vit_tiny_patch16_224"
    model = create_model(name, num_classes=classes).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-4)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS)
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=classes)
    images = torch.randn(batch, 3, 224, 224).to(device)
    labels = torch.randint(classes, (batch,)).to(device)
    loss_of = SoftTargetCrossEntropy()
    for number in range(STEPS):
        mixed, targets = mixup(images, labels)
        loss = loss_of(model(mixed), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(number)
        step()
    return torch_found(loss.item())


def trainer(shrink: int, seed: int, batch: int = 32, auto_find_batch_size: bool = False) -> Found:
    """A BERT for masked tokens in the `Trainer` of Hugging Face, whose data loader has two processes."""
    import torch
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    set_seed(seed)
    words, length = 30522 // shrink, 256 // shrink
    tokens = torch.randint(words, (256, length))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    config = BertConfig(
        vocab_size=words, hidden_size=256, num_hidden_layers=6, num_attention_heads=4
    )
    facts: dict[str, Any] = {}

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            facts.setdefault("descendants", own_descendants())
            step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            auto_find_batch_size=auto_find_batch_size,
            max_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=2,
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
        )
        driver = Trainer(
            model=BertForMaskedLM(config),
            args=arguments,
            train_dataset=rows,
            callbacks=[Steps()],
        )
        loss = driver.train().training_loss
    size = driver._train_batch_size
    return torch_found(loss, size, batch=size, **facts)


def trainer_finds_batch_size(shrink: int, seed: int) -> Found:
    """The same with `auto_find_batch_size`: it catches an out-of-memory and tries a smaller batch."""
    return trainer(shrink, seed, auto_find_batch_size=True)


def lightning(shrink: int, seed: int) -> Found:
    """A wide network in the `Trainer` of Lightning."""
    import torch
    from lightning import Callback, LightningModule, Trainer, seed_everything
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    seed_everything(seed, verbose=False)
    wide, batch = 4096 // shrink, 8192 // shrink
    rows = torch.randn(4 * batch, 256)

    class Network(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            hidden = [layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.GELU())]
            self.layers = nn.Sequential(nn.Linear(256, wide), *hidden, nn.Linear(wide, 256))

        def training_step(self, rows: Any, index: int) -> Any:
            return nn.functional.mse_loss(self.layers(rows[0]), rows[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    class Steps(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, driver: Any, *others: Any) -> None:
            step()

    driver = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps()],
    )
    model = Network()
    driver.fit(model, DataLoader(TensorDataset(rows), batch_size=batch))
    return torch_found(driver.global_step, model.layers[0].weight.abs().mean().item())


def accelerate(shrink: int, seed: int) -> Found:
    """A convolutional network in a loop of one's own, prepared by `Accelerator`, with mixed precision."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    set_seed(seed)
    wide, batch = 64 // shrink, 128 // shrink
    widths = (3, wide, wide, wide, wide, wide, wide)
    layers = [
        layer
        for inputs, outputs in itertools.pairwise(widths)
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
    )
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10))
    images = TensorDataset(torch.randn(2 * batch, 3, 128, 128), torch.arange(2 * batch) % 10)
    loader = DataLoader(images, batch_size=batch, num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    descendants: list[tuple[int, int]] = []
    for _ in range(STEPS // 2):
        for rows, labels in loader:
            descendants = descendants or own_descendants()
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step()
    return torch_found(accelerator.gather(loss.detach()).item(), descendants=descendants)


def accelerate_finds_batch_size(shrink: int, seed: int) -> Found:
    """`find_executable_batch_size` of Accelerate: it catches an out-of-memory and tries a smaller batch."""
    import torch
    from accelerate.utils import find_executable_batch_size

    torch.manual_seed(seed)
    wide, device = 4096 // shrink, torch_device()
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(wide, wide), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)

    @find_executable_batch_size(starting_batch_size=16384 // shrink)  # type: ignore[untyped-decorator]
    def train(batch: int) -> int:
        for _ in range(STEPS):
            model.zero_grad()
            model(torch.randn(batch, wide, device=device)).square().mean().backward()
            step()
        return batch

    batch = train()
    return torch_found(STEPS, batch, batch=batch)


def compiled(shrink: int, seed: int) -> Found:
    """`torch.compile` with nothing in its cache, so that its processes compile every kernel."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    device = torch_device()
    wide, batch = 2048 // shrink, 16384 // shrink

    class Block(nn.Module):
        def __init__(self, change: Any) -> None:
            super().__init__()
            self.change = change
            self.rows = nn.Linear(wide, wide)
            self.norm = nn.LayerNorm(wide)

        def forward(self, rows: Any) -> Any:
            return rows + self.change(self.rows(self.norm(rows)))

    changes = (nn.GELU(), nn.SiLU(), nn.Mish(), nn.Tanh(), nn.Softplus(), nn.ELU())
    model = nn.Sequential(*(Block(change) for change in changes)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    rows = torch.randn(batch, wide, device=device)
    descendants: set[tuple[int, int]] = set()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton"))
        forward = torch.compile(model)
        for _ in range(STEPS):
            loss = forward(rows).square().mean()
            loss.backward()
            descendants.update(own_descendants())
            optimizer.step()
            optimizer.zero_grad()
            step()
        kernels = sum(1 for path in Path(folder).rglob("*.py"))
    return torch_found(loss.item(), kernels=kernels, descendants=sorted(descendants))


def flax(shrink: int, seed: int) -> Found:
    """A network of Flax, trained with Optax's Adam."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen

    wide, batch = 4096 // shrink, 8192 // shrink

    class Network(linen.Module):  # type: ignore[misc]
        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, rows: Any) -> Any:
            for _ in range(4):
                rows = linen.gelu(linen.Dense(wide)(rows))
            return rows

    model, optimizer = Network(), optax.adam(1e-4)
    rows = jax.random.normal(jax.random.key(seed), (batch, wide))
    parameters = model.init(jax.random.key(seed + 1), rows[:1])
    state = optimizer.init(parameters)

    @jax.jit
    def train(parameters: Any, state: Any) -> Any:
        def loss_of(parameters: Any) -> Any:
            return jnp.mean((model.apply(parameters, rows) - rows) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        changes, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, changes), state, loss

    for _ in range(STEPS):
        parameters, state, loss = train(parameters, state)
        loss.block_until_ready()
        step()
    return {"result": [float(loss)]}


def optax(shrink: int, seed: int) -> Found:
    """Plain JAX with a chain of Optax: clipped gradients, a schedule, two batches a step."""
    import jax
    import jax.numpy as jnp
    import optax

    wide, batch = 4096 // shrink, 8192 // shrink
    keys = jax.random.split(jax.random.key(seed), 5)
    weights = [jax.random.normal(key, (wide, wide)) / wide**0.5 for key in keys[:4]]
    rows = jax.random.normal(keys[4], (batch, wide))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, STEPS)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = optax.MultiSteps(chain, every_k_schedule=2)
    state = optimizer.init(weights)

    @jax.jit
    def train(weights: Any, state: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            found = rows
            for weight in weights:
                found = jnp.tanh(found @ weight)
            return jnp.mean((found - rows) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    for _ in range(STEPS):
        weights, state, loss = train(weights, state)
        loss.block_until_ready()
        step()
    return {"result": [float(loss)]}


def cupy(shrink: int, seed: int) -> Found:
    """Images are filtered, transformed and reduced to their principal components."""
    import cupy
    from cupyx.scipy import ndimage

    chance = cupy.random.default_rng(seed)
    images = chance.standard_normal((256 // shrink, 1024, 1024), dtype=cupy.float32)
    for _ in range(STEPS // 2):
        smooth = ndimage.gaussian_filter(images, (0, 2, 2))
        spectra = cupy.fft.rfft2(smooth)
        rows = cupy.abs(spectra[:, :64, :64]).reshape(len(images), -1)
        _, values, _ = cupy.linalg.svd(rows, full_matrices=False)
        result = float(values[0])
        step()
    return {"result": [result]}


# Inputs of changing size.


def detection(shrink: int, seed: int) -> Found:
    """A Faster R-CNN of torchvision, trained on images of other sizes in each step."""
    import torch
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    torch.manual_seed(seed)
    device = torch_device()
    model = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=5,
        min_size=64 // shrink,
        max_size=2048 // shrink,
        rpn_pre_nms_top_n_train=2000 // shrink,
        box_batch_size_per_image=512 // shrink,
    ).to(device)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizes = draw_sizes(seed, STEPS, 384 // shrink, 1536 // shrink)
    for size in sizes:
        # The longer side is not scaled: with a small `min_size` images keep the sizes that they have.
        model.transform.min_size = (size,)
        images = [torch.rand(3, size, round(size * 1.2), device=device) for _ in range(4)]
        corners = torch.rand(4, 6, 2, device=device) * size / 2
        boxes = [torch.cat([each, each + size / 3], dim=1) for each in corners]
        labels = torch.randint(1, 5, (6,), device=device)
        losses = model(images, [{"boxes": each, "labels": labels} for each in boxes])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()
    return torch_found(len(sizes), sizes=sizes)


def generate(shrink: int, seed: int) -> Found:
    """A GPT-2 that continues prompts of other lengths each time, with a cache of keys and values that grows."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    device = torch_device()
    layers = 12 if shrink == 1 else 2
    config = GPT2Config(n_layer=layers, n_positions=2048, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(device).eval()
    lengths = draw_sizes(seed, STEPS // 2, 128 // shrink, 1024 // shrink)
    more = 32 // shrink
    for length in lengths:
        prompts = torch.randint(1, config.vocab_size, (32 // shrink, length), device=device)
        texts = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=more,
            max_new_tokens=more,
            pad_token_id=0,
        )
        assert texts.shape == (32 // shrink, length + more)
        step()
    return torch_found(texts.numel(), sizes=lengths)


def graphs(shrink: int, seed: int) -> Found:
    """A graph attention network of PyTorch Geometric on random graphs of other sizes in each step."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GAT

    torch.manual_seed(seed)
    device = torch_device()
    sizes = draw_sizes(seed, STEPS, 8000 // shrink, 64000 // shrink)
    rows = [
        Data(
            x=torch.randn(size, 64),
            edge_index=torch.randint(size, (2, 16 * size)),
            y=torch.randint(7, (size,)),
        )
        for size in sizes
    ]
    model = GAT(64, 64, num_layers=3, out_channels=7, heads=4, v2=True).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for graph in DataLoader(rows, batch_size=1):
        graph = graph.to(device)
        loss = torch.nn.functional.cross_entropy(model(graph.x, graph.edge_index), graph.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()
    return torch_found(loss.item(), sizes=sizes)
