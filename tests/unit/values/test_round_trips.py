"""Values and exceptions of random shape are equal after the way there and back; what is refused is named by a path.

Functions and classes by value are in `tests/process/test_round_trips.py`: they need a second interpreter.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_gpu import values
from prefect_gpu.errors import ResultError
from tests.process.random_scripts import describe

T = TypeVar("T")


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclasses.dataclass
class Point:
    x: Any
    names: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    x: Any


class Box(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    @property
    def twice(self) -> tuple[T, T]:
        return self.item, self.item


class Pair(NamedTuple):
    left: Any
    right: Any


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


UNSET = object()

LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-99, 99),
    st.text("aé\x00", max_size=3),
    st.binary(max_size=3),
    st.floats(allow_nan=False, width=16),
    st.sampled_from([Color.RED, Color.BLUE, UNSET, dataclasses.MISSING, Point, len, describe]),
)


def _nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.integers(0, 9), st.text("ab'", max_size=2)), parts, max_size=3
        ),
        st.builds(Point, parts, st.lists(parts, max_size=2)),
        st.builds(Fixed, parts),
        st.builds(Box, parts),
        st.builds(Pair, parts, parts),
        st.builds(Slots, parts),
    )


VALUES = st.recursive(LEAVES, _nested, max_leaves=12)


def _there_and_back(value: Any) -> Any:
    return values.loads(values.dumps(value, "argument", "it"), "argument")


@settings(derandomize=True)
@given(VALUES, st.booleans())
def test_a_value_of_any_shape_is_equal_after_the_way(value: Any, twice: bool) -> None:
    whole: list[Any] = [value, value if twice else None]
    # A list that is a part of itself.
    whole.append(whole)
    again = _there_and_back(whole)
    assert describe(again) == describe(whole)
    assert again[2] is again


def _frame() -> Any:
    return sys._getframe()


class Unsent:
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


@st.composite
def holders(draw: st.DrawFn) -> tuple[Any, Any]:
    """Return a value, and the one part of it that cannot be sent."""
    bad: Any = draw(st.sampled_from([Unsent, _frame, lambda: (n for n in ())]))()
    value = bad
    for _ in range(draw(st.integers(1, 5))):
        others = draw(st.lists(LEAVES, max_size=2))
        value = draw(
            st.sampled_from(
                [
                    [*others, value],
                    (value, *others),
                    {"a": others, "it's": value},
                    {(1, "k"): value},
                    Point(others, [value]),
                    Point(value),
                    Box(value),
                    Pair(others, value),
                    Fixed(value),
                    Slots(value),
                ]
            )
        )
    return value, bad


@settings(derandomize=True)
@given(holders())
def test_the_path_in_a_refusal_leads_to_the_part_that_cannot_be_sent(held: tuple[Any, Any]) -> None:
    value, bad = held
    with pytest.raises(ResultError) as refused:
        values.dumps(value, "argument", "value")
    assert eval(refused.value.where, {"value": value}) is bad
    assert type(bad).__qualname__ in refused.value.type_name
    assert refused.value.where in str(refused.value) and "inside the task" in str(refused.value)


class KeywordError(Exception):
    def __init__(self, *, code: Any) -> None:
        super().__init__(f"code {code!r}")
        self.code = code


class FieldsError(ValueError):
    def __init__(self, code: Any, more: Any = None) -> None:
        self.code = code
        self.more = more

    def __str__(self) -> str:
        return f"{self.code!r} of {type(self.more).__name__}"


class DiskError(OSError):
    def __init__(self, code: Any) -> None:
        super().__init__(28, "full", "/data")
        self.code = code


class SlotsError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        super().__init__("slots")
        self.code = code


class ReducedError(Exception):
    def __init__(self, code: Any, *, more: Any) -> None:
        super().__init__(code)
        self.code, self.more = code, more

    def __reduce__(self) -> Any:
        return _reduced, (self.code, self.more)


def _reduced(code: Any, more: Any) -> ReducedError:
    return ReducedError(code, more=more)


@st.composite
def errors(draw: st.DrawFn) -> BaseException:
    code = draw(LEAVES)
    error: BaseException = draw(
        st.sampled_from(
            [
                KeywordError(code=code),
                FieldsError(code, more=draw(VALUES)),
                DiskError(code),
                SlotsError(code),
                ReducedError(code, more=1),
                KeyError(code),
                UnicodeDecodeError("utf-8", b"a", 0, 1, "why"),
            ]
        )
    )
    if draw(st.booleans()):
        error.__context__ = draw(st.sampled_from([KeyError("first"), KeywordError(code=code)]))
        error.__suppress_context__ = draw(st.booleans())
    if draw(st.booleans()):
        error.__dict__["__notes__"] = draw(st.lists(st.text("ab", max_size=2), max_size=2))
    return error


def _raised(error: BaseException) -> BaseException:
    return values.loads(values.dump_exception(error), "exception")  # type: ignore[no-any-return]


@settings(derandomize=True)
@given(errors())
def test_an_exception_arrives_with_type_text_attributes_notes_and_context(
    error: BaseException,
) -> None:
    assert describe(_raised(error)) == describe(error)


@settings(derandomize=True)
@given(errors(), st.data())
def test_what_cannot_be_sent_of_an_exception_is_left_out_and_named(
    error: BaseException, data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(["job", "client"]), min_size=1, unique=True))
    for name in names:
        error.__dict__[name] = data.draw(st.sampled_from([Box, Point]))(Unsent())
    again = _raised(error)
    assert type(again) is type(error) and str(again) == str(error)
    assert getattr(again, "code", UNSET) == getattr(error, "code", UNSET)
    if isinstance(error, ReducedError):
        # By its own `__reduce__`, which takes neither.
        return
    notes = " ".join(again.__dict__.get("__notes__", ()))
    assert all(f"'{name}'" in notes and not hasattr(again, name) for name in names)


@settings(derandomize=True)
@given(st.recursive(errors(), lambda parts: st.lists(parts, min_size=1, max_size=3), max_leaves=5))
@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no exception groups")
def test_groups_of_exceptions_arrive_with_their_parts(parts: Any) -> None:
    group = _group(parts)
    again = _raised(group)
    assert [*map(describe, _leaves(again))] == [*map(describe, _leaves(group))]


def _group(parts: Any) -> Any:
    return ExceptionGroup("many", [*map(_group, parts)]) if isinstance(parts, list) else parts  # type: ignore[name-defined]  # noqa: F821


def _leaves(error: Any) -> Iterator[BaseException]:
    for part in getattr(error, "exceptions", ()):
        yield from _leaves(part)
    yield error
