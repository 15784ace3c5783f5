"""Forks of a template process, asked for as the launcher does, and spoken to over their channels."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PolicyError
from prefect_gpu.processes import messages, values
from prefect_gpu.processes.call import Call
from prefect_gpu.processes.forkserver import UNKNOWN_CODE, ForkServer, check_modules
from prefect_gpu.processes.interpreter import import_paths
from prefect_gpu.processes.spawning import SpawnRequest
from tests.process.rig import PREPARE

MODULES = ("numpy", "prefect_gpu.prefect_bridge", "prefect_gpu.processes.child", "torch")


class Asked:
    """One fork and its channel."""

    def __init__(self, server: ForkServer, environment: dict[str, str], cwd: str) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(DEADLOCK_S)
        with theirs:
            request = SpawnRequest("a-task", theirs.fileno(), environment, cwd)
            try:
                self.process = server.fork(request)
            except OSError:
                self.channel.close()
                raise
        self.pid = self.process.pid

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        boot = json.dumps({"sys_path": import_paths(), "argv": sys.argv}).encode()
        call = values.dumps(Call(function, args, {}), "call", "call")
        self.channel.sendall(messages.HEADER.pack(messages.BOOT, len(boot)) + boot)
        self.channel.sendall(messages.encode(PREPARE))
        for piece in call.frame:
            self.channel.sendall(piece)

    def value(self) -> Any:
        reader = messages.FrameReader()
        while True:
            try:
                size = self.channel.recv_into(reader.room)
            except ConnectionResetError:
                size = 0
            assert size, self.printed()
            frame = reader.filled(size)
            if frame is not None and frame[0] == messages.VALUE:
                return pickle.loads(frame[1])

    def end(self) -> int:
        """Wait for it, as the launcher does: a zombie until it is reaped."""
        pidfd = os.pidfd_open(self.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            assert selector.select(DEADLOCK_S)
        os.close(pidfd)
        assert psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        return self.process.wait(DEADLOCK_S)

    def printed(self) -> list[bytes]:
        assert self.process.stdout is not None and self.process.stderr is not None
        return [stream.read() for stream in (self.process.stdout, self.process.stderr)]

    def close(self) -> None:
        self.channel.close()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Template:
    """A template process that is ready, or will never be."""

    def __init__(self, *modules: str) -> None:
        self.server = ForkServer(modules, import_paths(), dict(os.environ))
        self.problem = self.server.wait_ready(DEADLOCK_S)
        self.asked: list[Asked] = []

    def fork(self, environment: dict[str, str] | None = None, cwd: str = "") -> Asked:
        asked = Asked(self.server, dict(os.environ, **(environment or {})), cwd)
        self.asked.append(asked)
        return asked


@pytest.fixture(scope="module")
def module_template() -> Iterator[Template]:
    template = Template(*MODULES)
    yield template
    template.server.close()


@pytest.fixture
def template(module_template: Template) -> Iterator[Template]:
    yield module_template
    for asked in module_template.asked:
        asked.close()
    module_template.asked.clear()


def test_it_imports_what_it_is_asked_and_may_be_forked(template: Template) -> None:
    assert template.problem == ""
    assert template.server.failed == {}


def test_a_fork_is_a_process_of_its_own(template: Template) -> None:
    asked = template.fork({"PREFECT_GPU_TEST": "from the request"}, "/")
    asked.send(_describe)
    found = asked.value()
    assert found["pid"] == asked.pid
    assert found["session"] == asked.pid
    assert found["parent"] == template.server.process.pid
    assert found["variable"] == "from the request"
    assert found["cwd"] == "/"
    assert found["argv"] == sys.argv
    # Nothing of the template's: its channel and its streams, standard input, and what it opens.
    assert found["sockets"] == 1
    assert asked.end() == 0
    assert asked.printed() == [b"printed\n", b"complained\n"]


def test_what_forks_change_stays_with_them(template: Template) -> None:
    asked = [template.fork(), template.fork()]
    for one in asked:
        one.send(_count)
    # The random numbers of forks that were made alike are not alike.
    (first, one_number), (second, other_number) = (one.value() for one in asked)
    assert (first, second) == (1, 1)
    assert one_number != other_number
    assert [one.end() for one in asked] == [0, 0]


@pytest.mark.parametrize("cpus", [1, 2])
def test_the_libraries_work_in_a_fork(template: Template, cpus: int) -> None:
    asked = template.fork()
    asked.send(_compute, cpus)
    assert asked.value() == pytest.approx((300.0**3, 300.0**3))
    assert asked.end() == 0


def test_the_end_of_a_script_is_kept(template: Template, tmp_path: Any) -> None:
    asked = template.fork()
    asked.send(_leave_open, str(tmp_path))
    assert asked.value() is None
    assert asked.end() == 0
    assert (tmp_path / "never closed").read_text() == "all of it"
    assert (tmp_path / "at exit").read_text() == "called"
    assert (tmp_path / "by a thread").read_text() == "waited for"


def test_a_fork_that_is_killed_says_by_what(template: Template) -> None:
    asked = template.fork()
    os.kill(asked.pid, signal.SIGKILL)
    assert asked.end() == -signal.SIGKILL


def test_a_fork_that_crashes_says_where(template: Template) -> None:
    asked = template.fork()
    asked.send(_crash)
    assert asked.end() == -signal.SIGSEGV
    assert b"in _crash" in asked.printed()[1]


def test_an_exit_code_is_passed_on(template: Template) -> None:
    asked = template.fork()
    asked.send(os._exit, 7)
    assert asked.end() == 7


def test_its_forks_survive_it_and_it_does_not_survive_its_parent() -> None:
    template = Template("prefect_gpu.processes.child")
    asked = template.fork()
    process = template.server.process
    template.server.forget()
    process.returncode = None
    process.wait(DEADLOCK_S)
    asked.send(_describe)
    assert asked.value()["pid"] == asked.pid
    asked.close()


def test_a_module_that_cannot_be_imported_is_named() -> None:
    template = Template("prefect_gpu.no_such_module")
    assert template.problem == ""
    assert list(template.server.failed) == ["prefect_gpu.no_such_module"]
    template.server.close()


def test_a_template_that_has_threads_says_so(importable: str) -> None:
    with open(os.path.join(importable, "starts_a_thread.py"), "w") as file:
        file.write("import threading, time\n")
        file.write(
            "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()"
        )
    template = Template("starts_a_thread")
    assert template.problem == "its libraries have started threads (odd)"
    template.server.close()


def test_its_end_is_seen() -> None:
    template = Template("prefect_gpu.processes.child")
    asked = template.fork()
    template.server.process.kill()
    template.server.process.wait()
    with pytest.raises(OSError, match=r"no fork: .*(gone|Broken pipe)"):
        template.fork()
    # Once more: it is known by now.
    with pytest.raises(OSError, match="no fork"):
        template.fork()
    assert template.server.problem
    # Its forks live on, and end without a code that anybody could tell.
    assert asked.process.poll() is None
    os.kill(asked.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(asked.pid)], DEADLOCK_S)
    assert asked.process.poll() == UNKNOWN_CODE
    asked.close()
    template.server.close()


def test_a_fork_is_polled_and_waited_for(template: Template) -> None:
    asked = template.fork()
    assert asked.process.poll() is None
    with pytest.raises(TimeoutError):
        asked.process.wait(0.01)
    asked.channel.close()
    assert asked.process.wait(DEADLOCK_S) == 0 == asked.process.poll()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("torch", "tensorflow"), 'tensorflow with start_method="forkserver": it starts threads'),
        (("jax",), 'jax with start_method="forkserver": it starts threads'),
        (("cupy",), 'cupy with start_method="forkserver": nobody has tested'),
        (("my.module",), 'my with start_method="forkserver": nobody has tested'),
    ],
)
def test_libraries_that_are_not_tested_are_refused(names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(PolicyError, match=problem) as caught:
        check_modules(names)
    assert 'accepted: prefect, numpy, torch; or start_method="spawn"' in str(caught.value)


def test_libraries_that_are_tested_are_taken_once() -> None:
    assert check_modules(("torch", "numpy", "torch")) == ("numpy", "torch")


# Bodies.


def _describe() -> dict[str, Any]:
    print("printed")
    print("complained", file=sys.stderr)
    kinds = []
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError):
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "variable": os.environ.get("PREFECT_GPU_TEST"),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
    }


def _count() -> tuple[int, float]:
    import numpy as np

    np.seen = getattr(np, "seen", 0) + 1  # type: ignore[attr-defined]
    return np.seen, float(np.random.random())  # type: ignore[attr-defined]


def _compute(cpus: int) -> tuple[float, float]:
    import numpy as np
    import torch

    torch.set_num_threads(cpus)
    ones = np.ones((300, 300))
    return float((ones @ ones).sum()), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())


def _leave_open(folder: str) -> None:
    import atexit
    import threading
    import time

    def write(name: str, text: str) -> None:
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)

    def slowly() -> None:
        time.sleep(0.2)
        write("by a thread", "waited for")

    atexit.register(write, "at exit", "called")
    threading.Thread(target=slowly).start()
    sys.never_closed = open(os.path.join(folder, "never closed"), "w")  # type: ignore[attr-defined]  # noqa: SIM115
    sys.never_closed.write("all of it")  # type: ignore[attr-defined]


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
