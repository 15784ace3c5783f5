"""The fork server's process: imports libraries, then forks a process for each request.

Run by path, with the control socket's descriptor and a title for `ps` as arguments. Starts no thread and touches no
device, so that forks equal fresh interpreters after the same imports. Imports only the standard library until
`sys.path` is the parent's. A fork continues in `bootstrap`; `processes.fork_server` has the parent's side.
"""

import os
import sys

if __name__ == "__main__" and sys.path[:1] in (
    [os.path.dirname(__file__)],
    [os.path.dirname(os.path.realpath(__file__))],
):
    del sys.path[0]

import contextlib
import fcntl
import gc
import json
import select
import signal
import socket
import threading
import traceback
from collections.abc import Iterable

#: Bytes of the longest first message: paths and names of modules.
_BOOT_BYTES = 1 << 20


def main() -> None:
    """Import the modules that the parent names, report failed imports, then fork on request until the parent ends."""
    gc.disable()
    # Ctrl-C is for the parent, which ends this process. No `SIG_IGN`, for the reason given in `bootstrap`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    boot = json.loads(control.recv(_BOOT_BYTES))
    end_with_parent(control, True)
    sys.path[:] = boot["sys_path"]
    from prefect_gpu.child import warm_up

    failed = warm_up.import_all(boot["modules"])
    # Otherwise each fork would print the buffered output as well.
    sys.stdout.flush()
    # The collector skips frozen objects, whose pages would be copied in each fork.
    gc.freeze()
    problem = find_problem()
    end_with_parent(control, False)
    try:
        control.send(json.dumps({"failed": failed, "problem": problem}).encode())
        serve(control)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def serve(control: socket.socket) -> None:
    """Fork a process for each request on the socket `control`, until the parent closes its end.

    A request carries the five descriptors of `bootstrap.main_of_fork`. This process writes text to the socket `reply`:
    the fork's exit code when the fork has ended, or the reason why the system refused to fork.
    """
    from prefect_gpu.child import bootstrap

    #: Process id and `reply` descriptor of each living fork, by its pidfd.
    forks: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in forks:
                pid, reply = forks.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _reply(reply, str(code))
                poll.unregister(ready)
                _close((ready, reply))
                continue
            request, received, _, _ = socket.recv_fds(control, 1, 5, socket.MSG_CMSG_CLOEXEC)
            if not request:
                return
            if len(received) < 5:
                # This process has no descriptor left. The parent sees its end of the reply socket close.
                _close(received)
                continue
            channel, stdout, stderr, reply, content = received
            try:
                pid = os.fork()
            except OSError as error:
                _reply(reply, str(error))
                _close(received)
                continue
            if pid == 0:
                try:
                    control.close()
                    for pidfd, (_, other) in forks.items():
                        _close((pidfd, other))
                    bootstrap.main_of_fork(*received)
                finally:
                    # Reached only if `main_of_fork`, which ends the process, fails.
                    os._exit(1)
            _close((channel, stdout, stderr, content))
            pidfd = os.pidfd_open(pid)
            forks[pidfd] = pid, reply
            poll.register(pidfd, select.POLLIN)


def _reply(reply: int, text: str) -> None:
    # The parent may have closed its end.
    with contextlib.suppress(OSError):
        os.write(reply, text.encode())


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def end_with_parent(control: socket.socket, on: bool) -> None:
    """Make the kernel end this process when the parent closes its end of `control`; undo that if `on` is `False`."""
    # For the imports, in which nothing reads the socket for seconds: an asynchronous socket sends SIGIO, which ends a
    # process, when the other end closes. The parent sends nothing meanwhile.
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    if not on:
        fcntl.fcntl(control, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        # If the other end was closed earlier, no signal comes.
        if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            os._exit(0)


def find_problem() -> str:
    """Return the reason why this process must not be forked; empty: forking is safe."""
    names = [thread.name for thread in threading.enumerate()]
    if len(names) > 1:
        return f"its libraries have started threads ({', '.join(names[1:])})"
    from prefect_gpu.child.warm_up import find_started

    return find_started()


if __name__ == "__main__":
    main()
