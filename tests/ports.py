"""Ports for processes that meet at MASTER_PORT."""

import random
import socket

_drawn = random.SystemRandom()  # no seed: test processes draw at the same time


def free_port() -> int:
    """Return a port that nobody listens at.

    It is below those that the system gives to connections, one of which could take it before the
    process that is to listen does: the others would wait for an answer of that one.
    """
    while True:
        port = _drawn.randrange(20_000, 32_000)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
