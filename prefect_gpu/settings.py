"""Settings of the runner, `PREFECT_INTEGRATIONS_GPU_*`, by Prefect's convention for integrations.

Like Prefect's own settings, they come from the environment, `.env`, `prefect.toml`, `pyproject.toml` or a profile.
"""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from prefect.settings.base import (
    PrefectBaseSettings,
    PrefectSettingsConfigDict,
    build_settings_config,
)
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from typing_extensions import Self

from prefect_gpu.errors import SettingError
from prefect_gpu.units import SIZES_ACCEPTED, parse_bytes

#: Prefix of all settings in the environment.
PREFIX = "PREFECT_INTEGRATIONS_GPU_"


def _word(otherwise: str) -> WrapValidator:
    """Return a validator that ignores case and outer spaces; its only error says that a value is `otherwise`."""

    def read(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            if not isinstance(value, bool):
                return handler(value.strip().lower() if isinstance(value, str) else value)
        except ValueError:
            pass
        raise ValueError(f"{value!r} is {otherwise}")

    return WrapValidator(read)


def _read_headroom(text: object) -> int | None:
    if text is None:
        return None
    try:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is not text")
        return 0 if text.strip() == "0" else parse_bytes(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{error}; accepted: {SIZES_ACCEPTED}, or 0") from error


def _read_folder(given: object) -> object:
    if not isinstance(given, (str, Path)):
        return given
    try:
        # An empty text means `None`, not the working folder.
        return Path(given).expanduser() if str(given).strip() else None
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _read_ledger(given: object) -> object:
    folder = _read_folder(given)
    if isinstance(folder, Path) and not folder.is_absolute():
        raise ValueError(
            "it is not an absolute path, as in /mnt/ledger; flows of other folders would have another ledger"
        )
    return folder


def _read_start_method(given: object) -> object:
    if given != "forkserver":
        return given
    text = (
        "start_method='forkserver' is 'auto' now; the next version accepts only 'auto' and 'spawn'"
    )
    warnings.warn(text, FutureWarning, stacklevel=2)
    return "auto"


Standby = Annotated[
    Literal["auto"] | NonNegativeInt,
    _word("neither 'auto' nor a number of processes (0: none are started ahead)"),
]
StartMethod = Annotated[
    Literal["auto", "spawn"],
    BeforeValidator(_read_start_method),
    _word(
        "neither 'auto' nor 'spawn' (a fork of the flow's own process would have its locks, but "
        "not the threads that hold them)"
    ),
]


class GPUSettings(PrefectBaseSettings):
    """Defaults of every `GPUTaskRunner`. The runner's arguments take precedence."""

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
        description="Most GPU tasks running at once. None: as many as memory holds.",
    )
    max_tasks_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Most GPU tasks on one device at once. None: as many as memory holds.",
    )
    one_busy_task_per_device: bool = Field(
        default=True,
        description="Whether a task whose GPU computed for 90 % of an earlier run, of 10 s or more, waits while another such "
        "task is on each device where it fits. By turns both would take twice as long.",
    )
    headroom: Annotated[int | None, BeforeValidator(_read_headroom)] = Field(
        default=None,
        description="Memory of each device that is always left free, as in 512MiB, or 0; read as bytes. "
        "None: by the kind of device.",
    )
    start_method: StartMethod = Field(
        default="auto",
        description="How the process of a task starts: auto, as a fork of a fresh interpreter that has imported the "
        "task's libraries and done nothing else, where such forks were shown to work; or spawn, as a fresh interpreter.",
    )
    sharing: Annotated[Literal["time", "mps"], _word("neither 'time' nor 'mps'")] = Field(
        default="time",
        description="How tasks that share a GPU compute: time, by turns; or mps, at the same time, as clients of NVIDIA's "
        "Multi-Process Service.",
    )
    ledger: Annotated[Path | None, BeforeValidator(_read_ledger)] = Field(
        default=None,
        description="Folder of the ledger in which all flows of the machine see what the others have reserved, on "
        "a local disk: one that is mounted into several containers, or that a group may write to. None: a "
        "folder of the user.",
    )
    reports: bool = Field(
        default=True,
        description="Publish a memory report for each process and each flow run as artifacts.",
    )
    live_view: bool = Field(
        default=True,
        description="Show the devices, and what runs and waits, in the last lines of the terminal while a flow "
        "runs. Without a terminal, and where another progress bar or live display is used, nothing is shown.",
    )
    progress: bool = Field(
        default=True,
        description="Publish how many GPU task runs of a flow run have ended, as a progress artifact, every few "
        "seconds while it runs. It needs the reports.",
    )
    memory_snapshots: Annotated[Path | None, BeforeValidator(_read_folder)] = Field(
        default=None,
        description="Folder for PyTorch's memory snapshots: each PyTorch task records what it allocates, and "
        "writes a file if it runs out of memory. None: nothing is recorded.",
    )
    standby: Standby = Field(
        default="auto",
        description="Processes started ahead of their tasks: auto, or at most this many (0: none).",
    )

    address: str | None = Field(
        default=None,
        description="Ray cluster whose devices are used: auto, host:port or ray://host:port. None: this machine.",
    )
    num_gpus: float | None = Field(
        default=None,
        gt=0,
        description="GPUs of each node of a cluster to reserve in Ray's own count, and to use. None: all devices, "
        "and none are reserved.",
    )

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.num_gpus is not None and not self.address:
            raise ValueError(
                "num_gpus= is for a cluster; name it with address=, or leave num_gpus out"
            )
        return self


@functools.cache
def _check_name(name: str) -> None:
    """Warn of a variable that is no setting, once: the settings are read several times in a flow."""
    known = [each.upper() for each in GPUSettings.model_fields]
    given = name.upper().removeprefix(PREFIX)
    if given in known:
        return
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {PREFIX}{close[0]}?" if close else f"settings: {', '.join(sorted(known))}"
    # Where the runner was made.
    warnings.warn(f"{name} is no setting of prefect_gpu; {hint}", stacklevel=4)


def read_settings(**given: Any) -> GPUSettings:
    """Return the settings, overridden by `given` arguments of a runner; `SettingError`: unreadable or contradictory.

    A variable that is no setting, although it begins as all settings do, is a `UserWarning`.
    """
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX):
            _check_name(name)
    try:
        return GPUSettings(**given)
    except ValidationError as error:
        problems = []
        for each in error.errors():
            said = each["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            name = "_".join(map(str, each["loc"][:1]))
            if name in given:
                said = f"GPUTaskRunner({name}={given[name]!r}): {said}"
            elif name:
                said = f"{PREFIX}{name.upper()}={each['input']!r}: {said}"
            problems.append(said)
        raise SettingError("; ".join(problems)) from None
