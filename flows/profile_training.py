"""The memory of a training, moment by moment, and the least memory in which it still runs.

A model with attention reverses made-up sentences: a GRU encoder, a bridge from its last state to the
first of the decoder, and a decoder that takes one word after another with a `GRUCell`. On a GPU:
vocabulary 30,000, hidden size 1,000, batches of 80 sentences of up to 50 words, Adam. Two epochs of two
training steps and an evaluation run in one GPU task.

    python flows/profile_training.py
    python flows/profile_training.py --device-memory 8GiB --batch 40

It prints what the task's report says of each moment, and what emptying PyTorch's cache gives back and
costs. On a machine without a GPU a small model is trained on the processor, where PyTorch keeps no count
of what it has allocated: its columns then say `unknown`.

    python flows/profile_training.py --least

looks for the largest batch that a budget can hold, from four times `--batch` down, and for the smallest
budget that can hold this batch and one of half its size. Each is tried in a task of its own.
Needs torch (`pip install prefect-gpu[torch]`).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import sys
import time
from typing import Any

import pynvml
from prefect import flow, get_client, task
from prefect.runtime import task_run

from prefect_gpu import GPUTaskRunner, find_batch_size, gpu, mark, step

#: Sentences in a batch, size of embeddings and states, words, and words of the longest sentence.
ON_A_GPU = {"batch": 80, "hidden": 1000, "vocabulary": 30_000, "length": 50}
#: A training of seconds: with the other sizes it takes minutes on two cores.
ON_THE_PROCESSOR = {"batch": 4, "hidden": 32, "vocabulary": 500, "length": 8}

#: Indices of two tokens that are no words: one fills up a sentence, the other begins and ends it.
PADDING, EDGE = 0, 1

#: The least budget is found to this many MiB. The first that is tried holds no CUDA context.
GRAIN_MIB, TOO_LITTLE_MIB = 32, 256

#: Steps whose time is taken; the median counts.
TIMED_STEPS = 5


# The text and the model.


class Sentences:
    """Made-up sentences of made-up words, the same for the same numbers.

    Args:
        vocabulary: Words, the two numbers that are none included.
        length: Words of the longest sentence; the shortest has half as many.
    """

    def __init__(self, vocabulary: int, length: int) -> None:
        syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
        words = (
            "".join(parts) for n in (1, 2, 3) for parts in itertools.product(syllables, repeat=n)
        )
        self._numbers = {
            word: n for n, word in zip(range(EDGE + 1, vocabulary), words, strict=False)
        }
        self._words = list(self._numbers)
        self._length = length
        self._random = random.Random(0)

    def batch(self, size: int, device: Any) -> tuple[Any, Any, Any]:
        """Make sentences; return them padded, their lengths (on the host), and what to answer."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        lengths = [self._random.randint(-(-self._length // 2), self._length) for _ in range(size)]
        texts = [" ".join(self._random.choices(self._words, k=length)) for length in lengths]
        source = [torch.tensor([self._numbers[word] for word in text.split()]) for text in texts]
        edge = torch.tensor([EDGE])
        target = [torch.cat([edge, words.flip(0), edge]) for words in source]
        padded = (
            pad_sequence(s, batch_first=True, padding_value=PADDING) for s in (source, target)
        )
        words, answers = (each.to(device) for each in padded)
        return words, torch.tensor(lengths), answers


def build_model(vocabulary: int, hidden: int) -> Any:
    """Build the model; called with a batch it gives a score to every word at each place."""
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Reverser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source_words = nn.Embedding(vocabulary, hidden, padding_idx=PADDING)
            self.target_words = nn.Embedding(vocabulary, hidden, padding_idx=PADDING)
            self.encoder = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
            self.bridge = nn.Linear(2 * hidden, hidden)
            self.key = nn.Linear(2 * hidden, hidden, bias=False)
            self.query = nn.Linear(hidden, hidden, bias=False)
            self.energy = nn.Linear(hidden, 1, bias=False)
            self.decoder = nn.GRUCell(3 * hidden, hidden)
            self.scores = nn.Linear(hidden, vocabulary)

        def forward(self, source: Any, lengths: Any, target: Any) -> Any:
            packed = pack_padded_sequence(
                self.source_words(source), lengths, batch_first=True, enforce_sorted=False
            )
            packed, (ahead, back) = self.encoder(packed)
            encoded, _ = pad_packed_sequence(packed, batch_first=True)
            state = torch.tanh(self.bridge(torch.cat([ahead, back], dim=-1)))
            keys, is_padding = self.key(encoded), source == PADDING
            states = []
            for word in self.target_words(target).unbind(1):
                # Attention: how much each word of the source matters to this word of the target.
                energy = self.energy(torch.tanh(keys + self.query(state).unsqueeze(1))).squeeze(-1)
                weights = energy.masked_fill(is_padding, float("-inf")).softmax(dim=-1)
                context = (weights.unsqueeze(1) @ encoded).squeeze(1)
                state = self.decoder(torch.cat([word, context], dim=-1), state)
                states.append(state)
            return self.scores(torch.stack(states, dim=1))

    return Reverser()


class Training:
    """A model, its optimizer and its batches on one device."""

    def __init__(self, hidden: int, vocabulary: int, length: int) -> None:
        import torch

        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._sentences = Sentences(vocabulary, length)
        with self.device:
            self._model = build_model(vocabulary, hidden)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def settle(self) -> None:
        """Wait for the device, which works behind the program's back."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, part: str, moment: str = "") -> None:
        """Record a moment in the report; an empty `part` records nothing."""
        import torch

        if not part:
            return
        self.settle()
        mark(f"{part}: {moment}" if moment else part)
        if self.device.type == "cuda":
            # The peak since this moment is then exact, however short it is.
            torch.cuda.reset_peak_memory_stats()

    def loss(self, size: int) -> Any:
        """Run a batch through the model; return the loss, which holds all it was computed from."""
        from torch.nn.functional import cross_entropy

        source, lengths, target = self._sentences.batch(size, self.device)
        scores = self._model(source, lengths, target[:, :-1])
        return cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PADDING)

    def train(self, size: int, part: str = "") -> float:
        """Take one step; return its loss."""
        self._model.train()
        self.note(part, "beginning")
        loss = self.loss(size)
        self.note(part, "after forward")
        loss.backward()
        self.note(part, "after backward")
        self._optimizer.step()
        self.note(part, "after optimizer step")
        # `item`: the loss itself would keep all that it was computed from.
        number = float(loss.item())
        del loss
        self._optimizer.zero_grad()
        self.note(part, "after cleanup")
        step()
        return number

    def evaluate(self, size: int, part: str) -> float:
        """Run one batch without gradients; return its loss."""
        import torch

        self._model.eval()
        self.note(part, "beginning")
        with torch.no_grad():
            loss = self.loss(size)
        self.note(part, "after forward")
        number = float(loss.item())
        del loss
        self.note(part, "after cleanup")
        return number

    def try_out(self, size: int) -> float:
        """Take a first step and some more; return the median of their seconds."""
        # Adam's states come at the end of the first, and are there during the others.
        self.train(size)
        return statistics.median(self.seconds(size) for _ in range(TIMED_STEPS))

    def seconds(self, size: int) -> float:
        """Take one step; return how long it took."""
        self.settle()
        began_s = time.perf_counter()
        self.train(size)
        self.settle()
        return time.perf_counter() - began_s


# The tasks.


@task(task_run_name="train")
def train(batch: int, hidden: int, vocabulary: int, length: int) -> dict[str, Any]:
    """Train and evaluate for two epochs; then measure what emptying the cache costs.

    Returns:
        Device, losses, seconds of a step, and the task run that has the report.
    """
    import torch

    training = Training(hidden, vocabulary, length)
    training.note("model and optimizer")
    losses, tested = [], []
    for epoch in (1, 2):
        losses += [training.train(batch, f"epoch {epoch}, step {number}") for number in (1, 2)]
        tested.append(training.evaluate(batch, f"epoch {epoch}, evaluation"))
    torch.cuda.empty_cache()
    training.note("after empty_cache")
    emptied_s, kept_s = [], []
    for _ in range(TIMED_STEPS):
        torch.cuda.empty_cache()
        emptied_s.append(training.seconds(batch))
        kept_s.append(training.seconds(batch))
    return {
        "device": training.device.type,
        "losses": losses,
        "tested": tested,
        "kept_s": statistics.median(kept_s),
        "emptied_s": statistics.median(emptied_s),
        "task_run_id": task_run.id,
    }


@task(task_run_name="largest-batch")
def largest_batch(start: int, hidden: int, vocabulary: int, length: int) -> int:
    """Return the first of `start`, its half, and so on, with which a training runs."""
    return find_batch_size(Training(hidden, vocabulary, length).try_out, start)


@task(task_run_name="batch-{batch}")
def train_briefly(batch: int, hidden: int, vocabulary: int, length: int) -> float:
    """Train a few steps; return the seconds of one."""
    return Training(hidden, vocabulary, length).try_out(batch)


# The flows.


@flow(name="profile-training")
def profile_training(
    device_memory: str | None, batch: int, hidden: int, vocabulary: int, length: int
) -> dict[str, Any]:
    """Train in one GPU task, whose report says what is allocated at each moment."""
    # Without a budget the first run may take what the device has free, and later ones get what it has shown.
    tags = gpu(memory=device_memory, framework="torch")
    return train.with_options(tags=tags).submit(batch, hidden, vocabulary, length).result()


@flow(name="least-memory")
def least_memory(most_mib: int, batch: int, hidden: int, vocabulary: int, length: int) -> None:
    """Print the largest batch that a budget holds, and the least budget for it and for half of it."""

    def within(of: Any, mib: int) -> Any:
        # "fail": it would otherwise run again, with more memory.
        return of.with_options(tags=gpu(memory=f"{mib}MiB", framework="torch", oom="fail"))

    def step_s(size: int, mib: int) -> float | None:
        """Return the seconds of a step within a budget; `None`: it ran out of memory."""
        future = within(train_briefly, mib).submit(size, hidden, vocabulary, length)
        result = future.result(raise_on_failure=False)
        if not isinstance(result, Exception):
            return result
        # PyTorch's words for it, and those of cuBLAS and cuDNN.
        if any(words in str(result).lower() for words in ("out of memory", "alloc_failed")):
            return None
        raise result

    start = 4 * batch
    future = within(largest_batch, most_mib).submit(start, hidden, vocabulary, length)
    found = future.result()
    print(f"under {most_mib} MiB, of {start}, its half, and so on: find_batch_size returns {found}")
    for size in (found, found // 2):
        most_s = step_s(size, most_mib)
        breaks_mib, works_mib, works_s = TOO_LITTLE_MIB, most_mib, most_s
        if most_s is None or step_s(size, breaks_mib) is not None:
            print(
                f"batch {size}: no budget was found that breaks it, and a larger one that does not"
            )
            continue
        while works_mib - breaks_mib > GRAIN_MIB:
            mib = (works_mib + breaks_mib) // 2
            if (seconds := step_s(size, mib)) is None:
                breaks_mib = mib
            else:
                works_mib, works_s = mib, seconds
        print(
            f"batch {size}: trains in {works_mib} MiB, {1000 * works_s:.0f} ms a step "
            f"(in {most_mib} MiB: {1000 * most_s:.0f} ms); breaks in {breaks_mib} MiB"
        )


# The report.


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
    # Escaped for a browser: `empty\_cache`.
    return found.replace("\\", "")


def aligned(table: str) -> str:
    """Return a Markdown table with columns of one width, numbers to the right."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if cell.endswith(":") else str.ljust for cell in rows[1]]
    return "\n".join(
        f"| {' | '.join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True))} |"
        for row in rows
    )


def has_gpu() -> bool:
    """Return whether NVIDIA's driver lists a device."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return bool(pynvml.nvmlDeviceGetCount())


def main() -> None:
    """Read the arguments, run a flow, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-memory", help="its budget, as in 8GiB or 40%%; else learned")
    parser.add_argument("--devices", default="auto", help="auto, host, nvml, 0,1")
    parser.add_argument("--batch", type=int, help="sentences in a batch")
    parser.add_argument("--hidden", type=int, help="size of embeddings and states")
    parser.add_argument("--vocabulary", type=int, help="words")
    parser.add_argument("--length", type=int, help="words of the longest sentence")
    parser.add_argument(
        "--least",
        type=int,
        nargs="?",
        const=8192,
        metavar="MIB",
        help="look for the least memory instead, from this budget down (8192)",
    )
    options = vars(parser.parse_args())
    devices, most_mib = options.pop("devices"), options.pop("least")
    listed = devices.split(",") if devices[:1].isdigit() else devices
    on_the_processor = devices.startswith(("host", "simulated")) or not has_gpu()
    for name, size in (ON_THE_PROCESSOR if on_the_processor else ON_A_GPU).items():
        if options[name] is None:
            options[name] = size
    if on_the_processor:
        sizes = ", ".join(f"--{name} {options[name]}" for name in ON_THE_PROCESSOR)
        print(f"No GPU is used: a training on the processor, with {sizes}.")
    runner: Any = GPUTaskRunner(devices=listed)
    if most_mib is not None:
        del options["device_memory"]
        if sys.platform == "linux":
            # Two dozen short tasks, one after the other: forks need not import PyTorch again.
            runner = GPUTaskRunner(devices=listed, start_method="auto")
        # Its tasks are meant to fail, and each would write a traceback.
        for name in ("prefect.task_runs", "prefect.flow_runs"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        least_memory.with_options(task_runner=runner)(most_mib, **options)
        return
    result = profile_training.with_options(task_runner=runner)(**options)
    # The flow has waited until its reports were published.
    report = read_report(result["task_run_id"])
    print(report.partition("\n")[0].strip("*") or "no report was published")
    if phases := section(report, "Phases"):
        print(aligned(phases))
    if advice := section(report, "What would help"):
        print(advice)
    if result["device"] == "cpu":
        print(
            "No GPU took part: PyTorch counts what it allocates on GPUs only, so sizes are unknown."
        )
    print(
        f"a step takes {1000 * result['kept_s']:.1f} ms; the first after empty_cache takes "
        f"{1000 * result['emptied_s']:.1f} ms (medians of {TIMED_STEPS})"
    )
    for what, losses in (("step", result["losses"]), ("evaluation", result["tested"])):
        print(f"loss by {what}: " + ", ".join(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
