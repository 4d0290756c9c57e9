"""How far partitions can be read now, for the planner of a stream."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from threading import RLock, Thread

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import TopicMetadata

from blackbox.journal.kafka_access import (
    REQUEST_TIMEOUT_S,
    ConnectionMonitor,
    KafkaAccess,
    explained,
    journal_error,
)
from blackbox.journal.polled_messages import OUT_OF_RANGE
from blackbox.records.errors import JournalLost, RecoveryRequired

logger = logging.getLogger("blackbox.journal")

Partition = tuple[str, int]
Offsets = dict[Partition, int]

OUTAGE_S = 30.0
OUTAGE_LOOK_S = 0.2
SILENT_S = 1.0
PATIENCE_S = 5.0
NOT_ASKED_FOR_S = 2.0
"""How long a partition that did not answer, or was refused, is not asked about again."""
UNUSED_S = 30.0
"""A client that nobody polls keeps its statistics in memory, hundreds of kB a minute."""

# Errors that a retry does not change.
_FINAL = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError._INVALID_ARG,
)


class ReadableBounds:
    """Where partitions begin and how far they can be read now, for the planner of a stream.

    Waits for the end of an outage for 30 s; then every method raises JournalLost. Not safe for use
    from two threads at once.
    """

    def __init__(self, access: KafkaAccess, isolation: str = "read_committed") -> None:
        self._access = access
        self._isolation = isolation
        self._asking: Consumer | None = None
        self._watcher: Consumer | None = None
        self._monitor: ConnectionMonitor | None = None
        self._watched: Offsets = {}
        self._watched_s = 0.0
        self._watching = RLock()
        self._silent_until: dict[Partition, tuple[RecoveryRequired, float]] = {}
        self._unwatched: dict[Partition, float] = {}

    def first(self, partitions: Iterable[Partition]) -> Offsets:
        """The first offsets that are kept. Raises JournalLost when a topic or partition does not exist."""
        return self._offsets(list(partitions), OFFSET_BEGINNING, OUTAGE_S)

    def last(self, partitions: Iterable[Partition]) -> Offsets:
        """The last stable offsets: nothing beyond them can be read until open transactions have ended.

        With `read_uncommitted`, the high watermarks: the ends of the logs, with open transactions.
        Raises JournalLost when a topic or partition does not exist.
        """
        return self._offsets(list(partitions), OFFSET_END, OUTAGE_S)

    def last_of_each(
        self, partitions: Iterable[Partition]
    ) -> tuple[Offsets, dict[Partition, RecoveryRequired]]:
        """Like `last` for the partitions that answer, and why the others do not.

        The others are asked again after 2 s. Raises JournalLost when no broker names their leaders
        for 30 s.
        """
        now = time.monotonic()
        wanted = list(partitions)
        known = {at: self._silent_until[at] for at in wanted if at in self._silent_until}
        lost = {at: why for at, (why, until_s) in known.items() if until_s > now}
        asked = [at for at in wanted if at not in lost]
        # At first one request for all partitions; it fails if one of them does not answer.
        try:
            return self._offsets(asked, OFFSET_END, 0), lost
        except JournalLost:
            pass
        found, silent = self._by_leader_with_retries(asked)
        until_s = time.monotonic() + NOT_ASKED_FOR_S
        self._silent_until |= {at: (why, until_s) for at, why in silent.items()}
        return found, lost | silent

    def wait_for_records(self, positions: Offsets, timeout_s: float) -> bool:
        """Wait until some partition has a record at its position or beyond; False when none has.

        Aborted transactions do not count. A partition that reports an error is not watched for 2 s.
        """
        if not positions:
            self._drop_watcher()
            time.sleep(timeout_s)
            return False
        now = time.monotonic()
        self._unwatched = {at: until_s for at, until_s in self._unwatched.items() if until_s > now}
        watched = {at: offset for at, offset in positions.items() if at not in self._unwatched}
        # The broker does the waiting, so an idle wait costs almost nothing.
        with self._watching:
            message = self._watch(watched).poll(timeout_s)
            self._watched_s = time.monotonic()
        error = message.error() if message is not None else None
        # A position out of range counts as a record: the reader reports what is missing there.
        if message is None or error is None or error.code() in OUT_OF_RANGE:
            return message is not None
        topic, partition = message.topic(), message.partition()
        if topic is None or partition is None or (topic, partition) not in watched:
            raise journal_error(KafkaException(error), "cannot wait for records")
        self._unwatched[topic, partition] = now + NOT_ASKED_FOR_S
        return False

    def close(self) -> None:
        """Close the clients; the next use creates new ones."""
        self._drop_asking()
        self._drop_watcher()

    def _asking_consumer(self) -> Consumer:
        # Not the watcher: on its connection, an answer would wait for the fetch in flight. Not an
        # admin client: with one in ten, the first list_offsets takes a second.
        if self._asking is None:
            self._asking = self._access.consumer(**{"isolation.level": self._isolation})
        return self._asking

    def _offsets(self, partitions: Sequence[Partition], end: int, patience_s: float) -> Offsets:
        # The client accepts OFFSET_BEGINNING and OFFSET_END as times, and asks each broker once.
        asked = [TopicPartition(*at, end) for at in partitions]
        if not asked:
            return {}
        names = ", ".join(sorted({at.topic for at in asked}))
        deadline = time.monotonic() + patience_s
        while True:
            began = time.monotonic()
            try:
                found = self._asking_consumer().offsets_for_times(
                    asked, timeout=min(REQUEST_TIMEOUT_S, max(SILENT_S, patience_s))
                )
                for at in found:
                    if at.error is not None:
                        raise KafkaException(at.error)
                return {(at.topic, at.partition): at.offset for at in found}
            except KafkaException as error:
                if error.args[0].code() in _FINAL or time.monotonic() >= deadline:
                    what = f"cannot read the offsets of {names}"
                    raise journal_error(error, what, f"Read on topic {names}") from error
            if time.monotonic() - began > SILENT_S:  # it may have lost sight of all brokers
                self._drop_asking()
            time.sleep(OUTAGE_LOOK_S)

    def _by_leader_with_retries(
        self, partitions: Sequence[Partition]
    ) -> tuple[Offsets, dict[Partition, RecoveryRequired]]:
        deadline = time.monotonic() + OUTAGE_S
        while True:
            try:
                return self._by_leader(partitions)
            except JournalLost:
                if time.monotonic() > deadline:
                    raise
            # The broker that was asked for the leaders may hang; a new client likely asks another.
            self._drop_asking()
            time.sleep(OUTAGE_LOOK_S)

    def _by_leader(
        self, partitions: Sequence[Partition]
    ) -> tuple[Offsets, dict[Partition, RecoveryRequired]]:
        topics = {topic: self._topic(topic) for topic, _ in partitions}
        led: defaultdict[int, list[Partition]] = defaultdict(list)
        lost: dict[Partition, RecoveryRequired] = {}
        for at in partitions:
            leader = _leader(topics[at[0]], *at)
            if isinstance(leader, RecoveryRequired):
                lost[at] = leader
            else:
                led[leader].append(at)
        found: Offsets = {}
        # A request per leader: a partition that does not answer fails its whole request.
        for those in led.values():
            try:
                found |= self._offsets(those, OFFSET_END, 0)
            except JournalLost as silent:
                lost |= dict.fromkeys(those, silent)
        return found, lost

    def _topic(self, topic: str) -> TopicMetadata:
        try:
            found = self._asking_consumer().list_topics(topic, timeout=SILENT_S)
        except KafkaException as error:
            raise journal_error(error, f"cannot read the metadata of {topic}") from error
        metadata: TopicMetadata = found.topics[topic]
        return metadata

    def _watch(self, positions: Offsets) -> Consumer:
        if self._monitor is not None and self._monitor.is_lost:
            logger.warning(
                "waiting for requests: no connection for a while; replacing the client, which knew %s",
                self._monitor.known,
            )
            self._drop_watcher()
        if self._watcher is None:
            self._watcher, self._monitor = self._access.watched_consumer(
                PATIENCE_S,
                {
                    # Only whether there is a record matters: fetch as little as possible.
                    "fetch.message.max.bytes": 1,
                    "queued.min.messages": 1,
                    # A partition whose position changed is watched only after the fetch in flight
                    # for the others has been answered.
                    "fetch.wait.max.ms": 50,
                    "fetch.queue.backoff.ms": 1,
                },
            )
            Thread(target=self._drop_if_unused, args=(self._watcher,), daemon=True).start()
        moved = self._watched.items() - positions.items()
        if moved:
            self._watcher.incremental_unassign([TopicPartition(*at) for at, _ in moved])
        new = positions.items() - self._watched.items()
        if new:
            self._watcher.incremental_assign([TopicPartition(*at, offset) for at, offset in new])
        self._watched = dict(positions)
        return self._watcher

    def _drop_asking(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None

    def _drop_watcher(self) -> None:
        with self._watching:
            if self._watcher is not None:
                self._watcher.close()
            self._watcher, self._monitor, self._watched = None, None, {}

    def _drop_if_unused(self, watcher: Consumer) -> None:
        """Drop this watcher once nobody has waited for a while: a batch may take hours if Redis is full."""
        while self._watcher is watcher:
            time.sleep(UNUSED_S / 2)
            with self._watching:
                if self._watcher is watcher and time.monotonic() - self._watched_s > UNUSED_S:
                    self._drop_watcher()


def _leader(metadata: TopicMetadata, topic: str, partition: int) -> int | RecoveryRequired:
    """The broker that leads the partition, or why there is none."""
    place = metadata.partitions.get(partition)
    if metadata.error is not None:
        why = f": {explained(metadata.error, f'Read on topic {topic}')}"
    elif place is None:
        why = f" does not exist: {topic} has {len(metadata.partitions)} partitions"
    elif place.leader < 0:
        why = " has no leader"
    else:
        return place.leader
    return JournalLost(f"{topic}/{partition}{why}")
