"""Pending requests whose payloads Redis has lost or damaged."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from blackbox.core.dispatch import Dispatch
from tests.contract.held import NOW_MS, PREFIX, held
from tests.support.fakes import FakeJournal, FakeWriter
from tests.unit.dispatch.entries import Pend, letter, to, told


def lose_payload(client: Any, offset: int) -> None:
    client.delete(f"{PREFIX}msg:{offset:016x}")


def test_a_lost_payload_is_read_again_from_its_record(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pend(to(), to())
    lose_payload(client, 1)

    with caplog.at_level(logging.WARNING):
        did = dispatch.tick(NOW_MS)

    assert [(o.offset, o.value) for o in writer.committed] == [(0, b"hello"), (1, b"read again")]
    assert did.due_ms == [NOW_MS, NOW_MS]
    assert "TB/3@1: no payload in Redis; reading it again" in caplog.text


def test_a_damaged_payload_is_read_from_its_record(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(), to())
    client.set(f"{PREFIX}msg:{1:016x}", b"not what blackbox wrote")

    dispatch.tick(NOW_MS)

    assert [(o.offset, o.value) for o in writer.committed] == [(0, b"hello"), (1, b"read again")]


def test_a_payload_lost_together_with_its_record_becomes_a_dead_letter(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    pend(to(), to())
    lose_payload(client, 0)
    journal.request_records[0] = None

    did = dispatch.tick(NOW_MS)

    reason, detail = told(letter(writer, 0))
    assert reason == "payload-lost"
    assert "retention.ms" in str(detail)
    assert writer.receipts[0].dead == [0]
    assert did.dead == {"payload-lost": 1}
    assert held(client).due == []
