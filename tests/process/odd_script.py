"""A script with definitions that are easily taken apart wrongly. Each `look` function returns what it finds of them."""

import ctypes
import dataclasses
import datetime
import enum
import functools
import multiprocessing
import pickle
import random
import struct
import sys
import threading
import typing
from concurrent.futures import ProcessPoolExecutor
from ctypes import pythonapi

import numpy
import torch


class Color(enum.Enum):
    RED = ("r", 1)
    BLUE = ("b", 2)
    ROT = ("r", 1)  # noqa: PIE796 - an alias

    def __init__(self, letter, number):
        self.letter, self.number = letter, number


Color.RED.added = "later"


class Labelled(int, enum.Enum):
    ONE = (1, "one")
    FIVE = (5, "five")

    def __new__(cls, number, label):
        made = int.__new__(cls, number)
        made._value_ = label
        made.label = label
        return made


class Text(str, enum.Enum):
    A = "a"
    ALSO = "a"  # noqa: PIE796 - an alias


class Pair(tuple, enum.Enum):
    LEFT = (1, 2)


class Day(datetime.date, enum.Enum):
    FIRST = (2026, 1, 2)


@dataclasses.dataclass
class Sized:
    size: int
    unit: str = "GiB"


class Device(Sized, enum.Enum):
    SMALL = 8, "GiB"


class Access(enum.Flag):
    NONE = 0
    READ = 1
    WRITE = 2
    BOTH = 3


class Mask(enum.IntFlag):
    NONE = 0
    LOW = 1
    HIGH = 8


ENUMS = Color, Labelled, Text, Pair, Day, Device, Access, Mask


def look_at_members():
    return [
        (
            kind.__name__,
            [*kind.__members__],
            [(each.name, each.value) for each in kind.__members__.values()],
            [kind(each.value) is each for each in kind],
            [pickle.loads(pickle.dumps(each)) is each for each in kind],
            [{k: v for k, v in vars(each).items() if not k.startswith("_")} for each in kind],
        )
        for kind in ENUMS
    ]


def look_at_data():
    access = Access.READ | Access.WRITE, Access(3), ~Access.READ, Mask(9)
    return Labelled.FIVE + 1, Text.A.upper(), (*Pair.LEFT, 3), Day.FIRST.year, access


def wrong_value():
    try:
        return Color(("x", 0))
    except ValueError as error:
        return str(error)


PLUGINS = []


class Plugin:
    def __init_subclass__(cls):
        PLUGINS.append(cls)


class First(Plugin):
    pass


class Second(Plugin):
    pass


class Keyed:
    def __init_subclass__(cls, *, key, **others):
        super().__init_subclass__(**others)
        cls.key = key


class WithKey(Keyed, key="k"):
    pass


def look_at_registered():
    class Third(Plugin):
        pass

    class Other(Keyed, key="other"):
        pass

    names = [each.__name__ for each in PLUGINS]
    del PLUGINS[2:]
    return names, WithKey.key, Other.key


NAMES = []


class Registered(type):
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        NAMES.append(name)

    def __setattr__(cls, name, value):
        raise AttributeError("cannot change")


class Layer(metaclass=Registered):
    width = 3


class Wide(Layer):
    pass


class Known(enum.EnumMeta):
    def __contains__(cls, value):
        return value in cls.__members__


class Mode(enum.Enum, metaclass=Known):
    FAST = 1


class Empty:
    __slots__ = ()


class Slotted(Empty):
    __slots__ = ("x",)


def look_at_metaclass_of_enum():
    return "FAST" in Mode, 1 in Mode, Mode(1) is Mode.FAST, hasattr(Slotted(), "__dict__")


def look_at_metaclass():
    class Deep(Wide):
        pass

    return Wide().width, type(Wide) is Registered, NAMES.pop(), NAMES


class Outer:
    class Config:
        class Deep:
            pass


def look_at_nested():
    deep = Outer.Config.Deep
    return deep.__qualname__, type(pickle.loads(pickle.dumps(deep()))) is deep


@functools.lru_cache
def cached(x):
    return x + 1


cached.weights = {"a": 1}


@functools.singledispatch
def dispatched(x):
    return "any"


@dispatched.register
def _(x: int):
    return "int"


dispatched.info = "said"


def look_at_wrappers():
    return cached(1), cached.weights, dispatched(1), dispatched("x"), dispatched.info


class Fixed(threading.local):
    x = 5


class Made(threading.local):
    def __init__(self):
        self.found = {}


fixed, made = Fixed(), Made()


def look_at_locals():
    there = []
    thread = threading.Thread(target=lambda: there.append((fixed.x, made.found)))
    thread.start()
    thread.join()
    return fixed.x, made.found, there


class Single:
    def __init__(self):
        self.value = 3

    def __reduce__(self):
        return "SINGLE"


SINGLE = Single()


class Bare:
    __slots__ = ()

    def __reduce__(self):
        return "BARE"


BARE = Bare()

if hasattr(typing, "TypeVarTuple"):
    Types = typing.TypeVarTuple("Types")
if hasattr(typing, "TypeAliasType"):
    exec("type Batch = list[int]")
    exec("type Json = dict[str, Json] | int")


def look_at_names():
    held = [SINGLE.value, *(pickle.loads(pickle.dumps(each)) is each for each in (SINGLE, BARE))]
    if hasattr(typing, "TypeVarTuple"):
        held += [Types.__name__, Types.__module__]
    if hasattr(typing, "TypeAliasType"):
        held += [Batch.__value__, Batch.__module__]  # noqa: F821 - made by `exec`
        held += [typing.get_args(Json.__value__)[0].__args__[1] is Json]  # noqa: F821
    return held


Options = typing.TypedDict("Options", {"batch-size": int}, total=False)
HEADER = struct.Struct("<IHH")
ENTROPY = random.SystemRandom()
VERSION, FLAGS = sys.version_info, sys.flags
LAYOUT = torch.channels_last
LIMITS = numpy.finfo("f4"), torch.finfo(torch.float16), torch.iinfo(torch.int8)


def look_at_constants():
    held = [VERSION is sys.version_info, FLAGS is sys.flags, LAYOUT is torch.channels_last]
    held += [Options.__total__, Options.__annotations__]
    return HEADER.size, ENTROPY.random() < 1, held, [float(limits.max) for limits in LIMITS]


class Node(ctypes.Structure):
    def after(self):
        return self.next.contents.value + ORIGIN.x


Pointer = ctypes.POINTER(Node)
Node._fields_ = [("value", ctypes.c_int), ("next", Pointer)]


class Header(ctypes.BigEndianStructure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("kind", ctypes.c_uint8), ("size", ctypes.c_uint32), ("low", ctypes.c_uint8, 4)]


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("nodes", ctypes.c_int * 2)]


class Tree(ctypes.Structure):
    pass


class Leaf(ctypes.Structure):
    _fields_ = [("tree", ctypes.POINTER(Tree)), ("weight", ctypes.c_double)]


class Branch(Leaf):
    _fields_ = [("length", ctypes.c_int)]


Tree._fields_ = [("first", Leaf), ("leaves", Leaf * 4), ("branch", ctypes.POINTER(Branch))]


class Context(ctypes.Structure):
    pass


class Callbacks(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Context))),
        ("x", ctypes.c_int),
    ]


Context._fields_ = [("size", ctypes.c_int), ("callbacks", Callbacks), ("k", ctypes.c_int)]


class Triple(ctypes.Array):
    _type_, _length_ = ctypes.c_int, 3


class Library(ctypes.CDLL):
    def __init__(self, version):
        super().__init__(None, use_errno=True)
        self.version = version


ORIGIN = Point(7, (1, 2))
LIBC = Library("2.36")
LIBC.distance = LIBC.llabs
LIBC.llabs.argtypes, LIBC.llabs.restype = [ctypes.c_longlong], ctypes.c_longlong
ABSOLUTE, LENGTH = LIBC.llabs, LIBC["strlen"]
LENGTH.argtypes, LENGTH.restype = [ctypes.c_char_p], ctypes.c_size_t
Compare = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.POINTER(ctypes.c_int)] * 2)


def look_at_c_types():
    node = Node(2, ctypes.pointer(Node(1)))
    numbers = (ctypes.c_int * 3)(3, 1, 2)
    LIBC.qsort(numbers, 3, 4, Compare(lambda a, b: a[0] - b[0]))
    held = [Pointer is ctypes.POINTER(Node), ABSOLUTE is LIBC.llabs, type(ORIGIN) is Point]
    held += [bytes(Header(1, 2, 3)), list(ORIGIN.nodes), list(numbers), node.after()]
    held += [ctypes.sizeof(Leaf), ctypes.sizeof(Branch), ctypes.sizeof(Tree), list(Triple(1, 2, 3))]
    held += [
        LIBC.version,
        LIBC.distance is LIBC.llabs,
        type(LIBC) is Library,
        pythonapi is ctypes.pythonapi,
    ]
    return held, ABSOLUTE(-(1 << 40)), LENGTH(b"abc"), LIBC.close(-1), ctypes.get_errno()


def look_at_spawned():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(cached, 3).result(timeout=120)


LOOKS = [
    look_at_members,
    look_at_data,
    wrong_value,
    look_at_registered,
    look_at_metaclass,
    look_at_metaclass_of_enum,
    look_at_nested,
    look_at_wrappers,
    look_at_locals,
    look_at_names,
    look_at_constants,
    look_at_c_types,
]


def look(functions):
    return [function() for function in functions]


def same(things):
    return things


def changed():
    SINGLE.value, dispatched.info = 4, "changed"
    dispatched.register(str, lambda x: "text")
    return SINGLE, dispatched
