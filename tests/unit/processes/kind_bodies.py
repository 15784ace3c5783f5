"""Functions whose imports are read, and never run."""

from __future__ import annotations

from typing import Any

import numpy


def plain() -> None:
    return None


def multiplies() -> Any:
    from numpy.linalg import norm

    return norm(numpy.ones(3))


def imports_inside() -> Any:
    import colorsys
    from json.decoder import JSONDecoder

    return JSONDecoder, colorsys


def imports_nothing_there() -> Any:
    import no_such_package_here  # type: ignore[import-not-found]

    return no_such_package_here


def imports_either(first: bool) -> Any:
    if first:
        import torch.nn

        return torch.nn
    import tensorflow as tf

    return tf


def imports_keras_or_torch(first: bool) -> Any:
    if first:
        import keras

        return keras
    import torch.nn

    return torch.nn
