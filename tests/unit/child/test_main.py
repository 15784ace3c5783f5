"""Parts of the child that need no process: its own peak."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.child import main as child


def test_without_proc_the_peak_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert child._host_peak_bytes() == 0
