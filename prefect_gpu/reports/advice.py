"""What would help a process that ran out of memory, or took more than it was given; from its report.

It covers which remedies a measurement supports, as sentences with their numbers. Which budget a task
should have is `next_tags`; what the runner does by itself after an out-of-memory is
`scheduling.ladder`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from prefect_gpu.reports.markup import escape
from prefect_gpu.reports.model import Mark, TaskReport
from prefect_gpu.reports.next_tags import budget_after_oom, tag_size, teach
from prefect_gpu.scheduling.history import PINCH_FACTOR
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.units import GIB, MIB, format_bytes, format_seconds, parse_bytes

#: Memory that an allocator holds and cannot use is told from this size on, and from this part of what
#: it holds: below, it is the rounding of segments that every training has.
FRAGMENTED_BYTES = 256 * MIB
FRAGMENTED_FRACTION = 0.15

#: Growth a step is suspected to be a leak from this many bytes on (kept numbers are far smaller, kept
#: graphs far larger), over this many steps, if it comes to this part of the peak.
LEAK_STEP_BYTES = MIB
LEAK_STEPS = 4
LEAK_FRACTION = 0.02

#: A first step is called far above the rest from this factor and this difference on. With
#: `cudnn.benchmark` a ResNet-50's took 3.5 times the rest (H200, torch 2.11); optimiser states that
#: come in the first step make it smaller than the rest, not larger.
FIRST_STEP_FACTOR = 1.5
FIRST_STEP_BYTES = 256 * MIB

#: What activations, or optimiser states, are of the peak where remedies for them are worth their cost.
DOMINANT_FRACTION = 0.25

#: What an optimizer's step needs beside what stays, of the peak, where it is worth avoiding.
TEMPORARY_FRACTION = 0.1

#: A tag is called far too large if its budget is this many times what would do, and this much more.
TOO_LARGE_FACTOR = 2.0
TOO_LARGE_BYTES = GIB

#: A budget of this part of a device is as good as all of it.
WHOLE_FRACTION = 0.95

#: What PyTorch's own error says of fragmentation, at the very moment.
_UNUSED = re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated")

_STEP_WORDS = frozenset(
    {"step", "optimizer", "optimiser", "optim", "opt", "update", "adam", "adamw", "sgd"}
)

#: How to keep fewer activations, and how to compute in half precision, by framework.
_CHECKPOINTING = {
    "torch": "`torch.utils.checkpoint`",
    "tensorflow": "`tf.recompute_grad`",
    "jax": "`jax.checkpoint`",
}
_MIXED = {
    "torch": "`torch.autocast`",
    "tensorflow": "Keras' `mixed_float16` policy",
    "jax": "`bfloat16`",
}


def advise(report: TaskReport) -> tuple[str, ...]:
    """Say what would help a process next time.

    Args:
        report: Of one process, with its marks.

    Returns:
        Sentences in markdown, most useful first; none where nothing that was measured calls for any.
    """
    return tuple(dict.fromkeys(_sentences(report)))


def _sentences(report: TaskReport) -> Iterator[str]:
    yield from _cause(report)
    if report.outcome == "completed":
        yield from _overshoot(report)
        yield from _leak(report)
        yield from _pinched(report)
        yield from _first_step(report)
        yield from _too_large(report)
        return
    if _hit_its_limit(report):
        yield from _fragmented(report)
        yield from _leak(report)
        yield from _largest_phase(report)
        yield from _remedies(report)
        return
    yield from _overshoot(report)
    yield from _leak(report)


def _hit_its_limit(report: TaskReport) -> bool:
    """Tell whether taking less would have helped: not where others took what it was promised."""
    return report.cause == "own_cap" or (
        report.outcome == "oom" and report.cause in ("", "crowded")
    )


# -- whose fault it was ------------------------------------------------------------------------


def _cause(report: TaskReport) -> Iterator[str]:
    within = (
        f"it had {format_bytes(report.peak_process_bytes)} of its "
        f"{format_bytes(report.budget_total_bytes)}"
    )
    if report.cause == "own_cap":
        yield _own_cap(report)
    elif report.cause == "foreign":
        yield (
            f"Processes that are not ours took the memory that it was promised; {within}. A larger "
            "tag does not help: wait until they are gone, name other devices (`gpu:device`), or let "
            "the runner keep more free for them (`headroom=`)."
        )
    elif report.cause == "crowded":
        yield (
            f"Tasks beside it took more than they had reserved; {within}. The flow's report names "
            "those above their budget: give them a larger `gpu:memory` or end them with "
            "`gpu:enforce=kill`; `gpu:exclusive` keeps this task alone."
        )
    elif report.cause == "host":
        yield (
            "The machine's own memory ran out, not the device's: load less of the data at a time, "
            "start fewer data loader workers, or let fewer tasks run at once (`max_processes=`)."
        )
    elif report.cause == "unknown":
        yield (
            f"It was killed and nothing says why; {within}. The kernel's log (`journalctl -k`) "
            "tells if the machine's memory may have been the reason."
        )


def _own_cap(report: TaskReport) -> str:
    each = " on each device" if len(report.devices) > 1 else ""
    budget = f"budget of {format_bytes(report.budget_bytes)}{each}"
    if report.peak_process_bytes > report.budget_total_bytes + OVERSHOOT_BYTES:
        reached = f"It took {format_bytes(report.peak_process_bytes)}, more than its {budget}"
    elif report.cap_bytes is None:
        reached = f"It reached its {budget}"
    else:
        reached = f"It reached its cap of {format_bytes(report.cap_bytes)}, of a {budget}"
    wanted = report.wanted_bytes
    if wanted is not None:
        reached += f", and would have needed {format_bytes(wanted)} in all"
    total = min((device.total_bytes for device in report.devices), default=None)
    # The driver and the headroom keep some of a device that no tag can give.
    if total is not None and max(report.budget_bytes, wanted or 0) >= WHOLE_FRACTION * total:
        whole = format_bytes(total)
        return f"{reached}; its device has {whole}, so no tag helps: it must take less."
    return f"{reached}: write `gpu:memory={tag_size(budget_after_oom(report), [report])}`."


# -- what its allocator shows ------------------------------------------------------------------


def _fragmented(report: TaskReport) -> Iterator[str]:
    unused = _unused_bytes(report)
    held = report.peak_reserved_bytes
    if unused is None or held is None or not _uses(report, "torch"):
        return
    if unused >= FRAGMENTED_BYTES and unused >= FRAGMENTED_FRACTION * held:
        yield (
            f"PyTorch held {format_bytes(unused)} ({_percent(unused, held)} of its "
            f"{format_bytes(held)}) in blocks that were free and did not fit: "
            "`gpu:alloc.expandable_segments=true` avoids most of that; where it is on or not "
            "supported, `gpu:alloc.max_split_size_mb=128`."
        )


def _unused_bytes(report: TaskReport) -> int | None:
    """Give what the allocator held and could not use; `None`: unknown."""
    if found := _UNUSED.search(report.error):
        try:
            return parse_bytes(found[1])
        except ValueError:
            return None
    gaps = [
        (sample.live_bytes, sample.reserved_bytes - sample.live_bytes)
        for sample in report.samples
        if sample.live_bytes is not None and sample.reserved_bytes is not None
    ]
    # Held at other moments, it is a cache that the next allocation may use.
    return max(gaps)[1] if gaps else None


def _leak(report: TaskReport) -> Iterator[str]:
    steps, peak = report.steps, report.peak_live_bytes
    if steps is None or steps.growth_bytes is None or steps.count < LEAK_STEPS:
        return
    growth = steps.growth_bytes
    if growth < LEAK_STEP_BYTES or growth * steps.count < LEAK_FRACTION * (peak or 0):
        return
    keep = "`loss.item()` or `loss.detach()`" if _uses(report, "torch") else "`float(loss)`"
    more = ""
    if peak is not None and report.outcome == "completed":
        fit = int(max(0, _room_bytes(report) - peak) // growth)
        more = f" At this rate {fit} more {'step fits' if fit == 1 else 'steps fit'}."
    yield (
        f"What stays allocated grew by {format_bytes(growth)} a step over {steps.count} steps, which "
        f"looks like a leak: values kept with all that they were computed from, as "
        f"`losses.append(loss)` does; keep {keep}.{more}"
    )


def _room_bytes(report: TaskReport) -> int:
    """Give what its frameworks could have allocated on all its devices together."""
    count = max(1, len(report.devices))
    if report.cap_bytes is not None:
        return report.cap_bytes * count
    return report.budget_total_bytes - report.context_bytes


def _pinched(report: TaskReport) -> Iterator[str]:
    steps = report.steps
    if steps is None or not steps.alloc_retries or report.cap_bytes is None:
        return
    times = "once" if steps.alloc_retries == 1 else f"{steps.alloc_retries} times"
    size = tag_size(report.budget_bytes * PINCH_FACTOR, [report])
    took = "" if steps.step_s is None else f" (a step took {format_seconds(steps.step_s)})"
    yield (
        f"Under its cap of {format_bytes(report.cap_bytes)} the allocator had to give up its cache "
        f"{times} after the first step, which costs time{took}: see if `gpu:memory={size}` is faster."
    )


def _first_step(report: TaskReport) -> Iterator[str]:
    steps = report.steps
    if steps is None or steps.first_live_bytes is None or steps.steady_live_bytes is None:
        return
    first, steady = steps.first_live_bytes, steps.steady_live_bytes
    if first < FIRST_STEP_FACTOR * steady or first - steady < FIRST_STEP_BYTES:
        return
    tries = " (`torch.backends.cudnn.benchmark`)" if _uses(report, "torch") else ""
    yield (
        f"Its first step had up to {format_bytes(first)} allocated, later ones "
        f"{format_bytes(steady)}: that is warm-up, or a library that tries algorithms{tries} and "
        "takes what is free for it. A lower cap costs little speed."
    )


# -- budget against use ------------------------------------------------------------------------


def _overshoot(report: TaskReport) -> Iterator[str]:
    over = report.peak_process_bytes - report.budget_total_bytes
    if over <= OVERSHOOT_BYTES:
        return
    took = (
        f"took {format_bytes(over)} above its budget of {format_bytes(report.budget_total_bytes)}"
    )
    held = report.peak_reserved_bytes
    if report.source == "host":
        yield f"It {took}: on host devices a budget is a reservation, and nothing caps a process."
    elif report.cap_bytes is None:
        yield f"It {took}: no framework was capped. `gpu:allocation=limit` caps it at its budget."
    elif held is not None and held <= report.cap_bytes * max(1, len(report.devices)):
        yield (
            f"First run: it {took}, since its context was not known yet. Its frameworks kept to "
            f"their cap; {format_bytes(report.context_bytes)} were context and what else no "
            "framework counts, and the next run's cap leaves room for that."
        )
    else:
        yield (
            f"It {took}: child processes, extensions and libraries that take memory from the driver "
            "themselves are not covered by a framework's cap. `gpu:enforce=kill` ends such a process."
        )


def _too_large(report: TaskReport) -> Iterator[str]:
    if report.budget_source != "tag":
        # A probe has the whole device on purpose, and a learned budget follows by itself.
        return
    lesson, why = teach([report])
    if lesson is None:
        return
    enough = lesson.budget_bytes
    if report.budget_bytes < max(TOO_LARGE_FACTOR * enough, enough + TOO_LARGE_BYTES):
        return
    yield (
        f"Its budget of {format_bytes(report.budget_bytes)} is far more than it needs: "
        f"`gpu:memory={tag_size(enough, [report])}` would do ({why})."
    )


# -- what takes the memory ---------------------------------------------------------------------


def _largest_phase(report: TaskReport) -> Iterator[str]:
    sized = [(size, mark) for mark in _phases(report) if (size := _peak_of(mark)) is not None]
    if len({mark.name for _, mark in sized}) < 2:
        return
    size, mark = max(sized, key=lambda found: found[0])
    begin = _begin_bytes(mark, report.marks)
    came = ""
    if begin is not None and size > begin:
        came = (
            f", of which {format_bytes(size - begin)} ({_percent(size - begin, size)}) came there"
        )
    what = "allocated" if mark.peak_allocated_bytes is not None else "held by the process"
    yield (
        f"The largest phase was “{escape(mark.name)}” (step {mark.step}): {format_bytes(size)} "
        f"{what}{came}."
    )


def _remedies(report: TaskReport) -> Iterator[str]:
    peak = report.peak_live_bytes
    phases = _phases(report)
    activations = _most_kept(report, _is_forward)
    trains = any(_is_backward(mark) for mark in phases)
    if not peak or not phases or not (trains or _has(phases, _is_optimizer)):
        yield _remedies_if_it_trains(report)
        return
    found = False
    if trains and activations >= DOMINANT_FRACTION * peak:
        found = True
        yield (
            f"The forward pass leaves {format_bytes(activations)} ({_percent(activations, peak)} of "
            f"the peak) for the backward pass: a smaller batch shrinks it in proportion "
            "(`prefect_gpu.find_batch_size` finds the largest that fits, gradient accumulation keeps "
            f"the effective one), mixed precision{_by(report, _MIXED)} may halve it, activation "
            f"checkpointing{_by(report, _CHECKPOINTING)} trades most of it for time."
        )
    states = _most_kept(report, _is_optimizer)
    if states >= DOMINANT_FRACTION * peak:
        found = True
        eight = " (`bitsandbytes.optim.Adam8bit`)" if _uses(report, "torch") else ""
        yield (
            f"The optimizer's step leaves {format_bytes(states)} ({_percent(states, peak)} of the "
            f"peak), its states: in 8 bits{eight} they take about a quarter, and Adafactor or SGD "
            "keep fewer."
        )
    if temporary := _optimizer_temporary_bytes(report, peak):
        found = True
        how = " (`fused=True`, or `foreach=False`)" if _uses(report, "torch") else ""
        yield (
            f"The peak lies in the optimizer's step, which takes {format_bytes(temporary)} for a "
            f"moment: a fused optimizer{how} needs less."
        )
    if not found:
        yield (
            "No phase stands out: a smaller batch (`prefect_gpu.find_batch_size`) with gradient "
            f"accumulation, or mixed precision{_by(report, _MIXED)}, lower most phases."
        )


def _remedies_if_it_trains(report: TaskReport) -> str:
    predict = " under `torch.inference_mode()`" if _uses(report, "torch") else ""
    return (
        "A smaller batch helps in most programs (`prefect_gpu.find_batch_size` finds the largest "
        "that fits). If it trains: gradient accumulation, mixed precision"
        f"{_by(report, _MIXED)}, activation checkpointing{_by(report, _CHECKPOINTING)}. If it only "
        f"predicts: run it{predict} without keeping what training needs. "
        '`with prefect_gpu.phase("forward"):` shows which part takes the memory.'
    )


def _phases(report: TaskReport) -> list[Mark]:
    return [mark for mark in report.marks if mark.duration_s is not None]


def _peak_of(mark: Mark) -> int | None:
    for size in (mark.peak_allocated_bytes, mark.allocated_bytes, mark.process_bytes):
        if size is not None:
            return size
    return None


def _begin_bytes(mark: Mark, marks: Sequence[Mark]) -> int | None:
    """Give what was allocated when a phase began: at the end of the one before it."""
    ended = [
        (other.at_s + (other.duration_s or 0.0), other.allocated_bytes)
        for other in marks
        # Marks of steps in the middle are not kept.
        if other is not mark and other.allocated_bytes is not None and mark.step - other.step <= 1
    ]
    # Clocks of one process, rounded on their way: a phase begins when the one before it ends.
    before = [(at_s, size) for at_s, size in ended if at_s <= mark.at_s + 1e-3]
    return max(before)[1] if before else None


def _most_kept(report: TaskReport, chosen: Callable[[Mark], bool]) -> int:
    """Give the most that phases of a kind left allocated in one step; 0: nothing, or unknown."""
    kept: dict[int, int] = {}
    for mark in _phases(report):
        begin = _begin_bytes(mark, report.marks)
        if chosen(mark) and begin is not None and mark.allocated_bytes is not None:
            kept[mark.step] = kept.get(mark.step, 0) + mark.allocated_bytes - begin
    return max(0, *kept.values()) if kept else 0


def _optimizer_temporary_bytes(report: TaskReport, peak_bytes: int) -> int:
    """Give what an optimizer's step took for a moment, where that made the peak; 0: it did not."""
    taken = [
        mark.peak_allocated_bytes - mark.allocated_bytes
        for mark in _phases(report)
        if _is_optimizer(mark)
        and mark.allocated_bytes is not None
        and mark.peak_allocated_bytes is not None
        and mark.peak_allocated_bytes >= 0.99 * peak_bytes
    ]
    most = max(taken, default=0)
    return most if most >= TEMPORARY_FRACTION * peak_bytes else 0


def _words(mark: Mark) -> list[str]:
    return [word for word in re.split(r"[\W_]+", mark.name.lower()) if word]


def _is_forward(mark: Mark) -> bool:
    # The loss keeps its share for the backward pass too.
    return not {"forward", "loss", "criterion"}.isdisjoint(_words(mark))


def _is_backward(mark: Mark) -> bool:
    return not {"backward", "backprop", "backpropagation"}.isdisjoint(_words(mark))


def _is_optimizer(mark: Mark) -> bool:
    # Every word: "first step" is a step of the training, not the optimizer's.
    words = _words(mark)
    return bool(words) and _STEP_WORDS.issuperset(words)


def _has(phases: Sequence[Mark], chosen: Callable[[Mark], bool]) -> bool:
    return any(chosen(mark) for mark in phases)


def _uses(report: TaskReport, framework: str) -> bool:
    return framework in report.framework.split(",")


def _by(report: TaskReport, names: dict[str, str]) -> str:
    found = [words for name, words in names.items() if _uses(report, name)]
    return f" ({', '.join(found)})" if found else ""


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"
