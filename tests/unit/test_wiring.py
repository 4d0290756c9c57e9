"""The lookups of brokers for callers' rules."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from blackbox.config import wiring
from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard


class Brokers:
    """They answer if `told` has the number of partitions; counts the lookups."""

    def __init__(self) -> None:
        self.told: dict[str, int] = {}
        self.asked = 0

    def partitions(self, names: Sequence[str]) -> dict[str, int]:
        self.asked += 1
        if not self.told:
            raise JournalLost("no answer")
        return self.told


def test_shards_are_looked_up_again_10_s_after_a_failed_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, brokers = SimpleNamespace(now_s=1000.0), Brokers()
    monkeypatch.setattr(wiring, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(wiring, "Topics", lambda _: brokers)
    shards = wiring._Shards(kafka(load(kafka_bootstrap_servers="127.0.0.1:1")), ["TB"])

    assert shards() == shards() == []
    assert brokers.asked == 1
    brokers.told = {"TB": 2}
    clock.now_s += 11
    assert shards() == [Shard("TB", 0), Shard("TB", 1)]
    brokers.told = {}
    clock.now_s += 59
    assert len(shards()) == brokers.asked == 2
    clock.now_s += 2
    assert len(shards()) == 2
    assert brokers.asked == 3
