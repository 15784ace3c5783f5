"""Has this process touched a GPU's driver? It looks without touching it itself."""

from __future__ import annotations

import ctypes
import os

#: `CUDA_ERROR_NOT_INITIALIZED` of the driver API: the library is loaded and nobody called `cuInit`.
NOT_INITIALIZED = 3


def why_touched() -> str:
    """Say how the driver was touched; empty: it was not.

    A process that has called `cuInit` keeps the devices that were visible then, and must not be forked.
    """
    try:
        # Only if somebody has loaded it already.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return ""
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) == NOT_INITIALIZED:
        return ""
    return "the CUDA driver is initialised in it"
