"""What becomes of an index that belongs to another topic, cluster or group than what is there now.

A shard whose index does not fit stays closed, as nobody but a person knows which of the two is meant.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from blackbox import entry as entries
from blackbox.barrier import commit_barrier
from blackbox.clock import Clock
from blackbox.connect import kafka
from blackbox.doubt import Doubt, JournalLost
from blackbox.entry import Entry
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.access import KafkaAccess
from blackbox.journal.bulk import Bulk
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.journal.writer import Writer
from blackbox.marks import Recreated, Shortened, foreign_group, newest_mark
from blackbox.plan import Binding, Kept, Labels
from blackbox.recurrence import asked_at
from blackbox.request import Headers, Shard
from blackbox.settings import Settings

logger = logging.getLogger("blackbox.rebind")

AT_ONCE = 1000
ALL_DUE_MS = 1 << 52
"""Later than anything can be due."""

Pending = Literal["deliver", "drop"]
FITS = "it fits already"
NO_INDEX = "it has no index, and needs no decision"


@dataclass(slots=True)
class Rebound:
    """What was done for a shard: why, and how many pending requests were written again, or dropped.

    `cold` are those beyond the horizon, which were only in the request topic, and so are gone with it.
    """

    shard: Shard
    why: str
    again: int = 0
    dropped: int = 0
    cold: int = 0


def rebind(settings: Settings, topic: str, pending: Pending) -> list[Rebound]:
    """Let the indexes of a request topic belong to what is there now; those that do already stay.

    What is pending under other topics of the same name, or behind the end of one that became shorter,
    is written again as new requests (`deliver`) or forgotten (`drop`). What a group or a new receipts
    topic changes loses nothing. Raises a Doubt when Kafka or Redis does not answer: run it again.
    """
    access = kafka(settings)
    connections = pool(settings.redis_url.get_secret_value())
    count = Topics(access.admin()).partitions([topic]).get(topic)
    if count is None:
        raise JournalLost(f"there is no topic {topic}")
    done: list[Rebound] = []
    for partition in range(count):
        shard = Shard(topic, partition)
        index = ShardIndex(shard, connections, grace_s=settings.grace_s)
        journal = ShardJournal(shard, access)
        with closing(index), closing(journal):
            done.append(_rebind(settings, access, index, journal, pending))
            _take_over_receipts(settings, access, index, journal, done[-1])
    return done


def _rebind(
    settings: Settings,
    access: KafkaAccess,
    index: ShardIndex,
    journal: ShardJournal,
    pending: Pending,
) -> Rebound:
    shard, kept = index.shard, index.load()
    ours = journal.binding(settings.group_id)
    requests, receipts = journal.request_bounds(), journal.receipt_bounds()
    if kept is None or kept.binding is None:
        return _begin(index, journal, ours)
    is_other = kept.binding.topic_id != ours.topic_id
    is_shorter = kept.labels.requests > requests.end or kept.labels.receipts > receipts.end
    if kept.binding == ours and not is_shorter:
        return Rebound(shard, FITS)
    if is_other:
        why, first = "another topic", 0
        labels = Labels(requests.start, receipts.end)
    elif is_shorter:
        why, first = "a journal became shorter", requests.end
        labels = Labels(
            min(kept.labels.requests, requests.end), min(kept.labels.receipts, receipts.end)
        )
    else:
        why, first = "another group, or other receipts", kept.labels.requests
        same = kept.binding.receipts_id == ours.receipts_id
        labels = kept.labels if same else kept.labels._replace(receipts=receipts.end)
    done = Rebound(shard, why, cold=index.count_cold() if is_other else 0)
    if first < kept.labels.requests:
        with closing(Bulk(access)) as bulk:
            _move(settings, index, kept, first, pending, bulk, done)
    if is_other:
        index.begin(labels, binding=ours)
    else:
        index.rebind(labels, ours)
    return done


def _begin(index: ShardIndex, journal: ShardJournal, ours: Binding) -> Rebound:
    """Where Redis knows nothing: what the last owner's receipts speak of is not to be believed."""
    requests, receipts = journal.request_bounds(), journal.receipt_bounds()
    try:
        newest_mark(index.shard, journal, ours.topic_id)
    except Recreated:
        index.begin(Labels(requests.start, receipts.end), binding=ours)
        return Rebound(index.shard, "another topic")
    except Shortened:  # all that is left of it had ended
        index.begin(Labels(requests.end, receipts.end), binding=ours)
        return Rebound(index.shard, "a journal became shorter")
    return Rebound(index.shard, NO_INDEX)


def _take_over_receipts(
    settings: Settings,
    access: KafkaAccess,
    index: ShardIndex,
    journal: ShardJournal,
    done: Rebound,
) -> None:
    """Where the newest receipts are of another group, a barrier of ours behind them decides, whatever Redis has."""
    if not foreign_group(journal, settings.group_id, index.labels.receipts):
        return
    checked = journal.receipt_bounds().end
    labels = Labels(max(0, index.labels.requests), max(0, index.labels.receipts))
    binding = journal.binding(settings.group_id)
    writer = Writer(index.shard, access, exactly_once=settings.delivery == "exactly-once")
    with closing(writer):
        writer.open()
        commit_barrier(
            index.shard, journal, writer, Clock().earliest_ms, labels, None, binding, checked
        )
    if done.why in (FITS, NO_INDEX):
        done.why = "another group"


def _move(
    settings: Settings,
    index: ShardIndex,
    kept: Kept,
    first: int,
    pending: Pending,
    bulk: Bulk,
    done: Rebound,
) -> None:
    """Write again, or forget, what is pending from the offset `first` on; a thousand at a time.

    Each thousand leaves the index once Kafka has it: an interruption writes at most these twice.
    """
    passed: set[int] = set()
    while True:
        due = index.due(ALL_DUE_MS, AT_ONCE, passed)
        if not due.entries:
            return
        removed: dict[int, str | None] = {}
        for offset, stored in due.entries:
            if offset < first:
                passed.add(offset)
                continue
            entry = entries.decode(stored) if stored else None
            removed[offset] = None if entry is None else entry.caller_id
            if entry is None or pending == "drop":
                done.dropped += 1
                continue
            _write_again(settings, index.shard, entry, bulk)
            done.again += 1
        bulk.flush()
        if removed:
            index.settle(removed, kept.labels.receipts)


def _write_again(settings: Settings, shard: Shard, entry: Entry, bulk: Bulk) -> None:
    if not entry.target:  # an invalid one, as its caller wrote it
        bulk.produce(shard.topic, entry.message, entry.key, _headers(entry))
        return
    if settings.topics[shard.topic] != "countdown":
        raise Doubt(
            f"{shard}: what is pending was asked in the format {settings.topics[shard.topic]}, in which "
            "blackbox cannot ask for it again; run it with --pending drop, and let callers ask again"
        )
    value = asked_at(entry, entry.due_ms)
    key = (entry.caller_id or "").encode() or None
    bulk.produce(shard.topic, value, key, _headers(entry))


def _headers(entry: Entry) -> Headers:
    return [(name, v.encode() if isinstance(v, str) else v) for name, v in entry.headers]
