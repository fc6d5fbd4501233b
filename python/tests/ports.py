"""Chooses ports for servers that tests start."""

import contextlib
import itertools
import os
import socket

TRIED = itertools.count()


def free_port() -> int:
    """Returns a port on which nothing listens.

    The port is below the range from which the system assigns ports for `connect` and for `bind` with port 0, so that no
    other process gets it before the test uses it.
    """
    while True:
        # Test processes that run at the same time begin their search at different ports.
        port = 12_000 + (os.getpid() * 199 + next(TRIED)) % 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
