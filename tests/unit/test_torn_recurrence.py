"""Torn transactions of a recurring request: some of its message, its next request and its receipt are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import redis

from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake
from blackbox.core.lost_payload import reread
from blackbox.core.recovery import Recovery
from blackbox.core.triage import Triage
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import JournalLost
from blackbox.records.receipt import NEXT, Checked, Claim, Receipt
from blackbox.records.request import Reason, Record
from tests.contract.held import GRACE_S, NOW_MS, SHARD, held
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter
from tests.unit.dispatch.recurring import CANCEL_A, COUNTDOWN

EVERY_S = 60
PARTS = "message", "next request", "receipt"


class TornJournal(FakeJournal):
    """`absent` are requests without a message; a next request that is not there is a gap in the offsets."""

    def check(self, claims: Iterable[Claim], patience_s: float) -> Checked:
        every = list(claims)
        following = [claim for claim in every if claim.outcome == NEXT]
        checked = super().check([claim for claim in every if claim.outcome != NEXT], patience_s)
        checked.missing.extend(one for one in following if self._record(one.there) is None)
        return checked


@dataclass
class TearingWriter(FakeWriter):
    """Also writes next requests to the journal. `torn` are the parts that the next commit loses."""

    torn: Collection[str] | None = None
    delivered: list[int] = field(default_factory=list)

    def flush(self, *args: Any) -> Any:
        self._ends[str(SHARD).replace("-", "/")] = len(self.journal.request_records)
        return super().flush(*args)

    def commit(self, receipt: Receipt, not_before_ms: int = 0) -> int:
        torn, self.torn = self.torn, None
        for sent, _ in self._queued:
            part = "next request" if sent.topic == SHARD.topic else "message"
            if part in (torn or ()):
                if part == "message":
                    self.journal.absent.add(sent.offset)
                else:
                    self.journal.request_records.append(None)
            elif sent.topic == "orders":
                self.delivered.append(int(str(dict(sent.headers)["blackbox-due-ms"])))
            elif part == "next request":
                headers = [
                    (name, v.encode() if isinstance(v, str) else v) for name, v in sent.headers
                ]
                write(self.journal, sent.value or b"", headers)
        if torn is None:
            return super().commit(receipt, not_before_ms)
        if "receipt" not in torn:
            self.journal.append(receipt)
        raise JournalLost("the commit's outcome is unknown")


def write(journal: FakeJournal, value: bytes, headers: Any = ()) -> None:
    offset = len(journal.request_records)
    journal.request_records.append(Record(offset, NOW_MS, b"a", value, list(headers)))


class Service:
    """Consecutive owners of a shard, on the same journals and the same Redis."""

    def __init__(self, connections: redis.ConnectionPool) -> None:
        self.connections = connections
        self.journal = TornJournal(format=COUNTDOWN)  # type: ignore[arg-type]
        self.writer = TearingWriter(self.journal)
        self.targets = FakeTargets()
        value = b'{"topic": "orders", "message": "hi", "id": "a", "every": %d, "at": %d}'
        write(self.journal, value % (EVERY_S, NOW_MS))
        self.take_over()

    def take_over(self) -> None:
        journal, index = self.journal, ShardIndex(SHARD, self.connections, grace_s=GRACE_S)
        intake = Intake(journal.format, index, None)
        triage = Triage(
            shard=SHARD, targets=self.targets, journal=journal, reread=partial(reread, COUNTDOWN),
            dead_letter_topic="dead-letters", follow_ups=FollowUps(SHARD, COUNTDOWN, journal),
        )  # fmt: skip
        self.index, self.intake = index, intake
        self.dispatch = Dispatch(index, self.writer, triage)
        Recovery(
            shard=SHARD, group="blackbox", index=index, journal=journal, writer=self.writer,
            confirm=lambda: None, apply=lambda batch, how: intake.parse_and_store(batch, NOW_MS, how),
            upcoming=lambda batch: intake.upcoming(batch, NOW_MS), now_ms=lambda: NOW_MS,
        ).open()  # fmt: skip

    def run_intake(self) -> None:
        first, end = self.index.positions.requests, self.journal.request_bounds().end
        for batch in self.journal.requests(first, end):
            self.intake.parse_and_store(batch, NOW_MS)

    def tear(self, *torn: str) -> None:
        """Deliver the request, and lose these parts of the transaction with its owner."""
        self.writer.torn = torn
        with pytest.raises(JournalLost):
            self.dispatch.tick(NOW_MS)

    def run(self, until_s: int) -> None:
        for second in range(0, until_s, 5):
            self.dispatch.tick(NOW_MS + 1000 * second)
            self.run_intake()

    def times(self) -> dict[int, int]:
        """How many messages there are of each due time, in seconds after the first."""
        return dict(Counter((due_ms - NOW_MS) // 1000 for due_ms in self.writer.delivered))


@pytest.fixture
def service(connections: redis.ConnectionPool) -> Service:
    return Service(connections)


def reopen(service: Service, client: Any, is_redis_lost: bool) -> None:
    if is_redis_lost:
        client.flushall()
    service.take_over()
    service.journal.absent = set()


SUBSETS = [
    [part for part, is_torn in zip(PARTS, torn, strict=True) if is_torn]
    for torn in product((False, True), repeat=len(PARTS))
]
either = pytest.mark.parametrize("is_redis_lost", [False, True], ids=["kept", "rebuilt"])


@either
@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("torn", SUBSETS, ids=lambda torn: ",".join(torn) or "nothing")
def test_a_recurring_request_goes_on_whatever_a_torn_transaction_lost(
    service: Service, client: Any, torn: list[str], is_read: bool, is_redis_lost: bool
) -> None:
    service.tear(*torn)
    if is_read:
        service.run_intake()
    reopen(service, client, is_redis_lost)

    service.run(4 * EVERY_S)

    times = service.times()
    has_message, has_next = "message" not in torn, "next request" not in torn
    # the next request replaces the one whose message is missing
    first = {} if has_next and not has_message else {0: 1}
    # a message without a next request is delivered again, so that it recurs
    first = {0: 2} if has_message and not has_next else first
    assert times == first | {60: 1, 120: 1, 180: 1}
    assert held(client).due == [(NOW_MS + 4000 * EVERY_S, len(service.journal.request_records) - 1)]


@either
def test_a_cancel_ends_a_recurring_request_whose_message_was_lost(
    service: Service, client: Any, is_redis_lost: bool
) -> None:
    service.tear("message")
    service.targets.refusals = {"orders": (Reason.UNREACHABLE, "orders/0 has no leader")}
    reopen(service, client, is_redis_lost)
    service.run_intake()
    write(service.journal, CANCEL_A)
    service.run_intake()
    reopen(service, client, is_redis_lost)
    service.targets.refusals = {}

    service.run(4 * EVERY_S)

    assert service.times() == {}
    assert held(client).due == []


@either
def test_a_recurring_request_in_doubt_goes_on_in_time(
    service: Service, client: Any, is_redis_lost: bool
) -> None:
    service.tear()
    service.journal.unreadable = {0}
    reopen(service, client, is_redis_lost)
    service.run(2 * EVERY_S)
    service.journal.unreadable = set()

    service.run(4 * EVERY_S)

    assert service.times() == {0: 1, 60: 1, 120: 1, 180: 1}


def test_a_recurring_request_whose_receipts_are_gone_makes_no_dead_letter_of_an_earlier_time(
    service: Service, client: Any
) -> None:
    service.run(EVERY_S // 2)
    service.journal.first_receipt = service.journal.append(Receipt(NOW_MS - 30_000))
    reopen(service, client, is_redis_lost=True)

    service.run(4 * EVERY_S)

    assert service.times() == {0: 1, 60: 1, 120: 1, 180: 1}
    assert service.writer.sent_to("dead-letters") == []
