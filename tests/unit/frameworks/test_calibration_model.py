"""The model that ONNX Runtime is calibrated with, a file of the package; `tests/gpu` runs it."""

from prefect_gpu.frameworks.onnxruntime_adapter import calibration_model


def test_the_model_of_the_package_multiplies_convolves_and_transforms():
    model = calibration_model()
    assert model.count(b"MatMul") == model.count(b"Conv") == 2
    assert model.count(b"Rfft") == 1
