"""Advice for the next run of a task, from the reports of its processes: sentences, and sizes for `gpu:memory` tags.

`advise` is about one process, `tag_advice` about the tag of a task run, `task_tags` about the tags of a flow's tasks.
`scheduling.history` computes budgets of tasks without a tag, `scheduling.ladder` retries after an out-of-memory error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from prefect_gpu.reports.markup import escape, percent, table
from prefect_gpu.reports.model import OUTCOMES, TaskReport, past_run
from prefect_gpu.scheduling.history import (
    LIVE_FACTOR,
    OOM_FACTOR,
    PINCH_FACTOR,
    ROUND_BYTES,
    LearnedBudget,
    PastRun,
    learn,
    margin_bytes,
)
from prefect_gpu.scheduling.ladder import WANTED_FACTOR
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.scheduling.model import ONLY_ON, DeviceKind
from prefect_gpu.units import (
    MIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    readable_size,
    size_in_tag,
)

#: Smallest unused memory of an allocator that is reported, in bytes and as a fraction. Less is rounding of segments.
FRAGMENTED_BYTES = 256 * MIB
FRAGMENTED_FRACTION = 0.15

#: Smallest leak that is reported: bytes a step, number of steps, growth as a fraction of the peak. Numbers that a
#: training collects are far smaller, autograd graphs far larger.
LEAK_STEP_BYTES = MIB
LEAK_STEPS = 4
LEAK_FRACTION = 0.02

#: A process that computed for a smaller fraction of its time, of at least so many seconds, leaves its device idle.
IDLE_FRACTION = 0.3
IDLE_S = 5.0

#: While kernels run that use a smaller fraction of the multiprocessors, clients of MPS compute on the rest.
NARROW_FRACTION = 0.5

#: A budget from this fraction of a device on counts as the whole device: driver and headroom take the rest.
WHOLE_FRACTION = 0.95

#: A budget that differs from the advised size by at most this fraction needs no change.
NEAR_FRACTION = 0.1

#: Text in place of a tag if no device has enough memory.
NO_TAG_HELPS = "no tag helps: it must take less"

#: Advice by the cause of an out-of-memory error; `{used}` is replaced by the used memory as text.
_CAUSES: Mapping[str, str] = {
    "foreign": (
        "Processes outside prefect_gpu took the memory that was reserved for it; {used}. A larger "
        "tag does not help: wait until they end, name other devices (`gpu:device`), or let the "
        "runner keep more memory free for them (`headroom=`)."
    ),
    "crowded": (
        "Tasks on the same device took more than they had reserved; {used}. The flow's report "
        "names the tasks above their budget: give them a larger `gpu:memory` or end them with "
        "`gpu:enforce=kill`; `gpu:exclusive` keeps this task alone."
    ),
    "host": (
        "The machine's own memory, or that of its container or job (control group), ran out, not "
        "the device's: load less of the data at a time, "
        "start fewer data loader workers, or let fewer tasks run at once (`max_processes=`)."
    ),
    "unknown": (
        "It was killed for an unknown reason; {used}. The kernel's log (`journalctl -k`) shows "
        "whether the machine's memory may have been the reason."
    ),
}

_TAKE_LESS = (
    "A smaller batch helps in most programs: `prefect_gpu.find_batch_size` finds the largest "
    "that fits. So does mixed precision and, in training, gradient accumulation or activation "
    'checkpointing. `with prefect_gpu.phase("forward"):` shows which part takes the memory.'
)


def advise(report: TaskReport, tag: TagAdvice | None = None) -> tuple[str, ...]:
    """Return advice for the next process as markdown sentences, most useful first. `tag`: from `tag_advice`."""
    found = [_cause(report, tag)]
    if report.cause == "own_cap" or (report.outcome == "oom" and report.cause in ("", "crowded")):
        # After other causes a smaller need would not have helped: other processes had taken the memory.
        found += [_fragmentation(report), _leak(report), _TAKE_LESS]
    else:
        found += [_overshoot(report), _leak(report), _pinched(report, tag), _idle(report)]
        found.append(_narrow(report))
    return tuple(filter(None, found))


def _cause(report: TaskReport, tag: TagAdvice | None) -> str:
    if report.cause == "own_cap":
        return _own_cap(report, tag)
    peak, budget = map(format_bytes, (report.peak_process_bytes, report.budget_total_bytes))
    return _CAUSES.get(report.cause, "").format(used=f"it used {peak} of its {budget}")


def _own_cap(report: TaskReport, tag: TagAdvice | None) -> str:
    each = " on each device" if len(report.devices) > 1 else ""
    budget = f"budget of {format_bytes(report.budget_bytes)}{each}"
    if report.peak_process_bytes > report.budget_total_bytes + OVERSHOOT_BYTES:
        reached = f"It took {format_bytes(report.peak_process_bytes)}, more than its {budget}"
    elif report.cap_bytes is None:
        reached = f"It reached its {budget}"
    else:
        reached = f"It reached its cap of {format_bytes(report.cap_bytes)}, of a {budget}"
    if report.wanted_bytes is not None:
        reached += f", and would have needed {format_bytes(report.wanted_bytes)} in all"
    if report.next_words:
        return f"{reached}. The task run has another attempt: {report.next_words}."
    if tag is None:
        return f"{reached}."
    if tag.size_bytes is None:
        return f"{reached}; {tag.why}, so {NO_TAG_HELPS}."
    return f"{reached}: write {tag.write_words}."


def _fragmentation(report: TaskReport) -> str:
    held = report.peak_reserved_bytes
    # Unused memory counts only at the peak of live memory: at other times it is a cache for later allocations.
    readings = [
        (sample.live_bytes, sample.reserved_bytes - sample.live_bytes)
        for sample in report.samples
        if sample.live_bytes is not None and sample.reserved_bytes is not None
    ]
    _, unused = max(readings, default=(0, 0))
    if not held or not _uses_torch(report):
        return ""
    if unused < FRAGMENTED_BYTES or unused < FRAGMENTED_FRACTION * held:
        return ""
    return (
        f"PyTorch held {format_bytes(unused)} ({percent(unused, held)} of its "
        f"{format_bytes(held)}) in blocks that were free and too small: "
        "`gpu:alloc.expandable_segments=true` avoids most of that; where it is on or not "
        "supported, `gpu:alloc.max_split_size_mb=128`."
    )


def _leak(report: TaskReport) -> str:
    steps, peak = report.steps, report.peak_live_bytes
    if steps is None or steps.growth_bytes is None or steps.count < LEAK_STEPS:
        return ""
    growth = steps.growth_bytes
    if growth < LEAK_STEP_BYTES or growth * steps.count < LEAK_FRACTION * (peak or 0):
        return ""
    keep = "`loss.item()` or `loss.detach()`" if _uses_torch(report) else "`float(loss)`"
    more = ""
    if peak is not None and report.outcome == "completed":
        fit = int(max(0, _allowed_bytes(report) - peak) // growth)
        more = f" At this rate {fit} more {'step fits' if fit == 1 else 'steps fit'}."
    return (
        f"What stays allocated grew by {format_bytes(growth)} a step over {steps.count} steps, which "
        f"looks like a leak: values kept with all that they were computed from, as "
        f"`losses.append(loss)` does; keep {keep}.{more}"
    )


def _allowed_bytes(report: TaskReport) -> int:
    """Return the bytes that the process's frameworks were allowed to allocate on all devices together."""
    if report.cap_bytes is not None:
        return report.cap_bytes * max(1, len(report.devices))
    return report.budget_total_bytes - report.context_bytes


def _overshoot(report: TaskReport) -> str:
    over, budget = report.peak_process_bytes - report.budget_total_bytes, report.budget_total_bytes
    if over <= OVERSHOOT_BYTES:
        return ""
    took = f"took {format_bytes(over)} above its budget of {format_bytes(budget)}"
    held = report.peak_reserved_bytes
    if report.source == "host":
        return f"It {took}: on host devices a budget is a reservation, and nothing caps a process."
    if report.cap_bytes is None:
        return f"It {took}: no framework was capped. `gpu:allocation=limit` caps it at its budget."
    if held is not None and held <= report.cap_bytes * max(1, len(report.devices)):
        return (
            f"First run: it {took}, since its context was not known yet. Its frameworks kept to "
            f"their cap; {format_bytes(report.context_bytes)} were context and other memory that no "
            "framework counts, and the next run's cap leaves room for that."
        )
    return (
        f"It {took}: child processes, extensions and libraries that take memory from the driver "
        "themselves are not covered by a framework's cap. `gpu:enforce=kill` ends such a process."
    )


def _pinched(report: TaskReport, tag: TagAdvice | None) -> str:
    steps = report.steps
    if not _is_pinched(report) or steps is None or tag is None:
        return ""
    times = "once" if steps.alloc_retries == 1 else f"{steps.alloc_retries} times"
    took = "" if steps.step_s is None else f" (a step took {format_seconds(steps.step_s)})"
    return (
        f"Under its cap of {format_bytes(report.cap_bytes)} the allocator had to give up its cache "
        f"{times} after the first step, which costs time{took}: see if {tag.write_words} is faster."
    )


def _idle(report: TaskReport) -> str:
    busy = report.busy_fraction
    # Beside others, a process also waits for its turn.
    if busy is None or busy >= IDLE_FRACTION or report.run_s < IDLE_S or report.shared_with:
        return ""
    most = report.most_bytes
    is_whole = most is not None and report.budget_bytes >= WHOLE_FRACTION * most
    if report.outcome != "completed" or report.exclusive or is_whole:
        return ""
    return (
        f"The GPU computed for {busy:.0%} of this task's time and waited for the rest, for the processor or for "
        "data. Other tasks beside it would slow it down little."
    )


def _narrow(report: TaskReport) -> str:
    busy, used = report.busy_fraction, report.multiprocessors
    # Both are means of the whole time, pauses included.
    if busy is None or busy < IDLE_FRACTION or used is None or used >= NARROW_FRACTION * busy:
        return ""
    if report.outcome != "completed" or report.run_s < IDLE_S:
        return ""
    # Such tasks are no clients of MPS.
    if report.exclusive or len(report.devices) > 1:
        return ""
    return (
        f"Its kernels ran for {busy:.0%} of the time, and used {used:.0%} of the multiprocessors on average: with "
        '`GPUTaskRunner(sharing="mps")` other tasks compute on the rest at the same time.'
    )


def _is_pinched(report: TaskReport) -> bool:
    """Return whether a completed process was slowed down by its cap: its allocator had to free its cache."""
    return _had_retries(report) and report.cap_bytes is not None and report.outcome == "completed"


def _had_retries(report: TaskReport) -> bool:
    return report.steps is not None and report.steps.alloc_retries > 0


def _uses_torch(report: TaskReport) -> bool:
    return "torch" in report.framework.split(",")


@dataclass(frozen=True, slots=True)
class TagAdvice:
    """Advice on the `gpu:memory` tag of a task."""

    #: Advised bytes on each device; `None`: no size is enough, or none is known.
    size_bytes: int | None
    #: In markdown: the tag, a lower bound, or `NO_TAG_HELPS`. Empty: nothing is known.
    write: str
    #: Measurement from which the size was computed, as text.
    why: str
    #: The present budget needs no change.
    fits: bool
    #: Kind of the devices on which the memory was measured.
    device_kind: DeviceKind

    @property
    def rank(self) -> float:
        """Sort key: the advised bytes; infinite if there is no size."""
        return math.inf if self.size_bytes is None else self.size_bytes

    @property
    def write_words(self) -> str:
        """`write`, with the kind of devices if these are no GPUs: a size is valid only on devices of its kind."""
        return self.write if self.size_bytes is None else self.write + ONLY_ON[self.device_kind]


def tag_advice(processes: Sequence[TaskReport]) -> TagAdvice | None:
    """Return the advised tag from all processes of one task run so far; `None`: the memory need is not known."""
    # The same selection of processes as in a flow's report.
    processes = [report for kept in _by_history(processes) for report in kept]
    lesson, why = teach(processes)
    given = _most_bytes(processes)
    if lesson is not None:
        pinched = max((r.budget_bytes for r in processes if _is_pinched(r)), default=0)
        size: float = _asked_bytes(lesson)
        if pinched * PINCH_FACTOR > size:
            size = pinched * PINCH_FACTOR
            why = "with less its allocator had to give up its cache"
        if given is not None and size > given:
            why += f"; the largest device gives {format_bytes(given)}"
    else:
        capped = [report for report in processes if report.cause == "own_cap"]
        if not capped:
            return None
        most = max(capped, key=_after_oom_bytes)
        size = _after_oom_bytes(most)
        if _has_no_more(most):
            why = f"the largest device gives {format_bytes(most.most_bytes)}"
            return TagAdvice(None, NO_TAG_HELPS, why, False, most.device_kind)
        why = "none completed; it ran out of memory at its cap"
        if most.wanted_bytes:
            why += f", where it would have needed {format_bytes(most.wanted_bytes)}"
    written = parse_bytes(readable_size(size))
    written = min(written, given or written)
    fits = lesson is not None and all(_may_stay(report, written) for report in processes)
    write = f"`gpu:memory={size_in_tag(size, given)}`"
    return TagAdvice(written, write, why, fits, processes[0].device_kind)


def _has_no_more(report: TaskReport) -> bool:
    """Return whether a process had the largest possible budget, or needed more than that."""
    most = report.most_bytes
    if most is None:
        return False
    capped = report.capacity_bytes is not None and report.cap_bytes is not None
    # Other programs may keep a part of a device that was reserved as a whole.
    had_all = report.budget_bytes >= (most if capped else WHOLE_FRACTION * most)
    return had_all or (report.wanted_bytes or 0) > most


@dataclass(frozen=True, slots=True)
class TaskTags(TagAdvice):
    """Advice on the tag of one task, for one set of its `gpu:learn_by` values and one kind of devices."""

    task_name: str
    #: The `gpu:learn_by` values in words, or their digest. Empty: the task has no such tag.
    learn_by: str
    #: Number of task runs with measured memory, on which the advice is based.
    runs: int
    #: Peak bytes of one process on a device.
    peak_bytes: int
    #: The task's smallest and largest budget in its newest flow run, in bytes of each device.
    budgets_bytes: tuple[int, int]
    #: Sources of these budgets: "tag", "learned" and "probe".
    budget_sources: tuple[str, ...]

    @property
    def saved_bytes(self) -> int | None:
        """Largest budget less advised bytes, on each device; negative: the tag is larger; `None`: no size is advised."""
        return None if self.size_bytes is None else self.budgets_bytes[1] - self.size_bytes

    @property
    def budget_words(self) -> str:
        """The present budgets and their sources as text: `4GiB to 6GiB, learned`."""
        least, most = map(format_bytes, self.budgets_bytes)
        sizes = least if self.budgets_bytes[0] == self.budgets_bytes[1] else f"{least} to {most}"
        return f"{sizes}, {', '.join(self.budget_sources)}"


def task_tags(reports: Iterable[TaskReport]) -> list[TaskTags]:
    """Return advice on the tag of each task of one or several flow runs, from the task run with the largest need.

    Each set of `gpu:learn_by` values and each kind of devices has an entry of its own.
    """
    by_task: dict[tuple[str, ...], list[TaskReport]] = {}
    for report in reports:
        key = report.task_name, report.learn_by, report.history_key, report.device_kind
        by_task.setdefault(key, []).append(report)
    return [_task_tags(group) for _, group in sorted(by_task.items())]


def tags_table(tags: Sequence[TaskTags]) -> str:
    """Return a markdown table of the tags to change, or a sentence if no tag needs a change."""
    rows = [
        (_named(each), each.budget_words, each.write_words, each.why)
        for each in tags
        if each.write and not each.fits
    ]
    if not rows:
        unknown = [_named(each) for each in tags if not each.write and not each.fits]
        if unknown:
            return f"No tag to change is known: no process of {', '.join(unknown)} showed what it needs."
        return "Nothing to change: every tag fits what its task took."
    text = table(("task", "budget now", "write", "because"), rows)
    if any(each.learn_by for each in tags):
        text += (
            "\n\nA tag is about all values of `gpu:learn_by`: `task.with_options(tags=...)` has one for some of"
            " them. Without a tag each set of values has a learned budget of its own."
        )
    return text


def _named(tags: TaskTags) -> str:
    name = escape(tags.task_name)
    return f"{name} ({escape(tags.learn_by)})" if tags.learn_by else name


def _task_tags(group: Sequence[TaskReport]) -> TaskTags:
    counted = [report for kept in _by_history(group) for report in kept]
    runs: dict[UUID, list[TaskReport]] = {}
    for report in counted:
        runs.setdefault(report.task_run_id, []).append(report)
    advices = [advice for processes in runs.values() if (advice := tag_advice(processes))]
    most = max(advices, key=lambda advice: advice.rank, default=None)
    newest = max(group, key=lambda report: report.placed_at).flow_run_id
    last = [report for report in group if report.flow_run_id == newest]
    size = None if most is None else most.size_bytes
    fits = False
    if most is not None:
        write, why = most.write, most.why
        why += f"; the most of {len(runs)} task runs" if len(runs) > 1 else ""
        now = [report for report in counted if report.flow_run_id == newest]
        fits = bool(size and now) and all(_may_stay(report, size or 0) for report in now)
    elif any(report.outcome == "oom" and not report.cause for report in group):
        largest = max(group, key=lambda report: report.budget_bytes)
        write, why = f"more than {format_bytes(largest.budget_bytes)}", "none completed"
        if _has_no_more(largest):
            why = f"it ran out of memory with {format_bytes(largest.budget_bytes)}"
            write = NO_TAG_HELPS
    else:
        write = why = ""
    budgets = sorted(report.budget_bytes for report in last)
    return TaskTags(
        task_name=group[0].task_name,
        learn_by=group[0].learn_by or group[0].history_key,
        runs=len(advices),
        peak_bytes=max(map(_peak_on_a_device, group)),
        budgets_bytes=(budgets[0], budgets[-1]),
        budget_sources=tuple(sorted({report.budget_source for report in last})),
        write=write,
        size_bytes=size,
        why=why,
        fits=fits,
        device_kind=group[0].device_kind,
    )


def _peak_on_a_device(report: TaskReport) -> int:
    each = -(-report.peak_process_bytes // max(1, len(report.devices)))
    return max(report.device_peaks_bytes, default=each)


def _may_stay(report: TaskReport, size_bytes: float) -> bool:
    """Return whether a process's budget needs no change: it is near the advised size, or a smaller tag was enough."""
    if report.budget_source == "probe" or report.cause == "own_cap":
        return False
    if abs(report.budget_bytes - size_bytes) <= NEAR_FRACTION * size_bytes:
        return True
    if report.budget_source != "tag":
        return False
    over = report.peak_process_bytes > report.budget_total_bytes + OVERSHOOT_BYTES
    short = report.outcome == "oom" or report.cause or over or _had_retries(report)
    return report.budget_bytes <= size_bytes and not short


def teach(reports: Sequence[TaskReport]) -> tuple[LearnedBudget | None, str]:
    """Return the largest budget learned from a task's histories, with its reason; `None`: no process completed."""
    lessons = []
    for group in _by_history(reports):
        # A body that ended before its memory was read shows nothing.
        runs = [run for report in group if _was_seen(run := past_run(report))]
        if not runs or learn(runs) is None:
            continue
        # A tag must also be large enough for a run that failed for another reason: the run counts as completed.
        lesson = learn(r if r.outcome == "oom" else replace(r, outcome="completed") for r in runs)
        if lesson is not None and lesson.need_bytes:
            lessons.append((lesson, _because(lesson, runs)))
    return max(lessons, key=lambda found: found[0].need_bytes, default=(None, ""))


def _was_seen(run: PastRun) -> bool:
    return run.outcome == "oom" or bool(run.process_bytes or run.live_bytes)


def _by_history(reports: Sequence[TaskReport]) -> list[list[TaskReport]]:
    groups: dict[tuple[str | None, str, str], list[TaskReport]] = {}
    for report in reports:
        model = report.devices[0].name if report.devices else ""
        groups.setdefault((report.flow_name, report.history_key, model), []).append(report)
    return [_without_probes(group) for group in groups.values()]


def _without_probes(group: list[TaskReport]) -> list[TaskReport]:
    # On an empty device a probe (a first run) takes up to 2.7 times the task's need (ResNet-50 on an H200). A probe
    # without evidence of steps counts only if no other run completed.
    if all(r.budget_source == "probe" for r in group if r.outcome == "completed"):
        return group
    return [r for r in group if r.budget_source != "probe" or _is_steady(r)]


def _is_steady(report: TaskReport) -> bool:
    steps = report.steps
    return steps is not None and steps.alike and steps.steady_live_bytes is not None


def _because(lesson: LearnedBudget, runs: Sequence[PastRun]) -> str:
    if lesson.floor_bytes and lesson.need_bytes - lesson.floor_bytes < ROUND_BYTES:
        return "with less it ran out of memory or slowed down"

    def need_bytes(run: PastRun) -> int:
        alone = learn([replace(run, outcome="completed")])
        return alone.need_bytes if alone else 0

    counted = [run for run in runs if run.outcome != "oom"]
    top = max(counted, key=need_bytes)
    of_runs = f", of {len(counted)} processes" if len(counted) > 1 else ""
    # An outcome of a later version of this package has no words here.
    if top.outcome != "completed" and top.outcome in OUTCOMES:
        of_runs = f", of a run that {OUTCOMES[top.outcome].ended}"
    asked_bytes = _asked_bytes(lesson)
    written = format_bytes(parse_bytes(readable_size(asked_bytes)))
    rounded = "" if written == format_bytes(asked_bytes) else ", rounded up"
    live = top.live_bytes if top.steady_live_bytes is None else top.steady_live_bytes
    if live is None:
        # No framework reports memory: only the total of the process is known.
        return f"peak {_with_margin(top, top.process_bytes or 0, lesson.growth)}{rounded}{of_runs}"
    steady = "live peak" if top.steady_live_bytes is None else "steady live peak"
    context = f" + context {format_bytes(lesson.context_bytes)}" if lesson.context_bytes else ""
    return f"{steady} {_with_margin(top, live, lesson.growth)}{context}{rounded}{of_runs}"


def _with_margin(run: PastRun, size_bytes: int, growth: float) -> str:
    if size_bytes * (LIVE_FACTOR * growth - 1) < margin_bytes(run):
        return f"{format_bytes(size_bytes)} + {format_bytes(margin_bytes(run))}"
    more = f" × {growth:.2f} for larger inputs" if growth >= 1.005 else ""
    return f"{format_bytes(size_bytes)} × {LIVE_FACTOR:g}{more}"


def _after_oom_bytes(report: TaskReport) -> int:
    """Return the bytes to request after a process ran out of memory at its cap, by the rule of `scheduling.ladder`."""
    wanted = int((report.wanted_bytes or 0) * WANTED_FACTOR)
    return max(int(report.budget_bytes * OOM_FACTOR), wanted)


def _asked_bytes(lesson: LearnedBudget) -> int:
    """Return the learned need without its rounding up to `ROUND_BYTES`, so that a tag agrees with the printed sum."""
    return max(1, lesson.need_bytes - ROUND_BYTES + 1)


def _most_bytes(reports: Iterable[TaskReport]) -> int | None:
    """Return the largest possible budget on one device, in bytes; `None`: no report has a device."""
    sizes = (report.most_bytes for report in reports)
    return max((size for size in sizes if size is not None), default=None)
