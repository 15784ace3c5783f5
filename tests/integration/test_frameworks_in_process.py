"""The real PyTorch and TensorFlow on the processor, in processes of their own."""

from __future__ import annotations

import pickle

import pytest

from tests.cases import needs
from tests.integration.framework_child import host_policy, run_child

needs_torch, needs_tensorflow = needs("torch"), needs("tensorflow")

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


def check_threads(one, many):
    """Compare what the lines above found with a core and with many."""
    assert one["set"] == [1, 1]
    assert many["set"] == [MANY, MANY]
    # All that the frameworks start beyond one worker goes away with cpus=1.
    assert many["grown"] - one["grown"] >= MANY - 1
    assert one["visible"] == ["", False]


@needs_torch
def test_cpus_bounds_the_threads_that_torch_starts(torch_on_the_host):
    check_threads(torch_on_the_host, run_child(TORCH_THREADS, host_policy(cpus=MANY)))


@needs_tensorflow
def test_cpus_bounds_the_threads_that_tensorflow_starts(on_the_host, shown):
    check_threads(on_the_host, shown["threads"])


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


#: What PyTorch does on the host: parts of one process, for it takes a second to import.
TORCH_ON_THE_HOST = """
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

# Operators are pickled by name.
library = torch.library.Library("my.package", "DEF")
library.define("twice(Tensor x) -> Tensor")
namespace = getattr(torch.ops, "my.package")
out["operators"] = []
for each in (torch.ops, namespace, namespace.twice, namespace.twice.default):
    make, arguments = torch_adapter.reduce_compiled(each)
    out["operators"].append(make(*arguments) is each)
"""


@pytest.fixture(scope="module")
def torch_on_the_host():
    return run_child(TORCH_THREADS + TORCH_ON_THE_HOST, host_policy(allocation="limit", cpus=1))


@needs_torch
def test_torch_on_the_host_with_a_limit(torch_on_the_host):
    found = torch_on_the_host
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
def test_an_operator_of_a_namespace_with_a_dot_is_found_again(torch_on_the_host):
    assert torch_on_the_host["operators"] == [True] * 4


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


#: What TensorFlow does on the host: parts of one process, for it takes seconds to import.
ON_THE_HOST = """
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
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    try:
        session.run(tf.debugging.check_numerics(float("nan") * tf.ones([1]), "no number"))
    except Exception as error:
        had, back = error, pickle.loads(dumps(error))
        out["error"] = [type(back).__name__, had.message == back.message, had.op.type, back.op]
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

# A session of a server.
from prefect_gpu.frameworks.tensorflow_adapter import hold_caps

# Without a GPU TensorFlow takes no notice of its options.
hold_caps((), ())
server = tf.distribute.Server.create_local_server()
with tf.Graph().as_default(), tf.compat.v1.Session(server.target, config=tf.compat.v1.ConfigProto()) as session:
    out["sum"] = int(session.run(tf.compat.v1.constant(1) + 2))

# A TensorFlow that opens GPUs otherwise.
from tensorflow.python.grappler import _pywrap_tf_cluster

del _pywrap_tf_cluster.TF_NewCluster
hold_caps(None, (8,))
try:
    hold_caps((4,), (8,))
except FrameworkError as error:
    out["error of a cap"] = str(error)
out["version"] = tf.__version__

# Settings of the whole process, each other than its default.
from prefect_gpu.frameworks import process_settings

names = ["tensorflow", "tensorflow.python.framework.config", "keras"]
out["settings"] = []
wanted = {
    "tensorflow": {"functions run eagerly": True, "TF32": False},
    "tensorflow.python.framework.config": {"deterministic operations": True},
    "keras": {"floatx": "float64"},
}
for _ in range(2):
    out["settings"].append({name: process_settings.read()[name] for name in names})
    process_settings.apply(wanted)
out["wanted"] = wanted
"""


@pytest.fixture(scope="module")
def on_the_host():
    first = f"import tensorflow\nout['before'] = counters()\n{TENSORFLOW_THREADS}"
    return run_child(first + ON_THE_HOST, host_policy(allocation="growth", cpus=1))


@needs_tensorflow
def test_tensorflow_on_the_host_with_growth(on_the_host):
    found = on_the_host
    assert found["before"] is None
    assert found["after"] is None
    assert found["growth"] == "true"
    assert found["types"] == ["ndarray"] * 3
    assert found["values"] == [[0, 1, 2, 3], [1.0, 2.0], [3.0], "b'x'"]
    assert found["left"]
    assert found["error"] == ["InvalidArgumentError", True, "CheckNumerics", None]
    # The machine's memory, not a device's.
    assert found["oom"] == ["ResourceExhaustedError", False]
    assert "its runtime must not start before the task's body" in found["late"]


@needs_tensorflow
def test_settings_of_tensorflow_and_keras_are_taken_over(on_the_host):
    before, after = on_the_host["settings"]
    assert after == on_the_host["wanted"]
    assert all(before[name][key] != after[name][key] for name in after for key in after[name])


@needs_tensorflow
def test_a_session_of_a_tensorflow_server_runs_under_a_cap(on_the_host):
    assert on_the_host["sum"] == 3


@needs_tensorflow
def test_a_tensorflow_that_opens_gpus_otherwise_is_refused_under_a_cap_only(on_the_host):
    expected = (
        f"TensorFlow {on_the_host['version']} has no grappler._pywrap_tf_cluster.TF_NewCluster"
    )
    assert expected in on_the_host["error of a cap"]


#: TensorFlow with GPUs that it does not have: whatever opens them is stopped, and shows what it asks for.
TENSORFLOW_SHOWN = """
from dataclasses import replace
import gc
import logging
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, tensorflow_server_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import _pywrap_device_lib, device_lib, pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.keras import backend as keras_backend

v1 = tf.compat.v1
gpus = 1
# Each reset of TensorFlow's context collects garbage: half a second with all that its import made.
gc.freeze()
pywrap_tfe.TF_ListPhysicalDevices = lambda: [b"/physical_device:CPU:0"] + [
    f"/physical_device:GPU:{i}".encode() for i in range(gpus)
]

class Shown(Exception):
    pass

def show(config):
    raise Shown(config)

config_of = config_pb2.ConfigProto.FromString
pywrap_tf_session.TF_NewSessionOptions = lambda target, config: show(config)
pywrap_tf_session.TF_NewServer = lambda serialized: show(
    tensorflow_server_pb2.ServerDef.FromString(serialized).default_session_config
)
pywrap_tfe.TFE_ContextOptionsSetConfig = lambda options, config: show(config_of(config))
_pywrap_device_lib.list_devices = lambda config: show(config_of(config))

class Messages(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())

messages = []
logging.getLogger("prefect_gpu").addHandler(Messages())

def apply(allocation="limit", total=(16,), budget=(8,)):
    global gpus
    gpus = len(total)
    context._reset_context()
    ADAPTERS["tensorflow"].apply(
        replace(
            policy, device_kind="nvml", allocation=allocation, frameworks=("tensorflow",),
            device_uuids=tuple(f"GPU-{i}" for i in range(gpus)),
            total_bytes=tuple(n * GIB for n in total), budget_bytes=tuple(n * GIB for n in budget),
        )
    )

def options_of(make):
    try:
        with v1.Graph().as_default():
            make()
    except Shown as shown:
        options = shown.args[0].gpu_options
        limits = [list(d.memory_limit_mb) for d in options.experimental.virtual_devices]
        return [limits, options.allow_growth]

def eager(setting=lambda gpu: None):
    context._reset_context()
    setting(tf.config.list_physical_devices("GPU")[0])
    with tf.init_scope():
        tf.zeros([])

def config(device_count=None, **options):
    return v1.ConfigProto(gpu_options=v1.GPUOptions(**options), device_count=device_count)

def fraction(value, **options):
    return config(per_process_gpu_memory_fraction=value, **options)

def experimental(**options):
    return config(experimental=v1.GPUOptions.Experimental(**options))

def split(*limits):
    pieces = [v1.GPUOptions.Experimental.VirtualDevices(memory_limit_mb=each) for each in limits]
    return experimental(virtual_devices=pieces)

def managed(config):
    with v1.train.Supervisor().managed_session(config=config):
        pass

def logical(*limits):
    pieces = [tf.config.LogicalDeviceConfiguration(memory_limit=n) for n in limits]
    return lambda gpu: tf.config.set_logical_device_configuration(gpu, pieces)

sessions = {
    "Session": lambda config: v1.Session(config=config),
    "positional": lambda config: v1.Session("", None, config),
    "InteractiveSession": lambda config: v1.InteractiveSession(config=config),
    "MonitoredTrainingSession": lambda config: v1.train.MonitoredTrainingSession(config=config),
    "MonitoredSession": lambda config: v1.train.MonitoredSession(
        v1.train.ChiefSessionCreator(config=config)),
    "SingularMonitoredSession": lambda config: v1.train.SingularMonitoredSession(config=config),
    "Supervisor": managed,
    "Server": lambda config: tf.distribute.Server({"local": ["localhost:0"]}, config=config),
    "create_local_server": v1.train.Server.create_local_server,
    "list_local_devices": device_lib.list_local_devices,
}
"""


#: By test: what it asks of `TENSORFLOW_SHOWN`. They share one process, for TensorFlow takes seconds to import.
ASKED = {
    "messages": """
apply()
for _ in range(2):
    options_of(lambda: v1.Session(config=config()))
    options_of(lambda: v1.Session(config=fraction(0.25)))
out["kept"] = list(messages)
for _ in range(2):
    options_of(lambda: v1.Session(config=fraction(0.75)))
    options_of(lambda: v1.Session(config=split([10240])))
out["fraction"] = list(messages)
apply()
options_of(lambda: eager(logical(10240)))
out["limit"] = messages[1:]
messages.clear()
os.environ["TF_GPU_ALLOCATOR"] = "cuda_malloc_async"
options_of(lambda: v1.Session(config=experimental(use_cuda_malloc_async=True)))
out["allocator"] = list(messages)
out["left"] = os.environ.get("TF_GPU_ALLOCATOR")
""",
    "growth": """
for kind, make in sessions.items():
    apply("growth")
    out[kind] = options_of(lambda: make(fraction(0.75)))
apply("growth")
out["tf.config"] = options_of(lambda: eager(logical(2048)))
out["warned"] = list(messages)
""",
    "several": """
for name, config_for in {
    "both": config,
    "more": lambda: fraction(0.9),
    "the second": lambda: config(visible_device_list="1"),
    "turned": lambda: fraction(0.3, visible_device_list="1,0"),
    "the first": lambda: config(device_count={"GPU": 1}),
    "no such device": lambda: fraction(0.9, visible_device_list="0,2"),
    "no list": lambda: fraction(0.9, visible_device_list="first"),
    "too few pieces": lambda: split([9000]),
}.items():
    apply(total=(16, 32), budget=(8, 8))
    out[name] = options_of(lambda: v1.Session(config=config_for()))[0]
""",
    "split": """
def problem_of(make):
    try:
        return options_of(make)[0]
    except FrameworkError as error:
        return str(error)

apply()
out["whole"] = problem_of(lambda: v1.Session(config=fraction(0.1)))
out["then split"] = problem_of(lambda: v1.Session(config=split([1024, 1024])))
out["by tf.config"] = problem_of(lambda: eager(logical(1024, 1024)))
apply()
out["split"] = problem_of(lambda: v1.Session(config=split([1024, 1024])))
out["again"] = problem_of(lambda: v1.Session(config=split([4096, 4096])))
out["then whole"] = problem_of(lambda: v1.Session())
""",
    "caps": """
settings = {
    "nothing": lambda: None,
    "no options": config,
    "more": lambda: fraction(0.75),
    "less": lambda: fraction(0.25),
    "all of it, and more": lambda: fraction(1.5),
    "more, growing": lambda: fraction(0.75, allow_growth=True),
    "growing": lambda: config(allow_growth=True),
    "shown": lambda: fraction(0.75, visible_device_list="0"),
    "unlimited": lambda: experimental(use_cuda_malloc_async=True, gpu_system_memory_size_in_mb=1),
    "two equal pieces": lambda: experimental(num_virtual_devices_per_gpu=2),
    "split": lambda: split([2048, 6144]),
    "split further": lambda: split([6144, 10240]),
    "split without limits": lambda: split([]),
    "split below nothing": lambda: split([-1]),
}
few = ("nothing", "more, growing", "split further")
for kind, make in sessions.items():
    out[kind] = {}
    for setting in settings if kind == "Session" else few:
        config_for = settings[setting]
        apply()
        out[kind][setting] = options_of(lambda: make(config_for()))
apply()
out["keras"] = options_of(keras_backend.get_session)
out["is_gpu_available"] = options_of(tf.test.is_gpu_available)
from tensorflow.python.grappler import cluster
out["Cluster"] = options_of(cluster.Cluster)
for name, setting in {
    "set_memory_growth": lambda gpu: tf.config.experimental.set_memory_growth(gpu, True),
    "less": logical(2048),
    "more": logical(6144, 10240),
}.items():
    apply()
    out[f"tf.config {name}"] = options_of(lambda: eager(setting))
out["hidden"] = options_of(lambda: v1.Session(config=fraction(0.75, device_count={"GPU": 0})))
theirs = fraction(0.75)
options_of(lambda: v1.Session(config=theirs))
out["theirs"] = theirs.gpu_options.per_process_gpu_memory_fraction
""",
}


@pytest.fixture(scope="module")
def shown():
    parts = [
        f"out = all_out[{name!r}] = {{}}\nmessages.clear()\n{asked}"
        for name, asked in ASKED.items()
    ]
    first = f"all_out = {{'threads': out}}\n{TENSORFLOW_THREADS}{TENSORFLOW_SHOWN}"
    return run_child("\n".join([first, *parts, "out = all_out\n"]), host_policy(cpus=MANY))


@needs_tensorflow
def test_whatever_opens_a_gpu_in_tensorflow_keeps_to_the_cap(shown):
    found = shown["caps"]
    whole = [[[8192]], False]
    kinds = {
        "nothing": whole,
        "no options": whole,
        "more": whole,
        "less": [[[4096]], False],
        "all of it, and more": whole,
        "more, growing": [[[8192]], True],
        "growing": [[[8192]], True],
        "shown": whole,
        "unlimited": whole,
        "two equal pieces": [[[4096, 4096]], False],
        "split": [[[2048, 6144]], False],
        "split further": [[[3072, 5120]], False],
        "split without limits": whole,
        "split below nothing": [[[1]], False],
    }
    for kind in (
        "Session",
        "positional",
        "MonitoredTrainingSession",
        "MonitoredSession",
        "SingularMonitoredSession",
        "Supervisor",
        "Server",
        "create_local_server",
        "list_local_devices",
    ):
        assert found[kind] == {name: kinds[name] for name in found[kind]}, kind
    assert found["Session"].keys() == kinds.keys()
    # Without options this one grows.
    growing = [[[8192]], True]
    assert found["InteractiveSession"] == {**found["Server"], "nothing": growing}
    assert found["keras"] == whole
    assert found["is_gpu_available"] == whole
    assert found["Cluster"] == whole
    assert found["tf.config set_memory_growth"] == [[[8192]], True]
    assert found["tf.config less"] == [[[2048]], False]
    assert found["tf.config more"] == [[[3072, 5120]], False]
    assert found["hidden"] == [[], False]
    assert found["theirs"] == 0.75, "the session changed the options that it was given"


@needs_tensorflow
def test_whatever_opens_a_gpu_in_tensorflow_grows_where_there_is_no_cap(shown):
    found = shown["growth"]
    assert found.pop("warned") == []
    assert found.pop("tf.config") == [[[2048]], True]
    assert set(map(str, found.values())) == {"[[], True]"}


@needs_tensorflow
def test_several_gpus_of_tensorflow_have_a_cap_each(shown):
    found = shown["several"]
    assert found == {
        "both": [[8192], [8192]],
        "more": [[8192], [8192]],
        "the second": [[8192]],
        "turned": [[8192], [4915]],
        "the first": [[8192]],
        # TensorFlow refuses these.
        "no such device": [],
        "no list": [],
        "too few pieces": [[9000]],
    }


@needs_tensorflow
def test_what_tensorflow_asks_for_above_the_cap_is_logged_once(shown):
    found = shown["messages"]
    assert found["kept"] == []
    (fraction,) = found["fraction"]
    assert (
        "per_process_gpu_memory_fraction=0.75 is 12GiB of this GPU; 0.5 (8GiB) is used" in fraction
    )
    assert "its budget less the CUDA context" in fraction
    (limit,) = found["limit"]
    assert "logical devices of 10GiB on one GPU; 8GiB is used" in limit
    (allocator,) = found["allocator"]
    assert "TF_GPU_ALLOCATOR=cuda_malloc_async is not used" in allocator
    assert found["left"] is None


@needs_tensorflow
def test_a_gpu_that_tensorflow_has_opened_is_split_no_further(shown):
    found = shown["split"]
    for again in ("then split", "by tf.config"):
        assert "GPU 0 cannot be split into 2 logical devices" in found[again]
        assert "tf.config.set_logical_device_configuration or in the first session" in found[again]
    assert found["split"] == [[1024, 1024]]
    assert found["again"] == [[4096, 4096]]
    assert found["then whole"] == [[8192]]


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
