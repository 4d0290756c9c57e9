"""What stops a verb: doubts, which only recovery can settle, and a full index, which only time can."""

from __future__ import annotations


class Doubt(Exception):
    """A shard's state is not what its owner last saw, or its outcome is unknown: stop and recover."""


class LabelsMoved(Doubt):
    """The labels in Redis are not the ones this owner last saw: Redis went back, or another owner is here."""


class IndexLost(Doubt):
    """The connection to Redis is gone, and with it the certainty that it is the same Redis as before."""


class JournalLost(Doubt):
    """Kafka did not answer in time or refused; what was under way has an unknown outcome."""


class NotAllowed(JournalLost):
    """Kafka's ACLs lack a right; the text says which one to grant."""


class Fenced(Doubt):
    """Another owner opened this shard; everything this owner had under way is void."""


class Refused(Doubt):
    """The broker refused some of a transaction's records, so that all of it was aborted.

    `suspects` maps the offset of each request whose record failed to (reason word, detail).
    """

    def __init__(self, suspects: dict[int, tuple[str, str]]) -> None:
        super().__init__(f"the broker refused {len(suspects)} records; the transaction was aborted")
        self.suspects = suspects


class IndexFull(Exception):
    """Redis has no memory left; nothing was stored, and the records stay in Kafka until it has."""
