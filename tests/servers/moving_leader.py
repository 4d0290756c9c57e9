"""A proxy to Kafka that pretends to the first writer that a new partition has no leader yet."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from blackbox.embedded import EmbeddedKafka
from blackbox.embedded.tcp_ports import HOST, free_port

PRODUCE = 0
NOT_LEADER = 6
BEHIND_S = 0.5
"""How long the refusal waits for the client to send the next requests."""


class MovingLeader(NamedTuple):
    """`kafka` is the same broker, reached directly; `refused` are the topics whose first write was."""

    kafka: EmbeddedKafka
    bootstrap_servers: str
    refused: set[str]


@contextmanager
def moving_leader(folder: Path, *topics: str) -> Iterator[MovingLeader]:
    """Refuses the first request to write to each topic whose name ends with one of `topics`."""
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
    refused: set[str] = set()
    Thread(target=_accept, args=(listening, behind, topics, refused), daemon=True).start()
    try:
        yield MovingLeader(kafka, shown, refused)
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        kafka.stop()


def _accept(
    listening: socket.socket, port: int, topics: tuple[str, ...], refused: set[str]
) -> None:
    with suppress(OSError), listening:
        while True:
            client, _ = listening.accept()
            _Connection(client, socket.create_connection((HOST, port)), topics, refused)


class _Connection:
    """Hides the name of the topic from the broker, and turns its answer into "not the leader"."""

    def __init__(
        self,
        client: socket.socket,
        broker: socket.socket,
        topics: tuple[str, ...],
        refused: set[str],
    ) -> None:
        self._client, self._broker = client, broker
        self._topics, self._refused = topics, refused
        self._hidden: dict[bytes, bytes] = {}
        self._behind = Event()
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._client, self._broker:
            down = Thread(target=self._pass, args=(self._down,), daemon=True)
            down.start()
            self._pass(self._up)
            down.join()

    def _pass(self, lane: Callable[[], None]) -> None:
        with suppress(OSError):
            lane()
        for end in (self._client, self._broker):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _up(self) -> None:
        for frame in _frames(self._client):
            api, correlation = int.from_bytes(frame[:2], "big"), frame[4:8]
            if api == PRODUCE:
                name = self._topic(frame)
                if name.endswith(self._topics) and name not in self._refused:
                    self._refused.add(name)
                    self._hidden[correlation] = name.encode()
                    frame = frame.replace(name.encode(), b"?" * len(name), 1)
                elif self._hidden:
                    self._behind.set()
            _send(self._broker, frame)

    def _down(self) -> None:
        for frame in _frames(self._broker):
            if (name := self._hidden.get(frame[:4])) is not None:
                self._behind.wait(BEHIND_S)
                before, _, after = frame.partition(b"?" * len(name))
                partition = after[:5]  # how many there are, and its number
                frame = before + name + partition + NOT_LEADER.to_bytes(2, "big") + after[7:]
            _send(self._client, frame)

    def _topic(self, frame: bytes) -> str:
        """Of a request of version 9 to 12 with one topic."""
        at = 8 + 2 + int.from_bytes(frame[8:10], "big") + 1  # client id, tags
        at += max(1, frame[at])  # transactional id
        at += 2 + 4 + 1  # acks, timeout, how many topics
        return frame[at + 1 : at + frame[at]].decode()


def _frames(end: socket.socket) -> Iterator[bytes]:
    with end.makefile("rb") as data:
        while len(length := data.read(4)) == 4:
            yield data.read(int.from_bytes(length, "big"))


def _send(end: socket.socket, frame: bytes) -> None:
    end.sendall(len(frame).to_bytes(4, "big") + frame)
