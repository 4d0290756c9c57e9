"""Names of a shard's keys; the hash tag keeps all of them in one Redis Cluster slot."""

from __future__ import annotations

from collections.abc import Sequence

from blackbox.records.request import Shard

PREFIX = "blackbox:"
SENTINEL = b"~"
"""A member of `due` at +inf, not a request: without it the key was lost, however few are pending."""

IDS_SENTINEL = b"\xff"
"""A field that keeps `ids` in existence, not UTF-8 and so never a caller's id: without the key, it was lost."""

KeyedCommand = tuple[str, bytes, *tuple[bytes | str | int, ...]]
"""A command whose first argument is a key."""


class Keys:
    """The keys of one shard, as bytes ready to be packed."""

    def __init__(self, shard: Shard) -> None:
        self.prefix = f"{PREFIX}{{{shard}}}:".encode()
        self.due = self.prefix + b"due"
        self.ids = self.prefix + b"ids"
        self.state = self.prefix + b"state"
        self.receipts = self.prefix + b"receipts"
        self.cold = self.prefix + b"cold"
        self.skip = self.prefix + b"skip"
        self.ignored = self.prefix + b"ignored"
        self.early = self.prefix + b"early"
        self.moved = self.prefix + b"moved"
        self.ended = self.prefix + b"ended"
        self.unwanted = self.prefix + b"unwanted"
        self.in_flight = self.prefix + b"in-flight"
        self.paused = self.prefix + b"paused"
        self.callers = self.prefix + b"callers"

    def message(self, member: bytes) -> bytes:
        return self.prefix + b"msg:" + member

    def of(self, caller: str) -> bytes:
        """The due times of a caller's pending requests, if these are counted."""
        return self.prefix + b"of:" + caller.encode()


def set_ex_template(keys: Keys) -> bytes:
    """A packed `SET <message key> <entry> EX <seconds>`, four times faster than packing each command.

    To be filled with (offset, length and bytes of the entry, length and digits of the seconds).
    """
    key = keys.message(b"")
    return b"*5\r\n$3\r\nSET\r\n$%d\r\n%b%%016x\r\n$%%d\r\n%%b\r\n$2\r\nEX\r\n$%%d\r\n%%b\r\n" % (
        len(key) + 16,
        key,
    )


def by_score(
    key: bytes, low: int | str, high: int | str, start: int, count: int, *more: str
) -> KeyedCommand:
    """A `ZRANGE` command for the members with scores from `low` to `high`, `count` from `start` on."""
    options: tuple[str | int, ...] = (low, high, "BYSCORE", "LIMIT", start, count, *more)
    return "ZRANGE", key, *options


def zmscore(key: bytes, offsets: range) -> bytes:
    """A packed `ZMSCORE <key> <member> …`, at a fifth of what packing each member costs."""
    count = len(offsets)
    start = b"*%d\r\n$7\r\nZMSCORE\r\n$%d\r\n%b\r\n" % (2 + count, len(key), key)
    return start + b"$16\r\n%016x\r\n" * count % tuple(offsets)


def zadd(key: bytes, scored: Sequence[tuple[int, int]], *, only_there: bool = False) -> bytes:
    """A packed `ZADD <key> [XX] <score> <member> …` for (due time in epoch ms, offset)."""
    pairs = [
        b"$%d\r\n%b\r\n$16\r\n%016x\r\n" % (len(score), score, offset)
        for score, offset in ((b"%d" % due_ms, offset) for due_ms, offset in scored)
    ]
    option = b"$2\r\nXX\r\n" if only_there else b""
    start = b"*%d\r\n$4\r\nZADD\r\n$%d\r\n%b\r\n%b"
    count = 2 + bool(option) + 2 * len(pairs)
    return start % (count, len(key), key, option) + b"".join(pairs)
