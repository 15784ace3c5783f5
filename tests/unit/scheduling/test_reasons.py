"""Reasons to wait, as sentences and as topics of log lines."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from prefect_gpu.scheduling.reasons import (
    MOST_CHARACTERS,
    MOST_NAMES,
    Reason,
    WaitKind,
    sentence,
    shown_bytes,
    shown_names,
)
from prefect_gpu.units import GIB, MIB

LACKS = Reason(WaitKind.DEVICE_MEMORY, (5 * GIB,), free_bytes=GIB, where="device 0")
ANY = replace(LACKS, where=None, devices=2)
ON_NODES = replace(ANY, devices=4, nodes=2, at="b:1")
WHOLE = Reason(WaitKind.EMPTY_DEVICE, where="device 0", tasks=("train", "tune"))
FULL = Reason(WaitKind.PROCESSES, limit=4)
HOST = Reason(WaitKind.HOST_MEMORY, (9 * GIB,), free_bytes=3 * GIB)
ROOM = Reason(WaitKind.ROOM, suspended_for="task 'evaluate'", detail="moving to the host")

SENTENCES = [
    pytest.param(Reason(WaitKind.FIRST_READING), "the first reading of the devices", id="no reading"),
    pytest.param(Reason(WaitKind.DEVICES_SILENT, detail="NVML is gone"), "the devices to answer (NVML is gone)", id="no answer"),
    pytest.param(Reason(WaitKind.REFUSAL, detail="gpu:device=9 names no device"), "its refusal: gpu:device=9 names no device", id="it is refused soon"),
    pytest.param(FULL, "another process to end (max_processes is 4)", id="processes"),
    pytest.param(replace(FULL, nodes=1, where="a"), "another process to end on node a (max_processes is 4)", id="processes of a node"),
    pytest.param(replace(FULL, nodes=2, where="a"), "another process to end on any of 2 nodes (max_processes is 4)", id="processes of nodes"),
    pytest.param(HOST, "9GiB of host memory for its process; 3GiB available", id="host memory"),
    pytest.param(replace(HOST, nodes=1, where="a"), "9GiB of host memory for its process on node a; 3GiB available", id="host memory of a node"),
    pytest.param(replace(HOST, nodes=2, where="b", at="b"), "9GiB of host memory for its process on any of 2 nodes; 3GiB available (b)", id="host memory of nodes"),
    pytest.param(replace(LACKS, kind=WaitKind.DEVICE_ERROR, at="device 0", detail="GPU is lost"), "5GiB on device 0; device 0: GPU is lost", id="a lost device"),
    pytest.param(replace(ANY, kind=WaitKind.DEVICE_TASKS, limit=2), "5GiB on any of 2 devices; max_tasks_per_device is 2, and as many tasks run on each", id="tasks on each device"),
    pytest.param(WHOLE, "a device to itself on device 0; running there: train, tune", id="a whole device"),
    pytest.param(replace(WHOLE, need_bytes=(5 * GIB,)), "5GiB and no other task on device 0; running there: train, tune", id="an exclusive task"),
    pytest.param(replace(WHOLE, tasks=tuple("abcd")), "a device to itself on device 0; running there: a, b, c and others", id="many tasks are in the way"),
    pytest.param(replace(LACKS, kind=WaitKind.EXCLUSIVE_TASK, tasks=("train",)), "5GiB on device 0; in exclusive use by: train", id="another is exclusive"),
    pytest.param(replace(LACKS, kind=WaitKind.BUSY_DEVICE, tasks=("train",)), "5GiB on device 0 where it computes alone; kept busy by: train", id="another computes all the time"),
    pytest.param(LACKS, "5GiB on device 0; most free 1GiB", id="memory of one device"),
    pytest.param(ANY, "5GiB on any of 2 devices; most free 1GiB", id="memory of any device"),
    pytest.param(replace(ANY, count=2), "5GiB on 2 of 2 devices; most free 1GiB", id="memory of several devices"),
    pytest.param(replace(ANY, need_bytes=(5 * GIB, 8 * GIB)), "5GiB or 8GiB on any of 2 devices; most free 1GiB", id="models differ"),
    pytest.param(replace(LACKS, need_bytes=()), "a device to itself on device 0; most free 1GiB", id="other programs hold the memory"),
    pytest.param(ON_NODES, "5GiB on any of 4 devices on 2 nodes; most free 1GiB (b:1)", id="any device of a cluster"),
    pytest.param(replace(ON_NODES, count=2), "5GiB on 2 of 4 devices on one of 2 nodes; most free 1GiB (b:1)", id="several devices of a cluster"),
    pytest.param(replace(ON_NODES, count=2, nodes=1, where="b"), "5GiB on 2 of 4 devices on node b; most free 1GiB (b:1)", id="several devices of a node"),
    pytest.param(replace(LACKS, kind=WaitKind.FIRST_RUN_MEMORY), "5GiB on device 0 (first run, memory need unknown); most free 1GiB", id="a first run"),
    pytest.param(replace(LACKS, kind=WaitKind.RESERVED_MEMORY, tasks=("train",)), "5GiB on device 0; most free 1GiB, the rest reserved for first runs: train", id="beside first runs"),
    pytest.param(Reason(WaitKind.EARLIER), "earlier task runs to ask for their devices", id="the order of submit"),
    pytest.param(Reason(WaitKind.FIRST_RUN, tasks=("train",)), "the first run of train to show how much memory it needs", id="the first run of its task"),
    pytest.param(Reason(WaitKind.RESUME, detail="moving to the host"), "prefect-gpu resume: its memory is moving to the host", id="suspended by hand"),
    pytest.param(ROOM, "room, suspended for task 'evaluate': its memory is moving to the host", id="suspended for another"),
    pytest.param(Reason(WaitKind.OTHER_NODE, at="a", detail="no room"), "other devices: node a of the cluster refused the task: no room", id="a node refused it"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "says"), SENTENCES)
def test_each_kind_has_a_sentence(reason: Reason, says: str) -> None:
    assert sentence(reason) == says


def test_the_table_has_each_kind() -> None:
    assert {row.values[0].kind for row in SENTENCES} == set(WaitKind)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"ahead": 1, "ahead_tasks": (("train", False),)}, "; 1 ahead in the queue: train", id="one is ahead"),
        pytest.param({"ahead": 9, "ahead_tasks": (("a", True), ("b", False), ("c", False), ("d", False))}, "; 9 ahead in the queue: a (another flow), b, c and others", id="many are ahead"),
        pytest.param({"passed": 2}, "; later tasks that started before it: 2", id="it was passed"),
        pytest.param({"passed": 2, "drains": True}, "; later tasks that started before it: 2; no later task may start on the devices that it can use", id="no more may pass"),
        pytest.param({"kept": ("device 0",)}, "; device 0 kept for it", id="a device is kept"),
        pytest.param({"kept": tuple("abcd"), "free_in_s": 90.0}, "; a, b, c and others kept for it, free in about 1m 30s", id="devices are kept"),
        pytest.param({"kept": ("device 0",), "free_in_s": 0.0}, "; device 0 kept for it", id="a device is due"),
        pytest.param({"ledger_problem": "the ledger in /x cannot be used"}, "; the ledger in /x cannot be used", id="no ledger"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", WaitKind)
def test_what_is_done_about_it_follows_each_kind(
    kind: WaitKind, changes: dict[str, object], says: str
) -> None:
    reason = Reason(kind, where="device 0", tasks=("t",))
    assert sentence(replace(reason, **changes)) == sentence(reason) + says  # type: ignore[arg-type]


def test_braces_in_names_are_no_fields() -> None:
    reason = replace(WHOLE, tasks=("{r.kind}", "{"))
    assert sentence(reason).endswith("running there: {r.kind}, {")


def test_a_sentence_is_short_whatever_the_names_and_errors() -> None:
    long = "x" * 200_000
    text = sentence(replace(LACKS, kind=WaitKind.DEVICE_ERROR, at="device 0", detail=long))
    assert len(text) == MOST_CHARACTERS and text.startswith("5GiB on device 0; device 0: xxx")
    assert text.endswith(" …")
    fits = MOST_CHARACTERS - len(sentence(Reason(WaitKind.REFUSAL, detail="")))
    assert sentence(Reason(WaitKind.REFUSAL, detail="x" * fits)).endswith("x")


@pytest.mark.parametrize(
    ("before", "now", "alike"),
    [
        (LACKS, replace(LACKS, free_bytes=384 * MIB, passed=2), True),
        (WHOLE, replace(WHOLE, tasks=("other",)), True),
        (FULL, replace(FULL, ahead=3, ahead_tasks=(("a", False),)), False),
        (replace(FULL, ahead=1), replace(FULL, ahead=3), True),
        (LACKS, replace(LACKS, kind=WaitKind.EXCLUSIVE_TASK, tasks=("a",)), False),
        (LACKS, FULL, False),
        (ROOM, replace(ROOM, detail="away"), True),
        (ROOM, replace(ROOM, suspended_for="task 'other'"), False),
    ],
    ids=["more is free", "other tasks run", "it is behind others", "fewer are ahead", "another is alone", "no more processes", "its memory has moved", "for another task"],
)  # fmt: skip
def test_reasons_have_one_topic_while_the_same_is_missing(
    before: Reason, now: Reason, alike: bool
) -> None:
    assert (before.topic == now.topic) is alike


def test_a_reason_has_only_what_a_sentence_shows() -> None:
    assert shown_bytes(-1) == 0 and shown_bytes(127 * MIB) == 64 * MIB
    assert shown_names("aab") == ("a", "b")
    assert len(shown_names(map(str, range(9)))) == MOST_NAMES + 1


def test_a_reason_can_be_pickled_and_compared() -> None:
    assert pickle.loads(pickle.dumps(ON_NODES)) == ON_NODES
    assert all(hash(getattr(ON_NODES, field.name)) is not None for field in fields(Reason))
