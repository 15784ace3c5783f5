"""What several calls take is written once, kept while somebody needs it, and never stale."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.values import ArgumentFiles, Share, transport
from prefect_gpu.values.transport import MemoryFile, PackedValue, write_file

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
    return values.dumps(args, "call", "call", pack=share.pack)


def test_one_file_serves_all_calls_with_an_array(written: Written) -> None:
    # What other tests have left.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    array = np.arange(300_000)
    with written.files.share() as a, written.files.share() as b:
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
    with written.files.share() as a, written.files.share() as b:
        first = dump(a, array)
        array[299_999] = 7
        second = dump(b, array)
        assert written.count == 2
        assert values.loads(first, "call")[0][-1] == 299_999
        assert values.loads(second, "call")[0][-1] == 7
        dump(b, array)
        assert written.count == 2


def test_calls_one_after_another_write_an_array_once(written: Written) -> None:
    array = np.arange(300_000)
    with written.files.share() as waiting:
        with written.files.share() as first:
            dump(first, array)
        assert len(written.files) == 1
        dump(waiting, array)
        assert written.count == 1
    assert len(written.files) == 0


def test_a_file_is_dropped_once_no_call_waits_that_could_take_it(written: Written) -> None:
    with written.files.share() as waiting:
        with written.files.share() as first:
            dump(first, np.arange(300_000))
        dump(waiting, "another")
        assert len(written.files) == 0


def test_only_the_arrays_of_the_last_call_stay_while_another_waits(written: Written) -> None:
    with written.files.share():
        for number in range(3):
            with written.files.share() as ended:
                dump(ended, np.full(300_000, number), np.full(400_000, number))
        assert len(written.files) == 2


def test_calls_that_come_together_write_once(written: Written) -> None:
    array = np.arange(3_000_000)
    with contextlib.ExitStack() as calls:
        shares = [calls.enter_context(written.files.share()) for _ in range(6)]
        threads = [threading.Thread(target=dump, args=(share, array)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert written.count == 1
    assert len(written.files) == 0


def test_a_file_that_cannot_be_written_is_tried_again() -> None:
    fails = [True, False]

    def write(parts: Sequence[memoryview]) -> MemoryFile:
        if fails.pop(0):
            raise OSError(12, "no memory")
        return write_file(parts)

    array = np.arange(300_000)
    with ArgumentFiles(write).share() as share:
        with pytest.raises(Exception, match="no memory"):
            dump(share, array)
        assert len(dump(share, array).files) == 1


def test_a_call_needs_no_descriptor_to_pass_an_array_that_another_has_passed() -> None:
    fails = [False, True]

    def write(parts: Sequence[memoryview]) -> MemoryFile:
        if fails.pop(0):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return write_file(parts)

    array, files = np.arange(300_000), ArgumentFiles(write)
    with files.share() as first, files.share() as second:
        assert dump(first, array).files == dump(second, array).files
        assert dump(second, array + 1).files == ()


def test_without_memory_files_nothing_is_shared(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "AVAILABLE", False)
    with written.files.share() as share:
        assert dump(share, np.arange(300_000)).files == ()
    assert written.count == 0


def test_without_numpy_each_call_writes_its_own(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(300_000)
    with written.files.share() as a, written.files.share() as b:
        parts = [memoryview(array).cast("B")]
        monkeypatch.delitem(sys.modules, "numpy")
        assert written.files.file_for(a, parts) is not written.files.file_for(b, parts)
        assert len(written.files) == 0
