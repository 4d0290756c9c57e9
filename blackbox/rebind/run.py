"""One run of `blackbox rebind` over the indexes of a request topic: what was decided is carried out."""

from __future__ import annotations

from collections.abc import Collection
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
from blackbox.core.barrier import PATIENCE_S, commit_barrier
from blackbox.core.ended import Ended
from blackbox.core.intake import parse, touched_by
from blackbox.core.outcomes import Outcomes
from blackbox.core.plan import Bounds, Tail
from blackbox.core.settling import CHUNK, settle
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.journal.trim import Trimmer
from blackbox.journal.writer import Writer
from blackbox.rebind.decide import Decide, Decision, Gone, lost_from
from blackbox.rebind.leftovers import Leftovers, Newer, Rebound
from blackbox.records.clock import Clock
from blackbox.records.errors import (
    Fenced,
    JournalLost,
    NotAllowed,
    PositionsMoved,
    RecoveryRequired,
)
from blackbox.records.receipt import Mark, Receipt, settled
from blackbox.records.request import Cancel, Shard, offset_in

LARGEST_BYTES = "1000000000"
LONGEST_MS = "900000"
"""The longest transaction that a broker allows, unless told otherwise."""

TRY_FOR_S = 60
TAIL = 100
"""Requests looked at first for the last one."""

patiently = Retrying(
    retry=retry_if_exception_type(JournalLost) & retry_if_not_exception_type(NotAllowed),
    stop=stop_after_attempt(3),
    reraise=True,
)
"""Receipts cannot be read to their end while the transaction of a killed owner of another group is open: for its
timeout of 20 s, and until the broker looks for such ones, every 10 s. A read gives up after 15 s.
"""

again = Retrying(
    retry=retry_if_exception_type((Fenced, JournalLost, PositionsMoved))
    & retry_if_not_exception_type(NotAllowed),
    wait=wait_random_exponential(multiplier=0.1, max=1),
    stop=stop_after_delay(TRY_FOR_S),
    reraise=True,
)
"""A shard is decided anew when another run of this, or a service that tried to open it just then, was there first."""

Pending = Literal["deliver", "drop"]


def rebind(settings: Settings, topic: str, pending: Pending) -> list[Rebound]:
    """Let the indexes of a request topic belong to what is there now; those that do already stay.

    What is pending under other topics of the same name, or behind the end of one that became shorter,
    is written again as new requests (`deliver`) or forgotten (`drop`). What a group or a new receipts
    topic changes loses nothing. An index that is older than an opening of the topic that is there now is emptied:
    Redis went back to before that, and what is pending is in the journals. What such an index has of an earlier topic
    may have been written again then, and becomes dead letters.

    For each shard whose index does not fit:

    1. take it over, so that no earlier owner delivers any more, and decide what is to be done;
    2. in one transaction write again what is gone from the topic, but what receipts say has ended, and what callers
       have replaced or cancelled since, with a barrier that names the index;
    3. then empty the index, so that who opens it rebuilds it from the journals, or bind it to what is there.

    Who is interrupted before the commit has changed nothing; who comes after it finds the barrier, and goes on with
    the last step. With at-least-once delivery what was written before is written again.
    Raises RecoveryRequired when Kafka or Redis does not answer: run it again.
    """
    with ExitStack() as ending:
        return _Run(settings, topic, pending, ending).shards()


class _Run:
    """One run, and what it has open."""

    def __init__(self, settings: Settings, topic: str, pending: Pending, ending: ExitStack) -> None:
        access = kafka(settings)
        self._topics = topics = Topics(access.admin())
        found = topics.partitions([topic])
        if topic not in found:
            raise JournalLost(f"there is no topic {topic}")
        receipts = receipts_topic(topic)
        found |= topics.partitions([receipts], to="Read")
        if receipts not in found:
            raise JournalLost(f"there is no topic {receipts}; start a service, which creates it")
        self._count, self._receipts_count = found[topic], found[receipts]
        self._access = access
        # What a caller's client could compress was taken from it, however large it is without.
        largest = {"message.max.bytes": LARGEST_BYTES, "transaction.timeout.ms": LONGEST_MS}
        self._large = replace(access, settings=largest | dict(access.settings))
        self._topic = topic
        self._pending = pending
        self._contract = settings.topics[topic]
        self._dead_letter_topic = settings.dead_letter_topic
        self._exactly_once = settings.delivery == "exactly-once"
        self._grace_s = settings.grace_s
        self._connections = pool(settings.redis_url.get_secret_value())
        self._trimmer = Trimmer(access, retention_ms=0)
        self._reader = ending.enter_context(closing(PartitionReader(access)))
        self._ending = ending
        self._ours = self._journal(0).binding(settings.group_id)
        self._keeps_partitions = True
        self._format = formats(settings)[topic]
        self._written_before: dict[int, Bounds] = {}
        self._known_newer: dict[int, Newer] = {}

    def shards(self) -> list[Rebound]:
        """Each partition that there is, and each that has an index from when there were more, the last one first.

        So a run that is interrupted leaves no gap behind which the next one would find none.
        """
        indexes: list[ShardIndex] = []
        former: list[int] = []
        for partition in count_on():
            index = ShardIndex(
                Shard(self._topic, partition), self._connections, grace_s=self._grace_s
            )
            self._ending.callback(index.close)
            kept = index.load()
            if kept is None and partition >= max(self._count, self._receipts_count):
                break
            if kept is not None or partition < self._count:
                indexes.append(index)
            if kept and kept.binding and kept.binding.topic_id != self._ours.topic_id:
                former.append(partition)
        self._keeps_partitions = keep_partitions(former, self._count)
        for index in indexes:
            self._end_open_transaction(index)
        self._written_before = {p: self._journal(p).settled_bounds() for p in range(self._count)}
        there, gone = indexes[: self._count], indexes[self._count :]
        return [self.rebind(index) for index in [*there, *reversed(gone)]]

    def rebind(self, index: ShardIndex) -> Rebound:
        return again(self._rebind, index)

    def _end_open_transaction(self, index: ShardIndex) -> None:
        """That of a run that was killed would hide what is written, for 15 minutes."""
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
            return self._carry_out(index, patiently(self._decide, index), writer)

    def _decide(self, index: ShardIndex) -> Decision:
        decide = Decide(self._ours, self._count, self._receipts_count, self._journal)
        return decide(index)

    def _writer(self, shard: Shard) -> Writer:
        return Writer(shard, self._large, exactly_once=self._exactly_once)

    def _carry_out(self, index: ShardIndex, decision: Decision, writer: Writer) -> Rebound:
        done = Rebound(index.shard, decision.why)
        old_receipts = decision.old_receipts
        if decision.gone is not None:
            old_receipts = self._write_again(index, decision, decision.gone, writer, done)
        elif decision.barrier is not None:
            old_receipts = self._say(index.shard, decision, writer)
        self._check_topic(index.shard)
        if decision.is_emptied:
            index.discard()
        elif decision.positions is not None:
            if decision.first is not None:
                self._take_off(index, decision.first)
            tail = self._tail(index.shard, decision.positions.requests)
            index.rebind(decision.positions, self._ours, decision.unknown_ms, tail)
        # Of a topic that was begun, these tell of other requests under the ids of those that are there. Without a
        # mark behind them, what was delivered would be unknown.
        if old_receipts:
            self._trimmer.remove_receipts(index.shard, old_receipts)
        return done

    def _check_topic(self, shard: Shard) -> None:
        """If it is another one again by now, what was written went with it, and only the index has it."""
        if self._journal(shard.partition).binding(self._ours.group).topic_id != self._ours.topic_id:
            raise RecoveryRequired(
                f"{shard}: its topic was deleted and created again meanwhile; run blackbox rebind "
                f"{shard.topic} once more"
            )

    def _tail(self, shard: Shard, first: int) -> Tail | None:
        """The last record that is left below an offset, to be known again if the log loses its end once more."""
        if shard.partition >= self._count:
            return None
        journal = self._journal(shard.partition)
        for stretch in Bounds(journal.request_bounds().start, first).from_the_end(TAIL):
            found = [record for batch in journal.requests(*stretch) for record in batch.records]
            if found:
                return Tail.of(found[-1])
        return None

    def _write_again(
        self, index: ShardIndex, decision: Decision, gone: Gone, writer: Writer, done: Rebound
    ) -> int:
        """Returns up to where receipts are of an earlier topic."""
        shard = index.shard
        told = self._take_over(shard, decision, gone, writer)
        asks = self._pending == "deliver"
        ended = Ended()
        ended.add(offset for offset in told.ended if offset >= gone.first)
        if asks:
            ended.add(self._over(index, told))
        leftovers = Leftovers(
            index, gone.first, ended,
            newer=self._newer_since(shard, gone) if asks else Newer(set(), set()),
            partition=shard.partition if self._keeps_partitions else -1,
            is_unknown=gone.is_unknown,
            asks=asks,
            topics=self._topics,
            dead_letter_topic=self._dead_letter_topic,
            exactly_once=self._exactly_once,
        )  # fmt: skip
        if asks and self._contract != "countdown":
            self._check_format(leftovers)
        done.cold = index.count_cold() if gone.first == 0 else 0
        end = self._journal(shard.partition).receipt_bounds().end if decision.barrier else 0
        leftovers.write(writer, _marked(decision, end), done)
        return 0 if decision.begins is None else end

    def _over(self, index: ShardIndex, told: Outcomes) -> list[int]:
        """What is in doubt, and was delivered or ended meanwhile. Raises RecoveryRequired where that cannot be read."""
        shard = index.shard
        known = {o: claim for o, claim in index.doubtful.items() if o not in told.undelivered}
        doubtful = {**known, **told.doubtful}
        claims = [claim for offset, claim in doubtful.items() if offset not in told.ended]
        missing, unread = self._journal(shard.partition).check(claims, PATIENCE_S)
        if unread:
            raise RecoveryRequired(
                f"{shard}: whether {len(unread)} requests were delivered cannot be read: "
                f"{next(iter(unread.values()))}; run it again once it can, or with --pending drop"
            )
        absent = {claim.offset for claim in missing}
        unwanted = index.unwanted([*absent, *told.undelivered.intersection(index.doubtful)])
        return [*(claim.offset for claim in claims if claim.offset not in absent), *unwanted]

    def _take_over(self, shard: Shard, decision: Decision, gone: Gone, writer: Writer) -> Outcomes:
        """What receipts say of the requests that are gone; none speaks of them behind a cut.

        A barrier of its own comes first, as the last receipt may name messages that are not there.
        """
        outcomes = Outcomes()
        if decision.barrier is None or (gone.since is None and not decision.is_emptied):
            return outcomes
        journal = self._journal(shard.partition)
        since = decision.since if gone.since is None else gone.since
        first = replace(decision.barrier, cut=(), rebound="")
        if gone.is_open:
            first = replace(first, topic_id=gone.topic_id)
        end = journal.receipt_bounds().end
        position, _ = commit_barrier(shard, journal, writer, first, since, end)
        told = journal.receipts(since, position) if gone.since is not None else iter(())
        for _, receipt in settled(told):
            if receipt.cut or receipt.topic_id not in ("", gone.topic_id):
                break
            outcomes.add(receipt)
        return outcomes

    def _check_format(self, leftovers: Leftovers) -> None:
        for batch in leftovers.batches():
            if any(entry.target for entry in batch.values()):
                raise RecoveryRequired(
                    f"{leftovers.index.shard}: what is pending was asked in the format "
                    f"{self._contract}, in which blackbox cannot ask for it again; run it with "
                    "--pending drop, and let callers ask again"
                )

    def _say(self, shard: Shard, decision: Decision, writer: Writer) -> int:
        """The barrier alone, as a new owner writes it; returns what `_write_again` does."""
        assert decision.barrier is not None
        journal = self._journal(shard.partition)
        end = journal.receipt_bounds().end
        since = decision.since if decision.begins is None else end
        barrier = _marked(decision, end)
        assert barrier is not None
        commit_barrier(shard, journal, writer, barrier, since, end)
        return 0 if decision.begins is None else end

    def _take_off(self, index: ShardIndex, first: int) -> None:
        """What is gone leaves an index that is kept."""
        while there := self._from(
            index, first
        ):  # another run may do the same, and move ranks meanwhile
            settle(index, there, index.positions.receipts)

    def _from(self, index: ShardIndex, first: int) -> list[int]:
        there: list[int] = []
        rank = 0
        while found := index.pending(rank, CHUNK):
            rank += len(found)
            there += [offset for offset in found if offset >= first]
        return there

    def _newer_since(self, shard: Shard, gone: Gone) -> Newer:
        """What callers have written since, as far as that was there when the run began.

        Those requests and cancels come later than what is asked for again, and would be ended by it.
        """
        places = [shard.partition] if self._keeps_partitions else range(self._count)
        found = [self._newer(place, gone.first) for place in places]
        return Newer(
            set[str]().union(*(one.caller_ids for one in found)),
            set[str]().union(*(one.cancelled for one in found)),
        )

    def _newer(self, partition: int, first: int) -> Newer:
        if partition not in self._known_newer:
            newer = self._known_newer[partition] = Newer(set(), set())
            start, end = self._written_before[partition]
            shard, requests = Shard(self._topic, partition), Ended()
            for batch in self._journal(partition).requests(max(first, start), end):
                changes = parse(self._format, batch, Clock().latest_ms(), None).changes
                newer.caller_ids.update(touched_by(changes).caller_ids)
                for offset, change in changes:
                    if not isinstance(change, Cancel):
                        requests.add([offset])
                    elif change.id is not None:
                        named = offset_in(shard, change.id)
                        if named is not None and named not in requests:
                            newer.cancelled.add(change.id)
        return self._known_newer[partition]

    def _journal(self, partition: int) -> ShardJournal:
        return ShardJournal(Shard(self._topic, partition), self._access, reader=self._reader)


def _marked(decision: Decision, end: int) -> Receipt | None:
    """The barrier, with a mark behind the receipts that end here where a topic is begun."""
    if decision.barrier is None or decision.begins is None:
        return decision.barrier
    return replace(decision.barrier, mark=Mark(decision.begins, end))


def keep_partitions(former: Collection[int], count: int) -> bool:
    """Whether what is asked for again goes to its partition, of those that had an index of another topic.

    Among another number of partitions than that had, the keys of new requests name other ones than before.
    """
    return not former or max(former) + 1 == count
