"""What every kind of connection has in common."""

from __future__ import annotations

from contextlib import closing

from blackbox.index.connection import RedisSession, pack
from tests.contract.conftest import Backend

MANY = 150


def test_a_process_may_own_more_than_a_hundred_shards(real_backend: Backend) -> None:
    connections = real_backend.connections()
    sessions = [RedisSession(connections) for _ in range(MANY)]
    for session in sessions:
        with closing(session):
            assert session.run([pack("PING")]) == [b"PONG"]
