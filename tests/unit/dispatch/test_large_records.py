"""Refused records that are too large for Redis: dispatch reads them from Kafka for their dead letters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from blackbox.core import lost_payload, parking
from blackbox.core.dispatch import Dispatch
from blackbox.core.due_batch import (
    ALONE_SPREAD_MS,
    MOST_LETTER_BYTES,
    MOST_LETTER_SPAN,
)  # fmt: skip
from blackbox.core.interpret import refused_entry
from blackbox.index.shard_index import ShardIndex
from blackbox.records.entry import Entry
from blackbox.records.refusal_causes import BROKEN_RULES
from blackbox.records.request import Invalid, Reason, Record, Request
from blackbox.records.topic_limits import Limits
from tests.contract.held import NOW_MS, PREFIX, held, store
from tests.support.fakes import FakeFormat, FakeJournal, FakeTargets, FakeWriter, record
from tests.unit.dispatch.entries import (
    LARGE,
    LETTERS,
    NO_JSON,
    OVER_QUOTA,
    UNKNOWN,
    Make,
    Pend,
    letter,
    to,
    told,
)


def test_a_large_invalid_record_is_complete_in_its_dead_letter_and_not_in_redis(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    pend(refused_entry(LARGE, NO_JSON, NOW_MS))
    journal.request_records[0] = LARGE
    assert held(client).payloads == {}

    dispatch.tick(NOW_MS)

    assert held(client).due == []
    assert letter(writer, 0).value == LARGE.value
    assert ("CALLER_SERVICE", b"shop") in letter(writer, 0).headers
    assert told(letter(writer, 0)) == (Reason.NOT_JSON, "no JSON")


def test_a_large_record_with_a_forged_header_is_dead_lettered_unchanged(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal
) -> None:
    forged = LARGE._replace(headers=[*LARGE.headers, ("blackbox-carried", b"mine")])
    pend(refused_entry(forged, Invalid(Reason.BAD_HEADERS, "only blackbox may write it"), NOW_MS))
    journal.request_records[0] = forged

    dispatch.tick(NOW_MS)

    assert letter(writer, 0).value == LARGE.value


def test_a_large_request_over_a_quota_is_complete_in_its_dead_letter_and_not_in_redis(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    refusal = BROKEN_RULES["most_pending"]
    pend(refused_entry(LARGE, refusal, NOW_MS))
    journal.request_records[0] = LARGE
    assert held(client).payloads == {}

    dispatch.tick(NOW_MS)

    assert held(client).due == []
    assert letter(writer, 0).value == LARGE.value
    assert told(letter(writer, 0)) == (Reason.QUOTA, refusal.detail)
    assert writer.receipts[0].dead == [0]


def test_large_refused_requests_take_no_more_room_while_the_dead_letter_topic_is_missing(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any,
    journal: FakeJournal,
) -> None:  # fmt: skip
    pend(*(refused_entry(LARGE, BROKEN_RULES["most_pending"], NOW_MS) for _ in range(5)), to())
    journal.request_records[:5] = [LARGE._replace(offset=n) for n in range(5)]
    targets.refusals[LETTERS] = UNKNOWN

    dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [5]
    assert [offset for _, offset in held(client).due] == [*range(5)]
    assert held(client).payloads == {}
    assert all(score >= parking.BAND_MS for score, _ in held(client).due)
    targets.refusals.clear()
    for _ in range(3):
        dispatch.tick(NOW_MS)
    assert [told(letter(writer, n))[0] for n in range(5)] == [Reason.QUOTA] * 5


def test_large_records_are_read_before_the_transaction_up_to_a_limit(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    journal: FakeJournal,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = refused_entry(LARGE, OVER_QUOTA, NOW_MS)._replace(left_bytes=MOST_LETTER_BYTES * 2 // 5)
    pend(*[entry] * 5)
    journal.request_records[:] = [LARGE._replace(offset=offset) for offset in range(5)]
    read, records = list[tuple[int, ...]](), journal.records

    def watched(offsets: Any) -> Any:
        wanted = tuple(offsets)
        if wanted:
            assert writer.calls.count("begin") == len(read), "Kafka is read inside the transaction"
            read.append(wanted)
        return records(wanted)

    monkeypatch.setattr(journal, "records", watched)
    written = list[int]()
    for _ in range(3):
        dispatch.tick(NOW_MS)
        written.append(len(writer.committed))

    assert read == [(0, 1), (2, 3), (4,)]
    assert written == [2, 4, 5]
    assert held(client).due == []


def test_large_invalid_records_are_read_once_up_to_a_limit(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    journal: FakeJournal,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = record(0, b"{" * (MOST_LETTER_BYTES * 2 // 5))
    pend(*[refused_entry(large, NO_JSON, NOW_MS)] * 5)
    journal.request_records[:] = [large._replace(offset=offset) for offset in range(5)]
    again, written = list[int](), list[int]()

    def read_again(offsets: Iterable[int]) -> dict[int, Record]:
        again.extend(offsets)
        return {}

    monkeypatch.setattr(journal, "records", read_again)
    for _ in range(2):
        dispatch.tick(NOW_MS)
        written.append(len(writer.committed))

    assert written == [3, 5]
    assert again == []
    assert held(client).due == []


def test_a_large_record_that_was_invalid_is_not_delivered_after_a_change_of_settings(
    make: Make, pend: Pend, writer: FakeWriter, journal: FakeJournal
) -> None:
    pend(refused_entry(LARGE, NO_JSON, NOW_MS))
    journal.request_records[0] = LARGE
    valid = FakeFormat({0: Request("orders", b"m", NOW_MS, None, [], None, None, None)})

    make(reread=partial(lost_payload.reread, valid)).tick(NOW_MS)

    reason, detail = told(letter(writer, 0))
    assert reason == Reason.WAS_INVALID
    assert writer.receipts[-1].invalid == [0], "it has replaced nothing"
    assert "is valid by the settings of now" in str(detail)
    assert writer.sent_to("orders") == []


def test_a_request_reread_with_a_later_due_time_does_not_delay_others(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    """Its caller's timestamp is ahead, and was capped by a clock only at the first read."""
    pend(to(), to())
    journal.request_records[0] = record(0, b"record 0", NOW_MS + 3_000_000)
    client.set(PREFIX + "msg:" + f"{0:016x}", b"no entry")

    did = dispatch.tick(NOW_MS)

    assert sorted(did.due_ms) == [NOW_MS, NOW_MS + 3_000_000]

    assert writer.not_before_ms == NOW_MS


@pytest.mark.parametrize("why", [NO_JSON, OVER_QUOTA], ids=["without payload", "with payload"])
def test_large_records_with_distant_offsets_are_read_one_at_a_time(
    why: Invalid,
    dispatch: Dispatch,
    index: ShardIndex,
    writer: FakeWriter,
    journal: FakeJournal,
    client: Any,
) -> None:
    """A thousand reads before a transaction would delay the other messages in it."""
    places = [0, MOST_LETTER_SPAN, MOST_LETTER_SPAN + 1, 3 * MOST_LETTER_SPAN]
    entry = refused_entry(LARGE, why, NOW_MS)
    good = places[-1] + 1
    store(index, 0, good + 1, dict.fromkeys(places, entry) | {good: to()})
    journal.request_records[:] = [LARGE._replace(offset=o) for o in range(good + 1)]

    dispatch.tick(NOW_MS)

    assert [o.topic for o in writer.committed] == ["orders", LETTERS, LETTERS]
    assert [at for at, _ in held(client).due] == [NOW_MS + 50, NOW_MS + 100]
    for _ in range(2):
        dispatch.tick(held(client).due[0][0])
    assert writer.sent_to(LETTERS) == places


@pytest.mark.parametrize(
    "entry",
    [to(expires_ms=NOW_MS - 1), to("nowhere", attempts=5), to("compacted")],
    ids=["expired", "unknown-topic", "refused"],
)
def test_messages_do_not_wait_for_dead_letters_with_distant_offsets(
    dispatch: Dispatch,
    index: ShardIndex,
    writer: FakeWriter,
    targets: FakeTargets,
    journal: FakeJournal,
    monkeypatch: pytest.MonkeyPatch,
    entry: Entry,
) -> None:
    targets.refusals["nowhere"] = UNKNOWN
    targets.strict["compacted"] = Limits(needs_key=True, most_bytes=None)
    places = [n * MOST_LETTER_SPAN for n in range(6)]
    good = places[-1] + 1
    store(index, 0, good + 1, dict.fromkeys(places, entry) | {good: to()})
    reads: list[list[int]] = []

    def gone(offsets: Iterable[int]) -> dict[int, Record]:
        reads.append(list(offsets))
        return {}

    monkeypatch.setattr(journal, "records", gone)

    now_ms = NOW_MS
    for _ in range(4):
        dispatch.tick(now_ms)
        assert writer.sent_to("orders") == [good]
        now_ms += ALONE_SPREAD_MS

    assert [read for read in reads if read] == [places[0:2], places[2:4], places[4:6]]
    assert writer.sent_to(LETTERS) == places
