"""The template: a process that has imported libraries and forks a child for each request.

Run by path, with the number of the descriptor of its control socket and that of the names of modules
to import (JSON). It computes nothing, starts no thread and touches no device, so that a fork of it is
as good as a fresh interpreter that has imported the same. It reads requests, forks, says which
children have ended, and reaps one only when it is told to: until then its process id is nobody
else's. The parent's end is in `forkserver`.

Standard library only until `sys.path` is the parent's, as in `bootstrap`.
"""

import os
import sys

if __name__ == "__main__" and sys.path[:1] in (
    [os.path.dirname(__file__)],
    [os.path.dirname(os.path.realpath(__file__))],
):
    del sys.path[0]

import array
import fcntl
import gc
import importlib
import json
import selectors
import signal
import socket
import threading
import traceback
from typing import Any, NoReturn

#: Bytes of the longest request: an environment, which the kernel bounds by a quarter of the stack.
LONGEST_REQUEST_BYTES = 1 << 21

#: Descriptors that come with a request to fork: channel, standard output, standard error.
REQUEST_DESCRIPTORS = 3


#: Stands in a template's command line where its forks have their task's name, for `ps`.
TEMPLATE_TITLE = "template".ljust(80)

#: Stands in a template's environment where each of its forks has the token that marks it and all
#: that it starts (`guardian`): of the same length.
NO_TOKEN = "0" * 32


class _Forked(BaseException):
    """Raised in a fork, to leave the template's loop: carries what the fork is to be."""

    def __init__(self, request: dict[str, Any], descriptors: list[int]) -> None:
        super().__init__()
        self.request = request
        self.descriptors = descriptors


def main() -> None:
    """Import what is asked, then fork on request until the parent is gone."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    boot = json.loads(control.recv(LONGEST_REQUEST_BYTES))
    _end_with_parent(control, True)
    sys.path[:] = boot["sys_path"]
    failed = {}
    for name in boot["modules"]:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            if name == "prefect_gpu.prefect_bridge":
                module.rehearse()
    # What was made so far stays: collecting it in a fork would only copy its pages.
    gc.freeze()
    _end_with_parent(control, False)
    _say(control, kind="ready", failed=failed, unfit=_unfit())
    code = 0
    try:
        _Template(control).run()
    except _Forked as fork:
        try:
            _become(fork.request, fork.descriptors)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
    _end(code)


def _end_with_parent(control: socket.socket, imports: bool) -> None:
    """Have the kernel end this process when the parent closes its end, while nobody can look.

    To import takes seconds, in which nothing is read. A socket that is asynchronous sends SIGIO when
    something arrives or the other end closes, and SIGIO ends a process. The parent says nothing until
    it has heard from us.
    """
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    if not imports:
        fcntl.fcntl(control, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        # What closed before is not told.
        if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            os._exit(0)
    except BlockingIOError:
        return


def _unfit() -> str:
    """Say why this process must not be forked; empty: it may be."""
    names = [thread.name for thread in threading.enumerate()]
    if len(names) > 1:
        return f"its libraries have started threads ({', '.join(names[1:])})"
    from prefect_gpu.processes import warming

    return warming.find_touched()


def _say(control: socket.socket, **message: object) -> None:
    control.send(json.dumps(message).encode())


class _Template:
    """The loop: one thread, which waits for requests and for the end of its forks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        #: Process ids of forks that have not been reaped, and whether their end was told.
        self._forks: dict[int, bool] = {}
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the parent's end of the control socket is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_out:
                    self._tell_ends()
                elif not self._serve():
                    # The guardian ends the forks.
                    os._exit(0)

    def _serve(self) -> bool:
        """Take one request; `False`: the parent is gone."""
        try:
            data, descriptors = _receive(self._control)
        except ConnectionResetError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if request["kind"] == "reap":
            self._forks.pop(request["pid"], None)
            try:
                os.waitpid(request["pid"], 0)
            except ChildProcessError:
                pass
            return True
        self._fork(request, descriptors)
        return True

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        heard, told = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(told)
            _say(self._control, kind="refused", id=request["id"], reason=str(error))
        else:
            if pid == 0:
                os.setsid()
                os.close(heard)
                os.close(told)
                self._leave()
                raise _Forked(request, descriptors)
            os.close(told)
            # Until it leads a group, or is dead: what kills the group would miss it.
            os.read(heard, 1)
            self._forks[pid] = False
            _say(self._control, kind="forked", id=request["id"], pid=pid)
        for descriptor in (heard, *descriptors):
            os.close(descriptor)

    def _leave(self) -> None:
        """In a fork: have nothing of the template's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Never `unregister`: what the kernel watches is shared with the template.
        self._selector.close()
        for end in (self._control, self._wake_in, self._wake_out):
            end.close()

    def _tell_ends(self) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass
        for pid, told in self._forks.items():
            if told:
                continue
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._forks[pid] = True
                ended = found.si_code == os.CLD_EXITED
                _say(
                    self._control,
                    kind="ended",
                    pid=pid,
                    code=found.si_status if ended else -found.si_status,
                )


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(
        LONGEST_REQUEST_BYTES, socket.CMSG_SPACE(REQUEST_DESCRIPTORS * size)
    )
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % size])
    return data, list(descriptors)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """In a fork: be the child that a fresh interpreter would have become."""
    channel, *streams = descriptors
    for number, descriptor in zip((1, 2), streams, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["cwd"]:
        os.chdir(request["cwd"])
    # A fresh interpreter would have taken fresh entropy; Python's own generator has (it watches
    # forks), PyTorch's begins with a fixed seed in each process.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    from prefect_gpu.processes import bootstrap, guardian, warming

    warming.retitle(request["title"], TEMPLATE_TITLE)
    token = request["environment"].get(guardian.TOKEN_VARIABLE, "")
    outer = token[: -len(NO_TOKEN)]
    warming.rewrite(
        warming.ENVIRONMENT,
        f"{guardian.TOKEN_VARIABLE}={outer}{NO_TOKEN}\0".encode(),
        f"{guardian.TOKEN_VARIABLE}={token}\0".encode(),
    )
    sys.argv[:] = [bootstrap.__file__, str(channel), request["title"]]
    bootstrap.main(forked=True)


def _end(code: int) -> NoReturn:
    """End a fork: all that a script's end promises, but no taking apart of what it shares.

    Clearing the modules of Prefect and PyTorch one by one copies most of the template's pages: it took
    0.8 s in a fork and 0.4 in a fresh process, 0.02 are left (2 cores, Python 3.11). What is not called
    is `__del__` of objects that live to the end, and what C libraries register with `atexit`.
    """
    from prefect_gpu.processes import ending

    ending.call_last_functions()
    # What the template made was set aside; to look at it would copy its pages.
    ending.write_open_files()
    os._exit(code)


if __name__ == "__main__":
    main()
