"""First code of a child: sets up the interpreter like the parent's, then calls `child.main`.

A fresh interpreter runs this file by path, with the channel's descriptor and a title for `ps` as arguments. Imports only
the standard library until `sys.path` is the parent's, which may lead to another `prefect_gpu`.
"""

import os
import sys

# Python adds the folder of a file run by path, except with `-P` or `-I`. In processes that a body starts,
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
import struct
from typing import Any


def main(descriptor: int) -> None:
    """Set `sys.path` and `sys.argv` from the first frame on the channel's `descriptor`, then run the child."""
    # Until the body: with garbage collection, importing Prefect takes 1.05 s of CPU, without 0.92 s.
    gc.disable()
    hear_no_interrupt()
    # A segfault writes the Python stack to standard error, whose end the parent keeps.
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # The parent decodes UTF-8, whatever the locale.
            reconfigure(encoding="utf-8", line_buffering=True, errors="backslashreplace")
    boot = read_boot(descriptor)
    sys.path[:] = boot["sys_path"]
    sys.argv[:] = boot["argv"]
    from prefect_gpu.child import main as child

    child.main(descriptor, boot.get("warm"), boot.get("control"))


def hear_no_interrupt() -> None:
    """Make SIGINT have no effect, unless it is ignored already: the parent decides when this process ends."""
    # No `SIG_IGN`: programs that the body starts would inherit it, and Ctrl-C would not end them.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _do_nothing)


def _do_nothing(number: int, frame: object) -> None:
    pass


def read_boot(descriptor: int) -> dict[str, Any]:
    """Read the channel's first frame and return its content; end this process if the parent has ended."""
    _, length = struct.unpack("!BQ", _read_exactly(descriptor, 9))
    boot: dict[str, Any] = json.loads(_read_exactly(descriptor, length))
    return boot


def _read_exactly(descriptor: int, size_bytes: int) -> bytes:
    parts = []
    while size_bytes:
        try:
            part = os.read(descriptor, size_bytes)
        except ConnectionResetError:
            part = b""
        if not part:
            # The parent ended before it sent a frame.
            os._exit(0)
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
