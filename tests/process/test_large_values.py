"""Large values between processes: whole, writable, nobody else's, and gone when nobody holds them."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import ProtocolError, ResultError
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildRefused,
    LaunchSpec,
    ValueArrived,
)
from prefect_gpu.processes.messages import Asked, BodyEnded, Call
from prefect_gpu.values import ArgumentFiles, transport
from tests.process import bodies
from tests.process.rig import Rig, eventually, is_alive, open_descriptors, spec_of

np = pytest.importorskip("numpy")

pytestmark = pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")

#: Numbers of eight bytes: 32 MiB.
COUNT = 4 << 20
COUNT_BYTES = 8 * COUNT


#: References that were there before the test: values that other tests hold.
_earlier: set[str] = set()


def references() -> list[str]:
    """Descriptors and mappings of memory files that the test made, in this process and its descendants."""
    import psutil

    found = []
    me = psutil.Process()
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if "memfd:prefect-gpu" in os.readlink(f"/proc/{pid}/fd/{number}"):
                        found.append(f"{pid} fd {number}")
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:prefect-gpu" in line:
                    found.append(f"{pid} {line}")
    return [line for line in found if line not in _earlier]


@pytest.fixture(autouse=True)
def _nothing_left(rig: Rig) -> Iterator[None]:
    """Fails if a test leaves a memory file of its own."""
    gc.collect()
    _earlier.clear()
    _earlier.update(references())
    yield
    rig.launcher.close(DEADLOCK_S)
    for heard in rig.started:
        # What the rig remembers is what nobody else may hold.
        heard.messages[:] = [m for m in heard.messages if not isinstance(m, ValueArrived)]
    gc.collect()
    assert not references()


def mapped() -> list[str]:
    """Mappings of memory files of ours."""
    return [line for line in references() if " fd " not in line]


def shared_with(launch: Callable[[LaunchSpec], Any], *calls: tuple[Any, ...]) -> list[Any]:
    """Start several calls whose arguments share files, as the task runner does."""
    files = ArgumentFiles()
    started = []
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(files.share()) for _, *args in calls]
        for share, (function, *args) in zip(shares, calls, strict=True):
            call = values.dumps(Call(function, tuple(args), {}), "call", "call", pack=share.pack)
            spec = spec_of(function)
            started.append(launch(LaunchSpec(*_replaced(spec, call))))
        assert len(files) == 1
    return started


def _replaced(spec: LaunchSpec, call: Any) -> tuple[Any, ...]:
    return (
        *(spec.task_name, spec.environment, spec.prepare),
        *(call, spec.cwd, spec.argv, spec.sys_path),
    )


# As it was.


@pytest.mark.parametrize("writeable", [True, False])
def test_an_array_arrives_without_a_copy_as_it_was(rig: Rig, writeable: bool) -> None:
    rig.call(bodies.add, 1)
    before = open_descriptors()
    array = rig.call(bodies.numbers, COUNT, writeable)
    assert np.array_equal(array, bodies.numbers(COUNT))
    assert array.flags.writeable == writeable
    assert len(mapped()) == 1
    assert eventually(lambda: (open_descriptors() - before).total() <= 1), "one for a file at most"
    if writeable:
        array[0] = 5
        assert pickle.loads(pickle.dumps(array))[0] == 5
    part = array[-3:]
    del array
    gc.collect()
    assert part.tolist() == [COUNT - 3, COUNT - 2, COUNT - 1]
    assert references(), "as long as somebody holds a part of it"


def test_tensors_keep_what_they_share(rig: Rig) -> None:
    torch = pytest.importorskip("torch")
    back = rig.call(bodies.tensors)
    assert len(references()) >= 4
    base, part = back["views"]
    base[10] = 77
    assert part[0] == 77
    first, second = back["modules"]
    assert first.weight is second.weight and isinstance(first.weight, torch.nn.Parameter)
    assert back["half"].dtype == torch.bfloat16 and back["half"].sum() == 1 << 20
    assert back["leaf"].requires_grad and back["leaf"].is_leaf
    assert back["t"].stride() == (1, 1000) and back["t"][999, 599] == 599_999


def test_an_exception_brings_its_arrays(rig: Rig) -> None:
    with pytest.raises(ValueError, match="too many") as caught:
        rig.call(bodies.fail_with, COUNT)
    assert np.array_equal(caught.value.args[1], bodies.numbers(COUNT))


def test_many_parts_need_few_descriptors(rig: Rig) -> None:
    parts = [np.full(200_000, n) for n in range(300)]
    assert rig.call(bodies.length, parts) == 300


# Nobody else's.


def test_what_a_child_writes_reaches_neither_parent_nor_siblings(rig: Rig) -> None:
    array = np.arange(COUNT, dtype=np.float64)
    total = float(array.sum())
    children = shared_with(rig.launch, *[(bodies.change, array, n) for n in (1.0, 2.0, 3.0)])
    heard = [child.value() for child in children]
    assert [was for was, _, _ in heard] == [total] * 3
    assert all(writeable for _, writeable, _ in heard)
    inodes = [inode for _, _, found in heard for inode in found]
    assert len(inodes) == 3 and len(set(inodes)) == 1, "three mapped the one file"
    assert float(array.sum()) == total
    del children, heard


def test_an_argument_that_is_read_only_stays_so(rig: Rig) -> None:
    array = np.arange(COUNT, dtype=np.float64)
    array.flags.writeable = False
    was, writeable, mapped = rig.call(bodies.change, array, 1.0)
    assert (was, writeable, len(mapped)) == (float(array.sum()), False, 1)


# Nothing left.


def test_the_parent_keeps_nothing_of_a_call_that_its_child_has_read(
    rig: Rig, tmp_path: Path
) -> None:
    child = rig.start(bodies.hold, np.zeros(COUNT), str(tmp_path / "ready"))
    assert eventually((tmp_path / "ready").exists)
    assert not [line for line in references() if line.startswith(f"{os.getpid()} ")]
    child.handle.kill()
    child.exit()


def test_a_child_that_is_killed_with_its_argument_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    child = rig.start(bodies.hold, np.zeros(COUNT), str(tmp_path / "ready"))
    rig.started[0].pid  # noqa: B018 - waits
    assert eventually((tmp_path / "ready").exists)
    assert any(line.startswith(f"{child.pid} ") for line in references())
    os.kill(child.pid, signal.SIGKILL)
    assert child.exit().code == -signal.SIGKILL
    assert eventually(lambda: not references())


def test_a_child_that_is_killed_before_it_takes_its_argument_leaves_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    before: Counter[str] = Counter()
    for _ in range(5):
        # It never ends by itself.
        child = rig.start(bodies.hold, np.zeros(COUNT), str(tmp_path / "ready"))
        os.kill(child.pid, signal.SIGKILL)
        assert child.exit().code == -signal.SIGKILL
        before = before or open_descriptors()
    assert not references()
    assert not open_descriptors() - before


@pytest.mark.parametrize("after_header", [False, True])
def test_a_child_that_dies_while_it_sends_leaves_nothing(rig: Rig, after_header: bool) -> None:
    rig.call(bodies.add, 1)
    before = open_descriptors()
    child = rig.start(bodies.die_sending, COUNT, after_header)
    ended = child.exit()
    assert ended.code == -signal.SIGKILL
    assert ended.truncated == after_header
    assert child.of(ValueArrived) is None
    assert not references()
    assert not open_descriptors() - before


def test_a_value_that_is_dropped_leaves_nothing(rig: Rig) -> None:
    child = rig.start(bodies.numbers, COUNT)
    child.exit()
    assert len(mapped()) == 1
    child.messages.clear()
    assert not references()


def test_nothing_that_hears_a_child_is_kept_once_the_child_has_ended(rig: Rig) -> None:
    class Listener:
        """Stands for a task, which holds its value."""

        def __init__(self) -> None:
            self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def __call__(self, message: Any) -> None:
            self.heard.put(message)

    kept: list[weakref.ref[Listener]] = []
    # Which event of a child's end is the last one differs.
    for _ in range(20):
        listener = Listener()
        rig.launcher.start(spec_of(bodies.add, 1), listener)
        while not isinstance(listener.heard.get(timeout=DEADLOCK_S), ChildExited):
            pass
        kept.append(weakref.ref(listener))
        del listener
        assert eventually(lambda: kept[-1]() is None, 10.0)


def test_a_table_that_names_a_file_that_did_not_come_is_refused(rig: Rig) -> None:
    child = rig.start(bodies.send_wrong_table, COUNT)
    refused = child.until(ChildRefused)
    assert "memory files" in str(refused.error)
    assert child.exit().code == -signal.SIGKILL


_PARENT = """
import os, sys, time
import numpy as np
from tests.process import bodies
from tests.process.rig import Rig
rig = Rig()
array = np.zeros(int(sys.argv[1]))
children = [rig.start(bodies.hold, array, f"{sys.argv[2]}/{n}") for n in range(2)]
late = rig.start(bodies.numbers, int(sys.argv[1]))
print(os.getpid(), *[child.pid for child in children], late.pid, flush=True)
value = late.value()
bodies.touch(f"{sys.argv[2]}/value")
time.sleep(600)
"""


def memory_files(pids: Iterable[int]) -> set[int]:
    """Inodes of the memory files of this package that these processes have open or mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if "memfd:prefect-gpu" in os.readlink(path := f"/proc/{pid}/fd/{name}"):
                        found.add(os.stat(path).st_ino)
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:prefect-gpu" in line:
                    found.add(int(line.split()[4]))
    return found


def test_a_killed_parent_leaves_no_memory(tmp_path: Path) -> None:
    import psutil

    count = 16 << 20
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(count), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert eventually(lambda: all((tmp_path / name).exists() for name in ("0", "1", "value")))
        held = memory_files([process.pid, *pids])
        # Two files for two children (each rigged call is its own), and one result.
        assert len(held) == 3
        process.kill()
        assert eventually(lambda: not any(map(is_alive, pids)))
        # The kernel frees a memory file that no process has open or mapped.
        assert eventually(lambda: not held & memory_files(psutil.pids()))
    finally:
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


_FORKED = """
import contextlib, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import numpy as np
from prefect_gpu import values
from prefect_gpu.values import argument_files
from tests.process import bodies
from tests.process.rig import Heard, Rig, spec_of

def held():
    links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if
             os.path.lexists(f"/proc/self/fd/{n}")]
    return sum("memfd:prefect-gpu" in link for link in links)

array = np.arange(1 << 20)
calls = contextlib.ExitStack()
share = calls.enter_context(argument_files().share())
parcel = values.dumps(array, "argument", "x", pack=share.pack)
rig = Rig()
# Far more than is read before the fork: it waits in the launcher.
spec = spec_of(bodies.length, [bytes(500_000), array])
child = rig.launch(spec)
child.pid
assert held() >= 1, held()
pid = os.fork()
if pid == 0:
    os._exit(9 if held() == 0 and len(argument_files()) == 0 else held())
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
assert child.value() == 2
assert np.array_equal(values.loads(parcel, "argument"), array)
rig.launcher.close()
"""


def test_a_fork_of_the_parent_holds_no_file_open() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", _FORKED],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=DEADLOCK_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


# No memory, no descriptors.


def test_no_memory_for_a_value_is_one_clear_error(rig: Rig) -> None:
    with pytest.raises(ResultError, match="return value of a GPU task finds no memory"):
        rig.call(bodies.no_memory_for_files)
    assert rig.started[0].exit().code == 0
    assert rig.started[0].of(BodyEnded).raised


def test_a_value_for_which_no_descriptor_is_left_goes_through_the_socket(rig: Rig) -> None:
    array = rig.call(bodies.few_descriptors)
    assert np.array_equal(array, bodies.numbers(300_000))
    assert not references()


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("as many are on their way as may be"),
        OSError(errno.ENOBUFS, "none on their way"),
    ],
    ids=["files", "memory"],
)
def test_a_call_that_cannot_be_sent_is_an_error_and_nothing_hangs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    send = transport.send

    def refuse(channel: Any, data: memoryview, files: Any = ()) -> int:
        if files:
            raise type(error)(*error.args)
        return send(channel, data)

    monkeypatch.setattr(transport, "send", refuse)
    child = rig.start(bodies.length, np.zeros(COUNT))
    assert "on their way" in str(child.until(ChildRefused).error)
    assert child.exit().code == -signal.SIGKILL
    assert "could not be sent its call" in child.exit().killed_because
    assert not references()


def test_descriptors_run_out_in_the_parent_and_the_task_alone_fails(rig: Rig) -> None:
    import resource

    child = rig.start(bodies.numbers_when, COUNT)
    asked: Asked = child.until(Asked)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]
    try:
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        child.handle.answer(asked.answer(lambda **_: 0))
        refused = child.until(ChildRefused)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    assert "ulimit -n" in str(refused.error)
    # It has sent its value, and may end by itself before it is killed.
    assert "sent what cannot be received" in child.exit().killed_because
    assert rig.call(bodies.add, 1) == 1, "others go on"
