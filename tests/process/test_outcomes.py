"""What a child does, and what its parent hears of it."""

from __future__ import annotations

import errno
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_gpu.child.main import calibrate
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import CapacityError, FrameworkError, ProtocolError, ResultError
from prefect_gpu.processes import launcher as launching
from prefect_gpu.processes import messages
from prefect_gpu.processes.interpreter import Interpreter, Process, SpawnRequest, start_interpreter
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused, ChildStarted, ValueArrived
from prefect_gpu.processes.messages import Answered, Asked, BodyEnded, BodyStarted
from prefect_gpu.values import transport
from prefect_gpu.values.transport import frame_header, pack
from tests.process import bodies
from tests.process.rig import Rig, eventually, is_alive, open_descriptors, spec_of

MakeRig = Callable[..., Rig]

# What comes back, and what is raised.


def test_what_the_body_returns_arrives_after_its_messages(rig: Rig) -> None:
    child = rig.start(bodies.add, 1, b=2)
    assert child.value() == 3
    assert child.exit() == ChildExited(0, "")
    kinds = [type(m) for m in child.messages]
    assert kinds == [ChildStarted, BodyStarted, BodyEnded, ValueArrived, ChildExited]
    assert child.of(BodyEnded).host_peak_bytes > 1 << 20


def test_large_values_arrive_whole_both_ways(rig: Rig) -> None:
    size = 300_000_000
    assert rig.call(bodies.length, bytes(size)) == size
    value = rig.call(bodies.blob, size)
    assert len(value) == size and not any(value[::4096])


def test_the_results_of_coroutines_and_generators_arrive(rig: Rig) -> None:
    assert rig.call(bodies.add_async, 1, 2) == 3
    assert rig.call(bodies.count, 3) == [0, 1, 2]


def test_what_the_body_raises_is_raised(rig: Rig) -> None:
    with pytest.raises(KeyError, match="missing"):
        rig.call(bodies.fail, "plain")
    child = rig.started[0]
    assert "bodies.py" in child.of(BodyEnded).traceback
    assert "processes/child.py" not in child.of(BodyEnded).traceback


def test_an_exception_arrives_as_it_is_and_one_without_a_text_is_named(rig: Rig) -> None:
    with pytest.raises(bodies.OddError, match="left-right"):
        rig.call(bodies.fail, "odd")
    with pytest.raises(bodies.LockedError, match="it said this") as caught:
        rig.call(bodies.fail, "locked")
    assert type(caught.value.lock) is type(threading.Lock())
    with pytest.raises(ResultError, match="MuteError"):
        rig.call(bodies.fail, "mute")
    assert rig.started[0].exit().code == 0


def test_a_class_of_a_script_loaded_by_path_keeps_its_identity_and_its_attributes(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_by_path.py").write_text(
        "class MyError(Exception):\n"
        "    seen = 0\n"
        "    def double(self): return 2 * self.args[0]\n"
        "def fail(n):\n"
        "    MyError.seen = 99\n"
        "    raise MyError(n)\n"
    )
    module = types.ModuleType("script_by_path")
    module.__file__ = str(tmp_path / "script_by_path.py")
    monkeypatch.setitem(sys.modules, "script_by_path", module)
    exec((tmp_path / "script_by_path.py").read_text(), module.__dict__)
    double = module.MyError.double
    with pytest.raises(module.MyError) as caught:
        rig.call(module.fail, 3)
    assert caught.value.double() == 6
    assert module.MyError.seen == 0
    assert module.MyError.double is double


def test_sys_exit_in_a_body_is_raised(rig: Rig) -> None:
    with pytest.raises(SystemExit) as caught:
        rig.call(bodies.fail, "exit")
    assert caught.value.code == 7


def test_an_unpicklable_return_value_is_named_by_its_path(rig: Rig) -> None:
    with pytest.raises(ResultError, match=r"result\['model'\]\.database is a sqlite3\.Connection"):
        rig.call(bodies.locked_model)


def test_a_value_whose_pickling_exits_is_an_answer_and_no_death(rig: Rig) -> None:
    with pytest.raises(SystemExit):
        rig.call(bodies.rude)


def test_a_call_that_cannot_be_read_there_is_an_error(rig: Rig) -> None:
    child = rig.launch(
        replace(spec_of(bodies.add), call=pack([memoryview(b"cno_such_module\nname\n.")], ()))
    )
    with pytest.raises(ResultError, match="no_such_module"):
        child.value()


def test_a_framework_that_refuses_its_policy_is_an_error_and_no_death(
    rig: Rig, importable: str
) -> None:
    # Imported before the child begins (by `sitecustomize`, say), so that the policy comes at once.
    Path(importable, "torch.py").write_text("")
    Path(importable, "sitecustomize.py").write_text("import torch\n")
    spec = spec_of(bodies.add, 1, environment={"PYTHONPATH": importable})
    policy = replace(spec.prepare.policy, device_kind="nvml", frameworks=("torch",))
    child = rig.launch(replace(spec, prepare=replace(spec.prepare, policy=policy)))
    with pytest.raises(FrameworkError):
        child.value()


def test_a_calibration_that_fails_says_why(rig: Rig) -> None:
    child = rig.start(calibrate, "cupy")
    with pytest.raises(FrameworkError, match="calibration failed: ModuleNotFoundError"):
        child.value()


def test_a_calibration_holds_its_device_until_the_parent_ends_it(rig: Rig, importable: str) -> None:
    Path(importable, "calibration_stub.py").write_text(
        "from prefect_gpu.frameworks.registry import ADAPTERS\n"
        "ADAPTERS['torch'].calibrate = lambda: 5\n"
    )
    Path(importable, "sitecustomize.py").write_text("import calibration_stub\n")
    path = f"{importable}:{os.getcwd()}"
    child = rig.launch(replace(spec_of(calibrate, "torch"), environment={"PYTHONPATH": path}))
    asked: Asked = child.until(Asked)
    assert (asked.method, asked.arguments) == ("calibrated", {"reserved_bytes": 5})
    assert is_alive(child.pid)
    child.handle.kill()
    assert child.exit().code == -signal.SIGKILL


def test_a_question_of_the_body_is_answered_by_the_parent(rig: Rig) -> None:
    child = rig.start(bodies.ask_parent)
    asked: Asked = child.until(Asked)
    assert (asked.method, asked.arguments) == ("sum", {"a": 1, "b": 2})
    child.handle.answer(asked.answer(lambda a, b: a + b))
    assert child.value() == 3
    child.handle.answer(Answered())  # gone by now
    child.handle.kill()


# How it dies.


@pytest.mark.parametrize("code", [0, 3])
def test_a_body_that_calls_os_exit_is_a_death(rig: Rig, code: int) -> None:
    child = rig.start(bodies.leave, code)
    assert child.exit().code == code
    assert child.of(ValueArrived) is None


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_a_child_that_a_signal_ends_is_a_death(rig: Rig, signum: signal.Signals) -> None:
    ended = rig.start(bodies.die, signum).exit()
    assert ended.code == -signum
    assert not ended.killed_because
    if signum in (signal.SIGSEGV, signal.SIGABRT):
        assert "bodies.py" in ended.stderr_tail, "faulthandler tells where"


@pytest.mark.parametrize("how", ["thread", "atexit"])
def test_a_child_that_hangs_at_exit_is_killed_and_its_value_is_kept(
    make_rig: MakeRig, how: str
) -> None:
    child = make_rig(exit_grace_s=0.1).start(bodies.hang_at_exit, how)
    assert child.value() == "kept"
    assert child.exit().code == -signal.SIGKILL
    assert "after its value" in child.exit().killed_because


def test_a_child_that_closes_all_and_lives_on_is_killed(make_rig: MakeRig) -> None:
    ended = make_rig(silent_grace_s=0.1).start(bodies.close_everything, True).exit()
    assert ended.code == -signal.SIGKILL
    assert "closed its channel" in ended.killed_because


def test_a_child_that_closes_all_and_returns_is_a_death(make_rig: MakeRig) -> None:
    child = make_rig(silent_grace_s=DEADLOCK_S).start(bodies.close_everything, False)
    assert child.exit().code != 0
    assert child.of(ValueArrived) is None


def test_a_file_that_took_the_channels_number_is_not_written_to(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    child = make_rig(silent_grace_s=DEADLOCK_S).start(
        bodies.close_and_reuse, str(tmp_path / "data")
    )
    assert child.exit().code != 0
    assert "closed the channel" in child.exit().stderr_tail
    assert (tmp_path / "data").read_bytes() == b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame_header(transport.MESSAGE, 3) + b"abc",
        frame_header(transport.MESSAGE, 1 << 43),
        frame_header(transport.MESSAGE, 2) + b"N.",
    ],
    ids=["no frame", "no pickle", "no memory", "no message"],
)
def test_a_child_that_sends_garbage_is_refused_and_killed(rig: Rig, garbage: bytes) -> None:
    child = rig.start(bodies.write_raw, garbage, False)
    if garbage == frame_header(transport.MESSAGE, 1 << 43) and _overcommits():
        child.handle.kill()
        pytest.skip("the kernel gives memory that it does not have")
    assert isinstance(child.until(ChildRefused).error, ProtocolError)
    assert child.exit().code == -signal.SIGKILL


def _overcommits() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1"
    except OSError:
        return False


def test_dying_inside_a_message_is_a_death_and_no_error_of_the_protocol(rig: Rig) -> None:
    child = rig.start(bodies.write_raw, frame_header(transport.VALUE, 100) + b"only this", True)
    ended = child.exit()
    assert ended.truncated and child.of(ChildRefused) is None


# Starting one.


def test_a_child_that_cannot_start_is_refused_and_nothing_is_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = rig.launch(replace(spec_of(bodies.add), cwd="/no/such/folder"))
    assert isinstance(gone.until(ChildRefused).error, FileNotFoundError)
    odd = rig.launch(replace(spec_of(bodies.add), argv=(object(),)))  # type: ignore[arg-type]
    assert isinstance(odd.until(ChildRefused).error, TypeError)
    monkeypatch.setattr(launching, "ChildOutput", _raise)
    half = rig.start(bodies.add, 1)
    assert half.until(ChildRefused).error.args == ("no room",)
    monkeypatch.undo()
    assert rig.call(bodies.add, 1) == 1


def _raise(*given: object) -> None:
    raise RuntimeError("no room")


def test_a_fork_without_a_descriptor_for_its_channel_is_refused_by_the_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.call(bodies.add, 1) == 1

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(socket, "socketpair", refuse)
    rig.launcher.start(spec_of(bodies.add, 1), heard.put, start_interpreter)
    error = heard.get(timeout=DEADLOCK_S).error
    assert isinstance(error, CapacityError) and "ulimit -n" in str(error)


@pytest.mark.parametrize(
    ("number", "limit"),
    [
        pytest.param(errno.EAGAIN, "ulimit -u", id="processes"),
        pytest.param(errno.EMFILE, "ulimit -n", id="open files"),
    ],
)
def test_a_limit_that_lets_no_process_start_fails_one_task_and_is_named(
    make_rig: MakeRig, number: int, limit: str
) -> None:
    fails = [OSError(number, os.strerror(number))]

    def spawn(request: SpawnRequest) -> Process:
        if fails:
            raise fails.pop()
        return start_interpreter(request)

    rig = make_rig(spawn=spawn)
    error = rig.start(bodies.add, 1).until(ChildRefused).error
    assert isinstance(error, CapacityError) and limit in str(error)
    assert rig.call(bodies.add, 1) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("opened", ["socketpair", "selector"])
def test_a_launcher_without_descriptors_names_the_limit_and_the_next_task_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int, opened: str
) -> None:
    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    before = open_descriptors()
    owner, name = (socket, opened) if opened == "socketpair" else (selectors, "DefaultSelector")
    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(CapacityError, match="limit of open files"):
        rig.start(bodies.add, 1)
    monkeypatch.undo()
    assert not open_descriptors() - before
    assert rig.call(bodies.add, 1) == 1


def refuse_to_start(name: str) -> Callable[[threading.Thread], None]:
    """Return a `Thread.start` that fails for one thread, as under a limit of processes."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    return refuse


def test_a_launcher_without_a_thread_refuses_one_task_and_the_next_one_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse_to_start("prefect-gpu-launcher"))
        with pytest.raises(CapacityError, match="ulimit -u"):
            rig.start(bodies.add, 1)
    assert not open_descriptors() - before
    assert rig.call(bodies.add, 1) == 1


def test_a_listener_that_raises_disturbs_no_other_child(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def listen(message: object) -> None:
        if isinstance(message, ChildExited):
            ended.set()
        raise ValueError("the listener's own")

    rig.launcher.start(spec_of(bodies.add, 1), listen)
    assert ended.wait(DEADLOCK_S)
    assert rig.call(bodies.add, 2) == 2
    assert "the listener's own" in caplog.text


def test_an_error_in_the_launchers_thread_is_logged_and_it_goes_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.call(bodies.add, 1)
    rig.launcher.call(lambda: _raise(None))
    assert rig.call(bodies.add, 2) == 2
    assert "no room" in caplog.text


def test_a_killed_child_that_was_not_launched_yet_still_ends(rig: Rig) -> None:
    child = rig.start(bodies.wait_long, "/dev/null/never")
    child.handle.kill()
    assert child.exit().code == -signal.SIGKILL


def test_many_threads_may_start_children_at_once(rig: Rig) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(rig.call(bodies.add, n)))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLOCK_S)
    assert sorted(results) == list(range(12))


def test_it_works_without_pidfds(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(Interpreter, "open_pidfd", lambda process: None)
    assert rig.call(bodies.add, 1) == 1


def test_children_that_have_ended_leave_no_descriptor_open(rig: Rig) -> None:
    rig.call(bodies.add, 1)
    process = psutil.Process()
    before = open_descriptors()
    # A few at a time.
    for _ in range(4):
        children = [rig.start(bodies.leave, 0) for _ in range(5)]
        for child in children:
            child.exit()
    assert not open_descriptors() - before
    assert [p for p in process.children() if p.status() == psutil.STATUS_ZOMBIE] == []


def test_a_closed_launcher_has_ended_its_children_and_can_be_used_again(
    rig: Rig, tmp_path: Path
) -> None:
    child = rig.start(bodies.wait_long, str(tmp_path / "ready"))
    assert eventually((tmp_path / "ready").exists)
    rig.launcher.close(DEADLOCK_S)
    assert child.exit().killed_because == "the runner was closed"
    assert rig.call(bodies.add, 4) == 4


# What it finds around it.


def test_environment_path_and_arguments_are_there_before_anything_is_imported(
    rig: Rig, importable: str
) -> None:
    os.environ["PREFECT_GPU_GONE"] = "1"
    try:
        spec = spec_of(
            bodies.look_around, environment={"PREFECT_GPU_TEST": "yes", "PREFECT_GPU_GONE": None}
        )
        seen = rig.launch(replace(spec, argv=("script.py", "--epochs=3"), cwd=importable)).value()
    finally:
        del os.environ["PREFECT_GPU_GONE"]
    assert seen["seen_at_import"] == "yes"
    assert seen["path"] == list(spec.sys_path)
    assert seen["argv"] == ["script.py", "--epochs=3"]
    assert seen["cwd"] == os.path.realpath(importable)
    assert seen["stdin"] == ""
    assert seen["encoding"] == "utf-8"


_PARENT = """
import sys, json
from tests.process import bodies
from tests.process.rig import Rig
rig = Rig()
child = rig.start(bodies.look_around, environment={"PREFECT_GPU_TEST": "1"})
seen = child.value()
rig.launcher.close()
print(json.dumps([seen["flags"], seen["warnoptions"], list(sys.flags), sys.warnoptions,
                  child.exit().stderr_tail]))
"""


@pytest.mark.parametrize(
    "flags", [["-O"], ["-X", "dev"], ["-W", "error"], ["-P"], ["-X", "utf8=0"]]
)
def test_interpreter_flags_are_the_parents(importable: str, flags: list[str]) -> None:
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("-P is of Python 3.11")
    done = subprocess.run(
        [sys.executable, *flags, "-c", _PARENT],
        env={**os.environ, "PYTHONPATH": f"{os.getcwd()}:{importable}", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=DEADLOCK_S,
    )
    assert done.returncode == 0, done.stderr
    child_flags, child_warnings, own_flags, own_warnings, tail = json.loads(done.stdout)
    assert child_flags == own_flags
    assert child_warnings == own_warnings
    assert tail == ""
    assert done.stderr == ""


def test_a_body_may_use_a_pool_of_processes(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Forked and spawned workers: neither garbles the stream, nor runs the bootstrap again."""
    for method in ("fork", "spawn"):
        child = rig.start(bodies.use_pool, method)
        assert child.value() == [1, 4, 9]
        assert child.of(messages.LogEmitted) is None
    assert rig.call(bodies.use_pool, "fork", bodies.ask_in_worker)[0].startswith(
        "anything works in"
    )
    assert rig.launcher.output.flush(DEADLOCK_S)
    assert capsys.readouterr().out.count("worker") == 6


def test_a_fork_that_returns_too_does_not_answer_twice(rig: Rig) -> None:
    child = rig.start(bodies.fork_and_return)
    assert child.value() == 1
    assert sum(isinstance(m, ValueArrived) for m in child.messages) == 1


def test_a_thread_that_reads_the_channel_at_exit_does_not_hold_it_up(rig: Rig) -> None:
    child = rig.start(bodies.hold_channel_in_thread)
    assert child.value() == "done" and child.exit().code == 0
