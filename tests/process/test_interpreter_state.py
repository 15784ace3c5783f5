"""What a flow's process has set in its interpreter: fresh processes, standbys and forks have it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.processes.interpreter import (
    InterpreterState,
    LoggerState,
    WarningFilter,
)
from tests.cases import needs
from tests.process import interpreter_bodies as bodies
from tests.process.rig import PREPARE, Heard, eventually, spec_of
from tests.process.warm import Source, Warm

#: Starts the process of a task.
Start = Callable[..., Heard]


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture(scope="module")
def manager() -> Iterator[SyncManager]:
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.fixture(params=["fresh", "standby", "fork"])
def start(request: pytest.FixtureRequest) -> Start:
    """Start a process with the interpreter state of a flow, in one of three ways."""
    way: str = request.param
    if way == "standby":
        warm = request.getfixturevalue("warm")
        announced = warm.announce()
        warm.wait_ready()
    else:
        options = {"spawn": request.getfixturevalue("source").source.fork} if way == "fork" else {}
        rig = request.getfixturevalue("make_rig")(**options)

    def start_in(interpreter: InterpreterState, function: Callable[..., Any], *args: Any) -> Heard:
        spec = spec_of(function, *args)
        spec = replace(spec, prepare=replace(PREPARE, interpreter=interpreter))
        heard: Heard = warm.run(announced, spec) if way == "standby" else rig.launch(spec)
        return heard

    return start_in


def test_a_body_finds_the_interpreter_of_its_flow(start: Start) -> None:
    level = LoggerState("of_a_test", logging.DEBUG, True, False, True)
    flow = replace(
        InterpreterState.read(),
        authkey=b"key",
        process_name="trainer",
        start_method="forkserver",
        limits={"recursionlimit": 4321, "of_no_python": 1},
        filters=(
            WarningFilter("error", re.compile("raised: "), ("builtins", "UserWarning"), None, 0),
            WarningFilter("ignore", None, ("builtins", "DeprecationWarning"), None, 0),
            WarningFilter("error", None, ("of_no_module", "OwnWarning"), None, 0),
            WarningFilter("default", None, ("builtins", "Warning"), None, 0),
        ),
        loggers=(level, replace(level, name="of_a_test.mine", level=0, propagate=False)),
    )
    assert start(flow, bodies.state).value() == {
        "authkey": b"key",
        "name": "trainer",
        "method": "forkserver",
        "limit": 4321,
        "level": logging.DEBUG,
        "propagates": False,
        "raises": True,
        "ignores": True,
    }


def test_proxies_of_a_manager_are_arguments(manager: SyncManager, start: Start) -> None:
    numbers = manager.dict()
    start(InterpreterState.read(), numbers.update, {"a": 1}).value()
    assert dict(numbers) == {"a": 1}


def test_a_module_may_choose_the_start_method_in_the_process_of_a_task(start: Start) -> None:
    flow = replace(InterpreterState.read(), start_method="forkserver")
    assert start(flow, bodies.choose_spawn).value() == "spawn"


def test_signals_are_those_of_a_fresh_interpreter_and_of_what_it_starts(start: Start) -> None:
    fresh = subprocess.run(
        [sys.executable, "-c", "from tests.process.interpreter_bodies import *; print(signals())"],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    flow = replace(InterpreterState.read(), ignores_interrupt=False)
    found = start(flow, bodies.signals).value()
    assert found["handlers"]["SIGINT"].startswith("<built-in function default_int_handler")
    assert found["spawned"] == -signal.SIGINT
    # Functions have addresses.
    assert re.sub(" at 0x.*?>", "", str(found)) == re.sub(" at 0x.*?>", "", fresh.stdout.strip())


def test_a_flow_that_ignores_ctrl_c_has_tasks_that_do(start: Start) -> None:
    flow = replace(InterpreterState.read(), ignores_interrupt=True)
    assert start(flow, signal.getsignal, signal.SIGINT).value() is signal.SIG_IGN


@needs("torch")
def test_tensors_are_shared_as_the_flow_has_chosen(start: Start) -> None:
    settings = {"torch.multiprocessing": {"sharing strategy": "file_system"}}
    flow = replace(InterpreterState.read(), settings=settings)
    assert start(flow, bodies.sharing_of_tensors).value() == "file_system"


def test_a_launcher_that_blocks_signals_starts_tasks_that_do_not(make_rig: Any) -> None:
    flow = InterpreterState.read()
    # As in an actor of Ray: the launcher's thread inherits it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        spec = spec_of(bodies.signals)
        spec = replace(spec, prepare=replace(PREPARE, interpreter=flow))
        found = make_rig().launch(spec).value()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert found["spawned"] == -signal.SIGINT, found["program"]


def test_an_interrupt_is_raised_in_the_body(start: Start, tmp_path: Path) -> None:
    flow = replace(InterpreterState.read(), ignores_interrupt=False)
    child = start(flow, bodies.wait_for_interrupt, str(tmp_path / "ready"))
    assert eventually((tmp_path / "ready").exists)
    os.kill(child.pid, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        child.value()
    assert child.exit().code == 0 and child.exit().stderr_tail == ""


def test_an_interrupt_has_no_effect_on_a_standby_that_waits(warm: Warm) -> None:
    announced = warm.announce()
    (waits,) = warm.wait_ready()
    os.killpg(waits, signal.SIGINT)
    child = warm.run(announced, spec_of(os.getpid))
    assert child.value() == waits
    assert child.exit().stderr_tail == ""


def test_an_interrupt_has_no_effect_on_a_source_of_forks(source: Source, make_rig: Any) -> None:
    os.killpg(source.pid, signal.SIGINT)
    assert make_rig(spawn=source.source.fork).call(os.getppid) == source.pid
