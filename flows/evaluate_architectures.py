"""Throughput and peak memory of real architectures, side by side, with random weights.

Architectures of timm, torchvision, transformers and of PyTorch itself are built from their definitions: nothing is
downloaded. Each is one GPU task that runs batches without gradients and reports images or tokens a second.

    python flows/evaluate_architectures.py
    python flows/evaluate_architectures.py --small --devices host
    python flows/evaluate_architectures.py --memory 6GiB --batch 512 --only timm torchvision

Without `--memory` first runs share a device while it has room, and later runs get what was measured. One
that runs out of memory runs again with more, and fails at last; the others go on. It prints what the reports say, and
publishes the leaderboards `gpu-leaderboard-images` and `-tokens`. A library that is not installed is left out.
Needs torch (`pip install prefect-gpu[torch] timm torchvision transformers`).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Sequence
from typing import Any

from prefect import flow, task
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, gpu, publish_leaderboard, report, report_metric, step
from prefect_gpu.units import format_bytes

#: By library: architectures that see images, and those that read tokens.
IMAGES = {
    "timm": ["vit_base_patch16_224", "convnext_tiny", "efficientnet_b0", "mobilenetv3_large_100"],
    "torchvision": ["resnet50", "swin_t", "regnet_y_8gf", "densenet121"],
}
TOKENS = {"transformers": ["bert", "gpt2", "distilbert"], "torch": ["transformer-encoder"]}

#: Sides of an image in pixels, tokens of a text, known tokens; of `--small` the second.
PIXELS, LENGTH, VOCABULARY = (224, 64), (512, 16), (30_000, 100)

#: In the first batches libraries choose their kernels.
UNTIMED, TIMED = 3, 10


def build(library: str, name: str, small: bool) -> Any:
    """Build a model with random weights."""
    if library == "timm":
        import timm

        # Transformers are built for one size of image.
        sized = {"img_size": PIXELS[small]} if name.startswith("vit") else {}
        return timm.create_model(name, pretrained=False, **sized)
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, weights=None)
    if library == "transformers":
        from transformers import AutoConfig, AutoModel

        sizes = {"num_hidden_layers": 2} if small else {}
        config = AutoConfig.for_model(name, vocab_size=VOCABULARY[small], **sizes)
        return AutoModel.from_config(config)
    from torch import nn

    width, heads, layers = (32, 2, 2) if small else (1024, 16, 12)
    encoder = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCABULARY[small], width),
        nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False),
    )


@task(task_run_name="{library}/{name}")
def measure(library: str, name: str, batch: int, small: bool) -> float:
    """Run batches; report and return how many images or tokens are done in a second."""
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(library, name, small).to(device).eval()
    side, length = PIXELS[small], LENGTH[small]
    if library in IMAGES:
        inputs, count = torch.randn(batch, 3, side, side, device=device), batch
    else:
        inputs = torch.randint(VOCABULARY[small], (batch, length), device=device)
        count = batch * length
    seconds = []
    with torch.inference_mode():
        for _ in range(UNTIMED + (2 if small else TIMED)):
            began_s = time.perf_counter()
            model(inputs)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began_s)
            step()
    rate = count / statistics.median(seconds[UNTIMED:])
    report_metric("images_per_s" if library in IMAGES else "tokens_per_s", rate)
    return rate


@flow(name="evaluate-architectures", task_runner=GPUTaskRunner())
def evaluate_architectures(
    names: Sequence[tuple[str, str]], memory: str | None, batch: int, small: bool
) -> str:
    """Measure each architecture in a task of its own; return the id of the flow run."""
    tags = gpu(memory=memory, framework="torch", learn_by=["library", "name", "batch", "small"])
    tagged = measure.with_options(tags=tags)
    futures = [(library, tagged.submit(library, name, batch, small)) for library, name in names]
    for what, of in (("images", IMAGES), ("tokens", TOKENS)):
        chosen = [future for library, future in futures if library in of]
        if chosen:
            # It waits for them. Those that failed are in it, without a place.
            publish_leaderboard(chosen, f"{what}_per_s", key=f"gpu-leaderboard-{what}")
    return str(flow_run.id)


def figures(flow_run_id: str) -> list[str]:
    """Return a line for each process of the flow run, from its reports."""
    lines = []
    for each in report(flow_run_id).processes:
        of, found = each.figures, [k for k in each.figures if k.endswith("_per_s")]
        rate = f"{float(of[found[0]]):,.1f} {found[0][7:-6]} a second" if found else of["outcome"]
        peak = of["peak_process_bytes"]  # "unknown" of a process that died at once
        size = format_bytes(int(peak)) if peak.isdigit() else peak
        lines.append(f"{each.task_run:36} {rate:>26}, at most {size} of {of['device_name']}")
    return lines


def main() -> None:
    """Read the arguments, run the flow, print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="auto, host, nvml, simulated:2x8GiB")
    parser.add_argument("--memory", help="budget of each, as in 6GiB; else learned")
    parser.add_argument("--batch", type=int, help="images or texts in a batch")
    parser.add_argument("--small", action="store_true", help="small sizes, for a processor")
    parser.add_argument("--only", nargs="+", choices=[*IMAGES, *TOKENS], help="libraries")
    options = parser.parse_args()
    wanted = {k: v for k, v in {**IMAGES, **TOKENS}.items() if k in (options.only or [k])}
    missing = [library for library in wanted if importlib.util.find_spec(library) is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    names = [(k, name) for k, found in wanted.items() if k not in missing for name in found]
    batch = options.batch or (2 if options.small else 64)
    run = evaluate_architectures.with_options(task_runner=GPUTaskRunner(devices=options.devices))
    print(*figures(run(names, options.memory, batch, options.small)), sep="\n")


if __name__ == "__main__":
    main()
