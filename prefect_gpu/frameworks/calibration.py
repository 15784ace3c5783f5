"""What runs in a calibration child: real work on device 0, then the allocator's own figure.

The child's parent reads what the driver shows for the process meanwhile; the difference is the
context. Launching that child, with growth and one device, is not done here.
"""

from __future__ import annotations

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.registry import ADAPTERS


def run_calibration(framework: str) -> int:
    """Child: use the device through a framework, and keep what it loaded.

    Args:
        framework: As in `gpu:framework=`.

    Returns:
        Bytes that its allocator still holds on device 0. The process must live until the driver's
        figure has been read.

    Raises:
        FrameworkError: There is no such framework here, or it failed on the device.
    """
    adapter = ADAPTERS.get(framework)
    if adapter is None:
        raise FrameworkError(framework, f"cannot be calibrated; can: {', '.join(ADAPTERS)}")
    try:
        return adapter.calibrate()
    except FrameworkError:
        raise
    except Exception as error:
        raise FrameworkError(
            framework, f"calibration failed: {type(error).__name__}: {error}"
        ) from error
