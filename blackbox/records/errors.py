"""What stops a verb: doubts, which only recovery can settle, and a full index, which only time can."""

from __future__ import annotations


class RecoveryRequired(Exception):
    """A shard's state is not what its owner last saw, or its outcome is unknown: stop and recover."""


class PositionsMoved(RecoveryRequired):
    """The positions in Redis are not the ones this owner last saw: Redis went back, or another owner is here."""


class ForeignIndex(RecoveryRequired):
    """The index in Redis belongs to something else: a newer version, another topic, cluster or group."""


class IndexLost(RecoveryRequired):
    """The connection to Redis is gone, and with it the certainty that it is the same Redis as before."""


class JournalLost(RecoveryRequired):
    """Kafka did not answer in time or refused; what was under way has an unknown outcome."""


class JournalSilent(JournalLost):
    """Kafka takes the question and never answers it, which costs whoever waits for more than one thing time."""


class NotAllowed(JournalLost):
    """Kafka's ACLs lack a right; the text says which one to grant."""


class Fenced(RecoveryRequired):
    """Another owner opened this shard; everything this owner had under way is void."""


class TooEarly(Exception):
    """By Kafka's clock a batch was not due yet, so that all of it was aborted; nothing is in doubt."""


class Refused(RecoveryRequired):
    """Some of a transaction's records cannot be written, so that all of it was aborted.

    `suspects` maps the offset of each request they are of to (reason word, detail).
    """

    def __init__(self, suspects: dict[int, tuple[str, str]]) -> None:
        _, detail = next(iter(suspects.values()), ("", "no record told why"))
        super().__init__(
            f"{len(suspects)} records could not be written, the transaction was aborted: {detail}"
        )
        self.suspects = suspects


class IndexFull(Exception):
    """Redis has no memory left; nothing was stored, and the records stay in Kafka until it has."""
