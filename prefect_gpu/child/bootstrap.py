"""First lines of a child: make the interpreter like the parent's, then call `child.main`.

Run by path, with the number of the channel's descriptor and a title for `ps`. A fork of the fork server begins with
`main_of_fork`. Standard library only until `sys.path` is the parent's, which may have found `prefect_gpu` elsewhere.
"""

import os
import sys

# This file's folder, which Python adds for a file run by path, except with `-P` or `-I`. In processes that a body starts,
# `multiprocessing` imports this file as `__mp_main__`, and the first path is the body's own.
if __name__ == "__main__" and sys.path[:1] in (
    [os.path.dirname(__file__)],
    [os.path.dirname(os.path.realpath(__file__))],
):
    del sys.path[0]

import faulthandler
import gc
import json
import signal
import socket
import struct
import traceback


def main(descriptor: int, forked: bool = False) -> None:
    """Read the first frame from the channel's descriptor, become like the parent, and run the child."""
    # Until the body: collecting takes an eighth of the time to import Prefect (1.05 s of CPU, 0.92 without).
    gc.disable()
    hear_no_interrupt()
    # A segfault then writes the Python stack to standard error, whose end the parent keeps.
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # UTF-8 in every locale, as the parent decodes it.
            reconfigure(encoding="utf-8", line_buffering=True, errors="backslashreplace")
    _, length = struct.unpack("!BQ", _read_exactly(descriptor, 9))
    boot = json.loads(_read_exactly(descriptor, length))
    sys.path[:] = boot["sys_path"]
    sys.argv[:] = boot["argv"]
    from prefect_gpu.child import main as child

    child.main(descriptor, boot.get("warm"), forked)


def hear_no_interrupt() -> None:
    """Make SIGINT without effect, unless it is ignored: the parent decides when this process ends.

    Programs that the body starts would inherit an ignored signal, and Ctrl-C would not end them.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _do_nothing)


def _do_nothing(number: int, frame: object) -> None:
    pass


def main_of_fork(channel: int, stdout: int, stderr: int, reply: int, request: int) -> None:
    """In a fork of a fork server: become a child, as a fresh interpreter does. All arguments are descriptors.

    Args:
        channel: Of the channel to the parent.
        stdout: Becomes standard output.
        stderr: Becomes standard error.
        reply: Of a socket for the id and a pidfd of this process, which the parent waits for.
        request: Of a file with this process's environment and folder (JSON).
    """
    os.setsid()
    with socket.socket(fileno=reply) as answer:
        # A pidfd, since the server reaps this process; and only now, since a kill of its session missed it before.
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(answer, [str(os.getpid()).encode()], [pidfd])
        os.close(pidfd)
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(request, "rb") as file:
        # Shared with the parent, which has written to its end.
        file.seek(0)
        wanted = json.load(file)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    from prefect_gpu.child import exit as process_exit

    code = 0
    try:
        if wanted["cwd"]:
            os.chdir(wanted["cwd"])
        # Python's own generator is seeded in a fork, NumPy's is not; PyTorch's has a fixed seed in each process.
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()
        main(channel, forked=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    process_exit.end_fork(code)


def _read_exactly(descriptor: int, size_bytes: int) -> bytes:
    parts = []
    while size_bytes:
        try:
            part = os.read(descriptor, size_bytes)
        except ConnectionResetError:
            part = b""
        if not part:
            # The parent died before it sent anything.
            os._exit(0)
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
