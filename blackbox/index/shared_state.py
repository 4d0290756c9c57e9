"""The state that all shards share in Redis: counts per second, pending requests of callers, paused targets.

No request depends on it: counts that are lost start again at zero, and nothing is paused then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from blackbox.index.connection import Clients, Connections
from blackbox.index.keys import Keys, counts
from blackbox.index.packed_commands import by_score
from blackbox.records.request import Second, Shard

# Of counts per second: shards may read records of one second minutes apart.
SECONDS_KEPT = 600

LOOKED_AT = 1000


class SharedState:
    """State that all shards share. Safe from any thread.

    Every method raises IndexLost when Redis does not answer, IndexFull when it has no room.
    """

    def __init__(self, connections: Connections) -> None:
        self._clients = Clients(connections)
        self._looked: dict[bytes, int] = {}

    def count(self, more: Mapping[Second, int]) -> dict[Second, int]:
        """Add these counts; return the value of each before."""
        keys = {one: counts(one.kind, one.name) for one in more}
        each = list(dict.fromkeys(keys.values()))
        added = [("HINCRBY", keys[one], one.at_s, count) for one, count in more.items()]
        replies = self._clients.together(*added, *(("HLEN", key) for key in each))
        for key, kept in zip(each, replies[len(more) :], strict=True):
            # Only at twice as many, so that the oldest are not removed at each count.
            if kept > 2 * SECONDS_KEPT:
                self._forget(key)
        totals = zip(more.items(), replies, strict=False)
        return {one: int(total) - count for (one, count), total in totals}

    def pending(self, caller: str, shards: Iterable[Shard]) -> int:
        """How many requests of a caller, whose pending ones are counted, are pending in these shards."""
        every = list(map(Keys, shards))
        self._remove_ended(caller, every)
        found = self._clients.together(*(("ZCARD", keys.of(caller)) for keys in every))
        return sum(map(int, found))

    def paused(self, shards: Iterable[Shard]) -> dict[str, int]:
        """The targets that are paused in some of these shards, and since when, epoch ms."""
        found: dict[str, int] = {}
        for held in self._clients.together(*(("HGETALL", Keys(shard).paused) for shard in shards)):
            for topic, since_ms in held.items():
                name = topic.decode()
                found[name] = min(int(since_ms), found.get(name, int(since_ms)))
        return found

    def pause(self, topic: str, now_ms: int, shards: Iterable[Shard]) -> None:
        """Pause a target in each of these shards; one that is paused already keeps its time."""
        # Each shard has it in its own keys, so that dispatch need not ask another server.
        shards = list(shards)
        since_ms = self.paused(shards).get(topic, now_ms)
        self._clients.together(*(("HSET", Keys(shard).paused, topic, since_ms) for shard in shards))

    def resume(self, topic: str, shards: Iterable[Shard]) -> None:
        self._clients.together(*(("HDEL", Keys(shard).paused, topic) for shard in shards))

    def close(self) -> None:
        self._clients.close()

    def _remove_ended(self, caller: str, every: Sequence[Keys]) -> None:
        # Recovery ends requests whose caller it does not know: they are removed here. Some of each
        # shard are checked each time, and the next ones the next time.
        now_ms = time.time_ns() // 1_000_000
        starts = [self._looked.pop(keys.of(caller), 0) for keys in every]
        late = self._clients.together(
            *(
                by_score(keys.of(caller), "-inf", now_ms, start, LOOKED_AT)
                for keys, start in zip(every, starts, strict=True)
            )
        )
        looked = [one for one in zip(every, starts, late, strict=True) if one[2]]
        scores = self._clients.together(
            *(("ZMSCORE", keys.due, *names) for keys, _, names in looked)
        )
        for (keys, start, names), found in zip(looked, scores, strict=True):
            ended = [name for name, score in zip(names, found, strict=True) if score is None]
            if ended:
                self._clients.together(("ZREM", keys.of(caller), *ended))
            if len(names) == LOOKED_AT:
                self._looked[keys.of(caller)] = start + len(names) - len(ended)

    def _forget(self, key: bytes) -> None:
        (held,) = self._clients.together(("HGETALL", key))
        seconds = sorted(map(int, held), reverse=True)
        self._clients.together(("HDEL", key, *seconds[SECONDS_KEPT:]))
