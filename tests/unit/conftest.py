"""What the tests of the verbs share: one shard, whose index is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import fakeredis
import pytest
import redis

from blackbox.core.intake import Intake
from blackbox.core.plan import Positions
from blackbox.core.recovery import Recovery
from blackbox.index.shard_index import ShardIndex
from blackbox.records.request import Cancel, Headers, Invalid, Request
from tests.contract.held import GRACE_S, NOW_MS, SHARD
from tests.docs.redis import undocumented
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter, fake_connections, record
from tests.unit.opening import Make, Written


@pytest.fixture(autouse=True)
def parser_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service makes dead letters of records at which a parser fails; these tests have to see the failure."""

    def fail(error: Exception) -> Invalid:
        raise AssertionError("the parser failed") from error

    monkeypatch.setattr("blackbox.formats.format.parser_error", fail)


@pytest.fixture
def connections() -> Iterator[redis.ConnectionPool]:
    """Connections to a Redis inside this process, empty at first; keys that a test leaves there must be documented."""
    connections = fake_connections(fakeredis.FakeServer(server_type="redis"))
    yield connections
    assert list(undocumented(redis.Redis(connection_pool=connections))) == [], "see keys.py"
    connections.disconnect()


@pytest.fixture
def client(connections: redis.ConnectionPool) -> Any:
    return redis.Redis(connection_pool=connections)


@pytest.fixture
def others_index(connections: redis.ConnectionPool) -> Iterator[ShardIndex]:
    """The index of another owner."""
    with closing(ShardIndex(SHARD, connections, grace_s=GRACE_S)) as index:
        yield index


@pytest.fixture
def empty_index(connections: redis.ConnectionPool) -> Iterator[ShardIndex]:
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    yield index
    index.close()


@pytest.fixture
def index(empty_index: ShardIndex) -> ShardIndex:
    """An index whose journals are at their start."""
    empty_index.begin(Positions(0, 0))
    return empty_index


@pytest.fixture
def journal() -> FakeJournal:
    return FakeJournal()


@pytest.fixture
def writer(journal: FakeJournal) -> FakeWriter:
    return FakeWriter(journal)


@pytest.fixture
def targets() -> FakeTargets:
    return FakeTargets()


@pytest.fixture
def write_records(journal: FakeJournal) -> Written:
    """Write these requests to the journal; None is a gap."""

    def write(
        *changes: Request | Cancel | None, headers: Headers | None = None, at_ms: int = 0
    ) -> None:
        for change in changes:
            offset = len(journal.request_records)
            written = record(offset, timestamp_ms=at_ms)
            written = written._replace(headers=[*written.headers, *(headers or [])])
            journal.request_records.append(None if change is None else written)
            if change is not None:
                journal.format.parsed[offset] = change

    return write


@pytest.fixture
def intake(empty_index: ShardIndex, journal: FakeJournal) -> Intake:
    return Intake(journal.format, empty_index, None)


@pytest.fixture
def make(empty_index: ShardIndex, writer: FakeWriter, journal: FakeJournal) -> Make:
    """The recovery of an owner, with the given parts: its own index, or another `apply`."""

    def make_recovery(index: ShardIndex = empty_index, **given: Any) -> Recovery:
        intake = Intake(journal.format, index, None)
        return Recovery(
            shard=SHARD,
            group="blackbox",
            index=index,
            journal=journal,
            writer=writer,
            confirm=given.get("confirm", lambda: writer.calls.append("confirm")),
            apply=given.get(
                "apply", lambda batch, opening: intake.parse_and_store(batch, NOW_MS, opening)
            ),
            upcoming=lambda batch: intake.upcoming(batch, NOW_MS),
            now_ms=lambda: NOW_MS,
            has_room=given.get("has_room", lambda: True),
        )

    return make_recovery


@pytest.fixture
def recovery(make: Make, write_records: Written) -> Recovery:
    return make()
