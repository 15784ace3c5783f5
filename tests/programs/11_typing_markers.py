# Stands for libraries that read annotations (pydantic, beartype, LangChain's tools): markers of `typing` are compared by `is`.
import enum
import typing
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar

from checks import TAGS, check
from prefect import task
from typing_extensions import NotRequired, Required, TypedDict

T = TypeVar("T")
PLAIN = Any


class Options(TypedDict, total=False):
    name: Required[str]
    depth: int


class Row(TypedDict):
    key: str
    note: NotRequired[str]


class Pair(NamedTuple):
    left: int
    right: Optional["Pair"] = None


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Box(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item


def annotated(x: Annotated[int, "unit"], mode: Literal["a", "b"] = "a") -> Any: ...


@task(tags=TAGS)
def keys():
    return sorted(Options.__required_keys__), sorted(Row.__optional_keys__)


@task(tags=TAGS)
def markers():
    hints = typing.get_type_hints(annotated, include_extras=True)
    return (
        PLAIN is Any and hints["return"] is Any,
        typing.get_args(hints["mode"]),
        hints["x"].__metadata__,
        Box[int].__origin__ is Box,
        Box.__parameters__[0] is T,
    )


@task(tags=TAGS)
def values(pair, flags, box):
    return pair.left, pair._replace(left=5), flags & Flags.A is Flags.A, flags, type(box) is Box


if __name__ == "__main__":
    check(
        (keys, (), (["name"], ["note"])),
        (markers, (), (True, ("a", "b"), ("unit",), True, True)),
        (
            values,
            (Pair(1), Flags.A | Flags.B, Box[int](3)),
            (1, Pair(5), True, Flags.A | Flags.B, True),
        ),
    )
