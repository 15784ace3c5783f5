"""Calls and results on their way between a flow and a node."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.cluster.wire import (
    STORED_BYTES,
    receive_call,
    receive_result,
    send_call,
    send_result,
)
from prefect_gpu.processes.messages import Call
from prefect_gpu.values import transport
from prefect_gpu.values.transport import MemoryFile, PackedValue
from tests.unit.cluster.cluster_rig import FakeStore

np = pytest.importorskip("numpy")

needs_files = pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")


def pack_call(*args: Any) -> PackedValue:
    return values.dumps(Call(len, args, {}), "call", "call")


VALUES = {
    "small": lambda: [1, "two"],
    "several MB in the stream": lambda: "x" * (3 * STORED_BYTES),
    "several large buffers": lambda: [
        np.arange(STORED_BYTES, dtype=np.int64) * number for number in range(3)
    ],
    "large and small buffers": lambda: [np.arange(10), np.arange(STORED_BYTES), np.arange(20)],
}


@pytest.mark.parametrize("name", VALUES)
def test_calls_arrive_as_they_were_sent(name: str) -> None:
    value, store = VALUES[name](), FakeStore()
    sent = send_call(pack_call(value), store, {})
    call = values.load_call(receive_call(sent, store, {}))
    assert str(call.args) == str((value,))
    assert bool(store.puts) == (name != "small" and transport.AVAILABLE)


@pytest.mark.parametrize("name", VALUES)
def test_results_arrive_as_they_were_sent(name: str) -> None:
    value, store = VALUES[name](), FakeStore()
    sent = send_result(values.dumps(value, "return value", "value").open(), store)
    arrived = values.loads(receive_result(sent, store), "return value")
    assert str(arrived) == str(value)
    assert bool(store.puts) == (name != "small")


def test_what_arrives_may_be_written_to_and_the_sent_bytes_stay() -> None:
    value, store = [np.zeros(10), np.zeros(STORED_BYTES)], FakeStore()
    sent = send_result(values.dumps(value, "return value", "value").open(), store)
    for _ in range(2):
        arrived = values.loads(receive_result(sent, store), "return value")
        assert [int(each.sum()) for each in arrived] == [0, 0]
        for each in arrived:
            each[:] = 1
    call = send_call(pack_call(*value), store, {})
    for _ in range(2):
        arguments = values.load_call(receive_call(call, store, {})).args
        assert [int(each.sum()) for each in arguments] == [0, 0]
        for each in arguments:
            each[:] = 1


@needs_files
def test_a_file_of_several_calls_is_stored_once_and_received_once() -> None:
    array, store = np.arange(STORED_BYTES), FakeStore()
    files = values.ArgumentFiles()
    sent: weakref.WeakKeyDictionary[MemoryFile, Any] = weakref.WeakKeyDictionary()
    kept: weakref.WeakValueDictionary[Any, MemoryFile] = weakref.WeakValueDictionary()
    with files.share() as share:
        packed = [
            values.dumps(Call(len, (array, number), {}), "call", "call", pack=share.pack)
            for number in range(3)
        ]
        calls = [send_call(each, store, sent) for each in packed]
        assert store.puts == 1
        arrived = [receive_call(each, store, kept) for each in calls]
    assert len({each.files for each in arrived}) == 1
    assert [values.load_call(each).args[1] for each in arrived] == [0, 1, 2]
    # Nothing is kept beyond the calls.
    del packed, arrived
    gc.collect()
    assert not sent and not kept


def test_a_part_that_is_lost_raises() -> None:
    store, value = FakeStore(), np.zeros(STORED_BYTES)
    result = send_result(values.dumps(value, "return value", "value").open(), store)
    call = send_call(pack_call(value), store, {})
    store.kept.clear()
    with pytest.raises(RuntimeError, match="lost"):
        receive_result(result, store)
    if transport.AVAILABLE:
        with pytest.raises(RuntimeError, match="lost"):
            receive_call(call, store, {})
