"""The schema of Redis: the keys of `keys.py`, and an example from a Redis inside this process."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

import fakeredis
import redis

from blackbox.core.plan import Positions
from blackbox.index import bus, keys
from blackbox.index.keys import Keys
from blackbox.index.shard_index import ShardIndex
from blackbox.records.entry import Entry
from blackbox.records.request import Shard, member
from tests.contract.held import GRACE_S, store
from tests.docs.docstrings import docstrings_in, items_in
from tests.docs.example import DUE_MS, OFFSET, REQUEST, SHARD
from tests.docs.markdown import code, paragraphs, table
from tests.support.fakes import fake_connections

TYPES = {"string": "string", "hash": "hash", "sorted set": "zset"}
"""The types of the page, as Redis names them."""

_COLUMNS = ("key", "type", "content", "written by", "read by")
_KEY = re.compile(r"blackbox:\{.*\}:([a-z-]+(?::)?)")
_ANY = Shard("TB", 3)


def table_of_keys() -> str:
    """The keys of a shard, without their prefix."""
    prefix = Keys(_ANY).prefix.decode()
    return table(_COLUMNS, (_row(key.removeprefix(prefix), text) for key, text in _keys().items()))


def table_of_shared() -> str:
    """The keys that all shards share, and the channels."""
    every = docstrings_in(keys) | docstrings_in(bus)
    shared = {
        keys.counts("<kind>", "<name>").decode(): inspect.getdoc(keys.counts) or "",
        f"{bus.CHANNEL}<group>:<kind>": every["CHANNEL"],
    }
    return table(_COLUMNS, (_row(key, text) for key, text in shared.items()))


def table_of_state() -> str:
    return table(
        ("field", "content"), ((code(name), text) for name, text in state_fields().items())
    )


def table_of_payload() -> str:
    about = items_in(Entry.__doc__ or "")
    fields = (name for name in Entry._fields if name != "message")
    return table(("field", "content"), ((code(name), about[name]) for name in fields))


def example() -> str:
    """The output of `redis-cli` after a request was read."""
    server = fakeredis.FakeServer(server_type="redis")
    connections = fake_connections(server)
    client: Any = redis.Redis(connection_pool=connections)
    with closing(ShardIndex(SHARD, connections, grace_s=GRACE_S)) as index:
        index.load()
        index.begin(Positions(OFFSET, 88))
        store(index, OFFSET, OFFSET + 1, {OFFSET: REQUEST}, DUE_MS)
        found, name = Keys(SHARD), member(OFFSET)
        asked = [
            ("ZRANGE", found.due, "0", "-1", "WITHSCORES"),
            ("GET", found.message(name)),
            ("HMGET", found.state, "format", "requests"),
            ("GET", found.receipts),
        ]
        lines = [line for one in asked for line in _asked(client, one)]
    connections.disconnect()
    return "\n".join(f"    {line}" for line in lines)


@cache
def state_fields() -> dict[str, str]:
    """The fields of a shard's state."""
    fields = items_in(docstrings_in(Keys)["state"])
    return {name: text for name, text in fields.items() if name not in ("written", "read")}


def undocumented(client: Any) -> Iterator[str]:
    """Keys in this Redis that are not on the page, or have another type there; and fields of states."""
    prefix = Keys(_ANY).prefix.decode()
    known = {
        key.removeprefix(prefix).partition("<")[0]: _type(text) for key, text in _keys().items()
    }
    known |= {"counts": "hash"}
    for key in client.keys("*"):
        found = _KEY.match(key.decode(errors="replace"))
        kind = known.get(found[1]) if found else None
        if kind is None or client.type(key).decode() != TYPES[kind]:
            yield key.decode(errors="replace")
        if key.endswith(b"}:state"):
            yield from {name.decode() for name in client.hkeys(key)} - state_fields().keys()


@cache
def _keys() -> dict[str, str]:
    """The docstring of each key of a shard, by the name of the key."""
    one = Keys(_ANY)
    found = {one.message(b"<member>").decode(): inspect.getdoc(Keys.message) or ""}
    found |= {getattr(one, name).decode(): text for name, text in docstrings_in(Keys).items()}
    found[one.of("<caller>").decode()] = inspect.getdoc(Keys.of) or ""
    return found


def _row(key: str, docstring: str) -> tuple[str, ...]:
    by = items_in(docstring)
    content = [part for part in paragraphs(docstring) if not re.match(r"\w+ +-- ", part)]
    text = " ".join(content).partition(": ")[2].replace("->", "→")
    return code(key), _type(docstring), text, by["written"], by["read"]


def _type(docstring: str) -> str:
    return docstring.partition(":")[0]


def _asked(client: Any, command: tuple[bytes | str, ...]) -> Iterator[str]:
    words = (one.decode() if isinstance(one, bytes) else one for one in command)
    yield f"> {' '.join(words)}"
    reply = client.execute_command(*command)
    for one in reply if isinstance(reply, list) else [reply]:
        for part in one if isinstance(one, list | tuple) else [one]:
            yield from (part.decode() if isinstance(part, bytes) else f"{part:.0f}").splitlines()
