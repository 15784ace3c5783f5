"""Prefect events of GPU task runs and devices, as values. `engine` emits events; automations compare only labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect_gpu.reports.model import BudgetSource, TaskReport, figures_of
from prefect_gpu.scheduling.model import Device, Placement

PLACED = "prefect-gpu.task-run.placed"
OUT_OF_MEMORY = "prefect-gpu.task-run.out-of-memory"
LEAKED = "prefect-gpu.task-run.leaked"
SET_ASIDE = "prefect-gpu.device-set-aside"

#: Role of a device among the related resources of an event.
DEVICE_ROLE = "gpu-device"

#: Most characters of a text in a payload.
TEXT_LIMIT = 500


@dataclass(frozen=True, slots=True)
class GPUEvent:
    """The content of one Prefect event."""

    name: str
    #: Devices of the process, or the device that fails.
    devices: tuple[Device, ...]
    #: Names of sizes in bytes end in `_bytes`. `None`: not known, or there is none.
    payload: Mapping[str, object]
    #: Labels of the event's resource in addition to its usual labels.
    labels: Mapping[str, str] = field(default_factory=dict)


def placed_event(
    placement: Placement, source: BudgetSource, attempt: int, waited_s: float
) -> GPUEvent:
    """Return the event of a placed process. `attempt` counts from 1; `waited_s` is the wait for the devices."""
    payload = {
        "attempt": attempt,
        "devices": _described(placement.devices),
        "budget_bytes": min(placement.budget_bytes),
        "budget_source": source,
        "queued_s": round(waited_s, 3),
    }
    return GPUEvent(PLACED, placement.devices, payload)


def ended_events(report: TaskReport) -> list[GPUEvent]:
    """Return the events of an ended process: out of memory, leaked memory, or (mostly) none."""
    about = {**figures_of(report, "attempt"), "devices": _described(report.devices)}
    events = []
    if report.outcome == "oom" or report.cause == "host":
        runs_again = bool(report.next_words)
        payload = {
            **about,
            **figures_of(report, "cause", "budget_bytes", "budget_source"),
            "needed_bytes": report.wanted_bytes,
            "runs_again": runs_again,
            "next_budget_bytes": report.next_budget_bytes,
            "error": report.error[:TEXT_LIMIT],
        }
        again = str(runs_again).lower()
        labels = {"prefect-gpu.cause": report.cause, "prefect-gpu.runs-again": again}
        events.append(GPUEvent(OUT_OF_MEMORY, report.devices, payload, labels))
    if report.leaked_bytes:
        payload = {**about, **figures_of(report, "leaked_bytes")}
        events.append(GPUEvent(LEAKED, report.devices, payload))
    return events


def set_aside_event(device: Device, why: str) -> GPUEvent:
    """Return the event of a device that is no longer used because it fails; `why` is the driver's reason."""
    payload = {"devices": _described([device]), "reason": why[:TEXT_LIMIT]}
    return GPUEvent(SET_ASIDE, (device,), payload)


def device_resource(device: Device) -> dict[str, str]:
    """Return the labels of a device as a resource of a Prefect event."""
    return {
        "prefect.resource.id": f"prefect-gpu.device.{device.uuid}",
        "prefect.resource.name": device.name,
        "prefect-gpu.host": device.host,
    }


def _described(devices: Sequence[Device]) -> list[dict[str, object]]:
    return [
        {"uuid": d.uuid, "index": d.index, "name": d.name, "total_bytes": d.total_bytes}
        for d in devices
    ]
