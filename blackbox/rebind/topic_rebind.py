"""One run of `blackbox rebind` over the indexes of a request topic, which carries the decisions out."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count as count_on
from typing import Literal

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from blackbox.config.settings import Settings
from blackbox.config.wiring import formats, kafka
from blackbox.core.barrier import commit_barrier
from blackbox.core.outcomes import Outcomes
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.journal.trim import Trimmer
from blackbox.rebind.decision import (
    Decider,
    Decision,
    Gone,
    keep_partitions,
)
from blackbox.rebind.later_records import WrittenSince, ended_in_doubt
from blackbox.rebind.leftovers import Leftovers, Rebound
from blackbox.rebind.lost_end import lost_from, tail_before
from blackbox.rebind.removal import take_off
from blackbox.records.errors import (
    Fenced,
    JournalLost,
    NotAllowed,
    PositionsMoved,
    RecoveryRequired,
)
from blackbox.records.receipt import without_void
from blackbox.records.request import Shard

LARGEST_BYTES = "1000000000"
# The longest transaction that a broker allows by default (transaction.max.timeout.ms).
LONGEST_MS = "900000"

TRY_FOR_S = 60
# An open transaction of a killed owner of another group hides receipts for its timeout of 20 s, and
# until the broker looks for expired ones, every 10 s. A read gives up after 15 s.
patiently = Retrying(
    retry=retry_if_exception_type(JournalLost) & retry_if_not_exception_type(NotAllowed),
    stop=stop_after_attempt(3),
    reraise=True,
)

# Decides a shard again when another run, or a service that tried to open it, was there first.
again = Retrying(
    retry=retry_if_exception_type((Fenced, JournalLost, PositionsMoved))
    & retry_if_not_exception_type(NotAllowed),
    wait=wait_random_exponential(multiplier=0.1, max=1),
    stop=stop_after_delay(TRY_FOR_S),
    reraise=True,
)

Pending = Literal["deliver", "drop"]


def rebind(settings: Settings, topic: str, pending: Pending) -> list[Rebound]:
    """Bind the indexes of a request topic to the current topics, cluster and group; keep those that fit.

    Requests that are pending from an earlier topic of the same name, or from behind the end of a log that
    became shorter, are written again as new requests (`deliver`) or forgotten (`drop`). A change of the
    group or of the receipts topic loses nothing. An index that is older than an opening of the current
    topic is emptied: Redis went back to before that, and the journals have what is pending. Requests that
    such an index has from an earlier topic may have been written again then, and become dead letters.

    For each shard whose index does not fit:

    1. take it over, so that no earlier owner delivers any more, and decide what is to be done;
    2. in one transaction write again what is gone from the topic, with a barrier that names the index;
       leave out what has ended by the receipts, and what callers have replaced or cancelled since;
    3. empty the index, so that the next owner rebuilds it from the journals, or bind it to what exists.

    A run that is interrupted before the commit has changed nothing. A run after it finds the barrier, and
    continues with the last step. With at-least-once delivery, what was written before the interruption is
    written again. Raises RecoveryRequired when Kafka or Redis does not answer: run it again.
    """
    with ExitStack() as ending:
        return _TopicRebind(settings, topic, pending, ending).shards()


class _TopicRebind:
    """One run, with the clients and indexes that it has open."""

    def __init__(self, settings: Settings, topic: str, pending: Pending, ending: ExitStack) -> None:
        access = kafka(settings)
        self._topics = topics = Topics(access.admin())
        found = topics.partitions([topic])
        if topic not in found:
            raise JournalLost(f"the topic {topic} does not exist")
        receipts = receipts_topic(topic)
        found |= topics.partitions([receipts], to="Read")
        if receipts not in found:
            raise JournalLost(
                f"the topic {receipts} does not exist; start a service, which creates it"
            )
        self._count, self._receipts_count = found[topic], found[receipts]
        self._access = access
        # Kafka accepts records that clients compress, however large they are uncompressed.
        largest = {"message.max.bytes": LARGEST_BYTES, "transaction.timeout.ms": LONGEST_MS}
        self._large = replace(access, settings=largest | dict(access.settings))
        self._topic = topic
        self._pending = pending
        self._format_name = settings.topics[topic]
        self._dead_letter_topic = settings.dead_letter_topic
        self._exactly_once = settings.delivery == "exactly-once"
        self._grace_s = settings.grace_s
        self._connections = pool(settings.redis_url.get_secret_value())
        self._trimmer = Trimmer(access, retention_ms=0)
        self._reader = ending.enter_context(closing(PartitionReader(access)))
        self._ending = ending
        self._ours = self._journal(0).binding(settings.group_id)
        self._keeps_partitions = True
        self._holders: dict[str, Shard] = {}
        self._since = WrittenSince(topic, formats(settings)[topic], {}, self._journal)

    def shards(self) -> list[Rebound]:
        """Rebind each partition that exists, then each former one that has an index, the last one first."""
        indexes: list[ShardIndex] = []
        former: list[int] = []
        for partition in count_on():
            index = ShardIndex(
                Shard(self._topic, partition), self._connections, grace_s=self._grace_s
            )
            self._ending.callback(index.close)
            kept = index.load()
            # Nothing says how many partitions a former topic had: the first gap ends the look.
            if kept is None and partition >= max(self._count, self._receipts_count):
                break
            if kept is not None or partition < self._count:
                indexes.append(index)
            if kept and kept.binding and kept.binding.topic_id != self._ours.topic_id:
                former.append(partition)
        self._keeps_partitions = keep_partitions(former, self._count)
        # Before `settled_bounds`, which waits for open transactions.
        for index in indexes:
            self._end_open_transaction(index)
        self._since.before = {p: self._journal(p).settled_bounds() for p in range(self._count)}
        # The last former partition first: an interrupted run leaves no gap that hides the others.
        there, gone = indexes[: self._count], indexes[self._count :]
        return [self.rebind(index) for index in [*there, *reversed(gone)]]

    def rebind(self, index: ShardIndex) -> Rebound:
        return again(self._rebind, index)

    def _end_open_transaction(self, index: ShardIndex) -> None:
        """End the open transaction of a killed run."""
        # It would hide later records for up to 15 minutes. Shards that fit are left alone, because
        # opening a writer fences their owner.
        kept, there = index.load(), index.shard.partition < self._count
        journal = self._journal(index.shard.partition)
        if kept is None or (
            there
            and kept.binding == self._ours
            and lost_from(journal, kept, journal.request_bounds()) is None
        ):
            return
        with closing(self._writer(index.shard)) as writer:
            writer.open()

    def _rebind(self, index: ShardIndex) -> Rebound:
        decision = patiently(self._decide, index)
        if not decision.changes:
            return Rebound(index.shard, decision.why)
        with closing(self._writer(index.shard)) as writer:
            writer.open()
            # Decided again behind the fence: an owner may have written since the first time.
            return self._carry_out(index, patiently(self._decide, index), writer)

    def _decide(self, index: ShardIndex) -> Decision:
        return Decider(self._ours, self._count, self._receipts_count, self._journal).decide(index)

    def _writer(self, shard: Shard) -> ShardWriter:
        return ShardWriter(shard, self._large, exactly_once=self._exactly_once)

    def _carry_out(self, index: ShardIndex, decision: Decision, writer: ShardWriter) -> Rebound:
        done = Rebound(index.shard, decision.why)
        old_receipts = decision.old_receipts
        if decision.gone is not None:
            old_receipts = self._write_again(index, decision, decision.gone, writer, done)
        elif decision.barrier is not None:
            old_receipts = self._write_barrier(index.shard, decision, writer)
        # Before the index changes: if the topic was created again, only the index has the requests.
        self._check_topic(index.shard)
        if decision.is_emptied:
            index.discard()
        elif decision.positions is not None:
            if decision.first is not None:
                take_off(index, decision.first)
            tail = None
            if index.shard.partition < self._count:
                journal = self._journal(index.shard.partition)
                tail = tail_before(journal, decision.positions.requests)
            index.rebind(decision.positions, self._ours, decision.unknown_ms, tail)
        # Receipts of an earlier topic name other requests under the ids of current ones. A mark is
        # behind them; without it, outcomes would be unknown once they are removed.
        if old_receipts:
            self._trimmer.remove_receipts(index.shard, old_receipts)
        return done

    def _check_topic(self, shard: Shard) -> None:
        """Raise RecoveryRequired if the topic was created again in between."""
        if self._journal(shard.partition).binding(self._ours.group).topic_id != self._ours.topic_id:
            raise RecoveryRequired(
                f"{shard}: its topic was deleted and created again in the meantime; run blackbox "
                f"rebind {shard.topic} again"
            )

    def _write_again(
        self, index: ShardIndex, decision: Decision, gone: Gone, writer: ShardWriter, done: Rebound
    ) -> int:
        """Write pending requests again; returns the offset up to which receipts are of an earlier topic."""
        shard = index.shard
        outcomes = self._take_over(shard, decision, gone, writer)
        delivers = self._pending == "deliver"
        ended = outcomes.ended
        if delivers:
            ended.add(ended_in_doubt(index, outcomes, self._journal(shard.partition)))
        places = [shard.partition] if self._keeps_partitions else range(self._count)
        newer = self._since.newer(places if delivers else [], gone.first)
        leftovers = Leftovers(
            index, gone.first, ended,
            newer=newer.in_time(index, ended, gone.first),
            partition=shard.partition if self._keeps_partitions else -1,
            is_unknown=gone.is_unknown,
            delivers=delivers,
            topics=self._topics,
            dead_letter_topic=self._dead_letter_topic,
            exactly_once=self._exactly_once,
            holders=self._holders,
        )  # fmt: skip
        if delivers:
            leftovers.check_format(self._format_name)
        done.cold = index.count_cold() if gone.first == 0 else 0
        end = self._journal(shard.partition).receipt_bounds().end if decision.barrier else 0
        leftovers.write(writer, decision.marked(end), done)
        return 0 if decision.begins is None else end

    def _take_over(
        self, shard: Shard, decision: Decision, gone: Gone, writer: ShardWriter
    ) -> Outcomes:
        """The outcomes of the requests that are gone, by receipts."""
        outcomes = Outcomes()
        if decision.barrier is None or (gone.since is None and not decision.is_emptied):
            return outcomes
        journal = self._journal(shard.partition)
        since = decision.since if gone.since is None else gone.since
        # Cut and index are named by the barrier that is committed with the requests.
        first = replace(decision.barrier, cut=(), rebound="")
        if gone.is_open:
            first = replace(first, topic_id=gone.topic_id)
        end = journal.receipt_bounds().end
        # The last receipt may name messages that do not exist: the barrier declares these void.
        position, _ = commit_barrier(shard, journal, writer, first, since, end)
        receipts = journal.receipts(since, position) if gone.since is not None else iter(())
        for _, receipt in without_void(receipts):
            # Receipts behind a cut, or of the current topic, name other requests.
            if receipt.cut or receipt.topic_id not in ("", gone.topic_id):
                break
            outcomes.add(receipt)
        return outcomes

    def _write_barrier(self, shard: Shard, decision: Decision, writer: ShardWriter) -> int:
        """Write the barrier alone, as a new owner does; returns what `_write_again` does."""
        assert decision.barrier is not None
        journal = self._journal(shard.partition)
        end = journal.receipt_bounds().end
        since = decision.since if decision.begins is None else end
        barrier = decision.marked(end)
        assert barrier is not None
        commit_barrier(shard, journal, writer, barrier, since, end)
        return 0 if decision.begins is None else end

    def _journal(self, partition: int) -> ShardJournal:
        return ShardJournal(Shard(self._topic, partition), self._access, reader=self._reader)
