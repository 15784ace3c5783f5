"""State of the CUDA driver in this process, if other code has loaded it.

Nothing here loads or initialises the driver, or creates a context. `nvml` reads the free memory of devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

#: File name of the CUDA driver's library, under which every program loads the driver.
DRIVER_LIBRARY = "libcuda.so.1"

#: `CU_STREAM_CAPTURE_MODE_RELAXED`: a thread's calls neither heed nor invalidate captures of other threads.
_RELAXED = 2

#: Result of a driver's call before the driver was initialised (`CUDA_ERROR_NOT_INITIALIZED`).
_NOT_INITIALIZED = 3

#: Results of a query of a stream for faults that end a context: of a kernel (700, 710 to 719), of MPS (805 to 810).
_FAULTS = frozenset((700, *range(710, 720), *range(805, 811)))

#: `CU_STREAM_PER_THREAD` of `cuda.h`: the default stream of the thread that asks.
PER_THREAD = 2


def loaded_driver() -> ctypes.CDLL | None:
    """Return the CUDA driver's library; `None`: this process has not loaded it."""
    try:
        return ctypes.CDLL(DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        # Not loaded, or a system without this flag (macOS).
        return None


def is_initialized() -> bool:
    """Return whether the CUDA driver was initialised in this process."""
    driver = loaded_driver()
    count = ctypes.c_int()
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED


@contextlib.contextmanager
def unbound_by_captures() -> Iterator[bool]:
    """Allow this thread to free device memory while another captures a CUDA graph; yield `False` if the driver cannot.

    By default a call such as `cudaFree`, on any thread and device, fails during a capture of mode "global"
    (PyTorch's), and invalidates this capture. The mode belongs to the thread, and is restored at the end.
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
    """Return the id of a visible device's primary context, which frameworks share; 0: no context now; `None`: unknown.

    The id is unique in the life of this process. `cuCtxGetId` is part of CUDA 12 and later.
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
    # The context exists, so this call only adds a reference.
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    failed = driver.cuCtxGetId(context, ctypes.byref(identity))
    driver.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else identity.value


def context_fault(stream: int | None = None) -> str:
    """Return the driver's name of the fault that ended this thread's context, else device 0's primary one; "": none.

    The query is of `stream`: `None` for the legacy default stream, or `PER_THREAD`, which leaves the capture of a blocking
    stream in another thread valid. Such a fault (an illegal address, an assertion, the end of the MPS server) is the answer to every later call.
    """
    driver = loaded_driver()
    context = _find_context(driver)
    if driver is None or context is None:
        return ""
    with unbound_by_captures():
        code = driver.cuCtxPushCurrent_v2(context)
        if not code:
            code = driver.cuStreamQuery(ctypes.c_void_p(stream))
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    if code not in _FAULTS:
        return ""
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"CUDA_ERROR_UNKNOWN").decode()


def free_bytes() -> int | None:
    """Return the free memory of this thread's context, else of device 0's primary one; `None`: no context, or unknown.

    For a client of MPS with a limit of memory, it is what is left of the limit.
    """
    driver = loaded_driver()
    context, free = _find_context(driver), ctypes.c_size_t()
    if driver is None or context is None or driver.cuCtxPushCurrent_v2(context):
        return None
    failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(ctypes.c_size_t()))
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return None if failed else free.value


def _find_context(driver: ctypes.CDLL | None) -> ctypes.c_void_p | None:
    """Return this thread's context, else device 0's primary one; `None`: neither exists."""
    context, device, active = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuCtxGetCurrent(ctypes.byref(context)):
        return None
    if context.value:
        return context
    found = ctypes.byref(ctypes.c_uint()), ctypes.byref(active)
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDevicePrimaryCtxGetState(device, *found) or not active.value:
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    driver.cuDevicePrimaryCtxRelease_v2(device)
    return context


class PrimaryContexts:
    """Detects whether the primary context of one of `count` visible devices was destroyed. For one thread at a time.

    `cudaDeviceReset` and, in `numba.cuda`, `close` and `Device.reset` destroy it; frameworks still count its memory.
    """

    def __init__(self, count: int) -> None:
        self._ids = [0] * count
        self._driver: ctypes.CDLL | None = None
        #: Whether a context was ever destroyed.
        self.lost = False

    def read(self) -> bool:
        """Compare the devices' contexts with the last reading, and return whether a context was ever destroyed."""
        self._driver = self._driver or loaded_driver()
        if self._driver is None:
            return False
        for ordinal, before in enumerate(self._ids):
            now = primary_context_id(self._driver, ordinal)
            if now is not None:
                self.lost |= before not in (0, now)
                self._ids[ordinal] = now
        return self.lost
