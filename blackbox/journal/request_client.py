"""One consumer of request topics, which reads its shards from given offsets on."""

from __future__ import annotations

import logging
import time

import orjson
from confluent_kafka import Message, TopicPartition

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

PATIENCE_S = 5.0
# A batch of 4,000 records of 1 MB would take 4 GB: its size is looked at after each so many records.
AT_ONCE, MOST_BYTES = 100, 16_000_000
# A client never returns some records; after so many statistics its shard is read with care.
LOOKS_IF_NONE = 3


class StarvedShards:
    """A consumer's `stats_cb` that finds shards whose next records are not fetched.

    A broker returns a record batch that is larger than a fetch only for the first shard of a request,
    and a consumer that is always busy always begins with the same one. The caller counts in `returned` how many
    messages the consumer has returned.
    """

    def __init__(self) -> None:
        self.found: set[Shard] = set()
        self.returned = 0
        self._fetched: dict[Shard, int] = {}
        self._waiting: set[Shard] = set()
        # The number of statistics in which a shard was quiet, and the value of `returned` from which on all that
        # was fetched before the first of them has been returned.
        self._quiet: dict[Shard, tuple[int, int]] = {}
        self._answers: dict[int, int] = {}

    def __call__(self, statistics: str) -> None:
        fetched: dict[Shard, int] = {}
        waiting, asked = set[Shard](), set[Shard]()
        queued = 0
        reported = orjson.loads(statistics)
        answers = {broker["nodeid"]: int(broker["rx"]) for broker in reported["brokers"].values()}
        # A broker that does not answer would not answer another consumer either.
        answering = {id for id, count in answers.items() if count > self._answers.get(id, 0)}
        for topic, about in reported["topics"].items():
            for number, partition in about["partitions"].items():
                shard, next_offset = Shard(topic, int(number)), int(partition["next_offset"])
                fetched[shard] = next_offset
                # All shards share one queue: while this process is slow, it may have records of this one.
                queued = max(queued, int(partition["fetchq_cnt"]))
                is_read = partition["fetch_state"] == "active"
                if is_read and 0 <= next_offset < int(partition["ls_offset"]):
                    waiting.add(shard)
                if partition["leader"] in answering:
                    asked.add(shard)
        same = {shard for shard, offset in fetched.items() if self._fetched.get(shard) == offset}
        before, self._quiet = self._quiet, {}
        for shard in same & waiting & self._waiting:
            if shard in asked:
                fetched_before = self.returned + queued
                looks, until = before.get(shard, (0, fetched_before))
                # Some of what was queued may never be returned: statistics, and records of shards that were given up.
                self._quiet[shard] = looks + 1, min(until, fetched_before)
            elif shard in before:  # perhaps nothing was asked for, because the queue was full
                self._quiet[shard] = before[shard]
        # If no shard progresses, the broker may be slow.
        least = 1 if len(same) < len(fetched) else LOOKS_IF_NONE
        self.found = {
            shard
            for shard, (looks, until) in self._quiet.items()
            if looks >= least and self.returned >= until
        }
        self._fetched, self._waiting, self._answers = fetched, waiting, answers


class RequestClient:
    """Reads shards with one consumer, which is replaced when it has lost its connection.

    `positions` are the next offsets of the shards that it reads; the caller advances them.
    Not safe for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess) -> None:
        self._access = access
        self._paused = False
        self.positions: dict[Shard, int] = {}
        self._open()

    @property
    def starved(self) -> set[Shard]:
        """The shards that have had records for a while, none of which was fetched although others' were."""
        return self._starved.found & self.positions.keys()

    def start(self, shard: Shard, offset: int) -> None:
        self.stop(shard)
        self._starved.found.discard(shard)
        at = TopicPartition(shard.topic, shard.partition, offset)
        self._consumer.incremental_assign([at])
        self.positions[shard] = offset
        if self._paused:  # `pause` paused only the partitions that were assigned at that moment
            self._consumer.pause([TopicPartition(shard.topic, shard.partition)])

    def stop(self, shard: Shard) -> None:
        if self.positions.pop(shard, None) is not None:
            self._consumer.incremental_unassign([TopicPartition(shard.topic, shard.partition)])

    def pause(self, paused: bool) -> None:
        self._paused = paused
        everywhere = [TopicPartition(shard.topic, shard.partition) for shard in self.positions]
        if paused:
            self._consumer.pause(everywhere)
        else:
            self._consumer.resume(everywhere)

    def read(self, most: int, wait_s: float, gather_s: float) -> list[Message]:
        """Wait up to `wait_s` for a message, then for more as long as `gather_s` says.

        Returns at most `most` messages, of about 16 MB.
        """
        self._replace_if_lost()
        first = self._consumer.poll(wait_s)
        if first is None:
            return []
        messages, size = [first], len(first)
        ends_s = time.monotonic() + gather_s
        while len(messages) < most and size < MOST_BYTES:
            at_most = min(AT_ONCE, most - len(messages))
            more = self._consumer.consume(at_most, timeout=max(0.0, ends_s - time.monotonic()))
            if not more:
                break
            messages += more
            size += sum(map(len, more))
        self._starved.returned += len(messages)
        return messages

    def close(self) -> None:
        self._consumer.close()

    def _open(self) -> None:
        self._starved = StarvedShards()
        self._consumer, self._monitor = self._access.watched_consumer(
            PATIENCE_S,
            {
                "queued.max.messages.kbytes": MOST_BYTES // 1000,
                # By default, a client whose queue was full fetches again only after a second.
                "fetch.queue.backoff.ms": 5,
            },
            self._starved,
        )

    def _replace_if_lost(self) -> None:
        if not self._monitor.is_lost:
            return
        logger.warning(
            "reading requests: no connection for a while; replacing the client, which knew %s",
            self._monitor.known,
        )
        lost = self._consumer
        self._open()
        lost.close()
        positions, self.positions = self.positions, {}
        for shard, offset in positions.items():
            self.start(shard, offset)
