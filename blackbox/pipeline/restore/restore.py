"""A lost Redis filled again from the journals, many tasks at once; nothing else may run meanwhile."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pyspark.sql import SparkSession

from blackbox.clock import Clock
from blackbox.connect import own_topics
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.restoring import NotEmpty, Restoring
from blackbox.index.server import RedisServer
from blackbox.journal.access import KafkaAccess
from blackbox.journal.members import count_members
from blackbox.journal.ranges import Range
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.journal.writer import Writer
from blackbox.pipeline.journals import Journals, Kept, Reach
from blackbox.pipeline.restore.ended import Bits, ended, last_of, starts
from blackbox.pipeline.restore.fill import Filling, summed
from blackbox.pipeline.restore.tasks import RestoreFailed, Tasks
from blackbox.pipeline.tasks.restore import COLD_TIER, FILLED, Done, Finish, Moment
from blackbox.plan import Labels
from blackbox.recovery import commit_barrier
from blackbox.request import Shard
from blackbox.settings import Settings

__all__ = ["Report", "Restore", "RestoreFailed", "RestoreRefused", "Restored"]

OPENED_AT_ONCE = 8


class RestoreRefused(Exception):
    """A restore would do harm, or nothing; the text says what to do first."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of a shard. `seconds` is the time of its tasks, several of which run at once.

    `checked`: Redis was read back, holds what the journals gave, and the index is finished. Else
    `problem` says why not; a dry run has neither.
    """

    shard: Shard
    scanned: int
    pending: int
    seconds: float
    checked: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a restore did. `notes` name offsets that are unknown, and what a dry run found in the way."""

    shards: Sequence[Restored]
    took_s: float
    notes: Sequence[str]

    @property
    def scanned(self) -> int:
        return sum(one.scanned for one in self.shards)

    @property
    def pending(self) -> int:
        return sum(one.pending for one in self.shards)


class Restore:
    """Fills the indexes of all shards from the journals, `kept` ones (the ledger) and Kafka's.

    `run` raises RestoreRefused before anything was changed, RestoreFailed or a Doubt when it
    cannot go on. It may be interrupted anywhere and run again: without its last step, an index is
    empty for every service, which then begins it anew.
    """

    def __init__(
        self,
        session: SparkSession,
        settings: Settings,
        access: KafkaAccess,
        kept: Kept | None = None,
    ) -> None:
        self._session = session
        self._tasks = Tasks(session)
        self._settings = settings
        self._access = access
        self._kept = kept
        self._url = settings.redis_url.get_secret_value()
        self._clock = Clock()

    def run(self, *, replace: bool = False) -> Report:
        """Restore every shard.

        1. refuse while the service runs, and for indexes that are not empty, unless `replace`;
        2. become the owner of each shard, as recovery does: fence, look at the doubtful tail of the
           receipts, commit a barrier; the labels are the barrier and the end of the requests then;
        3. find the requests that have ended: bitmaps of what receipts settle;
        4. empty each index, and mark it as this run's;
        5. put what is pending into it, in portions that want the mark;
        6. read it back: as many entries with the same checksum; only then the labels.
        """
        began = time.monotonic()
        if reasons := self._reasons_against(replace):  # 1
            raise RestoreRefused("\n".join(reasons))
        self._observe()
        shards = self._shards()
        own_topics(self._settings, self._access).ensure()  # new partitions need receipts
        run = uuid.uuid4().hex
        with self._owned(shards) as barriers:  # 2
            journals = self._journals()
            labels = {
                shard: Labels(journals.in_kafka.requests[shard].end, label)
                for shard, label in barriers.items()
            }
            ended = self._ended(journals, labels)  # 3
            _check_ahead(ended, labels)
            self._begin(run, journals.reach, labels, replace)  # 4
            parts = self._fill(journals, labels, ended, run)  # 5
            restored = self._finish(run, labels, parts)  # 6
        return Report(restored, time.monotonic() - began, _unknown(journals))

    def dry_run(self) -> Report:
        """What `run` would put into the indexes now; changes nothing, and may run beside a service.

        The last receipts are believed, and nothing is checked.
        """
        began = time.monotonic()
        self._observe()
        shards = self._shards()
        journals = self._journals()
        labels = {
            shard: Labels(journals.in_kafka.requests[shard].end, journals.in_kafka.receipts[shard].end)
            for shard in shards
        }  # fmt: skip
        parts = self._fill(journals, labels, self._ended(journals, labels), None)
        against = [f"would be refused: {reason}" for reason in self._reasons_against(False)]
        found = [_restored(part) for part in parts]
        return Report(found, time.monotonic() - began, [*against, *_unknown(journals)])

    def _reasons_against(self, replace: bool) -> list[str]:
        group = self._settings.group_id
        members = count_members(self._access, [group, f"{group}.intake"])
        reasons = [
            f"the service runs: the group {name} has {count} members; stop the service first "
            "(one that was killed is a member for some seconds more)"
            for name, count in members.items()
            if count
        ]
        if self._settings.hot_horizon_s:
            reasons.append(f"BLACKBOX_HOT_HORIZON_S={self._settings.hot_horizon_s}: {COLD_TIER}")
        if not replace and (held := self._not_empty()):
            reasons.append(
                f"the index is not empty: {', '.join(map(str, held))}; the service mends an index "
                "by itself; to throw these away and restore all, add --replace"
            )
        return reasons

    def _not_empty(self) -> list[Shard]:
        inspector = Inspector.of(self._url)
        try:
            return [s for s in self._shards() if _has_labels(inspector, s)]
        finally:
            inspector.close()

    def _shards(self) -> list[Shard]:
        names = list(self._settings.topics)
        counts = Topics(self._access.admin()).partitions(names)
        shards = [Shard(name, p) for name in names for p in range(counts.get(name, 0))]
        if not shards:
            servers = self._settings.kafka_bootstrap_servers
            raise RestoreRefused(f"no request topic ({', '.join(names)}) on {servers}")
        return shards

    def _observe(self) -> None:
        server = RedisServer(self._url)
        try:
            self._clock.observe(server.now_ms())
        finally:
            server.close()

    def _journals(self) -> Journals:
        return Journals(self._session, self._settings, self._access, self._kept)

    @contextmanager
    def _owned(self, shards: Sequence[Shard]) -> Iterator[dict[Shard, int]]:
        """The receipts label of each shard, whose producer stays open meanwhile."""
        with ExitStack() as closing, ThreadPoolExecutor(1 + OPENED_AT_ONCE) as threads:
            threads.submit(self._tasks.warm_up)
            writers = {shard: self._writer(shard, closing) for shard in shards}
            labels = threads.map(lambda shard: self._take_over(shard, writers[shard]), shards)
            yield dict(zip(shards, labels, strict=True))

    def _writer(self, shard: Shard, closing: ExitStack) -> Writer:
        exactly_once = self._settings.delivery == "exactly-once"
        writer = Writer(shard, self._access, exactly_once=exactly_once)
        closing.callback(writer.close)
        return writer

    def _take_over(self, shard: Shard, writer: Writer) -> int:
        journal = ShardJournal(shard, self._access)
        try:
            writer.open()
            start = journal.receipt_bounds().start
            label, _ = commit_barrier(
                shard, journal, writer, self._clock.earliest_ms, Labels(0, start)
            )
            return label
        finally:
            journal.close()

    def _ended(self, journals: Journals, labels: Mapping[Shard, Labels]) -> dict[Shard, Bits]:
        return ended(self._tasks, self._access, self._kept, journals.in_kafka, labels)

    def _begin(self, run: str, reach: Reach, labels: Mapping[Shard, Labels], replace: bool) -> None:
        for shard, label in labels.items():
            with self._index(run, shard) as index:
                try:
                    index.begin(range(reach.requests[shard].start, label.requests), replace=replace)
                except NotEmpty as found:
                    raise RestoreRefused(f"{found}: a service was here just now") from None

    def _fill(
        self,
        journals: Journals,
        labels: Mapping[Shard, Labels],
        ended: Mapping[Shard, Bits],
        run: str | None,
    ) -> list[Done]:
        """Each shard's part of what was filled."""
        held = self._kept.reach.requests if self._kept is not None else {}
        ranges = [
            Range(*shard, start, labels[shard].requests)
            for shard, start in starts(journals.in_kafka.requests, held, labels)
        ]
        moment = Moment(run, self._clock.earliest_ms(), self._clock.latest_ms())
        filling = Filling(self._tasks, self._settings, self._access, self._kept, moment)
        parts = filling.fill(ranges, ended)
        return [summed(shard, parts) for shard in labels]

    def _finish(
        self, run: str, labels: Mapping[Shard, Labels], parts: Sequence[Done]
    ) -> list[Restored]:
        whole = tuple((part, labels[part.shard]) for part in parts if part.problem is None)
        task = Finish(self._settings, run, whole)
        found = {
            done.shard: done for done in map(Done.of, self._tasks.run(task, FILLED, len(whole)))
        }
        return [_restored(part, found.get(part.shard)) for part in parts]

    @contextmanager
    def _index(self, run: str, shard: Shard) -> Iterator[Restoring]:
        connections = pool(self._url)
        index = Restoring(shard, connections, run, grace_s=self._settings.grace_s)
        try:
            yield index
        finally:
            index.close()
            connections.disconnect()


def _check_ahead(ended: Mapping[Shard, Bits], labels: Mapping[Shard, Labels]) -> None:
    for shard, bits in ended.items():
        if shard in labels and bits and (last := last_of(bits)) >= labels[shard].requests:
            raise RestoreRefused(
                f"{shard}: a receipt speaks of the request {last}, and the next one to be written is "
                f"{labels[shard].requests}; was the topic deleted and created anew? Then delete the "
                "receipts topic too: old receipts would end new requests"
            )


def _restored(part: Done, finished: Done | None = None) -> Restored:
    is_checked = finished is not None and finished.problem is None
    problem = part.problem if finished is None else finished.problem
    seconds = part.seconds + (finished.seconds if finished is not None else 0.0)
    scanned, pending = part.scanned, part.content.entries
    return Restored(part.shard, scanned, pending, seconds, is_checked, problem)


def _has_labels(inspector: Inspector, shard: Shard) -> bool:
    try:
        return inspector.labels(shard) is not None
    except ValueError:  # another version wrote it
        return True


def _unknown(journals: Journals) -> list[str]:
    """The offsets that neither Kafka nor the ledger has, and what follows."""
    notes = []
    for shard, span in journals.reach.requests.items():
        if span.start > 0:
            notes.append(f"{shard}: requests 0 to {span.start - 1} are unknown, they left Kafka")
        if (receipts := journals.reach.receipts[shard]).start > 0:
            notes.append(
                f"{shard}: receipts 0 to {receipts.start - 1} are unknown, they left Kafka: requests "
                "that they ended and that are still kept are delivered again"
            )
    for at, gaps in sorted(journals.gaps.items()):
        for gap in gaps:
            notes.append(f"{at}: {gap.start} to {gap.end - 1} are unknown, they left Kafka unread")
    return notes
