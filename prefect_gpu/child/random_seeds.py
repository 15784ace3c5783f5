"""Random numbers of forks: generators that the system had seeded are seeded anew, those that a library seeded stay.

A library may make a generator as it is imported, or seed one. A fresh interpreter would then draw other numbers, or the
same ones as every other. Not watched: generators of PyTorch's other than its default one, whose first seed is fixed.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Entropy from the system has 128 bits; a number that someone chose has hardly ever as many.
_SYSTEM_ENTROPY = 1 << 64


class RandomSeeds:
    """The generators of a process that is to be forked. Made before its imports."""

    def __init__(self) -> None:
        #: Instances of `random.Random` that the system has seeded.
        self._pythons: weakref.WeakSet[random.Random] = weakref.WeakSet()
        #: State of the module `random`, if a library has seeded it.
        self._state: tuple[Any, ...] | None = None
        self._is_seeded = False
        #: Generators of NumPy's that the system has seeded.
        self._numpys: list[Any] = []
        #: First seed of PyTorch's default generator; `None`: PyTorch is not imported.
        self._torch_seed: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note, during the imports, which generators are seeded by whom."""
        of_class, of_module = random.Random.seed, random.seed

        def seed(instance: random.Random, a: Any = None, version: int = 2) -> None:
            of_class(instance, a, version)
            (self._pythons.add if a is None else self._pythons.discard)(instance)

        def seed_module(a: Any = None, version: int = 2) -> None:
            of_module(a, version)
            self._is_seeded = a is not None

        random.Random.seed, random.seed = seed, seed_module  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed, random.seed = of_class, of_module  # type: ignore[method-assign]
        if self._is_seeded:
            self._state = random.getstate()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            kinds = numpy.RandomState, numpy.Generator
            # `isinstance` would load an object that is loaded lazily.
            found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
            self._numpys = [each for each in found if _is_of_system(each)]

    def look(self) -> None:
        """Note the first seed of PyTorch's default generator, after each import."""
        generator = _torch_generator()
        if self._torch_seed is None and generator is not None:
            self._torch_seed = generator.initial_seed()

    def renew(self) -> None:
        """Seed anew, in a fork, what the system had seeded. Python itself does it for the module `random`."""
        if self._state is not None:
            random.setstate(self._state)
        for python in self._pythons:
            python.seed()
        for numpy in self._numpys:
            bits = _bits_of(numpy)
            bits.state = type(bits)().state
        generator = _torch_generator()
        if generator is not None and generator.initial_seed() == self._torch_seed:
            generator.seed()


def _torch_generator() -> Any:
    # The processor's. Those of devices have a fixed first seed in each process.
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _is_of_system(generator: Any) -> bool:
    # `None` after a seed in the old way, `RandomState(5)`. NumPy before 1.25 has no such attribute.
    bits = _bits_of(generator)
    sequence = getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy >= _SYSTEM_ENTROPY
