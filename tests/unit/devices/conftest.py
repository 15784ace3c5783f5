"""Tests that put a fake in place of `pynvml`."""

from __future__ import annotations

import pytest

from prefect_gpu.devices import nvml


@pytest.fixture(autouse=True)
def pynvml_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", nvml.pynvml)
