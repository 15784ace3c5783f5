"""What goes into the frame and what into memory files, and that it arrives as it was."""

from __future__ import annotations

import errno
import os
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu import values
from prefect_gpu.errors import NO_ROOM, ProtocolError, ResultError
from prefect_gpu.values import transport
from prefect_gpu.values.transport import (
    FILE_BYTES,
    MOST_FILES,
    VALUE,
    Frame,
    PackedValue,
    WriteFile,
    frame_header,
    group_parts,
    pack,
    unpack,
    write_file,
)

np = pytest.importorskip("numpy")

needs_files = pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")

MIB = 1 << 20


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


@given(
    st.lists(st.sampled_from([0, 100, FILE_BYTES // 2, FILE_BYTES, 5 * FILE_BYTES]), max_size=40)
)
def test_parts_are_in_few_files_and_little_stays_in_the_frame(sizes: list[int]) -> None:
    groups = group_parts(sizes)
    placed = [index for group in groups for index in group]
    assert len(placed) == len(set(placed))
    assert len(groups) < MOST_FILES, "one is left for the stream"
    assert all(sum(sizes[i] for i in group) >= FILE_BYTES for group in groups)
    assert sum(size for i, size in enumerate(sizes) if i not in placed) < FILE_BYTES


def test_large_parts_have_files_of_their_own_and_the_rest_shares_one() -> None:
    assert group_parts([MIB, 10, 3 * MIB]) == [[0], [2]]
    groups = group_parts([10] + [MIB] * 20)
    assert groups[:-1] == [[index] for index in range(1, MOST_FILES - 1)]
    assert groups[-1] == [0, *range(MOST_FILES - 1, 21)]


@pytest.mark.parametrize("write", [None, write_file], ids=["in the frame", "in files"])
@pytest.mark.parametrize(
    ("stream", "buffers"),
    [
        ([b"stream"], []),
        ([b"str", b"eam"], [b"x" * 100, b""]),
        ([b"stream"], [b"a" * 70_000, b"b" * 3 * MIB, b"c" * MIB]),
        ([b"s" * 64, b"t" * 2 * MIB], [b"a" * 70_000]),
        ([b"s"], [bytes([n]) * (MIB + n) for n in range(20)]),
    ],
)
def test_what_is_packed_is_unpacked(
    write: WriteFile | None, stream: list[bytes], buffers: list[bytes]
) -> None:
    contents = pack(views(*stream), views(*buffers), write).open()
    assert bytes(contents.stream) == b"".join(stream)
    assert [bytes(buffer) for buffer in contents.buffers] == buffers
    assert not any(buffer.readonly for buffer in contents.buffers)


def test_small_values_are_in_the_frame() -> None:
    assert values.dumps({"a": 1}, "return value", "result").files == ()
    assert values.dumps(np.zeros(20_000), "return value", "result").files == ()


@needs_files
def test_large_bytes_are_not_held_twice() -> None:
    parcel = values.dumps({"blob": bytes(3 * MIB), "n": 5}, "return value", "result")
    assert len(parcel.files) == 1
    assert len(parcel.body) < 1000
    assert values.loads(parcel, "return value") == {"blob": bytes(3 * MIB), "n": 5}


@pytest.mark.parametrize("write", [None, write_file], ids=["in the frame", "in files"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(300_000.0),
        np.asfortranarray(np.arange(600_000.0).reshape(600, 1000)),
        np.arange(600_000.0)[::2],
        np.datetime64("2020", "s") + np.arange(300_000),
        np.zeros(300_000, dtype=[("a", "i4"), ("b", "f8")]),
        np.array([object] * 10),
        np.frombuffer(bytes(2 * MIB)),
    ],
    ids=["plain", "fortran", "every second", "dates", "records", "objects", "read-only"],
)
def test_arrays_arrive_as_they_were(write: WriteFile | None, array: Any) -> None:
    parcel = values.dumps([array], "return value", "result", pack=packer(write))
    (back,) = values.loads(parcel, "return value")
    assert back.dtype == array.dtype and np.array_equal(back, array)
    assert back.flags.writeable == array.flags.writeable
    assert back.flags.f_contiguous == array.flags.f_contiguous or array.strides == (16,)
    # And they travel on, by whatever pickles them.
    assert np.array_equal(pickle.loads(pickle.dumps(back)), array)
    del parcel
    if back.flags.writeable:
        before = array.copy()
        back[:1] = back[-1:]
        assert np.array_equal(array, before)


@needs_files
def test_a_part_of_a_value_keeps_its_memory_alive() -> None:
    first = np.arange(300_000.0)
    parcel = values.dumps([first, first + 1, first[:200_000]], "return value", "result")
    assert len(parcel.files) == 3
    back = values.loads(parcel, "return value")[1][5:]
    del parcel
    assert back[0] == 6 and back.sum() == (first[5:] + 1).sum()


def packer(write: WriteFile | None) -> values.Pack:
    return lambda stream, buffers: pack(stream, buffers, write)


def failing(number: int) -> Any:
    def write(parts: Sequence[memoryview]) -> Any:
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS, errno.EFBIG, errno.EPERM])
def test_without_a_memory_file_the_frame_carries_everything(number: int) -> None:
    array = np.arange(300_000)
    parcel = values.dumps(array, "argument", "x", pack=packer(failing(number)))
    assert parcel.files == ()
    assert np.array_equal(values.loads(parcel, "argument"), array)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
def test_no_memory_is_one_clear_error(number: int) -> None:
    says = r"return value of a GPU task finds no memory.*2\.3MiB"
    with pytest.raises(ResultError, match=says) as caught:
        values.dumps(np.arange(300_000), "return value", "result", pack=packer(failing(number)))
    assert caught.value.type_name == NO_ROOM


class Endless:
    def __reduce__(self) -> Any:
        raise MemoryError


def test_no_memory_while_pickling_is_the_same_error() -> None:
    with pytest.raises(ResultError, match="finds no memory"):
        values.dumps([Endless()], "return value", "result")


def table(*parts: tuple[int, int, int], count: int | None = None) -> bytearray:
    body = bytearray(struct.pack("!I", len(parts) if count is None else count))
    for part in parts:
        body += struct.pack("!iQQ", *part)
    return body


@pytest.mark.parametrize(
    "body",
    [
        bytearray(),
        table(count=0),
        table(count=5),
        table((0, 0, 1)),
        table((-2, 0, 1)),
        table((-1, 20, 100)),
        table((-1, 1 << 63, 1 << 63)),
    ],
    ids=["nothing", "no stream", "cut", "no file", "before", "past the end", "beyond belief"],
)
def test_a_table_that_does_not_fit_is_refused(body: bytearray) -> None:
    with pytest.raises(ProtocolError):
        unpack(Frame(VALUE, body))


def test_a_packed_value_is_a_frame() -> None:
    header, body = PackedValue(bytearray(b"abc")).frame
    assert bytes(header) + bytes(body) == frame_header(VALUE, 3) + b"abc"
