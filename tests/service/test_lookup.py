"""How much of the journals a lookup reads, on a real broker: counted in records, not in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest
from confluent_kafka import Producer

from blackbox import Client
from blackbox.admin.admin import Admin
from blackbox.core.journal_search import NEAR, ReadLimit
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Batch
from blackbox.core.request_status import RequestStatus
from blackbox.index.inspector import Inspector
from blackbox.index.keys import Keys
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import receipts_topic
from blackbox.records.receipt import Receipt, encode
from blackbox.records.request import Shard, locate, request_id
from tests.service.conftest import Serve
from tests.service.test_api import ask, asked
from tests.service.test_low_water import keep, starts
from tests.support.world import World, until
from tests.support.year import HORIZON_S, HOUR_MS, Year

pytestmark = pytest.mark.service

MANY = 20_000


@dataclass
class Read:
    receipts: int = 0
    requests: int = 0

    def reset(self) -> None:
        self.receipts = self.requests = 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """How many records of both journals were read in this process."""
    read, receipts, requests = Read(), ShardJournal.receipts, ShardJournal.requests

    def count_receipts(
        journal: ShardJournal, start: int, end: int
    ) -> Iterator[tuple[int, Receipt]]:
        for found in receipts(journal, start, end):
            read.receipts += 1
            yield found

    def count_requests(
        journal: ShardJournal, start: int, end: int, ended: OffsetSet | None = None
    ) -> Iterator[Batch]:
        for batch in requests(journal, start, end, ended):
            read.requests += len(batch.records)
            yield batch

    monkeypatch.setattr(ShardJournal, "receipts", count_receipts)
    monkeypatch.setattr(ShardJournal, "requests", count_requests)
    return read


def write_receipts(world: World, partition: int, count: int) -> None:
    """As if so many batches of other requests had been delivered."""
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers, "linger.ms": 20}
    producer = Producer(settings | {"enable.idempotence": True})  # else a retry changes the order
    now_ms = time.time_ns() // 1_000_000
    for number in range(count):
        receipt = Receipt(now_ms, delivered={"x/0": [(10**9 + number, number)]}, read=2 * 10**9)
        shard = Shard(world.requests, partition)
        producer.produce(receipts_topic(shard.topic), encode(receipt), str(shard), partition)
        producer.poll(0)
    assert producer.flush(60) == 0


@pytest.fixture
def close_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are a second older do not count as simultaneous."""
    monkeypatch.setattr("blackbox.core.journal_search.CLOCKS_APART_MS", 200)


@pytest.fixture
def year(world: World) -> Iterator[Year]:
    year = Year(world)
    yield year
    year.forget()
    year.client.close()


@pytest.fixture
def admin(year: Year) -> Iterator[Admin]:
    admin = Admin(year.settings)
    yield admin
    admin.close()


@pytest.mark.proof
def test_a_cancel_of_an_old_request_reads_only_later_receipts(
    world: World, serve: Serve, read: Read
) -> None:
    id = ask(serve(), asked(world, 3600, id="a"))
    admin = Admin(world.settings())
    try:
        until("it is pending", lambda: getattr(admin.find(id), "state", "") == "pending")
        world.services[0].stop()
        status = admin.find(id)
        assert status is not None
        write_receipts(world, int(status.source.partition("@")[0].rpartition("/")[2]), MANY)
        serve()  # its index is now beyond them
        read.reset()
        assert getattr(admin.find(id), "state", "") == "pending"
        assert read.receipts == 0
        assert admin.cancel(id).outcome == "cancelled"
        print(f"\na cancel of a pending request: {read.receipts:,} receipts of {MANY:,}")
        assert read.receipts < 10
    finally:
        admin.close()


def test_a_request_is_cancelled_by_its_source(world: World, serve: Serve) -> None:
    service = serve()
    id = ask(service, asked(world, 3600))
    until("it is pending", lambda: service.get(f"/requests/{id}").json()["state"] == "pending")
    place = service.get("/requests").json()["requests"][0]["source"]
    assert service.get(f"/requests/{place}").json()["id"] == id
    assert service.delete(f"/requests/{place}").json()["outcome"] == "cancelled"
    assert service.get(f"/requests/{world.requests}/99@1").status_code == 404
    assert service.delete(f"/requests/{world.requests}/0@99999").status_code == 404


@pytest.mark.proof
@pytest.mark.usefixtures("close_clocks")
def test_an_outcome_is_searched_near_the_write_time_and_the_due_time(
    world: World, year: Year, admin: Admin, read: Read
) -> None:
    write_receipts(world, 0, MANY)
    ended_ms = int(time.time() * 1000)
    until("they are further back", lambda: int(time.time() * 1000) > ended_ms + 500)
    now_ms = int(time.time() * 1000)
    year.ask("refused", now_ms, topic="no topic")
    year.ask("hi", now_ms + 10_000)
    until("the first is written", lambda: int(time.time() * 1000) > now_ms + 500)
    year.pass_to(int(time.time() * 1000))
    write_receipts(world, 0, MANY)
    until("the second is due", lambda: int(time.time() * 1000) > now_ms + 10_000)
    year.pass_to(int(time.time() * 1000))
    write_receipts(world, 0, MANY)
    read.reset()
    states = [found(admin, year, offset).state for offset in (0, 1)]
    print(f"\ntwo outcomes: {read.receipts:,} receipts of {3 * MANY:,}")
    assert states == ["invalid", "delivered"]
    assert read.receipts < 50


def test_a_pending_carried_request_is_found_without_reading_the_journals(
    year: Year, admin: Admin, read: Read
) -> None:
    due_ms = year.began_ms + 9 * HOUR_MS
    for number in range(50):
        year.ask(f"far{number}", due_ms + number // 25, id="named" if number == 30 else None)
    year.pass_to(year.began_ms)
    assert year.promote(due_ms + 1 - HORIZON_S * 1000) == 50
    year.pass_to(due_ms - HORIZON_S * 1000)
    fill(year, MANY)
    for offset in (0, 7, 30, 49):
        read.reset()
        status = found(admin, year, offset)
        print(f"\n{status.source}: {read.receipts:,} receipts, {read.requests:,} requests")
        assert (status.state, status.id) == ("pending", request_id(year.shards[0], offset))
        assert status.carried is not None
        assert (read.receipts, read.requests) == (0, 0)


@pytest.mark.proof
@pytest.mark.usefixtures("close_clocks")
def test_the_outcome_of_a_carried_request_is_searched_near_its_promotion(
    world: World, read: Read
) -> None:
    year = Year(world, horizon_s=3)
    admin = Admin(year.settings)
    due_ms = int(time.time() * 1000) + 9000
    try:
        year.ask("far", due_ms)
        year.pass_to(int(time.time() * 1000))
        assert year.standing() == (0, 1)
        fill(year, MANY)
        until("it is within the horizon", lambda: int(time.time() * 1000) > due_ms - 3000)
        assert year.promote(int(time.time() * 1000)) == 1
        until("it is due", lambda: int(time.time() * 1000) > due_ms)
        year.pass_to(int(time.time() * 1000))
        fill(year, MANY)
        read.reset()
        status = found(admin, year, 0)
        print(f"\n{read.receipts:,} receipts and {read.requests:,} requests of {2 * MANY:,}")
        assert status.state == "delivered"
        assert read.receipts < 50
        assert read.requests <= NEAR
    finally:
        admin.close()
        year.forget()
        year.client.close()


def test_a_lookup_beyond_its_read_limit_is_undetermined_and_cancels_nothing(
    year: Year, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    year.ask("ended", year.began_ms + HOUR_MS // 2, id="a")
    year.cancel("a")
    fill(year, 2 * NEAR)
    year.pass_to(year.began_ms)
    assert found(admin, year, 0).state == "ended"
    monkeypatch.setattr("blackbox.admin.lookup.ReadLimit", partial(ReadLimit, records=1000))
    status = found(admin, year, 0)
    assert (status.state, "blackbox audit" in (status.detail or "")) == ("undetermined", True)
    done = admin.cancel(status.id)
    assert (done.outcome, done.request and done.request.state) == ("undetermined", "undetermined")
    without_cold_tier = Admin(year.world.settings(hot_horizon_s=0))
    try:
        year.client.hdel(Keys(year.shards[0]).state, "cold")
        status = found(without_cold_tier, year, 0)
        assert status.state == "over"
        assert without_cold_tier.cancel(status.id).outcome == "too-late"
    finally:
        without_cold_tier.close()


def found(admin: Admin, year: Year, offset: int) -> RequestStatus:
    status = admin.find(request_id(year.shards[0], offset))
    assert status is not None
    return status


def fill(year: Year, count: int) -> None:
    """Both journals with so many records of others."""
    write_receipts(year.world, 0, count)
    for _ in range(count):
        year.world.send_raw(json.dumps({"id": "nobody", "cancel": True}), [], 0)
    year.world.flush()


@pytest.mark.proof
def test_a_cold_request_without_its_first_record_is_found_by_its_id(
    world: World, serve: Serve
) -> None:
    keep(world, world.requests, retention_ms=-1)
    service = serve(hot_horizon_s=4, renew_after_s=4, retention_s=1, trim_interval_s=1)
    ids = [ask(service, asked(world, 300, message=f"{number}")) for number in range(4)]
    places = [locate(id, [world.requests]) for id in ids]

    def are_gone() -> bool:
        first = starts(world, world.requests)
        return all(first[shard.partition] > offset for shard, offset in places)

    until("their records are removed", are_gone)
    world.services[-1].stop()
    # A replacement written during a renewal is too late; nothing is renewed here.
    service = serve(hot_horizon_s=4, renew_after_s=3600)

    found = service.get(f"/requests/{ids[0]}").json()
    assert (found["state"], found["id"]) == ("pending", ids[0])
    assert service.delete(f"/requests/{ids[0]}").json()["outcome"] == "cancelled"
    assert (
        service.patch(f"/requests/{ids[1]}", json={"countdown": 0}).json()["outcome"]
        == "rescheduled"
    )
    with Client(world.kafka.bootstrap_servers, caller="t", request_topic=world.requests) as client:
        assert client.get(ids[2]).state == "pending"
        client.reschedule(ids[2], timedelta(0))
        client.cancel(ids[3])
    until("it is cancelled", lambda: service.get(f"/requests/{ids[3]}").json()["state"] == "ended")
    world.services[-1].stop()
    serve(hot_horizon_s=4, renew_after_s=4)  # a cancelled request ends when it would be renewed
    inspector = Inspector.of(world.redis.url)
    until("no request is cold", lambda: not any(inspector.cold(shard)[1] for shard, _ in places))
    until("both are delivered", lambda: len(world.received(world.targets[0])) == 2)
    assert sorted(m.value() or b"" for m in world.received(world.targets[0])) == [b"1", b"2"]
