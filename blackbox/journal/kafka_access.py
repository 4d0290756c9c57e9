"""Construction of all Kafka clients: one set of librdkafka settings, overridden by the operator's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from blackbox.records.errors import Fenced, JournalLost, NotAllowed, RecoveryRequired

logger = logging.getLogger("blackbox.kafka")

Answer = TypeVar("Answer")

REQUEST_TIMEOUT_S = 5.0
STATISTICS_MS = 2_000
PROGRESS_MS = 200  # of clients that are read for a short time
POLL_S = 0.1
# Of all shards of a broker. All of an answer is decompressed before a record is returned: 16 MB (lz4), 300 MB (zstd).
FETCH_BYTES = 65_536

# The guarantees depend on these; `KafkaAccess.check` refuses them in the operator's file.
FIXED_SETTINGS = (
    "auto.offset.reset",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.idempotence",
    "group.id",
    "isolation.level",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "partitioner",
    "transactional.id",
)


class ConnectionMonitor:
    """A client's `stats_cb` that tracks whether it is connected to a broker."""

    # A broker that has just rejoined its cluster may answer without brokers. librdkafka then drops
    # all that it knows, may never ask `bootstrap.servers` again, and waits without an error (its
    # issue 5301, open). From outside this looks like an outage, in which a new client does no harm.

    def __init__(self, patience_s: float) -> None:
        self._patience_ms = patience_s * 1000
        self._blind_ms = 0
        self.known = "no broker"
        """The brokers in the client's last statistics, with their states."""

    @property
    def is_lost(self) -> bool:
        """Whether the client has had no connection for longer than `patience_s`."""
        return self._blind_ms > self._patience_ms

    def __call__(self, statistics: str) -> None:
        brokers = orjson.loads(statistics)["brokers"].values()
        states = (f"{one.get('name')} ({one['source']}) {one['state']}" for one in brokers)
        self.known = ", ".join(states) or "no broker"
        # A logical broker is the group's coordinator: that connection alone fetches nothing.
        sees_one = any(one["state"] == "UP" and one["source"] != "logical" for one in brokers)
        self._blind_ms = 0 if sees_one else self._blind_ms + STATISTICS_MS


class FetchProgress:
    """A consumer's `stats_cb` that tracks how far it has fetched, over aborted records as well."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def next_offset(self, topic: str, partition: int) -> int:
        """The offset that the consumer fetches next, as of its last statistics; negative if unknown."""
        return self._next.get((topic, partition), -1)

    def __call__(self, statistics: str) -> None:
        self._next = {
            (topic, int(number)): int(partition["next_offset"])
            for topic, about in orjson.loads(statistics)["topics"].items()
            for number, partition in about["partitions"].items()
        }


@dataclass(frozen=True, slots=True)
class KafkaAccess:
    """The brokers and the operator's librdkafka settings, which override ours and are not in the repr."""

    bootstrap_servers: str
    group_id: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def in_group(self, group_id: str) -> KafkaAccess:
        """A copy for another consumer group."""
        return replace(self, group_id=group_id)

    def transactional_id(self, name: str) -> str:
        """The transactional id of this name, unique to the group."""
        # Neither groups nor topics contain a slash: `a` with `b-TB` is not `a-b` with `TB`.
        return f"{self.group_id}/{name}"

    def check(self) -> None:
        """Raise ValueError for a setting that librdkafka rejects, or that would break a guarantee."""
        for name in FIXED_SETTINGS:
            if name in self.settings:
                raise ValueError(
                    f"{name} must not be set, because the guarantees depend on it; remove it"
                )
        try:
            # librdkafka checks settings only when it creates a client, for each kind differently.
            self.admin()
            self.producer(None)
            self.consumer()
        except KafkaException as error:
            raise ValueError(error.args[0].str()) from None

    @property
    def largest_message_bytes(self) -> int:
        """The most that a producer sends in one record."""
        return int(self.settings.get("message.max.bytes", 1_000_000))  # librdkafka's default

    def admin(self) -> AdminClient:
        """An admin client; asking it about a topic never creates the topic."""
        return AdminClient(self._with({"allow.auto.create.topics": False}), logger=logger)

    def watched_consumer(
        self,
        patience_s: float,
        own: Mapping[str, Any],
        also: Callable[[str], None] | None = None,
    ) -> tuple[Consumer, ConnectionMonitor]:
        """A long-lived consumer with settings of its `own`, and what reports when it has lost its connection.

        `also` is called with each of the consumer's statistics.
        """
        monitor = ConnectionMonitor(patience_s)

        def observe(statistics: str) -> None:
            monitor(statistics)
            if also is not None:
                also(statistics)

        watched = {"statistics.interval.ms": STATISTICS_MS, "stats_cb": observe}
        return self.consumer(**watched | dict(own)), monitor

    def fetching_consumer(self, **own: Any) -> tuple[Consumer, FetchProgress]:
        """A consumer, and what shows its progress even while it returns no messages."""
        fetched = FetchProgress()
        watched = {"statistics.interval.ms": PROGRESS_MS, "stats_cb": fetched}
        return self.consumer(**watched | own), fetched

    def consumer(self, **own: Any) -> Consumer:
        """A read_committed consumer that does not commit automatically and never skips a gap."""
        defaults = {
            "logger": logger,
            "group.id": self.group_id,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # `earliest` would silently skip over records that retention removed.
            "auto.offset.reset": "error",
            # The largest record batch that brokers accept by default (socket.request.max.bytes), and the
            # rest of the answer: with the client's 100 MB, such a batch stops all partitions of its broker.
            "receive.message.max.bytes": 110_000_000,
            # The limit for one shard alone would not hold: the client doubles it, up to 1 GB, at each answer
            # of which it returns nothing, such as one of aborted records.
            "fetch.message.max.bytes": FETCH_BYTES,
            "fetch.max.bytes": FETCH_BYTES,
            "allow.auto.create.topics": False,
        }
        # For producers, but `fetch.max.bytes` must not be less.
        return Consumer(self._with(defaults | own) | {"message.max.bytes": 1000})

    def producer(self, transactional_id: str | None, *, in_flight: int = 1) -> Producer:
        """An idempotent producer; transactional with an id.

        At most `in_flight` requests to a broker are in flight. More than one requires that the caller
        treats a delivery report without an offset as a failure.
        """
        defaults: dict[str, Any] = {
            "enable.idempotence": True,  # librdkafka's default is false
            # librdkafka reports a refused record as delivered once the broker has accepted a later
            # one (IMPLICITACK). A new leader accepts that from a producer that it does not know.
            "max.in.flight.requests.per.connection": in_flight,
            "partitioner": "murmur2_random",  # a key lands where a Java producer would put it
            # librdkafka's default for producers is true: a misspelt target would become a topic.
            "allow.auto.create.topics": False,
            "linger.ms": 2,
            "batch.num.messages": 10_000,
            # The default (300 s, or the transaction's timeout) would let one unwritable record block a
            # flush for as long; 6 s
            # would be less than a failover of brokers takes.
            "message.timeout.ms": 15_000,
            "request.timeout.ms": 5_000,
            "queue.buffering.max.messages": 500_000,
        }
        if transactional_id is not None:
            defaults |= {"transactional.id": transactional_id, "transaction.timeout.ms": 20_000}
        return Producer(self._with(defaults), logger=logger)

    def _with(self, defaults: dict[str, Any]) -> dict[str, Any]:
        base = {
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": "blackbox",
            "socket.timeout.ms": 5_000,
            # A broker that comes back reports no controller, or no leader of a partition, for a
            # moment. A client that asks at that moment has none until its next metadata refresh: by
            # default five minutes later (librdkafka issue 891).
            "topic.metadata.refresh.interval.ms": 5_000,
            "reconnect.backoff.ms": 200,
            "reconnect.backoff.max.ms": 1_000,
            "log.connection.close": False,
            "log_level": 3,
        }
        return base | defaults | dict(self.settings)


def produce(
    producer: Producer,
    topic: str,
    value: bytes | None,
    key: bytes | str | None,
    partition: int = -1,
    report: Callable[[KafkaError | None, Message], None] | None = None,
    headers: Sequence[tuple[str, bytes | str | None]] | None = None,
    timestamp_ms: int = 0,
) -> None:
    """Queue a record once the client has room for it, partitioned by key unless `partition` is given.

    Raises KafkaException when the client refuses it at once.
    """
    while True:
        try:
            producer.produce(topic, value, key, partition, report, None, timestamp_ms, headers)  # type: ignore[arg-type]
            return
        except BufferError:  # the queue is full: delivery reports make room
            producer.poll(POLL_S)


def outcome(asked: Future[Answer], within_s: float = 2 * REQUEST_TIMEOUT_S) -> Answer:
    """The result of an admin request. Raises KafkaException, also on a timeout."""
    try:
        error = asked.exception(within_s)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
    if error is not None:
        # The traceback of the future's own exception refers to frames that hold future and client:
        # a cycle that keeps the client's sockets open until the garbage collector runs.
        raise KafkaException(*error.args) from None
    return asked.result()


def journal_error(error: KafkaException, what: str, needs: str = "") -> RecoveryRequired:
    """The RecoveryRequired for a failed Kafka call; `what` says what was tried.

    `needs` is the ACL right that the call needs, such as `Read on topic TB`.
    """
    cause = error.args[0] if error.args else None
    if not isinstance(cause, KafkaError):
        return JournalLost(f"{what}: {error}")
    text = f"{what}: {explained(cause, needs)}"
    if cause.code() in _FENCING:
        return Fenced(text)
    return NotAllowed(text) if is_not_allowed(cause) else JournalLost(text)


def explained(error: KafkaError, needs: str) -> str:
    """Kafka's error text; if an ACL is missing, with the right to grant."""
    return f"{error.str()}; grant {needs}" if needs and is_not_allowed(error) else error.str()


def read_right(error: KafkaError, topic: str, group: str) -> str:
    """The right that a reader outside the group lacks, according to Kafka's error."""
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return f"Describe on group {group}"
    return f"Read on topic {topic}"


def is_not_allowed(error: KafkaError) -> bool:
    """Whether an ACL is missing."""
    return error.code() in _NOT_ALLOWED


_NOT_ALLOWED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)


_FENCING = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.PRODUCER_FENCED,
    KafkaError.FENCED_INSTANCE_ID,
)
