"""What several calls take is written once, kept while somebody needs it, and never stale."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from prefect_gpu.processes import transport, values
from prefect_gpu.processes.transport import FrameTransport, MemoryFile, PackedValue, write_file
from prefect_gpu.processes.values import ArgumentFiles, Share, find_regions

np = pytest.importorskip("numpy")

pytestmark = pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")


class Written:
    """Counts what is written."""

    def __init__(self) -> None:
        self.count = 0
        self.files = ArgumentFiles(self.write)

    def write(self, parts: Sequence[memoryview]) -> MemoryFile:
        self.count += 1
        return write_file(parts)


@pytest.fixture
def written() -> Written:
    return Written()


def dump(share: Share, *args: Any) -> PackedValue:
    return values.dumps(args, "call", "call", transport=share.transport())


def test_one_file_serves_all_calls_with_an_array(written: Written) -> None:
    before = len(os.listdir("/proc/self/fd"))
    array = np.arange(300_000)
    with written.files.share([array]) as a, written.files.share([array]) as b:
        parcels = [dump(a, array, 1), dump(b, "other", array), dump(a, array)]
        assert written.count == 1
        assert len({id(parcel.files[0]) for parcel in parcels}) == 1
        assert np.array_equal(values.loads(parcels[1], "call")[1], array)
    assert len(written.files) == 0
    del parcels
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_array_that_was_changed_in_between_is_written_again(written: Written) -> None:
    array = np.arange(300_000)
    with written.files.share([array]) as a, written.files.share([array]) as b:
        first = dump(a, array)
        array[299_999] = 7
        second = dump(b, array)
        assert written.count == 2
        assert values.loads(first, "call")[0][-1] == 299_999
        assert values.loads(second, "call")[0][-1] == 7
        dump(b, array)
        assert written.count == 2


def test_a_waiting_call_with_the_array_keeps_its_file(written: Written) -> None:
    array = np.arange(300_000)
    waiting = written.files.share(({"deep": [array]}, {}))
    with waiting:
        with written.files.share([array]) as first:
            dump(first, array)
        assert len(written.files) == 1
        dump(waiting, array)
        assert written.count == 1
    assert len(written.files) == 0


def test_a_waiting_call_with_another_array_keeps_no_file(written: Written) -> None:
    other, array = np.arange(300_000), np.ones(300_000)
    with written.files.share([other]):
        with written.files.share([array]) as first:
            dump(first, array)
        assert len(written.files) == 0


def test_an_array_inside_an_object_is_shared_while_calls_run(written: Written) -> None:
    class Model:
        def __init__(self) -> None:
            self.weights = np.arange(300_000)

    model = Model()
    assert not list(find_regions(model))
    with written.files.share([model]) as a, written.files.share([model]) as b:
        dump(a, model)
        dump(b, model)
        assert written.count == 1
    assert len(written.files) == 0


def test_calls_that_come_together_write_once(written: Written) -> None:
    array = np.arange(3_000_000)
    shares = [written.files.share([array]) for _ in range(6)]
    threads = [threading.Thread(target=dump, args=(share, array)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written.count == 1
    for share in shares:
        share.__exit__(None, None, None)
    assert len(written.files) == 0


def test_a_file_that_cannot_be_written_is_tried_again() -> None:
    fails = [True, False]

    def write(parts: Sequence[memoryview]) -> MemoryFile:
        if fails.pop(0):
            raise OSError(12, "no memory")
        return write_file(parts)

    array = np.arange(300_000)
    with ArgumentFiles(write).share([array]) as share:
        with pytest.raises(Exception, match="no memory"):
            dump(share, array)
        assert len(dump(share, array).files) == 1


def test_a_call_needs_no_descriptor_to_pass_an_array_that_another_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails = [False, True]

    def refuse(*given: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def write(parts: Sequence[memoryview]) -> MemoryFile:
        return refuse() if fails.pop(0) else write_file(parts)

    array, files = np.arange(300_000), ArgumentFiles(write)
    with files.share([array]) as first, files.share([array]) as second:
        dump(first, array)
        monkeypatch.setattr(transport, "_map_privately", refuse)
        assert dump(second, array).files == ()


def test_regions_are_found_in_values_that_expose_their_memory() -> None:
    array = np.arange(300_000.0).reshape(300, 1000)
    data = bytearray(2 << 20)
    small = np.arange(10)
    found = set(find_regions(([array, array.T, array[:, ::2], small], {"a": (data, "text", 5)})))
    address = array.__array_interface__["data"][0]
    assert found == {
        (address, array.nbytes),
        (np.frombuffer(data, "u1").__array_interface__["data"][0], len(data)),
    }


def test_a_long_list_is_not_searched_to_its_end() -> None:
    looked: list[int] = []

    class Numbers(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for number in range(10_000):
                looked.append(number)
                yield number

    assert not list(find_regions(Numbers([1])))
    assert len(looked) <= values._MOST_VALUES


def test_regions_of_tensors_are_their_storages() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000, 300)
    found = set(
        find_regions([tensor, tensor[3:].t(), torch.nn.Parameter(tensor), tensor.to("meta")])
    )
    assert found == {(tensor.untyped_storage().data_ptr(), 1_200_000)}


def test_without_memory_files_nothing_is_shared(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "AVAILABLE", False)
    with written.files.share([]) as share:
        assert isinstance(share.transport(), FrameTransport)


def test_without_numpy_each_call_writes_its_own(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(300_000)
    with written.files.share([]) as a, written.files.share([]) as b:
        parts = [memoryview(array).cast("B")]
        monkeypatch.delitem(sys.modules, "numpy")
        assert written.files.file_for(a, parts) is not written.files.file_for(b, parts)
        assert len(written.files) == 0
