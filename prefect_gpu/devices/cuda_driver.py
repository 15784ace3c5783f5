"""State of the CUDA driver in this process, if other code has loaded it.

Nothing here loads or initialises the driver, or creates a context. `nvml` reads the free memory of devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

#: The driver's library, by the name under which every program loads it.
DRIVER_LIBRARY = "libcuda.so.1"

#: Calls of a thread in this mode neither heed nor invalidate captures of other threads: `CU_STREAM_CAPTURE_MODE_RELAXED`.
_RELAXED = 2

#: Result of the driver before it was initialised (`CUDA_ERROR_NOT_INITIALIZED`).
_NOT_INITIALIZED = 3


def loaded_driver() -> ctypes.CDLL | None:
    """Return the driver's library; `None`: this process has not loaded it."""
    try:
        return ctypes.CDLL(DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        # The driver is not loaded, or this system has no such flag (macOS).
        return None


def is_initialized() -> bool:
    """Return whether the driver was initialised in this process."""
    driver = loaded_driver()
    count = ctypes.c_int()
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED


@contextlib.contextmanager
def unbound_by_captures() -> Iterator[bool]:
    """Allow this thread to free device memory while another thread captures a CUDA graph; yield `False` if it may not.

    By default a call such as `cudaFree`, on any thread and any device, fails during a capture of mode "global", which is
    PyTorch's, and invalidates it. The mode belongs to the thread; its old one is restored at the end.
    """
    driver, mode = loaded_driver(), ctypes.c_int(_RELAXED)
    exchange = getattr(driver, "cuThreadExchangeStreamCaptureMode", None)
    if exchange is None or exchange(ctypes.byref(mode)):
        yield False
        return
    try:
        yield True
    finally:
        exchange(ctypes.byref(mode))


def primary_context_id(driver: ctypes.CDLL, ordinal: int) -> int | None:
    """Return the id of the primary context of a visible device, unique in the life of this process.

    The frameworks share that context. `cuCtxGetId` is part of CUDA 12 and later.

    Returns:
        The id; 0: there is no context now. `None`: the driver does not say.
    """
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)):
        return None
    found = ctypes.byref(flags), ctypes.byref(active)
    if not hasattr(driver, "cuCtxGetId") or driver.cuDevicePrimaryCtxGetState(device, *found):
        return None
    if not active.value:
        return 0
    context, identity = ctypes.c_void_p(), ctypes.c_ulonglong()
    # The context exists, so this call only adds a user.
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    failed = driver.cuCtxGetId(context, ctypes.byref(identity))
    driver.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else identity.value


class PrimaryContexts:
    """Detects that the primary context of one of `count` devices was destroyed, whose memory frameworks still count.

    `cudaDeviceReset`, and `close` and `Device.reset` of `numba.cuda` do that. For one thread at a time.
    """

    def __init__(self, count: int) -> None:
        self._ids = [0] * count
        self._driver: ctypes.CDLL | None = None
        #: Whether a context was destroyed.
        self.lost = False

    def read(self) -> bool:
        """Compare the contexts with the last reading; return `lost`."""
        self._driver = self._driver or loaded_driver()
        if self._driver is None:
            return False
        for ordinal, before in enumerate(self._ids):
            now = primary_context_id(self._driver, ordinal)
            if now is not None:
                self.lost |= before not in (0, now)
                self._ids[ordinal] = now
        return self.lost
