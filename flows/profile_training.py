"""Watch the memory of a training, phase by phase: a sequence-to-sequence model on made-up data.

A GRU encoder and a GRU decoder with attention, vocabulary 30,000, hidden size 1,000, batches of 80
sequences of length 50, Adam: three steps in one GPU task. Its report shows how memory grows in step 0,
when gradients and Adam's states come, and that the steps after it need no more.

    python flows/profile_training.py
    python flows/profile_training.py --device-memory 8GiB --batch 40
    python flows/profile_training.py --devices host --batch 4 --hidden 32 --vocabulary 500 --length 8

It prints what the task's report says about its phases. On a machine without a GPU it runs on the
processor, where PyTorch keeps no count of what it has allocated: its columns then say `unknown`.
Needs torch (`pip install prefect-gpu[torch]`).
"""

from __future__ import annotations

import argparse
from typing import Any

from prefect import flow, get_client, task
from prefect.runtime import task_run

from prefect_gpu import GPUTaskRunner, gpu, phase, step


def seq2seq(vocabulary: int, hidden: int) -> Any:
    """Build the model; called with source and target words it gives a score for each next word."""
    import torch
    from torch import nn

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source_words = nn.Embedding(vocabulary, hidden)
            self.target_words = nn.Embedding(vocabulary, hidden)
            self.encoder = nn.GRU(hidden, hidden, batch_first=True)
            self.decoder = nn.GRU(hidden, hidden, batch_first=True)
            self.combine = nn.Linear(2 * hidden, hidden)
            self.scores = nn.Linear(hidden, vocabulary)

        def forward(self, source: Any, target: Any) -> Any:
            encoded, state = self.encoder(self.source_words(source))
            decoded, _ = self.decoder(self.target_words(target), state)
            # Attention as dot products: how much each word of the source matters to each of the
            # target, and what they say together.
            weights = torch.softmax(decoded @ encoded.transpose(1, 2), dim=-1)
            both = torch.cat([decoded, weights @ encoded], dim=-1)
            return self.scores(torch.tanh(self.combine(both)))

    return Seq2Seq()


@task(task_run_name="train-seq2seq")
def train(batch: int, hidden: int, vocabulary: int, length: int, steps: int) -> dict[str, Any]:
    """Train for some steps; tell where, how it went, and which task run has the report."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def settle() -> None:
        # A GPU works behind the program's back: without waiting for it, a phase would end as soon
        # as its work was queued, and the next one would be billed for it.
        if device.type == "cuda":
            torch.cuda.synchronize()

    with phase("model"):
        model = seq2seq(vocabulary, hidden).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        settle()
    losses = []
    for _ in range(steps):
        words = torch.randint(vocabulary, (2, batch, length + 1), device=device)
        source, target = words[0, :, 1:], words[1]
        with phase("zero_grad"):
            optimizer.zero_grad()
            settle()
        with phase("forward"):
            scores = model(source, target[:, :-1])
            settle()
        with phase("loss"):
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten())
            settle()
        with phase("backward"):
            loss.backward()
            settle()
        with phase("step"):
            optimizer.step()
            settle()
        # `item`: the loss itself would keep everything that it was computed from.
        losses.append(loss.item())
        # Else the scores, half a gigabyte, would live on beside those of the next step.
        del scores, loss
        step()
    return {"device": device.type, "losses": losses, "task_run_id": task_run.id}


@flow(name="profile-training", task_runner=GPUTaskRunner())
def profile_training(
    device_memory: str | None = None,
    batch: int = 80,
    hidden: int = 1000,
    vocabulary: int = 30_000,
    length: int = 50,
    steps: int = 3,
) -> dict[str, Any]:
    """Train a sequence-to-sequence model in one GPU task, with its phases marked."""
    # Without a budget the first run has a device to itself, and later ones what that run showed.
    tags = gpu(memory=device_memory, framework="torch")
    return train.with_options(tags=tags).submit(batch, hidden, vocabulary, length, steps).result()


def read_report(task_run_id: str) -> str:
    """Read the newest report of a task run, as the Prefect UI shows it; empty: there is none."""
    with get_client(sync_client=True) as client:
        # Not `client.read_artifacts`: it sends null for what it was not given, and the API refuses
        # that (Prefect 3.8.8).
        answer = client.request(
            "POST",
            "/artifacts/filter",
            json={
                "artifacts": {
                    "task_run_id": {"any_": [task_run_id]},
                    "key": {"like_": "gpu-memory-%"},
                },
                "sort": "CREATED_DESC",
                "limit": 1,
            },
        )
    found = answer.json()
    return str(found[0]["data"]) if found else ""


def section(markdown: str, title: str) -> str:
    """Return the text under a heading, for a terminal; empty if there is no such heading."""
    found = markdown.partition(f"### {title}\n\n")[2].partition("\n\n")[0]
    # Escaped for a browser: `zero\_grad`.
    return found.replace("\\", "")


def main() -> None:
    """Read the arguments, run the flow, print what the report says."""
    parser = argparse.ArgumentParser(description=profile_training.__doc__)
    parser.add_argument("--device-memory", help="its budget, as in 8GiB or 40%%; else learned")
    parser.add_argument("--devices", default="auto", help="auto, host, nvml, 0,1")
    parser.add_argument("--batch", type=int, default=80, help="sequences in a batch")
    parser.add_argument("--hidden", type=int, default=1000, help="size of embeddings and states")
    parser.add_argument("--vocabulary", type=int, default=30_000, help="words")
    parser.add_argument("--length", type=int, default=50, help="words in a sequence")
    parser.add_argument("--steps", type=int, default=3)
    options = vars(parser.parse_args())
    devices = options.pop("devices")
    listed = devices.split(",") if devices[:1].isdigit() else devices
    run = profile_training.with_options(task_runner=GPUTaskRunner(devices=listed))
    result = run(**options)
    # The flow has waited until its reports were published.
    report = read_report(result["task_run_id"])
    print(report.partition("\n")[0].strip("*") or "no report was published")
    print(section(report, "Phases"))
    if advice := section(report, "What would help"):
        print(advice)
    if result["device"] == "cpu":
        print(
            "No GPU took part: PyTorch counts what it allocates on GPUs only, so sizes are unknown."
        )
    print("loss by step: " + ", ".join(f"{loss:.3f}" for loss in result["losses"]))


if __name__ == "__main__":
    main()
