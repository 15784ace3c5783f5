"""Parse `CUDA_VISIBLE_DEVICES` by CUDA's own rules, to find the devices that it allows the parent. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prefect_gpu.scheduling.model import Device

_INDEX = re.compile(r"[0-9]+")
_LEGACY_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/([0-9]+)/([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that CUDA could use: a whole GPU, or a MIG instance."""

    #: Its UUID is `GPU-…` or `MIG-…`. Instances of one GPU share its `nvml_index`, the position on the PCI bus.
    device: Device
    #: UUID of the whole GPU.
    gpu_uuid: str
    #: MIG ids of an instance, the GPU instance's first; `None` for a whole GPU.
    ids: tuple[int, int] | None = None


def parse_visible(
    value: str | None, candidates: Sequence[Candidate]
) -> tuple[tuple[Candidate, ...], str]:
    """Return the devices that a value of `CUDA_VISIBLE_DEVICES` names, and why devices are missing; empty: none is.

    `candidates` are in PCI bus order; `None` as value allows all. CUDA ends the list at the first entry that names no
    device (users write `-1`, `none` or `NoDevFiles`), and sees no device if one is named twice. The index or UUID of a
    GPU in MIG mode makes all of its instances visible: CUDA uses one per process, but each can be used.
    """
    if value is None:
        return tuple(candidates), ""
    if not value.strip():
        return (), "it is empty"
    chosen: list[Candidate] = []
    reason = ""
    for entry in (part.strip() for part in value.split(",")):
        found = find_devices(entry, candidates)
        if not found:
            reason = f"{entry!r} names no device here, and CUDA ignores all that follows it"
            break
        chosen += found
    repeated = next((found for found in chosen if chosen.count(found) > 1), None)
    if repeated is not None:
        return (), f"it names {repeated.device.uuid} twice, and CUDA then sees no device"
    return tuple(chosen), reason


def find_devices(entry: str, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the devices of an entry: index, UUID or unique UUID prefix. Several devices only for a GPU in MIG mode."""
    if _INDEX.fullmatch(entry):
        return tuple(c for c in candidates if c.device.nvml_index == int(entry))
    if legacy := _LEGACY_MIG.fullmatch(entry):
        wanted = (legacy[1].lower(), (int(legacy[2]), int(legacy[3])))
        return tuple(c for c in candidates if (c.gpu_uuid.lower(), c.ids) == wanted)
    prefix = entry.lower()
    if not prefix.startswith(("gpu-", "mig-")):
        return ()
    # Instances of one GPU share the name of the GPU.
    named = {c.gpu_uuid if prefix.startswith("gpu-") else c.device.uuid for c in candidates}
    fitting = [name for name in named if name.lower() == prefix] or [
        name for name in named if name.lower().startswith(prefix)
    ]
    if len(fitting) != 1:
        return ()
    return tuple(c for c in candidates if fitting[0] in (c.device.uuid, c.gpu_uuid))
