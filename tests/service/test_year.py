"""Requests due over a year, with the default settings: the journals stay small."""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from blackbox.embedded import EmbeddedError, EmbeddedKafka, EmbeddedRedis
from blackbox.journal.partition_reader import PartitionReader
from blackbox.records.carried import HEADER
from tests.conftest import missing
from tests.support.world import World, each_of
from tests.support.year import DAY_MS, HOUR_MS, PAST, Held, PastYear, past_broker

REQUESTS = int(os.environ.get("BLACKBOX_TEST_YEAR_REQUESTS", "300"))
STEP_MS = int(float(os.environ.get("BLACKBOX_TEST_YEAR_STEP_H", "336")) * HOUR_MS)
"""With 25 hours a request is renewed as often as by a service, which searches once an hour for requests
that are older than a day."""

DAYS = 365
EMPTIED = 5
"""How often Redis is emptied."""

SEGMENT_BYTES = max(1 << 20, 100 * REQUESTS)
"""Kafka removes whole segments only; this is about half a day of renewals."""

LARGEST_RECORD = 200

pytestmark = [pytest.mark.service, pytest.mark.timeout(300 + REQUESTS // 20)]


@pytest.fixture
def year(own_redis: EmbeddedRedis, tmp_path: Path) -> Iterator[PastYear]:
    kafka = EmbeddedKafka(tmp_path / "kafka", settings=past_broker(SEGMENT_BYTES))
    try:
        kafka.start()
    except EmbeddedError as error:
        missing(str(error))
    world = World(kafka, own_redis, tmp_path, partitions=1)
    world.kept = PAST
    with world:
        year = PastYear(world, DAYS + 1)
        yield year
        year.client.close()
    kafka.stop()


@dataclass
class Books:
    """The state of the journals during the year, step by step."""

    year: PastYear
    steps_ms: list[int] = field(default_factory=list)
    begun_ms: list[int] = field(default_factory=list)
    requests: list[Held] = field(default_factory=list)
    receipts: list[Held] = field(default_factory=list)
    renewals: Counter[int] = field(default_factory=Counter)

    def live(self, now_ms: int, *, emptied: bool) -> None:
        self.steps_ms.append(now_ms)
        self.begun_ms.append(time.time_ns() // 1_000_000)
        live = self.year.live_without_redis if emptied else self.year.live
        promoted = live(now_ms)
        assert all(done.lost == done.refused == 0 for done in promoted)
        before = self.requests[-1].end if self.requests else 0
        requests, receipts = self.year.journals()
        self.requests.append(requests)
        self.receipts.append(receipts)
        self._count_renewals(max(before, requests.start), requests.end)

    def _count_renewals(self, start: int, end: int) -> None:
        with closing(PartitionReader(self.year.access)) as reader:
            for messages, _ in reader.read(*self.year.shards[0], start, end):
                for message in messages:
                    carried = dict(message.headers() or []).get(HEADER)
                    if carried:
                        _, origin, _, is_cold = orjson.loads(carried)
                        self.renewals[origin] += is_cold

    def written_since(self, held: list[Held], step: int, since_ms: int) -> int:
        """How many records were written since some time before a step."""
        before = bisect_left(self.steps_ms, since_ms) - 1
        return held[step].end - (held[before].end if before >= 0 else 0)

    def simulated(self, at_ms: int) -> int:
        """The simulated time of a record."""
        return self.steps_ms[bisect_right(self.begun_ms, at_ms) - 1]


@pytest.mark.proof
def test_a_year_of_requests_is_delivered_once_each_and_the_journals_stay_small(
    year: PastYear,
) -> None:
    began = time.monotonic()
    dice = random.Random(7)
    countdowns_s = [dice.randrange(DAYS * DAY_MS // 1000) for _ in range(REQUESTS)]
    for number, countdown_s in enumerate(countdowns_s):
        id = f"order-{number}" if number % 20 == 0 else None
        year.ask_in(f"{number:08d}", countdown_s, id=id)
    dues = [year.began_ms + 1000 * countdown_s for countdown_s in countdowns_s]
    steps = -(-DAYS * DAY_MS // STEP_MS)
    emptied = {step * steps // (EMPTIED + 1) for step in range(1, EMPTIED + 1)}

    year.pass_to(year.began_ms)

    books = Books(year)
    for step in range(steps + 1):
        passed_ms = min(step * STEP_MS, DAYS * DAY_MS)
        books.live(year.began_ms + passed_ms, emptied=step in emptied)
        if step % max(1, steps // 20) == 0:
            _tell(books, time.monotonic() - began)

    counts = bytearray(REQUESTS)
    early = late = 0
    for message in each_of(year.world.kafka.bootstrap_servers, year.world.targets[0]):
        number = int(message.value() or b"")
        counts[number] += 1
        then_ms = books.simulated(message.timestamp()[1])
        early += then_ms < dues[number]
        late += then_ms >= dues[number] + STEP_MS
    lost, twice = counts.count(0), sum(count > 1 for count in counts)
    renewed = sum(books.renewals.values())
    print(
        f"\n{REQUESTS:,} asked, {sum(counts):,} delivered, {lost} lost, {twice} twice, {early} early, "
        f"{late} late; Redis was emptied {len(emptied)} times"
        f"\nrenewals: {renewed:,}, of a request {renewed / REQUESTS:.1f} on average and "
        f"{max(books.renewals.values())} at most"
    )
    for name, held in ("requests", books.requests), ("receipts", books.receipts):
        print(
            f"{name}: {held[-1].end:,} offsets; kept at most {max(h.count for h in held):,} in "
            f"{max(h.bytes for h in held):,} bytes, at the end {held[-1].count:,} in "
            f"{held[-1].bytes:,} bytes"
        )
    print(f"{steps + 1} steps of {STEP_MS / HOUR_MS:g} h took {time.monotonic() - began:.0f} s")

    assert (lost, twice, early, late) == (0, 0, 0, 0)
    assert year.standing() == (0, 0)
    assert not year.messages(year.world.dead_letters)
    assert year.client.info("stats")["expired_keys"] == 0, "some would be read from Kafka again"
    _assert_bounded(books, books.requests)
    _assert_bounded(books, books.receipts)


def _assert_bounded(books: Books, held: list[Held]) -> None:
    """The journals keep records of a week, plus the age of renewal and the time of a few steps."""
    settings = books.year.settings
    kept_ms = settings.retention_s * 1000 + settings.renew_after_ms + 2 * STEP_MS
    for step, (now_ms, found) in enumerate(zip(books.steps_ms, held, strict=True)):
        most = books.written_since(held, step, now_ms - kept_ms)
        when = f"after {(now_ms - books.year.began_ms) / DAY_MS:.1f} days"
        assert found.count <= most, f"{when}: {found}, and {most} were written lately"
        assert found.bytes <= most * LARGEST_RECORD + 2 * SEGMENT_BYTES, f"{when}: {found}"


def _tell(books: Books, took_s: float) -> None:
    requests, receipts = books.requests[-1], books.receipts[-1]
    days = (books.steps_ms[-1] - books.steps_ms[0]) / DAY_MS
    print(
        f"day {days:5.1f}, {took_s:5.0f} s: {books.year.standing()} hot and cold; requests "
        f"{requests.count:,} in {requests.bytes:,} bytes, receipts {receipts.count:,} in "
        f"{receipts.bytes:,} bytes; {sum(books.renewals.values()):,} renewals",
        flush=True,
    )
