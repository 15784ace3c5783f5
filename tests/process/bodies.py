"""What children do in these tests. Imported by them, so nothing heavy, and no pytest."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

from prefect_gpu.child import channel

FOREVER_S = 600


def add(a: int, b: int = 0) -> int:
    return a + b


def blob(size_bytes: int) -> bytes:
    return bytes(size_bytes)


def length(data: bytes) -> int:
    return len(data)


class OddError(Exception):
    """Raised with one argument, rebuilt with another number of them."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left}-{right}")


class LockedError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


def fail(kind: str) -> None:
    if kind == "plain":
        raise KeyError("missing")
    if kind == "odd":
        raise OddError("left", "right")
    if kind == "locked":
        raise LockedError("it said this")
    if kind == "mute":
        raise MuteError
    sys.exit(7)


def locked_model() -> dict[str, Any]:
    class Model:
        def __init__(self) -> None:
            self.database = sqlite3.connect(":memory:")

    return {"score": 1.0, "model": Model()}


class Rude:
    def __reduce__(self) -> Any:
        raise SystemExit(5)


def rude() -> Rude:
    return Rude()


def leave(code: int) -> None:
    os._exit(code)


class KilledOnArrival:
    """An argument: the first process that reads it is killed by that, the next is not."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        if not os.path.exists(self.marker):
            open(self.marker, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)


def marker_of(argument: KilledOnArrival) -> str:
    return argument.marker


def die(signum: int) -> None:
    if signum == signal.SIGSEGV:
        ctypes.string_at(0)
    os.kill(os.getpid(), signum)
    time.sleep(FOREVER_S)


def hang_at_exit(how: str) -> str:
    if how == "thread":
        threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
    else:
        atexit.register(time.sleep, FOREVER_S)
    return "kept"


def touch(path: str) -> None:
    with open(path + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".part", path)


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def wait_long(path: str) -> None:
    touch(path)
    time.sleep(FOREVER_S)


def close_everything(then_live: bool) -> int:
    os.closerange(0, 256)
    if then_live:
        time.sleep(FOREVER_S)
    return 1


def close_and_reuse(path: str) -> int:
    """Close the channel, and have a file take its number."""
    own = channel.current_channel()
    assert own is not None
    number = own._socket.fileno()
    os.close(number)
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    if file != number:
        os.dup2(file, number)
    return 1


def write_raw(data: bytes, then_die: bool) -> None:
    own = channel.current_channel()
    assert own is not None
    own._socket.sendall(data)
    if then_die:
        os._exit(0)
    time.sleep(FOREVER_S)


def print_much(stream: str, size_bytes: int) -> int:
    target = getattr(sys, stream)
    line = "x" * 99 + "\n"
    for _ in range(size_bytes // (100 * 100)):
        target.write(line * 100)
    return size_bytes


def print_bytes(data: bytes) -> None:
    os.write(1, data)


def print_text(text: str) -> None:
    print(text)
    print(text, file=sys.stderr)


_SLEEPER = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"


def start_others(folder: str, then: str) -> list[int]:
    """Start one in the group, one in a session of its own, one as a daemon."""
    pids = []
    for name, options in (("group", {}), ("session", {"start_new_session": True})):
        process = subprocess.Popen(
            [sys.executable, "-c", _SLEEPER, f"{folder}/{name}"],
            **options,  # type: ignore[call-overload]
        )
        process.returncode = 0  # no warning that it is still running
        pids.append(process.pid)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        daemon = os.fork()
        if daemon:
            os.write(writing, str(daemon).encode())
            os._exit(0)
        touch(f"{folder}/daemon")
        time.sleep(FOREVER_S)
        os._exit(0)
    os.wait()
    pids.append(int(os.read(reading, 20)))
    while not all(os.path.exists(f"{folder}/{name}") for name in ("group", "session", "daemon")):
        time.sleep(0.01)
    with open(f"{folder}/pids", "w") as file:
        file.write(" ".join(map(str, pids)))
    if then == "die":
        os._exit(4)
    if then == "live":
        touch(f"{folder}/ready")
        time.sleep(FOREVER_S)
    return pids


def square(number: int) -> int:
    # A worker that logs as a task does must not garble its parent's stream.
    own = channel.current_channel()
    if own is not None:
        from prefect_gpu.processes.messages import LogEmitted

        own.send(LogEmitted({"from": "worker"}))
    print("worker", number)
    return number * number


def ask_in_worker(_: int) -> str:
    own = channel.current_channel()
    assert own is not None
    try:
        own.ask("anything")
    except RuntimeError as error:
        return str(error)
    return "answered"


def use_pool(method: str, function: Any = square) -> list[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context(method).Pool(2) as pool:
            return list(pool.map(function, [1, 2, 3]))


def fork_and_return() -> int:
    """A fork that goes on with the body's return: only the original's value counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return 1
    return 2


def look_around() -> dict[str, Any]:
    import test_process_marker

    return {
        "seen_at_import": test_process_marker.SEEN,
        "path": list(sys.path),
        "argv": list(sys.argv),
        "cwd": os.getcwd(),
        "flags": tuple(sys.flags),
        "dev": sys.flags.dev_mode,
        "warnoptions": list(sys.warnoptions),
        "stdin": sys.stdin.read(),
        "encoding": sys.stdout.encoding,
    }


def warn_and_leave() -> list[str]:
    return list(sys.warnoptions)


async def add_async(a: int, b: int) -> int:
    return a + b


def count(n: int) -> Any:
    yield from range(n)


def ask_parent() -> Any:
    own = channel.current_channel()
    assert own is not None
    return own.ask("sum", a=1, b=2)


def hold_channel_in_thread() -> str:
    """A daemon thread that is in a blocking read at exit."""
    own = channel.current_channel()
    assert own is not None
    threading.Thread(target=own.receive, daemon=True).start()
    return "done"


def environment_of_self() -> dict[str, str]:
    return dict(os.environ)


# Large values.


def numbers(count: int, writeable: bool = True) -> Any:
    import numpy as np

    array = np.arange(count, dtype=np.float64)
    array.flags.writeable = writeable
    return array


def numbers_when(count: int) -> Any:
    """Return an array once the parent says so, and stay until killed."""
    atexit.register(time.sleep, FOREVER_S)
    own = channel.current_channel()
    assert own is not None
    own.ask("go")
    return numbers(count)


def change(array: Any, by: float) -> tuple[float, bool, list[str]]:
    """Write to an argument; give what was its sum, whether it could be written, what holds it."""
    was = float(array.sum())
    writeable = bool(array.flags.writeable)
    if writeable:
        array += by
    with open("/proc/self/maps", encoding="ascii") as file:
        return was, writeable, [line.split()[4] for line in file if "memfd:prefect-gpu" in line]


def hold(array: Any, ready: str) -> None:
    touch(ready)
    time.sleep(FOREVER_S)


def tensors() -> Any:
    import torch

    base = torch.arange(600_000.0)
    tied = torch.nn.Linear(600, 600, bias=False)
    other = torch.nn.Linear(600, 600, bias=False)
    other.weight = tied.weight
    return {
        "views": (base, base[10:20]),
        "half": torch.ones(1 << 20, dtype=torch.bfloat16),
        "leaf": torch.ones(300_000, requires_grad=True),
        "modules": (tied, other),
        "t": torch.arange(600_000.0).reshape(600, 1000).t(),
    }


def fail_with(count: int) -> None:
    raise ValueError("too many", numbers(count))


def die_sending(count: int, after_header: bool) -> None:
    """Die between the message that announces a value, or its frame's first bytes, and its end."""
    from prefect_gpu import values
    from prefect_gpu.processes import messages
    from prefect_gpu.values import transport

    own = channel.current_channel()
    assert own is not None
    parcel = values.dumps(numbers(count), "return value", "result")
    own._socket.sendall(messages.encode(messages.BodyEnded(raised=False)))
    if after_header:
        transport.send(own._socket, parcel.frame[0], parcel.files)
    os.kill(os.getpid(), signal.SIGKILL)


def send_wrong_table(count: int) -> None:
    from dataclasses import replace

    from prefect_gpu import values
    from prefect_gpu.processes import messages

    own = channel.current_channel()
    assert own is not None
    parcel = values.dumps(numbers(count), "return value", "result")
    own.send_with_value(messages.BodyEnded(raised=False), replace(parcel, files=()))
    time.sleep(FOREVER_S)


def no_memory_for_files() -> Any:
    """Return an array where the system has no memory for its file."""
    from prefect_gpu.values import transport

    def refuse(*given: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    transport.os.pwrite = refuse  # type: ignore[attr-defined]
    return numbers(300_000)


def few_descriptors() -> Any:
    """Return an array where no descriptor is left for a file, nor for the folders that modules are looked for in."""
    import resource
    import tempfile

    array = numbers(300_000)
    # Not read yet.
    sys.path.insert(0, tempfile.mkdtemp())
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return array


class ImportedAtLoad:
    """Becomes a module as it is unpickled; not imported where it is made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


def path_with(module: Any) -> list[str]:
    """Return where modules are looked for; `module` was imported with the call."""
    return sys.path


#: A module of a user's that holds files in all the places where one keeps them.
#: Writes the module's name into a file as its objects, which hold each other, are taken apart.
TELLS_ITS_END = """
import os
class Last:
    def __init__(self):
        self.own = self
    def __del__(self, file={!r}, name=__name__, write=os.write, open=os.open):
        write(open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), (name + chr(10)).encode())
LAST = Last()
"""

HOLDS_FILES = """
import csv, io, os
HERE = os.path.dirname(__file__)
def opened(name):
    return open(os.path.join(HERE, name + ".txt"), "w")
class Log:
    out = opened("class attribute")
class Holder:
    def __init__(self):
        self.out = opened("instance")
PLAIN, DICT, HOLDER = opened("global"), {"out": opened("dict")}, Holder()
WRITER = csv.writer(opened("behind C"))
# A library's cache that holds a class of the module holds the module.
import typing
KEPT = typing.Optional[Log]
class Unhashable(type(io.TextIOWrapper)):
    __hash__ = None
class Odd(io.TextIOWrapper, metaclass=Unhashable):
    pass
ODD = [Odd(open(os.path.join(HERE, "odd.txt"), "wb"))]
CYCLE = {"out": opened("cycle")}
CYCLE["self"] = CYCLE
def write(text):
    global LATER
    LATER = opened("opened later")
    for out in (Log.out, PLAIN, DICT["out"], HOLDER.out, CYCLE["out"], ODD[0], LATER):
        out.write(text)
    WRITER.writerow([text])
"""


def write_to_held_files(module: Any, text: str) -> None:
    module.write(text)


def value_of(module: Any) -> Any:
    return module.VALUE


def umask_and_files() -> tuple[int, int]:
    import resource

    umask = os.umask(0)
    os.umask(umask)
    return umask, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def multiply_until(path: str) -> bool:
    """Keep PyTorch and the interpreter busy until a file is there."""
    import torch

    a = torch.ones(64, 64)
    while not os.path.exists(path):
        a = (a @ a).clamp(max=1)
    return bool(a.max() <= 1)


def hold_interpreter(begun: str, end: str) -> int:
    """Hold the interpreter's lock in one call, from when the first file can be opened until the second one can."""
    return ctypes.PyDLL(None).system(f"echo > {begun}; read line < {end}".encode())


#: Classes that `Registered` has registered.
REGISTERED: list[type] = []


class Registered:
    def __init_subclass__(cls) -> None:
        REGISTERED.append(cls)


class KeyedBase:
    key = ""

    def __init_subclass__(cls, *, key: str) -> None:
        cls.key = key
