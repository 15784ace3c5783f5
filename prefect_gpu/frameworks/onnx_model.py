"""A small ONNX model, written by hand: what a calibration of ONNX Runtime runs.

ONNX Runtime runs models only, and the `onnx` package that writes them need not be installed. The
format is protobuf's: a field is its number and kind, then an integer, or a length and that many
bytes. Field numbers are those of `onnx.proto`. It is no writer of models: it knows what this needs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

#: Version of the file format, and of the operators; ONNX Runtime 1.15 and later read both.
IR_VERSION: Final = 8
OPSET: Final = 17

#: Of ONNX Runtime's own operators: `Rfft` is there, and on a GPU it is cuFFT's. ONNX's `DFT` runs on
#: the processor alone.
OWN_DOMAIN: Final = "com.microsoft"

#: Types of elements, as `TensorProto.DataType` numbers them.
FLOAT: Final = 1
FLOAT16: Final = 10

#: Inputs by name, all of `FLOAT`.
INPUTS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {"rows": (512, 512), "images": (8, 16, 32, 32)}
)

#: Weights by name, all of `FLOAT`, filled with zeros.
WEIGHTS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {"matrix": (512, 512), "kernel": (16, 16, 3, 3)}
)

#: Outputs by name, with the type of their elements; a complex number is two of them.
OUTPUTS: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = MappingProxyType(
    {
        "product": (FLOAT, (512, 512)),
        "features": (FLOAT, (8, 16, 30, 30)),
        "spectrum": (FLOAT, (512, 257, 2)),
        "half_product": (FLOAT16, (512, 512)),
        "half_features": (FLOAT16, (8, 16, 30, 30)),
    }
)


def calibration_model() -> bytes:
    """Write a model that multiplies and convolves, in both precisions, and transforms.

    Returns:
        The model as a file holds it. It runs on a GPU alone, with cuBLAS, cuDNN and cuFFT.
    """
    half = ("rows", "matrix", "images", "kernel")
    nodes = [
        _node("MatMul", ("rows", "matrix"), "product"),
        _node("Conv", ("images", "kernel"), "features"),
        *(_node("Cast", (name,), f"half_{name}", {"to": FLOAT16}) for name in half),
        _node("MatMul", ("half_rows", "half_matrix"), "half_product"),
        _node("Conv", ("half_images", "half_kernel"), "half_features"),
        _node("Rfft", ("rows",), "spectrum", {"signal_ndim": 2}, OWN_DOMAIN),
    ]
    graph = b"".join(
        (
            *(_bytes(1, node) for node in nodes),
            _bytes(2, b"calibration"),
            *(_bytes(5, _weight(name, shape)) for name, shape in WEIGHTS.items()),
            *(_bytes(11, _value(name, FLOAT, shape)) for name, shape in INPUTS.items()),
            *(_bytes(12, _value(name, *of)) for name, of in OUTPUTS.items()),
        )
    )
    return b"".join(
        (
            _integer(1, IR_VERSION),
            _bytes(2, b"prefect_gpu"),
            _bytes(7, graph),
            _bytes(8, _bytes(1, b"") + _integer(2, OPSET)),
            _bytes(8, _bytes(1, OWN_DOMAIN.encode()) + _integer(2, 1)),
        )
    )


def weight_bytes() -> int:
    """Give the size of all weights."""
    return sum(math.prod(shape) for shape in WEIGHTS.values()) * struct.calcsize("f")


def _node(
    operator: str,
    inputs: Iterable[str],
    output: str,
    attributes: Mapping[str, int] = MappingProxyType({}),
    domain: str = "",
) -> bytes:
    return b"".join(
        (
            *(_bytes(1, name.encode()) for name in inputs),
            _bytes(2, output.encode()),
            _bytes(4, operator.encode()),
            # Type 2 of an attribute: one integer.
            *(
                _bytes(5, _bytes(1, name.encode()) + _integer(3, value) + _integer(20, 2))
                for name, value in attributes.items()
            ),
            _bytes(7, domain.encode()),
        )
    )


def _weight(name: str, shape: tuple[int, ...]) -> bytes:
    raw = bytes(math.prod(shape) * struct.calcsize("f"))
    dims = b"".join(_integer(1, length) for length in shape)
    return dims + _integer(2, FLOAT) + _bytes(8, name.encode()) + _bytes(9, raw)


def _value(name: str, kind: int, shape: tuple[int, ...]) -> bytes:
    dims = b"".join(_bytes(1, _integer(1, length)) for length in shape)
    tensor = _integer(1, kind) + _bytes(2, dims)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, tensor))


def _integer(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """Write a number that is not negative: seven bits a byte, lowest first, more to come if the top bit is set."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
