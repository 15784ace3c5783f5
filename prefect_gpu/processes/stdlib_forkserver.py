"""All that is used of the private parts of `multiprocessing`, to fork processes from a server of our own.

Python 3.10 to 3.14. `multiprocessing.forkserver` forks a process for each request, and reports its id
and its exit code. Used are its loop (`serve`, in the server) and its client (`ForkClient`, in the
parent). Not used are `multiprocessing.Process`, which would import `__main__` again, and the one
server that all users of `multiprocessing` in a process share. `tests/process/test_stdlib_forkserver.py`
has a test for each private name. Which process is the server, and what it imports, is decided in
`fork_server`.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

#: Bytes of the key by which a server and its client know each other, since Python 3.14.
KEY_BYTES = 32

_clear_exit_functions = atexit._clear


class ForkClient(forkserver.ForkServer):
    """Asks a running server for forks. Not safe to use from several threads.

    Args:
        address: Path of the server's socket.
        alive: Descriptor that the server watches: it ends when every copy of it is closed.
        key: The server's key, `KEY_BYTES` long.
    """

    def __init__(self, address: str, alive: int, key: bytes) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = alive
        #: Read by Python 3.14 and later.
        self._forkserver_authkey = key

    def ensure_running(self) -> None:
        """Do nothing: the standard library would start a server of its own here."""

    def fork(self, entry: Entry, descriptors: Sequence[int]) -> tuple[int, int]:
        """Have the server fork a process.

        It blocks for as long as the server does not answer; kill the server to end that. The first
        call in a Python process starts the resource tracker of `multiprocessing`, a small process
        that ends with this one.

        Args:
            entry: What the fork runs.
            descriptors: What it gets; `entry` decides their order.

        Returns:
            The process id, and a descriptor from which `read_number` reads the exit code later.

        Raises:
            OSError: The server is gone.
            EOFError: The server ended before it answered.
        """
        status, data = self.connect_to_new_process(list(descriptors))
        try:
            with open(data, "wb") as stream:
                # What `spawn._main` reads: what to prepare (nothing), then the process object.
                stream.write(pickle.dumps({}) + pickle.dumps(entry))
            return read_number(status), status
        except BaseException:
            os.close(status)
            raise


def read_number(descriptor: int) -> int:
    """Read a process id or an exit code.

    Raises:
        EOFError: The server is gone.
    """
    number: int = forkserver.read_signed(descriptor)
    return number


@dataclass(frozen=True)
class Entry:
    """A function that a fork runs, in the place of a `multiprocessing.Process`."""

    module: str
    function: str

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the function with the descriptors that were sent; called by `multiprocessing.spawn`."""
        own: Any = forkserver._forkserver
        tracker: Any = resource_tracker._resource_tracker
        descriptors = own._inherited_fds
        # Before anything else: while they are open, the server and the parent's resource tracker
        # outlive the parent.
        for descriptor in (own._forkserver_alive_fd, tracker._fd, parent_sentinel):
            os.close(descriptor)
        # As in a process that was not forked: what the task starts with `multiprocessing` is its own.
        own.__init__()
        tracker._fd = None
        atexit._clear = _clear_exit_functions
        getattr(importlib.import_module(self.module), self.function)(*descriptors)
        return 0


def serve(listener: socket.socket, alive: int, key: bytes) -> None:
    """Fork a process for each request, until every copy of the parent's end of `alive` is closed.

    Args:
        listener: Listens for requests; closed in the end.
        alive: Becomes readable when the parent's end is closed.
        key: As for `ForkClient`.

    Raises:
        SystemExit: The parent's end was closed.
        OSError: The system does not fork any more.
    """
    options: dict[str, Any] = {}
    if "authkey_r" in inspect.signature(forkserver.main).parameters:
        options["authkey_r"], writing = os.pipe()
        os.write(writing, key)
        os.close(writing)
    # Since Python 3.13 a fork forgets the functions that imports have registered, `logging.shutdown`
    # and that of `weakref.finalize` among them. Here it keeps them, as a script does.
    atexit._clear = lambda: None
    forkserver.main(listener.detach(), alive, [], **options)
