"""What `devices=` accepts, and which reader it opens."""

from __future__ import annotations

import ast
import logging
import pickle
from pathlib import Path

import pytest

import prefect_gpu.devices
from prefect_gpu.devices import nvml as module
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.devices.spec import DeviceSpec, open_reader, parse_spec
from prefect_gpu.errors import DeviceError
from tests.fakes.fake_nvml import FakeGpu, FakeNvml

TWO = DeviceSpec("simulated", simulated=SimulatedDevices("2x24GiB"))

VISIBLE = "CUDA_VISIBLE_DEVICES"

#: An error that lists the devices.
UNKNOWN = r"there are 0: GPU-. \(NVIDIA H200\)"


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        ("auto", DeviceSpec("auto")),
        (" NVML ", DeviceSpec("nvml")),
        ("host", DeviceSpec("host")),
        ("simulated:2x24GiB", TWO),
        ("Simulated: 2 x 24 GiB", TWO),
        (SimulatedDevices("2x24GiB"), TWO),
        (TWO, TWO),
        ([0, "1"], DeviceSpec("nvml", ("0", "1"))),
        ((" 01 ", "GPU-1a2b"), DeviceSpec("nvml", ("1", "GPU-1a2b"))),
        ("0,1", DeviceSpec("nvml", ("0", "1"))),
        ("1,GPU-1a", DeviceSpec("nvml", ("1", "GPU-1a"))),
        ("MIG-12", DeviceSpec("nvml", ("MIG-12",))),
    ],
)
def test_accepted(value: object, spec: DeviceSpec) -> None:
    parsed = parse_spec(value)

    assert parsed == spec
    assert hash(parsed) == hash(spec)
    assert pickle.loads(pickle.dumps(parsed)) == spec


@pytest.mark.parametrize(
    "value",
    [
        *("simulated:two", "simulated:", "simulated", "simulated:0x24GiB", "simulated:2x24", "simulated:1x24GiB,"),
        *("cuda", "", [], [True], [1.5], [-1], [0, "0"], ["gpu0"], 0, None, b"auto"),
    ],
)  # fmt: skip
def test_refused_names_what_was_given_and_what_is_accepted(value: object) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_spec(value)

    given = value.partition(":")[2] if isinstance(value, str) else repr(value)
    assert given in str(caught.value)
    assert "accepted: " in str(caught.value)


def test_nvml_is_imported_only_where_it_is_asked_for() -> None:
    folder = Path(prefect_gpu.devices.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom) and path.name != "nvml.py":
                assert "nvml" not in ast.unparse(node), path


@pytest.fixture
def nvml() -> FakeNvml:
    module.pynvml = fake = FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c"))
    return fake


@pytest.mark.parametrize(
    ("value", "visible", "uuids"),
    [
        pytest.param("auto", None, ["GPU-a", "GPU-b", "GPU-c"], id="auto is NVML where it answers"),
        pytest.param("auto", "2,0", ["GPU-c", "GPU-a"], id="auto keeps to the visible devices"),
        pytest.param([2, "GPU-a"], None, ["GPU-c", "GPU-a"], id="a list, in its order"),
        pytest.param([1, 0], "2,1", ["GPU-b", "GPU-c"], id="a list among the visible devices"),
    ],
)
def test_nvml(value: object, visible: str | None, uuids: list[str], nvml: FakeNvml) -> None:
    reader = open_reader(parse_spec(value), {} if visible is None else {VISIBLE: visible})
    devices = reader.devices()
    reader.close()
    assert [(device.index, device.uuid) for device in devices] == list(enumerate(uuids))
    assert nvml.started == 0


@pytest.mark.parametrize("code", [9, 12])
def test_auto_is_host_without_a_driver(
    code: int, nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.broken = code
    with caplog.at_level(logging.INFO):
        assert open_reader(parse_spec("auto"), {}).kind == "host"
    assert not caplog.records


def test_auto_warns_of_a_broken_driver(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.broken = 18
    assert open_reader(parse_spec("auto"), {}).kind == "host"
    assert "version mismatch" in caplog.text


def test_auto_is_host_if_no_device_is_visible(nvml: FakeNvml) -> None:
    reader = open_reader(parse_spec("auto"), {"CUDA_VISIBLE_DEVICES": ""})
    assert reader.kind == "host"
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("value", "environ", "says"),
    [
        pytest.param("nvml", {VISIBLE: "9"}, r"CUDA_VISIBLE_DEVICES='9'.*'9' names no device", id="no visible device"),
        pytest.param([1], {VISIBLE: "2"}, UNKNOWN, id="an unknown index"),
        pytest.param(["GPU-a"], {VISIBLE: "2"}, UNKNOWN, id="an invisible device"),
        pytest.param(["GPU-"], {VISIBLE: "1,2"}, UNKNOWN, id="an ambiguous prefix"),
        pytest.param(["MIG-x"], {VISIBLE: "2"}, UNKNOWN, id="an unknown instance"),
        pytest.param([0, "GPU-a"], {}, "GPU-a a second time", id="one device by two names"),
    ],
)  # fmt: skip
def test_missing(value: object, environ: dict[str, str], says: str, nvml: FakeNvml) -> None:
    with pytest.raises(DeviceError, match=says):
        open_reader(parse_spec(value), environ)
    assert nvml.started == 0


def test_nvml_without_a_driver_or_without_any_device(nvml: FakeNvml) -> None:
    nvml.broken = 9
    with pytest.raises(DeviceError, match=r"Driver Not Loaded.*nvidia-smi.*devices='host'"):
        open_reader(parse_spec("nvml"), {})
    nvml.broken = None
    nvml.gpus.clear()
    with pytest.raises(DeviceError, match="NVML knows no device"):
        open_reader(parse_spec("nvml"), {})


def test_host_and_simulated_open_without_nvml() -> None:
    assert open_reader(parse_spec("host"), {}).kind == "host"
    assert open_reader(TWO, {}).kind == "simulated"
