"""Whether messages, dead letters and next requests are where receipts say."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import Message

from blackbox.core.plan import Bounds
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.partition_reader import PartitionReader, messages_at
from blackbox.journal.polled_messages import offset_of
from blackbox.records.errors import JournalLost
from blackbox.records.receipt import Checked, Claim
from blackbox.records.recurrence import AGAIN
from blackbox.records.recurrence import HEADER as FOLLOWS
from blackbox.records.request import Shard

LEAST_CHECK_S = 1.0  # for one check of all places, when brokers do not answer


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """Checks the claims of one shard's receipts; `reader` reads what is committed."""

    shard: Shard
    access: KafkaAccess
    reader: PartitionReader

    def check(self, claims: Iterable[Claim], patience_s: float) -> Checked:
        """Which records are not where these claims say, and which places cannot be read.

        A place counts as filled if retention or compaction has removed its record since, or if its
        topic was deleted or created again. Places that cannot be read are retried for about
        `patience_s` in all.
        """
        by_place: dict[tuple[str, str], list[Claim]] = {}
        for claim in claims:
            by_place.setdefault((claim.at, claim.topic_id), []).append(claim)
        deadline = time.monotonic() + max(patience_s, LEAST_CHECK_S)
        missing: list[Claim] = []
        unread = dict.fromkeys(by_place, "there was no time to check yet")
        # first without waiting, so that an unreadable place takes no time from the others
        for within_s in (0.0, patience_s) if patience_s else (0.0,):
            # In random order: if the time runs out, the next check begins with other places.
            for place in random.sample(list(unread), len(unread)):
                if time.monotonic() > deadline:
                    break
                try:
                    unfilled = set(self._missing(*place, by_place[place], within_s))
                except JournalLost as error:
                    unread[place] = str(error)
                    continue
                del unread[place]
                missing += [claim for claim in by_place[place] if claim.offset in unfilled]
        return Checked(
            missing, {claim: why for place, why in unread.items() for claim in by_place[place]}
        )

    def _missing(
        self, at: str, topic_id: str, claims: Sequence[Claim], within_s: float
    ) -> Iterator[int]:
        topic, _, partition = at.rpartition("/")
        if not self.reader.exists(topic, int(partition)):
            return  # gone
        # Until then, another producer's open transaction may hide a message.
        last = max(claim.there for claim in claims)
        bounds = self.reader.stable_bounds(topic, int(partition), last, within_s)
        # Retention removed what is below the start: it counts as filled.
        wanted = {claim.there: claim.offset for claim in claims if claim.there >= bounds.start}
        seen: set[int] = set()
        for messages in messages_at(self.reader, topic, int(partition), wanted, bounds):
            seen |= {offset_of(m) for m in messages if self._is_ours(m, wanted)}
        absent = {there for there in wanted if there not in seen}
        # Created again since the receipt: offsets of the new topic say nothing of the old one.
        if absent and topic_id and not self.reader.topic_id(topic).startswith(topic_id):
            return
        absent -= self._compacted_away(topic, int(partition), absent, bounds)
        yield from (wanted[there] for there in absent)

    def _compacted_away(
        self, topic: str, partition: int, absent: set[int], bounds: Bounds
    ) -> set[int]:
        """The offsets that have no record any more, because compaction removed it."""
        # An aborted record is not gone: a read_uncommitted consumer still gets it.
        gone = {there for there in absent if there < bounds.end}
        if gone:
            uncommitted = PartitionReader(self.access, isolation="read_uncommitted", prefetched=1)
            with closing(uncommitted) as reader:
                for messages in messages_at(reader, topic, partition, gone, bounds):
                    gone -= {offset_of(message) for message in messages}
        return gone

    def _is_ours(self, message: Message, wanted: dict[int, int]) -> bool:
        there = offset_of(message)
        if there not in wanted:
            return False
        if (unreadable := message.error()) is not None:
            raise JournalLost(f"the record at offset {there}: {unreadable.str()}")
        source = self.shard.source(wanted[there]).encode()
        headers = message.headers() or []
        return any((name, source) in headers for name in ("blackbox-source", AGAIN, FOLLOWS))
