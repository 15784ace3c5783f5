"""Settings of the runner, `PREFECT_INTEGRATIONS_GPU_*`, by Prefect's convention for integrations.

They come from the environment, `.env`, `prefect.toml`, `pyproject.toml` or a profile, as Prefect's
own do. What a task asks for is not set here: see `prefect_gpu.policy`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from prefect.settings.base import (
    PrefectBaseSettings,
    PrefectSettingsConfigDict,
    build_settings_config,
)
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from prefect_gpu.units import SIZES_ACCEPTED, parse_bytes


def parse_standby(value: object) -> int | Literal["auto", "hot"]:
    """Read the runner's argument `standby`.

    Raises:
        ValueError: It is neither `"auto"` nor `"hot"` nor a number of processes.
    """
    text = value.strip().lower() if isinstance(value, str) else value
    if text == "auto":
        return "auto"
    if text == "hot":
        return "hot"
    if isinstance(text, str) and text.isdecimal():
        text = int(text)
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    raise ValueError(
        f"standby={value!r} is neither 'auto', 'hot' nor a number of processes (0: none are started "
        "ahead)"
    )


def parse_start_method(value: object) -> Literal["spawn", "forkserver"]:
    """Read the runner's argument `start_method`.

    Raises:
        ValueError: It is neither `"spawn"` nor `"forkserver"`.
    """
    text = value.strip().lower() if isinstance(value, str) else value
    if text == "spawn":
        return "spawn"
    if text == "forkserver":
        return "forkserver"
    raise ValueError(
        f"start_method={value!r} is neither 'spawn' nor 'forkserver' (a fork of the flow's own process "
        "would have its locks, but not the threads that hold them)"
    )


class GPUSettings(PrefectBaseSettings):
    """Defaults of every `GPUTaskRunner`; its own arguments win over them."""

    model_config: ClassVar[PrefectSettingsConfigDict] = build_settings_config(
        ("integrations", "gpu")
    )

    devices: str = Field(
        default="auto",
        min_length=1,
        description="Which devices: auto, nvml, host, simulated:2x24GiB, or indices and UUID "
        "prefixes with commas.",
    )
    placement: Literal["spread", "pack"] = Field(
        default="spread",
        description="Among devices that fit: the emptiest (spread) or the fullest (pack).",
    )
    max_processes: int | None = Field(
        default=None,
        ge=1,
        description="GPU tasks running at once at most; none: as many as memory holds.",
    )
    max_tasks_per_device: int | None = Field(
        default=None,
        ge=1,
        description="GPU tasks on one device at once at most; none: as many as memory holds.",
    )
    headroom: str | None = Field(
        default=None,
        description="Memory of each device left free whatever is asked, as in 512MiB, or 0; none: "
        "by the kind of device.",
    )
    start_method: Literal["spawn", "forkserver"] = Field(
        default="spawn",
        description="How a task's process comes to be: spawn, a fresh interpreter, or forkserver, a "
        "fork of a process that has imported Prefect, NumPy and PyTorch and done nothing else.",
    )
    reports: bool = Field(
        default=True,
        description="Publish a memory report for each process and each flow run as artifacts.",
    )

    standby: int | Literal["auto", "hot"] = Field(
        default="auto",
        description="Processes started ahead of their tasks: auto, or at most so many; 0 for none; "
        "hot, as auto, with PyTorch or CuPy running on a device already.",
    )

    @field_validator("standby", mode="before")
    @classmethod
    def _check_standby(cls, value: object) -> int | Literal["auto", "hot"]:
        return parse_standby(value)

    @field_validator("start_method", mode="before")
    @classmethod
    def _check_start_method(cls, value: object) -> Literal["spawn", "forkserver"]:
        return parse_start_method(value)

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.standby == "hot" and self.start_method == "forkserver":
            raise ValueError(
                "standby='hot' cannot be had with start_method='forkserver': a fork cannot use CUDA that "
                "was started before it; leave one of them out"
            )
        return self

    @field_validator("headroom")
    @classmethod
    def _check_headroom(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                _headroom_bytes(text)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{error}; accepted: {SIZES_ACCEPTED}, or 0") from error
        return text

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes of each device to leave free; `None`: by the kind of device."""
        return None if self.headroom is None else _headroom_bytes(self.headroom)


def _headroom_bytes(text: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text)
