"""The result of a task of intake, for one shard."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from blackbox.core.intake import Taken
from blackbox.records.errors import IndexFull, IndexLost, JournalSilent, RecoveryRequired
from blackbox.records.request import Shard

NOTHING_TAKEN = Taken(0, 0, 0, 0, None)


class ShardResult(NamedTuple):
    """`problem` says why not all of the shard's records are in the index.

    Everything below `position` is in the index, as far as the task knows. `is_full`: Redis has no room.
    `is_behind`: Kafka does not return the records, or the index does not exist yet or belongs to something
    else; this does not concern other shards. `is_silent`: Kafka did not answer, and the other shards of
    the batch had to wait for that as well. `offsets` were read and stored in `seconds`.
    """

    shard: Shard
    taken: Taken
    position: int
    problem: str | None = None
    is_full: bool = False
    is_behind: bool = False
    is_silent: bool = False
    offsets: int = 0
    seconds: float = 0.0

    def with_more(self, taken: Taken, position: int, offsets: int) -> ShardResult:
        """After another batch of the shard."""
        return self._replace(
            taken=sum_of(self.taken, taken), position=position, offsets=self.offsets + offsets
        )

    def stopped_by(self, reason: RecoveryRequired | IndexFull) -> ShardResult:
        return self._replace(
            problem=str(reason),
            is_full=isinstance(reason, IndexFull),
            # A lost Redis concerns every shard, so the batch is tried again.
            is_behind=isinstance(reason, RecoveryRequired) and not isinstance(reason, IndexLost),
            is_silent=isinstance(reason, JournalSilent),
        )


def sum_of(one: Taken, other: Taken) -> Taken:
    first_ms = [ms for ms in (one.first_due_ms, other.first_due_ms) if ms is not None]
    counts = ("accepted", "invalid", "cancelled", "replaced", "carried")
    return Taken(
        **{name: getattr(one, name) + getattr(other, name) for name in counts},
        first_due_ms=min(first_ms, default=None),
        refused=Counter(one.refused) + Counter(other.refused),
        kafka_ahead_ms=one.kafka_ahead_ms if other.kafka_ahead_ms is None else other.kafka_ahead_ms,
    )
