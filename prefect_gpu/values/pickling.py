"""Pickling of users' values.

Classes keep their identity, so `except MyError` and `isinstance` hold in the flow. Values on a device travel as host
copies. Large buffers (NumPy's, pandas', storages of PyTorch) stay outside the stream (pickle protocol 5). Values that
cannot be pickled are refused with their type and path. `transport` sends packed values.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_gpu.errors import NO_ROOM, REBUILT, ResultError, short_text
from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.units import format_bytes
from prefect_gpu.values import made_anew, transport
from prefect_gpu.values.by_value import ByValuePickler, Key, arrivals
from prefect_gpu.values.exceptions import reduce_exception, slots_of
from prefect_gpu.values.importable import find_in_module
from prefect_gpu.values.transport import PackedValue, ReceivedValue

#: A function that returns a pickle reduction for a value, or `NotImplemented`.
Reducer = Callable[[Any], Any]

#: Types whose objects no framework reduces.
_NOT_REDUCED = (type, types.FunctionType, types.ModuleType)

#: Packs a stream, in pieces, and the buffers beside it, as `transport.pack` does.
Pack = Callable[[Sequence[memoryview], Sequence[memoryview]], PackedValue]

#: Bytes from which a buffer is not copied into the stream: the pickler writes it separately (`FRAME_SIZE_TARGET`).
_BESIDE_BYTES = 64 * 1024

#: Most parts of the path to a value that cannot be pickled.
_LONGEST_PATH = 8

#: Ways to pickle an exception, tried in this order.
_WHOLE, _BY_PARTS, _TRIMMED = "whole", "by parts", "trimmed"

#: Values that return to the flow's process.
_TO_FLOW = ("return value", "exception", "transaction")


class _Output:
    """Receives a pickler's stream in pieces, and the buffers beside it, uncopied."""

    def __init__(self) -> None:
        # Joined pieces would hold a large `bytes` twice, and more while they grow.
        self.stream: list[memoryview] = []
        self.buffers: list[memoryview] = []

    def write(self, data: bytes | bytearray) -> None:
        """Take the next piece of the stream: large objects as they are."""
        self.stream.append(memoryview(data))

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer unless it is small; `True`: the buffer goes into the stream."""
        view = buffer.raw()
        if view.nbytes < _BESIDE_BYTES:
            return True
        self.buffers.append(view)
        return False


class ValuePickler(ByValuePickler):
    """Pickles values of a task: functions and classes as `ByValuePickler`, device memory as host copies.

    `reducers` are of the frameworks in use, `error_way` says how exceptions are pickled. `problems` are known to the
    pickler that tries a part with this one.
    """

    def __init__(
        self,
        output: _Output,
        reducers: tuple[Reducer, ...] = (),
        error_way: str = _WHOLE,
        problems: dict[int, tuple[Any, str | None]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(output, buffer_callback=output.take_buffer, **options)
        self._reducers = reducers
        self._error_way = error_way
        self._options = options
        #: By id: tried values and their problems. Values are kept alive, so that their ids stay theirs.
        self._problems = {} if problems is None else problems

    def reducer_override(self, obj: Any) -> Any:
        """See `ByValuePickler.reducer_override`."""
        kind = type(obj)
        # `__class__` would load a lazily loaded module.
        if not issubclass(kind, _NOT_REDUCED):
            for reduce in self._reducers:
                reduction = reduce(obj)
                if reduction is not NotImplemented:
                    return reduction
            if issubclass(kind, BaseException):
                find_problem = self._find_problem if self._error_way == _TRIMMED else None
                return reduce_exception(obj, find_problem, self._error_way == _WHOLE)
        return super().reducer_override(obj)

    def _find_problem(self, value: Any) -> str | None:
        # Each value once: else the time doubles, or worse, with each error in a chain of errors.
        if id(value) not in self._problems:
            # In a cycle of errors, an error that is being tried counts as sent.
            self._problems[id(value)] = value, None
            self._problems[id(value)] = value, self._try(value)
        return self._problems[id(value)][1]

    def _try(self, value: Any) -> str | None:
        try:
            ValuePickler(
                _Output(), self._reducers, self._error_way, self._problems, **self._options
            ).dump(value)
        except Exception as error:
            return f"{_type_name(value)} cannot be pickled ({short_text(error)})"
        return None


def load_call(data: PackedValue | ReceivedValue) -> Any:
    """Return the received call of a child, or raise `ResultError`: the child cannot import a part of it.

    Its classes that the child cannot import return to the flow by their id alone. By value they would replace all
    attributes of the flow's class: class variables by the child's, methods by copies with other globals.
    """
    try:
        with arrivals():
            return _load(data)
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise ResultError("call", "it", REBUILT, short_text(error)) from error


def attribute(module: str, name: str) -> Apart:
    """Return an attribute of a module for a child that lacks it: by value, even if it is importable.

    Raises `AttributeError` if there is no such attribute, and `ResultError` if it cannot be pickled.
    """
    value = find_in_module(module, name)
    if value is None and name not in (look_at(module, "__dict__") or {}):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return Apart.of(value, "function", f"{module}.{name}", lacking=frozenset({(module, name)}))


@dataclass(frozen=True, slots=True)
class Apart:
    """A pickled value inside another value. It is unpickled on request."""

    stream: bytes
    #: Buffers beside the stream.
    buffers: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, what: str, name: str, lacking: frozenset[Key] = frozenset()) -> Apart:
        """Pickle a value, or raise `ResultError`. See `check`."""
        output = check(value, what, name, lacking=lacking)
        return cls(b"".join(output.stream), tuple(map(pickle.PickleBuffer, output.buffers)))

    def load(self) -> Any:
        """Unpickle the value, or raise any error. Its classes of the parent count as received with the call."""
        with arrivals():
            return pickle.loads(self.stream, buffers=self.buffers)


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
        what: "return value", "exception", "argument", "function" or "transaction", for the error.
        name: Name of the value in the error: "result".
        reducers: Reducers of the frameworks in use.
        pack: Packs the value.

    Raises:
        ResultError: A part of the value cannot be pickled (the error names its type and the path to it), or there is no
            memory for it.
    """
    refuse_shared(value, what, name)
    output = check(value, what, name, reducers)
    try:
        return pack(output.stream, output.buffers)
    except (OSError, MemoryError) as error:
        size = format_bytes(sum(part.nbytes for part in (*output.stream, *output.buffers)))
        raise ResultError(what, name, NO_ROOM, f"{size}: {short_text(error)}") from error


def refuse_shared(value: object, what: str, name: str) -> None:
    """Raise `ResultError` if a value is itself a lock or the like: a new lock would guard nothing."""
    if made_anew.is_shared(value):
        use = f"multiprocessing.Manager().{type(value).__name__.strip('_').capitalize()}()"
        reason = f"it works between the threads of one process; use {use}"
        raise ResultError(what, name, _type_name(value), reason)


def check(
    value: Any,
    what: str,
    name: str,
    reducers: tuple[Reducer, ...] = (),
    depth: int = _LONGEST_PATH,
    error_way: str = _WHOLE,
    lacking: frozenset[Key] = frozenset(),
) -> _Output:
    """Pickle a value without packing it. See `dumps`, and `ByValuePickler` for `lacking`.

    `depth` bounds the search for the part that cannot be pickled. `error_way` says how exceptions are pickled.
    """
    to_flow = what in _TO_FLOW

    def pickled(with_hints: bool) -> _Output:
        output = _Output()
        ValuePickler(
            output,
            reducers,
            error_way,
            to_flow=to_flow,
            by_name=what == "transaction",
            lacking=lacking,
            with_hints=with_hints,
        ).dump(value)
        return output

    try:
        try:
            return pickled(with_hints=True)
        except MemoryError:
            raise
        except Exception:
            if to_flow:
                raise
            # Names in annotations are rarely needed, and may be the part that cannot be pickled.
            return pickled(with_hints=False)
    except MemoryError as error:
        raise ResultError(what, name, NO_ROOM, short_text(error)) from error
    except Exception as error:
        # The smallest part that cannot be pickled is named.
        for suffix, part in _parts(value) if depth else ():
            check(part, what, name + suffix, reducers, depth - 1, error_way)
        raise ResultError(what, name, _type_name(value), short_text(error)) from error


def loads(data: PackedValue | ReceivedValue, what: str) -> Any:
    """Unpickle a value from the other process over the received buffers, or raise `ResultError`."""
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

    Attributes that cannot be pickled are left out and named in a note. If the class cannot be pickled, or the exception
    cannot be shown, a `ResultError` with its type and text replaces the exception.
    """
    problem: Exception | None = None
    for way in (_WHOLE, _BY_PARTS, _TRIMMED):
        try:
            output = check(error, "exception", "exception", reducers, error_way=way)
            data = transport.pack(output.stream, output.buffers)
            _check_exception(data, error, exactly=way == _WHOLE)
            return data
        except Exception as failed:
            problem = problem or failed
    if not isinstance(problem, ResultError):
        assert problem is not None
        problem = ResultError("exception", "exception", _type_name(error), short_text(problem))
    where = problem.where
    if where != "exception":
        where += f" of {_type_name(error)}"
    reason = f"{problem.reason}; it said: {short_text(error)}"
    return dumps(ResultError("exception", where, problem.type_name, reason), "exception", "it")


def _check_exception(data: PackedValue, error: BaseException, exactly: bool) -> None:
    """Raise if an exception arrives with another type or text, or cannot be used by Prefect."""
    try:
        again = _load(data)
        if type(again) is not type(error):
            raise TypeError(f"it comes back as a {_type_name(again)}")
        # Prefect reads the text of an error, and context managers of Python set its traceback.
        text = str(again)
        again.__traceback__ = again.__cause__ = None
    except Exception as problem:
        reason = f"{_type_name(error)} fails when it is used ({short_text(problem)})"
        raise ResultError("exception", "exception", REBUILT, reason) from problem
    if exactly and text != str(error):
        raise ValueError("its text comes back changed")


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
        for key, part in {**getattr(value, "__dict__", {}), **slots_of(value)}.items():
            yield f".{key}", part
