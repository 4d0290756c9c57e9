"""What blackbox asks all servers of a cluster, while some of them are silent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blackbox.index import redis_servers
from blackbox.index.redis_servers import RedisNode, RedisServers
from blackbox.records.errors import IndexLost

HUNG_S = 2.5
"""How long a server that does not answer is waited for."""


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0


class Node:
    """A server whose clock is right; a hung one is waited for in vain."""

    def __init__(self, time: Time, *, is_hung: bool) -> None:
        self._time, self._is_hung = time, is_hung

    def now_ms(self) -> int:
        if self._is_hung:
            self._time.now_s += HUNG_S
            raise IndexLost("Redis does not answer TIME")
        return int(self._time.now_s * 1000)


@pytest.mark.parametrize("hung", [[], [0], [1], [2], [0, 2]])
def test_a_silent_server_does_not_set_the_clock_back(
    monkeypatch: pytest.MonkeyPatch, hung: list[int]
) -> None:
    time = Time()
    nodes = {str(n): Node(time, is_hung=n in hung) for n in range(3)}
    monkeypatch.setattr(RedisServers, "each", lambda _: nodes)
    monkeypatch.setattr(RedisNode, "now_ms", lambda node: node.now_ms())
    monkeypatch.setattr(redis_servers, "time", SimpleNamespace(monotonic=lambda: time.now_s))
    servers = RedisServers("redis://127.0.0.1:1")

    assert servers.now_ms() == time.now_s * 1000
