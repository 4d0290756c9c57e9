"""The answer of a cancel that met a replacement; a write does not depend on other operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from confluent_kafka import KafkaError
from fastapi import FastAPI

from blackbox.admin import changes as module
from blackbox.admin.admin import Admin
from blackbox.admin.changes import Cancelled, Changes
from blackbox.admin.dead_letters import ClosedLetters, DeadLetters
from blackbox.admin.pending import IN_FLIGHT, as_pending
from blackbox.admin.request_topics_writer import RequestTopicsWriter
from blackbox.api.app import make_app
from blackbox.client.request_value import request_value
from blackbox.client.request_writer import RequestWriter
from blackbox.config.settings import load
from blackbox.core.journal_search import LimitReached
from blackbox.core.plan import Positions
from blackbox.core.request_status import RequestStatus, State
from blackbox.engine.metrics import Metrics
from blackbox.index.inspector import Pending
from blackbox.records.request import Shard, locate, request_id
from tests.servers.mock_cluster import PRODUCE, MockCluster, mock_cluster
from tests.service.test_http import Patient
from tests.support.world import until


@pytest.fixture
def admin(tmp_path: Path) -> Admin:
    config = tmp_path / "kafka.properties"
    config.write_text("test.mock.num.brokers=1\nallow.auto.create.topics=true\n")
    return Admin(load(kafka_bootstrap_servers="in-process", kafka_config=config))


def test_a_request_is_written_while_dead_letters_are_discarded(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = Event(), Event()

    def slow(*_: Any, **__: Any) -> ClosedLetters:
        begun.set()
        assert may_end.wait(30)
        return ClosedLetters([], {})

    monkeypatch.setattr(DeadLetters, "close_letters", slow)
    monkeypatch.setattr(admin, "_lookup", lambda: None)
    with ThreadPoolExecutor() as pool:
        putting_away = pool.submit(admin.close_letters, ["letters/0@1"], replay=False)
        assert begun.wait(10)
        [id] = pool.submit(admin.send, [request_value("orders", 1, countdown_s=9)], None).result(5)
        assert not putting_away.done()
        may_end.set()
        putting_away.result(10)
    assert isinstance(id, str)
    assert locate(id, ["TB"])[0].topic == "TB"


def test_a_request_is_written_after_a_cancel_that_kafka_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard, asked = Shard("TB", 0), {"topic": "orders", "message": "hi", "countdown": 3600}

    async def talk(cluster: MockCluster, app: FastAPI) -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            first = await client.post("/requests", json=asked)
            cluster.answer(PRODUCE, KafkaError.UNKNOWN)
            cancelled = await client.delete(f"/requests/{request_id(shard, 0)}")
            return [first, cancelled, await client.post("/requests", json=asked)]

    with mock_cluster() as cluster:
        settings = load(kafka_bootstrap_servers=cluster.bootstrap_servers)
        admin = Admin(settings)
        monkeypatch.setattr(admin, "_lookup", lambda: FakeLookup({0: "pending"}))
        app = make_app(Patient(), Metrics(), admin, settings)
        first, cancelled, second = asyncio.run(talk(cluster, app))
        admin.close()

    assert cancelled.status_code == 503
    assert "Kafka rejected the request to TB" in cancelled.text
    ids = [answer.json().get("ids") for answer in (first, second)]
    assert ids == [[request_id(shard, 0)], [request_id(shard, 1)]]


def test_a_request_does_not_fail_because_an_earlier_record_was_refused_later() -> None:
    with mock_cluster() as cluster:
        writer = RequestTopicsWriter(load(kafka_bootstrap_servers=cluster.bootstrap_servers))
        cluster.answer(PRODUCE, KafkaError.UNKNOWN)
        earlier = writer.with_writer("TB", lambda one: one.write(b"{}"))

        def is_refused() -> bool:
            writer.with_writer("TB", RequestWriter.poll)
            return earlier.failure is not None

        until("the earlier record is refused", is_refused)
        [id] = writer.send([request_value("orders", 1, countdown_s=9)], None)
        writer.close()

    assert id == request_id(Shard("TB", 0), 0)


SHARD = Shard("TB", 3)
ASKED, REPLACED, AGAIN, CANCEL = 7, 20, 21, 22


@dataclass
class FakeLookup:
    """A lookup of one shard, whose intake has read all records."""

    states: dict[int, State]
    end: int = REPLACED
    places_of: dict[int, int] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    is_too_far: bool = False
    details: dict[int, str] = field(default_factory=dict)

    def status(self, shard: Shard, offset: int, since: Positions | None = None) -> RequestStatus:
        known = RequestStatus(request_id(shard, offset), shard.source(offset), self.states[offset])
        return replace(known, detail=self.details.get(offset))

    def replaced_by(self, shard: Shard, offset: int, since: Positions | None) -> int | None:
        if self.is_too_far:
            raise LimitReached
        return self.places_of.get(offset)

    @property
    def inspector(self) -> Any:
        return self

    def positions(self, shard: Shard) -> Positions:
        return Positions(self.end, 0)

    def is_in_flight(self, shard: Shard, offset: int) -> bool:
        return offset in self.in_flight


@pytest.fixture
def cancel(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cancelled]:
    """Cancels a pending request by its id while these things happen to it."""

    def cancelled(states: dict[int, State], *, at: int = CANCEL, **more: Any) -> Cancelled:
        lookup = FakeLookup({ASKED: "pending"}, **more)

        def written(*_: Any) -> int:
            lookup.states |= states
            lookup.end = at + 1
            return at

        monkeypatch.setattr(module, "READ_WITHIN_S", 0.2)
        monkeypatch.setattr(admin, "_lookup", lambda: lookup)
        monkeypatch.setattr(admin, "_places", lambda text: [(SHARD, ASKED)])
        monkeypatch.setattr(Changes, "_write_cancel", written)
        return admin.cancel(request_id(SHARD, ASKED))

    return cancelled


def test_a_cancel_that_ends_a_request_is_reported_as_cancelled(
    cancel: Callable[..., Cancelled],
) -> None:
    assert cancel({ASKED: "ended"}).outcome == "cancelled"


def test_a_cancel_without_records_in_between_reads_no_requests(
    cancel: Callable[..., Cancelled],
) -> None:
    assert cancel({ASKED: "ended"}, at=REPLACED, is_too_far=True).outcome == "cancelled"


@pytest.mark.parametrize("state", ["pending", "delivered", "dead"])
def test_a_cancel_of_a_request_that_was_just_replaced_is_too_late(
    cancel: Callable[..., Cancelled], state: State
) -> None:
    done = cancel({ASKED: "ended", REPLACED: state}, places_of={ASKED: REPLACED})
    assert done.outcome == "too-late"
    assert done.request is not None
    assert done.request.id == request_id(SHARD, ASKED)
    assert done.request.detail == f"replaced by {request_id(SHARD, REPLACED)}"


def test_a_cancel_that_also_ended_the_replacement_is_in_time(
    cancel: Callable[..., Cancelled],
) -> None:
    states: dict[int, State] = {ASKED: "ended", REPLACED: "ended"}
    assert cancel(states, places_of={ASKED: REPLACED}).outcome == "cancelled"


def test_a_late_cancel_names_the_last_of_several_replacements(
    cancel: Callable[..., Cancelled],
) -> None:
    states: dict[int, State] = {ASKED: "ended", REPLACED: "ended", AGAIN: "pending"}
    done = cancel(states, places_of={ASKED: REPLACED, REPLACED: AGAIN})
    assert done.outcome == "too-late"
    assert getattr(done.request, "detail", "") == f"replaced by {request_id(SHARD, AGAIN)}"


def test_a_cancel_remains_open_while_the_replacement_is_in_flight(
    cancel: Callable[..., Cancelled],
) -> None:
    states: dict[int, State] = {ASKED: "ended", REPLACED: "ended"}
    done = cancel(states, places_of={ASKED: REPLACED}, in_flight={REPLACED})
    assert done.outcome == "asked"


def test_a_cancel_of_a_request_that_was_replaced_in_flight_is_too_late(
    cancel: Callable[..., Cancelled],
) -> None:
    # written, it would be taken for what ended the request, although its replacement is delivered
    done = cancel({ASKED: "ended"}, at=REPLACED, details={ASKED: IN_FLIGHT})
    assert done.outcome == "too-late"


def test_a_cancel_does_not_guess_an_outcome_beyond_the_read_limit(
    cancel: Callable[..., Cancelled],
) -> None:
    done = cancel({ASKED: "ended"}, is_too_far=True)
    assert (done.outcome, getattr(done.request, "state", "")) == ("too-late", "over")


def test_a_large_replacement_that_came_too_late_says_so_before_its_dead_letter_is_written() -> None:
    """Redis has no payload of it, only the cause."""
    status = RequestStatus(request_id(SHARD, REPLACED), SHARD.source(REPLACED), "pending")

    found = as_pending(status, Pending(0, None, cause="too-late"))

    assert (found.state, found.reason) == ("pending", "too-late")
