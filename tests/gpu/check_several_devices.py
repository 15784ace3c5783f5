"""Tasks on two devices: which processes hold how much of which device, and what their reports say.

    python -m tests.gpu.check_several_devices

Each row is a task with `gpu:count=2`. It trains or computes on both devices the way its framework does that, and holds
1 GiB of its first device and 2 GiB of its second, so that NVML shows in which order it has them. Half of the rows
ask for the devices in the order of `gpu:device=1,0`. With fewer than two devices nothing is run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import pynvml
from prefect import task

from prefect_gpu import gpu
from tests.gpu import ddp_worker
from tests.gpu._checks import (
    GIB,
    MIB,
    ROOT,
    Ended,
    Observer,
    Process,
    gather,
    installed,
    last_of,
    nvml_handles,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

BUDGET_BYTES = 6 * GIB

#: NVML may show so much more than the budget.
MOST_OVER_BYTES = 64 * MIB

#: Seconds for one row, and for all.
ROW_S, LIMIT_S = 100.0, 280.0

HOLD_S = 1.0


def torch_spawn() -> Any:
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        torch.multiprocessing.spawn(ddp_worker.train, args=(2, address), nprocs=2)


def torchrun() -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(ROOT / "tests" / "gpu" / "ddp_worker.py")], capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(f"torchrun ended with {ended.returncode}: {ended.stderr[-1500:]}")


def lightning() -> Any:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(512, 512)

        def on_train_start(self) -> None:
            self.held = ddp_worker.hold(self.global_rank, self.device)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch).square().mean()

        def on_train_end(self) -> None:
            time.sleep(ddp_worker.HOLD_S)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy="ddp_spawn",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(512, 512), batch_size=64))


def torch_order() -> Any:
    import torch

    devices = ["cuda:0", "cuda:1"] if torch.cuda.is_available() else ["cpu", "cpu"]
    held = [ddp_worker.hold(rank, device) for rank, device in enumerate(devices)]
    time.sleep(HOLD_S)
    del held
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(2)]


def hold_in_tensorflow(tf: Any) -> Any:
    names = [device.name for device in tf.config.list_logical_devices("GPU")]
    unit = GIB if names else MIB
    held = []
    for rank, name in enumerate(names or ["CPU:0", "CPU:0"]):
        with tf.device(name):
            held.append(tf.zeros([(rank + 1) * unit // 4]))
            held[-1][0].numpy()
    time.sleep(HOLD_S)


def tensorflow_mirrored() -> Any:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input([512]), tf.keras.layers.Dense(512)])
        model.compile("sgd", "mse")
    model.fit(tf.ones([512, 512]), tf.ones([512, 512]), batch_size=64, verbose=0)
    hold_in_tensorflow(tf)
    replicas: int = strategy.num_replicas_in_sync
    on_gpus = bool(tf.config.list_physical_devices("GPU"))
    assert replicas == (2 if on_gpus else 1)


def tensorflow_session() -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    gpus = len(tf.config.list_physical_devices("GPU"))
    options = v1.GPUOptions(per_process_gpu_memory_fraction=0.4, allow_growth=True)
    with v1.Graph().as_default():
        blocks = []
        for rank in range(2):
            with tf.device(f"GPU:{rank}" if gpus else "CPU:0"):
                zeros = v1.zeros([(rank + 1) * (GIB if gpus else MIB) // 4])
                blocks.append(v1.Variable(zeros, collections=[], use_resource=True))
        with v1.Session(config=v1.ConfigProto(gpu_options=options)) as session:
            for block in blocks:
                session.run(block.initializer)
            time.sleep(HOLD_S)


def tensorflow_order() -> Any:
    import tensorflow as tf

    hold_in_tensorflow(tf)


def hold_in_jax(jax: Any) -> Any:
    import numpy

    unit = MIB if jax.default_backend() == "cpu" else GIB
    held = [
        jax.device_put(numpy.ones((rank + 1) * unit, numpy.uint8), device).block_until_ready()
        for rank, device in enumerate(jax.devices()[:2])
    ]
    time.sleep(HOLD_S)
    del held


def jax_sharding() -> Any:
    if not os.environ["CUDA_VISIBLE_DEVICES"]:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    import numpy

    mesh = jax.sharding.Mesh(numpy.array(jax.devices()), ("rows",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    x = jax.device_put(numpy.ones((1024, 1024), numpy.float32), split)
    assert len(x.addressable_shards) == 2
    assert float(jax.jit(lambda x: (x @ x.T).sum())(x)) == 1024.0**3
    hold_in_jax(jax)


def jax_order() -> Any:
    import jax

    hold_in_jax(jax)


@dataclass(frozen=True)
class Row:
    """One task."""

    name: str
    #: The module that it needs.
    package: str
    framework: Literal["torch", "tensorflow", "jax"]
    body: Callable[[], Any]
    #: `gpu:device`; empty: any.
    device: str = ""
    allocation: Literal["limit", "growth"] = "limit"
    #: Budget on each device.
    memory: str = f"{BUDGET_BYTES // GIB}GiB"


ROWS = [
    Row("DDP, torch.multiprocessing.spawn", "torch", "torch", torch_spawn),
    Row("DDP, torchrun", "torch", "torch", torchrun),
    Row("Lightning, devices=2", "lightning", "torch", lightning),
    Row("MirroredStrategy", "tensorflow", "tensorflow", tensorflow_mirrored),
    Row("MirroredStrategy, 40 %", "tensorflow", "tensorflow", tensorflow_mirrored, memory="40%"),
    Row("TensorFlow 1 session", "tensorflow", "tensorflow", tensorflow_session),
    Row("JAX, NamedSharding", "jax", "jax", jax_sharding),
    Row("DDP, torch.multiprocessing.spawn", "torch", "torch", torch_spawn, "1,0"),
    Row("PyTorch", "torch", "torch", torch_order, "1,0"),
    Row("TensorFlow", "tensorflow", "tensorflow", tensorflow_order, "1,0", "growth"),
    Row("TensorFlow 1 session", "tensorflow", "tensorflow", tensorflow_session, "1,0"),
    Row("JAX", "jax", "jax", jax_order, "1,0", "growth"),
]


def make_task(row: Row) -> Any:
    named = {"device": row.device} if row.device else {}
    tags = gpu(
        memory=row.memory,
        count=2,
        framework=row.framework,
        allocation=row.allocation,
        oom="fail",
        **named,  # type: ignore[arg-type]
    )
    return task(name=row.body.__name__, timeout_seconds=ROW_S, tags=tags)(row.body)


class DeviceObserver(Observer):
    """Reads every device's processes too, and remembers whose they are."""

    def __init__(self) -> None:
        super().__init__()
        #: Most bytes that NVML ever showed, by the index of the device and the process.
        self.on_device: dict[tuple[int, int], int] = {}
        #: The process and what started it, by its id.
        self.lines: dict[int, set[int]] = {}

    def run(self) -> None:
        while not self._stopped.wait(0.01):
            for index, handle in enumerate(self._handles):
                with contextlib.suppress(pynvml.NVMLError):
                    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                        self._note(index, process.pid, process.usedGpuMemory or 0)

    def _note(self, index: int, pid: int, held: int) -> None:
        self.on_device[index, pid] = max(self.on_device.get((index, pid), 0), held)
        if pid not in self.lines:
            with contextlib.suppress(psutil.Error):
                parents = psutil.Process(pid).parents()
                self.lines[pid] = {pid, *(parent.pid for parent in parents)}

    def held_on(self, index: int, root: int) -> list[int]:
        """Return the peaks on a device of a process and of those that descend from it."""
        return [
            held
            for (device, pid), held in self.on_device.items()
            if device == index and root in self.lines.get(pid, ())
        ]


def budget_of(row: Row) -> int:
    """Return the budget of a row on each device, in bytes."""
    if not row.memory.endswith("%"):
        return BUDGET_BYTES
    totals = [pynvml.nvmlDeviceGetMemoryInfo(handle).total for handle in nvml_handles()]
    return int(min(totals, default=0) * float(row.memory[:-1]) / 100)


def judge(row: Row, ended: Ended, report: Process | None, held: list[list[int]]) -> list[str]:
    """Return the faults of one row, from what its processes held of its first and second device."""
    if ended.error is not None or report is None:
        return [ended.words or "no report"]
    problems = []
    first, second = sum(held[0]), sum(held[1])
    if first < GIB or second < 2 * GIB:
        problems.append(f"NVML showed {size(first)} and {size(second)} MiB")
    # A limit is taken whole, whatever is held.
    if (row.framework == "torch" or row.device) and second <= first:
        problems.append("its devices are in the other order")
    if row.allocation == "limit":
        over = max(first, second) - budget_of(row)
        if over > MOST_OVER_BYTES:
            problems.append(f"{size(over)} MiB above its budget")
    if (report.bytes("peak_process_bytes") or 0) < 3 * GIB:
        problems.append(f"its report says {size(report.bytes('peak_process_bytes'))} MiB")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    """Run all rows, two at a time."""
    uuids = []
    for handle in nvml_handles():
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        uuids.append(uuid.decode() if isinstance(uuid, bytes) else uuid)
    rows = [row for row in ROWS if options.only in row.name]
    if len(uuids) < 2 and options.devices == "nvml":
        say(f"needs two devices; there is {len(uuids)}. Not run:")
        for row in rows:
            say(f"- {row.name}{', gpu:device=' + row.device if row.device else ''}")
        return []
    for row in rows:
        if not installed(row.package):
            say(f"not run: {row.name}, since {row.package} is not installed")
    rows = [row for row in rows if installed(row.package)]
    tasks = {number: make_task(row) for number, row in enumerate(rows)}
    with DeviceObserver() as observer:
        flow = run_flow(
            "several-devices",
            lambda: gather(
                {str(number): each.submit() for number, each in tasks.items()}, LIMIT_S - 30
            ),
            options.devices,
            max_processes=3,
        )
        say(f"{len(rows)} rows took {flow.seconds:.0f} s")
        processes = read_processes(flow.id, len(rows))
    problems, lines = [], []
    for number, row in enumerate(rows):
        ended = flow.value[str(number)]
        report = last_of(processes, ended)
        named = [] if report is None else report["device_uuid"].split(",")
        order = [uuids.index(uuid.strip()) for uuid in named if uuid.strip() in uuids]
        held = [observer.held_on(index, report.pid if report else 0) for index in order]
        held += [[]] * (2 - len(held))
        faults = judge(row, ended, report, held)
        if row.device and [str(index) for index in order] != row.device.split(","):
            faults.append(f"its report names the devices {order}")
        if row.body is torch_order and ended.value:
            seen = [f"GPU-{uuid}" for uuid in ended.value]
            if seen != [uuid.strip() for uuid in named]:
                faults.append(f"PyTorch sees {seen}")
        problems += [f"{row.name}, gpu:device={row.device or 'any'}: {fault}" for fault in faults]
        lines.append(
            (
                row.name,
                row.device or "any",
                row.allocation,
                ",".join(map(str, order)) or "?",
                " + ".join(size(bytes_) for bytes_ in held[0]) or "?",
                " + ".join(size(bytes_) for bytes_ in held[1]) or "?",
                size(None if report is None else report.bytes("peak_process_bytes")),
                "fails" if faults else "holds",
            )
        )
    table(
        [
            "in the body",
            "gpu:device",
            "allocation",
            "devices",
            "NVML, first",
            "NVML, second",
            "reported",
            "verdict",
        ],
        lines,
    )
    say(
        f"sizes in MiB, one for each process; budget {size(BUDGET_BYTES)} on each device, or 40 % of it;"
    )
    say(
        "devices: NVML's indices in the order of the report; reported: of all processes and devices"
    )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    return run(check, parser, LIMIT_S, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
