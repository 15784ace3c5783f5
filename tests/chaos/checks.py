"""Looks at what became of a chaos run. Each check prints a line."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.devices.shared_folder import SharedFolder
from tests.chaos import plan
from tests.chaos.faults import Note
from tests.event_files import replay
from tests.faults.test_many_flows import check_capacity, read_log, steps
from tests.gpu._checks import TOLERANCE_BYTES, settle, size
from tests.integration.programs import Workplace

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

#: Seconds until the server has taken in all states, at most.
STATES_S = 180.0

#: Seconds for which a flow may write no word and have no body begin or end.
IDLE_S = 120.0

#: Problems that are printed of each check.
MOST_SHOWN = 12

#: Errors of Prefect's client that end a flow while its server refuses connections. The last is how its first
#: request fails.
API_ERRORS = (
    "httpx.ConnectError",
    "httpx.ReadError",
    "httpx.RemoteProtocolError",
    "httpcore.",
    "builtins.RuntimeError: Failed to reach API at ",
)

#: The same while it answers with 503.
API_REFUSALS = ("httpx.HTTPStatusError", "prefect.exceptions.PrefectHTTPStatusError")


#: What a flow logs only if something met an error that it was not made for, or gave the ledger up.
UNEXPECTED = (
    "met an error",
    "raised on",
    "could not be passed on",
    "devices could not be read",
    "could not take what it was told",
    "cannot begin anew",
    "are not seen from now on",
    "Exception in thread",
    "Exception ignored",
    "Fatal Python error",
)


#: What a flow logs of an out-of-memory after which the body runs again, by its cause.
OUT_OF_MEMORY = {
    "own cap": "were not enough; it gets",
    "full device": "filled the device though it was within its",
}


@dataclass
class FlowRecord:
    """What a flow wrote, until it ended or was killed."""

    number: int
    #: When its process was started and was seen to have ended, on the clock of `time.monotonic`.
    began_s: float = 0.0
    ended_s: float = 0.0
    #: When it wrote, on the same clock.
    words_s: list[float] = field(default_factory=list)
    flow_run: str = ""
    #: Task run by key.
    submitted: dict[str, str] = field(default_factory=dict)
    #: What the flow saw of each, by key.
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Type and text of the error that ended it; empty: none did.
    failed: str = ""
    ended: bool = False
    #: Readings of the devices that failed.
    failed_readings: int = 0
    #: Memory files that its process had open at its end.
    memory_files: list[str] = field(default_factory=list)


def read_flow(folder: Path, number: int) -> FlowRecord:
    """Read what a flow has written."""
    found = FlowRecord(number)
    path = folder / f"flow-{number}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # A flow that is killed as it writes leaves a part of a line.
    for line in text[: text.rfind("\n") + 1].splitlines():
        said = json.loads(line)
        found.words_s.append(said.pop("at_s"))
        if "flow_run" in said:
            found.flow_run = said["flow_run"]
        elif "submitted" in said:
            found.submitted[said["submitted"]] = said["task_run"]
        elif "key" in said:
            found.outcomes[said["key"]] = said
        elif "failed" in said:
            found.failed = f"{said['failed']}: {said['text']}"
        elif "ended" in said:
            found.ended, found.failed_readings = True, said["failed_readings"]
            found.memory_files = said["memory_files"]
    return found


class Verdict:
    """Prints a line for each check, and remembers whether one failed."""

    def __init__(self) -> None:
        self.passed = True

    def say(self, what: str, problems: Iterable[object], found: str = "") -> None:
        """Print whether a check has passed, and what is wrong."""
        listed = list(problems)
        self.passed &= not listed
        detail = f" ({found})" if found else ""
        print(f"{'FAIL' if listed else 'PASS'}  {what}{detail}", flush=True)
        for each in listed[:MOST_SHOWN]:
            print(f"      {each}", flush=True)
        if len(listed) > MOST_SHOWN:
            print(f"      and {len(listed) - MOST_SHOWN} more", flush=True)


def check_idle(verdict: Verdict, flows: Sequence[FlowRecord], notes: Sequence[Note]) -> None:
    """No flow was idle for long: it wrote a word, or the body of a task of its began or ended.

    Args:
        verdict: Says what was found.
        flows: All, those that were killed among them.
        notes: Of all bodies.
    """
    bodies_s: dict[int, list[float]] = defaultdict(list)
    for note in notes:
        bodies_s[int(note.key.partition(".")[0])].append(note.at_s)
    longest = {}
    for flow in flows:
        moments = sorted([flow.began_s, *flow.words_s, *bodies_s[flow.number], flow.ended_s])
        longest[flow.number] = max(later - at for at, later in itertools.pairwise(moments))
    verdict.say(
        f"no flow was idle for more than {IDLE_S:g} s",
        [f"flow {flow}: {idle_s:.0f} s" for flow, idle_s in longest.items() if idle_s > IDLE_S],
        f"{max(longest.values(), default=0.0):.0f} s at most",
    )


def check_flows(verdict: Verdict, flows: Sequence[FlowRecord], outages: int) -> None:
    """Flows end without an error, but for those whose calls of the API failed."""
    failed = [each for each in flows if each.failed]
    excused = [each for each in failed if outages and _is_absence(each.failed)]
    wrong = [f"flow {each.number}: {each.failed[:600]}" for each in failed if each not in excused]
    wrong += [
        f"flow {each.number} ended without a word"
        for each in flows
        if not each.failed and not each.ended
    ]
    verdict.say(
        "flows that were not killed end without an error",
        wrong,
        f"{len(flows)} flows, {len(excused)} of them ended by the API's absence",
    )


def _is_absence(failed: str) -> bool:
    return failed.startswith(API_ERRORS) or (failed.startswith(API_REFUSALS) and "503" in failed)


def _log_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each flow's log with each of its lines."""
    for path in sorted(folder.glob("flow-*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield path.name, line


def count_out_of_memory(folder: Path) -> dict[str, int]:
    """Return how often a body ran again after an out-of-memory of each cause."""
    counts = dict.fromkeys(OUT_OF_MEMORY, 0)
    for _, line in _log_lines(folder):
        for cause, words in OUT_OF_MEMORY.items():
            counts[cause] += words in line
    return counts


def check_logs(verdict: Verdict, folder: Path) -> None:
    """No flow has logged an error of a thread, or that it shares no ledger."""
    problems = [
        f"{name}: {line.strip()[:600]}"
        for name, line in _log_lines(folder)
        if any(each in line for each in UNEXPECTED)
    ]
    verdict.say("no flow met an error in its own threads, and all shared the ledger", problems)


def check_values(
    verdict: Verdict, flows: Sequence[FlowRecord], jobs: dict[str, plan.Job], kills: int
) -> None:
    """Each task run has returned what it should, failed as it should, or its process was killed.

    Args:
        verdict: Says what was found.
        flows: All, those that were killed among them.
        jobs: By key.
        kills: How many processes were killed that may have had a task.
    """
    problems = []
    counts: Counter[str] = Counter()
    for flow in flows:
        for key, seen in flow.outcomes.items():
            kind = _kind(jobs[key], seen)
            counts[kind or "wrong"] += 1
            if kind is None:
                shown = {name: text[:700] for name, text in seen.items()}
                problems.append(f"{jobs[key].sort} {shown}")
        if flow.ended:
            problems += [f"{key}: no outcome" for key in flow.submitted.keys() - flow.outcomes]
    verdict.say(
        "each task run returned what it should, or failed as it should",
        problems,
        ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())),
    )
    crashed = counts["killed"]
    verdict.say(
        "no more task runs crashed than processes were killed",
        [f"{crashed} crashed and {kills} were killed"] if crashed > kills else [],
    )


def _kind(job: plan.Job, seen: dict[str, str]) -> str | None:
    """Return what a task run's end is called; `None`: it is wrong."""
    state, error, text = seen["state"], seen.get("error", ""), seen.get("text", "")
    if seen.get("value") == "right" and state == "COMPLETED" and job.sort != "raises":
        return "completed"
    meant = job.sort == "raises" or (job.sort == "retried" and not job.retries)
    if meant and state == "FAILED" and error == "MeantError" and text == job.key:
        return "failed as meant"
    if state == "CRASHED" and ("SIGKILL" in text or "exit code 255" in text):
        return "killed"
    return None


def check_states(
    verdict: Verdict,
    flows: Sequence[FlowRecord],
    killed: Sequence[FlowRecord],
    api_url: str,
    wait_s: float = STATES_S,
) -> None:
    """Each task run of a flow that ended by itself has exactly one final state; see also `check_states_of_killed`."""
    wanted = {
        task_run: (flow.number, key) for flow in flows for key, task_run in flow.submitted.items()
    }
    states: dict[str, list[str]] = {}
    deadline = time.monotonic() + wait_s
    while True:
        missing = [each for each in wanted if len(_final(states.get(each, []))) != 1]
        states |= asyncio.run(_states(api_url, missing))
        missing = [each for each in wanted if not _final(states[each])]
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(2.0)
    problems = [
        f"flow {wanted[each][0]}, task {wanted[each][1]}: {seen}"
        for each, seen in states.items()
        if len(_final(seen)) != 1
    ]
    problems += [f"task {wanted[each][1]}: {what}" for each, what in _differences(flows, states)]
    verdict.say(
        "each task run of a flow that ended by itself has exactly one final state on the server",
        problems,
        f"{len(wanted)} of {len(wanted) + sum(len(each.submitted) for each in killed)}; "
        "the others were submitted by flows that were killed",
    )
    of_killed = [task_run for flow in killed for task_run in flow.submitted.values()]
    check_states_of_killed(verdict, killed, asyncio.run(_states(api_url, of_killed)))


def check_states_of_killed(
    verdict: Verdict, killed: Sequence[FlowRecord], states: Mapping[str, Sequence[str]]
) -> None:
    """Each task run of a flow that was killed has the final state that its flow saw, or none.

    The server may have none: it comes with an event, which is lost if the flow is killed before it is sent.

    Args:
        verdict: Says what was found.
        killed: Flows that were killed.
        states: Of each task run, those that the server has.
    """
    by_task_run = {
        task_run: f"flow {flow.number}, task {key}"
        for flow in killed
        for key, task_run in flow.submitted.items()
    }
    problems = [
        f"{what}: {states[each]}"
        for each, what in by_task_run.items()
        if len(_final(states[each])) > 1
    ]
    problems += [f"{by_task_run[each]}: {what}" for each, what in _differences(killed, states)]
    final = sum(bool(_final(states[each])) for each in by_task_run)
    seen = sum(len(flow.outcomes) for flow in killed)
    verdict.say(
        "no task run of a killed flow has two final states, or another than its flow saw",
        problems,
        f"{len(by_task_run)} task runs: {seen} whose end the flow recorded, {final} with a final state on the server",
    )


def _differences(
    flows: Sequence[FlowRecord], states: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield each task run whose one final state on the server is not what its flow saw, and both."""
    for flow in flows:
        for key, outcome in flow.outcomes.items():
            task_run, seen = flow.submitted[key], outcome["state"]
            final = _final(states[task_run])
            if len(final) == 1 and final != [seen]:
                yield task_run, f"{seen} in the flow, {states[task_run]} on the server"


def _final(states: Sequence[str]) -> list[str]:
    return [each for each in states if each in FINAL]


async def _states(api_url: str, task_runs: Sequence[str]) -> dict[str, list[str]]:
    """Ask the server for all states of task runs."""
    found: dict[str, list[str]] = {}
    allowed = asyncio.Semaphore(8)

    async def ask(client: httpx.AsyncClient, task_run: str) -> None:
        async with allowed:
            answer = await client.get("/task_run_states/", params={"task_run_id": task_run})
            answer.raise_for_status()
            said: list[dict[str, Any]] = answer.json()
            said.sort(key=lambda each: str(each["timestamp"]))
            found[task_run] = [str(each["type"]) for each in said]

    async with httpx.AsyncClient(base_url=api_url, timeout=60.0) as client:
        await asyncio.gather(*(ask(client, each) for each in task_runs))
    return found


def check_bodies(
    verdict: Verdict,
    flows: Sequence[FlowRecord],
    notes: Sequence[Note],
    kills: Mapping[int, Sequence[float]],
) -> None:
    """No body ran again that had ended, or that was not short of memory; what completed has ended once.

    A body whose process was killed after its end and before its value arrived may run again, as another attempt.

    Args:
        verdict: Says what was found.
        flows: All, those that were killed among them.
        notes: Of all bodies.
        kills: When a process of each id was killed, on the clock of `time.monotonic`.
    """
    by_attempt: dict[tuple[str, int], list[str]] = defaultdict(list)
    by_key: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        by_attempt[note.key, note.attempt].append(note.word)
        by_key[note.key].append(note)
    ends = {key: sum(note.word == "end" for note in own) for key, own in by_key.items()}
    lost = {key: sum(_is_lost(note, own, kills) for note in own) for key, own in by_key.items()}
    again = [f"task {key} ended {n} times" for key, n in ends.items() if n - lost[key] > 1]
    again += [
        f"task {key} completed and its body has not ended"
        for flow in flows
        for key, seen in flow.outcomes.items()
        if seen["state"] == "COMPLETED" and not ends.get(key)
    ]
    for (key, attempt), words in by_attempt.items():
        for before, after in itertools.pairwise(words):
            # After an error the body may begin again with more memory.
            if (before, after) not in {("begin", "end"), ("begin", "raise"), ("raise", "begin")}:
                again.append(f"task {key}, attempt {attempt}: {words}")
                break
    begun = sum(note.word == "begin" for note in notes)
    verdict.say(
        "each body ran once for an attempt, and to its end once if its task run completed",
        again,
        f"{begun} bodies, of which {sum(lost.values())} ran again since their process was killed after their end",
    )


def _is_lost(end: Note, notes: Sequence[Note], kills: Mapping[int, Sequence[float]]) -> bool:
    """Return whether a note is the end of a body whose process was killed before the next attempt began."""
    if end.word != "end":
        return False
    later = [each.at_s for each in notes if each.word == "begin" and each.attempt > end.attempt]
    return any(end.at_s <= at_s < next_s for next_s in later[:1] for at_s in kills.get(end.pid, ()))


def check_processes(verdict: Verdict, place: Workplace) -> None:
    """No process is left."""
    try:
        place.wait_until_gone(60.0)
    except AssertionError:
        pass
    left = [f"{pid}: {command}" for pid, command in place.processes().items()]
    verdict.say("no process is left", left)


def check_ledger(verdict: Verdict, folder: Path, most_bytes: Callable[[], int]) -> None:
    """Nothing of dead processes is left in the ledger, and no memory was promised twice."""
    store = HostStore(folder)
    # A process that is gone is removed by the others that look.
    store.changed()
    log = read_log(folder)
    rows = store.read(0)
    left = [row.request_id for row in rows if row.entry is not None]
    verdict.say("no request of a dead process is in the ledger", left)
    shared = SharedFolder(folder)
    names = [each.name for each in folder.iterdir() if not each.name.startswith("ledger.db")]
    locks = [each for each in names if each.endswith(".lock") and store.owner not in each]
    held = [each for each in names if store.owner not in each and shared.hold(each) is None]
    verdict.say("no file of a dead process is in the ledger", [*locks, *held])
    try:
        most, problems = most_bytes(), []
    except AssertionError as error:
        most, problems = 0, [str(error)[:300]]
    verdict.say(
        "no device was promised above its capacity",
        problems,
        f"{most / plan.GIB:.1f} GiB at most, {len(log)} rows at the end",
    )
    *_, (_, held_now) = steps(log) if log else [(None, {"no rows": 1})]
    verdict.say("no promise is left", [f"{k}: {v}" for k, v in held_now.items() if v])


def watch_capacity(folder: Path, capacity_bytes: int) -> Callable[[], int]:
    """Return what checks the rows that the log has at the time; it returns the most bytes ever promised.

    The log keeps a limited number of rows, so each later call raises what an earlier one has found.
    """
    most = 0
    found = ""

    def look() -> int:
        nonlocal most, found
        try:
            most = max(most, check_capacity(read_log(folder), capacity_bytes))
        except AssertionError as error:
            found = found or str(error)
        assert not found, found
        return most

    return look


def check_events(verdict: Verdict, folder: Path) -> None:
    """A new machine takes the same decisions on the events of each flow, also of those that were killed."""
    found = {path.name: replay(path) for path in sorted(folder.glob("flow-*.events"))}
    verdict.say(
        "the events of each flow lead to the same decisions again",
        [f"{name}: {text[:1000]}" for name, each in found.items() for text in each.differences],
        f"{sum(each.events for each in found.values())} events of {len(found)} flows",
    )


def check_files(verdict: Verdict, flows: Sequence[FlowRecord], temporary: Path) -> None:
    """No flow had a memory file open at its end, and no temporary file is left.

    Memory files have no name: those of a process that is gone are gone with it.
    """
    kept = [f"flow {flow.number}: {name}" for flow in flows for name in flow.memory_files]
    verdict.say("no memory file is left", kept)
    left = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*"))
    verdict.say("no temporary file is left", left)


def check_device_memory(verdict: Verdict, before: list[int]) -> None:
    """No device has more in use than before."""
    after = settle(before)
    left = [
        f"device {index}: {size(now - then)} MiB more than before"
        for index, (then, now) in enumerate(zip(before, after, strict=True))
        if now - then > TOLERANCE_BYTES
    ]
    used = ", ".join(f"{size(now - then)} MiB" for then, now in zip(before, after, strict=True))
    verdict.say("no memory of a real device is left", left, used or "no device")
