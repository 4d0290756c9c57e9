"""Whether target topics can take messages, asked before producing so that one of them spoils no batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from threading import Lock

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, TopicMetadata

from blackbox.journal.access import REQUEST_TIMEOUT_S, doubt
from blackbox.request import Reason

KNOWN_FOR_S = 10.0
UNAVAILABLE_FOR_S = 0.5
ONE_BY_ONE = 8
MOST_KNOWN = 10_000

Refusal = tuple[str, str]


class Targets:
    """The brokers' metadata of target topics, remembered for a few seconds. Safe from any thread."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._lock = Lock()
        self._known: dict[str, tuple[float, Refusal | None]] = {}

    def unavailable(self, topics: Iterable[str]) -> dict[str, Refusal]:
        """Those of the topics that cannot take messages now, with (reason word, detail).

        Raises JournalLost when the brokers do not answer.
        """
        wanted = set(topics)
        with self._lock:
            now = time.monotonic()
            stale = [t for t in wanted if t not in self._known or self._known[t][0] < now]
            if stale:
                self._refresh(stale, now)
            found = {topic: self._known[topic][1] for topic in wanted}
        return {topic: refusal for topic, refusal in found.items() if refusal is not None}

    def _refresh(self, topics: list[str], now: float) -> None:
        described: dict[str, TopicMetadata] = {}
        try:
            if len(topics) > ONE_BY_ONE:
                described = self._admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
            else:
                for topic in topics:
                    described |= self._admin.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics
        except KafkaException as error:
            raise doubt(error, "cannot ask for the metadata of target topics") from None
        if len(self._known) > MOST_KNOWN:
            self._known = {t: known for t, known in self._known.items() if known[0] >= now}
        for topic in topics:
            refusal = _refusal(topic, described.get(topic))
            lasts_s = KNOWN_FOR_S if refusal is None else UNAVAILABLE_FOR_S
            self._known[topic] = now + lasts_s, refusal


def _refusal(topic: str, described: TopicMetadata | None) -> Refusal | None:
    error = described.error if described is not None else None
    if described is not None and error is None and described.partitions:
        leaderless = [n for n, partition in described.partitions.items() if partition.leader < 0]
        if leaderless:
            return Reason.UNREACHABLE, f"partition {leaderless[0]} of {topic!r} has no leader"
        return None
    if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return Reason.NOT_AUTHORIZED, f"no permission on {topic!r}; grant Describe and Write on it"
    if error is None or error.code() in (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
    ):
        return Reason.UNKNOWN_TOPIC, f"the topic {topic!r} does not exist; create it"
    return Reason.UNREACHABLE, f"the topic {topic!r} is not available: {error.str()}"
