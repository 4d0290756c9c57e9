"""An intake task and its planned ranges; no Spark needed."""

from __future__ import annotations

import json
import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
import redis
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.core.intake import Taken
from blackbox.core.plan import Positions
from blackbox.embedded import EmbeddedRedis
from blackbox.engine.spark import intake_task as module
from blackbox.engine.spark.intake_task import IntakeTask
from blackbox.engine.spark.shard_result import ShardResult
from blackbox.index.bus import Listener
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.journal import ranges
from blackbox.journal.ranges import CHUNK_RECORDS, Range
from blackbox.records.clock import Clock
from blackbox.records.entry import Entry, HeaderValues
from blackbox.records.request import Shard
from blackbox.support import interpreter, logs
from tests.support.raw_record import write_with_header
from tests.support.world import World, until

pytestmark = pytest.mark.service

ROWS = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32()), ("start", pa.int64()), ("end", pa.int64())]
)
NOTHING = Taken(0, 0, 0, 0, None)


def at(shard: Shard, start: int, end: int) -> Range:
    return Range(shard.topic, shard.partition, start, end)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the setup of a Python worker out of the test process."""
    monkeypatch.setattr(logs, "to_stderr", lambda: None)
    monkeypatch.setattr(interpreter, "tune", lambda: None)
    yield
    forget()
    for idle in ranges._idle_consumers.values():
        while idle:
            idle.pop().close()


def forget() -> None:
    if module._intakes_of_worker is not None:
        module._intakes_of_worker.close()
        module._intakes_of_worker = None


class Place:
    """A world whose request topics are read by tasks of one application."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers = world.kafka.bootstrap_servers
        self.shards = [Shard(world.requests, partition) for partition in range(4)]
        self.shard = self.shards[0]
        self.stamped = Shard(f"{world.name}.TC", 0)
        self.settings = load(
            kafka_bootstrap_servers=self.servers,
            redis_url=world.redis.url,
            request_topics=f"{world.requests}:countdown,{self.stamped.topic}:countdown",
            dead_letter_topic=world.dead_letters,
            group_id=world.name,
        )
        self.task = IntakeTask(uuid.uuid4().hex, self.settings, kafka(self.settings))
        self.client = redis.Redis.from_url(world.redis.url)
        self.inspector = Inspector.of(world.redis.url)
        self._producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "linger.ms": 1,
                "enable.idempotence": True,
                "max.in.flight": 1,
            }
        )
        self._last = -1
        self._ends = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "ends",
                "isolation.level": "read_uncommitted",
            }
        )

    def close(self) -> None:
        self._ends.close()
        self.client.close()
        self.inspector.close()

    def begin(self, *shards: Shard, requests: int = 0) -> None:
        """Open a shard, as dispatch does."""
        connections = pool(self.world.redis.url)
        for shard in shards:
            index = ShardIndex(shard, connections, grace_s=3600)
            index.begin(Positions(requests, 0))
            index.close()
        connections.disconnect()

    def run(self, *parts: Range | Sequence[Range]) -> dict[Shard, ShardResult]:
        """Run one task that gets each part as one Arrow batch; returns its result for each shard."""
        listed = [[part] if isinstance(part, Range) else part for part in parts]
        rows = [
            pa.RecordBatch.from_pylist([one._asdict() for one in part], schema=ROWS)
            for part in listed
        ]
        answers = pickle.loads(pickle.dumps(self.task))(iter(rows))
        told = [one for answer in answers for one in answer.column("report").to_pylist()]
        done: list[ShardResult] = [pickle.loads(one) for one in told]
        assert len({stored.shard for stored in done}) == len(done)
        # What was measured differs each time.
        return {stored.shard: stored._replace(offsets=0, seconds=0.0) for stored in done}

    def request(self, body: str = "hello", in_s: float = 3600, **more: str) -> str:
        return json.dumps(
            {"topic": self.world.targets[0], "message": body, "countdown": in_s} | more
        )

    def write(self, *values: str | bytes | None, shard: Shard | None = None, **more: Any) -> None:
        self._write(self._producer, shard or self.shard, *values, **more)

    def commit(self, *values: str, shard: Shard | None = None) -> None:
        """Write in one transaction: a marker follows the records."""
        producer = self._in_transaction(shard or self.shard, *values)
        producer.commit_transaction(30)
        self._wait_for_marker(shard or self.shard)

    def abort(self, *values: str, shard: Shard | None = None) -> None:
        producer = self._in_transaction(shard or self.shard, *values)
        producer.abort_transaction(30)
        self._wait_for_marker(shard or self.shard)

    def cut(self, offset: int, shard: Shard) -> None:
        """Remove everything below `offset`, as retention does."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        deleted = admin.delete_records([TopicPartition(shard.topic, shard.partition, offset)])
        for future in deleted.values():
            future.result(30)

    def positions(self, shard: Shard | None = None) -> Positions | None:
        return self.inspector.positions(shard or self.shard)

    def pending(self, shard: Shard | None = None) -> int:
        return self.inspector.shard_stats(shard or self.shard, now_ms()).pending

    def entry(self, offset: int) -> Entry:
        pending = self.inspector.pending_at(self.shard, offset)
        assert pending is not None
        assert pending.entry is not None
        return pending.entry

    def bodies(self, *offsets: int) -> list[bytes | None]:
        return [self.entry(offset).message for offset in offsets]

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

    def _wait_for_marker(self, shard: Shard) -> None:
        """The broker writes the marker after its answer; the next record must come after it."""
        end = TopicPartition(shard.topic, shard.partition)
        until("the marker", lambda: self._ends.get_watermark_offsets(end)[1] == self._last + 2)

    def _in_transaction(self, shard: Shard, *values: str) -> Producer:
        producer = Producer(
            {"bootstrap.servers": self.servers, "transactional.id": uuid.uuid4().hex}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        self._write(producer, shard, *values)
        return producer

    def _write(
        self, producer: Producer, shard: Shard, *values: str | bytes | None, **more: Any
    ) -> None:
        def acknowledged(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            self._last = message.offset() or 0

        for value in values:
            producer.produce(
                shard.topic, value, partition=shard.partition, on_delivery=acknowledged, **more
            )
        assert producer.flush(30) == 0


def now_ms() -> int:
    return Clock().earliest_ms()


@pytest.fixture
def place(world: World) -> Iterator[Place]:
    place = Place(world)
    yield place
    place.close()


@pytest.fixture
def fragile(fragile_world: World) -> Iterator[Place]:
    """A place with its own Redis."""
    place = Place(fragile_world)
    yield place
    place.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda records: monkeypatch.setattr(ranges, "CHUNK_RECORDS", records)


def test_the_records_of_a_range_are_stored_and_counted(place: Place) -> None:
    place.begin(place.shard)
    place.abort(place.request("never"))  # offset 0; marker 1
    place.commit(
        place.request("first", 90, id="a"), place.request("second", 60, id="b")
    )  # 2, 3; marker 4
    place.write(place.request("third", id="a"), '{"cancel": true, "id": "b"}')  # 5, 6
    place.write("no request")  # 7
    write_with_header(place.servers, place.shard.topic, b"\xff\xfe", b"odd")  # 8
    place.commit(place.request("last", 600))  # 9; marker 10

    done = place.run(at(place.shard, 0, 11))

    stored = done[place.shard]
    assert replace(stored.taken, first_due_ms=None) == Taken(2, 2, 1, 1, None)
    assert stored.taken.first_due_ms is not None
    assert abs(stored.taken.first_due_ms - now_ms()) < 60_000  # invalid records are due at once
    assert (stored.position, stored.problem, stored.is_full) == (11, None, False)
    assert place.positions() == Positions(11, 0)
    assert place.pending() == 4
    assert place.bodies(5, 9, 7) == [b"third", b"last", b"no request"]


def test_a_record_with_a_bad_header_name_becomes_a_dead_letter(
    place: Place,
) -> None:
    place.begin(place.shard)
    place.write(place.request("before"), headers=[("CALLER_SERVICE", b"one")])
    write_with_header(place.servers, place.shard.topic, b"\xff\xfe", b"odd")
    place.write(place.request("after"), headers=[("CALLER_SERVICE", b"two")])

    done = place.run(at(place.shard, 0, 3))

    assert (done[place.shard].taken.accepted, done[place.shard].taken.invalid) == (2, 1)
    assert place.bodies(0, 1, 2) == [b"before", b"odd", b"after"]
    odd = place.entry(1)
    assert (odd.reason, odd.headers) == ("bad-headers", [])
    assert (odd.detail or "").startswith("a header name is not UTF-8: ")
    assert [place.entry(offset).caller for offset in (0, 2)] == ["one", "two"]


def test_keys_values_and_headers_are_stored_unchanged(place: Place) -> None:
    place.begin(place.shard)
    pairs = [("a", b"1"), ("a", b"\xff"), ("b", None), ("ü", b"")]
    place.write(None, b"")
    place.write(b"\xff\n", key=b"", headers=pairs)
    place.write(b"x", key=b"\x00\xff")

    done = place.run(at(place.shard, 0, 4))

    assert done[place.shard].taken.invalid == 4
    kept = [place.entry(offset) for offset in range(4)]
    assert [entry.message for entry in kept] == [None, b"", b"\xff\n", b"x"]
    assert [entry.key for entry in kept] == [None, None, b"", b"\x00\xff"]
    assert [as_bytes(entry.headers) for entry in kept] == [[], [], pairs, []]


def as_bytes(headers: HeaderValues) -> list[tuple[str, bytes | None]]:
    """Text is stored as text."""
    return [(name, v.encode() if isinstance(v, str) else v) for name, v in headers]


def test_the_position_reaches_the_end_of_any_range(place: Place) -> None:
    place.begin(place.shard)
    place.commit(place.request(), place.request())  # offsets 0, 1; marker 2
    place.abort(place.request(), place.request())  # 3, 4; marker 5
    place.commit(place.request())  # 6; marker 7
    accepted = 0

    for start, end, count in ((0, 2, 2), (2, 3, 0), (3, 4, 0), (4, 6, 0), (6, 8, 1)):
        done = place.run(at(place.shard, start, end))
        accepted += count
        assert (done[place.shard].problem, done[place.shard].taken.accepted) == (None, count)
        assert done[place.shard].position == end
        assert place.positions() == Positions(end, 0)
        assert place.pending() == accepted


def test_the_same_range_again_changes_nothing(place: Place) -> None:
    place.begin(place.shard)
    place.commit(*(place.request(id="a") for _ in range(3)))
    place.write("no request", '{"cancel": true, "id": "a"}', place.request())
    whole = at(place.shard, 0, 7)
    place.run(whole)
    before = place.held()

    again = place.run(whole)
    forget()
    in_another_process = place.run(whole)

    assert again == in_another_process
    assert again[place.shard] == ShardResult(place.shard, NOTHING, 7)
    assert place.run(at(place.shard, 1, 3))[place.shard] == ShardResult(place.shard, NOTHING, 3)
    assert place.held() == before


def test_a_range_that_overlaps_what_is_stored_adds_only_the_rest(place: Place) -> None:
    place.begin(place.shard)
    place.write(*(place.request(f"m{number}") for number in range(6)))
    place.run(at(place.shard, 0, 4))
    done = place.run(at(place.shard, 2, 6))
    assert done[place.shard].taken.accepted == 2
    assert (place.pending(), place.positions()) == (6, Positions(6, 0))


def test_a_journal_gives_the_same_index_in_ranges_of_any_size(
    place: Place, small_chunks: Callable[[int], None]
) -> None:
    place.commit(*(place.request(f"m{n}", id=f"i{n % 2}") for n in range(4)))  # 0 to 3; marker 4
    place.abort(place.request("never", id="i0"))  # 5; marker 6
    place.write('{"cancel": true, "id": "i1"}', "no request", None, place.request())  # 7 to 10
    place.commit(place.request("last", id="i0"))  # 11; marker 12
    begun = whole = None

    for cuts in ([0, 13], range(14), [0, 3, 5, 8, 13], [0, 0, 6, 6, 12, 13, 13]):
        for records in (CHUNK_RECORDS, 1, 2):
            small_chunks(records)
            if begun is None:
                place.begin(place.shard)
                begun = place.held()
            place.go_back_to(begun)
            parts = [at(place.shard, start, end) for start, end in pairwise(cuts)]
            done = place.run(parts)
            assert (done[place.shard].problem, done[place.shard].position) == (None, 13)
            whole = whole or place.held()
            assert place.held() == whole, (cuts, records)
    assert place.positions() == Positions(13, 0)
    assert place.pending() == 4


def test_many_shards_and_many_chunks_are_stored_in_one_task(
    place: Place, small_chunks: Callable[[int], None]
) -> None:
    small_chunks(10)
    place.begin(*place.shards)
    for count, shard in enumerate(place.shards):
        place.write(
            *(place.request(f"{count}-{n}", id=f"i{n % 7}") for n in range(count * 15)), shard=shard
        )
    asked = [at(shard, 0, count * 15) for count, shard in enumerate(place.shards)]

    done = place.run(asked[:1], [], asked[1:3], asked[3:])

    assert list(done) == place.shards
    for count, shard in enumerate(place.shards):
        assert (done[shard].position, done[shard].problem) == (count * 15, None)
        assert place.positions(shard) == Positions(count * 15, 0)
        assert place.pending(shard) == min(7, count * 15)  # the latest request under each id
        taken = done[shard].taken
        assert taken.accepted <= count * 15 == place.pending(shard) + taken.replaced


def test_a_range_of_more_records_than_a_chunk_holds_is_stored_whole(place: Place) -> None:
    count = 2 * CHUNK_RECORDS + 500
    place.begin(place.shard)
    place.write(*(place.request(f"m{number}") for number in range(count)))

    done = place.run(at(place.shard, 0, count))

    assert done[place.shard].taken.accepted == place.pending() == count
    assert place.positions() == Positions(count, 0)
    assert place.bodies(0, CHUNK_RECORDS, count - 1) == [b"m0", b"m4000", b"m8499"]


def test_the_ranges_of_a_shard_are_counted_together(place: Place) -> None:
    place.begin(place.shard)
    place.write(place.request(in_s=60), "no request", place.request(in_s=30))

    done = place.run([at(place.shard, 0, 1)], [at(place.shard, 1, 2), at(place.shard, 2, 3)])

    first_ms = place.entry(1).due_ms
    assert done == {place.shard: ShardResult(place.shard, Taken(2, 1, 0, 0, first_ms), 3)}


def test_a_task_without_ranges_reports_nothing(place: Place) -> None:
    assert place.run() == {}
    assert place.run([]) == {}


def test_an_empty_range_reports_the_position_and_changes_nothing(place: Place) -> None:
    place.begin(place.shard, requests=7)
    before = place.held()
    done = place.run(at(place.shard, 7, 7), at(place.shards[1], 0, 0))
    assert done == {
        place.shard: ShardResult(place.shard, NOTHING, 7),
        place.shards[1]: ShardResult(
            place.shards[1], NOTHING, 0, empty(place.shards[1]), is_behind=True
        ),
    }
    assert place.held() == before


def empty(shard: Shard) -> str:
    return f"{shard}: the index is empty; dispatch rebuilds it"


def test_a_gap_left_by_a_rolled_back_redis_is_read_from_kafka(place: Place) -> None:
    place.begin(place.shard)
    place.write(*(place.request(f"m{number}") for number in range(30)))
    place.run(at(place.shard, 0, 10))
    then = place.held()
    place.run(at(place.shard, 10, 20))
    expected = place.held().keys()
    place.go_back_to(then)
    assert place.positions() == Positions(10, 0)

    done = place.run(at(place.shard, 20, 30))

    assert done[place.shard].taken.accepted == 20
    assert (done[place.shard].position, done[place.shard].problem) == (30, None)
    assert place.positions() == Positions(30, 0)
    assert place.pending() == 30
    assert place.bodies(0, 15, 29) == [b"m0", b"m15", b"m29"]
    assert place.held().keys() > expected


def test_a_batch_catches_up_on_a_limited_number_of_records(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_MISSING", 9)
    lost, fine = place.shards[:2]
    place.begin(lost, fine)
    for shard in (lost, fine):
        place.write(*(place.request() for _ in range(11)), shard=shard)

    done = place.run(at(lost, 10, 11), at(fine, 0, 11))

    assert done[lost].is_behind
    assert f"{lost}: its index lacks requests 0 to 9" in (done[lost].problem or "")
    assert (done[fine].problem, place.pending(fine)) == (None, 11)
    assert place.run(at(lost, 9, 11))[lost].position == 11


@pytest.mark.parametrize("end", [8, 9])
def test_a_range_beyond_the_position_also_reads_the_records_before_it(
    place: Place, end: int
) -> None:
    place.begin(place.shard)
    place.commit(place.request("a"))  # offset 0; marker 1
    place.abort(place.request("never"))  # 2; marker 3
    write_with_header(place.servers, place.shard.topic, b"\xff\xfe", b"odd")  # 4
    place.commit(place.request("b"), place.request("c"))  # 5, 6; marker 7
    place.write(place.request("d"))  # 8

    done = place.run(at(place.shard, 8, end))

    taken = done[place.shard].taken
    assert (taken.accepted, taken.invalid) == (end - 5, 1)
    assert (done[place.shard].position, done[place.shard].problem) == (end, None)
    assert place.positions() == Positions(end, 0)
    assert place.bodies(0, 4, 5, 6) == [b"a", b"odd", b"b", b"c"]
    assert place.run(at(place.shard, 0, end))[place.shard] == ShardResult(place.shard, NOTHING, end)


def test_an_empty_index_is_reported_until_dispatch_has_opened_it(place: Place) -> None:
    for shard in place.shards[:2]:
        place.write(place.request(), shard=shard)
    asked = [at(shard, 0, 1) for shard in place.shards[:2]]
    done = place.run(asked)
    for shard in place.shards[:2]:
        assert done[shard] == ShardResult(shard, NOTHING, 0, empty(shard), is_behind=True)
    assert place.held() == {}

    place.begin(*place.shards[:2])
    done = place.run(asked)
    assert [done[shard].problem for shard in place.shards[:2]] == [None, None]
    assert [place.pending(shard) for shard in place.shards[:2]] == [1, 1]


def test_a_shard_with_a_problem_does_not_stop_the_others(place: Place) -> None:
    lost, fine = place.shards[:2]
    place.begin(fine)
    for shard in (lost, fine):
        place.write(place.request(), shard=shard)
    done = place.run(at(lost, 0, 1), at(fine, 0, 1))
    assert done[lost].problem == empty(lost)
    assert (done[fine].problem, place.pending(fine)) == (None, 1)


def test_later_chunks_of_a_shard_with_a_problem_are_not_stored(
    place: Place, small_chunks: Callable[[int], None]
) -> None:
    small_chunks(2)
    place.write(*(place.request() for _ in range(7)))
    done = place.run(at(place.shard, 0, 7))
    assert done == {
        place.shard: ShardResult(place.shard, NOTHING, 0, empty(place.shard), is_behind=True)
    }
    assert place.held() == {}


def test_the_next_range_reads_what_an_unavailable_redis_did_not_store(
    fragile: Place, own_redis: EmbeddedRedis
) -> None:
    fragile.begin(fragile.shard)
    fragile.write(*(fragile.request() for _ in range(9)))
    first, second, third = (at(fragile.shard, start, start + 3) for start in (0, 3, 6))
    fragile.run(first)

    own_redis.kill()
    for _ in range(2):
        done = fragile.run(second)
        assert (done[fragile.shard].taken, done[fragile.shard].position) == (NOTHING, 3)
        assert "Redis" in (done[fragile.shard].problem or "")
        assert not done[fragile.shard].is_full
    own_redis.start()

    done = fragile.run(third)
    assert done[fragile.shard].problem is None
    assert fragile.positions() == Positions(9, 0)
    assert fragile.pending() == 9


def test_a_connection_closed_between_tasks_is_replaced(
    fragile: Place, own_redis: EmbeddedRedis
) -> None:
    fragile.begin(fragile.shard)
    fragile.write(*(fragile.request() for _ in range(3)))
    fragile.run(at(fragile.shard, 0, 1))
    fragile.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]

    done = fragile.run(at(fragile.shard, 1, 3))

    assert done[fragile.shard].problem is None
    assert done[fragile.shard].taken.accepted == 2
    assert fragile.positions() == Positions(3, 0)


def test_a_task_reports_a_full_redis_and_stores_nothing(fragile: Place) -> None:
    fragile.begin(fragile.shard)
    fragile.write(*(fragile.request() for _ in range(6)))
    first, second, both = (at(fragile.shard, *ends) for ends in ((0, 3), (3, 6), (0, 6)))
    fragile.client.config_set("maxmemory", 1)

    for wanted in (first, second, both):
        done = fragile.run(wanted)
        assert done[fragile.shard].is_full
        assert done[fragile.shard].taken == NOTHING
        assert "Redis has no memory left" in (done[fragile.shard].problem or "")
    assert fragile.positions() == Positions(0, 0)

    fragile.client.config_set("maxmemory", 0)
    done = fragile.run(second)
    assert (done[fragile.shard].problem, done[fragile.shard].taken.accepted) == (None, 6)
    assert fragile.positions() == Positions(6, 0)


def test_a_range_removed_by_retention_does_not_stop_the_others_of_its_task(
    place: Place,
) -> None:
    fine, cut, later = place.shards[:3]
    place.begin(fine, cut, later)
    for shard in (fine, cut, later):
        place.write(*(place.request() for _ in range(4)), shard=shard)
    place.cut(2, cut)

    done = place.run([at(fine, 0, 3), at(cut, 1, 4), at(later, 0, 4)])
    assert done[cut].is_behind
    assert f"{cut.topic}/1: cannot read offset 1" in (done[cut].problem or "")
    assert [done[shard].problem for shard in (fine, later)] == [None, None]
    assert [place.positions(one) for one in (fine, cut, later)] == [
        Positions(n, 0) for n in (3, 0, 4)
    ]

    done = place.run(at(fine, 3, 4), at(cut, 2, 4))
    assert (done[fine].problem, done[fine].taken.accepted) == (None, 1)
    assert done[cut].is_behind
    assert f"{cut.topic}/1" in (done[cut].problem or "")  # it never skips removed records
    assert place.positions(cut) == Positions(0, 0)


@pytest.fixture
def soon(place: Place) -> Iterator[Listener]:
    """The notes that dispatch receives."""
    listener = Listener(place.world.redis.url, place.world.name, ("soon",))
    assert listener.next(0.1) is None
    yield listener
    listener.close()


def test_a_message_due_before_the_next_poll_is_announced(place: Place, soon: Listener) -> None:
    place.begin(*place.shards)
    place.write(place.request(), place.request(in_s=0.5), shard=place.shards[0])
    place.write(place.request(in_s=30), shard=place.shards[1])
    place.write(place.request(in_s=0), shard=place.shards[3])
    done = place.run(
        at(place.shards[0], 0, 2), at(place.shards[1], 0, 1), at(place.shards[3], 0, 1)
    )
    heard = [soon.next(5), soon.next(5), soon.next(0.1)]
    assert heard == [
        ("soon", [place.world.requests, 0, done[place.shards[0]].taken.first_due_ms]),
        ("soon", [place.world.requests, 3, done[place.shards[3]].taken.first_due_ms]),
        None,
    ]


def test_a_task_announces_that_kafka_has_removed_requests(place: Place) -> None:
    place.begin(place.shard)
    place.write(*(place.request() for _ in range(6)))
    place.cut(4, place.shard)
    with closing(Listener(place.world.redis.url, place.world.name, ("removed",))) as removed:
        assert removed.next(0.1) is None
        done = place.run(at(place.shard, 0, 6))
        why = done[place.shard].problem
        assert removed.next(5) == ("removed", [place.world.requests, 0, 4, why])


def test_requests_that_a_task_read_to_catch_up_are_announced(place: Place, soon: Listener) -> None:
    place.begin(place.shard)
    place.write(place.request(in_s=0), place.request())
    place.run(at(place.shard, 1, 2))
    note = soon.next(5)
    assert note is not None
    assert note[1][:2] == [place.world.requests, 0]


def test_a_worker_reuses_its_connections_within_one_application(place: Place) -> None:
    place.begin(place.shard)
    place.write(*(place.request() for _ in range(3)))
    place.run(at(place.shard, 0, 1))
    kept = module._intakes_of_worker
    place.run(at(place.shard, 1, 2))
    assert module._intakes_of_worker is kept
    assert [len(idle) for idle in ranges._idle_consumers.values() if idle] == [1]

    place.task = replace(place.task, run="another")
    done = place.run(at(place.shard, 2, 3))
    assert module._intakes_of_worker is not kept
    assert done[place.shard].problem is None


def test_a_record_of_the_future_counts_as_written_now(place: Place) -> None:
    place.world.create(NewTopic(place.stamped.topic, 1))
    place.begin(place.stamped)
    place.write(place.request(in_s=60), shard=place.stamped, timestamp=now_ms() + 1_800_000)
    began_ms = time.time() * 1000
    done = place.run(at(place.stamped, 0, 1))
    first_ms = done[place.stamped].taken.first_due_ms
    assert first_ms is not None
    assert 0 <= first_ms - began_ms - 60_000 < 5000
