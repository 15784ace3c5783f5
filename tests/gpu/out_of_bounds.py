"""A task whose kernel writes past the end of a tensor. `check_torch_tools` runs it under `compute-sanitizer`.

compute-sanitizer --target-processes all python tests/gpu/out_of_bounds.py off
python tests/gpu/out_of_bounds.py on
"""

from __future__ import annotations

import sys

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

#: Numbers of the tensor, and how far behind its end the kernel writes.
COUNT, BEYOND = 256, 64

KERNEL = r"""
extern "C" __global__ void put(float* numbers, int at) { numbers[at] = 1.0f; }
"""


@task
def write() -> str:
    import cupy
    import torch

    numbers = torch.zeros(COUNT, device="cuda")
    put = cupy.RawKernel(KERNEL, "put")
    put((1,), (1,), (cupy.uint64(numbers.data_ptr()), cupy.int32(COUNT + BEYOND)))
    cupy.cuda.runtime.deviceSynchronize()
    return "no error was raised"


@flow(name="out-of-bounds", log_prints=False)
def out_of_bounds(caching: str, devices: str) -> None:
    # A cap of the budget would contradict `caching="off"`.
    tags = gpu(memory="4GiB", framework="torch", caching=caching, allocation="growth")  # type: ignore[arg-type]
    found = write.with_options(tags=tags).submit().result(raise_on_failure=False)
    print(f"caching {caching}: {str(found).strip().splitlines()[0]}", flush=True)


if __name__ == "__main__":
    devices = sys.argv[2] if len(sys.argv) > 2 else "nvml"
    runner = GPUTaskRunner(devices=devices, standby=0)
    out_of_bounds.with_options(task_runner=runner)(sys.argv[1], devices)  # type: ignore[arg-type]
