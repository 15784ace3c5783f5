"""Everything that opens a GPU in TensorFlow, with every setting: what NVML shows beside the budget.

    python -m tests.gpu.check_sessions

Each row is a task of its own. Its body opens the GPU as it says, multiplies and convolves, so that cuBLAS and cuDNN
are loaded, then takes blocks until TensorFlow refuses one. A program that asks for less than its cap gets that. One
that asks for more gets its cap, and its log says so once. Without a cap a body takes a little, and must hold little.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pynvml
from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    GIB,
    MIB,
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

BUDGET_BYTES = 8 * GIB

#: NVML may show so much more than the budget.
MOST_OVER_BYTES = 64 * MIB

BLOCK_BYTES = 256 * MIB

#: More than every cap here.
MOST_BLOCKS = 48

#: What bodies take where there is no cap, and on the processor.
FEW_BLOCKS = 4

#: Of what a body may have, what its blocks fill at least: the rest is what the work keeps.
LEAST_FILLED = 0.8

#: Seconds for which memory is held: the runner reads NVML every 0.25 s.
HOLD_S = 0.6

#: Seconds for one row. TensorFlow tries an allocation again for ten seconds before it refuses it.
ROW_S = 75.0

LIMIT_S = 270.0

#: Each imports TensorFlow, which takes a core for five seconds.
MOST_AT_A_TIME = 15


# Settings. Each makes a `ConfigProto`, or none.


def options(tf: Any, **fields: Any) -> Any:
    v1 = tf.compat.v1
    experimental = v1.GPUOptions.Experimental(**fields.pop("experimental", {}))
    return v1.ConfigProto(gpu_options=v1.GPUOptions(experimental=experimental, **fields))


def pieces(tf: Any, *limits: int) -> dict[str, Any]:
    virtual = tf.compat.v1.GPUOptions.Experimental.VirtualDevices(memory_limit_mb=limits)
    return {"virtual_devices": [virtual]}


@dataclass(frozen=True)
class Setting:
    """What a program asks for."""

    #: Makes the `ConfigProto`, from TensorFlow; in TensorFlow 2 it configures a device instead.
    make: Callable[..., Any]
    #: How much it asks for, as a fraction of the device or in MiB; `None`: all of it.
    asks: float | None = None
    #: Into how many logical devices it splits the GPU.
    split: int = 1
    #: Whether its log must have a warning where there is a cap.
    warns: bool = False
    #: Variables that the body sets before it imports TensorFlow.
    environment: tuple[tuple[str, str], ...] = ()


SETTINGS = {
    "no config": Setting(lambda tf: None),
    "empty config": Setting(lambda tf: options(tf)),
    "fraction 0.4": Setting(
        lambda tf: options(tf, per_process_gpu_memory_fraction=0.4), 0.4, warns=True
    ),
    "fraction 0.02": Setting(lambda tf: options(tf, per_process_gpu_memory_fraction=0.02), 0.02),
    "fraction 1.5": Setting(
        lambda tf: options(tf, per_process_gpu_memory_fraction=1.5), 1.5, warns=True
    ),
    "allow_growth": Setting(lambda tf: options(tf, allow_growth=True)),
    "allow_growth False": Setting(lambda tf: options(tf, allow_growth=False)),
    "0.4, allow_growth": Setting(
        lambda tf: options(tf, allow_growth=True, per_process_gpu_memory_fraction=0.4),
        0.4,
        warns=True,
    ),
    "0.4, visible 0": Setting(
        lambda tf: options(tf, visible_device_list="0", per_process_gpu_memory_fraction=0.4),
        0.4,
        warns=True,
    ),
    "2+2 GiB": Setting(lambda tf: options(tf, experimental=pieces(tf, 2048, 2048)), 4096, 2),
    "20+20 GiB": Setting(
        lambda tf: options(tf, experimental=pieces(tf, 20480, 20480)), 40960, 2, warns=True
    ),
    "2 equal pieces": Setting(
        lambda tf: options(tf, experimental={"num_virtual_devices_per_gpu": 2}), None, 2
    ),
    "all but 1 GiB": Setting(
        lambda tf: options(tf, experimental={"gpu_system_memory_size_in_mb": 1024})
    ),
    "cuda_malloc_async": Setting(
        lambda tf: options(tf, experimental={"use_cuda_malloc_async": True}), warns=True
    ),
    "TF_GPU_ALLOCATOR": Setting(
        lambda tf: options(tf), warns=True, environment=(("TF_GPU_ALLOCATOR", "cuda_malloc_async"),)
    ),
    "TF_DEVICE_MIN_SYS_MEMORY_IN_MB": Setting(
        lambda tf: options(tf, per_process_gpu_memory_fraction=0.02),
        0.02,
        environment=(("TF_DEVICE_MIN_SYS_MEMORY_IN_MB", "1024"),),
    ),
}


# Kinds. Each opens the GPU, and yields what runs an operation there.


@contextlib.contextmanager
def session(tf: Any, config: Any) -> Iterator[Any]:
    with tf.compat.v1.Session(config=config) as opened:
        yield opened.run


@contextlib.contextmanager
def interactive(tf: Any, config: Any) -> Iterator[Any]:
    opened = tf.compat.v1.InteractiveSession(config=config)
    yield opened.run
    opened.close()


@contextlib.contextmanager
def monitored_training(tf: Any, config: Any) -> Iterator[Any]:
    with tf.compat.v1.train.MonitoredTrainingSession(config=config) as opened:
        yield opened.run


@contextlib.contextmanager
def monitored(tf: Any, config: Any) -> Iterator[Any]:
    train = tf.compat.v1.train
    with train.MonitoredSession(train.ChiefSessionCreator(config=config)) as opened:
        yield opened.run


@contextlib.contextmanager
def singular_monitored(tf: Any, config: Any) -> Iterator[Any]:
    with tf.compat.v1.train.SingularMonitoredSession(config=config) as opened:
        yield opened.run


@contextlib.contextmanager
def supervised(tf: Any, config: Any) -> Iterator[Any]:
    supervisor = tf.compat.v1.train.Supervisor(logdir=None)
    with supervisor.managed_session(config=config) as opened:
        yield opened.run


@contextlib.contextmanager
def keras_backend(tf: Any, config: Any) -> Iterator[Any]:
    from tensorflow.python.keras import backend

    if config is not None:
        backend.set_session(tf.compat.v1.Session(config=config))
    yield backend.get_session().run


@contextlib.contextmanager
def tf_keras_backend(tf: Any, config: Any) -> Iterator[Any]:
    from tf_keras.src import backend

    if config is not None:
        backend.set_session(tf.compat.v1.Session(config=config))
    yield backend.get_session().run


@contextlib.contextmanager
def server(tf: Any, config: Any) -> Iterator[Any]:
    opened = tf.distribute.Server.create_local_server(config=config)
    with tf.compat.v1.Session(opened.target, config=config) as of_server:
        yield of_server.run


@contextlib.contextmanager
def two_at_once(tf: Any, config: Any) -> Iterator[Any]:
    v1 = tf.compat.v1
    with v1.Session() as first, v1.Session(config=config) as second:
        turns = [first, second]

        def run_in_turn(operation: Any) -> Any:
            turns.reverse()
            return turns[0].run(operation)

        yield run_in_turn


@contextlib.contextmanager
def one_after_the_other(tf: Any, config: Any) -> Iterator[Any]:
    v1 = tf.compat.v1
    for earlier in (None, options(tf, per_process_gpu_memory_fraction=0.9)):
        with v1.Graph().as_default(), v1.Session(config=earlier) as opened:
            opened.run(v1.random.uniform([1024, 1024]))
    with v1.Session(config=config) as opened:
        yield opened.run


@contextlib.contextmanager
def after_list_local_devices(tf: Any, config: Any) -> Iterator[Any]:
    from tensorflow.python.client import device_lib

    device_lib.list_local_devices(config)
    with tf.compat.v1.Session() as opened:
        yield opened.run


@contextlib.contextmanager
def after_is_gpu_available(tf: Any, config: Any) -> Iterator[Any]:
    tf.test.is_gpu_available()
    with tf.compat.v1.Session(config=config) as opened:
        yield opened.run


@contextlib.contextmanager
def after_grappler_cluster(tf: Any, config: Any) -> Iterator[Any]:
    from tensorflow.python.grappler import cluster

    kept = cluster.Cluster()
    with tf.compat.v1.Session(config=config) as opened:
        yield opened.run
    del kept


def in_graph(kind: Callable[..., Any], setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    v1, places = tf.compat.v1, places_of(tf, setting)
    with v1.Graph().as_default():
        with tf.device(places[0]):
            images, kernel = v1.random.uniform([16, 64, 64, 32]), v1.random.uniform([3, 3, 32, 32])
            a = v1.random.uniform([2048, 2048])
            work = v1.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME")) + v1.reduce_sum(a @ a)
        blocks = []
        for number in range(MOST_BLOCKS):
            with tf.device(places[number % len(places)]):
                zeros = v1.zeros([BLOCK_BYTES // 4])
                # In no collection: sessions that initialise all variables would take them at once.
                blocks.append(v1.Variable(zeros, False, collections=[], use_resource=True))
        with kind(tf, setting.make(tf)) as run_one:
            takes = [functools.partial(run_one, block.initializer) for block in blocks]
            return fill(lambda: run_one(work), takes)


def in_program(kind: Callable[..., Any], setting: Setting) -> dict[str, Any]:
    """Do the same as a TensorFlow 1 program, without TensorFlow 2's behaviour."""
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()
    return in_graph(kind, setting)


def in_graph_after_eager(kind: Callable[..., Any], setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    tf.random.uniform([1024, 1024])
    return in_graph(kind, setting)


def in_eager(_: None, setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    for device in tf.config.list_physical_devices("GPU"):
        setting.make(tf, device)
    places, held = itertools.cycle(places_of(tf, setting)), []

    def work() -> Any:
        with tf.device(next(places)):
            a = tf.random.uniform([2048, 2048])
            images, kernel = tf.random.uniform([16, 64, 64, 32]), tf.random.uniform([3, 3, 32, 32])
            return float(
                tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME")) + tf.reduce_sum(a @ a)
            )

    def take() -> None:
        with tf.device(next(places)):
            held.append(tf.zeros([BLOCK_BYTES // 4]))
            held[-1][0].numpy()

    return fill(work, [take] * MOST_BLOCKS)


def places_of(tf: Any, setting: Setting) -> list[str]:
    if not tf.config.list_physical_devices("GPU"):
        return ["CPU:0"]
    return [f"GPU:{number}" for number in range(setting.split)]


def fill(work: Callable[[], Any], takes: list[Callable[[], Any]]) -> dict[str, Any]:
    """Do the work, take blocks until one is refused, and say what came of it."""
    from prefect_gpu import current_allocation
    from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory

    allocation = current_allocation()
    assert allocation is not None
    work()
    held, refused, is_oom = 0, "", False
    for take in takes[: FEW_BLOCKS if allocation.cap_bytes is None else None]:
        try:
            take()
        except Exception as error:
            refused, is_oom = type(error).__name__, looks_out_of_memory(error) == "tensorflow"
            break
        held += BLOCK_BYTES
    time.sleep(HOLD_S)
    return {
        "cap_bytes": allocation.cap_bytes,
        "held_bytes": held,
        "refused": refused,
        "is_oom": is_oom,
    }


# Settings of TensorFlow 2.


def nothing(tf: Any, device: Any) -> None:
    pass


def grow(tf: Any, device: Any) -> None:
    tf.config.experimental.set_memory_growth(device, True)


def limit(*limits: int) -> Callable[[Any, Any], None]:
    def set_limit(tf: Any, device: Any) -> None:
        logical = [tf.config.LogicalDeviceConfiguration(memory_limit=mib) for mib in limits]
        tf.config.set_logical_device_configuration(device, logical)

    return set_limit


def split_after_session(tf: Any, device: Any) -> None:
    with tf.compat.v1.Graph().as_default(), tf.compat.v1.Session() as opened:
        opened.run(tf.compat.v1.random.uniform([1024, 1024]))
    limit(2048, 2048)(tf, device)


@dataclass(frozen=True)
class Row:
    """One task."""

    opened_by: str
    setting_name: str
    setting: Setting
    #: Runs the work, with `kind`.
    way: Callable[..., Any]
    kind: Any = None
    allocation: Literal["limit", "growth", "all"] = "limit"
    #: The error that it must end with; empty: none.
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.opened_by}, {self.setting_name}, {self.allocation}"

    @property
    def warnings(self) -> int:
        """How many warnings its log must have."""
        return int(self.setting.warns and self.allocation != "growth")


KINDS: dict[str, Any] = {
    "InteractiveSession": interactive,
    "MonitoredTrainingSession": monitored_training,
    "MonitoredSession": monitored,
    "SingularMonitoredSession": singular_monitored,
    "Supervisor.managed_session": supervised,
    "keras.backend": keras_backend,
    "tf_keras.backend": tf_keras_backend,
    "Server": server,
    "two at once": two_at_once,
    "one after the other": one_after_the_other,
    "after list_local_devices": after_list_local_devices,
    "after is_gpu_available": after_is_gpu_available,
    "after grappler's Cluster": after_grappler_cluster,
}

TF_CONFIG = {
    "nothing": Setting(nothing),
    "set_memory_growth": Setting(grow),
    "2 GiB": Setting(limit(2048), 2048),
    "20 GiB": Setting(limit(20480), 20480, warns=True),
    "20+20 GiB": Setting(limit(20480, 20480), 40960, 2, warns=True),
    "TF_GPU_ALLOCATOR": replace(SETTINGS["TF_GPU_ALLOCATOR"], make=nothing),
}


def rows() -> Iterator[Row]:
    def of(opened_by: str, kind: Any, setting: str, way: Any = in_graph, **fields: Any) -> Row:
        return Row(opened_by, setting, SETTINGS[setting], way, kind, **fields)

    # A TensorFlow 1 program as it is usually written: it once took 57,784 MiB.
    yield of("Session, no eager", session, "fraction 0.4", in_program)
    for setting in SETTINGS:
        yield of("Session", session, setting)
    for opened_by, kind in KINDS.items():
        yield of(opened_by, kind, "fraction 0.4")
    for opened_by in ("InteractiveSession", "MonitoredTrainingSession", "keras.backend", "Server"):
        yield of(opened_by, KINDS[opened_by], "no config")
    for name, asked in TF_CONFIG.items():
        yield Row("tf.config", name, asked, in_eager)
    yield of("after TensorFlow 2", session, "fraction 0.4", in_graph_after_eager)
    yield of("after TensorFlow 2", session, "2+2 GiB", in_graph_after_eager, error="FrameworkError")
    after_session = Setting(split_after_session, split=2)
    yield Row("tf.config", "split after a session", after_session, in_eager, error="FrameworkError")
    yield of("Session", session, "fraction 0.4", allocation="all")
    for setting in ("no config", "fraction 0.4", "allow_growth False"):
        yield of("Session", session, setting, allocation="growth")


def make_task(row: Row) -> Any:
    @task(
        name=row.name,
        timeout_seconds=ROW_S,
        tags=gpu(
            memory=f"{BUDGET_BYTES // GIB}GiB",
            framework="tensorflow",
            allocation=row.allocation,
            oom="fail",
        ),
    )
    def use() -> Any:
        os.environ.update(row.setting.environment)
        return row.way(row.kind, row.setting)

    return use


def read_warnings(flow_run_id: str) -> dict[str, list[str]]:
    """Read what this package logged on each task run."""
    from prefect.client.orchestration import get_client

    found: dict[str, list[str]] = {}
    asked: dict[str, Any] = {
        "logs": {"flow_run_id": {"any_": [flow_run_id]}, "level": {"ge_": 30}},
        "limit": 200,
    }
    with get_client(sync_client=True) as client:
        for log in client.request("POST", "/logs/filter", json=asked).json():
            if log["message"].startswith("TensorFlow: "):
                found.setdefault(str(log["task_run_id"]), []).append(log["message"])
    return found


def allowed_bytes(setting: Setting, cap: int, total: int) -> int:
    """Return what the blocks of a row may fill at most."""
    if setting.asks is None:
        return cap
    return min(cap, int(setting.asks * (total if setting.asks < 2 else MIB)))


def judge(
    row: Row,
    ended: Ended,
    report: Process | None,
    shown: int | None,
    warnings: list[str],
    total: int,
) -> list[str]:
    """Return the faults of one row."""
    problems = []
    if shown is not None and shown - BUDGET_BYTES > MOST_OVER_BYTES:
        problems.append(f"{size(shown - BUDGET_BYTES)} MiB above its budget")
    if row.error:
        if row.error not in ended.words:
            problems.append(f"{row.error} was expected: {ended.words or 'it ended well'}")
        return problems
    if ended.value is None or report is None:
        return [*problems, ended.words or "no report"]
    if not shown:
        problems.append("NVML never showed its process")
    if len(warnings) != row.warnings:
        problems.append(f"its log has {len(warnings)} warnings, {row.warnings} expected")
    cap = ended.value["cap_bytes"]
    if cap is None:
        if ended.value["refused"]:
            problems.append(f"without a cap it met {ended.value['refused']}")
        return problems
    if not ended.value["is_oom"]:
        problems.append(f"past its cap it met {ended.value['refused'] or 'nothing'}")
    allowed = allowed_bytes(row.setting, cap, total)
    least = LEAST_FILLED * allowed - row.setting.split * BLOCK_BYTES
    if not least <= ended.value["held_bytes"] <= allowed:
        problems.append(f"it filled {size(ended.value['held_bytes'])} of {size(allowed)} MiB")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    """Run all rows, some side by side."""
    handles = nvml_handles()
    total = int(pynvml.nvmlDeviceGetMemoryInfo(handles[0]).total) if handles else 1
    chosen = [row for row in rows() if options.only in row.name]
    if not installed("tf_keras"):
        say("not tried: tf_keras.backend, since tf_keras is not installed")
        chosen = [row for row in chosen if not row.opened_by.startswith("tf_keras")]
    tasks = {row.name: make_task(row) for row in chosen}
    with Observer() as observer:
        flow = run_flow(
            "sessions",
            lambda: gather({name: each.submit() for name, each in tasks.items()}, LIMIT_S - 20),
            options.devices,
            max_processes=MOST_AT_A_TIME if handles else 2,
        )
        say(f"{len(chosen)} rows took {flow.seconds:.0f} s")
        processes = read_processes(flow.id, len(chosen))
    warnings = read_warnings(flow.id)
    problems, lines = [], []
    for row in chosen:
        ended = flow.value[row.name]
        report = last_of(processes, ended)
        shown = observer.peak_of(report)
        logged = warnings.get(ended.task_run_id, [])
        faults = judge(row, ended, report, shown, logged, total)
        problems += [f"{row.name}: {fault}" for fault in faults]
        value = ended.value or {"held_bytes": None, "refused": ended.words, "cap_bytes": None}
        lines.append(
            (
                row.opened_by,
                row.setting_name,
                row.allocation,
                size(BUDGET_BYTES),
                size(value["cap_bytes"]),
                size(shown),
                "?" if shown is None else f"{(shown - BUDGET_BYTES) / MIB:+.0f}",
                size(value["held_bytes"]),
                str(len(logged)),
                "fails" if faults else "holds",
                value["refused"][:100],
            )
        )
    table(
        [
            "opened by",
            "setting",
            "allocation",
            "budget",
            "cap",
            "NVML-peak",
            "over",
            "filled",
            "logged",
            "verdict",
            "refused with",
        ],
        lines,
    )
    say("sizes in MiB; NVML's peak is read from outside every 10 ms, over is what it has above the")
    say("budget; filled: by blocks of 256 MiB, until one was refused")
    for row in chosen:
        for message in warnings.get(flow.value[row.name].task_run_id, []):
            if row.opened_by in ("Session, no eager", "tf.config"):
                say(f"{row.name}: {message}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    return run(check, parser, LIMIT_S, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
