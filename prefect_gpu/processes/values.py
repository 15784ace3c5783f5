"""Values on their way between processes: pickled so that they arrive, or refused by name.

Functions and classes that the other side cannot import (defined in `__main__`, a notebook, a script
that Prefect loaded by path) travel by value; classes keep their identity, so `except MyError` and
`isinstance` hold in the flow. Values on a device travel as host copies. Large buffers (NumPy's,
pandas', storages of PyTorch) are left where they are, beside the stream (pickle protocol 5); how
both travel is `transport`'s business, moving them is the launcher's and the child's.
"""

from __future__ import annotations

import importlib.machinery
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import cloudpickle

from prefect_gpu.errors import NO_ROOM, REBUILT, ResultError
from prefect_gpu.processes.messages import Body
from prefect_gpu.processes.transport import Contents, Parcel, Transport, default_transport
from prefect_gpu.units import format_bytes

#: A function that may give a pickle reduction for a value, or `NotImplemented`.
Reducer = Callable[[Any], Any]

#: A value, pickled, in any of its forms.
Packed: TypeAlias = bytes | memoryview | Body | Parcel | Contents

#: Bytes from which a buffer is not copied into the stream. From here on the pickler writes every
#: object apart anyway (`FRAME_SIZE_TARGET`).
_BESIDE_BYTES = 64 * 1024

#: Deepest path that is looked for when something cannot be pickled.
_DEEPEST = 8

#: By module name: the identity of the module that was asked about, and the answer. Prefect loads
#: script after script under one name.
_importable: dict[str, tuple[int, bool]] = {}

#: In a child: classes that came with the call, and exist in the parent.
_from_parent: weakref.WeakSet[type] = weakref.WeakSet()


def is_importable(module_name: str) -> bool:
    """Tell whether a fresh interpreter with the same `sys.path` would import this very module.

    The module is one of `sys.modules`. One that was loaded by path, or made by hand, is not.
    """
    identity = id(sys.modules.get(module_name))
    known = _importable.get(module_name)
    if known is None or known[0] != identity:
        known = _importable[module_name] = identity, _find(module_name)
    return known[1]


def _find(module_name: str) -> bool:
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__":
        return False
    parent_name, _, _ = module_name.rpartition(".")
    path = None
    if parent_name:
        parent = sys.modules.get(parent_name)
        path = getattr(parent, "__path__", None)
        if path is None or not is_importable(parent_name):
            return False
    file = getattr(module, "__file__", None)
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        try:
            spec: importlib.machinery.ModuleSpec | None = find_spec(module_name, path)
        except Exception:  # a finder of somebody else's that does not know the name
            continue
        if spec is not None:
            return file is None or not spec.has_location or _same_file(spec.origin, file)
    return False


def _same_file(origin: str | None, file: str) -> bool:
    if origin is None:
        return False
    return origin == file or os.path.realpath(origin) == os.path.realpath(file)


class _Pieces:
    """Where a pickler writes: the pieces of its stream and the buffers beside it, uncopied."""

    def __init__(self) -> None:
        # A buffer that joins them would hold a large `bytes` twice, and more while it grows.
        self.stream: list[memoryview] = []
        self.buffers: list[memoryview] = []

    def write(self, data: bytes | bytearray) -> None:
        """Take the next piece of the stream. The pickler gives large objects as they are."""
        self.stream.append(memoryview(data))

    def take_beside(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer, unless it is small; `True`: it goes into the stream."""
        view = buffer.raw()
        if view.nbytes < _BESIDE_BYTES:
            return True
        self.buffers.append(view)
        return False


class _Nothing(_Pieces):
    """Where a pickler writes to see whether it can."""

    def write(self, data: bytes | bytearray) -> None:
        """Forget it."""

    def take_beside(self, buffer: pickle.PickleBuffer) -> bool:
        """Forget it."""
        return False


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped base
    """Cloudpickle that sends what cannot be imported by value, and device memory as host copies."""

    def __init__(self, pieces: _Pieces, reducers: tuple[Reducer, ...] = ()) -> None:
        super().__init__(pieces, protocol=5, buffer_callback=pieces.take_beside)
        self._reducers = reducers

    def reducer_override(self, obj: Any) -> Any:
        """Decide how one object is pickled; `NotImplemented` leaves it to pickle."""
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            if isinstance(obj, type) and obj in _from_parent:
                return _own_class, (_tracker_ids()[obj],)
            attribute = "__name__" if isinstance(obj, types.ModuleType) else "__module__"
            name = getattr(obj, attribute, None)
            if isinstance(name, str) and name in sys.modules and name != "__main__":
                if not is_importable(name):
                    _register_by_value(sys.modules[name])
        else:
            for reduce in self._reducers:
                reduction = reduce(obj)
                if reduction is not NotImplemented:
                    return reduction
        return super().reducer_override(obj)


def _register_by_value(module: types.ModuleType) -> None:
    # Cloudpickle takes only a module that `sys.modules` has under the module's own name.
    if sys.modules.get(module.__name__) is module:
        cloudpickle.register_pickle_by_value(module)


def _tracker_ids() -> Mapping[type, str]:
    # Cloudpickle keeps one id for each class that it sent by value, so that two copies of it that
    # arrive are one class.
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS  # type: ignore[no-any-return]


def _own_class(tracker_id: str) -> type:
    """Give the class of this process that was once sent under `tracker_id`."""
    found: type = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker_id]
    return found


def load_call(data: Packed) -> Any:
    """In a child: unpickle the call.

    The classes in it that the child cannot import are the parent's own from then on: they go back by
    name alone. Sent by value, as cloudpickle would, they would set every attribute of the parent's
    class anew: its class variables to the child's, its methods to copies with other globals.
    """
    call = _load(data)
    _from_parent.update(_tracker_ids())
    return call


def dumps(
    value: Any,
    what: str,
    name: str,
    reducers: tuple[Reducer, ...] = (),
    transport: Transport | None = None,
) -> Parcel:
    """Pickle and pack a value for the other side.

    Args:
        value: Anything.
        what: "return value", "exception", "argument" or "function", for the error.
        name: How the error names the value itself: "result".
        reducers: Of the frameworks in use.
        transport: What packs it; `None`: the best of this system.

    Raises:
        ResultError: Something in it cannot be pickled (it names the type and the path to it), or
            there is no memory for it.
    """
    pieces = _Pieces()
    try:
        ValuePickler(pieces, reducers).dump(value)
    except MemoryError as error:
        raise ResultError(what, name, NO_ROOM, _short(error)) from error
    except Exception as error:
        where, culprit = _find_culprit(value, name, reducers)
        raise ResultError(what, where, _type_name(culprit), _short(error)) from error
    try:
        return (transport or default_transport()).pack(pieces.stream, pieces.buffers)
    except (OSError, MemoryError) as error:
        size_bytes = sum(part.nbytes for part in (*pieces.stream, *pieces.buffers))
        reason = f"{format_bytes(size_bytes)}: {_short(error)}"
        raise ResultError(what, name, NO_ROOM, reason) from error


def check(value: Any, what: str, name: str, reducers: tuple[Reducer, ...] = ()) -> None:
    """See that a value can be pickled, without making anything of it.

    Raises:
        ResultError: As `dumps`.
    """
    try:
        ValuePickler(_Nothing(), reducers).dump(value)
    except Exception as error:
        where, culprit = _find_culprit(value, name, reducers)
        raise ResultError(what, where, _type_name(culprit), _short(error)) from error


def loads(data: Packed, what: str) -> Any:
    """Unpickle a value from the other side, in place: its buffers are those that came.

    Raises:
        ResultError: It cannot be rebuilt here.
    """
    try:
        return _load(data)
    except Exception as error:
        raise ResultError(what, "it", REBUILT, _short(error)) from error


def _load(data: Packed) -> Any:
    if isinstance(data, Parcel):
        data = data.open()
    if isinstance(data, Contents):
        return pickle.loads(data.stream, buffers=data.buffers)
    return pickle.loads(data)


def dump_exception(error: BaseException, reducers: tuple[Reducer, ...] = ()) -> tuple[Parcel, bool]:
    """Pickle an exception so that it certainly arrives.

    Returns:
        It, packed, and `True`; or a `ResultError` that names its type and says what it
        said, and `False`, where it cannot be pickled or would not unpickle.
    """
    try:
        data = dumps(error, "exception", "exception", reducers)
        # Many classes pickle and then fail to unpickle: their constructor takes other arguments
        # than it passed on.
        again = _load(data)
        if not isinstance(again, BaseException):
            raise TypeError(f"it comes back as a {_type_name(again)}")
    except Exception as problem:
        reason = problem.reason if isinstance(problem, ResultError) else _short(problem)
        where = problem.where if isinstance(problem, ResultError) else "exception"
        type_name = problem.type_name if isinstance(problem, ResultError) else _type_name(error)
        if where != "exception":
            where += f" of {_type_name(error)}"
        said = f"{reason}; it said: {_short(error)}"
        return dumps(ResultError("exception", where, type_name, said), "exception", "it"), False
    return data, True


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _short(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, whose text cannot be had"
    return text if len(text) <= 500 else text[:500] + "…"


def _pickles(value: Any, reducers: tuple[Reducer, ...]) -> bool:
    try:
        ValuePickler(_Nothing(), reducers).dump(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    else:
        if isinstance(value, BaseException):
            for index, part in enumerate(value.args):
                yield f".args[{index}]", part
        for key, part in getattr(value, "__dict__", {}).items():
            yield f".{key}", part


def _find_culprit(value: Any, name: str, reducers: tuple[Reducer, ...]) -> tuple[str, Any]:
    """Follow the first part that does not pickle, down to the smallest."""
    for _ in range(_DEEPEST):
        for suffix, part in _parts(value):
            if not _pickles(part, reducers):
                name, value = name + suffix, part
                break
        else:
            break
    return name, value
