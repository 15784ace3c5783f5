"""Standbys: which task gets one, what happens when one dies, how many there are and when they end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.errors import CapacityError
from prefect_gpu.processes import launcher, standby_kind
from prefect_gpu.processes import standby_pool as standby
from prefect_gpu.processes.launch_spec import ChildExited, ChildStarted
from prefect_gpu.processes.messages import BodyStarted
from tests.process import bodies
from tests.process.rig import eventually, is_alive, spec_of
from tests.process.warm import KIND, Warm, kind_with, module, slow_module

# A task gets one.


def test_a_task_runs_in_the_standby_that_waited_for_it(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.add, 1, b=2))
    assert child.value() == 3
    assert child.pid == waited
    assert child.exit() == ChildExited(0, "")
    (second,) = warm.wait_ready()
    assert second != waited, "the next one, of the same kind"


def test_the_next_standby_starts_after_the_body_of_a_task_has_begun(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "CHECK_S", DEADLOCK_S)
    announced = warm.announce()
    warm.wait_ready()
    order: list[str] = []
    start, pass_on = warm.rig.launcher.start, warm.pool._pass_on

    def note_start(*args: Any) -> Any:
        order.append("next")
        return start(*args)

    def note_message(given: Any, listener: Any, message: Any) -> None:
        order.append(type(message).__name__)
        pass_on(given, listener, message)

    monkeypatch.setattr(warm.rig.launcher, "start", note_start)
    monkeypatch.setattr(warm.pool, "_pass_on", note_message)
    assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1
    warm.wait_ready()
    assert order.index("BodyStarted") < order.index("next")


def test_no_standby_starts_while_a_task_of_its_kind_begins(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "CHECK_S", 0.01)
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    os.kill(waited, signal.SIGSTOP)
    child = warm.run(announced, spec_of(bodies.add, 1))
    warm.wait_checks()
    assert warm.pool.pids == ()
    os.kill(waited, signal.SIGCONT)
    assert child.value() == 1
    warm.wait_ready()


def test_a_task_that_comes_early_gets_a_standby_that_still_imports(
    warm: Warm, importable: str, tmp_path: Path
) -> None:
    slow_module(importable, "test_standby_slow", tmp_path)
    announced = warm.announce(kind_with("test_standby_slow"))
    assert eventually((tmp_path / "begun").exists)
    (importing,) = warm.pool.pids
    child = warm.run(announced, spec_of(bodies.add, 1))
    (tmp_path / "go").touch()
    assert child.value() == 1 and child.pid == importing


def test_a_task_in_a_standby_finds_the_environment_of_a_fresh_process(
    warm: Warm, importable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_GONE", "1")
    announced = warm.announce(replace(KIND, environment=(("CUDA_VISIBLE_DEVICES", "GPU-1"),)))
    warm.wait_ready()
    environment = {
        "CUDA_VISIBLE_DEVICES": "GPU-2",
        "PREFECT_GPU_TEST": "yes",
        "PREFECT_GONE": None,
        "OMP_NUM_THREADS": "7",
    }
    spec = replace(
        spec_of(bodies.look_around, environment=environment),
        argv=("script.py", "--epochs=3"),
        cwd=importable,
    )
    child = warm.run(announced, spec)
    seen = child.value()
    assert seen["seen_at_import"] == "yes"
    assert seen["path"] == list(spec.sys_path)
    assert seen["argv"] == ["script.py", "--epochs=3"]
    assert seen["cwd"] == os.path.realpath(importable)
    assert seen["stdin"] == "" and seen["encoding"] == "utf-8"
    assert warm.pool.ready_by_kind.total() <= 1
    again = warm.announce(replace(KIND, environment=(("CUDA_VISIBLE_DEVICES", "GPU-1"),)))
    (waited,) = warm.wait_ready()
    look = spec_of(bodies.environment_of_self, environment=environment)
    child = warm.run(again, look)
    variables = child.value()
    assert child.pid == waited
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-2" and variables["OMP_NUM_THREADS"] == "7"
    assert "PREFECT_GONE" not in variables


def test_what_a_standby_prints_as_it_imports_is_shown(
    warm: Warm, importable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module(importable, "test_standby_loud", "print('imported loudly')")
    warm.announce(kind_with("test_standby_loud"))
    warm.wait_ready()
    assert warm.rig.launcher.output.flush(DEADLOCK_S)
    assert "imported loudly" in capsys.readouterr().out


# A task that none suits.


@pytest.mark.parametrize(
    ("changes", "spec_changes"),
    [
        pytest.param({}, {"SOMETHING": "else"}, id="another variable of the user's"),
        pytest.param({"cpus_stated": True}, {"OMP_NUM_THREADS": "7"}, id="threads it asks for"),
        pytest.param(
            {"environment": (("CUDA_VISIBLE_DEVICES", ""),)},
            {"CUDA_VISIBLE_DEVICES": "GPU-1"},
            id="a module may have decided for the CPU",
        ),
    ],
)
def test_a_task_that_no_standby_suits_gets_a_fresh_process(
    warm: Warm, changes: dict[str, Any], spec_changes: dict[str, str]
) -> None:
    announced = warm.announce(replace(KIND, **changes))
    (waited,) = warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.environment_of_self, environment=spec_changes))
    assert spec_changes.items() <= child.value().items()
    assert child.pid != waited
    assert eventually(lambda: not is_alive(waited)), "it will not suit the next either"


def test_where_no_standby_ever_suits_no_more_are_made(warm: Warm) -> None:
    for number in range(standby_kind.MOST_FAILURES):
        announced = warm.announce()
        warm.wait_ready()
        changes = {"SOMETHING": str(number)}
        assert warm.run(announced, spec_of(bodies.add, 1, environment=changes)).value() == 1
    warm.announce()
    assert eventually(lambda: warm.pool.pids == ())
    assert warm.pool._record(KIND).given_up


def test_a_task_does_not_get_a_standby_that_imported_what_the_task_would_not(
    warm: Warm, importable: str
) -> None:
    module(importable, "test_standby_other", "")
    warm.announce(kind_with("test_standby_other"))
    (waited,) = warm.wait_ready()
    child = warm.run(warm.announce(), spec_of(bodies.add, 1))
    assert child.value() == 1 and child.pid != waited


# Imports that go wrong.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("raise ValueError", "could not be imported", id="raises"),
        pytest.param("raise SystemExit(3)", "could not be imported", id="exits"),
        pytest.param(
            "import prefect_gpu; prefect_gpu.current_allocation()", "current_allocation", id="asks"
        ),
    ],
)
def test_a_module_that_acts_at_its_import_is_not_imported_ahead(
    warm: Warm, importable: str, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    module(importable, "test_standby_acts", text)
    kind = kind_with("test_standby_acts")
    with caplog.at_level(logging.DEBUG, standby_kind.__name__):
        announced = warm.announce(kind)
        warm.wait_ready()
    assert why in caplog.text
    assert warm.pool._standbys[0].spec.modules == KIND.modules
    assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1


def test_several_standbys_with_a_module_that_acts_are_judged_by_what_each_imported(
    make_warm: Callable[..., Warm], importable: str
) -> None:
    module(importable, "test_standby_acts_twice", "raise ValueError")
    warm = make_warm(most=2)
    kind = kind_with("test_standby_acts_twice")
    for _ in range(2):
        warm.announce(kind)
    warm.wait_ready(2)
    assert not warm.pool._record(kind).given_up


def test_a_task_that_was_given_to_a_standby_whose_import_fails_gets_a_fresh_process(
    warm: Warm, importable: str, tmp_path: Path
) -> None:
    slow_module(importable, "test_standby_fails", tmp_path, "raise ValueError")
    announced = warm.announce(kind_with("test_standby_fails"))
    assert eventually((tmp_path / "begun").exists)
    child = warm.run(announced, spec_of(bodies.add, 1))
    first = child.until(ChildStarted).pid
    (tmp_path / "go").touch()
    assert child.value() == 1
    started = [m.pid for m in child.messages if isinstance(m, ChildStarted)]
    assert len(started) == 2 and started[0] == first


# Deaths.


def test_a_standby_that_dies_before_it_accepts_its_task_is_replaced_unseen(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    os.kill(waited, signal.SIGSTOP)
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.until(ChildStarted).pid == waited
    os.kill(waited, signal.SIGKILL)
    assert child.value() == 1
    assert [type(m) for m in child.messages].count(ChildExited) == 1


def test_a_task_does_not_notice_a_standby_that_died_before_it_came(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    with warm.pool._changed:
        # Its end cannot be heard before the task was given to it.
        os.kill(waited, signal.SIGKILL)
        assert eventually(lambda: not is_alive(waited))
        child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1


def test_a_task_that_is_killed_before_its_standby_accepts_it_is_not_started_again(
    warm: Warm,
) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    os.kill(waited, signal.SIGSTOP)
    child = warm.run(announced, spec_of(bodies.add, 1))
    child.handle.kill()
    assert child.exit().code == -signal.SIGKILL
    assert [type(m) for m in child.messages] == [ChildStarted, ChildExited]


def test_a_standby_that_dies_before_the_first_line_of_its_task_is_replaced_unseen(
    warm: Warm, tmp_path: Path
) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    marker = str(tmp_path / "killed")
    child = warm.run(announced, spec_of(bodies.marker_of, bodies.KilledOnArrival(marker)))
    assert child.until(ChildStarted).pid == waited
    assert child.value() == marker
    assert [type(m) for m in child.messages].count(ChildExited) == 1
    assert [type(m) for m in child.messages].count(BodyStarted) == 1


def test_a_fresh_process_that_dies_before_the_first_line_of_its_task_is_a_death(
    warm: Warm, tmp_path: Path
) -> None:
    argument = bodies.KilledOnArrival(str(tmp_path / "killed"))
    child = warm.rig.start(bodies.marker_of, argument)
    assert child.exit().code == -signal.SIGKILL


def test_the_death_of_a_standby_after_the_body_has_begun_is_the_death_of_the_task(
    warm: Warm,
) -> None:
    announced = warm.announce()
    warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.leave, 3))
    assert child.exit().code == 3
    assert [type(m) for m in child.messages].count(ChildStarted) == 1


def test_a_kind_whose_standbys_die_is_given_up_with_one_warning(
    warm: Warm, importable: str, caplog: pytest.LogCaptureFixture
) -> None:
    module(
        importable, "test_standby_dies", "import os, sys; print('oh', file=sys.stderr); os._exit(4)"
    )
    kind = kind_with("test_standby_dies")
    announced = warm.announce(kind)
    assert eventually(lambda: bool(warm.pool._record(kind).given_up))
    assert eventually(lambda: warm.pool.pids == ())
    assert warm.pool._record(kind).failures == standby_kind.MOST_FAILURES
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "ended with 4" in told.getMessage() and "oh" in told.getMessage()
    assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1


def test_a_kind_whose_standbys_send_what_is_no_message_is_given_up_with_the_reason(
    warm: Warm, importable: str, caplog: pytest.LogCaptureFixture
) -> None:
    module(
        importable,
        "test_standby_garbles",
        """
import os

for descriptor in map(int, os.listdir("/proc/self/fd")):
    if os.path.realpath(f"/proc/self/fd/{descriptor}").partition("/socket:")[1]:
        os.write(descriptor, bytes([255]) * 64)
""",
    )
    warm.announce(kind := kind_with("test_standby_garbles"))
    assert eventually(lambda: "it sent what cannot be received" in caplog.text)
    assert warm.pool._record(kind).given_up
    assert eventually(lambda: warm.pool.pids == ())


def test_a_standby_that_imports_for_too_long_is_ended(
    warm: Warm,
    importable: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(standby, "IMPORT_S", 0.5)
    module(importable, "test_standby_hangs", "import time; time.sleep(3600)")
    kind = kind_with("test_standby_hangs")
    warm.announce(kind)
    assert eventually(lambda: "imported for more than 0.5 s" in caplog.text)
    assert warm.pool._record(kind).given_up
    assert eventually(lambda: warm.pool.pids == ())


def test_a_standby_that_accepts_its_task_makes_deaths_count_anew(warm: Warm) -> None:
    record = warm.pool._record(KIND)
    for _ in range(2):
        announced = warm.announce()
        for count in range(1, standby_kind.MOST_FAILURES):
            (waited,) = warm.wait_ready()
            os.kill(waited, signal.SIGKILL)
            assert eventually(lambda count=count: record.failures == count)  # type: ignore[misc]
        warm.wait_ready()
        assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1
        assert record.failures == 0
    warm.wait_ready()


def test_a_kind_whose_standbys_die_of_their_tasks_is_given_up_however_well_they_import(
    warm: Warm,
) -> None:
    for _ in range(standby_kind.MOST_FAILURES):
        announced = warm.announce()
        (waited,) = warm.wait_ready()
        os.kill(waited, signal.SIGSTOP)
        child = warm.run(announced, spec_of(bodies.add, 1))
        os.kill(waited, signal.SIGKILL)
        # By a process of its own, which says nothing of those that wait.
        assert child.value() == 1
    assert eventually(lambda: bool(warm.pool._record(KIND).given_up))
    assert eventually(lambda: warm.pool.pids == ())


def test_a_call_that_the_socket_does_not_take_at_once_is_sent(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As small as under a default Linux kernel.
    monkeypatch.setattr(launcher, "_SOCKET_BYTES", 1 << 16)
    announced = warm.announce()
    warm.wait_ready()
    assert warm.run(announced, spec_of(bodies.length, b"x" * 900_000)).value() == 900_000


# Threads and processes that cannot be started.


def test_a_pool_whose_thread_cannot_be_started_tries_again_with_the_next_task(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CapacityError("no thread is left")

    monkeypatch.setattr(standby, "start_thread", refuse)
    first = warm.announce()
    assert warm.run(first, spec_of(bodies.add, 1)).value() == 1
    monkeypatch.undo()
    warm.announce()
    warm.wait_ready()


def test_while_the_system_starts_no_process_the_kind_is_not_given_up(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "CHECK_S", 0.01)
    monkeypatch.setattr(standby, "SHORTAGE_S", 0.0)
    spawn, tries = warm.rig.launcher._spawn_process, 0

    def refuse_some(request: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2 * standby_kind.MOST_FAILURES:
            raise BlockingIOError("Resource temporarily unavailable")
        return spawn(request)

    monkeypatch.setattr(warm.rig.launcher, "_spawn_process", refuse_some)
    warm.announce()
    warm.wait_ready()


# How many, and until when.


def test_no_standby_starts_for_some_seconds_after_a_shortage_of_host_memory(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "CHECK_S", 0.01)
    monkeypatch.setattr(standby, "SHORTAGE_S", DEADLOCK_S)
    warm.announce()
    warm.wait_ready()
    enough_bytes, warm.available_bytes = warm.available_bytes, standby.RESERVE_BYTES - 1
    assert eventually(lambda: warm.pool.pids == ())
    warm.available_bytes = enough_bytes
    warm.wait_checks()
    assert warm.pool.pids == ()


def test_standbys_end_for_a_task_that_waits_for_host_memory(warm: Warm) -> None:
    warm.announce()
    (waited,) = warm.wait_ready()
    warm.broker.wants_host_memory = True
    assert eventually(lambda: not is_alive(waited) and warm.pool.pids == ())


def test_no_standby_starts_for_some_seconds_after_a_task_has_waited_for_host_memory(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value_s in (("CHECK_S", 0.01), ("SHORTAGE_S", DEADLOCK_S), ("PATIENCE_S", 0.0)):
        monkeypatch.setattr(standby, name, value_s)
    warm.broker.wants_host_memory = True
    warm.announce()
    warm.wait_checks()
    warm.broker.wants_host_memory = False
    warm.wait_checks()
    assert warm.pool.pids == ()


def test_a_task_that_is_retracted_leaves_no_standby(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    announced.retract()
    assert eventually(lambda: not is_alive(waited) and warm.pool.pids == ())


def test_there_are_as_many_standbys_as_announced_tasks(make_warm: Callable[..., Warm]) -> None:
    warm = make_warm(most=3)
    announced = [warm.announce() for _ in range(2)]
    assert len(warm.wait_ready(2)) == 2
    results = [warm.run(a, spec_of(bodies.add, i)) for i, a in enumerate(announced)]
    assert [r.value() for r in results] == [0, 1]


def test_the_standbys_of_all_flows_are_counted(
    make_warm: Callable[..., Warm], tmp_path: Path
) -> None:
    one, other = (make_warm(most=2, shared=SharedFolder(tmp_path)) for _ in range(2))
    theirs = [one.announce(), one.announce()]
    one.wait_ready(2)
    announced = other.announce()
    other.wait_checks()
    assert other.pool.pids == ()
    # A task has it: there is room for a standby, of whichever flow.
    assert one.run(theirs[0], spec_of(bodies.add, 1)).value() == 1
    one.pool.close(one)
    other.wait_ready(1)
    assert other.run(announced, spec_of(bodies.add, 2)).value() == 2


def test_imports_of_all_flows_are_counted(
    make_warm: Callable[..., Warm], importable: str, tmp_path: Path
) -> None:
    slow_module(importable, "test_standby_waits", tmp_path)
    (tmp_path / "ledger").mkdir()
    one, other = (make_warm(most=4, shared=SharedFolder(tmp_path / "ledger")) for _ in range(2))
    # Four cores: two import at a time for two tasks.
    for _ in range(2):
        one.announce(kind_with("test_standby_waits"))
    assert eventually(lambda: len(one.pool.pids) == 2)
    other.announce()
    one.wait_checks()
    other.wait_checks()
    assert (len(one.pool.pids), other.pool.pids) == (2, ())
    (tmp_path / "go").touch()
    one.wait_ready(2)
    other.wait_ready(1)


@pytest.mark.parametrize(("running", "importing"), [(0, 4), (1, 3), (4, 2)])
def test_a_burst_of_tasks_is_met_with_imports_on_all_cores_that_no_task_has(
    make_warm: Callable[..., Warm], importable: str, tmp_path: Path, running: int, importing: int
) -> None:
    go_on = tmp_path / "go"
    slow_module(importable, "test_standby_burst", tmp_path)
    # It has four cores.
    warm, kind = make_warm(most=8), kind_with("test_standby_burst")
    tasks = [
        warm.run(warm.announce(), spec_of(bodies.wait_for_file, str(go_on))) for _ in range(running)
    ]
    for child in tasks:
        child.until(BodyStarted)

    def count() -> int:
        return sum(standby.kind == kind for standby in warm.pool._standbys)

    announced = [warm.announce(kind) for _ in range(6)]
    assert eventually(lambda: count() == importing)
    warm.wait_checks()
    assert count() == importing
    go_on.touch()
    assert eventually(lambda: count() == len(announced))
    for child in tasks:
        child.exit()
    assert eventually(lambda: not warm.pool._running)


def test_a_kind_whose_standbys_died_is_tried_again_after_a_while(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = warm.pool._record(KIND)
    announced = warm.announce()
    for count in range(1, standby_kind.MOST_FAILURES + 1):
        (waited,) = warm.wait_ready()
        os.kill(waited, signal.SIGKILL)
        assert eventually(lambda count=count: record.failures == count)  # type: ignore[misc]
    warm.wait_checks()
    assert record.given_up and warm.pool.pids == ()
    monkeypatch.setattr(standby_kind, "FORGET_S", 0.0)
    (waited,) = warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1 and child.pid == waited


def test_standbys_end_with_the_last_runner_that_closes(warm: Warm) -> None:
    other = object()
    warm.pool.open(other, 1, warm.broker)
    warm.announce()
    (waited,) = warm.wait_ready()
    warm.pool.close(other)
    assert warm.pool.pids == (waited,) and is_alive(waited)
    warm.pool.close(warm)
    assert warm.pool.pids == () and not is_alive(waited)


_PARENT = """
import os, signal, sys, time, warnings
# A shell that runs the tests in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from prefect_gpu.processes.standby_pool import standby_pool
from tests.process.rig import eventually
from tests.process.warm import KIND, Broker
from tests.process import bodies
pool = standby_pool()
pool.open("a runner", 1, Broker())
announced = pool.announce(KIND)
assert eventually(lambda: pool.ready_by_kind.total() == 1)
print(*pool.pids, flush=True)
THEN
"""

_FORK = """
warnings.simplefilter("ignore", DeprecationWarning)
from tests.process.rig import Heard, spec_of
child = os.fork()
if child == 0:
    assert pool.pids == ()
    pool = standby_pool()
    assert pool.pids == ()
    pool.open("its own", 1, Broker())
    again = pool.announce(KIND)
    assert eventually(lambda: pool.ready_by_kind.total() == 1)
    print(*pool.pids, flush=True)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert pool.ready_by_kind.total() == 1
"""


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("", None),
        ("sys.exit(3)", None),
        ("time.sleep(600)", signal.SIGKILL),
        ("time.sleep(600)", signal.SIGINT),
        (_FORK, None),
    ],
    ids=["ends", "exits", "is killed", "is interrupted", "has forked"],
)
def test_no_standby_outlives_a_parent_that(tmp_path: Path, then: str, how: int | None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT.replace("THEN", then)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline())]
    if how is not None:
        process.send_signal(how)
    pids += [int(word) for word in process.stdout.read().split()]
    process.stdout.close()
    assert process.wait(DEADLOCK_S) in (0, 3, -signal.SIGKILL, -signal.SIGINT)
    assert eventually(lambda: not any(map(is_alive, pids)))
    assert len(pids) == 1 + (then == _FORK)
