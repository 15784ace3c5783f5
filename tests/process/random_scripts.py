"""Random scripts with classes, functions, exceptions and values, and a description of a value that is equal in each process.

What a script defines is made of text, so that another process cannot import it. `describe` runs in both processes.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from random import Random
from string import Template
from types import FunctionType
from typing import Any

HEAD = """
import dataclasses, enum, functools, threading, typing
from dataclasses import KW_ONLY, MISSING, dataclass, field

T = typing.TypeVar("T")
UNSET = object()
lock = threading.RLock()

def is_unset(x=UNSET):
    return x is UNSET
"""

#: `name` is new, `call` the name of an earlier function.
_FUNCTIONS = [
    """
K_of_${name} = $digit
def ${name}(x, y=$digit, *, z: int = 1):
    return K_of_${name} * ${call}(x) + y + z
""",
    """
def make_of_${name}(n):
    def ${name}(x):
        return n + ${call}(x)
    return ${name}
${name} = make_of_${name}($digit)
""",
    """
def make_of_${name}():
    def even(x):
        return True if x == 0 else odd(abs(x) - 1)
    def odd(x):
        return False if x == 0 else even(abs(x) - 1)
    return lambda x: ${call}(even(int(x) % 50))
${name} = make_of_${name}()
""",
    """
@functools.lru_cache
def ${name}(x):
    with lock:
        return ${call}(x) - $digit
""",
    """
def ${name}(x):
    return $digit if x < 1 else ${name}(min(x, 9) - 1) + ${call}(1)
""",
    """
${name} = lambda x, n=$digit: n * ${call}(x)
""",
]

#: `base` is an earlier class.
_TYPES = {
    "plain": """
class ${name}(${base}):
    limit = $digit
    def __init__(self, x):
        self.x = x
        self.lock = ${lock}
    @property
    def scaled(self):
        return ${call}(self.limit)
    @functools.cached_property
    def kept(self):
        return [self.limit]
    @classmethod
    def made(cls):
        return cls.limit
    @staticmethod
    def fixed():
        return $digit
    class Inner:
        depth = $digit
""",
    "dataclass": """
@dataclass(${options})
class ${name}:
    a: int
    b: 'typing.Optional[${name}]' = None
    c: list = field(default_factory=list, metadata={'n': $digit})
    _: KW_ONLY
    d: float = $digit
    def sum(self):
        return self.a + self.d
""",
    "slots": """
class ${name}:
    __slots__ = ('a', 'b')
    def __init__(self, a):
        self.a = a
""",
    "enum": """
class ${name}(${enum}):
    ONE = enum.auto()
    TWO = enum.auto()
    @property
    def other(self):
        return ${name}.TWO if self is ${name}.ONE else ${name}.ONE
""",
    "flag": """
class ${name}(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()
""",
    "tuple": """
class ${name}(typing.NamedTuple):
    a: int
    b: list = [$digit]
""",
    "generic": """
class ${name}(typing.Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item
""",
}

_ERRORS = [
    """
class ${name}(${base}):
    def __init__(self, *, code):
        super().__init__(f'code {code}')
        self.code = code
""",
    """
class ${name}(${base}):
    def __init__(self, code, more=None):
        super().__init__()
        self.code = code
        self.more = more
    def __str__(self):
        return f'{self.code} of {self.more}'
""",
    """
class ${name}(${base}):
    def __init__(self, code):
        super().__init__(code, 'text')
        self.seen = [code]
""",
]

_RAISES = """
def raise_${name}():
    raise ${name}(code=${code})
def raise_${name}_within():
    try:
        {}['key']
    except KeyError:
        raise ${name}(code=${code})
def raise_${name}_from():
    try:
        {}['key']
    except KeyError as error:
        raise ${name}(code=${code}) from error
"""


def make_script(random: Random, size: int = 1) -> str:
    """Return the text of a script that ends with `VALUES`, `OBJECTS`, `ERRORS`, `FUNCTIONS` and `CLASSES`."""
    maker = _Maker(random)
    for number in range(size * random.randint(2, 5)):
        maker.function(f"f{number}")
    for number in range(size * random.randint(2, 5)):
        maker.type(f"C{number}")
    for number in range(size * random.randint(1, 3)):
        maker.error(f"E{number}")
    values = [maker.value(random.randint(1, 3)) for _ in range(4 * size)]
    maker.lines += [
        "loop = [1]",
        "loop.append({'again': loop, 'values': []})",
        f"shared = {maker.value(2)}",
        f"VALUES = [{', '.join(values)}, [shared, shared], loop]",
        f"OBJECTS = [{', '.join(maker.objects)}]",
        f"ERRORS = [{', '.join(maker.errors)}]",
        f"FUNCTIONS = [{', '.join(maker.functions)}, is_unset]",
        f"CLASSES = [{', '.join(maker.types)}]",
    ]
    return HEAD + "\n".join(maker.lines) + "\n"


class _Maker:
    """Writes definitions that refer to earlier ones."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.lines: list[str] = []
        self.functions: list[str] = []
        self.types: list[str] = []
        #: Expressions that make an object of each class.
        self.objects: list[str] = []
        self.errors: list[str] = []
        #: Classes that can be derived from.
        self.plain = ["object"]

    def function(self, name: str) -> None:
        text = self.random.choice(_FUNCTIONS)
        call = self.random.choice([*self.functions, "int"])
        self.write(text, name=name, call=call, digit=self.random.randint(1, 9))
        self.functions.append(name)

    def write(self, text: str, **names: object) -> None:
        self.lines.append(Template(text).substitute(names))

    def type(self, name: str) -> None:
        random = self.random
        kind = random.choice(
            [
                "plain",
                "plain",
                "dataclass",
                "dataclass",
                "slots",
                "enum",
                "flag",
                "tuple",
                "generic",
            ]
        )
        base = random.choice(self.plain)
        options = [f"{key}=True" for key in ("frozen", "slots", "kw_only") if random.random() < 0.4]
        self.write(
            _TYPES[kind],
            name=name,
            base=base,
            options=", ".join(options),
            enum=random.choice(["enum.Enum", "enum.IntEnum"]),
            call=random.choice(self.functions),
            lock=random.choice(["threading.Lock()", "None"]),
            digit=random.randint(1, 9),
        )
        part = self.value(1)
        self.objects.append(
            {
                "dataclass": f"{name}(a=1, c={part}, b={name}(a=2))",
                "enum": f"{name}.ONE",
                "flag": f"{name}.ONE | {name}.TWO",
                "tuple": f"{name}(3)",
                "generic": f"{name}[int]({part})",
            }.get(kind, f"{name}({part})")
        )
        if kind == "plain":
            self.plain.append(name)
        self.types.append(name)

    def error(self, name: str) -> None:
        base = self.random.choice(["Exception", "ValueError", "OSError", "LookupError"])
        self.write(self.random.choice(_ERRORS), name=name, base=base)
        raises = self.random.choice(["", "_within", "_from"])
        self.write(_RAISES, name=name, code=self.random.randint(1, 9))
        self.errors.append(f"raise_{name}{raises}")

    def value(self, depth: int) -> str:
        """Return an expression."""
        random = self.random
        leaves = [
            str(random.randint(-9, 9)),
            repr(random.choice(["", "a", "é"])),
            "None",
            "True",
            "b'ab'",
            "1.5",
            "UNSET",
            "MISSING",
            *random.choices([*self.objects, "2"], k=3),
            *random.choices([*self.functions, "len"], k=2),
            *random.choices([*self.types, "int"], k=2),
        ]
        if depth < 1 or random.random() < 0.2:
            return random.choice(leaves)
        parts = [self.value(depth - 1) for _ in range(random.randint(0, 3))]
        return random.choice(
            [
                f"[{', '.join(parts)}]",
                f"({''.join(part + ',' for part in parts)})",
                f"{{{', '.join(f'{n}: {part}' for n, part in enumerate(parts))}}}",
                f"{{{', '.join(f'{chr(97 + n)!r}: {part}' for n, part in enumerate(parts))}}}",
                f"frozenset({{{random.randint(1, 9)}, 'x'}})",
                f"functools.partial({random.choice(self.functions)}, {random.randint(1, 9)})",
            ]
        )


def describe(value: Any) -> Any:
    """Return what a value is, in plain lists and texts: types, attributes, order, and which parts are one object."""
    return list(_Describer().of(value))


class _Describer:
    def __init__(self) -> None:
        #: By id: the number and the object, which keeps its id.
        self.seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if value is None or kind in (int, float, str, bytes, bool, complex):
            yield repr(value)
            return
        if isinstance(value, enum.Enum):
            yield str(value)
            return
        if id(value) in self.seen:
            yield self.seen[id(value)][0]
            return
        self.seen[id(value)] = len(self.seen), value
        if isinstance(value, type):
            yield from self.of_class(value)
        elif isinstance(value, FunctionType) or hasattr(value, "cache_parameters"):
            yield from self.of_function(value)
        elif isinstance(value, dict):
            for key, part in value.items():
                yield list(self.of(key)), list(self.of(part))
        elif isinstance(value, (set, frozenset)):
            yield sorted(map(repr, value))
        elif isinstance(value, (list, tuple)):
            for part in value:
                yield list(self.of(part))
        else:
            yield from self.of_object(value)

    def of_object(self, value: Any) -> Iterator[Any]:
        attributes = dict(getattr(value, "__dict__", {}))
        if isinstance(value, BaseException):
            notes = list(attributes.pop("__notes__", ()))
            yield list(self.of(value.args)), str(value), notes, value.__suppress_context__
            yield list(self.of(value.__context__))
        for kind in type(value).__mro__:
            for name in vars(kind).get("__slots__", ()):
                if hasattr(value, name):
                    attributes[name] = getattr(value, name)
        for name in ("func", "args", "keywords", "name", "scaled", "sum", "made"):
            if hasattr(value, name):
                found = getattr(value, name)
                attributes[f"its {name}"] = found() if name in ("sum", "made") else found
        for name, part in sorted(attributes.items()):
            yield name, list(self.of(part))

    def of_class(self, kind: type) -> Iterator[Any]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if not kind.__module__.startswith(("fuzzed", "__main__")):
            return
        yield [base.__qualname__ for base in kind.__mro__]
        yield sorted(name for name in dir(kind) if not name.startswith("_"))
        if dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                yield (
                    field.name,
                    field.default is dataclasses.MISSING,
                    field.kw_only,
                    dict(field.metadata),
                )
                yield field.default_factory is dataclasses.MISSING, field.init
        if issubclass(kind, enum.Enum):
            yield [(str(each), each.value, str(getattr(each, "other", ""))) for each in kind]

    def of_function(self, function: Any) -> Iterator[Any]:
        yield function.__qualname__, function.__module__
        if not function.__module__.startswith(("fuzzed", "__main__")):
            return
        if function.__name__ == "is_unset":
            yield function()
        else:
            yield str(inspect.signature(function)), [function(n) for n in (0, 1, 7)]


# What a child does with them.


def describe_there(samples: list[Any], makers: list[Any]) -> tuple[list[Any], list[Any], Any, Any]:
    """Return descriptions of values and of the errors that functions raise, and both themselves."""
    errors = [raised_by(make) for make in makers]
    return (
        [describe(each) for each in samples],
        [describe(each) for each in errors],
        samples,
        errors,
    )


def raised_by(make: Any) -> BaseException:
    try:
        make()
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("it returns")
