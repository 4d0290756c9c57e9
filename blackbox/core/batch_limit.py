"""The number of due requests that a shard delivers in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BatchLimit:
    """At most `most` requests, and fewer after a delivery that failed because Kafka did not take it in time.

    Kafka's client gives a record up after 15 s, and a transaction is delivered as a whole or not at all.
    On a connection that takes a hundred records in 15 s, a shard with more due ones would never
    deliver any of them. `now` is what a batch may have now. It outlives the session that it failed in.
    """

    most: int = 1000
    now: int = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.most

    def lower(self, count: int) -> None:
        """After a batch of `count` requests that could not be delivered in time."""
        self.now = max(1, min(self.now, count) // 2)

    def rise(self) -> None:
        """After a full batch that was delivered."""
        # slowly: each batch that is too large costs 15 s
        self.now = min(self.most, self.now + 1 + self.now // 8)
