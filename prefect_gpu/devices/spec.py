"""The argument `devices=` as a `DeviceSpec`, and the device reader for it. Equal specifications share one reader."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect_gpu.clock import Clock
from prefect_gpu.devices.host import HostReader
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.devices.simulated import SIMULATED_ACCEPTED, SimulatedDevices, SimulatedReader
from prefect_gpu.errors import DeviceError

logger = logging.getLogger(__name__)

SpecKind = Literal["auto", "nvml", "host", "simulated"]

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

SPECS_ACCEPTED = (
    f"'auto', 'nvml', 'host', 'simulated:' and {SIMULATED_ACCEPTED}, or a list of indices or UUID "
    f"prefixes such as [0, 'GPU-1a2b']"
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The parsed value of `devices=`."""

    kind: SpecKind
    #: Indices among the visible devices or UUID prefixes, in this order; empty: all devices of `kind`.
    chosen: tuple[str, ...] = ()
    #: Set for kind "simulated" alone.
    simulated: SimulatedDevices | None = None


def parse_spec(value: object) -> DeviceSpec:
    """Return the specification of a value: one of `SPECS_ACCEPTED` or a class of this folder; else `DeviceError`."""
    if isinstance(value, DeviceSpec):
        return value
    if isinstance(value, SimulatedDevices):
        return DeviceSpec("simulated", simulated=value)
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return _parse_list(value, value)
    raise _refuse(value, "it is neither text nor a list")


def _parse_text(text: str) -> DeviceSpec:
    word = text.strip().lower()
    words: dict[str, SpecKind] = {"auto": "auto", "nvml": "nvml", "host": "host"}
    if word in words:
        return DeviceSpec(words[word])
    kind, colon, rest = text.strip().partition(":")
    if kind.strip().lower() == "simulated":
        if not colon:
            raise _refuse(text, "it does not say which devices to simulate")
        return DeviceSpec("simulated", simulated=SimulatedDevices(rest.strip()))
    return _parse_list(text.split(","), text)


def _parse_list(entries: Sequence[Any], given: object) -> DeviceSpec:
    chosen: list[str] = []
    for entry in entries:
        name = str(entry).strip() if type(entry) in (int, str) else ""
        if name.isdecimal():
            name = str(int(name))
        elif not name.upper().startswith(("GPU-", "MIG-")):
            raise _refuse(given, f"{entry!r} is neither an index nor the start of a UUID")
        if name in chosen:
            raise _refuse(given, f"{entry!r} is in it twice")
        chosen.append(name)
    if not chosen:
        raise _refuse(given, "it names no device")
    return DeviceSpec("nvml", tuple(chosen))


def _refuse(given: object, problem: str) -> DeviceError:
    return DeviceError(f"devices={given!r}: {problem}; accepted: {SPECS_ACCEPTED}")


def open_reader(
    spec: DeviceSpec,
    environ: Mapping[str, str],
    clock: Clock | None = None,
    shared: Path | None = None,
) -> DeviceReader:
    """Return the reader for the devices of a specification; `DeviceError`: no driver or devices, or sharing has failed.

    `CUDA_VISIBLE_DEVICES` in `environ` limits the NVIDIA devices. In the folder `shared` (`None`: the default one)
    processes share simulated devices with a name.
    """
    if spec.simulated is not None:
        try:
            folder = SharedFolder(shared) if spec.simulated.name else None
            return SimulatedReader(spec.simulated, clock, folder)
        except OSError as error:
            problem = f"{spec.simulated!r} cannot be shared by processes: {error}"
            raise DeviceError(problem) from error
    if spec.kind == "host":
        return HostReader(clock=clock)
    from prefect_gpu.devices.nvml import NvmlMissingError, NvmlReader

    try:
        return NvmlReader(environ.get(VISIBLE_VARIABLE), spec.chosen, clock)
    except DeviceError as error:
        if spec.kind != "auto":
            raise
        # A machine may have no driver. A driver that does not work deserves a warning.
        level = logging.DEBUG if isinstance(error, NvmlMissingError) else logging.WARNING
        logger.log(level, "GPU tasks use this machine's memory, not a GPU: %s", error)
        return HostReader(clock=clock)
