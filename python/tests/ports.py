"""Ports for servers that tests start."""

import contextlib
import itertools
import os
import socket

TRIED = itertools.count()


def free_port() -> int:
    """Returns a port on which nothing listens.

    It is below the ports that the system assigns for `connect` and for `bind` with port 0, so that no other process
    gets it before it is used.
    """
    while True:
        # Test programs that run at the same time start at different ports.
        port = 12_000 + (os.getpid() * 199 + next(TRIED)) % 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
