"""Records that name the request they carry: those of promotion, and forged ones."""

from __future__ import annotations

import orjson
import pytest

from blackbox.core.interpret import interpret_record
from blackbox.core.parking import BAND_MS
from blackbox.core.plan import Carried, Change
from blackbox.formats import Format, Options, make_format
from blackbox.records.carried import MAX_STEP_BACK_MS, carry_on
from blackbox.records.entry import Entry
from blackbox.records.request import Reason, Record, Request, Shard
from blackbox.spark.journal_tasks import RECORDS, REQUESTS, _columns_of, _written
from blackbox.spark.task_io import as_batches

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
TEN_YEARS_MS = 315_360_000_000


def countdown() -> Format:
    return make_format("countdown", Options(400 * 86_400, lambda topic: topic == "TB", topic="TB"))


def record(carries: object, *, is_stamped: bool, timestamp_ms: int = NOW_MS) -> Record:
    """A record with this header, and a request that is due as late as one can be."""
    asked = {"topic": "orders", "message": "m", "countdown": TEN_YEARS_MS // 1000}
    headers: list[tuple[str, bytes | None]] = [("blackbox-carried", orjson.dumps(carries))]
    return Record(7, timestamp_ms, None, orjson.dumps(asked), headers, has_broker_time=is_stamped)


def read(record: Record) -> Change | None:
    return interpret_record(countdown(), record, NOW_MS, DAY_MS)[0]


LATE = [BAND_MS, 5 * BAND_MS, 2**53, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("is_cold", [True, False], ids=["renewed", "promoted"])
@pytest.mark.parametrize("is_stamped", [True, False], ids=["LogAppendTime", "CreateTime"])
@pytest.mark.parametrize("written_ms", [*LATE, -1])
def test_a_forged_time_of_writing_makes_a_dead_letter(
    written_ms: int, is_stamped: bool, is_cold: bool
) -> None:
    forged = record([3, 3, written_ms, is_cold], is_stamped=is_stamped)

    entry = read(forged)

    assert isinstance(entry, Entry)
    assert (entry.reason, entry.due_ms) == (Reason.BAD_HEADERS, NOW_MS)


@pytest.mark.parametrize("columns", [REQUESTS, RECORDS], ids=["audit", "ledger"])
@pytest.mark.parametrize("written_ms", LATE)
def test_a_forged_time_of_writing_is_no_time_in_a_table(written_ms: int, columns: str) -> None:
    forged = record([3, 3, written_ms, True], is_stamped=False)
    row = _columns_of(countdown().parse, forged, NOW_MS, Shard("TB", 0))
    assert row is not None

    [batch] = as_batches([[(*row, *_written(forged)) if columns == RECORDS else row]], columns)

    [found] = batch.to_pylist()
    assert (found["kind"], found["reason"], found["due_ms"]) == ("invalid", "bad-headers", NOW_MS)


def test_an_invalid_record_is_due_at_once_in_a_table_also_by_a_timestamp_in_the_future() -> None:
    invalid = Record(7, 2**62, None, b"{}", [])

    row = _columns_of(countdown().parse, invalid, NOW_MS, Shard("TB", 0))

    [batch] = as_batches([[row or ()]], REQUESTS)
    assert batch.to_pylist()[0]["due_ms"] == NOW_MS


@pytest.mark.parametrize(
    ("ahead_ms", "is_refused"), [(MAX_STEP_BACK_MS, False), (MAX_STEP_BACK_MS + 1, True)]
)
def test_a_request_may_be_promoted_after_its_brokers_clock_was_set_back_by_a_day(
    ahead_ms: int, is_refused: bool
) -> None:
    change = read(record([3, 3, NOW_MS + ahead_ms, False], is_stamped=True))

    assert isinstance(change, Entry if is_refused else Carried)


@pytest.mark.parametrize("ahead_ms", [0, 1000, 30 * DAY_MS, BAND_MS - NOW_MS - 1])
def test_a_request_whose_writers_clock_is_ahead_can_be_promoted(ahead_ms: int) -> None:
    asked = record([3, 3, 0, False], is_stamped=False, timestamp_ms=NOW_MS + ahead_ms)
    original = asked._replace(offset=3, headers=[("trace", b"1")])
    headers = carry_on(original, is_cold=False)

    change = read(original._replace(offset=7, timestamp_ms=NOW_MS, headers=headers))

    assert isinstance(change, Carried)
    assert isinstance(change.content, Entry)
    # the service's own clock counts instead of one that is ahead
    assert change.content.due_ms == NOW_MS + TEN_YEARS_MS
    assert change.content.due_ms < BAND_MS
    assert change.content.headers == [("trace", b"1")]


def test_a_request_whose_writers_clock_is_beyond_all_times_is_not_cold() -> None:
    beyond = record([3, 3, 0, False], is_stamped=False, timestamp_ms=2**62)
    asked = {"topic": "orders", "message": "m", "countdown": 30 * 86_400}

    change = read(beyond._replace(value=orjson.dumps(asked), headers=[]))

    assert isinstance(change, Request)
    assert change.due_ms == NOW_MS + 30 * DAY_MS
