"""What is decided about an index that belongs to something else, and what a rebuild makes of it later."""

from __future__ import annotations

from typing import Any

import pytest

from blackbox.index.shard_index import ShardIndex
from blackbox.plan import Binding, Labels
from blackbox.rebind import Rebound, _Run
from tests.contract.held import SHARD, entry, held, store
from tests.fakes import FakeJournal
from tests.unit.opening import Make, Written, delivered, request

OURS = Binding("cluster", "topic", "receipts", "blackbox")


class Run(_Run):
    """Over journals in lists."""

    def __init__(self, journal: FakeJournal, pending: str = "drop", ours: Binding = OURS) -> None:
        self._ours = ours
        self._count = self._receipts_count = SHARD.partition + 1
        self._pending = pending  # type: ignore[assignment]
        self._contract = "countdown"
        self._topic = SHARD.topic
        self._fake = journal

    def _journal(self, partition: int) -> Any:
        return self._fake

    def run(self, index: ShardIndex) -> Rebound:
        decision = self._decide(index, index.load())
        self.prepare([decision])
        return self.carry_out(decision)


@pytest.mark.parametrize("pending", ["drop", "deliver"])
def test_an_index_older_than_the_first_opening_of_the_topic_is_rebuilt_and_delivers_nothing_again(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any, pending: str
) -> None:  # fmt: skip
    asked(request(), request(), request())
    make().open()
    journal.append(delivered(0, 1))
    client.flushall()
    empty_index.load()
    empty_index.begin(Labels(0, 0), binding=OURS._replace(topic_id="old"))
    store(empty_index, 0, 6, {5: entry()})

    done = Run(journal, pending).run(empty_index)
    make().open()

    assert (done.again, done.dropped) == (0, 1)
    assert held(client).offsets() == [2]


def test_an_index_of_an_old_topic_is_begun_at_the_new_one_that_nobody_has_opened(
    make: Make, empty_index: ShardIndex, asked: Written, journal: FakeJournal, client: Any
) -> None:
    journal.topic_id = "old"
    make().open()
    journal.append(delivered(0, 1))
    client.flushall()
    empty_index.load()
    journal.topic_id = "topic"
    asked(request(), request())
    empty_index.begin(Labels(0, 0), binding=OURS._replace(topic_id="old"))

    Run(journal).run(empty_index)
    make().open()

    assert held(client).offsets() == [0, 1]
