"""Outcomes of the last receipt that could not be checked when the shard was opened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis

from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake
from blackbox.core.lost_payload import reread
from blackbox.core.plan import Positions
from blackbox.core.recovery import Recovery
from blackbox.core.triage import Triage
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import Claim, Receipt, one_incarnation
from blackbox.records.request import Cancel, Invalid, Reason, request_id
from tests.contract.held import GRACE_S, NOW_MS, SHARD, held
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter
from tests.unit.opening import Written, delivered, request

AWAY = (Reason.UNREACHABLE, "orders/0 has no leader")


def has_room() -> bool:
    return True


Open = Callable[[], "Owners"]


class Owners:
    """Consecutive owners, on the same journals and the same Redis."""

    def __init__(
        self, connections: redis.ConnectionPool, journal: FakeJournal, targets: FakeTargets
    ) -> None:
        self.connections, self.journal, self.targets = connections, journal, targets
        self.writer = FakeWriter(journal)
        self.take_over()

    def take_over(self) -> None:
        index = self.index = ShardIndex(SHARD, self.connections, grace_s=GRACE_S)
        intake = self._intake = Intake(self.journal.format, index, None)
        triage = Triage(
            shard=SHARD, targets=self.targets, journal=self.journal,
            reread=partial(reread, self.journal.format), dead_letter_topic="dead-letters",
            follow_ups=FollowUps(SHARD, self.journal.format, self.journal),
        )  # fmt: skip
        self.dispatch = Dispatch(index, self.writer, triage)
        Recovery(
            shard=SHARD, group="blackbox", index=index, journal=self.journal, writer=self.writer,
            confirm=lambda: None, apply=lambda batch, how: intake.parse_and_store(batch, NOW_MS, how),
            upcoming=lambda batch: intake.upcoming(batch, NOW_MS), now_ms=lambda: NOW_MS,
            has_room=has_room,
        ).open()  # fmt: skip

    def run_intake(self) -> None:
        first = self.index.positions.requests
        for batch in self.journal.requests(first, self.journal.request_bounds().end):
            self._intake.parse_and_store(batch, NOW_MS)

    def sent(self) -> list[int]:
        """The requests delivered to the target so far, including the next two minutes."""
        for second in range(0, 120, 5):
            self.dispatch.tick(NOW_MS + 1000 * second)
        return self.writer.sent_to("orders")


@pytest.fixture
def opened(connections: redis.ConnectionPool, journal: FakeJournal, targets: FakeTargets) -> Open:
    return lambda: Owners(connections, journal, targets)


@pytest.fixture
def torn(
    opened: Open, journal: FakeJournal, targets: FakeTargets, write_records: Written
) -> Owners:
    """The last receipt says that request 0 was delivered; its message was aborted, and its target is now unavailable."""
    write_records(request("a"))
    journal.append(delivered(0))
    journal.unreadable = {0}
    targets.refusals = {"orders": AWAY}
    owners = opened()
    journal.unreadable, journal.absent = set(), {0}
    owners.dispatch.tick(NOW_MS)
    assert owners.index.doubtful == {}
    assert owners.writer.committed == []
    return owners


def reopen(owners: Owners, client: Any, is_redis_lost: bool) -> None:
    if is_redis_lost:
        client.flushall()
    owners.take_over()
    owners.targets.refusals = {}


either = pytest.mark.parametrize("is_redis_lost", [False, True])


@either
def test_an_outcome_declared_void_stays_void_when_its_offset_is_gone(
    torn: Owners, journal: FakeJournal, client: Any, is_redis_lost: bool
) -> None:
    journal.absent = set()  # as for a place below the start of the target
    reopen(torn, client, is_redis_lost)
    assert torn.sent() == [0]


@either
@pytest.mark.parametrize(("ends", "left"), [(Cancel("a"), []), (request("a"), [1])])
def test_a_cancel_or_replacement_after_the_check_holds_after_a_rollback(
    torn: Owners,
    write_records: Written,
    client: Any,
    is_redis_lost: bool,
    ends: Any,
    left: list[int],
) -> None:
    write_records(ends)
    torn.run_intake()
    assert held(client).offsets() == left
    reopen(torn, client, is_redis_lost)
    assert torn.sent() == left


@either
def test_a_delivered_replacement_by_id_stays_the_only_delivery(
    torn: Owners, write_records: Written, client: Any, is_redis_lost: bool
) -> None:
    write_records(request(), headers=[("blackbox-replaces", request_id(SHARD, 0).encode())])
    torn.run_intake()
    torn.targets.refusals = {}
    assert torn.sent() == [1]
    reopen(torn, client, is_redis_lost)
    assert torn.sent() == [1]


@either
@pytest.mark.parametrize(("ends", "left"), [(Cancel("a"), []), (request("a"), [1])])
def test_a_cancel_of_a_doubtful_request_counts_if_it_was_not_delivered(
    opened: Open, journal: FakeJournal, write_records: Written, client: Any, is_redis_lost: bool,
    ends: Any, left: list[int],
) -> None:  # fmt: skip
    write_records(request("a"))
    journal.append(delivered(0))
    journal.unreadable = {0}
    owners = opened()
    owners.dispatch.tick(NOW_MS)
    write_records(ends)
    owners.run_intake()
    reopen(owners, client, is_redis_lost)
    journal.unreadable, journal.absent = set(), {0}
    assert owners.sent() == left
    assert held(client).due == []


@pytest.fixture
def hidden(opened: Open, journal: FakeJournal, write_records: Written) -> Owners:
    """Request 0 is doubtful, and was not delivered."""
    write_records(request("a"))
    journal.append(delivered(0))
    journal.unreadable = {0}
    owners = opened()
    owners.dispatch.tick(NOW_MS)
    journal.absent = {0}
    return owners


def test_a_replacement_by_id_of_a_doubtful_request_is_too_late(
    hidden: Owners, journal: FakeJournal, write_records: Written
) -> None:
    write_records(request(), headers=[("blackbox-replaces", request_id(SHARD, 0).encode())])
    hidden.run_intake()
    journal.unreadable = journal.absent = set()  # it was delivered
    assert hidden.sent() == []
    [letter] = [one for one in hidden.writer.committed if one.topic == "dead-letters"]
    assert (letter.offset, dict(letter.headers)["blackbox-reason"]) == (1, Reason.TOO_LATE)


@pytest.mark.parametrize("happens", ["killed before the index knows", "Redis goes back"])
def test_a_receipt_that_voids_a_doubtful_outcome_is_applied_after_a_crash(
    hidden: Owners, journal: FakeJournal, client: Any, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    was = {key: client.dump(key) for key in client.scan_iter()}
    journal.unreadable = set()
    hidden.targets.refusals = {"orders": AWAY}
    with monkeypatch.context() as patched:
        if happens == "killed before the index knows":
            patched.setattr(ShardIndex, "end_doubt", killed)
            with pytest.raises(RecoveryRequired):
                hidden.dispatch.tick(NOW_MS + 60_000)
        else:
            hidden.dispatch.tick(NOW_MS + 60_000)
            client.flushall()
            for key, value in was.items():
                client.restore(key, 0, value)
    journal.absent = set()  # its place is gone
    hidden.targets.refusals = {}
    hidden.take_over()
    assert hidden.sent() == [0]


def killed(*_: object) -> None:
    raise RecoveryRequired("killed")


@pytest.mark.parametrize(
    ("ends", "left"),
    [(Cancel("a"), []), (Cancel(None, request_id(SHARD, 0)), []), (request("a"), [1])],
)
def test_a_cancel_of_a_doubtful_request_counts_although_redis_has_no_room(
    hidden: Owners, journal: FakeJournal, write_records: Written, monkeypatch: pytest.MonkeyPatch,
    ends: Any, left: list[int],
) -> None:  # fmt: skip
    write_records(ends)
    with monkeypatch.context() as patched:
        patched.setattr("tests.unit.test_doubtful.has_room", lambda: False)
        hidden.take_over()
    journal.unreadable = set()
    hidden.sent()
    hidden.run_intake()
    assert hidden.sent() == left


def test_a_doubtful_request_counts_as_in_flight_until_it_is_checked(
    hidden: Owners, connections: redis.ConnectionPool, journal: FakeJournal
) -> None:
    see = Inspector(connections)
    assert see.is_in_flight(SHARD, 0)
    journal.unreadable = set()
    hidden.dispatch.tick(NOW_MS + 60_000)
    assert not see.is_in_flight(SHARD, 0)


def test_a_receipt_names_messages_of_one_incarnation_of_a_topic() -> None:
    one, other = (Claim(n, "delivered", "orders/0", n, f"id{n}") for n in range(2))
    assert one_incarnation([one, other]) == [one]


def test_a_rebind_of_a_shortened_log_keeps_doubtful_requests(
    opened: Open, journal: FakeJournal, write_records: Written, connections: redis.ConnectionPool
) -> None:
    write_records(request(), request(), request())
    journal.append(delivered(0, 1))
    journal.unreadable = {0, 1}
    owners = opened()
    owners.dispatch.tick(NOW_MS)
    journal.request_records.pop()
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    kept = index.load()
    assert kept is not None
    index.rebind(Positions(2, kept.positions.receipts), journal.binding("blackbox"), 0, None)
    owners.take_over()
    assert owners.sent() == [2]


def test_a_doubtful_dead_letter_keeps_its_detail(
    opened: Open, journal: FakeJournal, write_records: Written
) -> None:
    write_records(Invalid(Reason.NOT_JSON, "no JSON at byte 17"))
    journal.append(Receipt(1, invalid=[0], letters={"dead-letters/0": [(0, 7)]}))
    journal.unreadable = {0}
    owners = opened()
    owners.dispatch.tick(NOW_MS)
    journal.unreadable, journal.absent = set(), {0}
    owners.sent()
    [letter] = [one for one in owners.writer.committed if one.topic == "dead-letters"]
    assert dict(letter.headers)["blackbox-detail"] == "no JSON at byte 17"
