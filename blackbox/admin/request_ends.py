"""Where the requests that have been written so far end, as intake's positions count."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from blackbox.core.plan import Bounds
from blackbox.index.inspector import Inspector
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard


def request_ends(
    shards: Sequence[Shard], topics: Topics, access: KafkaAccess, inspector: Inspector
) -> dict[Shard, int]:
    """The offset behind the last readable request record of each shard. Raises JournalLost if one is unknown."""
    asked = topics.ends([(shard.topic, shard.partition) for shard in shards], committed=True)
    found = {Shard(*place): end for place, end in asked.items()}
    if silent := [str(shard) for shard in shards if shard not in found]:
        raise JournalLost(f"Kafka does not answer where {', '.join(silent)} ends; try again")
    for shard, end in found.items():
        positions = inspector.positions(shard)
        if positions is not None and positions.requests < end:
            found[shard] = _behind_the_last_record(shard, access, positions.requests, end)
    return found


def _behind_the_last_record(shard: Shard, access: KafkaAccess, position: int, end: int) -> int:
    # Markers of transactions, and aborted records, move no position: nobody may wait for them.
    with closing(ShardJournal(shard, access, prefetched=1)) as journal:
        for stretch in Bounds(position, end).from_the_end(1):
            offsets = [one.offset for batch in journal.requests(*stretch) for one in batch.records]
            if offsets:
                return offsets[-1] + 1
    return position
