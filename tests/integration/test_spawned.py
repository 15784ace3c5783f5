"""Functions and classes of scripts and notebooks reach the processes that a body starts with `multiprocessing`."""

from __future__ import annotations

import pytest

from tests.integration.programs import ARRIVED, CALL, Workplace
from tests.integration.test_hosts_python import LOAD

#: A flow that returns "all arrived" only if functions, classes and errors of its script reach each kind of process, and come back.
TASKS = '''
import dataclasses
import enum
import functools
import multiprocessing
import os
import sqlite3
from concurrent.futures import ProcessPoolExecutor

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

with open(os.environ["MODULE_RUNS"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n")

#: Only breaks a deadlock.
LIMIT_S = 300

added = None


class Color(enum.Enum):
    RED = 1


class OddError(Exception):
    """Of the script."""


@dataclasses.dataclass
class Point:
    x: int
    seen = []

    def doubled(self):
        return Point(double(self.x))


def double(x):
    return 2 * x


def initialise(value):
    global added
    added = value


def work(x):
    return Point(x + added).doubled(), Color.RED


def fail(x):
    raise OddError(x)


def put(queue, lock, x):
    with lock:
        queue.put(Point(x))


class Sender(multiprocessing.get_context("spawn").Process):
    def __init__(self, *given):
        super().__init__()
        self.given = given

    def run(self):
        put(*self.given, 9)


def check_pool(context):
    with context.Pool(2, initializer=initialise, initargs=(100,)) as pool:
        found = pool.map(work, range(4))
        assert [point.x for point, _ in found] == [200, 202, 204, 206], found
        assert all(type(point) is Point and color is Color.RED for point, color in found), found
        try:
            pool.apply(fail, (3,))
        except OddError as error:
            assert error.args == (3,)
        else:
            raise AssertionError("no error came back")
    assert added is None


def check_executor(context):
    with ProcessPoolExecutor(1, mp_context=context, initializer=initialise, initargs=(5,)) as pool:
        assert [point.x for point, _ in pool.map(work, range(3))] == [10, 12, 14]
        # A function comes back to its own module.
        assert pool.submit(itself, double).result()(4) == 8


def itself(value):
    return value


MISSING = object()


def given(value=MISSING):
    return value is not MISSING


def counting(function):
    calls = []

    @functools.wraps(function)
    def count():
        calls.append(function())
        return len(calls)

    return count


@counting
def counted():
    return None


class Plugin:
    registry = []

    def __init_subclass__(cls):
        Plugin.registry.append(cls)


class Loader(Plugin):
    pass


connection = None


def connect():
    global connection
    connection = sqlite3.connect(":memory:")


class Row:
    marked = "in the body"

    def __init__(self):
        (self.value,) = connection.execute("select 7").fetchone()


def make_row(_):
    Row.marked = "in a worker"
    return Row()


def name_of(function):
    return {double: "double", work: "work"}[function]


def make_adder(number):
    variables = {"number": number}
    exec("def add(x): return x + number", variables)
    return variables["add"]


add_one, add_two = make_adder(1), make_adder(2)


def added_by_both(x):
    return add_one(x), add_two(x)


def loaders(_):
    return Loader(), len(Plugin.registry)


def check_as_an_import_would(context):
    """Functions and classes are the same ones at each call, as where their module is imported."""
    registered = len(Plugin.registry)
    with context.Pool(1, initializer=connect) as pool:
        assert [pool.apply(given) for _ in range(3)] == [False] * 3
        assert [pool.apply(counted) for _ in range(3)] == [1, 2, 3]
        assert pool.map(name_of, [double, work]) == ["double", "work"]
        assert pool.map(added_by_both, [10], 1) == [(11, 12)]
        assert len({count for _, count in pool.map(loaders, range(4), 1)}) == 1
        assert [row.value for row in pool.map(make_row, range(2), 1)] == [7, 7]
    assert Row.marked == "in the body" and len(Plugin.registry) == registered


def check_process(context, kind=None):
    queue, lock = context.Queue(), context.Lock()
    if kind is None:
        process = context.Process(target=put, args=(queue, lock, 9))
    else:
        process = kind(queue, lock)
    process.start()
    assert queue.get(timeout=LIMIT_S) == Point(9)
    process.join()
    assert process.exitcode == 0


@task(tags=gpu(memory="64MiB", framework="none"))
def spread(method):
    Point.seen.append(method)
    context = multiprocessing.get_context(method)
    check_pool(context)
    check_executor(context)
    check_process(context)
    check_as_an_import_would(context)
    if method == "spawn":
        check_process(context, Sender)
    # What comes back does not set the attributes of the class here.
    assert Point.seen == [method]
    return Point(1)


@flow(task_runner=GPUTaskRunner(devices="host"))
def host_flow():
    methods = "spawn", "forkserver", "fork"
    assert spread.map(methods).result() == [Point(1)] * 3
    return "all arrived"
'''

TORCH = """
import os

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

with open(os.environ["MODULE_RUNS"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n")


class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        return torch.tensor([float(index)])


class Batch:
    def __init__(self, values):
        self.values = values


def collate(items):
    import torch

    return Batch(torch.stack(items))


def train(rank, shared, added):
    shared[rank] += rank + added


def name_of(value):
    return str(value)


@task(tags=gpu(memory="1GiB", framework="torch"))
def spread():
    import torch
    import torch.distributed
    import torch.multiprocessing
    from torch.utils.data import DataLoader

    shared = torch.zeros(3).share_memory_()
    torch.multiprocessing.spawn(train, args=(shared, 1), nprocs=2)
    assert shared.tolist() == [1, 2, 0], shared
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        # Of a module that PyTorch makes by hand.
        assert "SUM" in pool.apply(name_of, (torch.distributed.ReduceOp.SUM,))
    for method in ("spawn", "forkserver"):
        loader = DataLoader(
            Numbers(),
            batch_size=4,
            num_workers=1,
            multiprocessing_context=method,
            collate_fn=collate,
        )
        assert [batch.values.sum().item() for batch in loader] == [6, 22]


@flow(task_runner=GPUTaskRunner(devices="host"))
def host_flow():
    spread.submit().result()
    return "all arrived"
"""


def test_processes_of_a_script_without_a_main_guard(place: Workplace) -> None:
    place.write("script.py", TASKS + CALL)
    assert ARRIVED in place.run("script.py").stdout
    assert len(place.runs()) == 1


@pytest.mark.slow
def test_processes_of_a_script_that_was_loaded_by_path(place: Workplace) -> None:
    place.write("flows/deployed_flow.py", TASKS)
    place.write("load.py", LOAD)
    assert ARRIVED in place.run("load.py", "flows/deployed_flow.py:host_flow").stdout


@pytest.mark.slow
def test_processes_of_forked_tasks(place: Workplace) -> None:
    forks = TASKS.replace('devices="host"', 'devices="host", start_method="auto"')
    place.write("script.py", forks + CALL)
    assert ARRIVED in place.run("script.py").stdout


def test_processes_of_a_notebook(place: Workplace) -> None:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    from tests.integration.test_hosts_notebooks import run_cells

    _, printed = run_cells(place, [TASKS, CALL])
    assert ARRIVED in printed


# PyTorch's workers are `multiprocessing`'s, with five imports of PyTorch.
@pytest.mark.slow
def test_workers_of_pytorch(place: Workplace) -> None:
    pytest.importorskip("torch")
    place.write("script.py", TORCH + CALL)
    assert ARRIVED in place.run("script.py").stdout
    assert len(place.runs()) == 1
