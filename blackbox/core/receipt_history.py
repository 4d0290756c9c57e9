"""The newest low-water mark in the receipts, and which topic and group receipts belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from blackbox.core.plan import Binding, Bounds, Positions, Tail
from blackbox.core.ports import Journal
from blackbox.records.errors import ForeignIndex
from blackbox.records.receipt import Mark, Receipt
from blackbox.records.request import Shard

# Receipts that are searched first; each further stretch without a mark is ten times as long.
FIRST_STRETCH = 1000


class RebindReceipt(NamedTuple):
    """A receipt of `blackbox rebind`, and its offset."""

    offset: int
    receipt: Receipt


class Recreated(ForeignIndex):
    """The request topic is not the one that the index, or the last owner's receipts, refer to."""


class Shortened(ForeignIndex):
    """A journal ends before what is known of it, although it is the same topic.

    `known_ms` is when the receipt that knew more was written, epoch ms; 0 if it is not known from a
    receipt.
    """

    known_ms = 0


class OtherGroup(ForeignIndex):
    """The last owner that wrote receipts was of another group, which may have a Redis of its own."""


def newest_mark(shard: Shard, journal: Journal, topic_id: str) -> tuple[Mark, int] | None:
    """The newest mark that is below the start of neither journal, and the `read` of its receipt.

    If there is none, the newest one whose receipts all exist; some requests that it needs are gone.
    Raises Recreated when the last owner wrote for another topic, Shortened when a mark is above the
    end of the requests.
    """
    requests, receipts = journal.request_bounds(), journal.receipt_bounds()
    second: tuple[Mark, int] | None = None
    cut: int | None = None
    for offset, receipt in _marks(journal, receipts):
        # a topic that was created again: its first mark, that of `rebind`, is newer than this
        if receipt.topic_id not in ("", topic_id):
            if second is not None:
                return second
            theirs = Binding("", receipt.topic_id, "", "")
            raise recreated(shard, theirs, Binding("", topic_id, "", ""))
        mark, read = receipt.mark, receipt.read
        if cut is not None and mark is not None:  # it holds below the cut
            mark, read = mark._replace(requests=min(mark.requests, cut)), min(read, cut)
        if receipt.cut:
            cut = receipt.cut[0] if cut is None else min(cut, receipt.cut[0])
        if mark is not None and mark.requests > requests.end:
            ends = Positions(requests.end, receipts.end)
            found = shortened(shard, Positions(mark.requests, mark.receipts), ends)
            found.known_ms = receipt.at_ms
            raise found
        if mark is not None and receipts.start <= mark.receipts <= offset:
            if mark.requests >= requests.start:
                return mark, read
            second = second or (mark, read)
    return second


def foreign_group(journal: Journal, group: str, since: int) -> str:
    """The group of the newest barrier or mark from `since` on, if it is another group; else ""."""
    # receipts of older versions, which do not name a group, are accepted
    first, end = journal.receipt_bounds()
    newest = next(_marks(journal, Bounds(max(first, since), end)), None)
    return "" if newest is None or newest[1].group == group else newest[1].group


def openings(journal: Journal, topic_id: str) -> list[Receipt]:
    """The barriers and marks of this incarnation of the request topic, newest first."""
    found: list[Receipt] = []
    for _, receipt in _marks(journal, journal.receipt_bounds()):
        if receipt.topic_id not in ("", topic_id):
            break
        if receipt.topic_id:
            found.append(receipt)
    return found


def rebound_by(journal: Journal, token: str) -> RebindReceipt | None:
    """The receipt by which `blackbox rebind` moved the pending requests out of the index with this token."""
    found = _marks(journal, journal.receipt_bounds())
    return next((RebindReceipt(at, one) for at, one in found if one.rebound == token != ""), None)


def cuts_since(journal: Journal, since: int) -> list[tuple[int, int]]:
    """The receipts from `since` on that record a cut, as (receipt offset, first offset that was cut)."""
    start, end = journal.receipt_bounds()
    read = journal.receipts(max(since, start), end)
    return [(at, offset) for at, receipt in read for offset in receipt.cut]


def other_group(shard: Shard, theirs: str, ours: str) -> OtherGroup:
    return OtherGroup(
        f"{shard}: its last receipts belong to the group {theirs!r}, but BLACKBOX_GROUP_ID is "
        f"{ours!r}: services of both groups would deliver the same messages, even with separate "
        "Redis servers; set it back, or stop all services of the other group and run blackbox "
        f"rebind {shard.topic} --pending deliver"
    )


def recreated(shard: Shard, theirs: Binding, ours: Binding) -> Recreated:
    what = (
        f"the index in Redis belongs to cluster {theirs.cluster_id}, topic id {theirs.topic_id}; "
        f"these brokers are cluster {ours.cluster_id}, topic id {ours.topic_id}"
        if theirs.cluster_id != ours.cluster_id
        else f"blackbox knows the topic id {theirs.topic_id}, but Kafka has {ours.topic_id}: the "
        "topic was deleted and created again"
    )
    return Recreated(
        f"{shard}: {what}. Old receipts would end new requests. If this is intended, run blackbox "
        f"rebind {shard.topic} --pending deliver (pending requests are written again), or "
        "--pending drop"
    )


def check_binding(shard: Shard, theirs: Binding, ours: Binding) -> None:
    """Raise ForeignIndex if an index belongs to another topic, or to other receipts or another group."""
    if theirs.topic_id != ours.topic_id:
        raise recreated(shard, theirs, ours)
    if theirs.receipts_id != ours.receipts_id:
        raise ForeignIndex(
            f"{shard}: the index in Redis belongs to the receipts topic {theirs.receipts_id}, "
            f"but {shard.topic}.receipts is now {ours.receipts_id}: it was deleted and created "
            "again, so only Redis knows what was delivered; to keep its index, run blackbox "
            f"rebind {shard.topic} --pending deliver"
        )
    if theirs.group != ours.group:
        raise ForeignIndex(
            f"{shard}: the index in Redis belongs to the group {theirs.group!r}, but "
            f"BLACKBOX_GROUP_ID is {ours.group!r}: services of both groups would deliver the "
            "same messages; set it back, or stop all services of the other group and run "
            f"blackbox rebind {shard.topic} --pending deliver"
        )


def shortened(shard: Shard, known: Positions, ends: Positions) -> Shortened:
    return Shortened(
        f"{shard}: the positions are {tuple(known)}, but the journals end at {tuple(ends)}, though "
        "the topics are the same: Kafka lost records (an unclean leader election?). To deliver the "
        f"requests that Redis still has, run blackbox rebind {shard.topic} --pending deliver"
    )


def replaced(shard: Shard, tail: Tail) -> Shortened:
    """Like `shortened`, if the journal has been written to since."""
    return Shortened(
        f"{shard}: the record at {tail.offset} is not the one that was read there, though the "
        "topic is the same: Kafka lost records, and callers wrote others in their place (an "
        "unclean leader election?). To deliver the lost requests that Redis still has, run "
        f"blackbox rebind {shard.topic} --pending deliver"
    )


def is_another(journal: Journal, tail: Tail | None) -> bool:
    """Whether Kafka has another record where the last one was read."""
    if tail is None or tail.offset < journal.request_bounds().start:
        return False
    found = journal.record(tail.offset)
    return found is not None and not tail.is_of(found)


def _marks(journal: Journal, receipts: Bounds) -> Iterator[tuple[int, Receipt]]:
    """Receipts that carry a mark or are barriers, the newest first."""
    for stretch in receipts.from_the_end(FIRST_STRETCH):
        found = [one for one in journal.receipts(*stretch) if one[1].mark or one[1].barrier]
        yield from reversed(found)
