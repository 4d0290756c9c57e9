"""A Kafka behind a connection that takes few bytes per second from each client."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from blackbox.embedded import EmbeddedKafka
from blackbox.embedded.tcp_ports import HOST, free_port

PER_SECOND = 20
"""So many pieces are passed on in a second, with equal pauses."""


class NarrowKafka(NamedTuple):
    """`kafka` is reached directly; `bootstrap_servers` leads through the narrow connection."""

    kafka: EmbeddedKafka
    bootstrap_servers: str


@contextmanager
def narrow_kafka(folder: Path, bytes_per_s: int) -> Iterator[NarrowKafka]:
    """The limit is for each connection, and for what clients send; answers are not slowed down."""
    listening = socket.create_server((HOST, 0))
    shown = f"{HOST}:{listening.getsockname()[1]}"
    direct, behind, controller = free_port(), free_port(), free_port()
    settings = {
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listeners": f"PLAINTEXT://{HOST}:{direct},BEHIND://{HOST}:{behind},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{direct},BEHIND://{shown}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,BEHIND:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    kafka = EmbeddedKafka(folder, port=direct, settings=settings)
    kafka.start()
    Thread(target=_accept, args=(listening, behind, bytes_per_s), daemon=True).start()
    try:
        yield NarrowKafka(kafka, shown)
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        kafka.stop()


def _accept(listening: socket.socket, port: int, bytes_per_s: int) -> None:
    with suppress(OSError), listening:
        while True:
            client, _ = listening.accept()
            broker = socket.create_connection((HOST, port))
            # Otherwise seconds of data wait in the socket, out of the sight of the client.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, bytes_per_s // PER_SECOND)
            Thread(target=_serve, args=(client, broker, bytes_per_s), daemon=True).start()


def _serve(client: socket.socket, broker: socket.socket, bytes_per_s: int) -> None:
    with client, broker:
        down = Thread(target=_pass, args=(broker, client), daemon=True)
        down.start()
        _pass(client, broker, bytes_per_s)
        down.join()


def _pass(source: socket.socket, target: socket.socket, bytes_per_s: int | None = None) -> None:
    most = 65_536 if bytes_per_s is None else bytes_per_s // PER_SECOND
    with suppress(OSError):
        while data := source.recv(most):
            target.sendall(data)
            if bytes_per_s is not None:
                time.sleep(len(data) / bytes_per_s)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
