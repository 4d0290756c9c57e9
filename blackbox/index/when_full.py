"""How removals are written to a Redis that is at its `maxmemory`.

While it is full, Redis refuses every command inside a MULTI, even those that free memory. A script
may write then, if its first write is one that needs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import hiredis

from blackbox.index.connection import pack
from blackbox.index.keys import Keys

# `ZREM due ''` removes nothing. It is the first write, so that this one needs no memory.
# KEYS: state, due, receipts
# ARGV: the positions `requests` and `receipts` as seen; then commands, each as its length and parts
# returns 1, or 0 if the positions differ
_SCRIPT = b"""
if (redis.call('HGET', KEYS[1], 'format') or '') ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[1], 'requests') or '') ~= ARGV[2] then return 0 end
if (redis.call('GET', KEYS[3]) or '') ~= ARGV[3] then return 0 end
redis.call('ZREM', KEYS[2], '')
local at = 4
while ARGV[at] do
  local last = at + tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, last))
  at = last + 1
end
return 1
"""


class SeenState(NamedTuple):
    """The state of an index when it was last seen; empty: there was none."""

    format: bytes
    requests: bytes | int
    receipts: bytes | int


def in_one_script(keys: Keys, seen: SeenState, commands: Iterable[bytes]) -> bytes:
    """One packed command that runs packed `commands` if the index is still as `seen`."""
    reader = hiredis.Reader()
    reader.feed(b"".join(commands))
    arguments: list[bytes | int] = []
    while parts := reader.gets():
        arguments += (len(parts), *parts)
    return pack("EVAL", _SCRIPT, 3, keys.state, keys.due, keys.receipts, *seen, *arguments)
