"""The real PyTorch and TensorFlow on the processor, in processes of their own."""

from __future__ import annotations

import importlib.util
import pickle

import pytest

from tests.integration.framework_child import finish_child, host_policy, run_child, start_child

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)

#: Larger than the machine's cores need be: both frameworks start what they are told.
MANY = 6

TORCH_THREADS = """
import torch
out["set"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
before = threads()
x = torch.ones(700, 700)
for _ in range(3):
    x = (x @ x).tanh()
out["grown"] = threads() - before
out["visible"] = [os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available()]
"""

TENSORFLOW_THREADS = """
import tensorflow as tf
threading = tf.config.threading
out["set"] = [
    threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()
]
before = threads()
x = tf.ones([700, 700])
for _ in range(3):
    x = tf.tanh(x @ x)
out["grown"] = threads() - before
out["visible"] = [os.environ["CUDA_VISIBLE_DEVICES"], bool(tf.config.list_physical_devices("GPU"))]
"""


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(TORCH_THREADS, id="torch", marks=needs_torch),
        pytest.param(TENSORFLOW_THREADS, id="tensorflow", marks=needs_tensorflow),
    ],
)
def test_cpus_bounds_the_threads_that_a_framework_starts(lines):
    children = {n: start_child(lines, host_policy(cpus=n)) for n in (1, MANY)}
    found = {n: finish_child(child) for n, child in children.items()}
    assert found[1]["set"] == [1, 1]
    assert found[MANY]["set"] == [MANY, MANY]
    # All that the frameworks start beyond one worker goes away with cpus=1.
    assert found[MANY]["grown"] - found[1]["grown"] >= MANY - 1
    assert found[1]["visible"] == ["", False]


@needs_torch
def test_a_parents_interop_setting_made_before_the_policy_stands():
    found = run_child(
        """
import sys
finder = sys.meta_path.pop(0)
import torch
torch.set_num_interop_threads(3)
hooks.install(adapters_for(policy), policy)
out["set"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
""",
        host_policy(cpus=1),
    )
    assert found["set"] == [1, 3]


@needs_torch
def test_torch_on_the_host():
    found = run_child(
        """
import importlib.resources, inspect, importlib.metadata
import torch
out["resources"] = importlib.resources.files("torch").joinpath("__init__.py").is_file()
out["source"] = "def is_tensor" in inspect.getsource(torch)
out["counters"] = counters()
out["in_use"] = hooks.frameworks_in_use()

# What is on the host already is left to pickle.
adapter = ADAPTERS["torch"]
tensor = torch.arange(6.0)
out["left"] = [
    adapter.reduce_to_host(v) is NotImplemented
    for v in (tensor, tensor._typed_storage(), torch.nn.Linear(1, 1), 3)
]
# But for a bare storage, which PyTorch pickles so that it cannot be unpickled.
out["uint16"] = pickle.loads(dumps([torch.ones(2, dtype=torch.uint16)]))[0].tolist()

# The reductions themselves, as for CUDA storages: shared memory is shared again.
from prefect_gpu.frameworks import torch_adapter

class AsCuda(pickle.Pickler):
    def reducer_override(self, value):
        if isinstance(value, torch.storage.TypedStorage):
            return torch_adapter._rebuild_typed, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            return torch_adapter.reduce_storage(value)
        return NotImplemented

import io
first = torch.nn.Linear(3, 3)
second = torch.nn.Linear(3, 3)
second.weight = first.weight
value = {
    "view": [tensor, tensor[2:4]], "modules": (first, second), "empty": torch.empty(0, 3),
    "half": torch.ones(2, dtype=torch.bfloat16), "uint16": torch.ones(2, dtype=torch.uint16),
    "transposed": torch.arange(6).reshape(2, 3).t(), "sparse": torch.eye(3).to_sparse(),
}
buffer = io.BytesIO()
AsCuda(buffer, protocol=5).dump(value)
back = pickle.loads(buffer.getvalue())
back["view"][0][2] = 77.0
out["view_shared"] = back["view"][1][0].item()
a, b = back["modules"]
out["tied"] = a.weight is b.weight and isinstance(a.weight, torch.nn.Parameter)
out["equal"] = [
    torch.equal(back[k], value[k]) and back[k].dtype == value[k].dtype
    for k in ("empty", "half", "uint16", "transposed")
] + [torch.equal(back["sparse"].to_dense(), torch.eye(3)), torch.equal(a.weight, first.weight)]
out["stride"] = back["transposed"].stride() == value["transposed"].stride()
""",
        host_policy(allocation="limit"),
    )
    assert found["resources"]
    assert found["source"]
    assert found["counters"] is None
    assert found["in_use"] == ["torch"]
    assert found["left"] == [True] * 4
    assert found["uint16"] == [1, 1]
    assert found["view_shared"] == 77.0
    assert found["tied"]
    assert found["equal"] == [True] * 6
    assert found["stride"]


@needs_torch
def test_a_cpu_build_with_a_gpu_allotted_fails_the_import_naming_both_counts():
    found = run_child(
        """
import warnings
for _ in range(2):
    try:
        import torch
        out["error"] = None if torch.cuda.device_count() == 0 else "has a GPU"
    except FrameworkError as error:
        out["error"] = str(error)
""",
        host_policy(
            device_kind="nvml", device_uuids=["GPU-00000000-no-such"], frameworks=["torch"]
        ),
    )
    assert "1 GPU(s) allotted, 0 found" in found["error"]


@needs_tensorflow
def test_tensorflow_on_the_host_with_growth():
    found = run_child(
        """
import tensorflow as tf
out["before"] = counters()
out["growth"] = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
tensor = tf.range(4)
variable = tf.Variable([1.0, 2.0])
import keras
value = {"a": [tensor], "b": variable, "c": keras.Variable([3.0]), "s": tf.constant("x")}
out["after"] = counters()
back = pickle.loads(dumps(value))
out["types"] = [type(back["a"][0]).__name__, type(back["b"]).__name__, type(back["c"]).__name__]
out["values"] = [back["a"][0].tolist(), back["b"].tolist(), back["c"].tolist(), str(back["s"])]
out["left"] = ADAPTERS["tensorflow"].reduce_to_host(keras.Sequential()) is NotImplemented
try:
    tf.zeros([1 << 45])
except Exception as error:
    out["oom"] = [type(error).__name__, looks_out_of_memory(error) == "tensorflow"]
# Too late now: the runtime has started.
from dataclasses import replace
try:
    ADAPTERS["tensorflow"].apply(replace(policy, cpus=3))
except FrameworkError as error:
    out["late"] = str(error)
""",
        host_policy(allocation="growth"),
    )
    assert found["before"] is None
    assert found["after"] is None
    assert found["growth"] == "true"
    assert found["types"] == ["ndarray"] * 3
    assert found["values"] == [[0, 1, 2, 3], [1.0, 2.0], [3.0], "b'x'"]
    assert found["left"]
    # The machine's memory, not a device's.
    assert found["oom"] == ["ResourceExhaustedError", False]
    assert "its runtime must not start before the task's body" in found["late"]


@needs_tensorflow
def test_tensorflow_1_sessions_keep_to_the_policy_whatever_their_options_say():
    found = run_child(
        """
import tensorflow as tf
from dataclasses import replace
from tensorflow.python.client import session as sessions
from tensorflow.python.keras import backend as keras_backend

v1 = tf.compat.v1
# A GPU of 16 GiB that takes what is configured; sessions show their options and do not start.
tf.config.list_physical_devices = lambda kind: ["GPU:0"]
tf.config.set_logical_device_configuration = lambda gpu, limits: None
tf.config.experimental.set_memory_growth = lambda gpu, on: None

class Shown(Exception):
    pass

def show(target, config):
    raise Shown(config.gpu_options)

sessions.tf_session.TF_NewSessionOptions = show

def options_of(make):
    try:
        with v1.Graph().as_default():
            make()
    except Shown as shown:
        (options,) = shown.args
        limits = [list(d.memory_limit_mb) for d in options.experimental.virtual_devices]
        return [options.per_process_gpu_memory_fraction, options.allow_growth, limits]

def config(**options):
    return v1.ConfigProto(gpu_options=v1.GPUOptions(**options))

def split(*limits):
    experimental = v1.GPUOptions.Experimental
    pieces = [experimental.VirtualDevices(memory_limit_mb=each) for each in limits]
    return config(experimental=experimental(virtual_devices=pieces))

theirs = config(per_process_gpu_memory_fraction=0.75)
for allocation in ("limit", "growth"):
    ADAPTERS["tensorflow"].apply(
        replace(
            policy, device_kind="nvml", allocation=allocation, frameworks=("tensorflow",),
            total_bytes=(16 * GIB,), budget_bytes=(8 * GIB,),
        )
    )
    out[allocation] = {
        "more": options_of(lambda: v1.Session(config=theirs)),
        "less": options_of(lambda: v1.Session(config=config(per_process_gpu_memory_fraction=0.25))),
        "unsaid": options_of(lambda: v1.Session(config=v1.ConfigProto())),
        "positional": options_of(lambda: v1.Session("", None, v1.ConfigProto())),
        "interactive": options_of(v1.InteractiveSession),
        "supervised": options_of(lambda: v1.train.MonitoredSession(
            v1.train.ChiefSessionCreator(config=config(per_process_gpu_memory_fraction=1.5)))),
        "keras": options_of(keras_backend.get_session),
        "split": options_of(lambda: v1.Session(config=split([2048, 6144]))),
        "split further": options_of(lambda: v1.Session(config=split([6144, 10240]))),
        "split without limits": options_of(lambda: v1.Session(config=split([]))),
    }
out["theirs"] = theirs.gpu_options.per_process_gpu_memory_fraction
""",
        host_policy(),
    )
    whole = [0.5, False, []]
    assert found["limit"] == {
        "more": whole,
        "less": [0.25, False, []],
        "unsaid": whole,
        "positional": whole,
        "interactive": [0.5, True, []],
        "supervised": whole,
        "keras": whole,
        "split": [0.0, False, [[2048, 6144]]],
        "split further": [0.0, False, [[3072, 5120]]],
        "split without limits": [0.0, False, [[8192]]],
    }
    growth = found["growth"]
    assert growth["more"] == [0.75, True, []]
    assert all(allow_growth for _, allow_growth, _ in growth.values())
    assert found["theirs"] == 0.75, "the session changed the options that it was given"


@needs_tensorflow
def test_tensorflow_without_its_gpu_fails_the_import_saying_why():
    found = run_child(
        """
try:
    import tensorflow
except FrameworkError as error:
    out["error"] = str(error)
""",
        host_policy(device_kind="nvml", device_uuids=["GPU-00000000-no-such"]),
    )
    assert "1 GPU(s) allotted, 0 found, so it would silently use the CPU" in found["error"]


def test_a_pickled_host_copy_needs_no_framework():
    from prefect_gpu.frameworks.adapter import host_value

    assert pickle.loads(pickle.dumps(host_value))(3) == 3
