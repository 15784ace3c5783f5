"""How busy a device is said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_gpu.devices.sampler import WINDOW_S, Utilisation
from tests.unit.scheduling.values import snapshot


def test_one_instant_does_not_decide() -> None:
    utilisation = Utilisation()
    told = [
        utilisation.smooth(replace(snapshot(), at_s=at, busy_fraction=busy)).busy_fraction
        for at, busy in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.5), (WINDOW_S + 1.5, 0.9))
    ]
    assert told == [0.0, 0.5, 0.5, pytest.approx(0.7)], "readings of the window only"


def test_devices_are_distinguished_and_log_again_after_a_recovery() -> None:
    utilisation = Utilisation()

    def smooth(*busy: float | None) -> list[float | None]:
        taken = [replace(snapshot(i), busy_fraction=b) for i, b in enumerate(busy)]
        return [each.busy_fraction for each in map(utilisation.smooth, taken)]

    assert smooth(1.0, 0.0) == [1.0, 0.0]
    assert smooth(None, 1.0) == [None, 0.5]
    assert smooth(0.2, None) == [0.2, None]


def test_a_lost_device_has_no_processes() -> None:
    utilisation = Utilisation()
    utilisation.smooth(replace(snapshot(), busy_fraction=1.0))
    lost = replace(snapshot(error="lost"), busy_fraction=1.0)
    assert utilisation.smooth(lost) == lost
    assert utilisation.smooth(replace(snapshot(), busy_fraction=0.1)).busy_fraction == 0.1
