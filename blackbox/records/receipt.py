"""The records of the second journal: the outcomes of a shard's requests, one receipt per batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

import orjson

Places = dict[str, list[tuple[int, int]]]
"""`topic/partition` -> (request offset, offset there)."""

VERSION = 1
MOST_RECEIPT_BYTES = 950_000
"""Clients and topics take 1 MB by default; some parts of a receipt are not outcomes."""

RECEIPTS_TOPIC_BYTES = 1_000_000
"""The least `max.message.bytes` of a receipts topic: it takes each receipt of a batch."""

DOUBTFUL = 8
"""How many receipts back a void may reach; recovery never leaves more in doubt."""


class Claim(NamedTuple):
    """The claim of a receipt about one request: its message, dead letter or next request is at offset `there` of `at`.

    `at` is a `topic/partition`. `outcome` is "delivered", NEXT, or the part of a receipt that says why
    there is a dead letter. `topic_id` is the beginning of the topic's id.
    """

    offset: int
    outcome: str
    at: str
    there: int
    topic_id: str


class Checked(NamedTuple):
    """The claims whose records are missing, and those whose places cannot be read, with the reason."""

    missing: list[Claim]
    unread: dict[Claim, str]


class Mark(NamedTuple):
    """The low-water mark: from there on, the two journals contain all that is pending.

    Every request below the offset `requests` has ended, and no receipt below the offset `receipts`
    names one at or above `requests`. `pairs` are positions of both journals that one walk read
    together: receipts below the second name only requests below the first.
    """

    requests: int
    receipts: int
    pairs: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcomes of requests, by their offset in the request topic.

    at_ms      -- when the batch was dispatched, epoch ms
    delivered  -- for each topic and partition, pairs: the offset of the request, that of the message
    dead       -- requests that could not be delivered
    expired    -- requests that were past `expires_after`
    invalid    -- records that are not valid requests
    letters    -- the places of the dead letters of `dead`, `expired` and `invalid`, as in `delivered`
    next       -- the places of the requests for the next times of recurring ones, as in `delivered`
    topics     -- the first 8 characters of the Kafka ids of the topics in these three:
                  a topic that is created again has another id, and its messages do not count as
                  missing
    void       -- requests whose outcome in an earlier receipt does not count: they are pending again
    doubtful   -- those of `void` whose messages could not be checked, by outcome. They are not
                  delivered until a later receipt confirms the outcome, or declares it void again
    barrier    -- true: written by an owner that opens the shard, or by `rebind`, before earlier receipts
                  are trusted
    gone       -- [from, up to]: offsets that retention removed before they were read, or while some
                  of them were pending
    read       -- the position `requests` of the writer: callers' rules were applied to all requests
                  below it
    ignored    -- conditional records (carried ones, replacements by id) that did not count
    mark       -- [requests, receipts, pairs]: the low-water mark, and pairs of positions for the next
                  one. Conditional records below `read` counted, unless this or an earlier receipt
                  lists them in `ignored`
    topic_id   -- in a barrier or with a mark: Kafka's id of the request topic that this and later
                  receipts are about
    group      -- in a barrier or with a mark: the consumer group whose receipts these are; a shard of
                  another group does not open
    unknown_ms -- in a barrier: requests that were due before this may have had an outcome that is in
                  no receipt
    cut        -- [offset]: the request topic lost its records from there on. For these offsets, this
                  and earlier receipts are about the lost requests
    rebound    -- in a barrier of `blackbox rebind`: the token of the index that it moves. Requests
                  that were pending there, and are gone from the request topic, are written again in
                  the same transaction
    """

    at_ms: int
    delivered: Places = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    letters: Places = field(default_factory=dict)
    next: Places = field(default_factory=dict)
    topics: dict[str, str] = field(default_factory=dict)
    void: list[int] = field(default_factory=list)
    doubtful: list[Claim] = field(default_factory=list)
    barrier: bool = False
    gone: tuple[int, int] | None = None
    read: int = 0
    ignored: list[int] = field(default_factory=list)
    mark: Mark | None = None
    topic_id: str = ""
    group: str = ""
    unknown_ms: int = 0
    cut: Sequence[int] = ()
    rebound: str = ""

    def removals(self) -> Iterator[int]:
        """The requests that this receipt ends."""
        delivered = map(itemgetter(0), chain.from_iterable(self.delivered.values()))
        return chain(delivered, self.dead, self.expired, self.invalid)

    def claims(self) -> Iterator[Claim]:
        """Where its messages, dead letters and requests for next times are."""
        reasons = {offset: part for part in _LETTERS for offset in getattr(self, part)}
        yield from _claims({DELIVERED: self.delivered, NEXT: self.next}, self.topics)
        for claim in _claims({"dead": self.letters}, self.topics):
            yield claim._replace(outcome=reasons.get(claim.offset, "dead"))

    def without(self, void: set[int]) -> Receipt:
        # most receipts have none of them, and stay as they are
        if void.isdisjoint(self.removals()):
            return self
        return replace(
            self,
            delivered=_places_without(self.delivered, void),
            letters=_places_without(self.letters, void),
            dead=[offset for offset in self.dead if offset not in void],
            expired=[offset for offset in self.expired if offset not in void],
            invalid=[offset for offset in self.invalid if offset not in void],
        )


def encode(receipt: Receipt) -> bytes:
    """The JSON of a receipt; absent parts take no space. Inverse of `decode`."""
    value: dict[str, object] = {"v": VERSION, "at_ms": receipt.at_ms}
    for name in _PARTS:
        if part := getattr(receipt, name):
            value[name] = part
    if receipt.mark is not None:
        value["mark"] = tuple(receipt.mark)
    if receipt.doubtful:
        value |= _grouped(receipt.doubtful, receipt.topics)
    return orjson.dumps(value)


def confirmation(claims: Iterable[Claim], at_ms: int, read: int) -> Receipt:
    """The receipt that repeats outcomes that were in doubt and are true."""
    receipt = Receipt(at_ms, read=read)
    for offset, outcome, at, there, topic_id in claims:
        if outcome != DELIVERED:
            getattr(receipt, outcome).append(offset)
        places = receipt.delivered if outcome == DELIVERED else receipt.letters
        places.setdefault(at, []).append((offset, there))
        if topic_id:
            receipt.topics[topic_of(at)] = topic_id
    return receipt


def one_incarnation(claims: Iterable[Claim]) -> list[Claim]:
    """The claims that fit into one receipt: those of one id for each topic, and not too many."""
    ids: dict[str, str] = {}
    same = (
        claim
        for claim in claims
        if ids.setdefault(topic_of(claim.at), claim.topic_id) == claim.topic_id
    )
    return list(islice(same, MOST_CONFIRMED))


MOST_CONFIRMED = 5000  # claims per receipt
DELIVERED, NEXT = "delivered", "next"
_LETTERS = "dead", "expired", "invalid"
_PARTS = [part.name for part in fields(Receipt) if part.name != "at_ms"]


class NotAReceipt(ValueError):
    """A record in the receipts topic that is not a receipt."""


def decode(value: bytes | None) -> Receipt:
    """Parse a receipt; parts that only a later version knows are left out.

    Raises NotAReceipt for anything that is not a receipt, ValueError for one of another version.
    """
    try:
        found = orjson.loads(value or b"null")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"v", "at_ms"} <= found.keys():
        raise NotAReceipt(f"not a receipt: {(value or b'')[:80]!r}")
    # the requests that cannot be read in it may have been delivered
    if found["v"] != VERSION:
        raise ValueError(
            f"the receipt has version {found['v']!r}, but this blackbox reads version {VERSION}; "
            "run the version that wrote it"
        )
    # parts of later versions are ignored: a rolling update or a rollback must not close a shard
    parts = {name: found[name] for name in ("at_ms", *_PARTS) if name in found}
    for name, part in parts.items():
        if not _has_shape(name, part):
            raise NotAReceipt(f"{name} has an invalid form: {str(part)[:80]}")
    if "mark" in parts:
        parts["mark"] = Mark(*parts["mark"][: len(Mark._fields)])
    if "doubtful" in parts:
        parts["doubtful"] = list(_claims(parts["doubtful"], parts.get("topics", {})))
    return Receipt(**parts)


_SHAPES: dict[str, type] = {
    **dict.fromkeys(("delivered", "letters", "next", "topics", "doubtful"), dict),
    **dict.fromkeys(("dead", "expired", "invalid", "void", "ignored", "mark", "gone", "cut"), list),
    **dict.fromkeys(("at_ms", "read", "unknown_ms"), int),
    **dict.fromkeys(("topic_id", "group", "rebound"), str),
    "barrier": bool,
}


def _has_shape(name: str, part: object) -> bool:
    # without a look at each pair: there may be thousands of outcomes
    if not isinstance(part, _SHAPES[name]):
        return False
    if name in ("delivered", "letters", "next") and isinstance(part, dict):
        return all(isinstance(pairs, list) for pairs in part.values())
    if name == "doubtful" and isinstance(part, dict):
        return part.keys() <= {DELIVERED, *_LETTERS} and all(
            _has_shape("delivered", places) for places in part.values()
        )
    if not isinstance(part, list):
        return True
    least = {"mark": 2, "gone": 2}.get(name, 0)
    numbers = part[:least] if name == "mark" else part
    return len(part) >= least and all(isinstance(one, int) for one in numbers)


def _grouped(claims: Iterable[Claim], topics: Mapping[str, str]) -> dict[str, object]:
    # by outcome and place, so that claims take no more room than in the receipt that made them
    doubtful: dict[str, Places] = {}
    known = dict(topics)
    for offset, outcome, at, there, topic_id in claims:
        doubtful.setdefault(outcome, {}).setdefault(at, []).append((offset, there))
        if topic_id:
            known[topic_of(at)] = topic_id
    return {"doubtful": doubtful} | ({"topics": known} if known else {})


def _claims(doubtful: Mapping[str, Places], topics: Mapping[str, str]) -> Iterator[Claim]:
    for outcome, places in doubtful.items():
        for at, pairs in places.items():
            topic_id = topics.get(topic_of(at), "")
            yield from (Claim(offset, outcome, at, there, topic_id) for offset, there in pairs)


def without_void(receipts: Iterable[tuple[int, Receipt]]) -> Iterator[tuple[int, Receipt]]:
    """The receipts in order, each without the outcomes that a later one declared void."""
    # as many as a void may reach are held back
    held: deque[tuple[int, Receipt]] = deque()
    for offset, receipt in receipts:
        if receipt.void:
            void = set(receipt.void)
            held = deque((o, earlier.without(void)) for o, earlier in held)
        held.append((offset, receipt))
        if len(held) > DOUBTFUL:
            yield held.popleft()
    yield from held


def outcome_bytes(topic: str) -> int:
    """The most bytes that an outcome takes in a receipt: `"topic/12345":[[offset,offset]],` and the offset again."""
    # Offsets of 13 digits: a partition that gets a million records a second has fewer for months.
    return len(topic) + 56


def topic_bytes(topic: str) -> int:
    """The bytes of a topic's id in a receipt: `"topic":"abcdefgh",`."""
    return len(topic) + 14


def topic_of(at: str) -> str:
    return at.rpartition("/")[0]


def _places_without(places: Places, void: set[int]) -> Places:
    kept = {at: [pair for pair in pairs if pair[0] not in void] for at, pairs in places.items()}
    return {at: pairs for at, pairs in kept.items() if pairs}
