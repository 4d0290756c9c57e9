"""The end offsets of partitions, when some brokers do not answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.readable_bounds import Offsets, Partition, ReadableBounds
from blackbox.records.errors import JournalLost, RecoveryRequired

GOOD, BAD = ("good", 0), ("bad", 0)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> ReadableBounds:
    """Whose brokers do not answer for all partitions at once."""

    def offsets(asked: Sequence[Partition], end: int, patience_s: float) -> Offsets:
        assert patience_s == 0, "a hanging broker would delay all partitions"
        raise JournalLost("no answer")

    monkeypatch.setattr("blackbox.journal.readable_bounds.OUTAGE_LOOK_S", 0.0)
    ends = ReadableBounds(KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"}))
    monkeypatch.setattr(ends, "_offsets", offsets)
    return ends


def test_each_retry_of_a_lookup_of_leaders_uses_a_new_client(
    ends: ReadableBounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()

    def by_leader(
        partitions: Sequence[Partition],
    ) -> tuple[Offsets, dict[Partition, RecoveryRequired]]:
        asked.append(ends._asking_consumer())
        if len(asked) < 3:
            raise JournalLost("no answer")
        return {GOOD: 7}, {BAD: JournalLost("it hangs")}

    monkeypatch.setattr(ends, "_by_leader", by_leader)

    found, silent = ends.last_of_each([GOOD, BAD])

    assert found == {GOOD: 7}
    assert set(silent) == {BAD}
    assert len(set(map(id, asked))) == 3, "each time a new client, which may find another broker"


def test_an_error_is_raised_if_no_broker_answers_for_a_while(
    ends: ReadableBounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_leader(
        partitions: Sequence[Partition],
    ) -> tuple[Offsets, dict[Partition, RecoveryRequired]]:
        raise JournalLost("no answer")

    monkeypatch.setattr(ends, "_by_leader", by_leader)
    monkeypatch.setattr("blackbox.journal.readable_bounds.OUTAGE_S", 0.0)
    with pytest.raises(JournalLost, match="no answer"):
        ends.last_of_each([GOOD, BAD])
