"""A ledger continues only with the topics that it was made from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from blackbox.jobs.ledger import manifest as manifests
from blackbox.jobs.ledger import mismatches as compared
from blackbox.jobs.ledger.manifest import Covered, Last, Manifest
from blackbox.jobs.ledger.mismatches import mismatches
from blackbox.journal.ranges import Chunk, Range
from blackbox.records.request import Shard
from blackbox.spark.journals import JournalKey, Reach, Span

THEN_MS, LATER_MS = 1_700_000_000_000, 1_800_000_000_000
TB = JournalKey("requests", Shard("TB", 0))
RECEIPTS = JournalKey("outcomes", Shard("TB", 0))
KEPT = Manifest(
    5,
    THEN_MS,
    {TB: Covered(0, 1000, (), Last(999, THEN_MS)), RECEIPTS: Covered(0, 0)},
    topic_ids={"TB": "id-1", "TB.receipts": "id-2"},
)
SAME = {"TB": "id-1", "TB.receipts": "id-2"}
IN_KAFKA = {TB: Span(0, 5000), RECEIPTS: Span(0, 3)}


def found(
    kept: Manifest, ids: dict[str, str], in_kafka: Reach, monkeypatch: pytest.MonkeyPatch, *ms: int
) -> list[str]:
    """What does not match, if the topic has a record of each of these times at the ledger's last offset."""
    messages: Any = [SimpleNamespace(timestamp=lambda at_ms=at_ms: (2, at_ms)) for at_ms in ms]

    def read(access: object, ranges: list[Range]) -> list[Chunk]:
        return [Chunk(ranges[0], 999, 1000, messages)]

    monkeypatch.setattr(compared, "read_ranges", read)
    return mismatches(kept, in_kafka, ids, ["TB"], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1000])
def test_a_topic_that_was_created_again_is_not_the_topic_of_the_ledger(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it has no record at the last offset in the ledger: a marker, an aborted or a trimmed record."""
    in_kafka = IN_KAFKA | {TB: Span(first, 5000)}

    assert found(KEPT, SAME | {"TB": "id-3"}, in_kafka, monkeypatch) == [
        "TB/0: the ledger holds offsets up to 999 of the topic with the id id-1, but in Kafka its id is "
        "id-3: it was deleted and created again. One ledger cannot hold both: start a new one at "
        "another path (BLACKBOX_LEDGER or --path), and keep this one for the earlier records"
    ]
    assert found(KEPT, SAME, in_kafka, monkeypatch) == []


def test_a_ledger_that_holds_nothing_of_a_topic_continues_with_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = SAME | {"TB.receipts": "id-3"}

    assert found(KEPT, ids, IN_KAFKA, monkeypatch) == []


def test_a_ledger_of_an_earlier_version_recognises_a_topic_by_its_last_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = replace(KEPT, topic_ids={})

    assert found(earlier, SAME, IN_KAFKA, monkeypatch, THEN_MS) == []
    [problem] = found(earlier, SAME, IN_KAFKA, monkeypatch, LATER_MS)
    assert problem.startswith("TB/0: the record at offset 999 was written at 2027-01-15T08:00:00")


def test_a_topic_whose_end_was_lost_and_written_again_has_the_same_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [problem] = found(KEPT, SAME, IN_KAFKA, monkeypatch, LATER_MS)

    assert problem.startswith("TB/0: the record at offset 999 was written at 2027-01-15T08:00:00")


class Stored:
    """The files of a ledger, in memory."""

    root = "ledger"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def publish(self, path: str, content: bytes) -> bool:
        return self.held.setdefault(path, content) is content

    def read(self, path: str) -> bytes:
        return self.held[path]

    def listed(self, folder: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(path=path) for path in self.held]

    def uri(self, path: str) -> str:
        return path


def test_a_manifest_keeps_the_topic_ids_and_is_read_without_them() -> None:
    files: Any = Stored()
    manifests.publish(files, KEPT)
    assert manifests.newest(files) == KEPT

    # As an earlier version writes it.
    body = manifests._body(KEPT) | {"number": 6}
    del body["topic_ids"]
    content = orjson.dumps(body | {"sha256": manifests._digest(body)}, default=list)
    files.publish(manifests.path_of(6), content)
    assert manifests.newest(files) == replace(KEPT, number=6, topic_ids={})
