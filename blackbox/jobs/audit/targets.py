"""The target topics, as the audit reads them: which offsets, and the messages found there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from blackbox.config.settings import Settings
from blackbox.jobs.audit.request_statuses import SPANS
from blackbox.jobs.audit.tasks import FOUND, FoundRows
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.journal.readable_bounds import ReadableBounds
from blackbox.journal.topics import Topics, TopicSettings
from blackbox.records.errors import NotAllowed
from blackbox.spark.journals import pieces
from blackbox.spark.spark_session import numbered


def _described(names: Sequence[str], access: KafkaAccess) -> dict[str, tuple[int, bool]]:
    """The partition counts of these topics, without those that do not exist, and whether Kafka compacts them."""
    # One request for all of them: callers may invent any number of names.
    described = Topics(access.admin()).describe(names) if names else {}
    found: dict[str, tuple[int, bool]] = {}
    for name, topic in described.items():
        count, settings = topic.partitions, topic.settings
        if count is None:
            raise NotAllowed(f"cannot see the topic {name}: {settings}; grant Read on topic {name}")
        is_compacted = isinstance(settings, TopicSettings) and "compact" in settings.cleanup_policy
        found[name] = count, is_compacted
    return found


@dataclass(frozen=True, slots=True)
class TargetPartitions:
    """These partitions, up to their ends at one moment.

    `written_to` is where their logs end, with records that cannot be read yet. `unread` is a target that
    is never read.
    """

    session: SparkSession
    access: KafkaAccess
    partitions: Sequence[Range]
    written_to: Sequence[int]
    compacted: set[str]
    unread: str | None

    @classmethod
    def named(
        cls, names: Sequence[str], session: SparkSession, settings: Settings, access: KafkaAccess
    ) -> TargetPartitions:
        """The targets of these names that exist, without the history topic."""
        # Copies have the headers of the messages: in a target they would count as second deliveries.
        copies = settings.history_topic if settings.schedule_topics else None
        described = _described([name for name in names if name != copies], access)
        there = [(topic, p) for topic, (count, _) in described.items() for p in range(count)]
        with closing(ReadableBounds(access)) as ends:
            begins, lasts = ends.first(there), ends.last(there)
        # An open transaction of another producer holds the last stable offset back for any time.
        with closing(ReadableBounds(access, "read_uncommitted")) as ends:
            written = ends.last(there)
        partitions = [Range(*at, begins[at], lasts[at]) for at in there]
        compacted = {topic for topic, (_, is_compacted) in described.items() if is_compacted}
        written_to = [written[at] for at in there]
        return cls(session, access, partitions, written_to, compacted, copies)

    @property
    def topics(self) -> list[str]:
        return sorted({one.topic for one in self.partitions})

    def messages(self, request_topics: Iterable[str]) -> DataFrame:
        """The messages in them that were requested through these topics; see FOUND."""
        ranges = tuple(pieces(self.partitions))
        task = FoundRows(self.access, ranges, frozenset(request_topics))
        return numbered(self.session, len(ranges)).mapInArrow(task, FOUND)

    def spans(self) -> DataFrame:
        """The offsets that are left of them; see SPANS. Retention may have removed some while they were read."""
        there = [(one.topic, one.partition) for one in self.partitions]
        with closing(ReadableBounds(self.access)) as ends:
            begins = ends.first(there)
        rows = [
            (*at, begins[at], one.end, written_to, one.topic in self.compacted)
            for at, one, written_to in zip(there, self.partitions, self.written_to, strict=True)
        ]
        return self.session.createDataFrame(rows, SPANS)
