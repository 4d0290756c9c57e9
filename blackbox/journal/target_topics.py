"""Checks before producing whether target topics can take messages, so that one does not fail a whole batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Generic, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, TopicDescription

from blackbox.journal.kafka_access import KafkaAccess, is_not_allowed, journal_error, outcome
from blackbox.journal.topics import MISSING, Topics, TopicSettings
from blackbox.records.errors import JournalLost
from blackbox.records.outgoing import Refusal
from blackbox.records.request import Reason
from blackbox.records.topic_limits import NO_LIMITS, Limits

logger = logging.getLogger("blackbox.journal")

KNOWN_FOR_S = 10.0
UNAVAILABLE_FOR_S = 0.5
LIMITS_KNOWN_FOR_S = 60.0
CROWDED_FOR_S = 600.0  # a topic that refused several records at once gets them one by one
STILL_GOOD_S = 10.0  # an expired answer without a refusal or limit, while it is refreshed
SILENT_FOR_S = 2.0
# Timeout and attempts. The broker that is asked may hang; a new client likely asks another.
ASKED_S, ASKS = 2.0, 3
MOST_KNOWN = 10_000
# Of the 22 characters of a topic id, in every receipt: enough to distinguish two topics of a name.
ID_LENGTH = 8
NEEDED = (AclOperation.READ, AclOperation.WRITE)


class TargetTopics:
    """The brokers' metadata of target topics, cached for a few seconds. Thread-safe."""

    def __init__(self, access: KafkaAccess) -> None:
        self._access = access
        self._open()
        self._largest = access.largest_message_bytes
        self._compresses = any(
            access.settings.get(name, "none") != "none"
            for name in ("compression.type", "compression.codec")
        )
        self._ids: dict[str, str] = {}
        self._crowded: dict[str, float] = {}
        self._refusals = AnswerCache(self._ask_availability)
        self._limits = AnswerCache(self._ask_limits)

    def unavailable(self, topics: Iterable[str], *, refresh: bool = False) -> dict[str, Refusal]:
        """The topics that cannot take messages now, with (reason word, detail).

        Uses cached answers, unless `refresh`. Raises JournalLost when the brokers do not answer.
        """
        if refresh:
            self._refusals.refresh(topics)
        return self._refusals.get(topics)

    def limits(self, topics: Collection[str]) -> dict[str, Limits]:
        """The limits of those topics that are stricter than this client.

        Without topics whose configuration the brokers do not return (DescribeConfigs): their limits
        are found when they refuse a record.
        """
        found = self._limits.get(topics)
        now = time.monotonic()
        for topic in topics:
            if self._crowded.get(topic, now) > now:
                found[topic] = found.get(topic, NO_LIMITS)._replace(one_by_one=True)
        return found

    def send_one_by_one(self, topics: Iterable[str]) -> None:
        """Note that these topics refused a batch: their limits are unknown, or have just changed."""
        until_s = time.monotonic() + CROWDED_FOR_S
        self._crowded |= dict.fromkeys(topics, until_s)

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        """How the ids of these topics begin, as of the last `unavailable`; without topics not asked for."""
        return {topic: self._ids[topic] for topic in topics if topic in self._ids}

    def _open(self) -> None:
        self._admin = self._access.admin()
        self._topics = Topics(self._admin)

    def _ask_availability(self, topics: list[str]) -> list[tuple[str, float, Refusal | None]]:
        for left in reversed(range(ASKS)):
            try:
                return list(self._ask_once(topics))
            except JournalLost:
                self._open()  # the client may also have lost sight of all brokers
                if not left:
                    raise
        return []

    def _ask_once(self, topics: list[str]) -> Iterator[tuple[str, float, Refusal | None]]:
        admin = self._admin  # another shard may replace it, and a client that is gone never answers
        asked = admin.describe_topics(
            TopicCollection(topics), include_authorized_operations=True, request_timeout=ASKED_S
        )
        for topic in topics:
            refusal = _refusal(topic, asked[topic])
            if asked[topic].exception() is None:
                self._ids[topic] = str(asked[topic].result().topic_id)[:ID_LENGTH]
            yield topic, KNOWN_FOR_S if refusal is None else UNAVAILABLE_FOR_S, refusal

    def _ask_limits(self, topics: list[str]) -> Iterator[tuple[str, float, Limits | None]]:
        try:
            settings_by_topic = self._topics.settings(topics)
        except JournalLost as silent:
            logger.warning("cannot read the limits of target topics: %s", silent)
            self._open()
            yield from ((topic, KNOWN_FOR_S, self._limits.last(topic)) for topic in topics)
            return
        for topic in topics:
            settings = settings_by_topic.get(topic)
            found = self._limits_of(settings) if isinstance(settings, TopicSettings) else None
            yield topic, KNOWN_FOR_S if settings is None else LIMITS_KNOWN_FOR_S, found

    def _limits_of(self, settings: TopicSettings) -> Limits | None:
        needs_key = "compact" in settings.cleanup_policy
        # max.message.bytes limits the compressed batch, which the size of a message does not tell.
        is_strict = settings.max_message_bytes < self._largest and not self._compresses
        most_bytes = settings.max_message_bytes if is_strict else None
        return Limits(needs_key, most_bytes) if needs_key or is_strict else None


Known = TypeVar("Known")


class AnswerCache(Generic[Known]):
    """A cache of answers about topics, each with its own lifetime, s; None is an answer as well.

    A None that expired less than `STILL_GOOD_S` ago is still used while a background thread refreshes
    it. Thread-safe.
    """

    def __init__(
        self, ask: Callable[[list[str]], Iterable[tuple[str, float, Known | None]]]
    ) -> None:
        self._ask = ask
        self._asking = Lock()
        self._refreshing = Lock()
        self._changing = Lock()
        self._known: dict[str, tuple[float, Known | None]] = {}

    def get(self, topics: Iterable[str]) -> dict[str, Known]:
        """The answers other than None. Raises JournalLost when no broker answers about an unknown topic."""
        wanted = set(topics)
        if self._unknown(wanted):
            self._ask_and_wait(wanted)
        # In the background: a broker that does not answer must not hold up deliveries elsewhere.
        elif self._ended(wanted) and self._refreshing.acquire(blocking=False):
            self._start_refresh(wanted)
        known = self._known
        found = {topic: known[topic][1] for topic in wanted if topic in known}
        return {topic: answer for topic, answer in found.items() if answer is not None}

    def last(self, topic: str) -> Known | None:
        """The last answer, expired or not."""
        return self._known[topic][1] if topic in self._known else None

    def refresh(self, topics: Iterable[str]) -> None:
        """Ask about these topics, whatever is cached; other threads use the cache until then.

        Raises JournalLost when no broker answers; the cache is then unchanged.
        """
        self._learn(list(set(topics)))

    def _ended(self, wanted: set[str]) -> list[str]:
        """The topics whose answer is missing or has expired."""
        known, now = self._known, time.monotonic()
        return [topic for topic in wanted if topic not in known or known[topic][0] < now]

    def _unknown(self, wanted: set[str]) -> list[str]:
        """The topics that have no answer that may still be used."""
        known, now = self._known, time.monotonic()
        return [
            topic
            for topic in self._ended(wanted)
            if topic not in known
            or known[topic][1] is not None
            or known[topic][0] + STILL_GOOD_S < now
        ]

    def _ask_and_wait(self, wanted: set[str]) -> None:
        with self._asking:  # another thread may have asked about some of them by then
            ended = self._unknown(wanted)
            try:
                self._learn(ended)
            except JournalLost:
                if any(topic not in self._known for topic in ended):
                    raise
                self._postpone(ended)

    def _start_refresh(self, wanted: set[str]) -> None:
        try:
            Thread(target=self._run_refresh, args=[wanted], name="targets", daemon=True).start()
        except RuntimeError:  # no thread can be started: the next call tries again
            self._refreshing.release()

    def _run_refresh(self, wanted: set[str]) -> None:
        ended = self._ended(wanted)
        try:
            self._learn(ended)
        except JournalLost as silent:
            logger.warning(
                "%s; using the previous answer for %s", silent, ", ".join(sorted(ended)[:3])
            )
            self._postpone(ended)
        finally:
            self._refreshing.release()

    def _learn(self, topics: list[str]) -> None:
        if not topics:
            return
        now = time.monotonic()
        answers = {topic: (now + lasts_s, answer) for topic, lasts_s, answer in self._ask(topics)}
        with self._changing:
            kept = self._known
            if len(kept) > MOST_KNOWN:
                kept = {topic: known for topic, known in kept.items() if known[0] >= now}
            # A new dict: other threads read the old one without a lock.
            self._known = kept | answers

    def _postpone(self, topics: list[str]) -> None:
        """Extend the cached answers while no broker answers."""
        # A delivery to these topics finds that out; others need not wait for it.
        until_s = time.monotonic() + SILENT_FOR_S
        with self._changing:
            known = self._known
            self._known = known | {one: (until_s, known[one][1]) for one in topics if one in known}


def _refusal(topic: str, asked: Future[TopicDescription]) -> Refusal | None:
    try:
        described = outcome(asked)
    except KafkaException as failure:
        return _refusal_of_error(topic, failure)
    # A topic without these rights would fail its whole transaction, or the recovery after a crash.
    # If the brokers do not return rights, they are assumed.
    allowed = described.authorized_operations or NEEDED
    if lacking := [op.name.capitalize() for op in NEEDED if op not in allowed]:
        return _not_allowed(topic, " and ".join(lacking))
    leaderless = [one.id for one in described.partitions if one.leader is None or one.leader.id < 0]
    if leaderless:
        return Reason.UNREACHABLE, f"partition {leaderless[0]} of {topic!r} has no leader"
    return None


def _refusal_of_error(topic: str, failure: KafkaException) -> Refusal:
    error: KafkaError = failure.args[0]
    if is_not_allowed(error):
        return _not_allowed(topic, "Read and Write")
    if error.code() in MISSING:
        return Reason.UNKNOWN_TOPIC, f"the topic {topic!r} does not exist; create it"
    if error.code() < 0:
        raise journal_error(failure, "cannot read the metadata of target topics") from None
    return Reason.UNREACHABLE, f"the topic {topic!r} is not available: {error.str()}"


def _not_allowed(topic: str, operations: str) -> Refusal:
    return (
        Reason.NOT_AUTHORIZED,
        f"not allowed to use {topic!r}; grant {operations} on topic {topic}",
    )
