"""Which processes may be suspended: only tested configurations, since a failed checkpoint loses the process.

Pure. `tests.gpu.check_suspension` tests the configurations; its output is `docs/evidence/gpu-suspension.txt`.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.units import GIB, format_bytes

#: Frameworks whose processes were unharmed by twenty moves. A JAX process was lost once in three times twenty moves.
SHOWN_FRAMEWORKS = frozenset({"torch", "cupy", "tensorflow", "onnxruntime"})

#: Kinds of devices whose memory the driver can move.
MOVED_KINDS: frozenset[DeviceKind] = frozenset({"nvml"})

#: Beginning of the text for people about a process that is not suspended; the reason follows.
REFUSED = "not suspended: "

#: Bytes of host memory that must stay free after a move.
HOST_MARGIN_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task's process that is to be suspended."""

    kind: DeviceKind
    device_uuids: tuple[str, ...]
    #: Device memory of the process and its descendants.
    used_bytes: int
    #: Number of the task's processes that hold device memory.
    processes: int
    #: Frameworks that the process has used so far.
    frameworks: tuple[str, ...]
    #: Host memory that processes could still use.
    host_available_bytes: int
    #: Whether it is, or may be, a client of CUDA's Multi-Process Service.
    mps: bool = False
    #: Whether an earlier move lost a process of the same task.
    lost_before: bool = False


def refusal(candidate: Candidate) -> str:
    """Return why a process may not be suspended, as text for people; empty: it may be."""
    if candidate.kind not in MOVED_KINDS:
        return (
            f"only memory of NVIDIA GPUs can be moved, and its device is of kind {candidate.kind}"
        )
    if any(uuid.startswith("MIG-") for uuid in candidate.device_uuids):
        return "its device is a MIG instance, whose memory the driver does not move"
    if len(candidate.device_uuids) > 1:
        return "it is on several devices, and one of two such programs was lost when it came back"
    if candidate.lost_before:
        return "a process of this task was lost by the driver in a move before"
    if candidate.mps:
        return "it may be a client of CUDA's Multi-Process Service, which cannot be moved"
    if not candidate.used_bytes or not candidate.processes:
        return "it holds no device memory yet"
    if candidate.processes > 1:
        return f"{candidate.processes} of its processes hold device memory, and only one alone is moved"
    if not candidate.frameworks:
        return "none of the frameworks that are known to be unharmed has device memory in it"
    unknown = sorted(set(candidate.frameworks) - SHOWN_FRAMEWORKS)
    if unknown:
        return (
            f"it uses {', '.join(unknown)}; known to be unharmed are processes of "
            f"{', '.join(sorted(SHOWN_FRAMEWORKS))}"
        )
    room_bytes = candidate.host_available_bytes - HOST_MARGIN_BYTES
    if candidate.used_bytes > room_bytes:
        return (
            f"its {format_bytes(candidate.used_bytes)} do not fit into the machine's own memory: "
            f"{format_bytes(max(0, room_bytes))} can be used"
        )
    return ""
