"""What adapters ask of a framework, told by hand-written fakes of it; `tests/gpu` has the real ones."""

import contextlib
import os
import sys
import threading
from types import SimpleNamespace

import pytest

import prefect_gpu.in_task
from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import (
    cupy_adapter,
    onnxruntime_adapter,
    tensorflow_adapter,
    torch_adapter,
)
from prefect_gpu.frameworks.adapter import CaptureWatch, Counters, child_environment
from prefect_gpu.frameworks.onnxruntime_adapter import onnxruntime_provider_options
from prefect_gpu.frameworks.registry import ADAPTERS
from prefect_gpu.frameworks.torch_adapter import ALL_MARGIN_BYTES, fraction_for
from prefect_gpu.units import GIB, MIB
from tests.unit.frameworks.policies import TWO, apply, policy

TORCH = ADAPTERS["torch"]


class FakeTorch:
    """Says what was asked of it, in order, in `log`."""

    def __init__(self, devices=1, built=True, room=80 * GIB):
        self.log = []
        self.uint8 = "uint8"
        self.__version__ = "2.13.0+cu130"
        self.version = SimpleNamespace(cuda="13.0" if built else None)
        self.backend = "native"
        self._queued = []
        self._room = room
        self.cuda = SimpleNamespace(
            device_count=lambda: devices,
            is_initialized=lambda: not self._queued,
            get_device_properties=lambda i: SimpleNamespace(total_memory=80 * GIB),
            set_per_process_memory_fraction=lambda f, i: self.log.append(("cap", i, f * 80)),
            memory_stats_as_nested_dict=lambda i: {
                "allocated_bytes": {"all": {"current": 1, "peak": 2}},
                "reserved_bytes": {"all": {"current": 3, "peak": 4, "freed": 6}},
                "num_alloc_retries": 5,
            },
            get_allocator_backend=lambda: self.backend,
            empty_cache=lambda: self.log.append("emptied"),
            _lazy_call=self._queued.append,
        )
        self._interop = 8

    def start_cuda(self):
        while self._queued:
            self._queued.pop(0)()

    def empty(self, size, dtype, device):
        self.start_cuda()
        if size > self._room:
            raise RuntimeError("CUDA out of memory")
        self.log.append(("take", device, size))

    def set_num_threads(self, n):
        self.log.append(("threads", n))

    def get_num_interop_threads(self):
        return self._interop

    def set_num_interop_threads(self, n):
        if self._interop != 8:
            raise RuntimeError("cannot set number of interop threads after parallel work")
        self._interop = n


@pytest.fixture(autouse=True)
def no_allocator_options(monkeypatch):
    for name in (*torch_adapter.ALLOCATOR_VARIABLES, torch_adapter.SUBPROCESS_CAP):
        # First set, so that it is restored whatever an adapter does to it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def user_of(make, module, monkeypatch):
    """Return a function that makes a fake of a framework and puts it into place."""

    def use(**options):
        fake = make(**options)
        monkeypatch.setitem(sys.modules, module, fake)
        return fake

    return use


@pytest.fixture
def torch(monkeypatch):
    return user_of(FakeTorch, "torch", monkeypatch)


def test_torch_caps_when_cuda_starts_and_not_before(torch):
    fake = torch(devices=2)
    apply("torch", **TWO, allocation="limit", cpus=2)
    assert fake.log == [("threads", 2)]
    assert TORCH.counters() is None
    fake.start_cuda()
    assert fake.log[1:] == [("cap", 0, 8.0), ("cap", 1, 4.0)]
    assert TORCH.counters() == Counters(2, 6, 4, 8, 10, 12)
    fake.backend = "cudaMallocAsync"
    assert TORCH.counters().freed_bytes is None


FRACTION = "per_process_memory_fraction:0.050000"


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [
        pytest.param("2.13.0+cu130", {}, {"PYTORCH_ALLOC_CONF": FRACTION}, id="it"),
        pytest.param(
            "2.11.0",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{FRACTION}"},
            id="beside other options, where they are",
        ),
        pytest.param(None, {}, {"PYTORCH_ALLOC_CONF": FRACTION}, id="not imported yet"),
        pytest.param("2.10.1", {}, {}, id="an older release refuses what it does not know"),
    ],
)
def test_processes_that_a_body_starts_inherit_the_smallest_cap(
    torch, monkeypatch, version, before, after
):
    if version is None:
        # A body that only starts `torchrun`; this machine's release is recent enough.
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        torch(devices=2).__version__ = version
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    limited = policy(**TWO, allocation="limit", cpus=2)
    TORCH.cap_subprocesses(limited, os.environ)
    if version is not None:
        # Again, as it is imported.
        TORCH.apply(limited)
    assert {
        name: os.environ[name] for name in torch_adapter.ALLOCATOR_VARIABLES if name in os.environ
    } == after
    # A GPU task that the body submits, or a flow that it starts, has a budget of its own.
    inner = child_environment(policy(allocation="growth"), [TORCH], os.environ)
    seen = {**os.environ, **inner}
    for name in torch_adapter.ALLOCATOR_VARIABLES:
        assert seen.get(name) == before.get(name)
    assert seen.get(torch_adapter.SUBPROCESS_CAP) is None


def test_what_torch_does_once_cuda_has_started(torch, monkeypatch, tmp_path):
    fake, path = torch(devices=2), tmp_path / "a.pickle"
    monkeypatch.setattr(torch_adapter, "begin_trace", lambda torch: ("a trace of", torch))
    monkeypatch.setattr(torch_adapter, "record_history", lambda torch: fake.log.append(torch))
    fake.cuda.memory_summary = lambda index: f"page {index}"
    fake.cuda.memory = SimpleNamespace(_dump_snapshot=lambda path: open(path, "w").close())
    apply("torch", **TWO, allocation="limit", snapshot_path="/snapshots/a.pickle")
    assert TORCH.begin_trace() is None
    assert TORCH.memory_summary() == ""
    assert TORCH.write_snapshot(str(path)) is False
    TORCH.release_cached()
    assert not emptied(fake)
    assert fake not in fake.log and "emptied" not in fake.log
    fake.start_cuda()
    assert fake in fake.log, "it records for snapshots"
    assert TORCH.begin_trace() == ("a trace of", fake)
    assert TORCH.memory_summary() == "page 0\npage 1"
    assert TORCH.write_snapshot(str(path)) is True
    assert path.exists()
    TORCH.release_cached()
    assert fake.log[-1] == "emptied"
    # The driver's own pool would wait for the device.
    fake.backend = "cudaMallocAsync"
    assert not emptied(fake)


class FakeGraph:
    fails = False

    def capture_begin(self, pool=None):
        if self.fails:
            raise RuntimeError("on the default stream")

    def capture_end(self):
        if self.fails:
            raise RuntimeError("on another stream")


@pytest.fixture
def graphs(torch, monkeypatch):
    """A PyTorch that can capture graphs, with CUDA started, and the class of its graphs."""
    fake = torch()
    Graph = type("CUDAGraph", (FakeGraph,), {})
    fake.cuda.CUDAGraph = Graph
    monkeypatch.setattr(torch_adapter, "_captures", CaptureWatch())
    for _ in range(2):
        apply("torch")
    return fake, Graph


def emptied(fake):
    before = len(fake.log)
    TORCH.release_unused()
    return fake.log[before:] == ["emptied"]


def test_torch_releases_what_it_does_not_use_but_not_during_a_capture(graphs):
    fake, Graph = graphs
    assert emptied(fake)
    one, other = Graph(), Graph()
    one.capture_begin(pool=1)
    assert not emptied(fake)
    # A thread's own capture is not the only one.
    other.capture_begin()
    one.capture_end()
    assert not emptied(fake)
    other.capture_end()
    assert emptied(fake)


def test_a_capture_that_does_not_begin_is_none_and_one_that_does_not_end_goes_on(graphs):
    fake, Graph = graphs
    graph = Graph()
    graph.fails = True
    with pytest.raises(RuntimeError, match="default stream"):
        graph.capture_begin()
    assert emptied(fake)
    graph.fails = False
    graph.capture_begin()
    graph.fails = True
    with pytest.raises(RuntimeError, match="another stream"):
        graph.capture_end()
    assert not emptied(fake)


def test_no_capture_begins_while_torch_releases(graphs):
    fake, Graph = graphs
    graph, order = Graph(), []
    begins = threading.Thread(target=lambda: (graph.capture_begin(), order.append("begun")))

    def empty():
        begins.start()
        begins.join(0.002)
        order.append("emptied")

    fake.cuda.empty_cache = empty
    TORCH.release_unused()
    begins.join()
    assert order == ["emptied", "begun"]


def test_a_class_whose_captures_cannot_be_watched_captures_for_ever():
    watch = CaptureWatch()
    watch.watch(int, "bit_length", "conjugate")
    with watch.none_begins() as none_is:
        assert not none_is


def test_torch_growth_sets_no_cap_and_all_takes_it_at_once_but_for_a_margin(torch):
    fake = torch()
    apply("torch")
    assert not fake._queued
    apply("torch", allocation="all")
    taken = ("take", "cuda:0", 8 * GIB - ALL_MARGIN_BYTES)
    assert [entry for entry in fake.log if entry[0] != "threads"] == [("cap", 0, 8.0), taken]


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        ({"room": GIB}, {"allocation": "all"}, "allocation=all could not take"),
        ({"devices": 0, "built": False}, {}, "1 GPU.s. allotted, 0 found.*built without CUDA"),
        ({"devices": 0}, {}, "1 GPU.s. allotted, 0 found.*libraries may be missing"),
        ({}, {"allocation": "limit", "caching": False}, "caching=off disables the cap"),
    ],
    ids=["no room", "a build without CUDA", "libraries", "no cache"],
)
def test_torch_that_cannot_do_as_it_is_told_says_so(torch, options, changes, says):
    torch(**options)
    with pytest.raises(FrameworkError, match=says):
        apply("torch", **changes)


def test_torch_interop_threads_that_are_fixed_already_stand(torch):
    fake = torch(devices=0)
    fake._interop = 4
    apply("torch", device_kind="host", cpus=2)
    assert fake.get_num_interop_threads() == 4


@pytest.mark.parametrize("cap", [1, 3 * GIB + 1, 7 * GIB - 1, 79 * GIB + 12345])
def test_torch_fraction_gives_the_cap_to_the_byte(cap):
    total = 80 * GIB - 4321
    assert int(fraction_for(cap, total) * total) == cap
    assert fraction_for(total + 1, total) == 1.0


class FakeTensorFlow:
    def __init__(self, gpus=1, started=False, built=True):
        self.log = []
        self._started = started
        names = [f"GPU:{i}" for i in range(gpus)]
        self.test = SimpleNamespace(is_built_with_cuda=lambda: built)
        self.device = contextlib.nullcontext
        self.config = SimpleNamespace(
            threading=SimpleNamespace(
                get_intra_op_parallelism_threads=lambda: 0,
                set_intra_op_parallelism_threads=lambda n: self.set("intra", n),
                get_inter_op_parallelism_threads=lambda: 0,
                set_inter_op_parallelism_threads=lambda n: self.set("inter", n),
            ),
            list_physical_devices=lambda kind: names,
            list_logical_devices=lambda kind: names,
            experimental=SimpleNamespace(get_memory_info=lambda name: {"current": 5, "peak": 7}),
        )

    def set(self, *what):
        if self._started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.log.append(what)

    def zeros(self, shape):
        self.log.append("started")
        return SimpleNamespace(numpy=lambda: None)


@pytest.fixture
def tensorflow(monkeypatch):
    use_fake = user_of(FakeTensorFlow, "tensorflow", monkeypatch)

    def use(runtime=None, **options):
        fake = use_fake(**options)
        context = SimpleNamespace(_context=runtime)
        monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", context)
        # What it does with TensorFlow itself is in `tests/integration/test_frameworks_in_process.py`.
        monkeypatch.setattr(
            tensorflow_adapter, "hold_caps", lambda caps, total: fake.log.append(("caps", caps))
        )
        return fake

    return use


STARTED = SimpleNamespace(_initialized=True)
THREADS = [("intra", 1), ("inter", 1)]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, [("caps", None)]),
        ({"allocation": "limit", "context_bytes": {"tensorflow": GIB}}, [("caps", (7 * GIB,))]),
        ({"allocation": "all"}, [("caps", (8 * GIB,)), "started"]),
        ({"device_kind": "host", "allocation": "limit"}, []),
    ],
    ids=["growth", "a limit", "all is a limit taken at once", "nothing on the host"],
)
def test_tensorflow_gets_growth_or_a_limit(tensorflow, changes, asked):
    fake = tensorflow()
    apply("tensorflow", **changes)
    assert fake.log == THREADS + asked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": 0}, r"1 GPU\(s\) allotted, 0 found.*silently.*GPU libraries"),
        ({"gpus": 0, "built": False}, r"1 GPU\(s\) allotted, 0 found.*a build without CUDA"),
        ({"started": True}, "refused the policy .*cannot be modified"),
        ({"runtime": STARTED}, r"refused the policy \(its GPUs are open\)"),
    ],
)
def test_tensorflow_that_has_started_or_would_silently_use_the_cpu_refuses(
    tensorflow, options, says
):
    fake = tensorflow(**options)
    with pytest.raises(FrameworkError, match=says):
        apply("tensorflow")
    assert fake.log == ([] if "started" in options else THREADS)


def test_tensorflow_counters_need_a_started_runtime_and_a_gpu(tensorflow):
    tensorflow()
    assert ADAPTERS["tensorflow"].counters() is None
    tensorflow(STARTED, gpus=2)
    assert ADAPTERS["tensorflow"].counters() == Counters(10, None, 14, None)
    tensorflow(STARTED, gpus=0)
    assert ADAPTERS["tensorflow"].counters() is None


def jax_with(monkeypatch, devices, backends=()):
    def find(kind):
        if not devices:
            raise RuntimeError("Unknown backend: 'gpu' requested")
        return devices

    cleared = []
    fake = SimpleNamespace(
        devices=find, local_devices=lambda: devices, clear_caches=lambda: cleared.append(True)
    )
    monkeypatch.setitem(sys.modules, "jax", fake)
    bridge = SimpleNamespace(_backends=dict.fromkeys(backends))
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    return cleared


def gpu_with(**stats):
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def test_jax_is_checked_only_where_a_tag_names_it(monkeypatch):
    jax_with(monkeypatch, [])
    apply("jax")
    apply("jax", device_kind="host", frameworks=("jax",))
    with pytest.raises(FrameworkError, match=r"0 found \(Unknown backend"):
        apply("jax", frameworks=("jax",))
    jax_with(monkeypatch, [gpu_with()])
    apply("jax", frameworks=("jax",))


@pytest.mark.parametrize(
    ("body_set", "kept", "warns"),
    [
        pytest.param({}, {}, "", id="nothing"),
        pytest.param(
            {
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
                "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            {},
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform",
            id="other variables",
        ),
        pytest.param({"XLA_CLIENT_MEM_FRACTION": "0.9"}, {}, "FRACTION=0.9", id="more"),
        pytest.param({"XLA_CLIENT_MEM_FRACTION": "most"}, {}, "FRACTION=most", id="no number"),
        pytest.param(
            {"XLA_CLIENT_MEM_FRACTION": "0.02"},
            {"XLA_CLIENT_MEM_FRACTION": "0.02"},
            "",
            id="less is kept",
        ),
    ],
)
def test_jax_keeps_to_its_cap_whatever_a_body_sets_before_the_import(
    monkeypatch, caplog, body_set, kept, warns
):
    jax_with(monkeypatch, [])
    limited = policy(allocation="limit")
    ours = ADAPTERS["jax"].environment(limited)
    for name, value in ours.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    for name, value in body_set.items():
        monkeypatch.setenv(name, value)
    ADAPTERS["jax"].apply(limited)
    assert {name: os.environ.get(name) for name in ours} == {**ours, **kept}
    assert [warns in record.getMessage() for record in caplog.records] == [True] * bool(warns)


def test_jax_counters_start_no_backend_and_programs_are_dropped_once_it_has_started(monkeypatch):
    adapter = ADAPTERS["jax"]
    pooled = gpu_with(bytes_in_use=1, peak_bytes_in_use=2, pool_bytes=3, peak_pool_bytes=4)
    cleared = jax_with(monkeypatch, [pooled])
    assert adapter.counters() is None
    adapter.release_cached()
    assert cleared == []
    cleared = jax_with(monkeypatch, [pooled, pooled], ["cuda"])
    assert adapter.counters() == Counters(2, 6, 4, 8)
    adapter.release_cached()
    assert cleared == [True]
    jax_with(monkeypatch, [gpu_with(bytes_in_use=1)], ["cuda"])
    assert adapter.counters() == Counters(1, None, 1, None)
    jax_with(monkeypatch, [SimpleNamespace(platform="cpu", memory_stats=dict)], ["cpu"])
    assert adapter.counters() is None


class FakeCupy:
    def __init__(self, devices=1, live=0, held=0, room=80 * GIB):
        self.taken, self.freed = [], []
        self._room = room

        def count():
            if not devices:
                raise RuntimeError("cudaErrorNoDevice")
            return devices

        runtime = SimpleNamespace(getDeviceCount=count)
        self.cuda = SimpleNamespace(
            runtime=runtime, alloc=self.alloc, Device=lambda i: contextlib.nullcontext()
        )
        plans = SimpleNamespace(clear=lambda: self.freed.append("plans"))
        self.fft = SimpleNamespace(config=SimpleNamespace(get_plan_cache=lambda: plans))
        pool = SimpleNamespace(
            used_bytes=lambda: live,
            total_bytes=lambda: held,
            free_all_blocks=lambda: self.freed.append("device"),
        )
        pinned = SimpleNamespace(free_all_blocks=lambda: self.freed.append("pinned"))
        self.get_default_memory_pool = lambda: pool
        self.get_default_pinned_memory_pool = lambda: pinned

    def alloc(self, size):
        if size > self._room:
            raise MemoryError("Out of memory")
        self.taken.append(size)


def test_cupy(monkeypatch):
    use, adapter = user_of(FakeCupy, "cupy", monkeypatch), ADAPTERS["cupy"]
    fake = use()
    apply("cupy", device_kind="host", allocation="all")
    apply("cupy", allocation="limit")
    assert fake.taken == []
    assert adapter.counters() is None
    adapter.release_cached()
    assert fake.freed == []
    apply("cupy", allocation="all")
    assert fake.taken == [8 * GIB]
    fake = use(live=MIB, held=2 * MIB)
    assert adapter.counters() == Counters(MIB, 2 * MIB, MIB, 2 * MIB)
    adapter.release_cached()
    # Plans hold blocks of the pool.
    assert fake.freed == ["plans", "device", "pinned"]
    fake.freed.clear()
    adapter.release_unused()
    assert fake.freed == ["device"]
    use(devices=0)
    with pytest.raises(FrameworkError, match=r"0 found \(cudaErrorNoDevice\)"):
        apply("cupy")
    use(room=GIB)
    with pytest.raises(FrameworkError, match="could not take"):
        apply("cupy", allocation="all")


def test_cupy_releases_nothing_once_a_graph_was_captured(monkeypatch):
    class Base:
        def begin_capture(self, mode=None):
            pass

        def end_capture(self):
            return "graph"

    fake = FakeCupy(live=MIB, held=2 * MIB)
    fake.cuda.Stream = type("Stream", (Base,), {})
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cupy_adapter, "_captures", CaptureWatch())
    apply("cupy")
    ADAPTERS["cupy"].release_unused()
    assert fake.freed == ["device"]
    # Also streams that are made from another class.
    stream = type("ExternalStream", (Base,), {})()
    stream.begin_capture(mode=2)
    assert stream.end_capture() == "graph"
    ADAPTERS["cupy"].release_unused()
    assert fake.freed == ["device"]


@pytest.fixture
def onnxruntime(monkeypatch):
    """Runtime with a processor's provider alone, imported in no GPU task so far."""
    providers = ["CPUExecutionProvider"]
    fake = SimpleNamespace(get_available_providers=lambda: providers)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    monkeypatch.setattr(onnxruntime_adapter, "_applied", None)
    return providers


def test_onnxruntime_without_its_cuda_provider_is_an_error_where_a_tag_names_it(onnxruntime):
    apply("onnxruntime")
    with pytest.raises(FrameworkError, match="no CUDAExecutionProvider"):
        apply("onnxruntime", frameworks=("onnxruntime",))
    onnxruntime.append("CUDAExecutionProvider")
    apply("onnxruntime", frameworks=("onnxruntime",))


GROWS_AS_ASKED = {"arena_extend_strategy": "kSameAsRequested"}


@pytest.fixture
def in_task(monkeypatch):
    """Make this process look like a GPU task on two devices."""

    def enter(cap_bytes=None):
        allocation = prefect_gpu.in_task.Allocation(8 * GIB, cap_bytes, 1, ("GPU-a", "GPU-b"), ())
        monkeypatch.setattr(prefect_gpu.in_task, "_current", allocation)

    return enter


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({"allocation": "limit"}, [7 * GIB, 3 * GIB]),
        ({"allocation": "all"}, [7 * GIB, 3 * GIB]),
        ({"allocation": "growth"}, [None, None]),
        ({"allocation": "limit", "device_kind": "host"}, [None, None]),
        ({"allocation": "limit", "shares": {"onnxruntime": 0.5}}, [3 * GIB, GIB]),
        ({"allocation": "limit", "detected": ("onnxruntime", "torch")}, [3 * GIB, GIB]),
    ],
)
def test_onnxruntime_options_are_the_frameworks_cap_on_each_device(
    onnxruntime, in_task, changes, limits
):
    in_task(cap_bytes=5 * GIB)
    apply("onnxruntime", **TWO, context_bytes={"onnxruntime": GIB}, **changes)
    for device, limit in enumerate(limits):
        limited = {} if limit is None else {"gpu_mem_limit": str(limit)}
        assert onnxruntime_provider_options(device) == {
            "device_id": str(device),
            **GROWS_AS_ASKED,
            **limited,
        }
    with pytest.raises(ValueError, match="device=2 is no device of this task"):
        onnxruntime_provider_options(2)


def test_onnxruntime_options_where_tags_name_other_frameworks(onnxruntime, in_task):
    in_task(cap_bytes=5 * GIB)
    assert onnxruntime_provider_options()["gpu_mem_limit"] == str(5 * GIB)
    in_task()
    assert "gpu_mem_limit" not in onnxruntime_provider_options()


def test_onnxruntime_options_outside_a_task_import_nothing_and_limit_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert onnxruntime_provider_options(3) == {"device_id": "3", **GROWS_AS_ASKED}
    with pytest.raises(ValueError, match="device=-1"):
        onnxruntime_provider_options(-1)
