"""Pickling of users' values.

Classes keep their identity, so `except MyError` and `isinstance` work in the flow. Values on a device travel as host
copies. Large buffers (NumPy's, pandas', storages of PyTorch) stay outside the pickle stream (protocol 5). Values that
cannot be pickled are refused with their type and path. `transport` sends packed values.
"""

from __future__ import annotations

import contextlib
import copyreg
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
from prefect_gpu.values.importable import find_in_module
from prefect_gpu.values.transport import PackedValue, ReceivedValue

#: A function that returns a pickle reduction for a value, or `NotImplemented`.
Reducer = Callable[[Any], Any]

#: Returns the reason why a value cannot be pickled; `None`: pickling works.
Problem = Callable[[Any], "str | None"]

#: Types whose objects no framework reduces.
_NOT_REDUCED = (type, types.FunctionType, types.ModuleType)

#: Packs a pickle stream, in pieces, and the buffers outside the stream, as `transport.pack` does.
Pack = Callable[[Sequence[memoryview], Sequence[memoryview]], PackedValue]

#: Bytes from which a buffer stays outside the stream: pickle's own limit for separate writes (`FRAME_SIZE_TARGET`).
_BESIDE_BYTES = 64 * 1024

#: Most parts of the path to a value that cannot be pickled.
_LONGEST_PATH = 8

#: Most characters of the `repr` that replaces an argument that cannot be pickled.
_LONGEST_REPR = 200

#: Ways to pickle an exception, in order of trial: by its own `__reduce__`, by attributes, by picklable attributes.
_WHOLE, _BY_PARTS, _TRIMMED = "whole", "by parts", "trimmed"

#: Kinds of values that go to the flow's process.
_TO_FLOW = ("return value", "exception", "transaction")


class _Output:
    """Collects a pickler's stream in pieces, and the buffers outside the stream, uncopied."""

    def __init__(self) -> None:
        # Joined pieces would hold a large `bytes` twice, and more while they grow.
        self.stream: list[memoryview] = []
        self.buffers: list[memoryview] = []

    def write(self, data: bytes | bytearray) -> None:
        self.stream.append(memoryview(data))

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Collect a large buffer; return `True` for a small buffer, which goes into the stream."""
        view = buffer.raw()
        if view.nbytes < _BESIDE_BYTES:
            return True
        self.buffers.append(view)
        return False


class ValuePickler(ByValuePickler):
    """Pickles values of a task: functions and classes as `ByValuePickler`, device memory as host copies.

    `reducers` are of the frameworks in use, `error_way` says how exceptions are pickled. `problems` are the `_problems`
    of the pickler that tries a part of its value with this one.
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
        #: Tried values and their problems, by id. The values are kept alive, so that no id is used again.
        self._problems = {} if problems is None else problems

    def reducer_override(self, obj: Any) -> Any:
        """Return the pickle reduction of an object; `NotImplemented`: pickle's default is right."""
        kind = type(obj)
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
    """Unpickle a task's call in the child; raise `ResultError` if the child cannot import a part of the call.

    Classes that arrive by value return to the flow by their id. By value they would replace all attributes of the
    flow's class: class variables by the child's, methods by copies with other globals.
    """
    try:
        with arrivals():
            return _load(data)
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise ResultError("call", "it", REBUILT, short_text(error)) from error


def attribute(module: str, name: str) -> Apart:
    """Pickle a module's attribute by value, for a child that lacks it; raise `AttributeError` or `ResultError`."""
    value = find_in_module(module, name)
    if value is None and name not in (look_at(module, "__dict__") or {}):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return Apart.of(value, "function", f"{module}.{name}", lacking=frozenset({(module, name)}))


@dataclass(frozen=True, slots=True)
class Apart:
    """A pickled value inside another value; `load` unpickles it."""

    stream: bytes
    #: Buffers outside the stream.
    buffers: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, what: str, name: str, lacking: frozenset[Key] = frozenset()) -> Apart:
        """Pickle a value, or raise `ResultError`. Arguments are those of `check`."""
        output = check(value, what, name, lacking=lacking)
        return cls(b"".join(output.stream), tuple(map(pickle.PickleBuffer, output.buffers)))

    def load(self) -> Any:
        """Unpickle the value; any error may be raised. Its classes count as classes of the flow's process."""
        with arrivals():
            return pickle.loads(self.stream, buffers=self.buffers)


def dumps(
    value: Any,
    what: str,
    name: str,
    reducers: tuple[Reducer, ...] = (),
    pack: Pack = transport.pack,
) -> PackedValue:
    """Pickle and pack a value for the other process, with the reducers of the frameworks in use.

    `what` is "return value", "exception", "argument", "function" or "transaction". `name` is the value's name in the
    error, such as "result".

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
    """Raise `ResultError` if a value itself is a lock, a queue or the like: its copy would synchronise nothing."""
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
    """Return the pickle of a value, not packed; raise `ResultError` as `dumps` does.

    `depth` bounds the search for the part that cannot be pickled. `error_way` says how exceptions are pickled. For
    `lacking` see `ByValuePickler`.
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
        # Variables named in annotations are rarely needed, and may be the part that cannot be pickled. The first pickle
        # and its error are gone by now.
        return pickled(with_hints=False)
    except MemoryError as error:
        raise ResultError(what, name, NO_ROOM, short_text(error)) from error
    except Exception as error:
        for suffix, part in _parts(value) if depth else ():
            check(part, what, name + suffix, reducers, depth - 1, error_way)
        raise ResultError(what, name, _type_name(value), short_text(error)) from error


def loads(data: PackedValue | ReceivedValue, what: str) -> Any:
    """Unpickle a value of the other process, in place in the received buffers, or raise `ResultError`."""
    try:
        return _load(data)
    except Exception as error:
        raise ResultError(what, "it", REBUILT, short_text(error)) from error


def _load(data: PackedValue | ReceivedValue) -> Any:
    if isinstance(data, PackedValue):
        data = data.open()
    return pickle.loads(data.stream, buffers=data.buffers)


def dump_exception(error: BaseException, reducers: tuple[Reducer, ...] = ()) -> PackedValue:
    """Pickle and pack an exception in a form that the other process can always unpickle.

    Attributes that cannot be pickled are left out and named in a note. If the class cannot be pickled, or the text of
    the copy fails, a `ResultError` with the exception's type and text replaces the exception.
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
    """Raise an error unless `data` unpickles to an exception of `error`'s type (`exactly`: and text) for Prefect."""
    try:
        again = _load(data)
        if type(again) is not type(error):
            raise TypeError(f"it comes back as a {_type_name(again)}")
        # Prefect reads an error's text, and Python's context managers set its traceback.
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


# Exceptions keep type, text, attributes, notes, cause and context. The constructor of an exception is not called again:
# many constructors take other arguments than they pass to `Exception`.


def reduce_exception(error: BaseException, find_problem: Problem | None, own_way: bool) -> Any:
    """Return a pickle reduction of an exception.

    `find_problem` finds values that cannot be pickled, which a note or their `repr` replaces; `None`: all values are
    sent. `own_way`: a `__reduce__` of the exception's own class is used.
    """
    kind = type(error)
    arguments, attributes = error.args, dict(error.__dict__)
    if own_way and not _is_of_python(kind):
        reduced: Any = error.__reduce_ex__(5)
        make, first, *rest = reduced
        made: Any = (make, tuple(first))
        attributes = {**attributes, **rest[0]} if rest and isinstance(rest[0], dict) else attributes
    else:
        # The built-in class knows all parts: an `OSError` has more than its `args`.
        of_python: Any = _built_in(kind).__reduce__(error)
        _, initial, *rest = of_python
        if find_problem is not None:
            arguments = tuple(_sendable(each, find_problem) for each in arguments)
            initial = tuple(_sendable(each, find_problem) for each in initial)
        made = _make_exception, (kind, tuple(initial), arguments)
        attributes = {**(rest[0] if rest else {}), **attributes}
    attributes.update(slots_of(error))
    links: dict[str, Any] = {"cause": error.__cause__, "context": error.__context__}
    if find_problem is not None:
        attributes, links = _without_problems(attributes, links, find_problem)
    links["suppress"] = error.__suppress_context__
    return (*made, (attributes, links), None, None, _finish_exception)


def _built_in(kind: type[BaseException]) -> type[BaseException]:
    """Return the built-in class that a class of exceptions derives from."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _is_of_python(kind: type[BaseException]) -> bool:
    """Return whether a class of exceptions has no pickle methods other than those of a built-in class."""
    for name in ("__reduce_ex__", "__reduce__"):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if owner.__module__ != "builtins":
            return False
    return True


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has in `__slots__`."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _sendable(value: Any, find_problem: Problem) -> Any:
    if find_problem(value) is None:
        return value
    try:
        return repr(value)[:_LONGEST_REPR]
    except Exception:
        return f"a {type(value).__qualname__}"


def _without_problems(
    attributes: Mapping[str, Any], links: Mapping[str, Any], find_problem: Problem
) -> tuple[dict[str, Any], dict[str, Any]]:
    kept, notes = {}, list(attributes.get("__notes__", ()))
    note = "{} was left out on the way from the GPU task: {}"
    for name, value in attributes.items():
        problem = find_problem(value)
        if problem is None:
            kept[name] = value
        else:
            notes.append(note.format(f"Attribute {name!r}", problem))
    sent = dict(links)
    for name, value in links.items():
        problem = None if value is None else find_problem(value)
        if problem is not None:
            sent[name] = None
            notes.append(note.format(f"The {name} of this error", problem))
    if notes:
        kept["__notes__"] = notes
    return kept, sent


def _make_exception(
    kind: type[BaseException], initial: tuple[Any, ...], arguments: tuple[Any, ...]
) -> BaseException:
    base = _built_in(kind)
    try:
        made = kind.__new__(kind, *initial)
    except TypeError:
        # The class's own `__new__` takes other arguments.
        made = base.__new__(kind, *initial)
    if base.__init__ is not BaseException.__init__:
        with contextlib.suppress(Exception):
            base.__init__(made, *initial)
    made.args = arguments
    return made


def _finish_exception(error: BaseException, state: Any) -> None:
    attributes, links = state
    for name, value in attributes.items():
        # A property without a setter is computed from other attributes.
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)
    error.__cause__, error.__context__ = links["cause"], links["context"]
    error.__suppress_context__ = links["suppress"]
