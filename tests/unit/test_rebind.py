"""What is decided about an index that belongs to something else, and what a rebuild makes of it later."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from blackbox.core.bits import SEGMENT
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Binding, Bounds, Positions
from blackbox.index.keys import IDS_SENTINEL, Keys
from blackbox.index.shard_index import ShardIndex
from blackbox.rebind import FITS, INTERRUPTED, NO_INDEX, leftovers
from blackbox.rebind import topic_rebind as rebinding
from blackbox.rebind.decide import keep_partitions
from blackbox.rebind.leftovers import Rebound
from blackbox.rebind.since import WrittenSince
from blackbox.rebind.topic_rebind import _TopicRebind
from blackbox.records.errors import (
    Fenced,
    ForeignIndex,
    IndexFull,
    JournalLost,
    RecoveryRequired,
    Refused,
)
from blackbox.records.outgoing import Outgoing
from blackbox.records.receipt import Claim, Mark, Receipt
from blackbox.records.request import Cancel, Reason, Record, Shard, member, request_id
from tests.contract.held import SHARD, entry, held, store
from tests.fakes import FakeJournal, FakeWriter
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
    """Asks for requests again, in lists."""

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
                self.journal.format.parsed[offset] = request()


class Run(_TopicRebind):
    """Over journals in lists."""

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
def test_an_index_older_than_the_first_opening_of_the_topic_is_rebuilt_and_delivers_nothing_again(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    pending: str, letters: int,
) -> None:  # fmt: skip
    asked(request(), request(), request())
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


@pytest.mark.parametrize(("pending", "left"), [("drop", [2]), ("deliver", [2, 3])])
def test_what_another_group_delivered_of_a_new_topic_is_not_delivered_again(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    pending: str, left: list[int],
) -> None:  # fmt: skip
    asked(request(), request(), request())
    theirs = Receipt(1, barrier=True, topic_id="old", group="theirs")
    journal.append(theirs)
    journal.append(replace(theirs, topic_id="topic", mark=Mark(0, 2)))
    journal.append(delivered(0, 1))
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 6, {5: entry()})

    Run(journal, pending).run(empty_index)
    make().open()

    assert held(client).offsets() == left


def test_an_index_of_an_old_topic_is_begun_at_the_new_one_that_nobody_has_opened(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    journal.topic_id = "old"
    make().open()
    journal.append(delivered(0, 1))
    client.flushall()
    empty_index.load()
    journal.topic_id = "topic"
    asked(request(), request())
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))

    Run(journal).run(empty_index)
    make().open()

    assert held(client).offsets() == [0, 1]


def test_a_group_that_took_over_an_index_opens_its_shard_also_when_redis_is_lost_right_after(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(request(), request())
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


def test_what_its_last_owner_delivered_before_it_was_killed_is_not_asked_for_again(
    empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    journal.append(delivered(0))
    journal.append(delivered(1, 2))
    journal.absent.add(2)

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, len(journal.request_records)) == (1, 1)


def test_what_may_have_been_delivered_is_not_asked_for_again_before_that_is_known(
    empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
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


def test_what_was_ended_while_in_doubt_or_told_not_to_be_delivered_is_known_to_who_rebinds(
    empty_index: ShardIndex, journal: FakeJournal
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(caller_id="a"), 1: entry(), 2: entry()})
    empty_index.mark_doubtful({o: Claim(o, "delivered", "orders/0", o, "") for o in (0, 1)})
    store(empty_index, 3, 4, {3: Cancel("a")})
    journal.absent = {0}
    journal.append(
        Receipt(1, void=[1], read=1)
    )  # its place is gone since, and would count as filled

    done = Run(journal, "deliver").run(empty_index)

    assert done.again == 2


def test_of_what_was_delivered_after_a_log_lost_its_end_only_the_lost_requests_have_ended(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS)
    asked(*(request() for _ in range(3)))
    store(empty_index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    journal.append(delivered(0, 2))
    del journal.request_records[1:]

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.again == 1
    assert held(client).offsets() == [1]


def test_what_callers_wrote_under_the_same_id_since_a_topic_was_created_again_counts(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    before = {n: entry(caller_id=name) for n, name in enumerate(("moved", "cancelled", "left"))}
    store(empty_index, 0, 3, before)
    asked(request("moved"), Cancel("cancelled"))

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.superseded) == (1, 2)
    assert held(client).offsets() == [0, 2]


def test_what_was_cancelled_by_its_id_since_a_topic_was_created_again_is_not_asked_for_again(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 8, {5: entry(), 6: entry(), 0: entry()})
    asked(
        request(),
        Cancel(None, request_id(SHARD, 5)),
        Cancel(None, request_id(SHARD, 0)),  # of the new request of that id
    )

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.superseded) == (2, 1)
    assert held(client).offsets() == [3, 4]


def test_a_rebind_that_was_frozen_until_another_was_done_changes_nothing_more(
    make: Make, empty_index: ShardIndex, others_index: ShardIndex, asked: Written,
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


def test_a_rebind_that_waits_while_another_is_done_takes_nothing_that_is_pending_then(
    make: Make, empty_index: ShardIndex, others_index: ShardIndex, asked: Written,
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


def test_what_was_to_become_a_dead_letter_does_and_is_not_asked_for_again(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    unknown = entry()._replace(reason=Reason.OUTCOME_UNKNOWN, detail="who knows")
    store(empty_index, 0, 1, {0: unknown})

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, done.letters) == (0, 1)
    assert [one.topic for one in SENT] == ["dead"]
    assert ("blackbox-reason", "outcome-unknown") in SENT[0].headers


def test_a_request_whose_payload_redis_lost_becomes_a_dead_letter(
    empty_index: ShardIndex, journal: FakeJournal, client: Any
) -> None:
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 2, {0: entry(), 1: entry()})
    client.delete(Keys(SHARD).message(member(1)))

    done = Run(journal, "deliver").run(empty_index)

    assert (done.again, done.letters, done.dropped) == (1, 1, 0)
    assert ("blackbox-reason", "payload-lost") in SENT[1].headers


def test_a_topic_for_dead_letters_that_is_missing_is_named_and_nothing_is_lost(
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


def give_back(client: Any, then: dict[bytes, bytes]) -> None:
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
def test_what_a_rebind_wrote_that_was_killed_after_its_commit_is_not_written_twice(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
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
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
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
def test_redis_of_before_a_rebind_lets_nothing_be_asked_for_twice(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, is_cut: bool, is_done: bool,
) -> None:  # fmt: skip
    journal.topic_id = "topic" if is_cut else "old"
    asked(*(request() for _ in range(5)))
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
        asked(request())
        make().open()
        journal.append(delivered(3))
    written = len(journal.request_records)
    give_back(client, then)
    Run(journal, "deliver").run(empty_index)
    make().open()

    assert len(journal.request_records) == written
    left = [0, 1, 2, 3, 4, 5] if is_done else [0, 1, 2, 3, 4]
    assert held(client).offsets() == [one for one in left if not is_done or one != 3]


def test_redis_of_within_a_rebind_that_was_done_delivers_nothing_again(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked(*(request() for _ in range(5)))
    make().open()
    del journal.request_records[2:]
    within: list[dict[bytes, bytes]] = []
    take_off = Run._take_off

    def kept_and_taken_off(self: Run, *what: Any) -> None:
        within.append(keep(client))
        take_off(self, *what)

    empty_index.load()
    monkeypatch.setattr(Run, "_take_off", kept_and_taken_off)
    Run(journal, "deliver").run(empty_index)
    make().open()
    journal.append(delivered(3))

    give_back(client, within[0])
    Run(journal, "deliver").run(empty_index)
    make().open()

    assert len(journal.request_records) == 5
    assert held(client).offsets() == [0, 1, 2, 4]


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_index_of_before_an_opening_before_a_log_lost_its_end_lets_nothing_be_delivered_again(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, is_killed: bool,
) -> None:  # fmt: skip
    asked(*(request() for _ in range(5)))
    make().open()
    then = keep(client)
    make().open()
    del journal.request_records[2:]
    empty_index.load()
    assert Run(journal, "deliver").run(empty_index).again == 3
    make().open()
    journal.append(delivered(3))

    give_back(client, then)
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


def test_a_log_that_loses_its_end_once_more_is_noticed_though_nothing_was_read_since(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(*(request() for _ in range(5)))
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
def test_an_index_is_needed_once_more_when_its_topic_is_created_again_while_it_is_written_again(
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


def written_since(journal: FakeJournal) -> None:
    """A request that a caller wrote after the log had lost its end."""
    offset = len(journal.request_records)
    journal.request_records.append(Record(offset, 10, b"key", b"{}", []))
    journal.format.parsed[offset] = request()


def test_what_callers_wrote_behind_a_lost_end_is_read_also_if_the_log_is_shorter_than_it_was(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(*(request() for _ in range(5)))
    make().open()
    del journal.request_records[2:]
    written_since(journal)
    empty_index.load()

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.again == 3
    assert held(client).offsets() == [0, 1, 2, 3, 4, 5]


def test_what_callers_wrote_behind_a_lost_end_is_read_also_if_redis_was_lost(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(*(request() for _ in range(5)))
    make().open()
    journal.append(Receipt(5, read=5, mark=Mark(5, 1), topic_id="topic", group="blackbox"))
    del journal.request_records[2:]
    written_since(journal)
    client.flushall()

    Run(journal, "deliver").run(empty_index)
    make().open()

    assert held(client).offsets() == [2]


def test_a_frozen_owner_that_wakes_while_what_is_pending_is_written_hides_none_of_it(
    make: Make, empty_index: ShardIndex, others_index: ShardIndex, asked: Written, journal: FakeJournal,
    client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 3, {0: entry(1), 1: entry(2), 2: entry(3)})
    others_index.load()
    stored, calls = ShardIndex.stored, iter(range(10))

    def beside_another(self: ShardIndex, rank: int, limit: int) -> Any:
        if next(calls) == 1:
            others_index.defer({0: (LATER_MS, None)}, 0)
        return stored(self, rank, limit)

    monkeypatch.setattr(leftovers, "AT_ONCE", 1)
    monkeypatch.setattr(ShardIndex, "stored", beside_another)
    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert done.again == 3
    assert held(client).offsets() == [0, 1, 2]


def test_requests_of_a_lost_end_hold_no_caller_id_and_count_for_no_caller(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(*(request(name) for name in ("a", "b", "c")))
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


def test_records_that_kafka_takes_only_in_smaller_batches_are_all_asked_for_again(
    make: Make, empty_index: ShardIndex, journal: FakeJournal, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 25, {n: entry() for n in range(25)})
    monkeypatch.setattr(rebinding, "ShardWriter", lambda *_, **__: NotSoMany(journal))

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.letters) == (25, 0)
    assert held(client).offsets() == list(range(25))


def test_former_partitions_are_not_forgotten_when_a_run_is_interrupted_among_them(
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


def test_a_rebind_to_another_cluster_that_was_interrupted_is_undone_by_one_where_the_index_was(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty_index.begin(Positions(0, 0), binding=OURS)
    asked(*(request() for _ in range(3)))
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
def test_requests_leave_their_partitions_only_if_a_topic_was_created_again_with_another_number(
    former: list[int], keeps: bool
) -> None:
    assert keep_partitions(former, 4) is keeps


def too_large(outgoing: Outgoing) -> Any:
    return (Reason.TOO_LARGE, "1 MB") if outgoing.offset == 1 and outgoing.topic != "dead" else None


@pytest.mark.parametrize("exactly_once", [True, False])
@pytest.mark.parametrize("who", ["fails", "refuses"])
def test_a_request_that_kafka_does_not_take_again_becomes_a_dead_letter_and_holds_up_no_other(
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


def test_what_a_log_lost_is_all_asked_for_again_when_some_of_it_is_refused(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(leftovers, "AT_ONCE", 3)
    monkeypatch.setattr(
        rebinding, "ShardWriter", lambda *_, **__: AskingWriter(journal, fails=no_threes)
    )
    asked(request(), request())
    empty_index.begin(Positions(0, 0), binding=OURS)
    order = [3, 5, 1, 0, 4, 2]
    store(empty_index, 0, 6, {offset: entry(LATER_MS + n) for n, offset in enumerate(order)})

    done = Run(journal, "deliver").run(empty_index)
    make().open()

    assert (done.again, done.letters) == (3, 1)
    assert sorted(held(client).offsets()) == [0, 1, 2, 3, 4]


def test_an_index_of_before_its_receipts_were_created_again_is_rebuilt_from_the_new_ones(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(request(due_ms=LATER_MS), request(due_ms=LATER_MS))
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
def test_what_new_receipts_do_not_tell_is_unknown_also_when_redis_is_lost_before_the_first_opening(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any, group: str
) -> None:  # fmt: skip
    asked(request())
    empty_index.begin(Positions(0, 0), binding=OTHERS)
    store(empty_index, 0, 1, {0: entry()})

    Run(journal, "deliver", OURS._replace(group=group)).run(empty_index)
    client.flushall()
    replace(make(), group=group).open()

    assert reasons(client) == {0: Reason.OUTCOME_UNKNOWN}


def test_a_partition_that_a_topic_has_no_more_keeps_no_index_and_is_not_asked_for_twice(
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


def test_an_index_is_bound_anew_also_when_redis_is_full(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked(request())
    make().open()
    empty_index.load()
    run, exec_ = Run(journal, ours=OURS._replace(group="others")), ShardIndex._exec
    full: list[bool] = []

    def refused(self: ShardIndex, *args: Any) -> bool:
        if not full:
            full.append(True)
            self._session.ask("UNWATCH")
            raise IndexFull("Redis has no memory left")
        return exec_(self, *args)

    monkeypatch.setattr(ShardIndex, "_exec", refused)
    run.run(empty_index)

    assert full
    replace(make(), group="others").open()


def test_outcomes_of_receipts_that_were_deleted_are_unknown_when_redis_is_lost_after_that(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(request(), request())
    empty_index.begin(Positions(0, 0), binding=OTHERS, mark=Mark(2, 7))
    store(empty_index, 0, 2, {})
    Run(journal, "deliver").run(empty_index)
    assert make().open().mark is None
    asked(request(due_ms=LATER_MS))
    client.flushall()

    make().open()

    assert reasons(client) == {0: Reason.OUTCOME_UNKNOWN, 1: Reason.OUTCOME_UNKNOWN, 2: None}


def test_a_mark_that_all_has_ended_below_leaves_nothing_unknown_of_receipts_that_were_deleted(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(request(), request())
    empty_index.begin(Positions(0, 0), binding=OTHERS)
    store(empty_index, 0, 2, {})
    Run(journal, "deliver").run(empty_index)
    make().open()
    journal.append(Receipt(1, read=2, mark=Mark(2, len(journal.receipt_records))))
    asked(request())
    client.flushall()

    make().open()

    assert reasons(client) == {2: None}


def test_a_first_mark_of_new_receipts_is_none_of_the_old_ones(
    empty_index: ShardIndex, journal: FakeJournal, asked: Written
) -> None:
    asked(request(), request())
    empty_index.begin(Positions(2, 9), binding=OTHERS, mark=Mark(2, 7, [(3, 8)]))
    empty_index.load()

    Run(journal, "deliver").run(empty_index)

    kept = empty_index.load()
    assert kept is not None
    assert (kept.mark, kept.positions) == (None, Positions(2, 0))
    assert kept.unknown_ms > LATER_MS - 3_600_000


def test_receipts_of_requests_that_a_log_lost_end_none_of_those_in_their_places(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(*(request() for _ in range(5)))
    empty_index.begin(Positions(0, 0), binding=OURS)
    make().open()
    journal.append(delivered(0, 1, 2, 3, 4, read=5))
    journal.append(Receipt(1, read=5, mark=Mark(4, 1), topic_id="topic", group="blackbox"))
    make().open()
    del journal.request_records[2:]

    Run(journal, "deliver").run(empty_index)
    asked(request(), request(), request())
    make().open()
    journal.append(delivered(3))
    client.flushall()
    make().open()

    assert held(client).offsets() == [2, 4]


def test_an_index_of_before_a_log_lost_its_end_is_not_told_what_became_of_the_requests_lost(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(*(request() for _ in range(2)))
    make().open()
    then = {key: client.dump(key) for key in client.keys("*")}
    asked(*(request() for _ in range(3)))
    make().open()
    journal.append(delivered(0, 2, 3, 4, read=5))
    make().open()
    del journal.request_records[2:]
    Run(journal, "deliver").run(empty_index)
    asked(request(), request(), request())
    client.flushall()
    for key, value in then.items():
        client.restore(key, 0, value)

    make().open()

    assert held(client).offsets() == [1, 2, 3, 4]


def test_what_an_owner_that_was_frozen_says_of_an_old_topic_before_a_rebind_is_done_ends_nothing(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked(request(), request())
    make().open()
    journal.append(delivered(1))
    empty_index.load()
    empty_index.settle({0: None, 1: None}, 3)
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
def test_old_receipts_tell_nothing_of_a_new_topic_when_redis_is_lost_after_the_rebind(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any, is_kept: bool
) -> None:  # fmt: skip
    journal.append(Receipt(1, barrier=True, topic_id="old", group="blackbox"))
    journal.append(delivered(0, 1))
    empty_index.begin(Positions(2, 4), binding=OURS._replace(topic_id="old"))
    empty_index.load()
    asked(request(), request(), request())
    run = Run(journal)
    if is_kept:  # as a topic's settings may ask for it
        run._trimmer.remove_receipts = lambda *_: None

    run.run(empty_index)
    journal.append(delivered(1))
    client.flushall()
    make().open()

    assert reasons(client) == {0: None, 2: None}


@pytest.mark.parametrize("doubt", [Fenced, JournalLost])
@pytest.mark.parametrize("step", ["begin", "commit"])
@pytest.mark.parametrize("nth", [0, 1], ids=["taking-over", "asking-again"])
def test_who_is_fenced_by_a_service_that_tries_to_open_the_shard_rebinds_it_all_the_same(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any,
    monkeypatch: pytest.MonkeyPatch, nth: int, step: str, doubt: type[Exception],
) -> None:  # fmt: skip
    asked(request())
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


def test_a_mark_beyond_a_lost_end_counts_up_to_there(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    asked(request(), request())
    make().open()
    journal.append(Receipt(1, read=5, mark=Mark(5, 1), topic_id="topic", group="blackbox"))
    client.flushall()
    empty_index.load()

    Run(journal, "deliver").run(empty_index)
    client.flushall()
    asked(request())
    make().open()

    assert held(client).offsets() == [2]


def test_what_has_ended_from_an_offset_on_can_be_forgotten() -> None:
    ended = OffsetSet()
    many = [0, 8, 9, SEGMENT - 1, SEGMENT, 3 * SEGMENT + 5]
    ended.add(many)

    ended.forget_from(9)

    assert [offset for offset in many if offset in ended] == [0, 8]
