"""Processes that wait ahead of their tasks: what they have done, who gets one, when they go."""

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

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes import kinds, launched, standby
from prefect_gpu.processes.messages import BodyStarted
from prefect_gpu.processes.spec import ChildExited, ChildStarted
from tests.process import bodies
from tests.process.rig import eventually, is_alive, spec_of
from tests.process.warm import KIND, Warm, kind_with, module

# A task gets one.


def test_a_task_is_done_by_the_process_that_waited_for_it(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.add, 1, b=2))
    assert child.value() == 3
    assert child.pid == waited
    assert child.exit() == ChildExited(0, "")


def test_the_next_is_made_for_the_task_that_is_likely_to_come(warm: Warm) -> None:
    announced = warm.announce()
    (first,) = warm.wait_ready()
    assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1
    (second,) = warm.wait_ready()
    assert second != first


def test_the_next_is_not_started_in_the_way_of_a_task_that_begins(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "LOOK_S", DEADLOCK_S)
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


def test_a_task_that_comes_early_gets_one_that_still_imports(
    warm: Warm, importable: str, tmp_path: Path
) -> None:
    module(
        importable,
        "test_standby_slow",
        f"""
import os, time
open({str(tmp_path / "begun")!r}, "w").close()
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
""",
    )
    announced = warm.announce(kind_with("test_standby_slow"))
    assert eventually((tmp_path / "begun").exists)
    (importing,) = warm.pool.pids
    child = warm.run(announced, spec_of(bodies.add, 1))
    (tmp_path / "go").touch()
    assert child.value() == 1 and child.pid == importing


def test_it_finds_around_it_what_a_process_made_for_it_would(
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
    assert warm.pool.ready <= 1
    again = warm.announce(replace(KIND, environment=(("CUDA_VISIBLE_DEVICES", "GPU-1"),)))
    (waited,) = warm.wait_ready()
    look = spec_of(bodies.environment_of_self, environment=environment)
    child = warm.run(again, look)
    variables = child.value()
    assert child.pid == waited
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-2" and variables["OMP_NUM_THREADS"] == "7"
    assert "PREFECT_GONE" not in variables


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the title is changed through /proc")
def test_ps_shows_the_task_and_no_standby(warm: Warm, tmp_path: Path) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    assert psutil.Process(waited).cmdline()[-1].strip() == "standby"
    child = warm.run(announced, spec_of(bodies.wait_long, str(tmp_path / "x")))
    child.until(BodyStarted)
    assert psutil.Process(waited).cmdline()[-1].strip() == "a-task"
    child.handle.kill()
    assert child.exit().code == -signal.SIGKILL


def test_what_it_prints_as_it_imports_is_seen(
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
def test_a_task_that_it_cannot_suit_gets_a_process_of_its_own(
    warm: Warm, changes: dict[str, Any], spec_changes: dict[str, str]
) -> None:
    announced = warm.announce(replace(KIND, **changes))
    (waited,) = warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.environment_of_self, environment=spec_changes))
    assert spec_changes.items() <= child.value().items()
    assert child.pid != waited
    assert eventually(lambda: not is_alive(waited)), "it will not suit the next either"


def test_where_none_ever_suits_no_more_are_made(warm: Warm) -> None:
    for number in range(kinds.MOST_MISFITS):
        announced = warm.announce()
        warm.wait_ready()
        changes = {"SOMETHING": str(number)}
        assert warm.run(announced, spec_of(bodies.add, 1, environment=changes)).value() == 1
    warm.announce()
    assert eventually(lambda: warm.pool.pids == ())
    assert warm.pool._kinds.of(KIND).useless


def test_a_task_does_not_get_one_that_imported_what_it_would_not(
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
def test_a_module_that_acts_at_its_import_is_left_to_the_task(
    warm: Warm, importable: str, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    module(importable, "test_standby_acts", text)
    kind = kind_with("test_standby_acts")
    with caplog.at_level(logging.DEBUG, kinds.__name__):
        announced = warm.announce(kind)
        warm.wait_ready()
    assert why in caplog.text
    assert warm.pool._standbys[0].spec.modules == KIND.modules
    assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1


def test_several_of_which_a_module_acts_are_judged_by_what_they_imported(
    make_warm: Callable[..., Warm], importable: str
) -> None:
    module(importable, "test_standby_acts_twice", "raise ValueError")
    warm = make_warm(most=2)
    kind = kind_with("test_standby_acts_twice")
    for _ in range(2):
        warm.announce(kind)
    warm.wait_ready(2)
    assert not warm.pool._kinds.of(kind).useless


def test_a_task_that_was_given_to_one_whose_import_fails_starts_over(
    warm: Warm, importable: str, tmp_path: Path
) -> None:
    module(
        importable,
        "test_standby_fails",
        f"""
import os, time
open({str(tmp_path / "begun")!r}, "w").close()
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
raise ValueError
""",
    )
    announced = warm.announce(kind_with("test_standby_fails"))
    assert eventually((tmp_path / "begun").exists)
    child = warm.run(announced, spec_of(bodies.add, 1))
    first = child.until(ChildStarted).pid
    (tmp_path / "go").touch()
    assert child.value() == 1
    started = [m.pid for m in child.messages if isinstance(m, ChildStarted)]
    assert len(started) == 2 and started[0] == first


# Deaths.


def test_one_that_dies_before_it_takes_the_task_is_replaced_unseen(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    os.kill(waited, signal.SIGSTOP)
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.until(ChildStarted).pid == waited
    os.kill(waited, signal.SIGKILL)
    assert child.value() == 1
    assert [type(m) for m in child.messages].count(ChildExited) == 1


def test_one_that_died_unnoticed_costs_nothing(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    with warm.pool._changed:
        # Its end cannot be heard before the task was given to it.
        os.kill(waited, signal.SIGKILL)
        assert eventually(lambda: not is_alive(waited))
        child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1


def test_a_task_that_is_killed_before_it_was_taken_is_not_started_over(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    os.kill(waited, signal.SIGSTOP)
    child = warm.run(announced, spec_of(bodies.add, 1))
    child.handle.kill()
    assert child.exit().code == -signal.SIGKILL
    assert [type(m) for m in child.messages] == [ChildStarted, ChildExited]


def test_after_it_took_the_task_its_death_is_the_tasks(warm: Warm) -> None:
    announced = warm.announce()
    warm.wait_ready()
    child = warm.run(announced, spec_of(bodies.leave, 3))
    assert child.exit().code == 3
    assert [type(m) for m in child.messages].count(ChildStarted) == 1


def test_a_kind_that_dies_again_and_again_is_left_alone_and_it_is_said_once(
    warm: Warm, importable: str, caplog: pytest.LogCaptureFixture
) -> None:
    module(
        importable, "test_standby_dies", "import os, sys; print('oh', file=sys.stderr); os._exit(4)"
    )
    kind = kind_with("test_standby_dies")
    announced = warm.announce(kind)
    assert eventually(lambda: bool(warm.pool._kinds.of(kind).useless))
    assert eventually(lambda: warm.pool.pids == ())
    assert warm.pool._kinds.of(kind).deaths == kinds.MOST_DEATHS
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "ended with 4" in told.getMessage() and "oh" in told.getMessage()
    assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1


def test_those_that_take_their_tasks_show_that_the_kind_works(warm: Warm) -> None:
    state = warm.pool._kinds.of(KIND)
    for _ in range(2):
        announced = warm.announce()
        for count in range(1, kinds.MOST_DEATHS):
            (waited,) = warm.wait_ready()
            os.kill(waited, signal.SIGKILL)
            assert eventually(lambda count=count: state.deaths == count)  # type: ignore[misc]
        warm.wait_ready()
        assert warm.run(announced, spec_of(bodies.add, 1)).value() == 1
        assert state.deaths == 0
    warm.wait_ready()


def test_a_kind_that_dies_of_its_tasks_is_left_alone_however_well_it_imports(warm: Warm) -> None:
    for _ in range(kinds.MOST_DEATHS):
        announced = warm.announce()
        (waited,) = warm.wait_ready()
        os.kill(waited, signal.SIGSTOP)
        child = warm.run(announced, spec_of(bodies.add, 1))
        os.kill(waited, signal.SIGKILL)
        # By a process of its own, which says nothing of those that wait.
        assert child.value() == 1
    assert eventually(lambda: bool(warm.pool._kinds.of(KIND).useless))
    assert eventually(lambda: warm.pool.pids == ())


def test_a_call_that_the_socket_does_not_take_at_once_is_sent(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the kernel allows no more than Linux does where nobody says.
    monkeypatch.setattr(launched, "_SOCKET_BYTES", 1 << 16)
    announced = warm.announce()
    warm.wait_ready()
    assert warm.run(announced, spec_of(bodies.length, b"x" * 900_000)).value() == 900_000


# How many, and until when.


def test_they_give_way_when_the_machines_memory_gets_short(warm: Warm) -> None:
    warm.announce()
    (waited,) = warm.wait_ready()
    warm.available_bytes = standby.RESERVE_BYTES - 1
    assert eventually(lambda: not is_alive(waited))
    # Dead, and then buried.
    assert eventually(lambda: warm.pool.pids == ())


def test_they_give_way_to_a_task_that_waits_for_the_machines_memory(warm: Warm) -> None:
    warm.announce()
    (waited,) = warm.wait_ready()
    warm.wants_room = True
    assert eventually(lambda: not is_alive(waited) and warm.pool.pids == ())


def test_nobody_who_wants_one_leaves_none(warm: Warm) -> None:
    announced = warm.announce()
    (waited,) = warm.wait_ready()
    announced.retract()
    assert eventually(lambda: not is_alive(waited) and warm.pool.pids == ())


def test_as_many_as_tasks_were_announced(make_warm: Callable[..., Warm]) -> None:
    warm = make_warm(most=3)
    announced = [warm.announce() for _ in range(2)]
    assert len(warm.wait_ready(2)) == 2
    results = [warm.run(a, spec_of(bodies.add, i)) for i, a in enumerate(announced)]
    assert [r.value() for r in results] == [0, 1]


def test_the_last_runner_takes_them_along(warm: Warm) -> None:
    other = object()
    warm.pool.open(other, 1)
    warm.announce()
    (waited,) = warm.wait_ready()
    warm.pool.close(other)
    assert warm.pool.pids == (waited,) and is_alive(waited)
    warm.pool.close(warm)
    assert warm.pool.pids == () and not is_alive(waited)


_PARENT = """
import os, signal, sys, time, warnings
# Whoever runs the tests in the background may have had it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from prefect_gpu.processes.standby import standby_pool
from tests.process.rig import eventually
from tests.process.warm import KIND
from tests.process import bodies
pool = standby_pool()
pool.open("a runner", 1)
announced = pool.announce(KIND)
assert eventually(lambda: pool.ready == 1)
print(*pool.pids, flush=True)
THEN
"""

_FORK = """
warnings.simplefilter("ignore", DeprecationWarning)
from tests.process.rig import Heard, spec_of
child = os.fork()
if child == 0:
    assert standby_pool() is pool and pool.pids == ()
    pool.open("its own", 1)
    again = pool.announce(KIND)
    assert eventually(lambda: pool.ready == 1)
    print(*pool.pids, flush=True)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert pool.ready == 1
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
def test_none_outlives_a_parent_that(tmp_path: Path, then: str, how: int | None) -> None:
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
