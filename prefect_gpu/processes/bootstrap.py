"""First lines of a child: make the interpreter like the parent's, then hand over to `child`.

Run by path, with the number of the channel's descriptor and the task's name (for `ps`). Standard
library only, and nothing of this package until `sys.path` is the parent's: the parent may have found
`prefect_gpu` on a path that this interpreter would not search.
"""

import os
import sys

# The folder of this file, which the interpreter put there since it runs it by path; with `-P` or
# `-I` it did not. `multiprocessing` imports this file as `__mp_main__` in what a body spawns, where
# the path is the body's own.
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


def _read_exactly(descriptor: int, size_bytes: int) -> bytes:
    parts = []
    while size_bytes:
        try:
            part = os.read(descriptor, size_bytes)
        except ConnectionResetError:
            part = b""
        if not part:
            # The parent died before it said anything.
            os._exit(0)
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def main(forked: bool = False) -> None:
    """Read the first frame, become like the parent, and run the child.

    Args:
        forked: This process is a fork of a template.
    """
    # Until the body begins nothing of what is imported becomes garbage: collecting took an eighth of
    # the time to import Prefect (1.05 s of CPU, 0.92 without). `child` switches it on again.
    gc.disable()
    descriptor = int(sys.argv[1])
    # The parent decides when this process ends; Ctrl-C is meant for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A segfault then writes the Python stack to standard error, whose end the parent keeps.
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # UTF-8 whatever the locale: it is what the parent takes it for.
            reconfigure(encoding="utf-8", line_buffering=True, errors="backslashreplace")
    _, length = struct.unpack("!BQ", _read_exactly(descriptor, 9))
    boot = json.loads(_read_exactly(descriptor, length))
    sys.path[:] = boot["sys_path"]
    sys.argv[:] = boot["argv"]
    from prefect_gpu.processes import child

    child.main(descriptor, boot.get("warm"), forked)


if __name__ == "__main__":
    main()
