"""Entries that are made again from their records, after Redis lost the payloads."""

from __future__ import annotations

import pytest

from blackbox.core.lost_payload import reread
from blackbox.records.entry import Entry
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Request, request_id
from tests.contract.held import SHARD
from tests.fakes import FakeFormat, record

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
