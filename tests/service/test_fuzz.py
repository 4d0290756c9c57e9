"""Random and mutated records: each ends as a delivery, a pending entry or a dead letter, and the service continues.

`BLACKBOX_TEST_FUZZ` says how many records, `BLACKBOX_TEST_FUZZ_SEED` which ones.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import redis
from confluent_kafka import Message

from blackbox.config.wiring import formats
from blackbox.core.bits import Bits
from blackbox.journal.message_conversion import read_records
from blackbox.records.cancel import as_request, cancel_of, cancels, replaces
from blackbox.records.carried import carried, carry_of, original_record
from blackbox.records.request import Cancel, Invalid, Reason, Request
from tests.support.hostile import FAR_S, HOSTILE
from tests.support.world import PARTITIONS, World, each_of, read_all, until

RECORDS = int(os.environ.get("BLACKBOX_TEST_FUZZ", "3000"))
SEED = int(os.environ.get("BLACKBOX_TEST_FUZZ_SEED", "20261121"))
PATIENCE_S = 60 + RECORDS / 1000

pytestmark = [
    pytest.mark.service,
    pytest.mark.fault,
    pytest.mark.timeout(300 + RECORDS // 200),
]


@pytest.mark.parametrize(
    ("format_name", "engine"),
    [
        # The parser is the same on Spark, whose services take long to start.
        pytest.param(name, engine, marks=[pytest.mark.proof] * (engine == "spark"))
        for name in HOSTILE
        for engine in (["process", "spark"] if name == "countdown" else ["process"])
    ],
    indirect=["engine"],
)
def test_every_record_ends_as_a_delivery_an_entry_or_a_dead_letter(
    world: World, format_name: str
) -> None:
    world.format_name = format_name
    own = [world.requests, f"{world.requests}.receipts", world.dead_letters, "__consumer_offsets"]
    hostile = HOSTILE[format_name](SEED, list(world.targets), own)
    if format_name == "timer":
        world.targets = [f"{world.requests}.expired"]
    # Some of the requests are cold, so that forged records of promotion can name them.
    service = world.start_service(hot_horizon_s=FAR_S // 2).wait_ready()
    for number in range(RECORDS):
        drawn = hostile.record()
        world.send_raw(drawn.value, drawn.headers, number % PARTITIONS, key=drawn.key)
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
        f"\n{RECORDS:,} records of {format_name}, engine {world.engine}, seed {SEED}: {len(delivered):,} delivered, "
        f"{len(letters):,} dead letters, {len(pending(world, index)):,} pending, {len(ended):,} "
        "cancels and what they or later requests ended"
    )
    index.close()


def superseded(world: World, written: list[Message]) -> set[str]:
    """Cancels, and the requests that a later record of the same partition cancels or replaces."""
    format = formats(world.settings())[world.requests]
    held: dict[tuple[int | None, str], str] = {}
    ended: set[str] = set()
    for message, record in zip(written, read_records(written), strict=True):
        if carried(record.headers):
            # A forged one may take the place of a cold request, or change nothing.
            with suppress(ValueError):
                carries = format.parse(original_record(record), 2**53)
                if isinstance(carries, Request | Invalid):
                    ended |= {place(message), place(message, carry_of(record).previous)}
            continue
        is_replacement = replaces(record.headers)
        if cancels(record.headers) or (is_replacement and isinstance(cancel_of(record), Invalid)):
            ended |= {place(message)} if isinstance(cancel_of(record), Cancel) else set()
            continue
        asked = format.parse(as_request(record) if is_replacement else record, 2**53)
        if is_replacement and not isinstance(asked, Cancel):
            continue  # no drawn id is that of a request: it becomes a dead letter
        assert not (isinstance(asked, Invalid) and asked.reason is Reason.PARSER_ERROR), asked
        if isinstance(asked, Request | Cancel) and asked.caller_id is not None:
            name = message.partition(), asked.caller_id
            ended |= {held.pop(name)} if name in held else set()
            if isinstance(asked, Cancel):
                ended.add(place(message))
            else:
                held[name] = place(message)
    return ended


def place(message: Message, offset: int | None = None) -> str:
    """Of this message, or of another offset in its partition."""
    at = message.offset() if offset is None else offset
    return f"{message.topic()}/{message.partition()}@{at}"


def source(message: Message) -> str:
    """The last one: a caller may also write such a header."""
    headers: Any = message.headers()
    said: list[bytes] = [held for name, held in headers if name == "blackbox-source"]
    return said[-1].decode()


def read(world: World, index: redis.Redis) -> int:
    """How many records the indexes have read."""
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
    """The requests in the indexes, and those of the cold tier."""
    found: set[str] = set()
    for p in range(PARTITIONS):
        prefix = f"blackbox:{{{world.requests}-{p}}}:"
        names: Any = index.zrange(f"{prefix}due", "-inf", "(inf", byscore=True)
        cold: Any = index.hgetall(f"{prefix}cold")
        bits = Bits({int(segment): bitmap for segment, bitmap in cold.items()})
        found |= {f"{world.requests}/{p}@{at}" for at in (*bits, *(int(n, 16) for n in names))}
    return found
