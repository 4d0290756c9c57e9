"""Decisions about an index that belongs to another topic, cluster or group, and later rebuilds."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from blackbox.core.bits import SEGMENT
from blackbox.core.intake import Intake
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Binding, Bounds, Positions
from blackbox.core.settlement import Settlement
from blackbox.formats import Options, make_format
from blackbox.index.keys import IDS_SENTINEL, Keys
from blackbox.index.shard_index import ShardIndex
from blackbox.index.stored_fields import OLDER
from blackbox.rebind import FITS, INTERRUPTED, NO_INDEX, leftovers, removal
from blackbox.rebind import topic_rebind as rebinding
from blackbox.rebind.decision import keep_partitions
from blackbox.rebind.later_records import WrittenSince
from blackbox.rebind.leftovers import Rebound
from blackbox.rebind.topic_rebind import _TopicRebind
from blackbox.records.entry import Entry
from blackbox.records.errors import (
    Fenced,
    ForeignIndex,
    IndexFull,
    JournalLost,
    RecoveryRequired,
    Refused,
)
from blackbox.records.outgoing import Outgoing, rewritten_request
from blackbox.records.receipt import Claim, Mark, Receipt
from blackbox.records.request import (
    Cancel,
    Headers,
    Reason,
    Record,
    Request,
    Shard,
    member,
    request_id,
)
from tests.contract.held import NOW_MS, PREFIX, SHARD, entry, held, store
from tests.support.fakes import FakeJournal, FakeWriter
from tests.unit.opening import Make, Written, delivered, request
from tests.unit.test_rebuild import reasons

LATER_MS = time.time_ns() // 1_000_000 + 3_600_000
OURS = Binding("cluster", "topic", "receipts", "blackbox")


SENT: list[Outgoing] = []


@pytest.fixture(autouse=True)
def _writes_to_lists(monkeypatch: pytest.MonkeyPatch, journal: FakeJournal) -> None:
    SENT.clear()
    monkeypatch.setattr(rebinding, "ShardWriter", lambda *_, **__: AskingWriter(journal))


@dataclass
class AskingWriter(FakeWriter):
    """Writes requests again, to lists."""

    def commit(self, receipt: Receipt, not_before_ms: int = 0) -> int:
        self._ask()
        return super().commit(receipt)

    def end(self) -> None:
        self._ask()

    def close(self) -> None:
        pass

    def _ask(self) -> None:
        for outgoing, _ in self._queued:
            SENT.append(outgoing)
            if outgoing.topic == SHARD.topic:
                offset = len(self.journal.request_records)
                headers = [
                    (n, v.encode() if isinstance(v, str) else v) for n, v in outgoing.headers
                ]
                record = Record(offset, 0, outgoing.key, outgoing.value, headers)
                self.journal.request_records.append(record)
                caller_id = None if outgoing.key is None else outgoing.key.decode()
                self.journal.format.parsed[offset] = request(caller_id)


class Run(_TopicRebind):
    """A rebind with journals in lists."""

    def __init__(self, journal: FakeJournal, pending: str = "drop", ours: Binding = OURS) -> None:
        self._ours = ours
        self._count = self._receipts_count = SHARD.partition + 1
        self._pending = pending  # type: ignore[assignment]
        self._format_name = "countdown"
        self._topic = SHARD.topic
        self._fake = journal
        self._access: Any = None
        self._large: Any = None
        self._trimmer: Any = SimpleNamespace(remove_receipts=self._remove_receipts)
        self._exactly_once = True
        self._keeps_partitions = True
        self._holders: dict[str, Shard] = {}
        self._dead_letter_topic = "dead"
        self._topics: Any = SimpleNamespace(partitions=lambda names, to: {"dead": 1})
        before, format = {SHARD.partition: journal.request_bounds()}, cast(Any, journal.format)
        self._since = WrittenSince(SHARD.topic, format, before, self._journal)

    def _journal(self, partition: int) -> Any:
        return self._fake

    def _remove_receipts(self, shard: Shard, upto: int) -> None:
        self._fake.first_receipt = max(upto, self._fake.first_receipt)

    def run(self, index: ShardIndex) -> Rebound:
        return self.rebind(index)


@pytest.mark.parametrize(("pending", "letters"), [("drop", 0), ("deliver", 1)])
def test_an_index_older_than_the_first_barrier_of_its_topic_is_rebuilt(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    pending: str, letters: int,
) -> None:  # fmt: skip
    write_records(request(), request(), request())
    make().open()
    journal.append(delivered(0, 1))
    client.flushall()
    empty_index.load()
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 6, {5: entry()})

    done = Run(journal, pending).run(empty_index)
    make().open()

    assert (done.again, done.dropped, done.letters) == (0, 1 - letters, letters)
    assert held(client).offsets() == [2]


def test_an_index_of_an_earlier_version_is_not_emptied(
    empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request())
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 6, {5: entry()})
    client.hset(PREFIX + "state", "format", OLDER[-1])

    with pytest.raises(ForeignIndex, match="rebind it with that version"):
        Run(journal, "deliver").run(empty_index)

    assert held(client).offsets() == [5]


@pytest.mark.parametrize(("pending", "left"), [("drop", [2]), ("deliver", [2, 3])])
def test_requests_that_another_group_delivered_are_not_delivered_again(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    pending: str, left: list[int],
) -> None:  # fmt: skip
    write_records(request(), request(), request())
    theirs = Receipt(1, barrier=True, topic_id="old", group="theirs")
    journal.append(theirs)
    journal.append(replace(theirs, topic_id="topic", mark=Mark(0, 2)))
    journal.append(delivered(0, 1))
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 6, {5: entry()})

    Run(journal, pending).run(empty_index)
    make().open()

    assert held(client).offsets() == left


def test_a_rebind_starts_an_index_for_a_new_topic_that_was_never_opened(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    journal.topic_id = "old"
    make().open()
    journal.append(delivered(0, 1))
    client.flushall()
    empty_index.load()
    journal.topic_id = "topic"
    write_records(request(), request())
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))

    Run(journal).run(empty_index)
    make().open()

    assert held(client).offsets() == [0, 1]


def test_a_group_opens_a_rebound_shard_although_redis_is_lost(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    make().open()
    journal.append(delivered(0))
    make().open()
    theirs = OURS._replace(group="others")
    run = Run(journal, ours=theirs)
    run.run(empty_index)
    client.flushall()

    replace(make(), group="others").open()

    assert held(client).offsets() == [1]


OTHERS = OURS._replace(receipts_id="others")


def test_requests_that_a_killed_owner_delivered_are_not_written_again(
    empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    journal.append(delivered(0))
    journal.append(delivered(1, 2))
    journal.absent.add(2)

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, len(journal.request_records)) == (1, 1)


def test_doubtful_requests_are_not_written_again_before_they_are_checked(
    empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    empty_index.mark_doubtful({0: Claim(0, "delivered", "orders/0", 7, "")})
    journal.append(delivered(1))
    journal.unreadable = {0, 1}

    with pytest.raises(RecoveryRequired, match="cannot read whether 2 requests were delivered"):
        Run(journal, "deliver").run(empty_index)
    assert journal.request_records == []

    journal.unreadable = set()
    done = Run(journal, "deliver").run(empty_index)
    assert (done.again, len(journal.request_records)) == (1, 1)


def test_a_rebind_knows_cancels_and_receipts_of_doubtful_requests(
    empty_index: ShardIndex, journal: FakeJournal
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(caller_id="a"), 1: entry(), 2: entry()})
    empty_index.mark_doubtful({o: Claim(o, "delivered", "orders/0", o, "") for o in (0, 1)})
    store(empty_index, 3, 4, {3: Cancel("a")})
    journal.absent = {0}
    journal.append(
        Receipt(1, void=[1], read=1)
    )  # its place is gone since then, and would count as delivered

    done = Run(journal, "deliver").run(empty_index)

    assert done.again == 2


def test_receipts_end_only_the_lost_requests_of_a_shortened_log(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS)
    write_records(*(request() for _ in range(3)))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    journal.append(delivered(0, 2))
    del journal.request_records[1:]

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.again == 1
    assert held(client).offsets() == [1]


def test_later_records_with_the_same_caller_id_in_a_new_topic_take_precedence(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    before = {n: entry(caller_id=name) for n, name in enumerate(("moved", "cancelled", "left"))}
    store(empty_index, 0, 3, before)
    write_records(request("moved"), Cancel("cancelled"))

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.superseded) == (1, 2)
    assert held(client).offsets() == [0, 2]


def test_a_request_cancelled_by_id_in_a_new_topic_is_not_written_again(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 8, {5: entry(), 6: entry(), 0: entry()})
    write_records(
        request(),
        Cancel(None, request_id(SHARD, 5)),
        Cancel(None, request_id(SHARD, 0)),  # of the new request of that id
    )

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.superseded) == (2, 1)
    assert held(client).offsets() == [3, 4]


@pytest.mark.parametrize(
    ("named", "is_superseded"),
    [(900, False), (1, False), (6, False), (5, False), (0, True)],
    ids=["never-known", "ended", "another-leftover", "itself", "written-since"],
)
def test_a_replacement_that_is_too_late_ends_no_request_with_its_caller_id(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    named: int, is_superseded: bool,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 8, {1: entry(), 5: entry(caller_id="a"), 6: entry()})
    journal.append(replace(delivered(1), topic_id="old"))
    write_records(request())
    write_records(request("a"), headers=[("blackbox-replaces", request_id(SHARD, named).encode())])

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.superseded == is_superseded
    assert [one.offset for one in SENT] == ([6] if is_superseded else [5, 6])
    assert (reasons(client)[1] == Reason.TOO_LATE) is not is_superseded


def test_a_rebind_frozen_until_another_has_finished_changes_nothing(
    make: Make, empty_index: ShardIndex, others_index: ShardIndex, write_records: Written,
    journal: FakeJournal, client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    commit, done = AskingWriter.commit, list[Rebound]()

    def frozen(self: AskingWriter, receipt: Receipt) -> int:
        if receipt.rebound and not done:
            done.append(Rebound(SHARD, "under way"))
            done.append(Run(journal, "deliver").run(others_index))
            make().open()
            raise Fenced("another run has opened the shard")
        return commit(self, receipt)

    monkeypatch.setattr(AskingWriter, "commit", frozen)
    woken = Run(journal, "deliver").run(empty_index)

    assert (woken.why, woken.again, done[1].again) == (FITS, 0, 3)
    assert len(journal.request_records) == 3
    assert held(client).offsets() == [0, 1, 2]


def test_a_rebind_that_waits_for_another_does_not_change_its_result(
    make: Make, empty_index: ShardIndex, others_index: ShardIndex, write_records: Written,
    journal: FakeJournal, client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    others = iter([others_index])

    def after_another(self: AskingWriter) -> None:
        for index in others:
            assert Run(journal, "deliver").run(index).again == 3
            make().open()

    monkeypatch.setattr(AskingWriter, "open", after_another)
    waited = Run(journal, "deliver").run(empty_index)

    assert (waited.why, waited.again) == (FITS, 0)
    assert held(client).offsets() == [0, 1, 2]
    assert len(journal.request_records) == 3


def test_a_rebind_writes_a_future_dead_letter_and_not_its_request(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    unknown = entry()._replace(reason=Reason.OUTCOME_UNKNOWN, detail="who knows")
    store(empty_index, 0, 1, {0: unknown})

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, done.letters) == (0, 1)
    assert [one.topic for one in SENT] == ["dead"]
    assert ("blackbox-reason", "outcome-unknown") in SENT[0].headers


def test_a_rebind_does_not_deliver_requests_that_have_expired(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    now_ms = time.time_ns() // 1_000_000
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    due = entry(now_ms - 7_200_000)
    store(empty_index, 0, 2, {
        0: due._replace(expires_ms=due.due_ms + 60_000),
        1: due._replace(expires_ms=now_ms + 60_000),
    })  # fmt: skip

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, done.letters) == (1, 1)
    [letter] = [one for one in SENT if one.topic == "dead"]
    assert letter.offset == 0
    assert ("blackbox-reason", "expired") in letter.headers
    # Replayed, it has as much time as at first.
    assert orjson.loads(letter.value or b"")["expires_after"] == 60


def again(then: Entry) -> Request:
    """What intake reads of this entry of an old topic after a rebind."""
    written = rewritten_request(SHARD, 0, then, -1, written_ms := time.time_ns() // 1_000_000)
    format = make_format("countdown", Options(10**6, own_topics=lambda _: False, topic=SHARD.topic))
    record = Record(0, written_ms, written.key, written.value, [], None, True)
    request = format.parse(record, written_ms)
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("due_in_s", [-7200, 3600], ids=["overdue", "future"])
def test_a_request_that_is_written_again_expires_when_it_would_have_before(due_in_s: int) -> None:
    due_ms = time.time_ns() // 1_000_000 + due_in_s * 1000
    then = entry(due_ms)._replace(expires_ms=due_ms + 7_260_000)

    assert again(then).expires_ms == then.expires_ms


def test_an_overdue_recurring_request_is_written_again_with_its_times() -> None:
    due_ms = time.time_ns() // 1_000_000 - 7_200_000
    then = entry(due_ms, caller_id="a")._replace(
        expires_ms=due_ms + 60_000, recurs="every 86400000"
    )

    assert (again(then).due_ms, again(then).expires_ms) == (due_ms, then.expires_ms)


def test_a_rebind_writes_an_expired_recurring_request_again(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    due_ms = time.time_ns() // 1_000_000 - 7_200_000
    then = entry(due_ms, caller_id="a")._replace(
        expires_ms=due_ms + 60_000, recurs="every 86400000"
    )
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 1, {0: then})

    assert Run(journal, "deliver").run(empty_index).again == 1


def test_a_request_whose_payload_redis_lost_becomes_a_dead_letter(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 2, {0: entry(), 1: entry()})
    client.delete(Keys(SHARD).message(member(1)))

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, done.letters, done.dropped) == (1, 1, 0)
    assert ("blackbox-reason", "payload-lost") in SENT[1].headers


def test_a_rebind_names_a_missing_dead_letter_topic_and_loses_nothing(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 1, {0: entry()._replace(reason=Reason.OUTCOME_UNKNOWN)})
    run = Run(journal, "deliver")
    run._topics = SimpleNamespace(partitions=lambda names, to: {})

    with pytest.raises(RecoveryRequired, match="the topic dead does not exist; create it"):
        run.run(empty_index)

    assert Run(journal, "deliver").run(empty_index).letters == 1


def keep(client: Any) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.keys("*")}


def restore_keys(client: Any, then: dict[bytes, bytes]) -> None:
    client.flushall()
    for key, value in then.items():
        client.restore(key, 0, value)


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("topic_id", "moment"),
    [("old", "discard"), ("topic", "settle"), ("topic", "rebind")],
)
@pytest.mark.parametrize("receipts_id", ["receipts", "others"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
def test_a_rebind_killed_after_its_commit_writes_nothing_twice(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, topic_id: str, receipts_id: str, moment: str, is_lost: bool,
) -> None:  # fmt: skip
    theirs = OURS._replace(topic_id=topic_id, receipts_id=receipts_id)
    empty_index.begin(Positions(0, 0), binding=theirs)
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    client.hset(Keys(SHARD).state, "tail", orjson.dumps((2, 1, 1)))

    with monkeypatch.context() as patched:
        patched.setattr(ShardIndex, moment, killed)
        with pytest.raises(KeyboardInterrupt):
            Run(journal, "deliver").run(empty_index)
    if is_lost:
        client.flushall()
    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.why == (NO_INDEX if is_lost else INTERRUPTED)
    assert len(journal.request_records) == 3
    assert held(client).offsets() == [0, 1, 2]


@pytest.mark.parametrize("receipts_id", ["receipts", "others"])
@pytest.mark.parametrize("topic_id", ["old", "topic"], ids=["created-again", "cut"])
def test_a_rebind_that_was_killed_before_its_commit_has_changed_nothing(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, topic_id: str, receipts_id: str,
) -> None:  # fmt: skip
    theirs = OURS._replace(topic_id=topic_id, receipts_id=receipts_id)
    empty_index.begin(Positions(0, 0), binding=theirs)
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})

    with monkeypatch.context() as patched:
        patched.setattr(AskingWriter, "flush", killed)
        with pytest.raises(KeyboardInterrupt):
            Run(journal, "deliver").run(empty_index)
    with pytest.raises(ForeignIndex):
        make().open()
    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, len(journal.request_records)) == (3, 3)
    assert held(client).offsets() == [0, 1, 2]


@pytest.mark.parametrize("is_cut", [False, True], ids=["created-again", "cut"])
@pytest.mark.parametrize("is_done", [False, True], ids=["interrupted", "done"])
def test_a_redis_rolled_back_before_a_rebind_writes_nothing_twice(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, is_cut: bool, is_done: bool,
) -> None:  # fmt: skip
    journal.topic_id = "topic" if is_cut else "old"
    write_records(*(request() for _ in range(5)))
    make().open()
    journal.topic_id = "topic"
    then = keep(client)
    if is_cut:
        del journal.request_records[2:]
    else:
        del journal.request_records[:]

    empty_index.load()
    with monkeypatch.context() as patched:
        if not is_done:
            patched.setattr(ShardIndex, "rebind", killed)
            patched.setattr(ShardIndex, "discard", killed)
            with pytest.raises(KeyboardInterrupt):
                Run(journal, "deliver").run(empty_index)
        else:
            Run(journal, "deliver").run(empty_index)
    if is_done:
        write_records(request())
        make().open()
        journal.append(delivered(3))
    written = len(journal.request_records)
    restore_keys(client, then)
    Run(journal, "deliver").run(empty_index)
    make().open()

    assert len(journal.request_records) == written
    left = [0, 1, 2, 3, 4, 5] if is_done else [0, 1, 2, 3, 4]
    assert held(client).offsets() == [one for one in left if not is_done or one != 3]


def test_a_redis_rolled_back_into_a_finished_rebind_delivers_nothing_twice(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(5)))
    make().open()
    del journal.request_records[2:]
    within: list[dict[bytes, bytes]] = []
    take_off = removal.take_off

    def kept_and_taken_off(index: ShardIndex, first: int) -> None:
        within.append(keep(client))
        take_off(index, first)

    empty_index.load()
    monkeypatch.setattr(rebinding, "take_off", kept_and_taken_off)
    Run(journal, "deliver").run(empty_index)
    make().open()
    journal.append(delivered(3))

    restore_keys(client, within[0])
    Run(journal, "deliver").run(empty_index)
    make().open()

    assert len(journal.request_records) == 5
    assert held(client).offsets() == [0, 1, 2, 4]


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_old_index_of_a_shortened_log_delivers_nothing_twice(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, is_killed: bool,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(5)))
    make().open()
    then = keep(client)
    make().open()
    del journal.request_records[2:]
    empty_index.load()
    assert Run(journal, "deliver").run(empty_index).again == 3
    make().open()
    journal.append(delivered(3))

    restore_keys(client, then)
    client.hset(Keys(SHARD).state, "token", "of an earlier opening")
    if is_killed:
        with monkeypatch.context() as patched:
            patched.setattr(ShardIndex, "settle", killed)
            with pytest.raises(KeyboardInterrupt):
                Run(journal, "deliver").run(empty_index)
    Run(journal, "deliver").run(empty_index)
    make().open()

    assert sum(one.topic == "dead" for one in SENT) == 3
    assert held(client).offsets() == [0, 1, 2, 4]


def test_a_second_loss_of_records_is_noticed_although_nothing_was_read(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(5)))
    make().open()
    del journal.request_records[3:]
    empty_index.load()
    Run(journal, "drop").run(empty_index)
    make().open()

    del journal.request_records[2:]
    for _ in range(4):
        written_since(journal)

    with pytest.raises(ForeignIndex, match="is not the one that was read there"):
        make().open()


@pytest.mark.parametrize("moment", ["commit", "flush"])
def test_a_topic_recreated_during_a_rebind_needs_another_rebind(
    empty_index: ShardIndex, journal: FakeJournal, client: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 2, {0: entry(), 1: entry()})
    real = getattr(AskingWriter, moment)

    def meanwhile(self: AskingWriter, *arguments: Any) -> Any:
        journal.topic_id = "newer"
        return real(self, *arguments)

    monkeypatch.setattr(AskingWriter, moment, meanwhile)
    with pytest.raises(
        RecoveryRequired, match="created again in the meantime; run blackbox rebind TB again"
    ):
        Run(journal, "deliver").run(empty_index)
    again = Run(journal, "deliver", OURS._replace(topic_id="newer")).run(empty_index)

    assert again.again == 2


def written_since(
    journal: FakeJournal, caller_id: str | None = None, headers: Headers | None = None
) -> None:
    """A request that a caller wrote after the log had lost its end."""
    offset = len(journal.request_records)
    journal.request_records.append(Record(offset, 10, b"key", b"{}", headers or [], None, True))
    journal.format.parsed[offset] = request(caller_id)


@pytest.mark.parametrize(
    ("named", "again", "why"),
    [
        (0, [3], None),
        (1, [2, 3], Reason.TOO_LATE),
        (2, [2, 3], Reason.TOO_LATE),
        (3, [2, 3], Reason.TOO_LATE),
    ],
    ids=["still-there", "ended", "itself", "another-leftover"],
)
def test_after_a_loss_a_replacement_counts_if_the_request_that_it_names_is_still_there(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    named: int, again: list[int], why: str | None,
) -> None:  # fmt: skip
    write_records(request(), request(), request("a"), request())
    make().open()
    journal.append(delivered(1))
    del journal.request_records[2:]
    written_since(journal, "a", [("blackbox-replaces", request_id(SHARD, named).encode())])
    empty_index.load()

    Run(journal, "deliver").run(empty_index)
    make().open()

    assert [one.offset for one in SENT] == again
    assert reasons(client)[2] == why


@pytest.mark.parametrize("is_delivered", [False, True], ids=["open", "under-a-longer-horizon"])
@pytest.mark.parametrize(
    ("named", "again", "why"),
    [(0, [], None), (1, [3], Reason.TOO_LATE), (4, [3], Reason.TOO_LATE)],
    ids=["still-there", "cancelled", "lost"],
)
def test_after_a_loss_a_replacement_counts_if_the_cold_request_that_it_names_is_still_there(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    named: int, again: list[int], why: str | None, is_delivered: bool,
) -> None:  # fmt: skip
    # Those that are due later are cold: the records have the timestamp 0.
    intake, far_ms = Intake(cast(Any, journal.format), empty_index, NOW_MS), NOW_MS + 86_400_000
    write_records(
        request(due_ms=far_ms), request(due_ms=far_ms), Cancel(None, request_id(SHARD, 1))
    )
    write_records(request("a"), request(due_ms=far_ms))
    make(apply=lambda batch, opening: intake.parse_and_store(batch, NOW_MS, opening)).open()
    del journal.request_records[3:]
    written_since(journal, "a", [("blackbox-replaces", request_id(SHARD, named).encode())])
    if is_delivered:
        journal.append(delivered(0))
    empty_index.load()

    Run(journal, "deliver").run(empty_index)
    make().open()

    assert [one.offset for one in SENT] == again
    assert held(client).offsets() == [3, *(4 for _ in again)]
    assert reasons(client)[3] == why


def test_records_after_lost_ones_are_read_although_the_log_is_shorter(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(5)))
    make().open()
    del journal.request_records[2:]
    written_since(journal)
    empty_index.load()

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.again == 3
    assert held(client).offsets() == [0, 1, 2, 3, 4, 5]


def test_records_after_lost_ones_are_read_although_redis_was_lost(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(5)))
    make().open()
    journal.append(Receipt(5, read=5, mark=Mark(5, 1), topic_id="topic", group="blackbox"))
    del journal.request_records[2:]
    written_since(journal)
    client.flushall()

    Run(journal, "deliver").run(empty_index)
    make().open()

    assert held(client).offsets() == [2]


def test_a_frozen_owner_that_wakes_during_a_rebind_hides_no_request(
    make: Make, empty_index: ShardIndex, others_index: ShardIndex, write_records: Written, journal: FakeJournal,
    client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(1), 1: entry(2), 2: entry(3)})
    others_index.load()
    stored, calls = ShardIndex.stored, iter(range(10))

    def beside_another(self: ShardIndex, rank: int, limit: int) -> Any:
        if next(calls) == 1:
            others_index.postpone({0: (LATER_MS, None)}, 0)
        return stored(self, rank, limit)

    monkeypatch.setattr(leftovers, "AT_ONCE", 1)
    monkeypatch.setattr(ShardIndex, "stored", beside_another)
    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.again == 3
    assert held(client).offsets() == [0, 1, 2]


def test_lost_requests_free_their_caller_ids_and_quotas(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request(name) for name in ("a", "b", "c")))
    make().open()
    keys = Keys(SHARD)
    client.hset(keys.ids, "cold", member(2))
    client.zadd(keys.callers, {"shop": 0})
    client.zadd(keys.of("shop"), {member(0): 1, member(1): 2, member(2): 3})
    del journal.request_records[1:]
    empty_index.load()

    Run(journal, "drop").run(empty_index)

    assert client.hgetall(keys.ids).keys() - {IDS_SENTINEL} == {b"a"}
    assert client.zrange(keys.of("shop"), 0, -1) == [member(0)]


class NotSoMany(AskingWriter):
    """Kafka takes each record, but not more than ten in a batch."""

    sent: int = 0

    def send(self, *record: Any) -> Any:
        self.sent += 1
        return super().send(*record)

    def flush(self, hopeless: Any = dict) -> Any:
        count, self.sent = self.sent, 0
        if count > 10:
            raise Refused({one.offset: (Reason.TOO_LARGE, "a batch") for one, _ in self._queued})
        return super().flush(hopeless)


def test_a_rebind_writes_all_requests_although_kafka_limits_the_batch(
    make: Make, empty_index: ShardIndex, journal: FakeJournal, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 25, {n: entry() for n in range(25)})
    monkeypatch.setattr(rebinding, "ShardWriter", lambda *_, **__: NotSoMany(journal))

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.letters) == (25, 0)
    assert held(client).offsets() == list(range(25))


def test_an_interrupted_rebind_continues_with_former_partitions(
    journal: FakeJournal, connections: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in range(4):
        index = ShardIndex(Shard(SHARD.topic, partition), connections, grace_s=1)
        index.load()
        index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))

    def run() -> list[Rebound]:
        one = Run(journal)
        one._count = one._receipts_count = 1
        one._connections, one._grace_s = connections, 1
        with ExitStack() as one._ending:
            return one.shards()

    real, calls = ShardIndex.discard, iter(range(9))

    def interrupted(self: ShardIndex) -> None:
        real(self)
        if next(calls) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ShardIndex, "discard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    run()

    assert client.keys("*:state") == []


def one_caller_id_in_two_partitions(connections: Any) -> list[ShardIndex]:
    """The indexes of two partitions, each with a request under the same id."""
    indexes = [ShardIndex(Shard(SHARD.topic, n), connections, grace_s=600) for n in (0, 1)]
    for index in indexes:
        index.load()
        index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
        store(index, 0, 1, {0: entry(caller_id="a")})
    return indexes


@pytest.mark.parametrize("is_fenced", [False, True], ids=["at-once", "fenced"])
@pytest.mark.parametrize("keeps", [False, True], ids=["other-number", "same-number"])
def test_requests_of_one_caller_id_in_two_partitions_do_not_replace_each_other(
    journal: FakeJournal, connections: Any, client: Any, monkeypatch: pytest.MonkeyPatch,
    keeps: bool, is_fenced: bool,
) -> None:  # fmt: skip
    indexes = one_caller_id_in_two_partitions(connections)
    run = Run(journal, "deliver")
    run._keeps_partitions = keeps
    run._since.before = {n: Bounds(0, 0) for n in range(SHARD.partition + 1)}
    if is_fenced:
        real, fenced = AskingWriter.commit, iter([Fenced("another owner opened this shard")])

        def commit(self: AskingWriter, *arguments: Any) -> int:
            if len(self._queued) and (error := next(fenced, None)):
                raise error
            return real(self, *arguments)

        monkeypatch.setattr(AskingWriter, "commit", commit)

    # Each shard has its own receipts.
    journals = [journal, FakeJournal(format=journal.format)]
    monkeypatch.setattr(rebinding, "ShardWriter", lambda *_, **__: AskingWriter(run._fake))
    done = []
    for index, run._fake in zip(indexes, journals, strict=True):
        done.append(run.run(index))

    assert [(one.again, one.letters) for one in done] == [(1, 0), (1, 0) if keeps else (0, 1)]
    if not keeps:
        assert [one.topic for one in SENT] == [SHARD.topic, "dead"]
        assert ("blackbox-reason", "refused") in SENT[1].headers


@pytest.mark.parametrize("caller_wrote", [False, True], ids=["nothing", "a-request"])
def test_an_interrupted_rebind_remembers_which_partitions_request_has_a_caller_id(
    journal: FakeJournal, connections: Any, client: Any, monkeypatch: pytest.MonkeyPatch, caller_wrote: bool
) -> None:  # fmt: skip
    indexes = one_caller_id_in_two_partitions(connections)
    then = keep(client)

    def run(index: ShardIndex) -> Rebound:
        """One run, whose receipts are lost: it was killed, with at-least-once delivery."""
        records = journal.request_records
        receipts = FakeJournal(request_records=records, format=journal.format)
        one = Run(receipts, "deliver")
        one._keeps_partitions = False
        one._since.before = {n: receipts.request_bounds() for n in range(SHARD.partition + 1)}
        monkeypatch.setattr(rebinding, "ShardWriter", lambda *_, **__: AskingWriter(receipts))
        return one.run(index)

    first = run(indexes[0])
    if caller_wrote:
        written_since(journal, "a")
    restore_keys(client, then)
    itself, other = run(indexes[0]), run(indexes[1])

    assert (first.again, itself.again, itself.superseded) == (1, 0, 1)
    assert (other.letters, other.superseded) == ((0, 1) if caller_wrote else (1, 0))
    assert len(SENT) == 1 + other.letters


def test_an_interrupted_rebind_to_another_cluster_can_be_undone(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS)
    write_records(*(request() for _ in range(3)))
    make().open()
    journal.append(delivered(1))
    make().open()

    theirs = OURS._replace(cluster_id="theirs", topic_id="their topic")
    empty_index.load()
    there = FakeJournal(format=journal.format, topic_id="their topic")
    elsewhere = Run(there, "deliver", theirs)
    with monkeypatch.context() as patched:
        patched.setattr(rebinding, "ShardWriter", lambda *_, **__: AskingWriter(there))
        patched.setattr(ShardIndex, "discard", killed)
        with pytest.raises(KeyboardInterrupt):
            elsewhere.run(empty_index)

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.dropped) == (0, 0)
    assert len(journal.request_records) == 3
    assert held(client).offsets() == [0, 2]


@pytest.mark.parametrize(
    ("former", "keeps"),
    [([0, 1, 2, 3], True), ([3], True), ([0, 1], False), ([5], False), ([], True)],
)
def test_requests_keep_their_partitions_unless_the_number_changed(
    former: list[int], keeps: bool
) -> None:
    assert keep_partitions(former, 4) is keeps


def too_large(outgoing: Outgoing) -> Any:
    return (Reason.TOO_LARGE, "1 MB") if outgoing.offset == 1 and outgoing.topic != "dead" else None


@pytest.mark.parametrize("exactly_once", [True, False])
@pytest.mark.parametrize("who", ["fails", "refuses"])
def test_a_rebind_dead_letters_a_request_that_kafka_refuses(
    make: Make, empty_index: ShardIndex, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, who: str, exactly_once: bool,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    script: dict[str, Any] = {who: too_large, "exactly_once": exactly_once}
    monkeypatch.setattr(rebinding, "ShardWriter", lambda *_, **__: AskingWriter(journal, **script))

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.letters) == (2, 1)
    assert held(client).offsets() == [0, 1]
    [letter] = [one for one in SENT if one.topic == "dead"]
    assert ("blackbox-reason", "too-large") in letter.headers
    assert orjson.loads(letter.value or b"")["topic"] == entry().target


def no_threes(outgoing: Outgoing) -> Any:
    return (Reason.REFUSED, "no") if outgoing.offset == 3 and outgoing.topic != "dead" else None


def test_a_rebind_writes_all_lost_requests_although_kafka_refuses_one(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(leftovers, "AT_ONCE", 3)
    monkeypatch.setattr(
        rebinding, "ShardWriter", lambda *_, **__: AskingWriter(journal, fails=no_threes)
    )
    write_records(request(), request())
    empty_index.begin(Positions(0, 0), binding=OURS)
    order = [3, 5, 1, 0, 4, 2]
    store(empty_index, 0, 6, {offset: entry(LATER_MS + n) for n, offset in enumerate(order)})

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.letters) == (3, 1)
    assert sorted(held(client).offsets()) == [0, 1, 2, 3, 4]


def test_an_index_older_than_its_new_receipts_is_rebuilt_from_them(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(due_ms=LATER_MS), request(due_ms=LATER_MS))
    make().open()
    journal.append(delivered(0, read=2))
    client.flushall()
    empty_index.load()
    empty_index.begin(Positions(0, 0), binding=OTHERS)
    store(empty_index, 0, 2, {0: entry(LATER_MS), 1: entry(LATER_MS)})

    Run(journal, "deliver").run(empty_index)
    make().open()

    assert held(client).offsets() == [1]


@pytest.mark.parametrize("group", ["blackbox", "others"])
def test_outcomes_missing_in_new_receipts_are_unknown_although_redis_is_lost(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any, group: str
) -> None:  # fmt: skip
    write_records(request())
    empty_index.begin(Positions(0, 0), binding=OTHERS)
    store(empty_index, 0, 1, {0: entry()})

    Run(journal, "deliver", OURS._replace(group=group)).run(empty_index)
    client.flushall()
    replace(make(), group=group).open()

    assert reasons(client) == {0: Reason.OUTCOME_UNKNOWN}


def test_a_removed_partition_keeps_no_index_and_is_written_again_once(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 1, {0: entry()})
    then = {key: client.dump(key) for key in client.keys("*")}

    def run() -> Rebound:
        one = Run(journal, "deliver")
        one._count = SHARD.partition
        one._since.before = {n: Bounds(0, 0) for n in range(SHARD.partition)}
        one._keeps_partitions = False
        return one.run(empty_index)

    first = run()
    assert held(client).positions is None
    for key, value in then.items():
        client.restore(key, 0, value)
    second = run()

    assert (first.again, second.again, second.letters) == (1, 0, 0)
    assert second.why == INTERRUPTED


def test_a_rebind_works_in_a_full_redis(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_records(request())
    make().open()
    empty_index.load()
    run, exec_ = Run(journal, ours=OURS._replace(group="others")), ShardIndex._run_multi
    full: list[bool] = []

    def refused(self: ShardIndex, *args: Any) -> bool:
        if not full:
            full.append(True)
            self._redis.ask("UNWATCH")
            raise IndexFull("Redis has no memory left")
        return exec_(self, *args)

    monkeypatch.setattr(ShardIndex, "_run_multi", refused)
    run.run(empty_index)

    assert full
    replace(make(), group="others").open()


def test_outcomes_of_deleted_receipts_are_unknown_if_redis_is_lost_later(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    empty_index.begin(Positions(0, 0), binding=OTHERS, mark=Mark(2, 7))
    store(empty_index, 0, 2, {})
    Run(journal, "deliver").run(empty_index)
    assert make().open().mark is None
    write_records(request(due_ms=LATER_MS))
    client.flushall()

    make().open()

    assert reasons(client) == {0: Reason.OUTCOME_UNKNOWN, 1: Reason.OUTCOME_UNKNOWN, 2: None}


def test_a_new_mark_leaves_no_outcome_of_deleted_receipts_unknown(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    empty_index.begin(Positions(0, 0), binding=OTHERS)
    store(empty_index, 0, 2, {})
    Run(journal, "deliver").run(empty_index)
    make().open()
    journal.append(Receipt(1, read=2, mark=Mark(2, len(journal.receipt_records))))
    write_records(request())
    client.flushall()

    make().open()

    assert reasons(client) == {2: None}


def test_a_rebind_to_new_receipts_discards_the_old_mark(
    empty_index: ShardIndex, journal: FakeJournal, write_records: Written
) -> None:
    write_records(request(), request())
    empty_index.begin(Positions(2, 9), binding=OTHERS, mark=Mark(2, 7, [(3, 8)]))
    empty_index.load()

    Run(journal, "deliver").run(empty_index)

    kept = empty_index.load()
    assert kept is not None
    assert (kept.mark, kept.positions) == (None, Positions(2, 0))
    assert kept.unknown_ms > LATER_MS - 3_600_000


def test_receipts_of_lost_requests_do_not_end_new_ones_at_their_offsets(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(5)))
    empty_index.begin(Positions(0, 0), binding=OURS)
    make().open()
    journal.append(delivered(0, 1, 2, 3, 4, read=5))
    journal.append(Receipt(1, read=5, mark=Mark(4, 1), topic_id="topic", group="blackbox"))
    make().open()
    del journal.request_records[2:]

    Run(journal, "deliver").run(empty_index)
    write_records(request(), request(), request())
    make().open()
    journal.append(delivered(3))
    client.flushall()
    make().open()

    assert held(client).offsets() == [2, 4]


def test_an_old_index_ignores_outcomes_of_lost_requests(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(2)))
    make().open()
    then = {key: client.dump(key) for key in client.keys("*")}
    write_records(*(request() for _ in range(3)))
    make().open()
    journal.append(delivered(0, 2, 3, 4, read=5))
    make().open()
    del journal.request_records[2:]
    Run(journal, "deliver").run(empty_index)
    write_records(request(), request(), request())
    client.flushall()
    for key, value in then.items():
        client.restore(key, 0, value)

    make().open()

    assert held(client).offsets() == [1, 2, 3, 4]


def test_a_frozen_owners_receipt_of_an_old_topic_ends_no_new_request(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_records(request(), request())
    make().open()
    journal.append(delivered(1))
    empty_index.load()
    empty_index.settle(Settlement({0: None, 1: None}, 3))
    journal.topic_id = "new"
    run = Run(journal, ours=OURS._replace(topic_id="new"))
    frozen = iter([delivered(0)])

    def opened(self: AskingWriter) -> None:
        for receipt in frozen:
            journal.append(receipt)

    monkeypatch.setattr(AskingWriter, "open", opened)
    run.run(empty_index)
    make().open()

    assert held(client).offsets() == [0, 1]
    assert journal.first_receipt > 0


@pytest.mark.parametrize("is_kept", [False, True], ids=["removed", "kept"])
def test_old_receipts_end_no_request_of_a_new_topic_although_redis_is_lost(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any, is_kept: bool
) -> None:  # fmt: skip
    journal.append(Receipt(1, barrier=True, topic_id="old", group="blackbox"))
    journal.append(delivered(0, 1))
    empty_index.begin(Positions(2, 4), binding=OURS._replace(topic_id="old"))
    empty_index.load()
    write_records(request(), request(), request())
    run = Run(journal)
    if is_kept:  # as a topic's settings may require
        run._trimmer.remove_receipts = lambda *_: None

    run.run(empty_index)
    journal.append(delivered(1))
    client.flushall()
    make().open()

    assert reasons(client) == {0: None, 2: None}


@pytest.mark.parametrize("doubt", [Fenced, JournalLost])
@pytest.mark.parametrize("step", ["begin", "commit"])
@pytest.mark.parametrize("nth", [0, 1], ids=["taking-over", "asking-again"])
def test_a_rebind_that_a_service_fences_continues(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, nth: int, step: str, doubt: type[Exception],
) -> None:  # fmt: skip
    write_records(request())
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 1, {0: entry()})
    real, calls = getattr(AskingWriter, step), iter(range(10))

    def fenced(self: AskingWriter, *arguments: Any) -> Any:
        if next(calls) == nth:
            raise doubt("another owner opened this shard")
        return real(self, *arguments)

    monkeypatch.setattr(AskingWriter, step, fenced)
    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (next(calls) > nth + 1, done.again) == (True, 1)
    assert held(client).offsets() == [0, 1]


def test_a_mark_beyond_a_shortened_log_applies_up_to_its_end(
    make: Make, empty_index: ShardIndex, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    make().open()
    journal.append(Receipt(1, read=5, mark=Mark(5, 1), topic_id="topic", group="blackbox"))
    client.flushall()
    empty_index.load()

    Run(journal, "deliver").run(empty_index)
    client.flushall()
    write_records(request())
    make().open()

    assert held(client).offsets() == [2]


def test_an_offset_set_forgets_everything_from_an_offset_on() -> None:
    ended = OffsetSet()
    many = [0, 8, 9, SEGMENT - 1, SEGMENT, 3 * SEGMENT + 5]
    ended.add(many)

    ended.forget_from(9)

    assert [offset for offset in many if offset in ended] == [0, 8]
