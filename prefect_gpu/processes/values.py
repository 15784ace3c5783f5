"""Values of users on their way between processes: how they are pickled, and shared by several calls.

Functions and classes that the other side cannot import (defined in `__main__`, a notebook, a script
that Prefect loaded by path) travel by value. Classes keep their identity, so `except MyError` and
`isinstance` hold in the flow. Values on a device travel as host copies. Large buffers (NumPy's,
pandas', storages of PyTorch) are left where they are, beside the stream (pickle protocol 5). What
cannot be pickled is refused with its type and the path to it.

A large argument that several GPU tasks take is written to a memory file once (`ArgumentFiles`). Every
call of a task has a `Share` from when it begins to wait for a device to its end. A file stays for as
long as a share that used it is open. The files that were used last also stay while a call waits, since
it may take the same argument: tasks that run one after another write it once.

How packed values travel is in `transport`; when they are sent is up to the launcher and the child.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from prefect_gpu.errors import NO_ROOM, REBUILT, ResultError
from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes import transport
from prefect_gpu.processes.messages import Call, short_text
from prefect_gpu.processes.transport import MemoryFile, PackedValue, ReceivedValue, WriteFile
from prefect_gpu.units import format_bytes

#: A function that returns a pickle reduction for a value, or `NotImplemented`.
Reducer = Callable[[Any], Any]

#: Packs a stream, in pieces, and the buffers beside it, as `transport.pack` does.
Pack = Callable[[Sequence[memoryview], Sequence[memoryview]], PackedValue]

#: Bytes from which a buffer is not copied into the stream. From this size on the pickler writes every
#: object separately anyway (`FRAME_SIZE_TARGET`).
_BESIDE_BYTES = 64 * 1024

#: What cloudpickle 3.1.3 and later write in place of the file name of code.
_NO_FILE = "<dynamic-code>"

#: Length of the path to what cannot be pickled, at most.
_LONGEST_PATH = 8

#: By module name: the module's identity, and the answer. The identity, since Prefect loads script after
#: script under one name.
_importable: dict[str, tuple[int, bool]] = {}

#: In a child: classes that came with the call and exist in the parent.
_from_parent: weakref.WeakSet[type] = weakref.WeakSet()


def is_importable(module_name: str) -> bool:
    """Return whether a fresh interpreter with the same `sys.path` would import this very module.

    The module is one of `sys.modules`. A module that was loaded by path, or made by hand, is not
    importable. A module that loads itself when it is first used (`importlib.util.LazyLoader`) stays
    unloaded. Where the folders of `sys.path` cannot be read, as without a free descriptor, each module that an import
    has made counts as importable.
    """
    identity = id(sys.modules.get(module_name))
    known = _importable.get(module_name)
    if known is None or known[0] != identity:
        try:
            known = _importable[module_name] = identity, _find(module_name)
        except OSError:
            return look_at(module_name, "__spec__") is not None
    return known[1]


def travels_by_value(obj: type | types.FunctionType) -> bool:
    """Return whether a class or function is sent by value: a fresh interpreter could not import its top module."""
    name = getattr(obj, "__module__", None)
    # By the top module: no finder knows the modules that a library makes by hand in its own package.
    return isinstance(name, str) and not is_importable(name.partition(".")[0])


def _find(module_name: str) -> bool:
    """Return what `is_importable` returns.

    Raises:
        OSError: A folder could not be read.
    """
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__":
        return False
    parent_name, _, _ = module_name.rpartition(".")
    path = None
    if parent_name:
        path = look_at(parent_name, "__path__")
        if path is None or not is_importable(parent_name):
            return False
    file: str | None = look_at(module_name, "__file__")
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        try:
            spec: importlib.machinery.ModuleSpec | None = find_spec(module_name, path)
        except OSError:
            raise
        except Exception:  # a finder of another library that does not know the name
            continue
        if spec is not None:
            if file is None or not spec.has_location:
                return True
            return os.path.realpath(spec.origin or "") == os.path.realpath(file)
    return False


class _Output:
    """Receives a pickler's output: the pieces of its stream and the buffers beside it, uncopied."""

    def __init__(self) -> None:
        # Joined pieces would hold a large `bytes` twice, and more while they grow.
        self.stream: list[memoryview] = []
        self.buffers: list[memoryview] = []

    def write(self, data: bytes | bytearray) -> None:
        """Take the next piece of the stream. The pickler passes large objects as they are."""
        self.stream.append(memoryview(data))

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer, unless it is small; `True`: it goes into the stream."""
        view = buffer.raw()
        if view.nbytes < _BESIDE_BYTES:
            return True
        self.buffers.append(view)
        return False


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped base
    """Pickles by value what cannot be imported. Code keeps the name of its file, for tracebacks."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how one object is pickled; `NotImplemented` leaves it to pickle."""
        # Modules first: asking whether one is a class reads its `__class__`, which loads a lazy one.
        if isinstance(obj, types.ModuleType):
            name = object.__getattribute__(obj, "__dict__").get("__name__")
        elif isinstance(obj, (type, types.FunctionType)):
            name = getattr(obj, "__module__", None)
        elif isinstance(obj, types.CodeType):
            make, parts = self.dispatch_table[types.CodeType](obj)
            return make, tuple(
                obj.co_filename if isinstance(part, str) and part == _NO_FILE else part
                for part in parts
            )
        else:
            return super().reducer_override(obj)
        if isinstance(name, str) and name in sys.modules and name != "__main__":
            module = sys.modules[name]
            if not is_importable(name):
                # Cloudpickle accepts only a module that `sys.modules` has under the module's own name.
                if sys.modules.get(module.__name__) is module:
                    cloudpickle.register_pickle_by_value(module)
            elif obj is module and not cloudpickle.list_registry_pickle_by_value():
                # Cloudpickle would read its attributes.
                return cloudpickle.cloudpickle.subimport, (name,)
        return super().reducer_override(obj)


class ValuePickler(ByValuePickler):
    """Pickles by value what cannot be imported, and device memory as host copies."""

    def __init__(self, output: _Output, reducers: tuple[Reducer, ...] = ()) -> None:
        super().__init__(output, protocol=5, buffer_callback=output.take_buffer)
        self._reducers = reducers

    def reducer_override(self, obj: Any) -> Any:
        """See `ByValuePickler.reducer_override`."""
        # Modules first, as there.
        if isinstance(obj, types.ModuleType):
            return super().reducer_override(obj)
        if isinstance(obj, type):
            if obj in _from_parent:
                # Cloudpickle gives each class that it sends by value an id, so that two copies become one
                # class where they arrive: here, the parent's own.
                tracker_id = cloudpickle.cloudpickle._get_or_create_tracker_id(obj)
                return cloudpickle.cloudpickle._lookup_class_or_track, (tracker_id, None)
        elif not isinstance(obj, types.FunctionType):
            for reduce in self._reducers:
                reduction = reduce(obj)
                if reduction is not NotImplemented:
                    return reduction
        return super().reducer_override(obj)


def load_call(data: PackedValue | ReceivedValue) -> Call:
    """Return the call that a child received.

    Classes in it that the child cannot import exist in the parent: they go back by name alone. Sent by
    value, as cloudpickle would, they would set every attribute of the parent's class anew: its class
    variables to the child's, its methods to copies with other globals.

    Raises:
        ResultError: The child cannot import a function or an argument.
    """
    try:
        call: Call = _load(data)
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise ResultError("call", "it", REBUILT, short_text(error)) from error
    _from_parent.update(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
    return call


@dataclass(frozen=True, slots=True)
class Apart:
    """A value inside another one that is unpickled only where it is asked for."""

    stream: bytes
    #: Beside the stream.
    buffers: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, what: str, name: str) -> Apart:
        """Pickle a value.

        Args:
            value: Anything.
            what: As in `dumps`.
            name: As in `dumps`.

        Raises:
            ResultError: As in `dumps`.
        """
        output = check(value, what, name)
        return cls(b"".join(output.stream), tuple(map(pickle.PickleBuffer, output.buffers)))

    def load(self) -> Any:
        """Unpickle it. What it has of the parent's classes counts as if it had come with the call.

        Raises:
            Exception: It cannot be rebuilt here.
        """
        known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
        # The body may have pickled classes of its own by now.
        before = set(known)
        value = pickle.loads(self.stream, buffers=self.buffers)
        _from_parent.update(set(known) - before)
        return value


def dumps(
    value: Any,
    what: str,
    name: str,
    reducers: tuple[Reducer, ...] = (),
    pack: Pack = transport.pack,
) -> PackedValue:
    """Pickle and pack a value for the other process.

    Args:
        value: Anything.
        what: "return value", "exception", "argument" or "function", for the error.
        name: How the error calls the value itself: "result".
        reducers: Of the frameworks in use.
        pack: Packs it.

    Raises:
        ResultError: A part of it cannot be pickled (the error names its type and the path to it), or
            there is no memory for it.
    """
    output = check(value, what, name, reducers)
    try:
        return pack(output.stream, output.buffers)
    except (OSError, MemoryError) as error:
        size_bytes = sum(part.nbytes for part in (*output.stream, *output.buffers))
        reason = f"{format_bytes(size_bytes)}: {short_text(error)}"
        raise ResultError(what, name, NO_ROOM, reason) from error


def check(
    value: Any,
    what: str,
    name: str,
    reducers: tuple[Reducer, ...] = (),
    depth: int = _LONGEST_PATH,
) -> _Output:
    """Pickle a value without packing it; `depth` is how far to look for what cannot be pickled.

    Raises:
        ResultError: As in `dumps`.
    """
    output = _Output()
    try:
        ValuePickler(output, reducers).dump(value)
        return output
    except MemoryError as error:
        raise ResultError(what, name, NO_ROOM, short_text(error)) from error
    except Exception as error:
        # The smallest part that cannot be pickled is named.
        for suffix, part in _parts(value) if depth else ():
            check(part, what, name + suffix, reducers, depth - 1)
        raise ResultError(what, name, _type_name(value), short_text(error)) from error


def loads(data: PackedValue | ReceivedValue, what: str) -> Any:
    """Unpickle a value from the other process, in place: its buffers are those that were received.

    Raises:
        ResultError: It cannot be rebuilt here.
    """
    try:
        return _load(data)
    except Exception as error:
        raise ResultError(what, "it", REBUILT, short_text(error)) from error


def _load(data: PackedValue | ReceivedValue) -> Any:
    if isinstance(data, PackedValue):
        data = data.open()
    return pickle.loads(data.stream, buffers=data.buffers)


def dump_exception(error: BaseException, reducers: tuple[Reducer, ...] = ()) -> PackedValue:
    """Pickle an exception so that it can be unpickled in any case.

    Returns:
        The exception, packed; where it cannot be pickled, or could not be unpickled or raised again, a
        `ResultError` that names its type and contains its text.
    """
    try:
        data = dumps(error, "exception", "exception", reducers)
        # Many classes can be pickled but not unpickled: their constructor takes other arguments than
        # it passed on.
        again = _load(data)
        if not isinstance(again, BaseException):
            raise TypeError(f"it comes back as a {_type_name(again)}")
        try:
            # Prefect reads the text of an error, and context managers of Python set its traceback.
            str(again)
            again.__traceback__ = again.__cause__ = None
        except Exception as problem:
            reason = f"{_type_name(error)} fails when it is used ({short_text(problem)})"
            raise ResultError("exception", "exception", REBUILT, reason) from problem
    except Exception as problem:
        if not isinstance(problem, ResultError):
            problem = ResultError("exception", "exception", _type_name(error), short_text(problem))
        where = problem.where
        if where != "exception":
            where += f" of {_type_name(error)}"
        reason = f"{problem.reason}; it said: {short_text(error)}"
        return dumps(ResultError("exception", where, problem.type_name, reason), "exception", "it")
    return data


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _shown(key: object) -> str:
    try:
        return repr(key)
    except Exception:
        return f"a {_type_name(key)}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{_shown(key)}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    else:
        if isinstance(value, BaseException):
            for index, part in enumerate(value.args):
                yield f".args[{index}]", part
        for key, part in getattr(value, "__dict__", {}).items():
            yield f".{key}", part


# Large arguments that several calls take.


class ArgumentFiles:
    """The memory files of one process's arguments. Safe to use from several threads.

    Args:
        write: Makes a file.
    """

    def __init__(self, write: WriteFile = transport.write_file) -> None:
        self._write = write
        self._lock = threading.Lock()
        #: The calls that have not packed their arguments: each may need any file.
        self._waiting: set[Share] = set()
        #: The files of the call that used one last, as long as another one waits.
        self._last: tuple[_Entry, ...] = ()
        #: By address and length in bytes of what each file holds; kept alive by the calls that use it.
        self._entries: weakref.WeakValueDictionary[tuple[tuple[int, int], ...], _Entry] = (
            weakref.WeakValueDictionary()
        )

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Begin a call, which ends with the `with` block."""
        share = Share(self)
        with self._lock:
            self._waiting.add(share)
        try:
            yield share
        finally:
            self.take_packed(share)
            share.entries.clear()

    def file_for(self, share: Share, parts: Sequence[memoryview]) -> MemoryFile:
        """Return a file that holds `parts`: that of another share, or a new one.

        The bytes of an existing file are compared first: the flow may have written to its array in
        between.

        Raises:
            OSError: As in `write_file`.
        """
        addresses = [_address_of(part) for part in parts]
        if None in addresses:
            return self._write(parts)
        key = tuple((at or 0, part.nbytes) for at, part in zip(addresses, parts, strict=True))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry()
            share.entries.add(entry)
            dropped, self._last = self._last, tuple(share.entries)
        # Gigabytes may go back to the system here: not under the lock.
        del dropped
        # Other calls with the same argument wait here until it is written, instead of writing it too.
        with entry.lock:
            if entry.file is None or not entry.file.holds(parts):
                # The old one is closed once it has reached the calls that it was written for.
                entry.file = None
                entry.file = self._write(parts)
            return entry.file

    def take_packed(self, share: Share) -> None:
        """Note that a call has packed its arguments, or ended without."""
        with self._lock:
            self._waiting.discard(share)
            dropped = self._last
            if not self._waiting:
                self._last = ()
        del dropped

    def __len__(self) -> int:
        """Return the number of files that are kept."""
        return sum(entry.file is not None for entry in tuple(self._entries.values()))


class _Entry:
    """A file; the lock is held while it is written."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: MemoryFile | None = None


class Share:
    """The part of one call in the files."""

    def __init__(self, files: ArgumentFiles) -> None:
        self._files = files
        #: What it uses, until the call ends.
        self.entries: set[_Entry] = set()

    def pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> PackedValue:
        """Pack the call's arguments, as `transport.pack` does."""
        try:
            return transport.pack(stream, buffers, lambda parts: self._files.file_for(self, parts))
        finally:
            self._files.take_packed(self)


def _address_of(view: memoryview) -> int | None:
    """Return the address of flat memory; `None` where NumPy, which alone says it, is not in use."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    return int(numpy.frombuffer(view, dtype="u1").__array_interface__["data"][0])


def argument_files() -> ArgumentFiles:
    """Return the files of this Python process; a fork of it begins without any."""
    return PROCESS_RESOURCES.get(ArgumentFiles, ArgumentFiles)
