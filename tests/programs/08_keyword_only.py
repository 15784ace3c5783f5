# Stands for structured configurations (hydra, simple-parsing, dacite) that ask a dataclass of the script for its fields.
import dataclasses
import inspect
from dataclasses import KW_ONLY, MISSING, InitVar, dataclass, field
from typing import ClassVar

from checks import TAGS, check
from prefect import task


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    _: KW_ONLY
    y: int = 0
    names: list = field(default_factory=list, compare=False)


@dataclass(kw_only=True)
class Run:
    count: ClassVar[int] = 0
    seed: InitVar[int]
    lr: float = field(default=0.1, metadata={"help": "rate"})
    steps: int = field(init=False)

    def __post_init__(self, seed):
        self.steps = seed * 2


@task(tags=TAGS)
def fields_of():
    return [
        (f.name, f.default is MISSING, f.default_factory is dataclasses.MISSING, f.kw_only)
        for f in (*dataclasses.fields(Point), *dataclasses.fields(Run))
    ]


@task(tags=TAGS)
def derived():
    @dataclass(kw_only=True)
    class Longer(Run):
        extra: str

    @dataclass
    class Other:
        a: int
        _: KW_ONLY
        b: int

    return (
        [*inspect.signature(Longer).parameters],
        Longer(seed=2, extra="e").steps,
        inspect.signature(Other).parameters["b"].kind is inspect.Parameter.KEYWORD_ONLY,
    )


@task(tags=TAGS)
def frozen(point):
    try:
        point.x = 3
    except dataclasses.FrozenInstanceError:
        return dataclasses.replace(point, y=9), Point.__slots__, isinstance(point, Point)


if __name__ == "__main__":
    check(
        (
            fields_of,
            (),
            [
                ("x", True, True, False),
                ("y", False, True, True),
                ("names", True, False, True),
                ("lr", False, True, True),
                ("steps", True, True, True),
            ],
        ),
        (derived, (), (["seed", "lr", "extra"], 4, True)),
        (frozen, (Point(1),), (Point(1, y=9), ("x", "y", "names"), True)),
    )
