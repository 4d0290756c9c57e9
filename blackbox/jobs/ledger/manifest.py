"""The manifest of a ledger: its files, and the offsets that they cover."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from blackbox.jobs.ledger.files import Files
from blackbox.records.request import Shard
from blackbox.spark.job_failures import LedgerError
from blackbox.spark.journals import JournalKey, Reach, Span

FORMAT = 1
FOLDER = "manifest"


class Last(NamedTuple):
    """The last record kept of a journal, by which the journal is recognised."""

    offset: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Covered:
    """The offsets of a journal that the ledger holds, without `gaps`, which Kafka removed before they were read."""

    start: int
    end: int
    gaps: tuple[Span, ...] = ()
    last: Last | None = None

    def beyond_gap(self, start: int) -> Covered:
        """Continue at `start`; the offsets before it become a gap."""
        return replace(self, end=start, gaps=(*self.gaps, Span(self.end, start)))


class LedgerFile(NamedTuple):
    """A file of a table: rows whose `checksum` is the XOR of a 64-bit hash of each, in hex."""

    table: str
    path: str
    day: str
    rows: int
    bytes: int
    checksum: str


class Replaced(NamedTuple):
    """A file that manifests from number `by` on no longer name; readers of earlier ones may still read it."""

    path: str
    by: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published state of a ledger. Number 0 is the ledger that does not exist yet.

    `topic_ids` has Kafka's ids of the topics of both journals; those of earlier versions are unknown.
    """

    number: int = 0
    written_ms: int = 0
    journals: Mapping[JournalKey, Covered] = field(default_factory=dict)
    files: tuple[LedgerFile, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def reach(self) -> Reach:
        return {
            journal: Span(covered.start, covered.end) for journal, covered in self.journals.items()
        }

    def of(self, table: str) -> list[LedgerFile]:
        return [file for file in self.files if file.table == table]


def path_of(number: int) -> str:
    # Names sort like numbers: other readers take the greatest name (docs/ledger.md).
    return f"{FOLDER}/{number:020d}.json"


def published(files: Files) -> list[int]:
    """The numbers of all manifests, in order."""
    names = (found.path.rpartition("/")[2] for found in files.listed(FOLDER))
    parts = (name.partition(".") for name in names)
    return sorted(int(n) for n, _, suffix in parts if suffix == "json" and n.isdecimal())


def read(files: Files, number: int) -> Manifest:
    """Read a manifest. Raises LedgerError when it is damaged or has another format."""
    path = path_of(number)
    try:
        found = orjson.loads(files.read(path))
        version = found["format"]
        if version != FORMAT:
            raise LedgerError(
                f"{files.uri(path)} has the format {version!r}, but this version of blackbox reads "
                f"{FORMAT}; use the version that wrote it, or a newer one"
            )
        if found.pop("sha256") != _digest(found):
            raise ValueError
        return _parsed(found)
    except (ValueError, KeyError, TypeError):
        raise LedgerError(
            f"{files.uri(path)} is damaged: restore it from a copy, or delete it to return to the "
            "previous manifest; the next run then reads the missing records from Kafka again"
        ) from None


def newest(files: Files) -> Manifest:
    """The newest manifest; number 0 when there is no ledger yet."""
    numbers = published(files)
    return read(files, numbers[-1]) if numbers else Manifest()


def publish(files: Files, manifest: Manifest) -> None:
    """Publish a manifest as the newest one. Raises LedgerError when another run was faster."""
    body = _body(manifest)
    content = orjson.dumps(body | {"sha256": _digest(body)}, default=list)  # spans are tuples
    is_new = files.publish(path_of(manifest.number), content)
    # A later number can only be another run's, whose manifest does not have these files.
    if not is_new or published(files)[-1] != manifest.number:
        raise published_by_another_run(files, manifest.number)


def published_by_another_run(files: Files, number: int) -> LedgerError:
    return LedgerError(
        f"another run published manifest {number} of {files.root} at the same time; this step was "
        "discarded, and nothing is lost; run one at a time"
    )


def _body(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "number": manifest.number,
        "written_ms": manifest.written_ms,
        "journals": [
            {"table": journal.table, **journal.shard._asdict(), **asdict(covered)}
            for journal, covered in sorted(manifest.journals.items(), key=itemgetter(0))
        ],
        "files": [file._asdict() for file in manifest.files],
        "replaced": [file._asdict() for file in manifest.replaced],
        "topic_ids": dict(manifest.topic_ids),
    }


def _parsed(found: Mapping[str, Any]) -> Manifest:
    return Manifest(
        found["number"],
        found["written_ms"],
        dict(map(_journal, found["journals"])),
        tuple(LedgerFile(**one) for one in found["files"]),
        tuple(Replaced(**one) for one in found["replaced"]),
        found.get("topic_ids", {}),  # manifests of earlier versions have none
    )


def _journal(one: Mapping[str, Any]) -> tuple[JournalKey, Covered]:
    last = one["last"]
    covered = Covered(
        one["start"],
        one["end"],
        tuple(Span(*gap) for gap in one["gaps"]),
        None if last is None else Last(*last),
    )
    return JournalKey(one["table"], Shard(one["topic"], one["partition"])), covered


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(body, default=list, option=orjson.OPT_SORT_KEYS)).hexdigest()


def total(rows: Iterable[LedgerFile]) -> tuple[int, int]:
    count, mixed = 0, 0
    for file in rows:
        count += file.rows
        mixed ^= int(file.checksum, 16)
    return count, mixed
