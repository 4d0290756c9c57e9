"""The content of a shard's keys, read by a plain client, and short ways to change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from blackbox.core.bits import SEGMENT
from blackbox.core.parsing import touched_by
from blackbox.core.plan import Change, IndexMetadata, Plan, Positions
from blackbox.core.resolve import resolve
from blackbox.index.keys import IDS_SENTINEL
from blackbox.index.shard_index import ShardIndex
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.request import Shard

SHARD = Shard("TB", 3)
PREFIX = f"blackbox:{{{SHARD}}}:"
NOW_MS = 1_700_000_000_000
GRACE_S = 1000


def entry(
    due_ms: int = NOW_MS, *, caller_id: str | None = None, message: bytes | None = b"hello"
) -> Entry:
    """A stored request that is due at `due_ms`."""
    return Entry("orders", message, due_ms, caller_id=caller_id)


def store(
    index: ShardIndex, start: int, end: int, changes: Mapping[int, Change], now_ms: int = NOW_MS
) -> Plan:
    """What intake does with a batch that was read from `start` to `end` - 1."""
    ordered = list(changes.items())
    return index.store(start, end, touched_by(ordered), lambda view: resolve(ordered, view), now_ms)


@dataclass(frozen=True)
class Held:
    """The content of a shard's index: (due ms, offset) in order, stored bytes, caller ids, skip."""

    positions: Positions | None
    due: list[tuple[int, int]]
    payloads: dict[int, bytes]
    holders: dict[str, int]
    skip: set[int]

    def offsets(self) -> list[int]:
        return [offset for _, offset in self.due]


def loaded(index: ShardIndex) -> IndexMetadata | None:
    """The metadata of an index, without the token, which is new at each opening."""
    kept = index.load()
    return kept and kept._replace(token="")


def held(client: redis.Redis) -> Held:
    """Read everything under the shard's prefix."""
    raw: Any = client
    state = {name.decode(): value for name, value in raw.hgetall(PREFIX + "state").items()}
    due = raw.zrange(PREFIX + "due", "-inf", "(inf", byscore=True, withscores=True)
    names = raw.keys(PREFIX.replace("{", "\\{") + "msg:*")
    return Held(
        positions=Positions(int(state["requests"]), int(raw.get(PREFIX + "receipts")))
        if state
        else None,
        due=[(int(score), int(name, 16)) for name, score in due],
        payloads={int(name.rpartition(b":")[2], 16): raw.get(name) for name in names},
        holders={
            name.decode(): int(value, 16)
            for name, value in raw.hgetall(PREFIX + "ids").items()
            if name != IDS_SENTINEL
        },
        skip=_skipped(raw),
    )


def segments(client: redis.Redis) -> set[int]:
    """The `skip` bitmaps that exist."""
    raw: Any = client
    return {int(name) for name in raw.hkeys(PREFIX + "skip")}


def _skipped(raw: Any) -> set[int]:
    found: set[int] = set()
    for segment in segments(raw):
        bitmap = raw.hget(f"{PREFIX}skip", segment)
        bits = "".join(f"{byte:08b}" for byte in bitmap)
        found |= {segment * SEGMENT + at for at, bit in enumerate(bits) if bit == "1"}
    return found


def stored(changes: Mapping[int, Entry]) -> dict[int, bytes]:
    """Entries as they are kept."""
    return {offset: entries.encode(change) for offset, change in changes.items()}
