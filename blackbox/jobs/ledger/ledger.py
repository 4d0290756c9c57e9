"""The ledger: both journals as Parquet tables, further back than Kafka keeps them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit

from blackbox.jobs.ledger import manifest as manifests
from blackbox.jobs.ledger.files import Files, FoundFile
from blackbox.jobs.ledger.manifest import LedgerFile, Manifest
from blackbox.jobs.ledger.mismatches import ids_in_kafka, mismatches
from blackbox.jobs.ledger.table_files import Measured, measure, rows
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard
from blackbox.spark.job_failures import LedgerError, cause_in
from blackbox.spark.journals import PLACE, TABLES, JournalKey, Reach, Span

# A request may have several outcomes: delivered, declared void, delivered again.
UNIQUE = {"requests": PLACE, "outcomes": [*PLACE, "receipt", "outcome"]}

MOST_CAUSES = 50

_OURS = re.compile(r"(?:blackbox\.[a-z_.]+\.|^)(?:JournalLost|ValueError): (.+)")


@dataclass(frozen=True, slots=True)
class LedgerVerdict:
    """The result of reading every row: one text per problem; no `problems` means the ledger is intact.

    `leftovers` counts files of a killed run, which no manifest names; a later run removes them.
    """

    files: int
    rows: int
    problems: list[str] = field(default_factory=list)
    leftovers: int = 0


@contextmanager
def spark_errors_explained() -> Iterator[None]:
    """Turn Spark's errors into a LedgerError of one line."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        text = f"{error}\n{_causes(error)}"
        ours = [match[1] for line in text.splitlines() if (match := _OURS.search(line.strip()))]
        raise LedgerError(ours[0] if ours else cause_in(text)[:500]) from None


def _causes(error: Exception) -> str:
    """The messages of the error's causes in Java, which Spark's own text may leave out."""
    causes: list[str] = []
    java = (
        error.java_exception
        if isinstance(error, Py4JJavaError)
        else getattr(error, "_origin", None)
    )
    left = [] if java is None else [java]
    while left and len(causes) < MOST_CAUSES:
        cause = left.pop()
        causes.append(str(cause.toString()))
        # When several stages fail at once, most causes are suppressed exceptions.
        left += [one for one in (*cause.getSuppressed(), cause.getCause()) if one is not None]
    return "\n".join(causes)


@dataclass(eq=False, repr=False)
class Ledger:
    """The ledger as its newest manifest describes it; additions by later runs are not seen.

    Its files stay readable for a day after a later run has replaced them.
    """

    session: SparkSession
    files: Files
    manifest: Manifest

    def __post_init__(self) -> None:
        self.reach = self.manifest.reach

    @classmethod
    @spark_errors_explained()
    def open(cls, session: SparkSession, path: str) -> Ledger:
        """Open a ledger. Raises LedgerError when there is none, it is damaged, or its format is unknown."""
        ledger = cls._newest(session, path)
        problems = _absent(ledger.files, ledger.manifest.files, ledger._there())
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise LedgerError(f"{problems[0]}{more}; restore it from a copy, see docs/ledger.md")
        return ledger

    @classmethod
    def _newest(cls, session: SparkSession, path: str) -> Ledger:
        files = Files(session, path)
        manifest = manifests.newest(files)
        if not manifest.number:
            raise LedgerError(
                f"{files.root} does not contain a ledger; `blackbox ledger` creates one"
            )
        return cls(session, files, manifest)

    @property
    def gaps(self) -> dict[JournalKey, tuple[Span, ...]]:
        """Offsets within the reach that Kafka had removed before they were read."""
        journals = self.manifest.journals
        return {journal: held.gaps for journal, held in journals.items() if held.gaps}

    def check(self, there: Reach, topics: Collection[str], access: KafkaAccess) -> None:
        """Raise LedgerError unless the journals in Kafka are those that this ledger keeps."""
        ids = ids_in_kafka(topics, access)
        if problems := mismatches(self.manifest, there, ids, topics, access):
            raise LedgerError("\n".join(problems))

    def requests(self) -> DataFrame:
        """Columns of RECORDS."""
        return self._table("requests")

    def outcomes(self) -> DataFrame:
        """Columns of OUTCOMES."""
        return self._table("outcomes")

    def _table(self, table: str) -> DataFrame:
        return rows(self.session, self.files, table, [f.path for f in self.manifest.of(table)])

    def _there(self) -> dict[str, FoundFile]:
        return {found.path: found for table in TABLES for found in self.files.walk(table)}

    @classmethod
    @spark_errors_explained()
    def verify(cls, session: SparkSession, path: str) -> LedgerVerdict:
        """Read every row and compare it with the manifest; changes nothing.

        Raises LedgerError as `open` does, except for missing or changed files: those become problems.
        """
        return cls._newest(session, path)._verified()

    def _verified(self) -> LedgerVerdict:
        named = self.manifest.files
        there = self._there()
        problems = _absent(self.files, named, there)
        problems += [
            f"{self.files.uri(path)} is listed {times} times in the manifest"
            for path, times in Counter(file.path for file in named).items()
            if times > 1
        ]
        whole = [f for f in named if f.path in there and there[f.path].bytes == f.bytes]
        seen = 0
        for table in TABLES:
            listed = [file for file in whole if file.table == table]
            measured = self._read_through(table, [file.path for file in listed])
            intact = [f for f in listed if _is_as_written(f, measured.get(f.path))]
            seen += sum(file.rows for file in intact)
            problems += [
                f"{self.files.uri(file.path)} was changed: its rows are not those that were written"
                for file in listed
                if file not in intact
            ]
            problems += self._duplicates(table, [file.path for file in intact])
            problems += self._beyond(table, [measured[file.path] for file in intact])
        kept = {file.path for file in named} | {file.path for file in self.manifest.replaced}
        unnamed = [found for path, found in there.items() if path not in kept]
        copies = list(self._copies(unnamed, named))
        return LedgerVerdict(len(named), seen, problems + copies, len(unnamed) - len(copies))

    def _read_through(self, table: str, paths: Sequence[str]) -> dict[str, Measured]:
        """Measure each file; files that cannot be read are left out of the result."""
        if not paths:
            return {}
        try:
            return measure(self.session, self.files, table, paths)
        except (PySparkException, Py4JError):
            if len(paths) == 1:
                return {}
        # Spark fails as a whole if one file is unreadable: halve the list until that file is alone.
        half = len(paths) // 2
        return self._read_through(table, paths[:half]) | self._read_through(table, paths[half:])

    def _duplicates(self, table: str, paths: Sequence[str]) -> Iterator[str]:
        unique = UNIQUE[table]
        again = rows(self.session, self.files, table, paths).groupBy(unique).count()
        doubled = again.where(col("count") > lit(1))
        number = doubled.count()
        if number:
            [one] = doubled.orderBy(unique).limit(1).collect()
            place = Shard(one["topic"], one["partition"]).source(one["offset"])
            yield f"{self.files.uri(table)}: {number} rows are duplicated, the first of {place}"

    def _beyond(self, table: str, measured: Iterable[Measured]) -> Iterator[str]:
        for shard, (first, last) in _merged(measured).items():
            span = self.reach.get(JournalKey(table, shard))
            if span is None or first < span.start or last >= span.end:
                yield (
                    f"{self.files.uri(table)}: the rows of {shard} from {first} to {last} are not "
                    "covered by the manifest"
                )

    def _copies(self, unnamed: Sequence[FoundFile], named: Sequence[LedgerFile]) -> Iterator[str]:
        """Report unnamed files that are copies of a named file."""
        # Only beside named files: those of a killed run are in a folder of their own.
        folders = {_folder(file.path) for file in named}
        beside = [found for found in unnamed if _folder(found.path) in folders]
        for found in beside:
            for file in named:
                if found.bytes != file.bytes or found.path.count("/") != file.path.count("/"):
                    continue
                if _is_as_written(
                    file, self._read_through(file.table, [found.path]).get(found.path)
                ):
                    original = file.path.rpartition("/")[2]
                    yield (
                        f"{self.files.uri(found.path)} is a copy of {original}, so other readers "
                        "of the folder see its rows twice; the ledger ignores it; delete it"
                    )
                    break


def _is_as_written(file: LedgerFile, measured: Measured | None) -> bool:
    return measured is not None and (measured.rows, measured.checksum) == (file.rows, file.checksum)


def _folder(path: str) -> str:
    """The folder of the run that wrote a file."""
    return "/".join(path.split("/")[:2])


def _absent(files: Files, named: Iterable[LedgerFile], there: Mapping[str, FoundFile]) -> list[str]:
    problems = []
    for file in named:
        found = there.get(file.path)
        if found is None:
            problems.append(f"{files.uri(file.path)} is missing")
        elif found.bytes != file.bytes:
            problems.append(
                f"{files.uri(file.path)} was changed: it has {found.bytes} bytes, not {file.bytes}"
            )
    return problems


def _merged(measured: Iterable[Measured]) -> dict[Shard, tuple[int, int]]:
    spans: dict[Shard, tuple[int, int]] = {}
    for one in measured:
        for shard, first in one.first.items():
            last = one.last[shard].offset
            low, high = spans.get(shard, (first, last))
            spans[shard] = min(low, first), max(high, last)
    return spans
