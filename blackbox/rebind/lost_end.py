"""Finds the place from which on a request topic lost its end: behind it, callers' records are new.

Both errors are bad, and the search must not choose one of them. A place that is too high is a silent loss:
records that callers wrote since are taken for those that were read, and are never delivered. A place that
is too low delivers again what was delivered since; as outcomes from there on are void, this can be the
whole topic. A single wrong timestamp of a record in the log must therefore not move the place far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from blackbox.core.plan import UNKNOWN_EPOCH, Bounds, IndexMetadata, Tail
from blackbox.core.receipt_history import is_another
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.timestamp_search import first_within
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.request import Record

# How many offsets are read first to find the last records: control records and compaction leave gaps.
TAIL = 100
# How many offsets are read at once at most.
MOST_AT_ONCE = 100_000
# By how many more old records than new ones the search by timestamps goes back: shorter runs of slow clocks do
# not hide the new records before them, and what fast clocks left behind a longer run of old ones moves nothing.
MOST_OLDER = 1000


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
    """The offset from which on most requests were written at `since_ms` (epoch ms) or later, by timestamps."""
    return _search_times(journal, requests, since_ms)


def tail_before(journal: ShardJournal, first: int) -> Tail | None:
    """The last record below the offset `first`, which shows later whether the log lost its end again."""
    last = _last(journal, Bounds(journal.request_bounds().start, first))
    return None if last is None else Tail.of(*last)


def _first_after(journal: ShardJournal, tail: Tail, requests: Bounds) -> int:
    """The offset from which on records are newer than the tail, by epochs and by most timestamps."""
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
    # What epochs show is not moved by clocks that differ as usual, nor by a single record that an old one
    # follows. A single one at the end may be the only new one, and to repeat it is better than to lose it.
    since_ms = tail.timestamp_ms + CLOCKS_APART_MS
    if is_shown and _search_times(journal, before, since_ms, least=1) == place:
        return place
    # Without that margin, or the records of the first minute after the loss would not be read.
    return _search_times(journal, before, tail.timestamp_ms + 1)


def _search_times(journal: ShardJournal, requests: Bounds, since_ms: int, least: int = 0) -> int:
    """The offset from which on records from `since_ms` on outnumber older ones by most.

    The end, if they nowhere do so at least by `least`. Of two offsets that fit equally the lower one counts: a
    message that is repeated is better than one that is lost.
    """
    # Kafka's own search stops at the first late timestamp, which a clock that was ahead may have left anywhere.
    # Counted from the end, a few wrong clocks decide nothing, wherever they are. Records that are written
    # behind the end are newer, add the same to every balance, and so do not move the place.
    place, balance, best, is_best = requests.end, 0, least, False
    for offset, timestamp_ms in _backwards(journal, requests):
        if is_best:
            # behind this record, also if there is a gap
            place = offset + 1
        balance += 1 if timestamp_ms >= since_ms else -1
        is_best = balance >= best
        if is_best:
            best = balance
        elif balance < best - MOST_OLDER:
            return place
    return requests.start if is_best else place


def _backwards(journal: ShardJournal, requests: Bounds) -> Iterator[tuple[int, int]]:
    """The offsets and timestamps of the records, the last one first."""
    end, length = requests.end, TAIL
    while end > requests.start:
        start = max(requests.start, end - length)
        batches = journal.requests(start, end)
        found = [(one.offset, one.timestamp_ms) for batch in batches for one in batch.records]
        yield from reversed(found)
        end, length = start, min(10 * length, MOST_AT_ONCE)


def _first(journal: ShardJournal, start: int, end: int) -> _Found | None:
    for batch in journal.requests(start, end):
        if batch.records:
            return _Found(batch.records[0], batch.epochs[0])
    return None


def _last(journal: ShardJournal, requests: Bounds) -> _Found | None:
    for stretch in requests.from_the_end(TAIL):
        found = [batch for batch in journal.requests(*stretch) if batch.records]
        if found:
            return _Found(found[-1].records[-1], found[-1].epochs[1])
    return None
