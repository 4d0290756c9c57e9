"""What all shards share, on every kind of Redis: in a cluster its keys are on many nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blackbox.index.keys import Keys
from blackbox.index.shared import Shared
from blackbox.request import Shard
from tests.contract.conftest import Backend
from tests.contract.held import NOW_MS

SHARDS = [Shard("TB", partition) for partition in range(8)]


@pytest.fixture
def shared(backend: Backend) -> Iterator[Shared]:
    shared = Shared(backend.connections())
    shared.resume("orders", SHARDS)
    yield shared
    shared.close()


def test_a_pause_reaches_the_shards_that_do_not_have_it(shared: Shared) -> None:
    shared.pause("orders", NOW_MS, SHARDS[:5])
    shared.pause("orders", NOW_MS + 5000, SHARDS)

    assert [shared.paused([shard]) for shard in SHARDS] == [{"orders": NOW_MS}] * len(SHARDS)

    shared.resume("orders", SHARDS)
    assert shared.paused(SHARDS) == {}
