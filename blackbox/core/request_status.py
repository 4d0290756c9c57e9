"""The status of a request: the values of a look-up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from blackbox.records.request import Shard, request_id

State = Literal[
    "pending", "delivered", "dead", "expired", "invalid", "ended", "unread", "cancel", "tombstone",
    "unknown", "over", "undetermined",
]  # fmt: skip


NO_REQUEST = ("cancel", "tombstone")
DEAD: tuple[Literal["dead", "expired", "invalid"], ...] = ("dead", "expired", "invalid")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record, printed as `orders/3@88`."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request and what became of it; what does not apply or is not known is None.

    ended   -- neither pending nor in a receipt: cancelled, or replaced by a later request
    unread  -- in Kafka, and not yet in the index
    cancel  -- the record is not a request, it cancels one
    tombstone -- the record is not a request, blackbox wrote it when a schedule had ended
    unknown -- there is no such record
    over    -- not pending any more; how it ended was not found within the limit of a look-up
    undetermined -- whether it is pending was not found within that limit

    `is_cold`: it waits in Kafka, out of Redis. `carried` is the record that took its place.
    """

    id: str
    source: str
    state: State
    caller: str | None = None
    caller_id: str | None = None
    target: str | None = None
    due_ms: int | None = None
    next_try_ms: int | None = None
    attempts: int | None = None
    at_ms: int | None = None
    place: Place | None = None
    reason: str | None = None
    detail: str | None = None
    is_cold: bool | None = None
    carried: str | None = None

    def for_request(self, shard: Shard, offset: int) -> RequestStatus:
        """The same status for the request whose place this one took."""
        taken = self.carried or self.source
        source = shard.source(offset)
        return replace(self, id=request_id(shard, offset), source=source, carried=taken)
