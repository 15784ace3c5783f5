"""The model that ONNX Runtime is calibrated with, read back; `tests/gpu` runs it."""

import pytest

from prefect_gpu.frameworks.onnx_model import INPUTS, calibration_model, varint, weight_bytes


def fields(data):
    """Read a protobuf message: pairs of a field's number and its integer or bytes."""
    found, at = [], 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = number()
        value = number()
        if key & 7 == 2:
            at, value = at + value, data[at : at + value]
        found.append((key >> 3, value))
    assert at == len(data)
    return found


def every(data, number):
    return [value for field, value in fields(data) if field == number]


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"), (1 << 20, b"\x80\x80@")],
)
def test_varint(value, written):
    assert varint(value) == written


def test_the_model_multiplies_convolves_and_transforms():
    model = calibration_model()
    (graph,) = every(model, 7)
    operators = [every(node, 4)[0] for node in every(graph, 1)]
    assert operators.count(b"MatMul") == operators.count(b"Conv") == 2
    assert operators.count(b"Rfft") == 1
    assert every(model, 1) == [8]
    assert [(every(opset, 1), every(opset, 2)) for opset in every(model, 8)] == [
        ([b""], [17]),
        ([b"com.microsoft"], [1]),
    ]


def test_each_name_that_a_node_reads_was_made_before_and_each_output_is_made():
    (graph,) = every(calibration_model(), 7)
    known = {every(weight, 8)[0] for weight in every(graph, 5)}
    known |= {every(value, 1)[0] for value in every(graph, 11)}
    for node in every(graph, 1):
        assert set(every(node, 1)) <= known
        known |= set(every(node, 2))
    assert {every(value, 1)[0] for value in every(graph, 12)} <= known


def test_weights_and_inputs_have_their_shapes():
    (graph,) = every(calibration_model(), 7)
    raw = {tuple(every(weight, 1)): len(every(weight, 9)[0]) for weight in every(graph, 5)}
    assert raw == {(512, 512): 4 * 512 * 512, (16, 16, 3, 3): 4 * 16 * 16 * 9}
    assert weight_bytes() == sum(raw.values())
    for value in every(graph, 11):
        ((shape,),) = [every(tensor, 2) for kind in every(value, 2) for tensor in every(kind, 1)]
        lengths = tuple(every(length, 1)[0] for length in every(shape, 1))
        assert lengths == INPUTS[every(value, 1)[0].decode()]
