"""The JAX adapter: caps JAX by environment variables, reads its allocator, converts arrays to NumPy.

XLA reads the fraction of a device's memory that it may take, and whether to take the fraction as one region. Under a
cap it takes one region: regions that grow are never merged, and a program ran out of memory under a cap 30 % above its
peak use (an attention of 3 GiB on an H200, JAX 0.11). `limit` takes the region at the first array, `all` at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from typing import Any

from prefect_gpu.frameworks import adapter
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy, imported

logger = logging.getLogger(__name__)

#: Variable with the largest fraction of each device's memory that XLA may take.
FRACTION = "XLA_CLIENT_MEM_FRACTION"


class JaxAdapter(adapter.FrameworkAdapter):
    """Applies a policy to JAX: memory on CUDA devices, and the number of threads. Both are set by the environment."""

    name = "jax"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return the variables of preallocation, memory fraction (one for all devices: the smallest) and threads.

        The fraction's old name is removed: with both, JAX 0.11 logs an error and silently uses the CPU (measured). XLA
        sizes its thread pools by `NPROC`. On GPUs these threads compile, before any work is done, so only a tag bounds
        them: two compilations of a small transformer took 6.8 s with 16 threads and 10.6 s with 2, each 31 s of CPU
        time (H200).
        """
        fraction = policy.cap_fraction(self.name)
        whole = fraction is not None and not policy.on_demand
        variables: dict[str, str | None] = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true" if whole else "false",
            FRACTION: None if fraction is None else f"{min(1.0, fraction):.6f}",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": None,
        }
        if fraction is not None:
            # JAX's other allocators have no fraction.
            variables["XLA_PYTHON_CLIENT_ALLOCATOR"] = None
        if policy.cpus_stated or policy.device_kind != "nvml":
            variables["NPROC"] = str(policy.cpus)
        return variables

    def apply(self, policy: FrameworkPolicy) -> None:
        """Reset environment variables of the body that exceed the memory cap, and check that JAX finds its devices.

        The check is made only if a tag names JAX: without its CUDA plugin JAX would silently use the CPU.
        """
        if policy.cap_bytes(self.name) is not None:
            _hold_cap(os.environ, self.environment(policy))
        if policy.device_kind != "nvml" or self.name not in policy.frameworks:
            return
        jax = import_module("jax")
        if policy.allocation == "all":
            # The allocator takes its region with the first array, not at the start of the backend.
            _start_devices(jax)
        try:
            found, problem = len(jax.devices("gpu")), ""
        except RuntimeError as error:
            found, problem = 0, f" ({error})"
        self.check_devices(
            policy,
            found,
            f"{problem}, so it would silently use the CPU; the likely reason is a jax without its "
            f"CUDA plugin (install jax[cuda13] or the one for this driver)",
        )

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Return `True` for variables that XLA reads when a backend starts."""
        return name.startswith("XLA_PYTHON_CLIENT_") or name in (FRACTION, "NPROC")

    def started(self) -> Any:
        """Return the module `jax` once a backend has started, else `None`."""
        # Listing JAX's devices would start a backend; there is no public way to look.
        bridge = imported("jax._src.xla_bridge", "_backends")
        return imported("jax", "local_devices") if bridge is not None and bridge._backends else None

    def counters(self) -> Counters | None:
        """Return the counters of XLA's allocator, summed over all GPUs; `None`: no backend or no GPU in use."""
        jax = self.started()
        if jax is None:
            return None
        stats = [d.memory_stats() for d in jax.local_devices() if d.platform == "gpu"]
        known = [device for device in stats if device]
        if not known:
            return None

        def total(key: str, default: str) -> int:
            return sum(int(device.get(key, device.get(default, 0))) for device in known)

        has_pool = all("pool_bytes" in device for device in known)
        return Counters(
            live_bytes=total("bytes_in_use", ""),
            reserved_bytes=total("pool_bytes", "") if has_pool else None,
            peak_live_bytes=total("peak_bytes_in_use", "bytes_in_use"),
            peak_reserved_bytes=total("peak_pool_bytes", "pool_bytes") if has_pool else None,
        )

    def release_cached(self) -> None:
        """Release compiled programs and their constants; the next call compiles again. Live arrays stay.

        XLA's allocator keeps its regions until the process ends: only memory of programs outside of them is freed.
        """
        jax = self.started()
        if jax is not None:
            jax.clear_caches()

    def reduce_to_host(self, value: Any) -> Any:
        """Return a pickle reduction of an array to NumPy, on the CPU too: flows see one type. Else `NotImplemented`."""
        jax = imported("jax", "Array")
        is_array = jax is not None and isinstance(value, jax.Array)
        if not is_array or not getattr(value, "is_fully_addressable", False):
            return NotImplemented
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return adapter.host_value, (import_module("numpy").asarray(value),)

    def calibrate(self) -> int:
        """Load cuBLAS, cuDNN and cuFFT, and return the bytes that the allocator then holds; needs preallocation off."""
        jax = import_module("jax")
        jnp = import_module("jax.numpy")
        for dtype in (jnp.float32, jnp.bfloat16):
            a = jnp.ones((512, 512), dtype)
            (a @ a).block_until_ready()
            images, kernel = jnp.ones((8, 16, 32, 32), dtype), jnp.ones((16, 16, 3, 3), dtype)
            jax.lax.conv(images, kernel, (1, 1), "SAME").block_until_ready()
        jnp.fft.rfft2(jnp.ones((64, 64))).block_until_ready()
        stats = jax.local_devices()[0].memory_stats() or {}
        return int(stats.get("pool_bytes", stats.get("peak_bytes_in_use", 0)))


def _hold_cap(environ: MutableMapping[str, str], capped: Mapping[str, str | None]) -> None:
    """Reset variables that the body set before its import of JAX and that exceed the cap; a smaller fraction stays."""
    undone = []
    for name, value in capped.items():
        asked = environ.get(name)
        if not name.startswith("XLA_") or asked == value:
            continue
        if name == FRACTION and _is_smaller(asked, value):
            continue
        if asked is not None:
            undone.append(f"{name}={asked}")
            del environ[name]
        if value is not None:
            environ[name] = value
    if undone:
        logger.warning(
            "%s of the body is not used: JAX keeps to the budget of its GPU task", ", ".join(undone)
        )


def _is_smaller(asked: str | None, cap: str | None) -> bool:
    try:
        return 0 < float(asked or "") < float(cap or "")
    except ValueError:
        return False


def _start_devices(jax: Any) -> None:  # needs a GPU
    for device in jax.local_devices():
        if device.platform == "gpu":
            jax.device_put(0, device).block_until_ready()
