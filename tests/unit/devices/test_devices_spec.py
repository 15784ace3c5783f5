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
        "simulated:two",
        "simulated:",
        "simulated",
        "simulated:0x24GiB",
        "simulated:2x24",
        "simulated:1x24GiB,",
        "cuda",
        "",
        [],
        [True],
        [1.5],
        [-1],
        [0, "0"],
        ["gpu0"],
        0,
        None,
        b"auto",
    ],
)
def test_refused_names_what_was_given_and_what_is_accepted(value: object) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_spec(value)

    given = value.partition(":")[2] if isinstance(value, str) else repr(value)
    assert given in str(caught.value)
    assert "accepted: " in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (DeviceSpec("auto"), "auto"),
        (TWO, "simulated:2x24GiB"),
        (DeviceSpec("nvml", ("1", "GPU-1a")), "1,GPU-1a"),
    ],
)
def test_text_reads_back(spec: DeviceSpec, text: str) -> None:
    assert parse_spec(text) == spec


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


def uuids(value: object, environ: dict[str, str], nvml: FakeNvml) -> list[str]:
    reader = open_reader(parse_spec(value), environ)
    devices = reader.devices()
    reader.close()
    assert [device.index for device in devices] == list(range(len(devices)))
    assert nvml.started == 0
    return [device.uuid for device in devices]


def test_auto_is_nvml_where_it_answers(nvml: FakeNvml) -> None:
    assert uuids("auto", {}, nvml) == ["GPU-a", "GPU-b", "GPU-c"]


def test_auto_keeps_to_the_visible_devices(nvml: FakeNvml) -> None:
    assert uuids("auto", {"CUDA_VISIBLE_DEVICES": "2,0"}, nvml) == ["GPU-c", "GPU-a"]


@pytest.mark.parametrize("code", [9, 12])
def test_auto_is_host_without_a_driver_and_says_nothing(
    code: int, nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.broken = code
    with caplog.at_level(logging.INFO):
        assert open_reader(parse_spec("auto"), {}).kind == "host"
    assert not caplog.records


def test_auto_is_host_with_a_broken_driver_and_says_so(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.broken = 18
    assert open_reader(parse_spec("auto"), {}).kind == "host"
    assert "version mismatch" in caplog.text


def test_auto_is_host_if_no_device_is_visible(nvml: FakeNvml) -> None:
    reader = open_reader(parse_spec("auto"), {"CUDA_VISIBLE_DEVICES": ""})
    assert reader.kind == "host"
    assert nvml.started == 0


def test_nvml_without_a_driver_says_what_answered_and_what_to_do(nvml: FakeNvml) -> None:
    nvml.broken = 9
    with pytest.raises(DeviceError, match=r"Driver Not Loaded.*nvidia-smi.*devices='host'"):
        open_reader(parse_spec("nvml"), {})


def test_nvml_without_a_visible_device_names_the_variable(nvml: FakeNvml) -> None:
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES='9'.*'9' names no device"):
        open_reader(parse_spec("nvml"), {"CUDA_VISIBLE_DEVICES": "9"})
    assert nvml.started == 0


def test_nvml_without_any_device(nvml: FakeNvml) -> None:
    nvml.gpus.clear()
    with pytest.raises(DeviceError, match="NVML knows no device"):
        open_reader(parse_spec("nvml"), {})


def test_a_list_chooses_among_the_visible_devices_in_its_order(nvml: FakeNvml) -> None:
    assert uuids([2, "GPU-a"], {}, nvml) == ["GPU-c", "GPU-a"]
    assert uuids([1, 0], {"CUDA_VISIBLE_DEVICES": "2,1"}, nvml) == ["GPU-b", "GPU-c"]


@pytest.mark.parametrize("entry", [1, "GPU-a", "GPU-", "MIG-x"])
def test_a_list_with_an_unknown_device_lists_those_there(entry: object, nvml: FakeNvml) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2" if entry != "GPU-" else "1,2"}
    with pytest.raises(DeviceError, match=r"there are 0: GPU-. \(NVIDIA H200\)"):
        open_reader(parse_spec([entry]), environ)
    assert nvml.started == 0


def test_a_list_that_names_a_device_by_two_names(nvml: FakeNvml) -> None:
    with pytest.raises(DeviceError, match="GPU-a a second time"):
        open_reader(parse_spec([0, "GPU-a"]), {})


def test_host_and_simulated_open_without_nvml() -> None:
    assert open_reader(parse_spec("host"), {}).kind == "host"
    assert open_reader(TWO, {}).kind == "simulated"
