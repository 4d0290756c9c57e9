"""The upkeep of a ledger: it decides which files are compacted and which are removed."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from blackbox.jobs.ledger import manifest as manifests
from blackbox.jobs.ledger.files import Files, FoundFile
from blackbox.jobs.ledger.manifest import LedgerFile, Manifest, Replaced
from blackbox.jobs.ledger.table_files import POSITION, day_of
from blackbox.spark.journals import SHARD, TABLES


@dataclass(frozen=True, slots=True)
class UpkeepLimits:
    """How much work is done at once, and how long replaced files are kept."""

    # Offsets per step: at most this much work is lost when the run is killed.
    step: int
    small_bytes: int = 32 << 20
    # A day with at least this many small files is compacted.
    compact_from_files: int = 8
    file_bytes: int = 128 << 20
    # No further day is compacted after this many bytes, per run and table.
    compacted_bytes: int = 1 << 30
    manifests: int = 5
    # Replaced files stay this long, for readers that opened the ledger before.
    keep_replaced_s: int = 86_400


def worth_compacting(
    held: Iterable[LedgerFile], limits: UpkeepLimits
) -> Iterator[list[LedgerFile]]:
    """Groups of small files of days that have many: one group per large day, one for all other days."""
    days: dict[str, list[LedgerFile]] = defaultdict(list)
    for file in held:
        if file.bytes < limits.small_bytes:
            days[file.day].append(file)
    room = limits.compacted_bytes
    gathered: list[LedgerFile] = []
    for small in sorted(days.values(), key=len, reverse=True):
        if len(small) < limits.compact_from_files or room <= 0:
            break
        size = sum(file.bytes for file in small)
        room -= size
        if size > limits.file_bytes:
            yield small
        else:
            gathered += small
    if gathered:
        yield gathered


def repartitioned(
    table: str, frame: DataFrame, chosen: Sequence[LedgerFile], limits: UpkeepLimits
) -> DataFrame:
    """The same rows, sorted and partitioned: one file per day, or a few for one large day."""
    days = {file.day for file in chosen}
    place = [*SHARD, POSITION[table][0]]
    if len(days) > 1:
        parts = min(len(days), frame.sparkSession.sparkContext.defaultParallelism)
        day = day_of(POSITION[table][1])
        return frame.repartition(parts, day).sortWithinPartitions(day, *place)
    parts = -(-sum(file.bytes for file in chosen) // limits.file_bytes)
    return frame.repartitionByRange(parts, *place).sortWithinPartitions(*place)


def still_read(
    replaced: Iterable[Replaced], oldest: int, limits: UpkeepLimits
) -> Iterator[Replaced]:
    """The replaced files that a kept manifest names, or that a recent reader may still have open."""
    since_ms = time.time_ns() // 1_000_000 - limits.keep_replaced_s * 1000
    return (file for file in replaced if file.by > oldest or file.at_ms > since_ms)


def clean(files: Files, manifest: Manifest, limits: UpkeepLimits) -> None:
    """Remove old manifests, and files that no manifest names and none ever will."""
    numbers = manifests.published(files)
    if not numbers or numbers[-1] != manifest.number:
        # Another run has published since: its files are not known here.
        return
    for number in numbers[: -limits.manifests]:
        files.delete(manifests.path_of(number))
    oldest = numbers[-limits.manifests :][0]
    named = {file.path for file in manifest.files}
    named |= {file.path for file in still_read(manifest.replaced, oldest, limits)}
    for folder in (*TABLES, manifests.FOLDER):
        for found in files.listed(folder):
            # A folder has the number of the manifest that will name its files, and each number is
            # published once: only later ones may be of a run that is still writing.
            if _number(found.path) <= manifest.number:
                _remove_unnamed(files, found, named)


def _remove_unnamed(files: Files, left: FoundFile, named: set[str]) -> None:
    is_temporary = left.path.startswith(f"{manifests.FOLDER}/.")
    if left.is_folder and any(one.startswith(f"{left.path}/") for one in named):
        for found in files.walk(left.path):
            if found.path not in named:
                files.delete(found.path)
    elif left.is_folder or is_temporary:
        files.delete(left.path)


def _number(path: str) -> float:
    """The number of the manifest that a folder or temporary file was written for; inf if it has none."""
    stem = path.partition("/")[2].lstrip(".").replace(".", "-").partition("-")[0]
    return int(stem) if stem.isdecimal() else math.inf
