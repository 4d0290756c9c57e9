"""Entries that are made again from their records, after Redis lost the payloads."""

from __future__ import annotations

import pytest

from blackbox.core.letter_record import RECORD_GONE
from blackbox.core.lost_payload import payload_lost, reread
from blackbox.records.entry import Entry
from blackbox.records.refusal_causes import BROKEN_RULES
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record, Request, request_id
from tests.contract.held import SHARD
from tests.support.fakes import FakeFormat, record

NOW_MS = 50_000


def request() -> Request:
    return Request("orders", b"hi", NOW_MS, b"k", [("h", b"v")], "shop", "a", None)


def test_a_lost_entry_is_made_again_from_its_record() -> None:
    format = FakeFormat({3: request(), 4: Invalid(Reason.EMPTY, "no value")})

    again = reread(format, record(3))
    refused = reread(format, record(4, b"", timestamp_ms=70))

    assert again == Entry("orders", b"hi", NOW_MS, b"k", [("h", b"v")], "shop", "a")
    assert (refused.reason, refused.message, refused.due_ms) == ("empty", b"", 70)


def test_a_lost_replacement_by_id_becomes_a_dead_letter() -> None:
    headers: Headers = [("blackbox-replaces", request_id(SHARD, 0).encode())]

    again = reread(FakeFormat({3: request()}), record(3)._replace(headers=headers))

    assert (again.reason, again.message, again.caller_id) == ("payload-lost", record(3).value, "a")


def test_rereading_a_cancel_is_an_error() -> None:
    with pytest.raises(ValueError, match="the record at offset 3 is not a request"):
        reread(FakeFormat({3: Cancel("a")}), record(3))


LARGE = record(3, b"x" * 2000)
AS_REPLACEMENT: Headers = [("blackbox-replaces", request_id(SHARD, 0).encode())]
AS_CARRIED: Headers = [("blackbox-carried", b"[1,1,1,false]")]


class EndedSchedules(FakeFormat):
    """A format for which no record is a request."""

    def parse(self, record: Record, latest_ms: int) -> None:
        return None


VALID, CANCEL = (
    FakeFormat({1: request(), 3: request()}),
    FakeFormat({1: Cancel("a"), 3: Cancel("a")}),
)


@pytest.mark.parametrize("headers", [[], AS_REPLACEMENT], ids=["request", "replacement"])
@pytest.mark.parametrize(
    "format", [VALID, CANCEL, EndedSchedules()], ids=["valid", "a cancel", "no request"]
)
def test_what_was_invalid_has_a_reason_of_its_own_whatever_its_record_is_by_now(
    format: FakeFormat, headers: Headers
) -> None:
    again = reread(format, LARGE._replace(headers=headers), "invalid")

    assert (again.reason, again.caller_id) == (Reason.WAS_INVALID, None)
    assert (again.target, again.left_bytes > 2000) == ("", True)


def test_a_carried_request_that_was_invalid_is_not_delivered_when_it_is_read_again() -> None:
    assert reread(VALID, LARGE._replace(headers=AS_CARRIED), "invalid").reason == Reason.WAS_INVALID


@pytest.mark.parametrize(
    "headers", [[], AS_REPLACEMENT, AS_CARRIED], ids=["request", "replacement", "carried"]
)
def test_what_is_still_invalid_keeps_its_reason_when_it_is_read_again(headers: Headers) -> None:
    invalid = Invalid(Reason.NOT_JSON, "no JSON")

    again = reread(FakeFormat({1: invalid, 3: invalid}), LARGE._replace(headers=headers), "invalid")

    assert (again.reason, again.detail) == invalid


@pytest.mark.parametrize("format", [CANCEL, EndedSchedules()], ids=["a cancel", "no request"])
def test_a_replacement_that_was_too_late_still_is_if_its_record_is_no_request_by_now(
    format: FakeFormat,
) -> None:
    again = reread(format, LARGE._replace(headers=AS_REPLACEMENT), "too-late")

    assert (again.reason, again.target) == (Reason.TOO_LATE, "")


def test_a_request_that_a_rule_refused_is_not_admitted_when_it_is_read_again() -> None:
    refusal = BROKEN_RULES["largest_message_bytes"]

    again = reread(FakeFormat({3: request()}), LARGE, "largest_message_bytes")

    assert (again.reason, again.detail) == refusal
    assert (again.caller, again.target, again.left_bytes > 2000) == ("shop", "", True)


def test_a_replacement_that_was_too_late_still_is_when_it_is_read_again() -> None:
    again = reread(VALID, LARGE._replace(headers=AS_REPLACEMENT), "too-late")

    assert again.reason == Reason.TOO_LATE
    assert request_id(SHARD, 0) in (again.detail or "")


def test_a_refused_request_without_its_record_still_has_its_reason() -> None:
    refusal = BROKEN_RULES["requests_per_second"]

    lost = payload_lost(3, NOW_MS, "requests_per_second")

    assert (lost.reason, lost.detail) == (Reason.QUOTA, f"{refusal.detail}; {RECORD_GONE}")
    assert payload_lost(3, NOW_MS, "too-late").reason == Reason.PAYLOAD_LOST
