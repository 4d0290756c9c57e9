"""Follow-ups of schedules and recurring requests, and when they are superseded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson
import pytest

from blackbox.core import follow_ups as follow_ups_module
from blackbox.core.follow_ups import FollowUps
from blackbox.core.plan import Batch, Bounds
from blackbox.formats import Options, make_format
from blackbox.records import recurrence
from blackbox.records.entry import Entry
from blackbox.records.receipt import Places
from blackbox.records.request import (
    Headers,
    Invalid,
    Reason,
    Record,
    Request,
    Shard,
    request_id,
)

SHARD = Shard("schedules", 2)
CONTRACT = make_format(
    "scheduler", Options(max_countdown_s=1000, own_topics=lambda topic: False, topic="schedules")
)
ENTRY = Entry("videos", b"on", 90_000, b"vid1", [("scheduler-key", "video-1")], caller_id="video-1")
OWN: Headers = [("scheduler-epoch", b"90"), ("blackbox-source", b"schedules/2@3")]


class Log:
    """The request topic from offset 0 on, including records that may never be committed."""

    def __init__(self, *records: tuple[bytes, bytes | None, Headers]) -> None:
        self._records = [Record(o, 1000, *record) for o, record in enumerate(records)]

    def request_bounds(self) -> Bounds:
        return Bounds(0, max((record.offset + 1 for record in self._records), default=0))

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        yield Batch(start, end, self._records[start:end])


def follow_ups(log: Log | None = None) -> FollowUps:
    return FollowUps(SHARD, CONTRACT, log or Log(), "history")


def superseded(log: Log, *, position: int, tombstones: Places) -> list[int]:
    found = follow_ups(log).superseded(position, {3: ENTRY}, tombstones)
    assert all(reason == Reason.UNREACHABLE for reason, _ in found.values())
    return list(found)


def test_a_tombstone_has_the_key_the_partition_and_the_headers_of_its_schedule() -> None:
    [tombstone] = follow_ups().requests({3: ENTRY}, 0)
    assert (tombstone.topic, tombstone.partition) == ("schedules", 2)
    assert (tombstone.key, tombstone.value) == (b"video-1", None)
    assert [name for name, _ in tombstone.headers] == [
        "scheduler-key", "blackbox-id", "blackbox-due-ms", "blackbox-source",
    ]  # fmt: skip
    assert tombstone.headers[-1] == ("blackbox-source", "schedules/2@3")


def test_the_history_topic_gets_the_delivered_message() -> None:
    [copy] = follow_ups().copies({3: ENTRY})
    assert (copy.topic, copy.partition, copy.key, copy.value) == ("history", -1, b"vid1", b"on")
    assert copy.headers[-1] == ("blackbox-source", "schedules/2@3")


def test_a_record_that_is_not_a_schedule_gets_no_tombstone() -> None:
    invalid = Entry("", b"{", 0, b" ", [], reason="bad-id")
    assert list(follow_ups().requests({3: invalid}, 0)) == []


AT_5: Places = {"schedules/2": [(3, 5)]}
FILLER: list[tuple[bytes, bytes | None, Headers]] = [(b"x", b"", [])] * 4


def test_a_newer_schedule_before_the_tombstone_supersedes_the_earlier_one() -> None:
    log = Log(*FILLER, (b"video-1", b"new", []), (b"video-1", None, OWN))
    assert superseded(log, position=4, tombstones=AT_5) == [3]


def test_a_cancel_before_the_tombstone_supersedes_the_schedule() -> None:
    log = Log(*FILLER, (b"video-1", None, []), (b"video-1", None, OWN))
    assert superseded(log, position=4, tombstones=AT_5) == [3]


def test_other_ids_and_aborted_tombstones_supersede_nothing() -> None:
    log = Log(*FILLER[:3], (b"video-2", b"", []), (b"video-1", None, OWN), (b"video-1", None, OWN))
    assert superseded(log, position=3, tombstones=AT_5) == []


def test_a_schedule_above_the_position_does_not_supersede_itself() -> None:
    log = Log(*FILLER[:3], (b"video-1", b"on", []), (b"x", b"", []), (b"video-1", None, OWN))
    assert superseded(log, position=0, tombstones=AT_5) == []


COUNTDOWN = make_format("countdown", Options(max_countdown_s=1000, own_topics=lambda topic: False))
RECURS = Entry("orders", b"hi", 90_000, None, [("h", b"1")], caller_id="a", recurs="every 60000")
ASKED = b'{"topic": "orders", "message": "new", "countdown": 5, "id": "a"}'
FOLLOWS: Headers = [("blackbox-follows", b"schedules/2@3")]


def recurring(log: Log) -> list[int]:
    some = FollowUps(SHARD, COUNTDOWN, log)
    return list(some.superseded(4, {3: RECURS}, {"schedules/2": [(3, 6)]}))


def test_a_recurring_request_is_written_again_in_its_own_partition() -> None:
    once = RECURS._replace(recurs=None)
    [again] = FollowUps(SHARD, COUNTDOWN, Log()).requests({3: RECURS, 4: once}, 100_000)
    assert (again.topic, again.partition, again.key) == ("schedules", 2, b"a")
    assert orjson.loads(again.value or b"")["at"] == 150_000
    assert again.headers == [("h", b"1"), ("blackbox-follows", "schedules/2@3")]
    headers = [("h", b"1"), *FOLLOWS]
    asked = COUNTDOWN.parse(Record(9, 100_000, b"a", again.value, headers), 100_000)
    assert isinstance(asked, Request)
    assert (asked.due_ms, asked.headers) == (150_000, [("h", b"1")])


@pytest.mark.parametrize(
    ("recurs", "why"),
    [
        ("cron Nowhere/Else * * * * *", "timezone: give a name"),
        ("cron localtime * * * * *", "other names depend on the host"),
        ("cron UTC * * *", "give a cron expression of five fields"),
        ("every often", "every is 'often'"),
    ],
)
def test_a_recurring_request_without_a_next_time_ends_as_a_dead_letter(
    recurs: str, why: str
) -> None:
    broken = RECURS._replace(recurs=recurs, key=b"k", expires_ms=95_000)

    [again] = FollowUps(SHARD, COUNTDOWN, Log()).requests({3: broken}, 0)

    assert (again.topic, again.partition, again.key) == ("schedules", 2, b"a")
    refused = COUNTDOWN.parse(Record(9, 100_000, b"a", again.value, FOLLOWS), 100_000)
    assert isinstance(refused, Invalid)
    assert refused.reason is Reason.BAD_RECURRENCE
    assert why in refused.detail


@pytest.mark.parametrize("why", [ZoneInfoNotFoundError("no such zone"), OSError("not readable")])
def test_a_request_of_a_time_zone_that_was_missing_recurs_again_once_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    def missing(name: str) -> ZoneInfo:
        raise why

    stopped = RECURS._replace(
        recurs="cron Europe/Berlin 0 1 * * *", key=b"k", message=b"\xff", expires_ms=95_000
    )
    with monkeypatch.context() as patched:
        patched.setattr(recurrence, "ZoneInfo", missing)
        recurrence._search.cache_clear()
        [again] = FollowUps(SHARD, COUNTDOWN, Log()).requests({3: stopped}, 100_000)
        record = Record(9, 100_000, b"a", again.value, [("h", b"1"), *FOLLOWS])
        assert isinstance(COUNTDOWN.parse(record, 100_000), Invalid)

    replayed = make_format("countdown", Options(10**6, lambda topic: False)).parse(
        record._replace(headers=record.headers[:-1]), 100_000
    )

    midnight_ms = 86_400_000  # 1970-01-02 01:00 in Berlin
    headers: Headers = [("h", b"1")]
    assert replayed == Request(
        "orders",
        b"\xff",
        midnight_ms,
        b"k",
        headers,
        None,
        "a",
        midnight_ms + 5_000,
        stopped.recurs,
    )


@pytest.mark.parametrize(
    ("value", "headers", "is_superseded"),
    [
        (ASKED, [], True),
        (b'{"id": "a", "cancel": true}', [], True),
        (None, [("blackbox-cancel", request_id(SHARD, 3).encode())], True),
        (None, [("blackbox-cancel", request_id(SHARD, 2).encode())], False),
        (ASKED.replace(b'"a"', b'"b"'), [], False),
        (ASKED, [("blackbox-replaces", request_id(SHARD, 2).encode())], True),
        (
            ASKED.replace(b'"a"', b'"b"'),
            [("blackbox-replaces", request_id(SHARD, 3).encode())],
            True,
        ),
        (ASKED, FOLLOWS, False),
        (b"{", [], False),
    ],
)
def test_a_cancel_or_a_later_request_supersedes_the_next_time(
    value: bytes | None, headers: Headers, is_superseded: bool
) -> None:
    log = Log(*FILLER, (b"a", value, headers), (b"x", b"", []), (b"a", ASKED, FOLLOWS))
    assert recurring(log) == ([3] if is_superseded else [])


def test_a_cancel_by_the_first_id_supersedes_the_next_time_of_a_carried_request() -> None:
    cancel: Headers = [("blackbox-cancel", request_id(SHARD, 1).encode())]
    log = Log(*FILLER, (b"a", None, cancel), (b"x", b"", []), (b"a", ASKED, FOLLOWS))
    some = FollowUps(SHARD, COUNTDOWN, log)
    carried = RECURS._replace(origin=1)

    assert list(some.superseded(4, {3: carried}, {"schedules/2": [(3, 6)]})) == [3]


def test_records_above_the_position_are_read_once() -> None:
    log = Log(*FILLER, (b"a", ASKED, []), (b"x", b"", []), (b"a", ASKED, FOLLOWS), (b"x", b"", []))
    reads: list[tuple[int, int]] = []

    class Counted(Log):
        def requests(self, start: int, end: int) -> Iterator[Batch]:
            reads.append((start, end))
            return log.requests(start, end)

    some = FollowUps(SHARD, COUNTDOWN, Counted())
    assert list(some.superseded(4, {3: RECURS}, {"schedules/2": [(3, 6)]})) == [3]
    assert list(some.superseded(4, {3: RECURS}, {"schedules/2": [(3, 7)]})) == [3]
    assert list(some.superseded(8, {3: RECURS}, {"schedules/2": [(3, 8)]})) == []
    assert reads == [(4, 7)]


def test_nothing_is_read_if_no_record_lies_before_the_follow_up() -> None:
    assert superseded(Log(), position=5, tombstones=AT_5) == []
    assert superseded(Log(), position=5, tombstones={}) == []


def test_the_number_of_ids_known_to_be_superseded_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow_ups_module, "MOST_CONTENDED", 2)
    some = follow_ups()
    entries = {n: ENTRY._replace(caller_id=f"video-{n}") for n in range(3)}
    for now_ms, entry in entries.items():
        some.note_contended([entry], now_ms)

    assert some.contended(entries.items(), 3) == ([], [1, 2])
    assert some.contended([(9, ENTRY._replace(caller_id=None))], 3) == ([], [])


class Backlog:
    """Cancels of schedules with different ids, from offset 0 on; `reads` are the ranges that were read."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.reads: list[tuple[int, int]] = []

    def request_bounds(self) -> Bounds:
        return Bounds(0, self._length)

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        self.reads.append((start, end))
        for first in range(start, end, 500):
            last = min(first + 500, end)
            yield Batch(first, last, [schedule_cancel(o) for o in range(first, last)])


def schedule_cancel(offset: int) -> Record:
    return Record(offset, 1000, f"{offset:0200}".encode(), None, [])


def superseded_in(some: FollowUps, length: int, *named: int, position: int = 0) -> list[int]:
    """Which schedules with the ids of these records are superseded. They were written before the backlog."""
    ended = {at - length: ENTRY._replace(caller_id=f"{at:0200}") for at in named}
    some.read_backlog(position, ended)
    found = some.superseded(position, ended, {"schedules/2": [(-1, length)]})
    return sorted(offset + length for offset in found)


def test_a_backlog_of_long_ids_takes_little_memory() -> None:
    length = 30_000
    some = FollowUps(SHARD, CONTRACT, Backlog(length), "history")
    tracemalloc.start()
    try:
        assert superseded_in(some, length, 0, length - 1, length) == [0, length - 1]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 40 * length


def test_superseding_records_are_found_beyond_the_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow_ups_module, "MOST_REMEMBERED", 2000)
    length = 10_000
    backlog = Backlog(length)
    some = FollowUps(SHARD, CONTRACT, backlog, "history")

    assert superseded_in(some, length, 700, 8000, length) == [700, 8000]
    assert superseded_in(some, length, 8000, length) == [8000]
    assert superseded_in(some, length, 700, 8001) == [700, 8001]
    assert backlog.reads == [(0, 10_000), (2000, 10_000)]

    # Intake continues: the records it has read make room for more.
    assert superseded_in(some, length, 700, 2500, position=1000) == [2500]
    assert superseded_in(some, length, 1000, 9999, position=1000) == [1000, 9999]
    assert backlog.reads[2:] == [(2000, 10_000), (3000, 10_000)]
