"""Ports for programs that must be told theirs before they listen."""

from __future__ import annotations

import random
import socket

#: Below the ports that Linux gives to a program that asks for any (`net.ipv4.ip_local_port_range`): between the choice and the
#: program's own `bind` no other program, and no connection, is given it.
FIRST, LAST = 15_000, 32_000


def free_port() -> int:
    """Return a port at which nothing listens."""
    # Not the generator of the tests, which they may seed alike in each worker.
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
