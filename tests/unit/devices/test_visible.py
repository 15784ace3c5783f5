"""`CUDA_VISIBLE_DEVICES` in all of its forms."""

from __future__ import annotations

import pytest

from prefect_gpu.devices.nvml import Candidate, parse_visible
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import GIB

A = "GPU-1a2b3c4d-0000-0000-0000-000000000001"
B = "GPU-1a2b9999-0000-0000-0000-000000000002"
C = "GPU-ffff0000-0000-0000-0000-000000000003"
C1 = "MIG-aaaa0000-0000-0000-0000-000000000001"
C2 = "MIG-bbbb0000-0000-0000-0000-000000000002"


def candidate(uuid: str, nvml_index: int, gpu_uuid: str = "", instance: int = 0) -> Candidate:
    device = Device(uuid, -1, "a GPU", GIB, "nvml", "here", nvml_index)
    return Candidate(device, gpu_uuid or uuid, (instance, 0) if instance else None)


MACHINE = (candidate(A, 0), candidate(B, 1), candidate(C1, 2, C, 1), candidate(C2, 2, C, 2))
ALL = (A, B, C1, C2)


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        pytest.param(None, ALL, id="unset leaves every device"),
        pytest.param("", (), id="empty leaves none"),
        pytest.param("  ", (), id="blanks leave none"),
        pytest.param("-1", (), id="minus one leaves none"),
        pytest.param("none", (), id="the word none leaves none"),
        pytest.param("NoDevFiles", (), id="what SLURM writes without a GPU leaves none"),
        pytest.param("0", (A,), id="an index counts in PCI bus order"),
        pytest.param("1,0", (B, A), id="the order of the text is kept"),
        pytest.param(" 1 , 0 ", (B, A), id="spaces around entries do not matter"),
        pytest.param("0,-1,1", (A,), id="minus one ends the list"),
        pytest.param("0,7,1", (A,), id="an index that is not there ends the list"),
        pytest.param("7,0", (), id="a first entry that is not there leaves none"),
        pytest.param("0,,1", (A,), id="an empty entry ends the list"),
        pytest.param("0,1abc", (A,), id="an entry that is no name ends the list"),
        pytest.param("0,0", (), id="an index given twice leaves none"),
        pytest.param(f"0,{A}", (), id="a device given by index and UUID leaves none"),
        pytest.param("0,0,-1", (), id="a device given twice before the end leaves none"),
        pytest.param("0,-1,0", (A,), id="a device given again after the end does not matter"),
        pytest.param(f"{B},{A}", (B, A), id="whole UUIDs"),
        pytest.param("GPU-1a2b9", (B,), id="a prefix that fits one GPU"),
        pytest.param("gpu-1A2B9", (B,), id="case does not matter in a UUID"),
        pytest.param("GPU-1a2b", (), id="a prefix that fits two GPUs names none"),
        pytest.param("0,GPU-1a2b,1", (A,), id="a prefix that fits two GPUs ends the list"),
        pytest.param("1a2b9999", (), id="a UUID needs its GPU in front"),
        pytest.param("GPU-dead", (), id="a GPU that is elsewhere"),
        pytest.param(C2, (C2,), id="one MIG instance by its UUID"),
        pytest.param("MIG-aaaa", (C1,), id="one MIG instance by a prefix"),
        pytest.param(f"{C2},{C1}", (C2, C1), id="two MIG instances in order"),
        pytest.param("MIG-", (), id="a prefix that fits two MIG instances names none"),
        pytest.param(f"MIG-{C}/2/0", (C2,), id="a MIG instance in the old notation"),
        pytest.param(f"MIG-{C}/3/0", (), id="an old notation of an instance that is not there"),
        pytest.param("2", (C1, C2), id="the index of a GPU in MIG mode stands for its instances"),
        pytest.param("GPU-ffff", (C1, C2), id="so does its UUID"),
        pytest.param(f"2,{C1}", (), id="a GPU in MIG mode and one of its instances is a repeat"),
    ],
)
def test_visible(value: str | None, uuids: tuple[str, ...]) -> None:
    visible, reason = parse_visible(value, MACHINE)

    assert tuple(each.device.uuid for each in visible) == uuids
    if not uuids:
        assert reason


def test_an_exact_uuid_wins_over_longer_ones() -> None:
    machine = (candidate("GPU-1", 0), candidate("GPU-11", 1))

    assert parse_visible("GPU-1", machine) == (machine[:1], "")


@pytest.mark.parametrize(
    ("value", "said"),
    [("", "empty"), ("0,9", "'9' names no device"), ("1,1", f"names {B} twice"), ("0,1", "")],
)
def test_reason_names_the_entry(value: str, said: str) -> None:
    _, reason = parse_visible(value, MACHINE)
    assert said in reason
    assert bool(said) == bool(reason)
