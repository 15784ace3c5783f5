"""The known frameworks, detection of the frameworks that a function uses, and the host memory of frameworks.

Detection reads code objects, globals and class bases. It imports and runs nothing, so it can be wrong (an import by
name, a helper in another package). Contexts and standbys depend on it; caps hold for every imported framework.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import glob
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from prefect_gpu.frameworks.adapter import FrameworkAdapter, FrameworkPolicy, look_at
from prefect_gpu.frameworks.cupy_adapter import CupyAdapter
from prefect_gpu.frameworks.jax_adapter import JaxAdapter
from prefect_gpu.frameworks.onnxruntime_adapter import OnnxRuntimeAdapter
from prefect_gpu.frameworks.tensorflow_adapter import TensorFlowAdapter
from prefect_gpu.frameworks.torch_adapter import TorchAdapter
from prefect_gpu.units import MIB

#: Host memory of a child before its body begins, by framework, in addition to `HOST_BYTES_LEAST` for Python and
#: Prefect: private bytes after a calibration, 16 cores, H200 (docs/evidence/gpu-host-memory.txt: torch 2.11,
#: TensorFlow 2.21, JAX 0.11, CuPy 14).
HOST_BYTES = {"torch": 1048 * MIB, "tensorflow": 1776 * MIB, "jax": 1264 * MIB, "cupy": 536 * MIB}
HOST_BYTES_LEAST = 78 * MIB

#: Adapters by name in `gpu:framework=`; `none` has no adapter.
ADAPTERS: Mapping[str, FrameworkAdapter] = {
    kind.name: kind()
    for kind in (TorchAdapter, TensorFlowAdapter, JaxAdapter, CupyAdapter, OnnxRuntimeAdapter)
}

#: Frameworks for which a sample of memory every few milliseconds is enough: they allocate and free in step with the
#: host's code. XLA and TensorFlow free an operation's memory as soon as it is queued, CuPy an expression's, so samples
#: miss most of it (seen on an H200).
SEEN_BY_LOOKING = frozenset({"torch"})

#: Frameworks without a peak counter: the largest sample is used.
WITHOUT_PEAK = frozenset({"cupy"})

#: Name in `gpu:framework=` for a task without an adapter.
NO_FRAMEWORK = "none"

#: Framework by the root of an import name. A library that always uses one framework counts as that framework.
FRAMEWORK_BY_ROOT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "torch", "torchvision", "torchaudio", "torchmetrics", "torch_geometric", "lightning",
            "pytorch_lightning", "transformers", "diffusers", "accelerate", "peft", "timm",
            "sentence_transformers", "botorch", "gpytorch",
        ),
        "torch",
    ),
    **dict.fromkeys(("tensorflow", "tf_keras", "tensorflow_hub"), "tensorflow"),
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "numpyro"), "jax"),
    **dict.fromkeys(("cupy", "cupyx"), "cupy"),
    "onnxruntime": "onnxruntime",
}  # fmt: skip

#: Modules that a library imports when a part of it is first used, by that part. In PyTorch 2.13 the first optimizer of a
#: process imports 841 modules, which takes as long as PyTorch's own import.
IMPORTED_ON_USE: Mapping[str, str] = dict.fromkeys(
    ("torch.optim", "torch.compile", "torch.utils.checkpoint", "lightning", "pytorch_lightning"),
    "torch._dynamo",
)

#: Prefixes of the variables that these modules read at their import.
READ_ON_USE = ("TORCH_COMPILE", "TORCHDYNAMO", "TORCHINDUCTOR", "TORCH_LOGS")

#: Attributes with a decorated function: of a Prefect task or flow, of `functools.wraps`, of static and class methods.
_BELOW = ("fn", "__wrapped__", "__func__")

#: Most decorators of one function.
_MOST_DECORATORS = 8


def adapters_for(policy: FrameworkPolicy) -> tuple[FrameworkAdapter, ...]:
    """Return a child's adapters: of the frameworks that tags name, else all; for `gpu:framework=none` no adapter."""
    if not policy.frameworks:
        return tuple(ADAPTERS.values())
    return tuple(ADAPTERS[name] for name in policy.frameworks if name != NO_FRAMEWORK)


def detect_frameworks(fn: Any, *, whole_modules: bool = True) -> tuple[str, ...]:
    """Return the names of the frameworks that a function uses, sorted, by reading its code.

    `fn` may be a method, partial, callable object or Prefect task, too. With `whole_modules` all imports of the
    functions' modules count, used or not: a child imports whole modules.
    """
    roots = {module.partition(".")[0] for module in _Walk(whole_modules).modules(fn)}
    return tuple(sorted(set(ADAPTERS).intersection(map(framework_of, roots))))


def framework_of(root: str) -> str:
    """Return the framework of the root of an import name, for Keras its backend; empty: no framework."""
    if root == "keras":
        return os.environ.get("KERAS_BACKEND", "tensorflow")
    return FRAMEWORK_BY_ROOT.get(root, "")


def needed_modules(fn: Any) -> tuple[str, ...]:
    """Return the imports of a process that unpickles and calls a function, by reading its code: its own module first.

    A function inside another function is pickled by value. Its own module is imported only if it refers to other
    objects there. Each element is `package.module`, or `package:name,name` for `from package import name, name` inside
    functions, where a name may be a module. What a library imports on use (`IMPORTED_ON_USE`) is last. Elements need
    not be importable.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    own = _text(getattr(inner, "__module__", None))
    walk = _Walk(whole_modules=False, with_names=True)
    reached = list(walk.modules(fn))
    if isinstance(inner, FunctionType) and own in sys.modules:
        if find_steps(find_in_namespace(own, inner.__qualname__), inner) is None:
            # The first element is the function's own.
            reached.remove(own)
            own = ""
    modules = {entry.partition(":")[0] for entry in reached}
    on_use = (
        later
        for part, later in IMPORTED_ON_USE.items()
        if part in walk.parts or any(f"{module}.".startswith(f"{part}.") for module in modules)
    )
    if not walk.configures:
        reached += on_use
    return tuple(entry for entry in dict.fromkeys([own, *reached]) if entry)


def find_in_namespace(module: str, name: str) -> Any:
    """Return a loaded module's object by its qualified name, without `__getattr__`; `None`: no such object."""
    first, *others = name.split(".")
    found = (look_at(module, "__dict__") or {}).get(first)
    for each in others:
        found = inspect.getattr_static(found, each, None)
    return found


def find_steps(found: Any, wanted: Any, left: int = _MOST_DECORATORS) -> tuple[str, ...] | None:
    """Return the attributes that lead from a decorated object to the function `wanted`; `None`: it is not inside."""
    if found is wanted:
        return ()
    for step in _BELOW if left else ():
        below = inspect.getattr_static(found, step, None)
        if isinstance(below, MemberDescriptorType):
            below = getattr(found, step, None)
        if callable(below) and below is not found:
            steps = find_steps(below, wanted, left - 1)
            if steps is not None:
                return step, *steps
    return None


def uses_prefect(fn: Any) -> bool:
    """Return whether a task's function, or code it refers to, is known to import Prefect. See `child.late_prefect`."""
    return any(map(brings_prefect, needed_modules(fn)))


def brings_prefect(entry: str) -> bool:
    """Return whether an element of `needed_modules` is Prefect, or a user's loaded module with objects of Prefect."""
    module = entry.partition(":")[0]
    if module.partition(".")[0] == "prefect":
        return True
    if module == "__main__" or module not in sys.modules or not is_users(module):
        return False
    return any(name.partition(".")[0] == "prefect" for name in homes(module))


def homes(module: str) -> tuple[str, ...]:
    """Return the modules that define the objects in a loaded module: what it imports at its top level, about."""
    values = list((look_at(module, "__dict__") or {}).values())
    return tuple(dict.fromkeys(filter(None, (_text(_home(value)) for value in values))))


def _home(value: Any) -> Any:
    """Return the name of the module that defines a value: of a module itself, a function, a class or an object."""
    if isinstance(value, ModuleType):
        return object.__getattribute__(value, "__dict__").get("__name__")
    if isinstance(value, (FunctionType, type)):
        return value.__module__
    return type(value).__module__


_METHODS = (FunctionType, staticmethod, classmethod, property)


@dataclass(eq=False, repr=False)
class _Walk:
    """A walk over a function and all functions and classes of the user to which it refers."""

    whole_modules: bool
    with_names: bool = False
    #: Ids of the values on the walk so far.
    seen: set[int] = field(default_factory=set)
    #: Parts of libraries (keys of `IMPORTED_ON_USE`) that the code names.
    parts: set[str] = field(default_factory=set)
    #: Whether the code names a variable of `READ_ON_USE`: it may set the variable before it uses the part.
    configures: bool = False

    def modules(self, value: Any) -> Iterator[str]:
        """Yield every import on the walk from `value`, and the module of every function, class and object."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, ModuleType):
            # `getattr` would load a lazily loaded module.
            yield _text(object.__getattribute__(value, "__dict__").get("__name__"))
        elif isinstance(value, functools.partial):
            yield from self._all((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            yield from self.modules(value.__func__)
        elif isinstance(value, property):
            yield from self._all((value.fget, value.fset))
        elif isinstance(value, FunctionType):
            yield _text(value.__module__)
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._instance(value)

    def _all(self, values: Iterable[Any]) -> Iterator[str]:
        for value in values:
            yield from self.modules(value)

    def _function(self, fn: FunctionType) -> Iterator[str]:
        if not is_users(fn.__module__):
            return
        for code in nested_code(fn.__code__):
            yield from _imports(code, fn.__globals__.get("__package__"), self.with_names)
            yield from self._all(
                fn.__globals__[name] for name in code.co_names if name in fn.__globals__
            )
            named = {*code.co_names}
            texts = (text for text in code.co_consts if isinstance(text, str))
            self.configures |= any(text.startswith(READ_ON_USE) for text in texts)
            self.parts |= {part for part in IMPORTED_ON_USE if named.issuperset(part.split("."))}
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # An empty cell.
                yield from self.modules(cell.cell_contents)
        yield from self._all((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))
        wrapped = inspect.getattr_static(fn, "__wrapped__", None)
        if wrapped is not None:
            yield from self.modules(wrapped)
        # A child imports the whole module of a function by reference. `__main__`'s functions are pickled by value.
        if self.whole_modules and fn.__module__ != "__main__":
            for value in list(fn.__globals__.values()):
                if isinstance(value, ModuleType):
                    yield from self.modules(value)

    def _class(self, cls: type) -> Iterator[str]:
        for base in cls.__mro__:
            yield _text(base.__module__)
            if is_users(base.__module__):
                yield from self._all(
                    member
                    for member in list(vars(base).values())
                    # `isinstance` would load a lazily loaded module.
                    if issubclass(type(member), _METHODS)
                )

    def _instance(self, value: Any) -> Iterator[str]:
        yield from self._class(type(value))
        # A Prefect task holds its function as `fn`.
        inner = inspect.getattr_static(value, "fn", None)
        if isinstance(inner, (FunctionType, MethodType, functools.partial)):
            yield from self.modules(inner)


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object of a function and of all functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def _imports(code: CodeType, package: str | None, with_names: bool) -> Iterator[str]:
    instructions = [
        i for i in dis.get_instructions(code) if i.opname not in ("EXTENDED_ARG", "CACHE")
    ]
    for index, instruction in enumerate(instructions):
        if instruction.opname != "IMPORT_NAME":
            continue
        # The compiler loads the level (of a relative import) and the names just before.
        level, names = (i.argval for i in instructions[index - 2 : index])
        try:
            module = importlib.util.resolve_name("." * level + instruction.argval, package)
        except ImportError:  # A relative import outside a package.
            continue
        wanted = (names or ()) if with_names else ()
        yield f"{module}:{','.join(wanted)}" if wanted else module


def _text(name: Any) -> str:
    return name if isinstance(name, str) else ""


@functools.cache
def is_users(module: str | None) -> bool:
    """Return whether a module is the user's own code: not the standard library, not installed."""
    root = _text(module).partition(".")[0]
    if root == "__main__":
        return True
    if root in {*sys.stdlib_module_names, *FRAMEWORK_BY_ROOT, "keras", "prefect_gpu"}:
        return False
    spec = look_at(root, "__spec__")
    if root not in sys.modules:
        # Raised by a third-party finder, or for a name that is none.
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(root)
    # A package's folders, or a module's file.
    places = getattr(spec, "submodule_search_locations", None) or [getattr(spec, "origin", None)]
    return not any(_is_installed(root, str(place)) for place in places if place)


def _is_installed(root: str, place: str) -> bool:
    """Return whether an installer put a module into the folder or file `place`."""
    # `dist-packages` is Debian's name, which many GPU containers have.
    by_name = "site-packages" in place or "dist-packages" in place
    folder = os.path.dirname(place)
    # `sys.stdlib_module_names` lacks modules that are named after the platform.
    return by_name or folder == os.path.dirname(os.__file__) or root in _installed_in(folder)


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the modules that were installed into any folder (`pip install --target`)."""
    # Installers list modules in `RECORD` files:
    # https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    found = set()
    for record in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError), open(record, encoding="utf-8", errors="replace") as file:
            # A line begins with `module.py` or `package/`.
            found |= {re.split(r"[/,.]", line, maxsplit=1)[0].strip('"') for line in file}
    return frozenset(found)


def host_bytes_of(frameworks: Iterable[str]) -> int:
    """Return the host memory, in bytes, that a child with some frameworks takes before its body begins."""
    return HOST_BYTES_LEAST + sum(HOST_BYTES.get(name, 0) for name in frameworks)
