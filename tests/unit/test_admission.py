"""Admitted requests stay admitted, even if the index is lost, partly rebuilt, or full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import redis

from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake
from blackbox.core.lost_payload import reread
from blackbox.core.plan import Batch, Binding, Positions, Tail
from blackbox.core.rebuild import Rebuild
from blackbox.core.recovery import Recovery
from blackbox.core.settlement import Settlement
from blackbox.core.triage import Triage
from blackbox.formats import Format, Options, make_format
from blackbox.index.keys import Keys
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records.cancel import HEADER as CANCEL
from blackbox.records.cancel import REPLACES
from blackbox.records.entry import decode
from blackbox.records.errors import IndexFull, IndexLost
from blackbox.records.receipt import Receipt
from blackbox.records.request import Headers, Record, Second, Shard, request_id
from blackbox.rules import admission
from blackbox.rules.admission import CallerAdmission
from blackbox.rules.file import RulesFile
from tests.contract.held import GRACE_S, NOW_MS, SHARD, held
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter
from tests.unit.test_rules import asked

NOBODY = "[others]\nadmitted = false"
FEW = "[callers.shop]\nmost_pending = 10"
ONE = "[callers.shop]\nmost_pending = 1"

Open = Callable[..., None]


@pytest.fixture
def format() -> Format:
    return make_format("countdown", Options(max_countdown_s=10**7, own_topics=lambda name: False))


@pytest.fixture
def make_intake(
    format: Format, connections: redis.ConnectionPool, tmp_path: Path
) -> Iterator[Callable[..., Intake]]:
    indexes: list[ShardIndex] = []

    def make(rules: str) -> Intake:
        path = tmp_path / f"callers-{len(indexes)}.toml"
        path.write_text(rules)
        indexes.append(ShardIndex(SHARD, connections, grace_s=GRACE_S))
        indexes[-1].load()
        admission = CallerAdmission(RulesFile(path), SharedState(connections), lambda: [SHARD])
        return Intake(format, indexes[-1], None, admission)

    yield make
    for index in indexes:
        index.close()


@pytest.fixture
def open_shard(
    journal: FakeJournal, writer: FakeWriter, make_intake: Callable[..., Intake]
) -> Open:
    """A new owner opens the shard under these rules."""

    def opened(rules: str, **given: Any) -> None:
        intake = make_intake(rules)
        index = intake.index
        assert isinstance(index, ShardIndex)
        recovery = Recovery(
            shard=SHARD,
            group="blackbox",
            index=index,
            journal=journal,
            writer=writer,
            confirm=lambda: None,
            apply=lambda batch, opening: intake.parse_and_store(batch, NOW_MS, opening),
            upcoming=lambda batch: intake.upcoming(batch, NOW_MS),
            now_ms=lambda: NOW_MS,
        )
        replace(recovery, **given).open()

    return opened


def written(journal: FakeJournal, count: int, **more: str) -> None:
    for _ in range(count):
        offset = len(journal.request_records)
        headers = [("CALLER_SERVICE", b"shop")]
        headers += [(name.replace("_", "-"), value.encode()) for name, value in more.items()]
        value = b'{"topic": "orders", "message": "m", "countdown": 3600}'
        journal.request_records.append(Record(offset, NOW_MS, None, value, [*headers]))


def reasons(client: redis.Redis) -> dict[int, str | None]:
    return {offset: decode(stored).reason for offset, stored in held(client).payloads.items()}


def test_rules_apply_to_requests_written_before_the_first_start(
    open_shard: Open, journal: FakeJournal, client: redis.Redis
) -> None:
    written(journal, 2)
    open_shard(NOBODY)
    assert reasons(client) == {0: "forbidden", 1: "forbidden"}


def test_a_rebuild_does_not_apply_new_rules_to_admitted_requests(
    open_shard: Open, journal: FakeJournal, client: redis.Redis
) -> None:
    written(journal, 3)
    journal.append(Receipt(1, delivered={"orders/0": [(0, 0)]}, read=2))
    open_shard(NOBODY)
    assert reasons(client) == {1: None, 2: "forbidden"}


def test_an_interrupted_rebuild_does_not_apply_new_rules_to_admitted_requests(
    open_shard: Open, journal: FakeJournal, client: redis.Redis
) -> None:
    written(journal, 100)
    delivered = [(offset, offset) for offset in range(90)]
    journal.append(Receipt(1, delivered={"orders/0": delivered}, read=100))

    def dies(batch: Batch, opening: Rebuild | None) -> None:
        raise IndexLost("cut")

    with pytest.raises(IndexLost):
        open_shard(FEW, apply=dies)
    open_shard(FEW)
    assert reasons(client) == dict.fromkeys(range(90, 100))


@pytest.mark.parametrize("rules", [ONE, FEW], ids=["over quota again", "room by now"])
@pytest.mark.parametrize("letters", [0, 1, 2])
def test_a_request_over_its_quota_has_one_outcome_if_redis_is_lost_before_or_after_its_dead_letter(
    open_shard: Open,
    make_intake: Callable[..., Intake],
    format: Format,
    journal: FakeJournal,
    writer: FakeWriter,
    targets: FakeTargets,
    client: redis.Redis,
    letters: int,
    rules: str,
) -> None:
    def dispatch_ticks(now_ms: int, count: int) -> None:
        index = make_intake(ONE).index
        assert isinstance(index, ShardIndex)
        follow_ups = FollowUps(SHARD, format, journal)
        triage = Triage(SHARD, targets, journal, partial(reread, format), "letters", follow_ups)
        for _ in range(count):
            Dispatch(index, writer, triage, BatchLimit(1)).tick(now_ms)

    open_shard(ONE)
    written(journal, 3)
    open_shard(ONE)
    assert reasons(client) == {0: None, 1: "quota", 2: "quota"}
    dispatch_ticks(NOW_MS, letters)
    refused = [1, 2][:letters]
    assert writer.sent_to("letters") == refused

    client.flushall()
    open_shard(rules)

    dispatch_ticks(NOW_MS + 3_600_000, 5)
    assert writer.sent_to("letters")[:letters] == refused
    outcomes = writer.sent_to("orders") + writer.sent_to("letters")
    assert sorted(outcomes) == [0, 1, 2]
    if letters == 1:  # its receipt says that all were judged, so the rest is admitted
        assert sorted(writer.sent_to("orders")) == [0, 2]


def test_a_replacement_that_is_refused_ends_the_same_request_live_and_in_a_rebuilt_index(
    open_shard: Open, make_intake: Callable[..., Intake], journal: FakeJournal, client: redis.Redis
) -> None:
    far = "[callers.shop]\nlongest_countdown_s = 7200"
    written(journal, 1)
    open_shard(far)
    intake = make_intake("[callers.shop]\nlongest_countdown_s = 60")
    written(journal, 1, **{REPLACES: request_id(SHARD, 0)})
    replacing = journal.request_records[1]
    assert replacing is not None
    intake.parse_and_store(Batch(1, 2, [replacing]), NOW_MS)
    assert reasons(client) == {1: "forbidden"}

    journal.append(Receipt(1, dead=[1], read=2))
    client.flushall()
    open_shard(far)
    assert reasons(client) == {}


@pytest.mark.parametrize(
    ("rules", "cause"),
    [
        ("[callers.shop]\nmost_pending = 1", "most_pending"),
        ("[callers.shop]\nrequests_per_second = 1", "requests_per_second"),
        ("[callers.shop]\nadmitted = false", "admitted"),
        ("[callers.shop]\ntargets = ['bills']", "targets"),
        ("[callers.shop]\nlongest_countdown_s = 5", "longest_countdown_s"),
        ("[callers.shop]\nlargest_message_bytes = 5", "largest_message_bytes"),
    ],
)
def test_of_a_large_refused_request_redis_keeps_only_the_rule(
    make_intake: Callable[..., Intake],
    connections: redis.ConnectionPool,
    client: redis.Redis,
    rules: str,
    cause: str,
) -> None:
    ShardIndex(SHARD, connections, grace_s=GRACE_S).begin(Positions(0, 0))
    intake = make_intake(rules)
    index = intake.index
    assert isinstance(index, ShardIndex)
    value = b'{"topic": "orders", "message": "%s", "countdown": 3600}' % (b"m" * 2000)
    records = [
        Record(offset, NOW_MS, None, value, [("CALLER_SERVICE", b"shop")]) for offset in range(3)
    ]

    intake.parse_and_store(Batch(0, 3, records), NOW_MS)

    assert index.refused([1, 2]) == {1: cause, 2: cause}
    assert held(client).payloads.keys() <= {0}


def test_a_long_series_leaves_no_counted_requests(
    make_intake: Callable[..., Intake], connections: redis.ConnectionPool, client: redis.Redis
) -> None:
    ShardIndex(SHARD, connections, grace_s=GRACE_S).begin(Positions(0, 0))
    intake = make_intake(FEW)
    index = intake.index
    assert isinstance(index, ShardIndex)
    for offset in range(300):
        due_ms = NOW_MS + 1000 * offset
        headers = [("CALLER_SERVICE", b"shop"), ("blackbox-follows", b"TB/0@0")][: 1 + bool(offset)]
        value = b'{"topic":"orders","message":"","id":"tick","every":1,"at":%d}' % due_ms
        intake.parse_and_store(
            Batch(offset, offset + 1, [Record(offset, due_ms, None, value, [*headers])]), due_ms
        )
        index.settle(Settlement({offset: "tick"}, offset + 1, counted={"shop": [offset]}))
    assert client.zcard(index._keys.of("shop")) == 0


def test_a_cancelled_request_does_not_count_as_pending_after_a_rebuild(
    open_shard: Open, journal: FakeJournal, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.index.shared_state.time.time_ns", lambda: NOW_MS * 1_000_000)
    written(journal, 10)
    open_shard(FEW)
    counted = Keys(SHARD).of("shop")
    assert client.zcard(counted) == 10
    cancels = [(CANCEL, request_id(SHARD, offset).encode()) for offset in range(9)]
    for offset, cancel in enumerate(cancels, 10):
        journal.request_records.append(Record(offset, NOW_MS, None, None, [cancel]))
    client.delete(Keys(SHARD).due)  # this causes a rebuild

    open_shard(FEW)

    assert client.zcard(counted) == 1


def test_a_postponed_request_counts_as_pending(
    make_intake: Callable[..., Intake], connections: redis.ConnectionPool, journal: FakeJournal
) -> None:
    ShardIndex(SHARD, connections, grace_s=GRACE_S).begin(Positions(0, 0))
    intake = make_intake(FEW)
    index = intake.index
    assert isinstance(index, ShardIndex)
    long_ago_ms = 1_000_000
    value = b'{"topic": "orders", "message": "m", "countdown": 0}'
    records = [
        Record(offset, long_ago_ms, None, value, [("CALLER_SERVICE", b"shop")])
        for offset in range(10)
    ]
    intake.parse_and_store(Batch(0, 10, records), long_ago_ms)
    index.postpone(dict.fromkeys(range(10), (NOW_MS, None)), NOW_MS)
    assert SharedState(connections).pending("shop", [SHARD]) == 10
    index.settle(Settlement(dict.fromkeys(range(4)), 1))
    assert SharedState(connections).pending("shop", [SHARD]) == 6


def test_ended_requests_behind_many_overdue_ones_are_no_longer_counted(
    make_intake: Callable[..., Intake], connections: redis.ConnectionPool
) -> None:
    ShardIndex(SHARD, connections, grace_s=GRACE_S).begin(Positions(0, 0))
    intake = make_intake("[callers.shop]\nmost_pending = 10000")
    index = intake.index
    assert isinstance(index, ShardIndex)
    value = b'{"topic": "orders", "message": "m", "countdown": 0}'
    records = [
        Record(offset, 1000 + offset, None, value, [("CALLER_SERVICE", b"shop")])
        for offset in range(2500)
    ]
    intake.parse_and_store(Batch(0, 2500, records), NOW_MS)
    index.settle(
        Settlement(dict.fromkeys(range(2000, 2500)), 1)
    )  # as recovery, which knows no callers

    shared = SharedState(connections)
    assert [shared.pending("shop", [SHARD]) for _ in range(4)] == [2500, 2500, 2000, 2000]
    index.settle(Settlement(dict.fromkeys(range(100)), 2))
    assert 1900 in [shared.pending("shop", [SHARD]) for _ in range(3)]


def test_only_the_counts_of_the_latest_seconds_are_kept(
    connections: redis.ConnectionPool, client: redis.Redis
) -> None:
    shared = SharedState(connections)
    for hour in range(1500):
        shared.count({Second("requests", "shop", 3600 * hour): 1})
    assert len(client.keys()) == 1
    assert client.hlen(client.keys()[0]) <= 1200
    latest = Second("requests", "shop", 3600 * 1499)
    assert shared.count({latest: 1}) == {latest: 1}


def test_quotas_apply_to_a_topic_that_was_created_again_while_the_service_runs(
    make_intake: Callable[..., Intake], client: redis.Redis
) -> None:
    intake = make_intake("[callers.shop]\nrequests_per_second = 2")

    def refused_of(topic_id: str, written_ms: Sequence[int]) -> list[int]:
        client.flushall()
        index = intake.index
        assert isinstance(index, ShardIndex)
        index.load()
        index.begin(Positions(0, 0), binding=Binding("cluster", topic_id, "receipts", "blackbox"))
        headers: Headers = [("CALLER_SERVICE", b"shop")]
        value = b'{"topic": "orders", "message": "m", "countdown": 3600}'
        records = [Record(n, at, None, value, headers) for n, at in enumerate(written_ms)]
        intake.parse_and_store(Batch(0, len(records), records), NOW_MS)
        payloads = held(client).payloads
        return [offset for offset in sorted(payloads) if decode(payloads[offset]).reason]

    assert refused_of("first", [NOW_MS] * 4) == [2, 3]
    apart = [NOW_MS - 5000, NOW_MS - 4000, NOW_MS - 3000, NOW_MS - 2000]
    assert refused_of("second", apart) == []
    assert refused_of("third", [NOW_MS] * 3) == [2]


def test_quotas_apply_behind_the_end_of_a_log_that_was_rebound_while_the_service_runs(
    make_intake: Callable[..., Intake], client: redis.Redis
) -> None:
    intake = make_intake("[callers.shop]\nrequests_per_second = 2")
    index, binding = intake.index, Binding("cluster", "topic", "receipts", "blackbox")
    assert isinstance(index, ShardIndex)
    index.begin(Positions(0, 0), binding=binding)
    value = b'{"topic": "orders", "message": "m", "countdown": 3600}'
    headers: Headers = [("CALLER_SERVICE", b"shop")]

    def take(start: int, *written_ms: int, epoch: int = 3) -> list[int]:
        records = [Record(n, at, None, value, headers) for n, at in enumerate(written_ms, start)]
        batch = Batch(start, start + len(records), records, (epoch, epoch))
        intake.parse_and_store(batch, NOW_MS)
        payloads = held(client).payloads
        return [record.offset for record in records if decode(payloads[record.offset]).reason]

    assert take(0, NOW_MS - 9000) == []
    assert take(1, *[NOW_MS] * 4) == [3, 4]
    index.settle(Settlement(dict.fromkeys(range(1, 5)), 0))
    index.load()
    index.rebind(Positions(1, 0), binding, tail=Tail(0, NOW_MS - 9000, crc32(value)))

    assert take(1, NOW_MS - 8000, NOW_MS - 7000, NOW_MS - 6000, epoch=4) == []
    assert take(4, *[NOW_MS - 5000] * 3, epoch=4) == [6]


def test_quotas_that_redis_could_not_count_apply_once_it_has_room(tmp_path: Path) -> None:
    class Room:
        is_full = True

        def count(self, more: Mapping[Second, int]) -> dict[Second, int]:
            if self.is_full:
                raise IndexFull("OOM")
            return dict.fromkeys(more, 0)

        def pending(self, caller: str, shards: Iterable[Shard]) -> int:
            return 0

    path = tmp_path / "callers.toml"
    path.write_text("[callers.shop]\nrequests_per_second = 1")
    counts = Room()
    judge = CallerAdmission(RulesFile(path), counts, lambda: [SHARD])
    with pytest.raises(IndexFull):
        judge.over_quota(SHARD, 3, [asked(0), asked(1), asked(2)])
    counts.is_full = False
    first = judge.over_quota(SHARD, 3, [asked(0), asked(1), asked(2)])
    assert list(first) == [1, 2]
    assert judge.over_quota(SHARD, 3, [asked(0), asked(1), asked(2)]) == first


def test_a_redis_that_hangs_delays_intake_once_however_many_callers_have_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging:
        questions = 0

        def count(self, more: Mapping[Second, int]) -> dict[Second, int]:
            self.questions += 1
            raise IndexLost("Redis does not answer")

        def pending(self, caller: str, shards: Iterable[Shard]) -> int:
            raise NotImplementedError

    path = tmp_path / "callers.toml"
    path.write_text(
        "[callers.shop]\nrequests_per_second = 1\n[callers.bank]\nrequests_per_second = 1"
    )
    now_s = 1000.0
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now_s))
    counts = Hanging()
    judge = CallerAdmission(RulesFile(path), counts, lambda: [SHARD])

    for second in range(20):
        now_s = 1000.0 + second
        both = [asked(2 * second), asked(2 * second + 1)._replace(caller="bank")]
        assert judge.over_quota(SHARD, 2 * second + 2, both) == {}
    assert counts.questions == 1
    now_s = 1021.0
    judge.over_quota(SHARD, 100, [asked(99)])

    assert counts.questions == 2
    assert len(caplog.records) == 1, "the outage is reported once"
