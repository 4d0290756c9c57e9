"""What a task of intake does with the rows of the Kafka source; no Spark needed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
import redis
from confluent_kafka import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from blackbox import interpreter, logs
from blackbox.clock import Clock
from blackbox.connect import kafka
from blackbox.embedded import EmbeddedRedis
from blackbox.index.bus import Listener
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import Taken
from blackbox.pipeline.tasks import intake as module
from blackbox.pipeline.tasks.intake import CHUNK, POSITION, IntakeTask, Stored, batches
from blackbox.plan import Batch, Labels
from blackbox.request import Headers, Record, Shard
from blackbox.settings import load
from tests.world import World, read_all

ROWS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
TB = Shard("TB", 0)
OTHER = Shard("other", 7)
NOW_MS = 1_700_000_000_000
NOTHING = Taken(0, 0, 0, 0, None)

Row = dict[str, Any]


def mark(shard: Shard, offset: int) -> Row:
    """From where, or up to where, was read."""
    at = {"topic": shard.topic, "partition": shard.partition, "offset": offset}
    return dict.fromkeys(ROWS.names) | at | {"timestampType": POSITION}


def row(shard: Shard, record: Record) -> Row:
    """A record as the source spells it."""
    headers: list[Row] | None = [{"key": n, "value": v} for n, v in record.headers]
    if record.unreadable is not None:
        headers = [{"key": None, "value": record.unreadable.encode()}]
    return mark(shard, record.offset) | {
        "key": record.key,
        "value": record.value,
        "timestamp": record.timestamp_ms * 1000,
        "timestampType": 0,
        "headers": headers or None,
    }


def framed(shard: Shard, start: int, end: int, records: Sequence[Record]) -> list[Row]:
    return [mark(shard, start), *(row(shard, one) for one in records), mark(shard, end)]


def arrow(*rows: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=ROWS)


def record(offset: int, value: bytes | None = b"{}", headers: Headers | None = None) -> Record:
    return Record(offset, NOW_MS + offset, None, value, headers or [])


def found(*parts: pa.RecordBatch) -> list[tuple[Shard, Batch]]:
    return list(batches(iter(parts)))


class TestBatches:
    """Rows become batches, as recovery would read them."""

    def test_positions_frame_the_records_between_them(self) -> None:
        records = [record(12), record(17)]
        assert found(arrow(*framed(TB, 10, 20, records))) == [(TB, Batch(10, 20, records))]

    def test_several_shards_share_an_arrow_batch(self) -> None:
        same_topic, same_partition = Shard("TB", 1), Shard("other", 0)
        shards = [TB, same_topic, same_partition, OTHER]
        rows = [one for shard in shards for one in framed(shard, 0, 2, [record(0), record(1)])]
        assert found(arrow(*rows)) == [
            (shard, Batch(0, 2, [record(0), record(1)])) for shard in shards
        ]

    def test_a_range_goes_over_several_arrow_batches(self) -> None:
        records = [record(offset) for offset in range(5)]
        rows = framed(TB, 0, 9, records)
        assert found(*(arrow(one) for one in rows)) == [(TB, Batch(0, 9, records))]

    def test_the_end_of_one_range_and_the_start_of_the_next_share_an_arrow_batch(self) -> None:
        rows = framed(TB, 3, 5, [record(3)]) + framed(OTHER, 4, 6, [record(5)])
        assert found(arrow(*rows[:2]), arrow(*rows[2:5]), arrow(*rows[5:])) == [
            (TB, Batch(3, 5, [record(3)])),
            (OTHER, Batch(4, 6, [record(5)])),
        ]

    def test_arrow_batches_without_rows_say_nothing(self) -> None:
        rows = framed(TB, 0, 1, [record(0)])
        parts = [arrow(), arrow(rows[0]), arrow(), arrow(*rows[1:]), arrow()]
        assert found(*parts) == [(TB, Batch(0, 1, [record(0)]))]

    def test_a_range_of_gaps_moves_on_without_records(self) -> None:
        assert found(arrow(*framed(TB, 5, 9, []))) == [(TB, Batch(5, 9, []))]

    def test_an_empty_range_is_no_batch(self) -> None:
        assert found(arrow(*framed(TB, 5, 5, []))) == []
        assert found(arrow(mark(TB, 5)), arrow(mark(TB, 5))) == []

    def test_nothing_is_no_batch(self) -> None:
        assert found() == []

    @pytest.mark.parametrize("more", [-1, 0, 1, CHUNK, CHUNK + 1])
    def test_no_batch_has_more_than_4000_records(self, more: int) -> None:
        count = CHUNK + more
        records = [record(2 * number) for number in range(count)]
        made = found(arrow(*framed(TB, 0, 2 * count + 10, records)))
        assert [len(batch.records) for _, batch in made] == [
            min(CHUNK, count - at) for at in range(0, count, CHUNK)
        ]
        assert [one for _, batch in made for one in batch.records] == records
        assert [batch.start for _, batch in made] == [0, *(b.end for _, b in made[:-1])]
        assert made[-1][1].end == 2 * count + 10

    def test_a_large_range_is_given_out_while_it_is_still_being_read(self) -> None:
        coming = iter([arrow(mark(TB, 0), *(row(TB, record(o)) for o in range(CHUNK + 1)))])
        assert next(batches(coming))[1].end == CHUNK

    def test_nothing_and_an_empty_value_are_told_apart(self) -> None:
        asked = [
            Record(0, NOW_MS, None, None, []),
            Record(1, NOW_MS, b"", b"", []),
            Record(2, NOW_MS, b"\x00\xff", b"\xff\n", []),
        ]
        [(_, batch)] = found(arrow(*framed(TB, 0, 3, asked)))
        assert batch.records == asked

    def test_headers_stay_with_their_record(self) -> None:
        asked = [
            record(0),
            record(1, headers=[("a", b"1"), ("a", b"2"), ("", None), ("b", b"")]),
            record(2),
            record(3, headers=[("ü", b"\xff")]),
        ]
        rows = framed(TB, 0, 4, asked)
        rows[3]["headers"] = []
        [(_, batch)] = found(arrow(*rows))
        assert batch.records == asked

    def test_headers_that_cannot_be_read_make_the_record_unreadable(self) -> None:
        asked = [
            record(0, headers=[("a", b"1")]),
            record(1)._replace(unreadable="a header name is not UTF-8: 'x'"),
            record(2),
        ]
        [(_, batch)] = found(arrow(*framed(TB, 0, 3, asked)))
        assert batch.records == asked

    def test_times_before_1970_and_late_ones_are_kept(self) -> None:
        asked = [
            Record(offset, time_ms, None, b"{}", [])
            for offset, time_ms in enumerate((-1, 0, 1, -86_400_001, (1 << 63) // 1000 - 1))
        ]
        [(_, batch)] = found(arrow(*framed(TB, 0, 5, asked)))
        assert batch.records == asked


blobs = st.none() | st.sampled_from([b"", b"x", b"\xff\x00"]) | st.binary(max_size=3)
headers = st.lists(st.tuples(st.sampled_from(["", "a", "CALLER_SERVICE", "ü"]), blobs), max_size=3)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, list[Record]]:
    """A start, an end, and records between them with any gaps."""
    start = draw(st.integers(0, 1 << 40))
    offset = start
    records: list[Record] = []
    for gap in draw(st.lists(st.sampled_from([0, 0, 0, 1, 5]), max_size=12)):
        offset += gap
        one = Record(offset, draw(st.integers(0, 1 << 42)), draw(blobs), draw(blobs), draw(headers))
        if draw(st.integers(0, 9)) == 0:
            one = one._replace(headers=[], unreadable="a header name is not UTF-8")
        records.append(one)
        offset += 1
    return start, offset + draw(st.sampled_from([0, 0, 1, 3])), records


shards = st.builds(Shard, st.sampled_from(["TB", "TC", "T"]), st.sampled_from([0, 1, 2, 1_048_575]))


@settings(max_examples=100, deadline=None)
@given(
    asked=st.dictionaries(shards, ranges(), max_size=4),
    chunk=st.integers(1, 5),
    are_slices=st.booleans(),
    data=st.data(),
)
def test_however_rows_are_cut_the_batches_of_a_shard_hold_all_of_its_range_in_order(
    asked: dict[Shard, tuple[int, int, list[Record]]],
    chunk: int,
    are_slices: bool,
    data: st.DataObject,
) -> None:
    rows = [one for shard, what in asked.items() for one in framed(shard, *what)]
    places = st.lists(st.integers(0, len(rows)), max_size=8).map(sorted)
    cuts = [0, *data.draw(places, label="cuts"), len(rows)]
    whole = arrow(*rows)
    parts = [
        whole.slice(first, last - first) if are_slices else arrow(*rows[first:last])
        for first, last in pairwise(cuts)
    ]
    with mock.patch.object(module, "CHUNK", chunk):
        made = found(*parts)

    order = list(dict.fromkeys(shard for shard, _ in made))
    assert order == [shard for shard, (start, end, _) in asked.items() if start < end]
    assert [shard for shard, _ in made] == sorted((s for s, _ in made), key=order.index)
    for shard, (start, end, records) in asked.items():
        own = [batch for one, batch in made if one == shard]
        reached = start
        for batch in own:
            assert batch.start == reached < batch.end
            assert all(batch.start <= one.offset < batch.end for one in batch.records)
            assert len(batch.records) <= chunk
            reached = batch.end
        assert reached == end
        assert [one for batch in own for one in batch.records] == records


Run = Callable[..., dict[Shard, Stored]]


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a Python worker sets up once stays out of the process of the tests."""
    monkeypatch.setattr(logs, "to_stderr", lambda: None)
    monkeypatch.setattr(interpreter, "tune", lambda: None)
    yield
    forget()


def forget() -> None:
    if module._kept is not None:
        module._kept.close()
        module._kept = None


class Place:
    """A world whose request topic is read by tasks of one application."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shards = [Shard(world.requests, partition) for partition in range(4)]
        self.shard = self.shards[0]
        self.settings = load(
            kafka_bootstrap_servers=world.kafka.bootstrap_servers,
            redis_url=world.redis.url,
            request_topics=f"{world.requests}:countdown",
            dead_letter_topic=world.dead_letters,
            group_id=world.name,
        )
        self.task = IntakeTask(uuid.uuid4().hex, self.settings, kafka(self.settings))
        self.client = redis.Redis.from_url(world.redis.url)
        self.inspector = Inspector.of(world.redis.url)
        self._written: list[Message] = []

    def close(self) -> None:
        self.client.close()
        self.inspector.close()

    def begin(self, *shards: Shard, requests: int = 0) -> None:
        """What dispatch does when it opens a shard."""
        connections = pool(self.world.redis.url)
        for shard in shards:
            index = ShardIndex(shard, connections, grace_s=3600)
            index.begin(Labels(requests, 0))
            index.close()
        connections.disconnect()

    def run(self, *parts: pa.RecordBatch) -> dict[Shard, Stored]:
        """One task; what it says of each shard, in order."""
        [answer] = self.task(iter(parts))
        done = [Stored.of(SimpleNamespace(**one)) for one in answer.to_pylist()]
        assert len({stored.shard for stored in done}) == len(done)
        return {stored.shard: stored for stored in done}

    def request(self, offset: int, body: str = "hello", in_s: float = 3600, **more: str) -> Record:
        asked = {"topic": self.world.targets[0], "message": body, "countdown": in_s}
        return Record(offset, now_ms(), None, json.dumps(asked | more).encode(), [])

    def write(self, count: int) -> None:
        """Requests for the shard into Kafka, and as Kafka has them."""
        for number in range(count):
            asked = {"topic": self.world.targets[0], "message": f"m{number}", "countdown": 3600}
            self.world.send_raw(json.dumps(asked), partition=0)
        self.world.flush()
        self._written = read_all(self.world.kafka.bootstrap_servers, self.world.requests)

    def read(self, start: int, end: int) -> pa.RecordBatch:
        """The rows of what was written there."""
        mine = [message for message in self._written if start <= (message.offset() or 0) < end]
        return arrow(*framed(self.shard, start, end, list(map(as_record, mine))))

    def labels(self, shard: Shard | None = None) -> Labels | None:
        return self.inspector.labels(shard or self.shard)

    def pending(self, shard: Shard | None = None) -> int:
        return self.inspector.standing(shard or self.shard, now_ms()).pending

    def body(self, offset: int) -> bytes | None:
        pending = self.inspector.look_up(self.shard, offset)
        assert pending is not None
        assert pending.entry is not None
        return pending.entry.message

    def held(self) -> dict[bytes, Any]:
        """All keys of the shard, as bytes that Redis can restore."""
        raw: Any = self.client
        return {key: raw.dump(key) for key in raw.keys(f"blackbox:{{{self.shard}}}:*")}

    def go_back_to(self, held: dict[bytes, Any]) -> None:
        raw: Any = self.client
        for key in self.held().keys() - held.keys():
            raw.delete(key)
        for key, value in held.items():
            raw.restore(key, 0, value, replace=True)


def as_record(message: Message) -> Record:
    headers: Any = message.headers() or []
    offset = message.offset()
    assert offset is not None
    return Record(offset, message.timestamp()[1], message.key(), message.value(), headers)


def now_ms() -> int:
    return Clock().earliest_ms()


@pytest.fixture
def place(world: World) -> Iterator[Place]:
    place = Place(world)
    yield place
    place.close()


@pytest.fixture
def fragile(fragile_world: World) -> Iterator[Place]:
    """A place whose Redis is its own."""
    place = Place(fragile_world)
    yield place
    place.close()


def test_what_was_read_is_in_the_index_and_counted(place: Place) -> None:
    place.begin(place.shard)
    asked = [
        place.request(2, "first", in_s=90, id="a"),
        place.request(3, "second", in_s=60, id="b"),
        place.request(5, "third", id="a"),
        Record(6, now_ms(), None, b'{"cancel": true, "id": "b"}', []),
        Record(7, now_ms(), b"k", b"no request", [("trace", b"1")]),
        place.request(8)._replace(unreadable="a header name is not UTF-8"),
        place.request(9, "last", in_s=600),
    ]

    done = place.run(arrow(*framed(place.shard, 0, 12, asked)))

    stored = done[place.shard]
    assert replace(stored.taken, first_due_ms=None) == Taken(2, 2, 1, 1, None)
    assert stored.taken.first_due_ms is not None
    assert abs(stored.taken.first_due_ms - now_ms()) < 60_000  # what is invalid is due at once
    assert (stored.label, stored.problem, stored.is_full) == (12, None, False)
    assert place.labels() == Labels(12, 0)
    assert place.pending() == 4
    assert (place.body(5), place.body(9), place.body(7)) == (b"third", b"last", b"no request")
    unreadable = place.inspector.look_up(place.shard, 8)
    assert unreadable is not None
    assert unreadable.entry is not None
    assert (unreadable.entry.reason, unreadable.entry.detail) == (
        "bad-headers", "a header name is not UTF-8",
    )  # fmt: skip


def test_the_same_batch_again_changes_nothing(place: Place) -> None:
    place.begin(place.shard)
    rows = arrow(*framed(place.shard, 0, 3, [place.request(o, id="a") for o in range(3)]))
    place.run(rows)
    before = place.held()

    again = place.run(rows)
    forget()
    in_another_process = place.run(rows)

    assert again == in_another_process
    assert again[place.shard] == Stored(place.shard, NOTHING, 3)
    assert place.held() == before


def test_a_batch_that_overlaps_what_is_stored_adds_only_the_rest(place: Place) -> None:
    place.begin(place.shard)
    asked = [place.request(offset) for offset in range(6)]
    place.run(arrow(*framed(place.shard, 0, 4, asked[:4])))
    done = place.run(arrow(*framed(place.shard, 2, 6, asked[2:])))
    assert done[place.shard].taken.accepted == 2
    assert (place.pending(), place.labels()) == (6, Labels(6, 0))


def test_many_shards_and_many_chunks_are_stored_in_one_task(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 10)
    place.begin(*place.shards)
    rows: list[Row] = []
    for count, shard in enumerate(place.shards):
        asked = [place.request(o, f"{count}-{o}", id=f"i{o % 7}") for o in range(count * 15)]
        rows += framed(shard, 0, 50, asked)

    done = place.run(*(arrow(*rows[at : at + 8]) for at in range(0, len(rows), 8)))

    assert list(done) == place.shards
    for count, shard in enumerate(place.shards):
        assert (done[shard].label, done[shard].problem) == (50, None)
        assert place.labels(shard) == Labels(50, 0)
        assert place.pending(shard) == min(7, count * 15)  # the latest request under each id
        taken = done[shard].taken
        assert taken.accepted <= count * 15 == place.pending(shard) + taken.replaced


def test_a_task_without_rows_says_nothing(place: Place) -> None:
    assert place.run() == {}
    assert place.run(arrow(*framed(place.shard, 7, 7, []))) == {}


def test_a_gap_left_by_a_redis_that_went_back_is_read_from_kafka(place: Place) -> None:
    place.begin(place.shard)
    place.write(30)
    place.run(place.read(0, 10))
    then = place.held()
    place.run(place.read(10, 20))
    expected = place.held().keys()
    place.go_back_to(then)
    assert place.labels() == Labels(10, 0)

    done = place.run(place.read(20, 30))

    assert done[place.shard].taken.accepted == 20
    assert (done[place.shard].label, done[place.shard].problem) == (30, None)
    assert place.labels() == Labels(30, 0)
    assert place.pending() == 30
    assert [place.body(offset) for offset in (0, 15, 29)] == [b"m0", b"m15", b"m29"]
    assert place.held().keys() > expected


def test_an_index_that_is_empty_is_a_problem_that_dispatch_ends(place: Place) -> None:
    done = place.run(
        arrow(*framed(place.shard, 4, 5, [place.request(4)])),
        arrow(*framed(place.shards[1], 0, 1, [place.request(0)])),
    )
    for shard in place.shards[:2]:
        assert done[shard].taken == NOTHING
        assert not done[shard].is_full
        assert done[shard].problem == f"{shard}: the index is empty; dispatch begins it anew"
    assert place.held() == {}

    place.begin(*place.shards[:2])
    done = place.run(arrow(*framed(place.shards[1], 0, 1, [place.request(0)])))
    assert done[place.shards[1]].problem is None


def test_one_shard_with_a_problem_keeps_no_other_from_its_requests(place: Place) -> None:
    lost, fine = place.shards[:2]
    place.begin(fine)
    done = place.run(
        arrow(*framed(lost, 0, 2, [place.request(0), place.request(1)])),
        arrow(*framed(fine, 0, 1, [place.request(0)])),
    )
    assert done[lost].problem is not None
    assert (done[fine].problem, place.pending(fine)) == (None, 1)


def test_later_batches_of_a_shard_with_a_problem_are_left_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    asked = [place.request(offset) for offset in range(7)]
    done = place.run(arrow(*framed(place.shard, 0, 7, asked)))
    assert done[place.shard] == Stored(
        place.shard, NOTHING, 0, f"{place.shard}: the index is empty; dispatch begins it anew"
    )


def test_a_redis_that_is_away_is_a_problem_and_the_next_batch_reads_what_is_missing(
    fragile: Place, own_redis: EmbeddedRedis
) -> None:
    fragile.begin(fragile.shard)
    fragile.write(9)
    first, second, third = (fragile.read(at, at + 3) for at in (0, 3, 6))
    fragile.run(first)

    own_redis.kill()
    for _ in range(2):
        done = fragile.run(second)
        assert done[fragile.shard].taken == NOTHING
        assert "Redis" in (done[fragile.shard].problem or "")
        assert not done[fragile.shard].is_full
    own_redis.start()

    done = fragile.run(third)
    label = fragile.labels()
    assert done[fragile.shard].problem is None
    assert label == Labels(9, 0)
    assert fragile.pending() == 9


def test_a_connection_that_ended_while_it_was_kept_is_no_problem(
    fragile: Place, own_redis: EmbeddedRedis
) -> None:
    fragile.begin(fragile.shard)
    fragile.run(arrow(*framed(fragile.shard, 0, 1, [fragile.request(0)])))
    fragile.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]

    asked = [fragile.request(offset) for offset in range(1, 3)]
    done = fragile.run(arrow(*framed(fragile.shard, 1, 3, asked)))

    assert done[fragile.shard].problem is None
    assert done[fragile.shard].taken.accepted == 2
    assert fragile.labels() == Labels(3, 0)


def test_a_full_redis_stores_nothing_and_says_so(fragile: Place) -> None:
    fragile.begin(fragile.shard)
    fragile.write(6)
    first, second, both = fragile.read(0, 3), fragile.read(3, 6), fragile.read(0, 6)
    fragile.client.config_set("maxmemory", 1)

    for rows in (first, second, both):
        done = fragile.run(rows)
        assert done[fragile.shard].is_full
        assert done[fragile.shard].taken == NOTHING
        assert "Redis has no memory left" in (done[fragile.shard].problem or "")
    assert fragile.labels() == Labels(0, 0)

    fragile.client.config_set("maxmemory", 0)
    done = fragile.run(second)
    assert (done[fragile.shard].problem, done[fragile.shard].taken.accepted) == (None, 6)
    assert fragile.labels() == Labels(6, 0)


def test_rows_that_end_in_a_failure_fail_the_task_and_not_the_one_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    place.begin(place.shard)
    rows = framed(place.shard, 0, 9, [place.request(offset) for offset in range(9)])

    def failing() -> Iterator[pa.RecordBatch]:
        yield arrow(*rows[:6])
        raise OSError("the source failed")

    with pytest.raises(OSError, match="the source failed"):
        list(place.task(failing()))

    done = place.run(arrow(*rows))
    assert (done[place.shard].problem, place.labels(), place.pending()) == (None, Labels(9, 0), 9)


@pytest.fixture
def soon(place: Place) -> Iterator[Listener]:
    """What dispatch hears."""
    listener = Listener(place.world.redis.url, place.world.name, ("soon",))
    assert listener.next(0.1) is None
    yield listener
    listener.close()


def test_a_message_due_before_dispatch_looks_again_is_announced(
    place: Place, soon: Listener
) -> None:
    place.begin(*place.shards)
    rows = [
        *framed(place.shards[0], 0, 2, [place.request(0), place.request(1, in_s=0.5)]),
        *framed(place.shards[1], 0, 1, [place.request(0, in_s=30)]),
        *framed(place.shards[3], 0, 1, [place.request(0, in_s=0)]),
    ]
    done = place.run(arrow(*rows))
    heard = [soon.next(5), soon.next(5), soon.next(0.1)]
    assert heard == [
        ("soon", [place.world.requests, 0, done[place.shards[0]].taken.first_due_ms]),
        ("soon", [place.world.requests, 3, done[place.shards[3]].taken.first_due_ms]),
        None,
    ]


def test_what_a_task_read_again_from_kafka_is_announced_too(place: Place, soon: Listener) -> None:
    place.begin(place.shard)
    soon_due = {"topic": place.world.targets[0], "message": "x", "countdown": 0}
    place.world.send_raw(json.dumps(soon_due), partition=0)
    place.write(1)
    place.run(place.read(1, 2))
    note = soon.next(5)
    assert note is not None
    assert note[1][:2] == [place.world.requests, 0]


def test_a_worker_keeps_its_connections_from_task_to_task_of_one_application(place: Place) -> None:
    place.begin(place.shard)
    place.run(arrow(*framed(place.shard, 0, 1, [place.request(0)])))
    kept = module._kept
    place.run(arrow(*framed(place.shard, 1, 2, [place.request(1)])))
    assert module._kept is kept

    place.task = replace(place.task, run="another")
    done = place.run(arrow(*framed(place.shard, 2, 3, [place.request(2)])))
    assert module._kept is not kept
    assert done[place.shard].problem is None


def test_a_record_of_the_future_counts_as_written_now(place: Place) -> None:
    place.begin(place.shard)
    future = place.request(0, in_s=60)._replace(timestamp_ms=now_ms() + 3_600_000)
    began = time.time() * 1000
    done = place.run(arrow(*framed(place.shard, 0, 1, [future])))
    first_ms = done[place.shard].taken.first_due_ms
    assert first_ms is not None
    assert 0 <= first_ms - began - 60_000 < 5000
