"""Requests due far ahead wait in Kafka, are promoted in time, once each, and can be ended before."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from blackbox.admin.admin import Admin
from blackbox.admin.changes import Changes
from blackbox.admin.lookup import StatusLookup
from blackbox.cli.terminal import instant
from blackbox.engine import promoter
from blackbox.engine.metrics import Metrics
from blackbox.engine.promoter import PromotionJob
from blackbox.index.inspector import Inspector
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.clock import Clock
from blackbox.records.request import Shard, request_id
from tests.service.test_cli import blackbox
from tests.support.world import PARTITIONS, World, until
from tests.support.year import DAY_MS, HORIZON_S, HOUR_MS, Year

REQUESTS = int(os.environ.get("BLACKBOX_TEST_COLD", "2000"))
KILLS = int(os.environ.get("BLACKBOX_TEST_COLD_KILLS", "2"))
KILLED_WITHIN_S = float(os.environ.get("BLACKBOX_TEST_COLD_KILLED_WITHIN_S", "1.2"))

pytestmark = [pytest.mark.service, pytest.mark.timeout(300 + REQUESTS // 1000)]
STEPS = 4


@pytest.fixture
def year(world: World) -> Iterator[Year]:
    year = Year(world)
    yield year
    year.forget()
    year.client.close()


def test_a_cold_request_is_not_in_redis_and_is_delivered_on_time_with_its_id(year: Year) -> None:
    now_ms = year.began_ms
    year.ask("near", now_ms + HOUR_MS // 2)
    year.ask("far", now_ms + 9 * HOUR_MS)
    year.pass_to(now_ms)
    assert year.standing() == (1, 1)

    assert year.promote(now_ms + 5 * HOUR_MS) == 0
    assert year.promote(now_ms + 8 * HOUR_MS) == 1
    year.pass_to(now_ms + 8 * HOUR_MS)
    assert (year.standing(), year.delivered()) == ((1, 0), ["near"])
    year.pass_to(now_ms + 9 * HOUR_MS)

    assert (year.standing(), year.delivered()) == ((0, 0), ["far", "near"])
    [far] = [m for m in year.messages() if m.value() == b"far"]
    headers = dict(far.headers() or [])
    assert headers["blackbox-id"] == request_id(year.shards[0], 1).encode()
    assert headers["blackbox-due-ms"] == str(now_ms + 9 * HOUR_MS).encode()
    assert "blackbox-carried" not in headers


@pytest.mark.proof
def test_killed_repeated_and_late_promotions_deliver_each_request_once(
    year: Year,
) -> None:
    dice = random.Random(7)
    now_ms = year.began_ms
    year.shards = [Shard(year.world.requests, partition) for partition in range(PARTITIONS)]
    dues = [now_ms + dice.randrange(365 * DAY_MS) for _ in range(REQUESTS)]
    cancelled = {n for n in range(0, REQUESTS, 20) if dues[n] > now_ms + 2 * HOUR_MS}
    for number, due_ms in enumerate(dues):
        id = f"order-{number}" if number in cancelled else None
        year.ask(f"{number:08d}", due_ms, id=id, partition=number % PARTITIONS)
    year.pass_to(now_ms)
    for number in cancelled:
        year.cancel(f"order-{number}", number % PARTITIONS)
    hot = sum(year.standing(shard)[0] for shard in range(PARTITIONS))
    took_ms = time.time_ns() // 1_000_000 - now_ms
    surely = sum(due_ms - now_ms <= HOUR_MS for due_ms in dues)
    assert surely <= hot <= sum(due_ms - now_ms <= HOUR_MS + took_ms for due_ms in dues)
    print(f"\n{REQUESTS:,} requests: {hot:,} hot, Redis uses {year.redis_bytes():,} bytes")

    for step in range(1, STEPS + 1):
        then_ms = now_ms + step * 365 * DAY_MS // STEPS
        for _ in range(KILLS):
            year.promote_killed(then_ms, dice.uniform(0.3, KILLED_WITHIN_S))
        near = year.promote(then_ms)
        year.promote(then_ms)
        year.pass_to(then_ms)
        counts = year.counts(REQUESTS)
        print(f"after {step * 365 // STEPS} days: {near:,} came near, {sum(counts):,} delivered")
        for number, due_ms in enumerate(dues):
            is_due = due_ms <= then_ms and number not in cancelled
            assert counts[number] == is_due, f"{number}, due {due_ms}: {counts[number]} times"

    assert all(year.standing(shard) == (0, 0) for shard in range(PARTITIONS))


def test_promotion_uses_several_transactions_and_skips_refused_records(
    year: Year, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("blackbox.core.promotion.CARRIED_AT_ONCE", 3)
    due_ms = year.began_ms + 9 * HOUR_MS
    for number in range(10):
        year.ask(f"m{number}", due_ms, id=f"m{number}")
    year.ask("large".ljust(2000, "."), due_ms)
    year.ask("last", due_ms)
    year.pass_to(year.began_ms)
    set_topic(year, "max.message.bytes", 1500)

    assert year.promote(year.began_ms + 8 * HOUR_MS) == 11
    assert "/0@10: cannot be promoted or renewed" in caplog.text

    set_topic(year, "max.message.bytes", 10_000)
    assert year.promote(year.began_ms + 8 * HOUR_MS) == 1
    year.pass_to(due_ms)
    assert len(year.delivered()) == 12


def test_a_cancel_during_a_promotion_ends_the_request(
    year: Year, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = year.began_ms
    year.ask("cancelled", now_ms + 9 * HOUR_MS, id="a")
    year.ask("kept", now_ms + 9 * HOUR_MS, id="b")
    year.pass_to(now_ms)
    requests = ShardJournal.requests
    asked: list[int] = []

    def cancelled_meanwhile(journal: ShardJournal, start: int, end: int) -> Iterator[object]:
        yield from requests(journal, start, end)
        if not asked:
            asked.append(start)
            year.cancel("a")
            year.world.flush()

    monkeypatch.setattr(ShardJournal, "requests", cancelled_meanwhile)
    assert year.promote(now_ms + 8 * HOUR_MS) == 1
    monkeypatch.undo()
    year.forget()  # even an index that never had the cold request does not deliver it
    year.pass_to(now_ms + 9 * HOUR_MS)

    assert year.delivered() == ["kept"]


def test_requests_are_promoted_once_while_a_callers_transaction_stays_open(year: Year) -> None:
    now_ms = year.began_ms
    year.ask("far", now_ms + 9 * HOUR_MS)
    year.pass_to(now_ms)
    servers = {"bootstrap.servers": year.world.kafka.bootstrap_servers}
    caller = Producer(servers | {"transactional.id": f"{year.world.requests}-caller"})
    caller.init_transactions(30)
    caller.begin_transaction()
    caller.produce(year.world.requests, b"{}", partition=0)
    caller.flush(30)

    assert year.promote(now_ms + 8 * HOUR_MS) == 1
    assert year.promote(now_ms + 8 * HOUR_MS) == 0  # the transaction hides the carried record
    caller.abort_transaction(30)
    year.pass_to(now_ms + 9 * HOUR_MS)

    assert year.delivered() == ["far"]
    assert year.standing() == (0, 0)


@pytest.mark.parametrize("at_hour", [0, 8])
def test_a_cold_request_can_be_cancelled_and_replaced(year: Year, at_hour: int) -> None:
    now_ms = year.began_ms
    then_ms = now_ms + at_hour * HOUR_MS
    for name in ("cancelled", "replaced"):
        year.ask(name, now_ms + 9 * HOUR_MS, id=name)
    year.pass_to(now_ms)
    if at_hour:
        assert year.promote(then_ms) == 2
        year.pass_to(then_ms)
    year.cancel("cancelled")
    year.ask("new", then_ms + 9 * HOUR_MS, id="replaced")
    year.pass_to(then_ms)
    assert sum(year.standing()) == 1

    year.promote(then_ms + 9 * HOUR_MS)
    year.pass_to(then_ms + 9 * HOUR_MS)

    assert year.delivered() == ["new"]


@pytest.mark.proof
def test_a_lost_redis_is_rebuilt_with_both_tiers_at_any_moment(year: Year) -> None:
    now_ms = year.began_ms
    for hour in range(2, 7):
        year.ask(f"m{hour:02d}", now_ms + hour * HOUR_MS, id=f"m{hour}" if hour % 2 else None)
    year.pass_to(now_ms)
    for hour in range(1, 7):
        then_ms = now_ms + hour * HOUR_MS
        year.promote(then_ms)
        year.forget()
        year.pass_to(then_ms)
        assert year.delivered() == [f"m{due:02d}" for due in range(2, hour + 1)]


@pytest.mark.parametrize("horizon_s", [0, 100 * HORIZON_S, 1])
def test_another_horizon_after_a_lost_redis_delivers_nothing_twice(
    year: Year, horizon_s: int
) -> None:
    now_ms = year.began_ms
    for hour in range(2, 12):
        year.ask(f"m{hour:02d}", now_ms + hour * HOUR_MS)
    year.pass_to(now_ms)
    for hour in range(3, 7):  # the promotion of m02 is late
        year.promote(now_ms + hour * HOUR_MS)
        year.pass_to(now_ms + hour * HOUR_MS)
    year.forget()
    year.settings = year.settings.model_copy(update={"hot_horizon_s": horizon_s})
    year.pass_to(now_ms + 6 * HOUR_MS)
    year.promote(now_ms + 11 * HOUR_MS)
    year.pass_to(now_ms + 11 * HOUR_MS)

    assert year.delivered() == [f"m{hour:02d}" for hour in range(2, 12)]


def test_a_cold_request_is_renewed_before_kafka_removes_it(year: Year) -> None:
    now_ms = year.began_ms
    year.ask("far", now_ms + 99 * DAY_MS, id="far")
    year.ask("gone", now_ms + 99 * DAY_MS, id="gone")
    year.pass_to(now_ms)
    keep(year, 8 * DAY_MS)
    year.promote(now_ms + 3 * DAY_MS)
    assert last_offset(year) == 2
    year.promote(now_ms + 5 * DAY_MS)
    year.pass_to(now_ms + 5 * DAY_MS)
    year.cancel("gone")
    year.pass_to(now_ms + 5 * DAY_MS)
    assert year.standing() == (0, 1)

    remove_up_to(year, 2)
    year.forget()  # the rebuild starts after the request's own record
    year.pass_to(now_ms + 6 * DAY_MS)
    assert year.standing() == (0, 1)
    keep(year, -1)
    year.promote(now_ms + 99 * DAY_MS)
    year.pass_to(now_ms + 99 * DAY_MS)

    assert year.delivered() == ["far"]
    [far] = year.messages()
    assert dict(far.headers() or [])["blackbox-id"] == request_id(year.shards[0], 0).encode()


def test_cold_requests_that_kafka_removed_are_reported_as_lost(
    year: Year, caplog: pytest.LogCaptureFixture
) -> None:
    year.ask("far", year.began_ms + 99 * DAY_MS)
    year.ask("kept", year.began_ms + 99 * DAY_MS)
    year.pass_to(year.began_ms)
    remove_up_to(year, 1)
    year.promote(year.began_ms + 99 * DAY_MS)

    assert "retention removed 1 cold requests" in caplog.text
    year.pass_to(year.began_ms + 99 * DAY_MS)
    assert year.delivered() == ["kept"]
    [letter] = year.messages(year.world.dead_letters)
    assert dict(letter.headers() or [])["blackbox-reason"] == b"payload-lost"


def test_a_service_shows_how_many_cold_requests_kafka_removed(year: Year) -> None:
    year.ask("far", year.began_ms + 99 * DAY_MS)
    year.ask("kept", year.began_ms + 99 * DAY_MS)
    year.pass_to(year.began_ms)
    remove_up_to(year, 1)
    metrics = Metrics()
    for removed in (1, 0):  # the second promotion finds it ended by the first
        PromotionJob(year.settings, year.access, metrics, Clock(), lambda: year.shards)._run()

        shown = {
            reason: metrics.registry.get_sample_value(
                "blackbox_cold_unpromotable", {"shard": str(year.shards[0]), "reason": reason}
            )
            for reason in ("removed", "refused")
        }
        assert shown == {"removed": removed, "refused": 0}


def test_a_service_shows_for_how_long_promotion_has_failed(
    year: Year, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic_s = 1000.0
    monkeypatch.setattr(promoter, "time", SimpleNamespace(monotonic=lambda: monotonic_s))
    metrics = Metrics()
    promote = PromotionJob(
        year.settings, year.access, metrics, Clock(), shards=lambda: year.shards
    )._run

    def age_s() -> float | None:
        shard = {"shard": str(year.shards[0])}
        return metrics.registry.get_sample_value("blackbox_promotion_age_seconds", shard)

    promote()  # there is no index yet
    monotonic_s += 3600
    promote()
    assert age_s() == 3600

    year.pass_to(year.began_ms)
    monotonic_s += 120
    promote()
    assert age_s() == 0


@pytest.mark.parametrize(
    "header",
    [
        b"", b"[0,0,1,false]x", b"[7,0,1,false]", b"[0,0,1]", b"null",
        b"[0,0,18446744073709551615,false]", b"[0,0,9223372036854775807,true]",
        b"[0,0,9007199254740992,false]", b"[0,0,43980465111040,false]",
    ],
)  # fmt: skip
def test_a_record_with_a_forged_header_becomes_a_dead_letter(year: Year, header: bytes) -> None:
    request = json.dumps({"topic": year.world.targets[0], "message": "x", "countdown": 0})
    year.world.send_raw(request, [], 0)
    year.world.send_raw(request, [("blackbox-carried", header)], 0)
    year.pass_to(year.began_ms + DAY_MS)

    assert year.delivered() == ["x"]
    [letter] = year.messages(year.world.dead_letters)
    headers = dict(letter.headers() or [])
    assert headers["blackbox-reason"] == b"bad-headers"
    assert b"only blackbox may write it" in (headers["blackbox-detail"] or b"")


def test_a_cold_request_is_found_by_its_id_before_and_after_promotion(year: Year) -> None:
    now_ms = year.began_ms
    year.ask("far", now_ms + 9 * HOUR_MS)
    year.pass_to(now_ms)
    registry = StatusLookup(year.settings)
    registry.count_partitions()
    shard = year.shards[0]
    cold = registry.status(shard, 0)
    assert (cold.state, cold.is_cold, cold.due_ms) == ("pending", True, now_ms + 9 * HOUR_MS)
    year.promote(now_ms + 8 * HOUR_MS)
    year.pass_to(now_ms + 8 * HOUR_MS)
    assert (registry.status(shard, 0).state, registry.status(shard, 0).is_cold) == (
        "pending",
        False,
    )
    listed = blackbox(year.environment | {"COLUMNS": "200"}, "pending")
    assert request_id(shard, 0) in listed.out
    assert instant(now_ms + 9 * HOUR_MS) in listed.out
    assert blackbox(year.environment, "pending", "--json").json["id"] == request_id(shard, 0)
    year.pass_to(now_ms + 9 * HOUR_MS)

    status = registry.status(shard, 0)
    registry.close()
    assert (status.state, status.id) == ("delivered", request_id(shard, 0))


def test_a_request_promoted_while_it_is_rescheduled_is_rescheduled(
    year: Year, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = year.began_ms
    year.ask("far", now_ms + 9 * HOUR_MS)
    year.pass_to(now_ms)
    write = Changes._write_replacement

    def write_once_carried_on(changes: Changes, *terms: Any) -> int:
        year.promote(now_ms + 8 * HOUR_MS)
        year.pass_to(now_ms + 8 * HOUR_MS)
        new = write(changes, *terms)
        year.pass_to(now_ms + 8 * HOUR_MS)
        return new

    monkeypatch.setattr(Changes, "_write_replacement", write_once_carried_on)
    admin = Admin(year.settings)
    done = admin.reschedule(request_id(year.shards[0], 0), at=now_ms + 10 * HOUR_MS)
    admin.close()
    assert done.request is not None
    assert (done.outcome, done.request.due_ms) == ("rescheduled", now_ms + 10 * HOUR_MS)
    year.pass_to(now_ms + 9 * HOUR_MS)
    assert year.delivered() == []
    year.promote(now_ms + 9 * HOUR_MS)
    year.pass_to(now_ms + 10 * HOUR_MS)
    assert year.delivered() == ["far"]


@pytest.mark.proof
def test_a_service_promotes_requests_automatically(world: World) -> None:
    world.start_service(hot_horizon_s=4).wait_ready()
    world.ask(600, within_s=12)
    inspector = Inspector.of(world.redis.url)
    shards = [Shard(world.requests, partition) for partition in range(PARTITIONS)]
    until("some are cold", lambda: sum(inspector.shard_stats(s, 0).cold for s in shards) > 100)
    inspector.close()

    verdict = world.wait_delivered()

    assert verdict.is_exact, verdict


def keep(year: Year, retention_ms: int) -> None:
    set_topic(year, "retention.ms", retention_ms)


def set_topic(year: Year, name: str, value: int) -> None:
    admin = AdminClient({"bootstrap.servers": year.world.kafka.bootstrap_servers})
    entry = ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, year.world.requests, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()


def last_offset(year: Year) -> int:
    journal = ShardJournal(year.shards[0], year.access)
    try:
        return journal.request_bounds().end
    finally:
        journal.close()


def remove_up_to(year: Year, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": year.world.kafka.bootstrap_servers})
    places = [TopicPartition(year.world.requests, 0, offset)]
    for future in admin.delete_records(places).values():
        future.result()
