"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import random
import socket

from blackbox.embedded.guarded_process import EmbeddedError

HOST = "127.0.0.1"
# Below the range that systems hand out for outgoing connections: there, a client that keeps
# connecting to a stopped server can be given that very port, and then talks to itself.
PORT_RANGE = range(20_000, 30_000)
ATTEMPTS = 100


def free_port() -> int:
    """A port that is free now; another process may take it before it is used."""
    for port in random.SystemRandom().sample(PORT_RANGE, ATTEMPTS):
        if is_free(port):
            return port
    raise EmbeddedError(
        f"no free port among {ATTEMPTS} tried in {PORT_RANGE.start}-{PORT_RANGE.stop - 1}; stop "
        "some of the servers that listen there"
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Without it, a port whose last connections are in TIME_WAIT would not count as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def is_listening(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
