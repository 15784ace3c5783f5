"""Random numbers of forks: generators that the system has seeded are seeded anew, those that a library has seeded stay.

A library may make or seed a generator as it is imported. Without a seed of its own, such a generator draws other numbers in
each fresh interpreter, so it must not draw the same ones in all forks. Of PyTorch, only the default generator is watched:
others have a fixed first seed. A state that a library gives to a generator of NumPy's, without a seed, is not seen.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect_gpu.frameworks.adapter import look_at

#: Entropy from the system has 128 bits; a seed that someone chose has hardly ever as many.
_SYSTEM_ENTROPY = 1 << 64


class RandomSeeds:
    """The generators of a process that is to be forked. Made before its imports."""

    def __init__(self) -> None:
        #: By `id`: instances of `random.Random` that the system has seeded. Some have no hash.
        self._pythons: dict[int, weakref.ref[random.Random]] = {}
        #: State of the module `random`; `None`: no library has seeded it.
        self._state: tuple[Any, ...] | None = None
        #: Generators of NumPy's that the system has seeded.
        self._numpys: list[Any] = []
        #: First seed of PyTorch's default generator; `None`: PyTorch is not imported.
        self._torch_seed: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note, during the imports, whether the system or a library seeds a generator."""
        seed, setstate, seed_module = random.Random.seed, random.Random.setstate, random.seed
        is_seeded = False

        def note_seed(instance: random.Random, a: Any = None, version: int = 2) -> None:
            seed(instance, a, version)
            self._pythons.pop(id(instance), None)
            if a is None:
                self._pythons[id(instance)] = weakref.ref(instance)

        def note_state(instance: random.Random, state: Any) -> None:
            setstate(instance, state)
            self._pythons.pop(id(instance), None)

        def note_module(a: Any = None, version: int = 2) -> None:
            nonlocal is_seeded
            seed_module(a, version)
            is_seeded = a is not None

        python: Any = random.Random
        python.seed, python.setstate, random.seed = note_seed, note_state, note_module
        try:
            yield
        finally:
            python.seed, python.setstate, random.seed = seed, setstate, seed_module
        if is_seeded:
            self._state = random.getstate()
        self._numpys = _numpys_of_system()

    def look(self) -> None:
        """Note the first seed of PyTorch's default generator; to be called after each import."""
        generator = _torch_generator()
        if self._torch_seed is None and generator is not None:
            self._torch_seed = generator.initial_seed()

    def renew(self) -> None:
        """Seed anew, in a fork, what the system has seeded. Python itself does it for the module `random`."""
        if self._state is not None:
            random.setstate(self._state)
        for find in self._pythons.values():
            if (python := find()) is not None:
                # A subclass may want a seed.
                random.Random.seed(python)
        for numpy in self._numpys:
            bits = _bits_of(numpy)
            bits.state = type(bits)().state
        generator = _torch_generator()
        if generator is not None and generator.initial_seed() == self._torch_seed:
            generator.seed()


def _torch_generator() -> Any:
    # The processor's. Those of devices have a fixed first seed in each process.
    return look_at("torch", "default_generator")


def _numpys_of_system() -> list[Any]:
    names = ("RandomState", "Generator")
    kinds = tuple(kind for name in names if isinstance(kind := look_at("numpy.random", name), type))
    # `isinstance` would load an object that is loaded lazily.
    return [e for e in gc.get_objects() if issubclass(type(e), kinds) and _is_of_system(e)]


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _is_of_system(generator: Any) -> bool:
    bits = _bits_of(generator)
    # NumPy before 1.25 has the second name only. `None` after a seed in the old way, `RandomState(5)`.
    sequence = getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy >= _SYSTEM_ENTROPY
