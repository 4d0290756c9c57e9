"""The number of due requests that a shard delivers in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BatchLimit:
    """At most `most` requests, and fewer after a batch that Kafka did not take in time.

    Kafka's client gives up on a record after 15 s, and a transaction is delivered as a whole or not at
    all. On a connection that takes a hundred records in 15 s, a shard with more due ones would never
    deliver any of them. `now` is the limit of the next batch. The shard's owner keeps it when the shard
    is opened again.
    """

    most: int = 1000
    now: int = field(init=False)
    _too_large: int = 0

    def __post_init__(self) -> None:
        self.now = self.most

    def shrink(self, count: int) -> None:
        """After a batch of `count` requests that Kafka did not take in time; one alone says nothing of the size."""
        if count > 1:
            self.now, self._too_large = min(self.now, count // 2), count

    def grow(self) -> None:
        """After a full batch."""
        # slowly where the last one failed: each that is too large costs 15 s
        is_near = self.now < self._too_large <= 2 * self.now
        self.now = min(self.most, self.now + (1 + self.now // 8 if is_near else self.now))
