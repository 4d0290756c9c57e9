"""Which replays of dead letters would end a pending request under the same caller id."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

from blackbox.admin.lookup import StatusLookup, wait_until
from blackbox.journal.dead_letter_topic import ReplayRecord
from blackbox.journal.partition_reader import PartitionReader
from blackbox.records.request import Record, Request, Shard, request_id

READ_WITHIN_S = 5.0


def conflicts(
    lookup: StatusLookup,
    replays: Mapping[str, ReplayRecord],
    is_there: Callable[[str], bool],
) -> dict[str, str]:
    """The replays that must not be written, and why, by the places of their letters.

    A later record replaces the pending request under its caller id: a replay would end what the
    caller has asked for since, and of several replays only the last would be delivered.
    `is_there`: whether the record that the letter at this place is about is still at its offset.
    """
    named = {place: id for place, one in replays.items() if (id := _caller_id(lookup, one))}
    unread = _unread(lookup, {replays[place].shard for place in named})
    chosen: dict[tuple[Shard, str], str] = {}
    found: dict[str, str] = {}
    for place, caller_id in named.items():
        shard = replays[place].shard
        holder = lookup.inspector.offset_of(shard, caller_id)
        if shard in unread:
            found[place] = (
                f"{shard} has requests that the service has not read yet; one of them may have the "
                f"same id, {caller_id!r}; try again once they are read"
            )
        # The letter's own request may still be there until the outcome is settled. In a topic that
        # was created again, another request has its offset.
        elif holder is not None and not (holder == replays[place].offset and is_there(place)):
            found[place] = (
                f"a replay would replace the request {request_id(shard, holder)}, which is pending "
                f"under the same id, {caller_id!r}; cancel that one first, or discard this letter"
            )
        elif (first := chosen.setdefault((shard, caller_id), place)) != place:
            found[place] = (
                f"{first} has the same id, {caller_id!r}, and is replayed now; replay this letter "
                "after that message was delivered"
            )
    return found


def _caller_id(lookup: StatusLookup, replay: ReplayRecord) -> str | None:
    now_ms = time.time_ns() // 1_000_000
    record = Record(replay.offset, now_ms, replay.key, replay.value, replay.headers)
    parsed = lookup.formats[replay.shard.topic].parse(record, now_ms)
    return parsed.caller_id if isinstance(parsed, Request) else None


def _unread(lookup: StatusLookup, shards: Iterable[Shard]) -> set[Shard]:
    """The shards with requests that were written by now, and are not in the index after a few seconds."""
    with closing(PartitionReader(lookup.access, prefetched=1)) as reader:
        # Behind open transactions: a request that one of them hides may have been acknowledged.
        left = {shard: reader.log_end(*shard) for shard in shards}

        def are_read() -> bool:
            for shard, end in list(left.items()):
                position = lookup.inspector.positions(shard)
                if position is not None and _is_read(reader, shard, position.requests, end):
                    del left[shard]
            return not left

        wait_until(are_read, time.monotonic() + READ_WITHIN_S)
    return set(left)


def _is_read(reader: PartitionReader, shard: Shard, position: int, end: int) -> bool:
    if position >= end:
        return True
    start, stable_end = reader.bounds(*shard)
    if stable_end < end:
        return False
    # A position is behind a record: markers of transactions and aborted records do not move it.
    return not any(found for found, _ in reader.read(*shard, max(start, position), end))
