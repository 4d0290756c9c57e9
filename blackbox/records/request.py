"""Requests of callers: the values of a parsed request record, and the names of a request.

Pure: no I/O, no clock. Every instant is epoch milliseconds UTC (`_ms`).
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

Headers = list[tuple[str, bytes | None]]

# The bits that a request id has for them.
MAX_PARTITION = (1 << 20) - 1
MAX_OFFSET = (1 << 62) - 1

END_OF_TIMES_MS = 1 << 43
"""Times are earlier, epoch ms: the year 2248. A score from here on says where a request is parked."""

# Kafka's rule. librdkafka accepts other names, and they block its flush until they time out.
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def is_topic_name(name: str) -> bool:
    return name not in (".", "..") and _TOPIC_NAME.fullmatch(name) is not None


class Shard(NamedTuple):
    """One partition of one request topic; printed as `TB-3`."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def source(self, offset: int) -> str:
        """The place of a record, as in the header `blackbox-source`: `TB/3@1234`."""
        return f"{self.source_prefix}{offset}"

    @property
    def source_prefix(self) -> str:
        return f"{self.topic}/{self.partition}@"


class Record(NamedTuple):
    """A record of a request topic as Kafka returned it; `timestamp_ms` is Kafka's.

    `unreadable`: it, or its headers, could not be read at all (such as a name that is not UTF-8). `has_broker_time`:
    the broker set the timestamp (`LogAppendTime`), not the writer.
    """

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    unreadable: Invalid | None = None
    has_broker_time: bool = False


class Reason(StrEnum):
    """Why a request was not delivered; the fixed word in the header `blackbox-reason`.

    UNREACHABLE is never in a dead letter: its messages wait.
    """

    EMPTY = "empty"
    NOT_JSON = "not-json"
    NOT_AN_OBJECT = "not-an-object"
    NOT_PROTOBUF = "not-protobuf"
    PARSER_ERROR = "parser-error"
    DUPLICATE_KEY = "duplicate-key"
    UNKNOWN_FIELD = "unknown-field"
    BAD_TOPIC = "bad-topic"
    FORBIDDEN_TOPIC = "forbidden-topic"
    BAD_MESSAGE = "bad-message"
    BAD_DUE_TIME = "bad-due-time"
    TOO_FAR = "too-far"
    BAD_KEY = "bad-key"
    BAD_HEADERS = "bad-headers"
    BAD_ID = "bad-id"
    BAD_CANCEL = "bad-cancel"
    BAD_ENCODING = "bad-encoding"
    UNREADABLE = "unreadable"
    BAD_EXPIRY = "bad-expiry"
    BAD_RECURRENCE = "bad-recurrence"
    UNKNOWN_TOPIC = "unknown-topic"
    NOT_AUTHORIZED = "not-authorized"
    UNREACHABLE = "unreachable"
    BROKER_ERROR = "broker-error"
    TOO_LARGE = "too-large"
    REFUSED = "refused"
    TOO_LATE = "too-late"
    FORBIDDEN = "forbidden"
    QUOTA = "quota"
    EXPIRED = "expired"
    PAYLOAD_LOST = "payload-lost"
    OUTCOME_UNKNOWN = "outcome-unknown"
    WAS_INVALID = "was-invalid"


MAY_COME_BACK = frozenset(
    {Reason.UNKNOWN_TOPIC, Reason.NOT_AUTHORIZED, Reason.UNREACHABLE, Reason.BROKER_ERROR}
)
"""Reasons that depend on the target, which may take the message later."""

NOT_ADMITTED = frozenset({Reason.FORBIDDEN, Reason.QUOTA})
"""Reasons that depend on what the operator allows the caller."""

UNDELIVERABLE = (
    MAY_COME_BACK
    | NOT_ADMITTED
    | {Reason.TOO_LARGE, Reason.REFUSED, Reason.PAYLOAD_LOST, Reason.OUTCOME_UNKNOWN}
)
"""Reasons for a request that is valid and has replaced others, which one that is TOO_LATE has not."""

EVIDENT = frozenset(Reason) - UNDELIVERABLE - {Reason.TOO_LATE, Reason.EXPIRED, Reason.WAS_INVALID}
"""Reasons that a record alone shows, whenever it is read."""


OUTCOME_UNKNOWN = (
    "it may have been delivered: the receipts of that time were removed from Kafka before they "
    "were read; replay it if it was not delivered"
)


class Request(NamedTuple):
    """Deliver `message` to the topic `target` at `due_ms`, and again if `recurs` says when."""

    target: str
    message: bytes | None
    due_ms: int
    key: bytes | None
    headers: Headers
    caller: str | None
    caller_id: str | None
    expires_ms: int | None
    recurs: str | None = None


class Cancel(NamedTuple):
    """Do not deliver the pending request last made under `caller_id`, or the one with this `id`."""

    caller_id: str | None
    id: str | None = None


class Invalid(NamedTuple):
    """A record that blackbox cannot act on; `detail` names the value and the remedy."""

    reason: Reason
    detail: str


@lru_cache(maxsize=4096)
def id_prefix(shard: Shard) -> str:
    """The first 19 characters of an id. Raises ValueError for a partition above 1,048,575."""
    if not 0 <= shard.partition <= MAX_PARTITION:
        raise ValueError(f"{shard}: partition must be 0 to {MAX_PARTITION} to fit into an id")
    topic = int.from_bytes(hashlib.sha256(shard.topic.encode()).digest()[:5], "big")
    high, low = divmod(shard.partition, 1 << 12)
    front = f"{topic << 8 | high:012x}"
    return f"{front[:8]}-{front[8:]}-8{low:03x}-"


def request_id(shard: Shard, offset: int) -> str:
    """The UUIDv8 (RFC 9562) of the request at this place; the same record always has the same id.

    40 bits of SHA-256 of the topic, 20 bits partition, 62 bits offset: the last 16 hex digits
    without the variant bit are the request's member in the index.
    """
    if not 0 <= offset <= MAX_OFFSET:
        raise ValueError(f"{shard}: offset {offset} must be 0 to {MAX_OFFSET} to fit into an id")
    return id_prefix(shard) + id_suffix(offset)


def id_suffix(offset: int) -> str:
    """The last 17 characters of an id."""
    if offset < 1 << 48:  # the usual ones, in half of the time
        return f"8000-{offset:012x}"
    return f"{offset >> 48 | 0x8000:04x}-{offset & 0xFFFF_FFFF_FFFF:012x}"


def locate(text: str, topics: list[str]) -> tuple[Shard, int]:
    """The shard and offset that an id names, given the request topics it may belong to.

    Raises ValueError when `text` is not an id made by blackbox or belongs to none of the topics.
    """
    try:
        parsed = UUID(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a UUID; expected an id that blackbox assigned") from None
    if parsed.version != 8:
        raise ValueError(f"{text!r} is a UUIDv{parsed.version}, not an id made by blackbox (v8)")
    value = parsed.int
    partition = (value >> 80 & 0xFF) << 12 | value >> 64 & 0xFFF
    offset = value & MAX_OFFSET
    # an id has only a hash of its topic: the whole is made again and compared
    for topic in topics:
        if request_id(Shard(topic, partition), offset) == str(parsed):
            return Shard(topic, partition), offset
    raise ValueError(f"{text!r} does not belong to any of the request topics {', '.join(topics)}")


_SOURCE = re.compile(r"([A-Za-z0-9._-]{1,249})/([0-9]{1,7})@([0-9]{1,19})")


def placed(text: str) -> tuple[Shard, int] | None:
    """The shard and offset that a place such as `TB/3@1234` names; None for any other text."""
    found = _SOURCE.fullmatch(text)
    if found is None:
        return None
    shard, offset = Shard(found[1], int(found[2])), int(found[3])
    return (shard, offset) if shard.partition <= MAX_PARTITION and offset <= MAX_OFFSET else None


def offset_in(shard: Shard, text: str) -> int | None:
    """The offset of the request that an id names; None for another shard's, or for text that is not an id."""
    try:
        found, offset = locate(text, [shard.topic])
    except ValueError:
        return None
    return offset if found == shard else None


def member(offset: int) -> bytes:
    """A request's name in its shard's index: 16 hex digits."""
    # Redis orders equal scores by text, so requests of one due time stay in journal order
    return b"%016x" % offset


class Second(NamedTuple):
    """A counter, such as that of a caller's requests, and its second, unix time, by which clock."""

    kind: str
    name: str
    at_s: int
