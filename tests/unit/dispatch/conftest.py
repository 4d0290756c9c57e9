"""A dispatch with an index, a writer and targets whose answers a test decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.interpret import refused_entry
from blackbox.core.triage import Triage
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records.entry import Entry
from blackbox.records.refusal_causes import BROKEN_RULES
from blackbox.records.request import Cancel, Record
from blackbox.rules.file import RulesFile
from blackbox.rules.target_rates import TargetRates
from tests.contract.held import NOW_MS, SHARD, store
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter, record
from tests.unit.dispatch.entries import LETTERS, NO_JSON, Make, Paced


@pytest.fixture
def make(index: ShardIndex, writer: FakeWriter, targets: FakeTargets, journal: FakeJournal) -> Make:
    def make_dispatch(**settings: Any) -> Dispatch:
        cluster = settings.pop("cluster", "")
        names = {"batch_limit", "counted"} & settings.keys()
        own = {name: settings.pop(name) for name in names}
        if isinstance(own.get("batch_limit"), int):
            own["batch_limit"] = BatchLimit(own["batch_limit"])
        settings.setdefault("follow_ups", FollowUps(SHARD, journal.format, journal))
        settings.setdefault("reread", reread)
        triage = Triage(
            shard=SHARD,
            targets=targets,
            journal=journal,
            dead_letter_topic=LETTERS,
            **settings,
        )
        dispatch = Dispatch(index, writer, triage, **own)
        dispatch.count_rates_in(cluster)
        return dispatch

    return make_dispatch


@pytest.fixture
def dispatch(make: Make) -> Dispatch:
    return make()


@pytest.fixture
def pend(index: ShardIndex, journal: FakeJournal) -> Callable[..., None]:
    """Make these requests pending, with their records in the journal."""

    def add(*changes: Entry | Cancel) -> None:
        start = len(journal.request_records)
        offsets = range(start, start + len(changes))
        journal.request_records += [record(o, b"record %d" % o, NOW_MS) for o in offsets]
        store(index, start, offsets.stop, dict(zip(offsets, changes, strict=True)))

    return add


def reread(kept: Record, cause: str | None) -> Entry:
    if cause is not None:
        refusal = BROKEN_RULES.get(cause, NO_JSON)
        return refused_entry(kept, refusal, kept.timestamp_ms)
    return Entry("orders", b"read again", kept.timestamp_ms)


@pytest.fixture
def paced(connections: redis.ConnectionPool, tmp_path: Path) -> Paced:
    """The rates of these rules."""

    def rates(rules: str) -> TargetRates:
        path = tmp_path / "callers.toml"
        path.write_text(rules)
        return TargetRates(RulesFile(path), SharedState(connections))

    return rates
