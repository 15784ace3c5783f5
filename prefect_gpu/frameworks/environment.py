"""The environment variables that a child starts with, from its policy.

It merges what holds for every framework (devices, threads) with what each adapter wants. It reads
no environment itself: the caller says what would be inherited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prefect_gpu.frameworks.adapter import FrameworkAdapter, FrameworkPolicy

#: Read by OpenMP, MKL, OpenBLAS, NumExpr, Accelerate and TensorFlow when they load.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)

#: For frameworks that the tags leave out: imported in passing, they must not take the whole device,
#: as TensorFlow (all of it) and JAX (three quarters) do by default.
MODEST_DEFAULTS = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def child_environment(
    policy: FrameworkPolicy,
    adapters: Iterable[FrameworkAdapter],
    inherited: Mapping[str, str],
) -> dict[str, str | None]:
    """Give the variables in which a child differs from what it would inherit.

    Args:
        policy: What the child's frameworks may do.
        adapters: Those of `registry.adapters_for(policy)`.
        inherited: Environment of the process that starts it.

    Returns:
        Values to set, and `None` for what must be removed; nothing that is inherited as it should
        be, but for the devices, which are always there.
    """
    wanted: dict[str, str | None] = dict.fromkeys(THREAD_VARIABLES, str(policy.cpus))
    if policy.device_kind == "nvml":
        if policy.frameworks != ("none",):
            wanted.update(MODEST_DEFAULTS)
        devices = ",".join(policy.device_uuids)
    else:
        # Host and simulated devices promise no GPU: nothing may touch one by the way.
        devices = ""
    for adapter in adapters:
        wanted.update(adapter.environment(policy))
    changed = {name: value for name, value in wanted.items() if inherited.get(name) != value}
    return {
        **changed,
        "CUDA_VISIBLE_DEVICES": devices,
        # By UUID the order does not matter; by index, for code that reads it, it is NVML's.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
