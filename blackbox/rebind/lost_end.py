"""Finds the place from which on a request topic lost its end: behind it, callers' records are new.

Both errors are bad, and the search must not choose one of them. A place that is too high is a silent loss:
records that callers wrote since are taken for those that were read, and are never delivered. A place that
is too low delivers again what was delivered since; as outcomes from there on are void, this can be the
whole topic. A single wrong timestamp must therefore not decide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from blackbox.core.plan import UNKNOWN_EPOCH, Bounds, IndexMetadata, Tail
from blackbox.core.receipt_history import is_another
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.timestamp_search import first_within
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.request import Record

# How many records are compared at once, and how many offsets are read first to find the last ones: control
# records and compaction leave gaps.
TAIL = 100


class _Found(NamedTuple):
    record: Record
    epoch: int


def lost_from(journal: ShardJournal, kept: IndexMetadata, requests: Bounds) -> int | None:
    """The offset from which on the log has lost what the index had read; None if it has lost nothing."""
    tail = kept.tail
    is_shorter, is_replaced = kept.positions.requests > requests.end, is_another(journal, tail)
    if not is_shorter and not is_replaced:
        return None
    if tail is None:
        return requests.end
    place = _first_after(journal, tail, requests)
    return min(place, tail.offset) if is_replaced else place


def written_since(journal: ShardJournal, requests: Bounds, since_ms: int) -> int:
    """The offset behind the last request that was written before `since_ms` (epoch ms), by timestamps."""
    return _search_times(journal, requests, since_ms, requests.end)


def tail_before(journal: ShardJournal, first: int) -> Tail | None:
    """The last record below the offset `first`, which shows later whether the log lost its end again."""
    last = _last(journal, Bounds(journal.request_bounds().start, first))
    return None if last is None else Tail.of(*last)


def _first_after(journal: ShardJournal, tail: Tail, requests: Bounds) -> int:
    """The offset behind the last record that is not newer than the tail."""
    # Also if there is no newer one: a second run, behind whose records there are those that the
    # first one wrote again, must find the same place.
    last = _last(journal, requests)
    if last is None:
        return requests.start
    # A log loses its end only with a change of its leader, which raises the leader epoch: whatever
    # clocks say, a record is new if its epoch is higher than the tail's.
    is_shown = last.epoch > tail.epoch != UNKNOWN_EPOCH
    if is_shown:

        def epoch_from(offset: int) -> tuple[int, int] | None:
            found = _first(journal, offset, requests.end)
            return None if found is None else (found.record.offset, found.epoch)

        place = first_within(epoch_from, *requests, tail.epoch + 1, last.epoch)
    else:
        place = last.record.offset + 1
    # Without epochs, and if the data of the brokers were restored, which repeats epochs: some of the
    # new records then have one that is not higher. Callers' timestamps are not used: one that wrote the
    # tail with a slow clock would make old records new.
    before = Bounds(requests.start, place)
    below = _last(journal, before)
    if below is None or not below.record.has_broker_time:
        return place
    # What epochs show is not moved by clocks that differ as usual, nor by a single record.
    since_ms = tail.timestamp_ms + CLOCKS_APART_MS
    if is_shown and _search_times(journal, before, since_ms, place, least=2) == place:
        return place
    # Without that margin, or the records of the first minute after the loss would not be read.
    return _search_times(journal, before, tail.timestamp_ms + 1, place)


def _search_times(
    journal: ShardJournal, requests: Bounds, since_ms: int, otherwise: int, least: int = 0
) -> int:
    """The offset behind the last record from before `since_ms`, by most of the timestamps around it.

    `otherwise` if later ones do not outnumber earlier ones at the end, at least by `least`.
    """
    records = _last_records(journal, requests)
    first = _first_new(records, since_ms, least)
    if first == len(records):
        return otherwise
    if first > 0:
        return records[first - 1].offset + 1

    # Kafka's own search stops at the first late timestamp, which a clock that was ahead may have left
    # anywhere. So most of the next records decide at each place that is tried.
    def is_new(offset: int) -> bool:
        there = _records_from(journal, offset, requests.end)
        return 2 * sum(one.timestamp_ms >= since_ms for one in there) >= len(there)

    earlier = range(requests.start, records[0].offset)
    start = requests.start + bisect_left(earlier, True, key=is_new)
    records = _records_from(journal, start, requests.end)
    first = _first_new(records, since_ms)
    return records[first - 1].offset + 1 if first > 0 else start


def _first_new(records: Sequence[Record], since_ms: int, least: int = 0) -> int:
    """The index from which on records from `since_ms` on most outnumber older ones, at least by `least`.

    If there is none, the number of records.
    """
    # Neither a last record whose clock was slow decides, nor one before whose clock was ahead. Of two places
    # that fit equally the lower one counts: a message that is repeated is better than one that is lost.
    first, balance = len(records), 0
    for index in reversed(range(len(records))):
        balance += 1 if records[index].timestamp_ms >= since_ms else -1
        if balance >= least:
            first, least = index, balance
    return first


def _first(journal: ShardJournal, start: int, end: int) -> _Found | None:
    for batch in journal.requests(start, end):
        if batch.records:
            return _Found(batch.records[0], batch.epochs[0])
    return None


def _records_from(journal: ShardJournal, start: int, end: int) -> list[Record]:
    found = (record for batch in journal.requests(start, end) for record in batch.records)
    return list(islice(found, TAIL))


def _last_records(journal: ShardJournal, requests: Bounds) -> list[Record]:
    last: list[Record] = []
    for stretch in requests.from_the_end(TAIL):
        # of a long stretch between gaps, only the last ones
        found: deque[Record] = deque(maxlen=TAIL)
        for batch in journal.requests(*stretch):
            found.extend(batch.records)
        last = [*found, *last][-TAIL:]
        if len(last) == TAIL:
            break
    return last


def _last(journal: ShardJournal, requests: Bounds) -> _Found | None:
    for stretch in requests.from_the_end(TAIL):
        found = [batch for batch in journal.requests(*stretch) if batch.records]
        if found:
            return _Found(found[-1].records[-1], found[-1].epochs[1])
    return None
