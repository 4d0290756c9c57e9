"""`blackbox status`: print the state of every shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import typer

from blackbox.cli.error_exit import no_topics_exit
from blackbox.cli.terminal import (
    AsJson,
    as_json,
    instant,
    load_silenced,
    print_line,
    print_whole,
    table,
)
from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka, shared
from blackbox.index.inspector import Inspector
from blackbox.index.redis_servers import RedisServers
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.clock import Clock
from blackbox.records.request import Shard
from blackbox.support import logs


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The statistics of a shard.

    `pending` counts entries, without the `cold` ones. Positions are None while the index is empty or
    lost. `requests_end` and `receipts_end` are the next offsets of the journals. `lag` counts
    requests that are in Kafka and not yet in the index.
    """

    shard: str
    pending: int
    cold: int
    due_now: int
    oldest_overdue_ms: int
    next_due_in_ms: int | None
    requests_position: int | None
    requests_end: int
    receipts_position: int | None
    receipts_end: int
    lag: int


def status(json: AsJson = False) -> None:
    """Print pending, overdue and unread requests by shard, and the paused targets; reads only.

    Exits with 1 when no request topic exists.
    """
    settings = load_silenced()
    shards = list(_statuses(settings))
    if not shards:
        raise no_topics_exit(settings)
    paused = _paused(settings, shards)
    if json:
        rows = [asdict(one) for one in shards]
        typer.echo(as_json({"totals": _totals(shards), "shards": rows, "paused": paused}))
    else:
        _print_table(shards)
        for topic, since_ms in sorted(paused.items()):
            print_line(f"paused since {instant(since_ms)}: {topic}")


def _statuses(settings: Settings) -> Iterator[ShardStatus]:
    access = kafka(settings, logs.NO_CLIENT_LOG)
    url = settings.redis_url.get_secret_value()
    # As dispatch does, or a request would be shown as overdue that is not due by the earlier clock.
    clock = Clock()
    clock.observe(RedisServers(url).now_ms())
    inspector = Inspector.of(url)
    names = [name for topic in settings.topics for name in (topic, receipts_topic(topic))]
    counts = Topics(access.admin()).partitions(names)
    for topic in settings.topics:
        for partition in range(counts.get(topic, 0)):
            # After partitions were added to a request topic, its receipts lack them for a while.
            has_receipts = partition < counts.get(receipts_topic(topic), 0)
            yield _status(Shard(topic, partition), access, inspector, clock, has_receipts)
    inspector.close()


def _paused(settings: Settings, shards: Sequence[ShardStatus]) -> dict[str, int]:
    names = (one.shard.rpartition("-") for one in shards)
    with closing(shared(settings)) as asked:
        return asked.paused(Shard(topic, int(partition)) for topic, _, partition in names)


def _status(
    shard: Shard, access: KafkaAccess, inspector: Inspector, clock: Clock, has_receipts: bool
) -> ShardStatus:
    with closing(ShardJournal(shard, access)) as journal:
        requests_end = journal.request_bounds().end
        receipts_end = journal.receipt_bounds().end if has_receipts else 0
    now_ms = clock.earliest_ms()
    standing = inspector.shard_stats(shard, now_ms)
    oldest_ms, next_ms = standing.oldest_due_ms, standing.next_due_ms
    requests_position = standing.positions.requests if standing.positions else None
    return ShardStatus(
        shard=str(shard),
        pending=standing.pending,
        cold=standing.cold,
        due_now=standing.due_now,
        oldest_overdue_ms=0 if oldest_ms is None else now_ms - oldest_ms,
        next_due_in_ms=None if next_ms is None else next_ms - now_ms,
        requests_position=requests_position,
        requests_end=requests_end,
        receipts_position=standing.positions.receipts if standing.positions else None,
        receipts_end=receipts_end,
        lag=requests_end - (requests_position or 0),
    )


def _totals(shards: Sequence[ShardStatus]) -> dict[str, int | None]:
    soonest = [one.next_due_in_ms for one in shards if one.next_due_in_ms is not None]
    return {
        "pending": sum(one.pending for one in shards),
        "cold": sum(one.cold for one in shards),
        "due_now": sum(one.due_now for one in shards),
        "oldest_overdue_ms": max(one.oldest_overdue_ms for one in shards),
        "next_due_in_ms": min(soonest, default=None),
        "lag": sum(one.lag for one in shards),
    }


def _print_table(shards: Sequence[ShardStatus]) -> None:
    totals = _totals(shards)
    footers = {
        "shard": "total",
        "pending": f"{totals['pending']:,}",
        "cold": f"{totals['cold']:,}",
        "overdue": f"{totals['due_now']:,}",
        "oldest": _duration(totals["oldest_overdue_ms"] or None),
        "next in": _duration(totals["next_due_in_ms"]),
        "requests": "",
        "unread": f"{totals['lag']:,}",
        "receipts": "",
    }
    shown = table(["shard"], list(footers)[1:], footers)
    for one in shards:
        shown.add_row(
            one.shard,
            f"{one.pending:,}",
            f"{one.cold:,}",
            f"{one.due_now:,}",
            _duration(one.oldest_overdue_ms or None),
            _duration(one.next_due_in_ms),
            _position(one.requests_position, one.requests_end),
            f"{one.lag:,}",
            _position(one.receipts_position, _without_marker(one)),
            style="bold red" if one.due_now else "",
        )
    print_whole(shown)


def _without_marker(one: ShardStatus) -> int:
    # A transaction marker takes an offset too, so the end may be one ahead of a position that is
    # up to date.
    return one.receipts_end - (one.receipts_end - (one.receipts_position or 0) == 1)


def _position(position: int | None, end: int) -> str:
    return f"{'-' if position is None else position}/{end}"


def _duration(ms: int | None) -> str:
    if ms is None:
        return "-"
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if ms >= size:
            return f"{ms / size:.1f} {unit}"
    return f"{ms / 1000:.1f} s"
