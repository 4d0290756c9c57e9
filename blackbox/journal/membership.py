"""The consumer-group member by which this process is assigned its shards; it never fetches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from blackbox.journal.kafka_access import KafkaAccess, explained, logger
from blackbox.journal.unowned_partitions import UnownedPartitions
from blackbox.records.errors import JournalLost, RecoveryRequired
from blackbox.records.request import Shard

POLL_S = 0.05
CONFIRM_S = 5.0
LEAVE_S = 2.0
PATIENCE_S = 20.0  # by then, the group has given this member's shards to others


class _OwnershipQuery:
    """A commit in flight, by which a shard's owner asks whether it still owns the shard."""

    def __init__(self) -> None:
        self.answered = Event()
        self.refusal: KafkaError | None = None
        self.is_revoked = False


@dataclass(eq=False, repr=False)
class Membership:
    """Joins the group for the request topics and reports the shards it gets and loses.

    With the `instance_id` (group.instance.id) of its predecessor, it gets the predecessor's shards at
    once, even if the group has not yet noticed that the predecessor was killed.

    `gained` and `lost` are called from the membership's own thread. `lost` returns when the shards are
    given up; only then does the group give them to another member.
    """

    access: KafkaAccess
    topics: list[str]
    instance_id: str | None = None
    _: KW_ONLY
    gained: Callable[[Shard], None]
    lost: Callable[[Sequence[Shard]], None]

    def __post_init__(self) -> None:
        self._owned: set[Shard] = set()
        self._lock = Lock()
        self._starting = Lock()
        self._stopping = Event()
        self._joined = Event()
        self._new: list[Shard] = []
        # Only the membership's own thread uses the consumer: while one thread polls, the client
        # blocks calls from other threads, without fairness.
        self._to_commit: SimpleQueue[TopicPartition] = SimpleQueue()
        self._ownership_queries: dict[Shard, _OwnershipQuery] = {}
        self._must_join = False
        self._must_leave = False
        self._member_id = ""
        self._unowned = UnownedPartitions(self.access, self.topics)
        self._open()
        self._thread = Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        with self._starting:
            if not self._stopping.is_set():
                self._join()
                self._thread.start()

    def has_others(self) -> bool:
        """Whether other members own shards now; False if Kafka does not answer."""
        return self._unowned.has_others(self.instance_id)

    @property
    def has_joined(self) -> bool:
        """Whether the group knows this process, and has given it a (perhaps empty) assignment."""
        return self._joined.is_set()

    def owned(self) -> set[Shard]:
        with self._lock:
            return set(self._owned)

    def confirm(self, shard: Shard, offset: int) -> None:
        """Ask the group whether this process still owns the shard, by committing its position.

        Raises RecoveryRequired when this process does not own it, or the group does not answer.
        """
        if shard not in self.owned():
            raise RecoveryRequired(f"{shard}: given to another owner")
        question = _OwnershipQuery()
        with self._lock:
            self._ownership_queries[shard] = question
        # The group refuses the commit of a former member, even of one that does not know it yet.
        self._to_commit.put(_at(shard, offset))
        if not question.answered.wait(CONFIRM_S):
            raise JournalLost(f"{shard}: the group did not confirm ownership within {CONFIRM_S} s")
        if question.is_revoked:
            raise RecoveryRequired(f"{shard}: given to another owner")
        if question.refusal is not None:
            raise RecoveryRequired(f"{shard}: not confirmed by the group: {question.refusal.str()}")

    def commit_later(self, positions: dict[Shard, int]) -> None:
        """Commit positions, for lag monitors.

        A recovery without an index reads them too, to see whether receipts are missing; it does not need
        the latest.
        """
        owned = self.owned()
        for shard, offset in positions.items():
            if shard in owned:
                self._to_commit.put(_at(shard, offset))

    def look_for_unowned(self) -> None:
        """Join the group again if it is this member's turn to find an owner for partitions that have none."""
        if self.has_joined and self._unowned.must_rejoin(self._member_id):
            self._must_leave = True

    def close(self) -> None:
        """Leave the group, after giving up every shard."""
        self._stopping.set()
        # A thread that is just being started cannot be joined.
        with self._starting:
            has_joined = self._thread.ident is not None
        if has_joined:
            self._thread.join()
        self._leave()
        self._consumer.close()

    def _leave(self) -> None:
        # Closing is not enough: a consumer with an instance id stays a member until it times out.
        with suppress(KafkaException):
            self._consumer.unsubscribe()
            deadline = time.monotonic() + LEAVE_S
            while self._consumer.memberid() and time.monotonic() < deadline:
                self._consumer.poll(POLL_S)

    def _open(self) -> None:
        self._consumer, self._monitor = self.access.watched_consumer(
            PATIENCE_S,
            {
                # A rebalance revokes only the shards that move; the others stay open.
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": 6_000,  # the minimum that brokers allow by default
                "heartbeat.interval.ms": 1_000,
                "queued.min.messages": 1,
                "on_commit": self._committed,
            }
            | ({"group.instance.id": self.instance_id} if self.instance_id else {}),
        )

    def _join(self) -> None:
        self._consumer.subscribe(
            self.topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._expelled
        )

    def _drop_instance_id(self) -> None:
        logger.error(
            "membership: another process has joined the group %s as BLACKBOX_INSTANCE_ID=%s; "
            "continuing without one; give every process its own", self.access.group_id, self.instance_id,
        )  # fmt: skip
        # With the instance id, the two processes would expel each other forever.
        self.instance_id = None
        self._must_join = True

    def _rejoin(self) -> None:
        self._joined.clear()
        self._consumer.close()
        # A client with a fatal error does not report what it lost.
        self._give_up(sorted(self.owned()))
        self._open()
        self._join()
        self._must_join = False

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._poll_group()
            except KafkaException as error:
                if is_replaced(error.args[0]) and self.instance_id is not None:
                    self._drop_instance_id()
                logger.warning("membership: %s; retrying", error)
            except Exception:
                logger.exception("membership: unexpected error; retrying")
                self._stopping.wait(POLL_S)

    def _poll_group(self) -> None:
        if self._must_leave:
            self._must_leave = False
            self._leave()  # else the group gives a member with an instance id what it had before
            self._must_join = True
        if self._must_join:
            self._rejoin()
        if self._monitor.is_lost:
            logger.warning(
                "membership: no connection for a while; replacing the client, which knew %s",
                self._monitor.known,
            )
            self._rejoin()
        message = self._consumer.poll(POLL_S)
        self._commit_queued()
        while self._new:  # removed only afterwards: after an error, `gained` is called again
            self.gained(self._new[-1])
            self._new.pop()
        failure = message.error() if message is not None else None
        if failure is not None:
            if is_replaced(failure):
                raise KafkaException(failure)
            is_topics = failure.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
            topics, group = ", ".join(self.topics), self.access.group_id
            right = f"topic {topics}" if is_topics else f"group {group}"
            logger.warning("membership: %s; retrying", explained(failure, f"Read on {right}"))

    def _commit_queued(self) -> None:
        latest: dict[tuple[str, int], TopicPartition] = {}
        with suppress(Empty):
            while True:
                at = self._to_commit.get_nowait()
                latest[at.topic, at.partition] = at
        if latest:
            self._consumer.commit(offsets=list(latest.values()), asynchronous=True)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for at in partitions:
            at.offset = OFFSET_END  # nothing is fetched, so no stored position is looked up
        consumer.incremental_assign(partitions)
        # Another consumer reads: a rebalance never affects fetches, and a slow opening of a shard
        # never blocks the heartbeat.
        if partitions:
            consumer.pause(partitions)
        with self._lock:
            self._owned.update(_shards(partitions))
        self._new += _shards(partitions)
        self._member_id = consumer.memberid() or ""
        self._joined.set()

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(_shards(partitions))
        consumer.incremental_unassign(partitions)

    def _give_up(self, shards: Sequence[Shard]) -> None:
        with self._lock:
            self._owned.difference_update(shards)
            asked = [self._ownership_queries.pop(shard, None) for shard in shards]
        for question in asked:
            if question is not None:  # no commit is answered while this thread waits for the owner
                question.is_revoked = True
                question.answered.set()
        self._new = [shard for shard in self._new if shard not in shards]
        self.lost(shards)

    def _expelled(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._joined.clear()
        self._revoked(consumer, partitions)

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        with self._lock:
            for at in partitions:
                question = self._ownership_queries.pop(Shard(at.topic, at.partition), None)
                if question is not None:
                    question.refusal = error or at.error
                    question.answered.set()


def is_replaced(error: KafkaError) -> bool:
    """Whether another member has joined under this one's instance id; the client is then unusable."""
    return error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)


def _shards(partitions: Sequence[TopicPartition]) -> list[Shard]:
    return [Shard(at.topic, at.partition) for at in partitions]


def _at(shard: Shard, offset: int) -> TopicPartition:
    return TopicPartition(shard.topic, shard.partition, offset)
