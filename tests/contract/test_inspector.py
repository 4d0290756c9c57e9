"""What operators can read of a shard's index, on every kind of Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from blackbox.admin import pending
from blackbox.admin.pending import INVALID, PendingFilter, as_pending, page
from blackbox.core.interpret import refused_entry
from blackbox.core.parking import LETTERS, bands_of, parked_at
from blackbox.core.plan import Positions
from blackbox.core.request_status import RequestStatus
from blackbox.core.settlement import Settlement
from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import free_port
from blackbox.index.inspector import Inspector, Pending, ShardStats
from blackbox.index.keys import SENTINEL
from blackbox.index.payload_heads import LONG_HEAD_BYTES
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import ForeignIndex, IndexLost
from blackbox.records.refusal_causes import BROKEN_RULES
from blackbox.records.request import Reason, Record, Shard, member
from tests.contract.conftest import Backend, Opener, start_redis
from tests.contract.held import NOW_MS, PREFIX, SHARD, entry, store

NOTHING = ShardStats(None, 0, 0, None, None)


@pytest.fixture
def inspector(backend: Backend) -> Iterator[Inspector]:
    connections = backend.connections()
    inspector = Inspector(connections)
    yield inspector
    inspector.close()
    connections.disconnect()


@pytest.fixture
def index(open_index: Opener) -> ShardIndex:
    """An empty index with the positions 10 and 0."""
    index = open_index()
    index.begin(Positions(10, 0))
    return index


def test_a_shard_without_keys_has_nothing_pending(inspector: Inspector) -> None:
    assert inspector.shard_stats(SHARD, NOW_MS) == NOTHING
    assert inspector.positions(SHARD) is None
    assert inspector.pending_at(SHARD, 0) is None
    assert inspector.offset_of(SHARD, "order-1") is None


def test_the_inspector_writes_nothing(inspector: Inspector, client: redis.Redis) -> None:
    inspector.shard_stats(SHARD, NOW_MS)
    inspector.positions(SHARD)
    inspector.pending_at(SHARD, 0)
    inspector.offset_of(SHARD, "order-1")
    assert client.dbsize() == 0


def test_a_new_index_shows_its_positions(inspector: Inspector, index: ShardIndex) -> None:
    assert inspector.shard_stats(SHARD, NOW_MS) == NOTHING._replace(positions=Positions(10, 0))
    assert inspector.positions(SHARD) == Positions(10, 0)


def test_the_positions_move_with_intake_and_with_dispatch(
    inspector: Inspector, index: ShardIndex
) -> None:
    store(index, 10, 12, {10: entry(NOW_MS), 11: entry(NOW_MS)})
    assert inspector.positions(SHARD) == Positions(12, 0)
    index.settle(Settlement({10: None}, 7))
    assert inspector.positions(SHARD) == Positions(12, 7)


def test_an_index_that_was_emptied_has_no_positions(
    inspector: Inspector, index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 10, 11, {10: entry(NOW_MS)})
    client.flushall()
    assert inspector.positions(SHARD) is None
    assert inspector.shard_stats(SHARD, NOW_MS) == NOTHING


def test_shard_stats_count_due_requests_and_name_the_next_due_time(
    inspector: Inspector, index: ShardIndex
) -> None:
    dues_ms = [NOW_MS + 500, NOW_MS - 7000, NOW_MS, NOW_MS + 20]
    store(index, 10, 14, {10 + at: entry(due_ms) for at, due_ms in enumerate(dues_ms)})
    assert inspector.shard_stats(SHARD, NOW_MS) == ShardStats(
        Positions(14, 0), pending=4, due_now=2, oldest_due_ms=NOW_MS - 7000, next_due_ms=NOW_MS + 20
    )


def test_a_due_time_before_1970_counts_as_due(inspector: Inspector, index: ShardIndex) -> None:
    store(index, 10, 11, {10: entry(-5)})
    standing = inspector.shard_stats(SHARD, NOW_MS)
    assert (standing.due_now, standing.oldest_due_ms) == (1, -5)


def test_shards_do_not_mix(inspector: Inspector, index: ShardIndex) -> None:
    store(index, 10, 11, {10: entry(caller_id="order-1")})
    other = Shard(SHARD.topic, SHARD.partition + 1)
    assert inspector.positions(other) is None
    assert inspector.shard_stats(other, NOW_MS) == NOTHING
    assert inspector.pending_at(other, 10) is None
    assert inspector.offset_of(other, "order-1") is None


def test_a_pending_request_is_found_by_its_offset(inspector: Inspector, index: ShardIndex) -> None:
    asked = entry(NOW_MS + 90_000, message=b"\x00\n\xff")
    store(index, 10, 11, {10: asked})
    assert inspector.pending_at(SHARD, 10) == Pending(NOW_MS + 90_000, asked._replace(headers=[]))


def test_a_postponed_request_shows_its_next_attempt(
    inspector: Inspector, index: ShardIndex
) -> None:
    store(index, 10, 11, {10: entry(NOW_MS)})
    index.postpone({10: (NOW_MS + 4000, entry(NOW_MS)._replace(attempts=3))}, NOW_MS)
    found = inspector.pending_at(SHARD, 10)
    assert found is not None
    assert found.entry is not None
    assert (found.at_ms, found.entry.due_ms, found.entry.attempts) == (NOW_MS + 4000, NOW_MS, 3)


def test_a_delivered_request_is_not_found(inspector: Inspector, index: ShardIndex) -> None:
    store(index, 10, 11, {10: entry(caller_id="order-1")})
    index.settle(Settlement({10: "order-1"}, 1))
    assert inspector.pending_at(SHARD, 10) is None
    assert inspector.offset_of(SHARD, "order-1") is None
    assert inspector.shard_stats(SHARD, NOW_MS) == NOTHING._replace(positions=Positions(11, 1))


def test_a_request_without_its_payload_is_still_found(
    inspector: Inspector, index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 10, 11, {10: entry(NOW_MS)})
    client.delete(PREFIX.encode() + b"msg:" + member(10))
    assert inspector.pending_at(SHARD, 10) == Pending(NOW_MS, None)


def test_an_invalid_request_that_never_had_a_payload_is_shown_as_invalid(
    inspector: Inspector, index: ShardIndex
) -> None:
    bad = entry()._replace(target="", message=None, reason="not-json", left_bytes=100_000)
    store(index, 10, 11, {10: bad})

    assert inspector.pending_at(SHARD, 10) == Pending(NOW_MS, None, cause="invalid")
    [(offset, found)] = listed(inspector)
    assert (offset, found.cause) == (10, "invalid")
    status = RequestStatus("id", "TB/3@10", "pending")
    assert as_pending(status, found).detail == INVALID
    assert as_pending(replace(status, detail="not JSON"), found).detail == "not JSON"


def test_a_request_that_a_rule_refused_is_shown_with_the_rule(
    inspector: Inspector, index: ShardIndex
) -> None:
    refusal = BROKEN_RULES["most_pending"]
    large = Record(10, NOW_MS, None, b"x" * 2000, [])
    store(index, 10, 11, {10: refused_entry(large, refusal, NOW_MS)})

    [(_, found)] = listed(inspector)
    status = as_pending(RequestStatus("id", "TB/3@10", "pending"), found)
    assert (status.reason, status.detail) == (refusal.reason, refusal.detail)


def test_a_caller_id_finds_the_latest_request_with_that_id(
    inspector: Inspector, index: ShardIndex
) -> None:
    store(index, 10, 11, {10: entry(caller_id="Bestellung 1 ü")})
    assert inspector.offset_of(SHARD, "Bestellung 1 ü") == 10
    store(index, 11, 12, {11: entry(caller_id="Bestellung 1 ü")})
    assert inspector.offset_of(SHARD, "Bestellung 1 ü") == 11


def test_a_full_redis_still_answers(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, settings={"maxmemory": "64mb"})
    start_redis(server)
    try:
        with redis.Redis.from_url(server.url) as client:
            client.zadd(PREFIX + "due", {member(10): NOW_MS, SENTINEL: float("inf")})
            client.set("other", "x" * 1_000_000)
            client.config_set("maxmemory", "1mb")
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("more", "x")
            inspector = Inspector.of(server.url)
            assert inspector.shard_stats(SHARD, NOW_MS) == ShardStats(None, 1, 1, NOW_MS, None)
            assert inspector.positions(SHARD) is None
            assert inspector.pending_at(SHARD, 10) == Pending(NOW_MS, None)
    finally:
        server.stop()


def test_an_index_of_another_version_is_not_read(inspector: Inspector, client: redis.Redis) -> None:
    client.hset(PREFIX + "state", mapping={"format": "11", "requests": "1", "receipts": "1"})
    with pytest.raises(
        ForeignIndex, match="of TB-3 in Redis has format '11', but this version reads 10"
    ):
        inspector.shard_stats(SHARD, NOW_MS)
    with pytest.raises(
        ForeignIndex, match="of TB-3 in Redis has format '11', but this version reads 10"
    ):
        inspector.positions(SHARD)


QUESTIONS: dict[str, Callable[[Inspector], Any]] = {
    "shard_stats": lambda inspector: inspector.shard_stats(SHARD, NOW_MS),
    "positions": lambda inspector: inspector.positions(SHARD),
    "pending_at": lambda inspector: inspector.pending_at(SHARD, 10),
    "offset_of": lambda inspector: inspector.offset_of(SHARD, "order-1"),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_an_inspector_fails_if_redis_does_not_answer(ask: Callable[[Inspector], Any]) -> None:
    inspector = Inspector.of(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(IndexLost, match="Redis does not answer"):
        ask(inspector)


def listed(inspector: Inspector, **more: int) -> list[tuple[int, Pending]]:
    return inspector.list_pending(SHARD, NOW_MS, NOW_MS + 1000, None, 100, **more)


def test_a_list_contains_messages_only_on_request(inspector: Inspector, index: ShardIndex) -> None:
    stored = {10: entry(NOW_MS, message=b"x\n" * 100_000), 11: entry(NOW_MS + 5, message=None)}
    store(index, 10, 12, stored)
    whole = [
        (at, one.entry and one.entry.message) for at, one in listed(inspector, whole_bytes=1 << 20)
    ]
    assert whole == [(10, b"x\n" * 100_000), (11, None)]
    heads = listed(inspector)
    assert [(at, one.at_ms, one.entry and one.entry.target) for at, one in heads] == [
        (10, NOW_MS, "orders"), (11, NOW_MS + 5, "orders"),
    ]  # fmt: skip
    assert [one.entry and one.entry.message for _, one in heads] == [None, None]


def test_a_list_contains_long_headers_but_not_the_message(
    inspector: Inspector, index: ShardIndex
) -> None:
    asked = [
        entry(NOW_MS, message=b"hello")._replace(headers=[("trace", "t" * length)])
        for length in (*range(930, 990), 10_000, 60_000)
    ]
    store(index, 10, 10 + len(asked), dict(enumerate(asked, 10)))
    assert [one.entry for _, one in listed(inspector)] == [
        one._replace(message=None) for one in asked
    ]


@pytest.mark.parametrize(("whole_bytes", "count"), [(0, 1), (250_000, 2), (1 << 20, 5)])
def test_a_list_with_messages_is_limited_in_bytes(
    inspector: Inspector, index: ShardIndex, whole_bytes: int, count: int
) -> None:
    store(
        index, 10, 15, {offset: entry(NOW_MS, message=b"x" * 100_000) for offset in range(10, 15)}
    )
    found = listed(inspector, whole_bytes=whole_bytes)
    assert [offset for offset, _ in found] == list(range(10, 10 + count))


@pytest.mark.parametrize(("whole", "most_bytes"), [(True, 250_000), (False, 2500)])
def test_a_page_is_limited_in_bytes_and_the_next_page_continues(
    inspector: Inspector,
    index: ShardIndex,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
    most_bytes: int,
) -> None:
    monkeypatch.setattr(pending, "MOST_BYTES", most_bytes)
    store(
        index, 10, 15, {offset: entry(NOW_MS, message=b"x" * 100_000) for offset in range(10, 15)}
    )
    pages: list[list[int]] = []
    after: pending.Cursor | None = None
    while not pages or after is not None:
        found, after = page(inspector, [SHARD], PendingFilter(), after, 1000, whole=whole)
        pages.append([one.cursor.offset for one in found])
    assert pages == [[10, 11, 12], [13, 14]]


def test_a_list_names_a_request_with_very_long_headers_without_its_content(
    inspector: Inspector, index: ShardIndex
) -> None:
    asked = entry(NOW_MS)._replace(headers=[("trace", "t" * 100_000)])
    store(index, 10, 11, {10: asked})
    assert listed(inspector) == [(10, Pending(NOW_MS, None, LONG_HEAD_BYTES))]


@pytest.mark.parametrize(
    "backend", ["real_backend"], indirect=True
)  # the other kind of Redis does not count bytes
def test_a_list_of_large_messages_reads_little_from_redis(
    inspector: Inspector, index: ShardIndex, backend: Backend
) -> None:
    count, size = 20, 200_000
    store(index, 10, 10 + count, {10 + n: entry(NOW_MS, message=b"x" * size) for n in range(count)})

    def sent() -> int:
        told: Any = backend.client.info("stats")
        return int(told["total_net_output_bytes"])

    before = sent()
    assert len(listed(inspector)) == count
    assert sent() - before < count * 2_000


def test_parked_requests_are_listed_last_in_the_order_of_their_due_times(
    inspector: Inspector, index: ShardIndex
) -> None:
    store(index, 10, 16, {offset: entry(NOW_MS + offset) for offset in range(10, 16)})
    parked = {o: (parked_at(3 + o % 2, NOW_MS + o), entry(NOW_MS + o)) for o in range(10, 14)}
    index.postpone(parked, NOW_MS)

    def listed(wanted: PendingFilter) -> list[int]:
        after, found = None, list[int]()
        while True:
            some, after = page(inspector, [SHARD], wanted, after, 2)
            found += [one.cursor.offset for one in some]
            if after is None:
                return found

    assert listed(PendingFilter()) == [14, 15, 10, 12, 11, 13]
    assert listed(PendingFilter(from_ms=NOW_MS + 11, to_ms=NOW_MS + 14)) == [14, 12, 11, 13]
    standing = inspector.shard_stats(SHARD, NOW_MS + 14)
    assert (standing.pending, standing.due_now, standing.next_due_ms) == (6, 1, NOW_MS + 15)


def test_the_parked_requests_of_a_target_are_found_in_any_band_that_it_can_have(
    inspector: Inspector, index: ShardIndex
) -> None:
    first, second, *_, last = bands_of("orders")
    letter = entry(NOW_MS)._replace(target="orders", reason=Reason.EXPIRED)
    store(index, 10, 14, {offset: entry(NOW_MS) for offset in range(10, 14)})
    index.postpone(
        {
            10: (parked_at(first, NOW_MS), entry(NOW_MS)._replace(target="another")),
            11: (parked_at(second, NOW_MS), entry(NOW_MS)._replace(target="orders")),
            12: (parked_at(next(bands_of(LETTERS)), NOW_MS), letter),
            13: (parked_at(last, NOW_MS), entry(NOW_MS)._replace(target="third")),
        },
        NOW_MS,
    )

    found, _ = page(inspector, [SHARD], PendingFilter(target="orders"), None, 9)
    assert {one.cursor.offset for one in found} == {11, 12}
    assert inspector.bands_of(SHARD, {"orders"}) == [second]
