"""The newest low-water mark that receipts carry, and whose receipts they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from blackbox.core.plan import Binding, Bounds, Positions, Tail
from blackbox.core.ports import Journal
from blackbox.records.errors import ForeignIndex
from blackbox.records.receipt import Receipt
from blackbox.records.request import Shard

TAIL = 1000
"""Receipts looked at first; ten times as many each time that there is no mark among them."""


class Moved(NamedTuple):
    """A receipt of `blackbox rebind`, and its offset."""

    offset: int
    receipt: Receipt


class Recreated(ForeignIndex):
    """The request topic is not the one that the index, or the last owner's receipts, speak of."""


class Shortened(ForeignIndex):
    """A journal ends before what is known of it, although it is the same topic.

    Who knew it said so at `known_ms`, epoch ms, where a receipt tells.
    """

    known_ms = 0


class OtherGroup(ForeignIndex):
    """The last owner that wrote receipts was of another group, which may have a Redis of its own."""


def newest_mark(shard: Shard, journal: Journal, topic_id: str) -> Receipt | None:
    """The newest receipt with a mark that lies below the start of neither journal.

    If there is none, the newest whose receipts are all there: some requests that it needs are gone. Where the
    request topic was created again, the first mark of it is that of its rebind, behind all receipts of the other.
    Raises Recreated when the last owner wrote for another one, Shortened when requests below a mark are not there.
    """
    requests, receipts = journal.request_bounds(), journal.receipt_bounds()
    second: Receipt | None = None
    cut: int | None = None
    for offset, receipt in _marks(journal, receipts):
        if receipt.topic_id not in ("", topic_id):
            if second is not None:
                return second
            theirs = Binding("", receipt.topic_id, "", "")
            raise recreated(shard, theirs, Binding("", topic_id, "", ""))
        if cut is not None and receipt.mark is not None:  # what it knows of others behind is void
            known = receipt.mark._replace(requests=min(receipt.mark.requests, cut))
            receipt = replace(receipt, mark=known, read=min(receipt.read, cut))
        if receipt.cut:
            cut = min(receipt.cut[0], receipt.cut[0] if cut is None else cut)
        mark = receipt.mark
        if mark is not None and mark.requests > requests.end:
            ends = Positions(requests.end, receipts.end)
            found = shortened(shard, Positions(mark.requests, mark.receipts), ends)
            found.known_ms = receipt.at_ms
            raise found
        if mark is not None and receipts.start <= mark.receipts <= offset:
            if mark.requests >= requests.start:
                return receipt
            second = second or receipt
    return second


def foreign_group(journal: Journal, group: str, since: int) -> str:
    """Which other group the newest receipt from the offset `since` on is of that tells one; "" if none is.

    Who has an index knows the receipts before it; who has none looks at all. Older versions did not tell.
    """
    first, end = journal.receipt_bounds()
    newest = next(_marks(journal, Bounds(max(first, since), end)), None)
    return "" if newest is None or newest[1].group == group else newest[1].group


def openings(journal: Journal, topic_id: str) -> list[Receipt]:
    """The receipts that tell of an opening of this very request topic, as far back as there are any."""
    found: list[Receipt] = []
    for _, receipt in _marks(journal, journal.receipt_bounds()):
        if receipt.topic_id not in ("", topic_id):
            break
        if receipt.topic_id:
            found.append(receipt)
    return found


def rebound_by(journal: Journal, token: str) -> Moved | None:
    """The receipt by which `blackbox rebind` moved what was pending out of the index of this token."""
    found = _marks(journal, journal.receipt_bounds())
    return next((Moved(at, one) for at, one in found if one.rebound == token != ""), None)


def cuts_since(journal: Journal, since: int) -> list[tuple[int, int]]:
    """The receipts from `since` on that tell from which offset on the log has lost its end, and that offset."""
    start, end = journal.receipt_bounds()
    told = journal.receipts(max(since, start), end)
    return [(at, offset) for at, receipt in told for offset in receipt.cut]


def other_group(shard: Shard, theirs: str, ours: str) -> OtherGroup:
    """The refusal, which names both groups and the command that decides."""
    return OtherGroup(
        f"{shard}: its last receipts belong to the group {theirs!r}, and BLACKBOX_GROUP_ID is {ours!r}: "
        "services of both would deliver the same messages, whichever Redis each has; set it back, or "
        f"stop all of the other group and run blackbox rebind {shard.topic} --pending deliver"
    )


def recreated(shard: Shard, theirs: Binding, ours: Binding) -> Recreated:
    """The refusal, which names both sides and the command that decides."""
    what = (
        f"Redis has the index of cluster {theirs.cluster_id}, topic id {theirs.topic_id}; these "
        f"brokers are cluster {ours.cluster_id}, topic id {ours.topic_id}"
        if theirs.cluster_id != ours.cluster_id
        else f"blackbox knows the topic id {theirs.topic_id}, and Kafka has {ours.topic_id}: the topic "
        "was deleted and created again"
    )
    return Recreated(
        f"{shard}: {what}. Old receipts would end new requests. If this is meant, run "
        f"blackbox rebind {shard.topic} --pending deliver (what was pending is asked for again), or "
        "--pending drop"
    )


def shortened(shard: Shard, known: Positions, ends: Positions) -> Shortened:
    """The refusal for a journal that was cut off, which is no topic that was created again."""
    return Shortened(
        f"{shard}: positions {tuple(known)} are known, and the journals end at {tuple(ends)}, though "
        "the topics are the same: Kafka lost records (an unclean leader election?). Deliver what Redis "
        f"still has of them with blackbox rebind {shard.topic} --pending deliver"
    )


def replaced(shard: Shard, tail: Tail) -> Shortened:
    """The refusal for a journal that was cut off and written on since."""
    return Shortened(
        f"{shard}: the record at {tail.offset} is not the one that was read there, though the topic is the "
        "same: Kafka lost records, and callers wrote others in their places (an unclean leader election?). "
        f"Deliver what Redis still has of the lost ones with blackbox rebind {shard.topic} --pending deliver"
    )


def is_another(journal: Journal, tail: Tail | None) -> bool:
    """Whether Kafka has another record where the last one was read."""
    if tail is None or tail.offset < journal.request_bounds().start:
        return False
    found = journal.record(tail.offset)
    return found is not None and not tail.is_of(found)


def _marks(journal: Journal, receipts: Bounds) -> Iterator[tuple[int, Receipt]]:
    """Receipts that carry a mark or begin an opening, the newest first."""
    for stretch in receipts.from_the_end(TAIL):
        found = [one for one in journal.receipts(*stretch) if one[1].mark or one[1].barrier]
        yield from reversed(found)
