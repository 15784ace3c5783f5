"""Simulated devices whose processes can be suspended, by a driver that is a fake; `install` comes first in a program.

What a process holds is nowhere while it is away, and on another device once it has come back there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from prefect_gpu.devices.simulated import SimulatedMemory
from prefect_gpu.runner import attempt, suspender
from prefect_gpu.suspension import eligibility
from prefect_gpu.suspension.driver_calls import DriverCalls

FAKE = Path(__file__).with_name("fake_driver.py")

AWAY = "2"


def install(
    folder: Path | str,
    *faults: str,
    replaced: Callable[[object, str, object], None] = setattr,
) -> DriverCalls:
    """Let simulated devices be suspended, in this process.

    Args:
        folder: Where the fake driver keeps what it knows.
        faults: See `fake_driver`.
        replaced: Replaces an attribute, as `MonkeyPatch.setattr`.
    """
    folder = Path(folder).resolve()
    folder.mkdir(exist_ok=True)
    calls = DriverCalls([sys.executable, str(FAKE), str(folder), *faults])
    refusal, held_bytes = eligibility.refusal, SimulatedMemory.held_bytes

    def judge(candidate: eligibility.Candidate) -> str:
        why = refusal(candidate)
        return "" if "frameworks" in why or "processes hold" in why else why

    def seen_bytes(memory: SimulatedMemory, device_uuid: str) -> int:
        pid = memory._pid
        state = folder / str(pid)
        if state.exists() and state.read_text() == AWAY:
            return 0
        moves = folder / f"{pid}-onto"
        turns = [line.split() for line in moves.read_text().splitlines()] if moves.exists() else []
        for words in reversed(turns):
            device_uuid = {new: old for old, new in zip(words[::2], words[1::2], strict=True)}.get(
                device_uuid, device_uuid
            )
        return held_bytes(memory, device_uuid)

    for module in (eligibility, attempt):
        replaced(module, "MOVED_KINDS", frozenset({"simulated"}))
    replaced(suspender, "shared_calls", lambda: calls)
    replaced(suspender, "refusal", judge)
    replaced(SimulatedMemory, "held_bytes", seen_bytes)
    return calls
