"""Random and mutated records: each ends as a delivery, a pending entry or a dead letter, and nothing stops.

`BLACKBOX_TEST_FUZZ` says how many records, `BLACKBOX_TEST_FUZZ_SEED` which ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import redis
from confluent_kafka import Message

from blackbox.cold import carried
from blackbox.connect import formats
from blackbox.journal.records import read_records
from blackbox.request import Cancel, Request
from tests.world import PARTITIONS, World, both_engines, each_of, read_all, until

RECORDS = int(os.environ.get("BLACKBOX_TEST_FUZZ", "3000"))
SEED = int(os.environ.get("BLACKBOX_TEST_FUZZ_SEED", "20261121"))
PATIENCE_S = 60 + RECORDS / 1000
FAR_S = 86_400
NAMES = 50

pytestmark = [
    pytest.mark.service,
    pytest.mark.fault,
    pytest.mark.timeout(300 + RECORDS // 200),
    both_engines,
]

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 1e308, -1e308, 2**63, 2**64, 10**40, float("nan"), float("inf"),
    "", " ", "\x00", "\x1b[31m", "\u202e", "\ud800", "a\nb", "{}", "90", "x" * 300, "é" * 200, "__x",
    "..", [], {}, [[]], {"a": None}, {"topic": "t"}, [1, "2", None],
]  # fmt: skip
FIELDS = (
    "topic", "message", "countdown", "at", "id", "cancel", "key", "headers", "encoding",
    "expires_after", "Topic", "", "\x00", "x" * 300,
)  # fmt: skip
CHARACTERS = b'{}[]":,\\u0000\x00\xff\xc3\xed\xa0\x80 \n\t-+.eE1truefalsenull'


class Hostile:
    """Draws records: plain ones, odd ones, mutated ones, noise."""

    def __init__(self, seed: int, targets: list[str], own: list[str]) -> None:
        self._random = Random(seed)
        self._targets = targets
        self._own = own

    def value(self) -> bytes | None:
        draw = self._random
        kinds: list[Callable[[], bytes | None]] = [
            self._plain, self._plain, self._odd, self._mutated, self._mutated, self._named,
            self._noise,
        ]  # fmt: skip
        return draw.choice(kinds)()

    def headers(self) -> list[tuple[str, bytes | None]]:
        draw = self._random
        names = ["CALLER_SERVICE", "trace", "blackbox-id", "blackbox-carried", "", "\x00", "é"]
        return [
            (draw.choice(names), draw.choice([None, b"", b"\xff", b"[1]", b"shop"]))
            for _ in range(draw.choice([0, 0, 1, 1, 2, 5]))
        ]

    def key(self) -> bytes | None:
        return self._random.choice([None, b"", b"k", b"\xff\x00", b"long" * 100])

    def _asked(self) -> dict[str, Any]:
        draw = self._random
        return {
            "topic": draw.choice(self._targets),
            "message": draw.choice(["hi", "", "é", None, 1, {"a": [1.0, "b"]}, "x" * 1000]),
            "countdown": draw.choice([0, -3, 0.2, 1, FAR_S]),
        }

    def _plain(self) -> bytes:
        return json.dumps(self._asked()).encode()

    def _named(self) -> bytes:
        name = {"id": f"order-{self._random.randrange(NAMES)}"}
        asked = self._asked() | name if self._random.random() < 0.7 else name | {"cancel": True}
        return json.dumps(asked).encode()

    def _odd(self) -> bytes:
        draw = self._random
        asked = self._asked()
        if draw.random() < 0.1:
            asked["topic"] = draw.choice(self._own)
        for _ in range(draw.randint(1, 3)):
            asked[draw.choice(FIELDS)] = draw.choice(ODD)
        for _ in range(draw.choice([0, 0, 1])):
            del asked[draw.choice(list(asked))]
        return json.dumps(asked).encode()

    def _mutated(self) -> bytes:
        draw = self._random
        value = bytearray(draw.choice([self._plain, self._named, self._odd])())
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(value) + 1)
            match draw.randrange(4):
                case 0:
                    value[at : at + 1] = draw.choices(CHARACTERS, k=1)
                case 1:
                    value[at:at] = draw.choices(CHARACTERS, k=draw.randint(1, 4))
                case 2:
                    del value[at : at + draw.randint(1, 8)]
                case _:
                    value[at:at] = value[at : at + draw.randint(1, 40)]
        return bytes(value)

    def _noise(self) -> bytes | None:
        draw = self._random
        return draw.choice([None, b"", b"[" * 5000, draw.randbytes(draw.randint(1, 300))])


def test_whatever_is_written_ends_as_a_delivery_an_entry_or_a_dead_letter(world: World) -> None:
    own = [world.requests, f"{world.requests}.receipts", world.dead_letters, "__consumer_offsets"]
    hostile = Hostile(SEED, world.targets, own)
    service = world.start_service().wait_ready()
    for number in range(RECORDS):
        world.send_raw(hostile.value(), hostile.headers(), number % PARTITIONS, key=hostile.key())
    world.flush()

    written = list(each_of(world.kafka.bootstrap_servers, world.requests))
    assert len(written) == RECORDS, f"seed {SEED}"
    index = redis.Redis.from_url(world.redis.url)

    ended = superseded(world, written)
    places = {place(one) for one in written} - ended
    came_out: set[str] = set()

    def all_accounted_for() -> bool:
        if read(world, index) < RECORDS or overdue(world, index):
            return False
        entries = pending(world, index)
        came_out.update(map(source, world.received()[len(came_out) :]))
        return places <= entries | came_out

    until(f"every record is accounted for, seed {SEED}", all_accounted_for, PATIENCE_S)
    assert service.get("/livez")[0] == 200
    assert service.get("/readyz")[0] == 200
    servers = world.kafka.bootstrap_servers
    delivered = [source(one) for one in each_of(servers, *world.targets)]
    letters = [source(one) for one in read_all(servers, world.dead_letters)]
    twice = len(delivered) + len(letters) - len({*delivered, *letters})
    assert twice == 0, f"something came out twice, seed {SEED}"
    print(
        f"\n{RECORDS:,} records, engine {world.engine}, seed {SEED}: {len(delivered):,} delivered, "
        f"{len(letters):,} dead letters, {len(pending(world, index)):,} pending, {len(ended):,} "
        "cancels and what they or later requests ended"
    )
    index.close()


def superseded(world: World, written: list[Message]) -> set[str]:
    """Cancels, and the requests that a later record of the same partition cancels or replaces."""
    contract = formats(world.settings())[world.requests]
    held: dict[tuple[int | None, str], str] = {}
    ended: set[str] = set()
    for message, record in zip(written, read_records(written), strict=True):
        if carried(record.headers):
            continue
        asked = contract.parse(record, 2**53)
        if isinstance(asked, Request | Cancel) and asked.caller_id is not None:
            name = message.partition(), asked.caller_id
            ended |= {held.pop(name)} if name in held else set()
            if isinstance(asked, Cancel):
                ended.add(place(message))
            else:
                held[name] = place(message)
    return ended


def place(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}@{message.offset()}"


def source(message: Message) -> str:
    """The last one: a caller may write such a header, too."""
    headers: Any = message.headers()
    said: list[bytes] = [held for name, held in headers if name == "blackbox-source"]
    return said[-1].decode()


def read(world: World, index: redis.Redis) -> int:
    """How many records the indexes know."""
    states = (f"blackbox:{{{world.requests}-{p}}}:state" for p in range(PARTITIONS))
    found: list[Any] = [index.hget(state, "requests") for state in states]
    return sum(int(held or 0) for held in found)


def overdue(world: World, index: redis.Redis) -> int:
    """How many entries are due by now."""
    now: Any = index.time()
    names = (f"blackbox:{{{world.requests}-{p}}}:due" for p in range(PARTITIONS))
    found: list[Any] = [index.zcount(name, "-inf", now[0] * 1000) for name in names]
    return sum(found)


def pending(world: World, index: redis.Redis) -> set[str]:
    found: set[str] = set()
    for p in range(PARTITIONS):
        names: Any = index.zrange(f"blackbox:{{{world.requests}-{p}}}:due", 0, -1)
        found |= {f"{world.requests}/{p}@{int(name, 16)}" for name in names}
    return found
