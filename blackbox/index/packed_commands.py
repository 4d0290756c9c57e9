"""Redis commands about many members, packed by hand: four to five times faster than packing each argument."""

from __future__ import annotations

from collections.abc import Sequence

from blackbox.index.keys import Keys

KeyedCommand = tuple[str, bytes, *tuple[bytes | str | int, ...]]
"""A command whose first argument is a key."""


def set_ex_template(keys: Keys, *, only_there: bool = False) -> bytes:
    """A packed `SET <message key> <entry> EX <seconds> [XX]`.

    To be filled with (offset, length and bytes of the entry, length and digits of the seconds).
    """
    # One template for all entries: four times faster than to pack each command.
    key = keys.message(b"")
    option = b"$2\r\nXX\r\n" if only_there else b""
    return (
        b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b%%016x\r\n$%%d\r\n%%b\r\n$2\r\nEX\r\n$%%d\r\n%%b\r\n%b"
        % (
            5 + bool(option),
            len(key) + 16,
            key,
            option,
        )
    )


def by_score(
    key: bytes, low: int | str, high: int | str, start: int, count: int, *more: str
) -> KeyedCommand:
    """A `ZRANGE` command for the members with scores from `low` to `high`, `count` from `start` on."""
    options: tuple[str | int, ...] = (low, high, "BYSCORE", "LIMIT", start, count, *more)
    return "ZRANGE", key, *options


def zmscore(key: bytes, offsets: range) -> bytes:
    """A packed `ZMSCORE <key> <member> …`."""
    # One format for all members costs a fifth of packing each of them.
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
