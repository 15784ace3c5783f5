"""Files in memory: sealed, mapped copy on write, and gone with the last who holds them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import socket
import sys
from pathlib import Path

import pytest

from prefect_gpu.errors import ProtocolError
from prefect_gpu.values import transport
from prefect_gpu.values.transport import MemoryFile, lay_out, write_file

pytestmark = pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")


def open_descriptors() -> int:
    """Return how many descriptors of memory files are open: other threads may close others at any time."""
    gc.collect()
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(path).startswith("/memfd:")
    return found


def test_what_is_mapped_is_what_was_written_and_holds_one_descriptor_at_most() -> None:
    before = open_descriptors()
    data = os.urandom(3 * mmap.PAGESIZE + 5)
    mapped = write_file([memoryview(data)]).map()
    assert open_descriptors() == before + (sys.version_info < (3, 13))
    assert mapped[:] == data
    del mapped
    assert open_descriptors() == before


def test_a_thousand_mapped_files_hold_no_thousand_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_MOST_MAPPED", 2)
    before = open_descriptors()
    data = os.urandom(3 * mmap.PAGESIZE + 5)
    mapped = [write_file([memoryview(data)]).map() for _ in range(5)]
    assert open_descriptors() <= before + 2
    assert [part[:] for part in mapped] == [data] * 5
    mapped[4][:1] = mapped[4][1:2]


def test_parts_begin_where_they_are_laid_out() -> None:
    parts = [b"a" * 65, b"", b"c" * 3]
    offsets, end = lay_out([len(part) for part in parts])
    assert (offsets, end) == ([0, 128, 128], 131)
    mapped = write_file([memoryview(part) for part in parts]).map()
    assert mapped[:] == b"a" * 65 + bytes(63) + b"ccc"


def test_a_change_to_a_mapping_is_private() -> None:
    file = write_file([memoryview(b"x" * 10)])
    first, second = file.map(), file.map()
    first[0:1] = b"y"
    assert (first[0:2], second[0:2], file.map()[0:2]) == (b"yx", b"xx", b"xx")


def test_a_sealed_file_cannot_be_changed_through_its_descriptor() -> None:
    file = write_file([memoryview(b"x" * 10)])
    for change in (
        lambda: os.pwrite(file.fileno(), b"y", 0),
        lambda: os.ftruncate(file.fileno(), 0),
        lambda: os.ftruncate(file.fileno(), 20),
        lambda: mmap.mmap(file.fileno(), 10, flags=mmap.MAP_SHARED),
        lambda: fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
    ):
        with pytest.raises(PermissionError):
            change()


def test_what_is_no_memory_file_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        MemoryFile(os.open(os.devnull, os.O_RDONLY)).map()


def test_a_closed_file_is_an_error_and_closes_nothing_else() -> None:
    file = write_file([memoryview(b"x")])
    file.close()
    other = os.open(os.devnull, os.O_RDONLY)
    file.close()
    os.fstat(other)
    os.close(other)
    with pytest.raises(ValueError, match="closed"):
        file.fileno()


def test_a_mapping_that_does_not_fit_the_address_space_is_an_error() -> None:
    with pytest.raises((OSError, MemoryError)):
        transport._map_privately(write_file([memoryview(b"x")]).fileno(), 1 << 60)


def test_a_file_holds_exactly_the_bytes_that_were_written() -> None:
    parts = [memoryview(bytearray(os.urandom(100))), memoryview(os.urandom(200))]
    file = write_file(parts)
    assert file.holds(parts)
    assert not file.holds(parts[:1])
    assert not file.holds([parts[1], parts[0]])
    parts[0][99] ^= 1
    assert not file.holds(parts)


def test_a_file_passes_over_a_socket() -> None:
    before = open_descriptors()
    left, right = socket.socketpair()
    with left, right:
        file = write_file([memoryview(b"passed")])
        assert transport.send(left, memoryview(b"12345678"), [file]) == 8
        del file
        room = bytearray(3)
        size, (came,) = transport._receive(right, memoryview(room))
        assert (size, bytes(room), came.map()[:]) == (3, b"123", b"passed")
        assert not os.get_inheritable(came.fileno())
        assert transport._receive(right, memoryview(bytearray(9))) == (5, [])
        # Sent, and never received.
        transport.send(left, memoryview(b"1"), [came])
        del came
    gc.collect()
    assert open_descriptors() == before


class Full:
    def sendmsg(self, *given: object) -> int:
        raise OSError(self.number, "no")

    def __init__(self, number: int) -> None:
        self.number = number


def test_too_many_descriptors_in_flight_differ_from_a_closed_socket() -> None:
    file = write_file([memoryview(b"x")])
    with pytest.raises(ProtocolError, match="ulimit"):
        transport.send(Full(errno.ETOOMANYREFS), memoryview(b"1"), [file])  # type: ignore[arg-type]
    with pytest.raises(BrokenPipeError):
        transport.send(Full(errno.EPIPE), memoryview(b"1"), [file])  # type: ignore[arg-type]


def test_descriptors_above_the_limit_are_an_error_and_leave_nothing_open() -> None:
    import resource

    left, right = socket.socketpair()
    with left, right:
        files = [write_file([memoryview(b"x")]) for _ in range(3)]
        transport.send(left, memoryview(b"1"), files)
        before = open_descriptors()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Numbers are given from the lowest that is free: above the highest in use there are none.
        top = max(map(int, os.listdir("/proc/self/fd")))
        spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(top + 2 - before)]
        try:
            highest = max(*spare, top)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
            with pytest.raises(ProtocolError, match="ulimit"):
                transport._receive(right, memoryview(bytearray(1)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in spare:
                os.close(descriptor)
        gc.collect()
        assert open_descriptors() == before
