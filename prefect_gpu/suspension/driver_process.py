"""The driver process: a small process that makes the CUDA driver's checkpoint calls for a flow.

The flow's own process never loads the CUDA driver, and a call that hangs must not block the flow. `driver_calls` runs
this file as a script, with the flags `-I -S`. It imports the standard library only.

Standard input has one call a line, `ID STEP PID WORD…`. Each call runs in a thread of its own, which writes a line
`ID CODE VALUE` to standard output when the call ends. `CODE` is a `CUresult` of the driver: 0 is success. The first line
of output has the id 0, the result of `cuInit`, and 1 if the driver has the checkpoint calls (570 and later), else 0. The
process ends when standard input closes, also during a call.

| step | words | value |
|---|---|---|
| `state` | | 0 running, 1 locked, 2 checkpointed, 3 failed |
| `lock` | milliseconds | 0 |
| `checkpoint` | | 0 |
| `restore` | UUIDs of devices in pairs, old and new; none: onto the same devices | 0 |
| `unlock` | | 0 |

Source of names, structures and values: `cuda.h` of CUDA 13, section "CUDA checkpointing".
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class Driver(Protocol):
        """A CUDA driver, or a fake driver of a test."""

        def start(self) -> tuple[int, int]:
            """Initialise the driver; return the result of `cuInit`, and 1 if it has the checkpoint calls, else 0."""
            ...

        def call(self, step: str, pid: int, words: Sequence[str]) -> tuple[int, int]:
            """Make one call for the process `pid`; return its `CUresult` and its value."""
            ...


#: `CUDA_ERROR_INVALID_VALUE`; `CUDA_ERROR_NOT_FOUND`, which is also the answer without a driver.
INVALID, NOT_FOUND = 1, 500

#: Size of each argument structure in `cuda.h`, padding included.
_ARGS_BYTES = 64


class CudaDriver:
    """The CUDA driver in the shared library `library`, called through `ctypes`."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._name = library
        self._library: ctypes.CDLL | None = None

    def start(self) -> tuple[int, int]:
        """Load and initialise the driver, as in `Driver.start`. Without a context, no device memory is taken."""
        try:
            self._library = ctypes.CDLL(self._name)
        except OSError:
            return NOT_FOUND, 0
        return self._library.cuInit(0), int(hasattr(self._library, "cuCheckpointProcessLock"))

    def call(self, step: str, pid: int, words: Sequence[str]) -> tuple[int, int]:
        """Make one call for the process `pid`; return its `CUresult` and its value."""
        driver = self._library
        if driver is None or not hasattr(driver, "cuCheckpointProcessLock"):
            return NOT_FOUND, 0
        if step == "state":
            state = ctypes.c_int()
            return driver.cuCheckpointProcessGetState(pid, ctypes.byref(state)), state.value
        if step == "lock":
            arguments = (ctypes.c_ubyte * _ARGS_BYTES)()
            ctypes.c_uint.from_buffer(arguments).value = int(words[0])
            return driver.cuCheckpointProcessLock(pid, arguments), 0
        if step == "checkpoint":
            return driver.cuCheckpointProcessCheckpoint(pid, None), 0
        if step == "restore" and words:
            # `{CUcheckpointGpuPair *gpuPairs; unsigned int gpuPairsCount; …}`; a pair is two UUIDs of 16 bytes.
            uuids = _complete(list(map(_uuid_bytes, words)), self._device_uuids(driver))
            pairs = ctypes.create_string_buffer(b"".join(uuids))
            arguments = (ctypes.c_ubyte * _ARGS_BYTES)()
            ctypes.c_void_p.from_buffer(arguments).value = ctypes.addressof(pairs)
            ctypes.c_uint.from_buffer(arguments, 8).value = len(uuids) // 2
            return driver.cuCheckpointProcessRestore(pid, arguments), 0
        if step == "restore":
            return driver.cuCheckpointProcessRestore(pid, None), 0
        if step == "unlock":
            return driver.cuCheckpointProcessUnlock(pid, None), 0
        return INVALID, 0

    def _device_uuids(self, driver: ctypes.CDLL) -> list[bytes]:
        """Return the UUIDs of the machine's devices that the driver can report."""
        count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if driver.cuDeviceGetCount(ctypes.byref(count)):
            return []
        return [
            bytes(uuid)
            for index in range(count.value)
            if not driver.cuDeviceGet(ctypes.byref(device), index)
            and not driver.cuDeviceGetUuid_v2(uuid, device)
        ]


def _complete(uuids: list[bytes], machine: Sequence[bytes]) -> list[bytes]:
    """Return pairs of old and new UUIDs, followed by a pair of each other device of the machine with itself."""
    # The driver refuses a map that lacks a device that it has checkpointed, also one that `CUDA_VISIBLE_DEVICES` hid from
    # the process: on a host with four H200s (580.159.04) a restore with a map of two devices failed with 1.
    old = uuids[::2]
    return uuids + [uuid for each in machine if each not in old for uuid in (each, each)]


def _uuid_bytes(uuid: str) -> bytes:
    """Return the 16 bytes of a UUID `GPU-…`; raise `ValueError` for other texts."""
    found = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
    if len(found) != 16:
        raise ValueError(uuid)
    return found


def main(driver: Driver) -> None:
    """Make the calls that standard input lists, until it closes; then end the process."""
    writes = threading.Lock()

    def answer(call: str, code: int, value: int) -> None:
        line = f"{call} {code} {value}\n".encode()
        with writes:
            os.write(1, line)

    def carry_out(call: str, step: str, pid: str, words: Sequence[str]) -> None:
        try:
            code, value = driver.call(step, int(pid), words)
        except (ValueError, IndexError):
            code, value = INVALID, 0
        answer(call, code, value)

    answer("0", *driver.start())
    with open(0, encoding="ascii", errors="replace") as lines:
        for line in lines:
            call, step, pid, *words = line.split()
            threading.Thread(
                target=carry_out,
                name="prefect-gpu-driver",
                args=(call, step, pid, words),
                daemon=True,
            ).start()
    # Without waiting for calls that hang.
    os._exit(0)


if __name__ == "__main__":
    main(CudaDriver())
    sys.exit(0)
