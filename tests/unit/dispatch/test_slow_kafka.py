"""A connection to Kafka that does not take a whole batch in time, such as a slow or a throttled one."""

from __future__ import annotations

import pytest

from blackbox.core.batch_limit import BatchLimit
from blackbox.records.entry import Entry
from blackbox.records.errors import IndexLost, JournalLost, NotInTime, RecoveryRequired, Refused
from blackbox.records.outgoing import Outgoing, Refusal
from blackbox.records.request import Reason
from tests.contract.held import NOW_MS
from tests.support.fakes import FakeWriter
from tests.unit.dispatch.entries import Make, Pend, invalid, to

LATE = Reason.UNREACHABLE, "orders: Local: Message timed out"
GIVEN_UP_MS = 16_000


def slow(writer: FakeWriter, in_time: int) -> None:
    """Of each transaction, only so many records are taken in time."""

    def fails(outgoing: Outgoing) -> Refusal | None:
        sent = [one for one, _ in writer._queued]
        return LATE if sent.index(outgoing) >= in_time else None

    writer.fails = fails


@pytest.mark.parametrize(("in_time", "most_failures"), [(1, 70), (12, 4), (19, 3)])
def test_everything_is_delivered_in_smaller_batches(
    pend: Pend, make: Make, writer: FakeWriter, in_time: int, most_failures: int
) -> None:
    slow(writer, in_time)
    pend(*(to("orders", NOW_MS - 5) for _ in range(60)))
    limit, now_ms, failures = BatchLimit(20), NOW_MS, 0
    while len(writer.committed) < 60 and failures <= most_failures:
        now_ms += 1000
        try:
            make(batch_limit=limit).tick(now_ms)  # a shard that is opened again has another one
        except Refused:
            now_ms += GIVEN_UP_MS
            failures += 1
    assert sorted(one.offset for one in writer.committed) == list(range(60))


@pytest.mark.parametrize(
    ("failure", "limit_then"),
    [
        (Refused({0: LATE}, is_timeout=True), 4),
        (NotInTime("2 records were not acknowledged within 20 s"), 4),
        (JournalLost("the leader of orders is not known"), 20),
        (Refused({0: LATE}), 20),
        (IndexLost("Redis does not answer"), 20),
        (Refused({0: (Reason.UNKNOWN_TOPIC, "orders: it does not exist")}), 20),
    ],
    ids=["timed out", "not acknowledged", "Kafka", "no leader", "Redis", "refused at once"],
)
def test_a_batch_that_took_too_long_is_halved(
    pend: Pend, make: Make, writer: FakeWriter, failure: Exception, limit_then: int
) -> None:
    pend(*(to("orders", NOW_MS - 5) for _ in range(8)))
    dispatch = make(batch_limit=20)
    writer.before["flush"] = failure
    with pytest.raises(RecoveryRequired):
        dispatch.tick(NOW_MS)
    assert dispatch.batch_limit.now == limit_then


@pytest.mark.parametrize(
    "due", [to("orders", NOW_MS - 5), invalid()], ids=["messages", "dead letters"]
)
def test_full_batches_become_larger_again(
    pend: Pend, make: Make, writer: FakeWriter, due: Entry
) -> None:
    pend(*[due] * 200)
    limit = BatchLimit(20)
    limit.shrink(2)
    dispatch = make(batch_limit=limit)
    while len(writer.committed) < 200:
        dispatch.tick(NOW_MS)
    assert limit.now == limit.most == 20


def test_one_request_alone_says_nothing_of_the_size_of_a_batch() -> None:
    limit = BatchLimit(20)
    limit.shrink(1)
    limit.shrink(0)
    assert limit.now == 20


def test_a_limit_grows_slowly_only_where_a_batch_was_too_large() -> None:
    limit = BatchLimit(1000)
    limit.shrink(100)
    sizes = [limit.now]
    while limit.now < limit.most:
        limit.grow()
        sizes.append(limit.now)
    assert sizes[:3] == [50, 57, 65]
    assert sizes[-1] - sizes[-2] > 100
    assert len(sizes) < 12
