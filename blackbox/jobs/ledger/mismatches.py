"""Check that a ledger was made from the journals that are in Kafka now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime

from blackbox.jobs.ledger.manifest import Covered, Manifest
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.receipt_parsing import read_receipts
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.spark.journals import JournalKey, Reach, Span

_START_ANOTHER = (
    "One ledger cannot hold both: start a new one at another path (BLACKBOX_LEDGER or --path), and "
    "keep this one for the earlier records"
)


def ids_in_kafka(topics: Collection[str], access: KafkaAccess) -> dict[str, str]:
    """The ids of these request topics and of their receipts topics, without those that do not exist."""
    return Topics(access.admin()).ids([*topics, *map(receipts_topic, topics)])


def mismatches(
    manifest: Manifest,
    in_kafka: Reach,
    ids: Mapping[str, str],
    topics: Collection[str],
    access: KafkaAccess,
) -> list[str]:
    """Why the ledger does not match these topics, e.g. a topic was deleted and created again.

    `ids` is what `ids_in_kafka` returned.
    """
    return (
        list(_beyond(manifest, in_kafka, topics))
        or list(_other_topics(manifest, ids))
        or list(_different_records(manifest, in_kafka, access))
    )


def _beyond(manifest: Manifest, in_kafka: Reach, topics: Collection[str]) -> Iterator[str]:
    for journal, covered in manifest.journals.items():
        span = in_kafka.get(journal)
        if span is None and journal.shard.topic in topics:
            yield (
                f"{journal}: the ledger holds offsets up to {covered.end - 1}, but Kafka has no "
                f"such partition: the topic was deleted. {_START_ANOTHER}"
            )
        elif span is not None and span.end < covered.end:
            yield (
                f"{journal}: the ledger holds offsets up to {covered.end - 1}, but in Kafka it "
                f"ends at {span.end - 1}: it was truncated, or deleted and created again. {_START_ANOTHER}"
            )


def _other_topics(manifest: Manifest, ids: Mapping[str, str]) -> Iterator[str]:
    for journal, covered in manifest.journals.items():
        then, now = manifest.topic_ids.get(journal.topic), ids.get(journal.topic)
        # A ledger that holds no offset of a topic yet can begin with another one.
        if covered.end and then and now and then != now:
            yield (
                f"{journal}: the ledger holds offsets up to {covered.end - 1} of the topic with the "
                f"id {then}, but in Kafka its id is {now}: it was deleted and created again. "
                f"{_START_ANOTHER}"
            )


def _different_records(manifest: Manifest, in_kafka: Reach, access: KafkaAccess) -> Iterator[str]:
    """Journals whose last record in the ledger is a different record in Kafka now.

    So the end of a topic was lost and written again, or its id is not in the manifest, of an earlier version.
    """
    for journal, covered in manifest.journals.items():
        last, span = covered.last, in_kafka.get(journal)
        # Trimmed since: nothing is left to be compared.
        if last is None or span is None or span.start > last.offset:
            continue
        there_ms = _written_ms(access, journal, last.offset)
        if there_ms is not None and there_ms != last.at_ms:
            yield (
                f"{journal}: the record at offset {last.offset} was written at {_time(there_ms)}, "
                f"but the ledger has one written at {_time(last.at_ms)}: the topic was deleted and "
                f"created again. {_START_ANOTHER}"
            )


def gap(journal: JournalKey, covered: Covered, span: Span) -> str:
    """Why a ledger with this gap before the journal's first offset in Kafka needs --accept-gap."""
    return (
        f"{journal}: offsets {covered.end} to {span.start - 1} are neither in the ledger nor in "
        "Kafka, whose retention removed them before a run read them. Run more often, or raise "
        f"retention.ms of {journal.topic}; `blackbox ledger --accept-gap` continues at "
        f"{span.start} and records the gap"
    )


def _written_ms(access: KafkaAccess, journal: JournalKey, offset: int) -> int | None:
    wanted = Range(journal.topic, journal.shard.partition, offset, offset + 1)
    for chunk in read_ranges(access, [wanted]):
        if journal.table == "requests":
            return next((int(message.timestamp()[1]) for message in chunk.messages), None)
        return next((receipt.at_ms for _, receipt in read_receipts(chunk.messages)), None)
    return None


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError):  # a record's own timestamp may be anything
        return f"{ms} ms"
