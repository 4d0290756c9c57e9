"""The errors that stop a verb: those that require recovery, and a full index, which only time can resolve."""

from __future__ import annotations


class RecoveryRequired(Exception):
    """A shard's state is not what its owner last saw, or its outcome is unknown: stop and recover."""


class PositionsMoved(RecoveryRequired):
    """The positions in Redis are not those this owner last saw: Redis went back, or another owner took over."""


class ForeignIndex(RecoveryRequired):
    """The index in Redis belongs to something else: a newer version, another topic, cluster or group."""


class IndexLost(RecoveryRequired):
    """The connection to Redis is lost: a new one may not reach the same Redis as before."""


class JournalLost(RecoveryRequired):
    """Kafka did not answer in time or refused; what was under way has an unknown outcome."""


class NotInTime(JournalLost):
    """Kafka did not acknowledge everything in time, perhaps because it is too much for the connection."""


class RecordsRemoved(JournalLost):
    """Kafka has removed the records that were wanted; the first one that it still has is at `first`."""

    def __init__(self, text: str, first: int) -> None:
        super().__init__(text)
        self.first = first


class JournalSilent(JournalLost):
    """Kafka accepts a question and never answers it, which delays code that waits for several answers."""


class RecordHidden(JournalLost):
    """An open transaction of another producer hides a record; a new client would not see it either."""


class NotAllowed(JournalLost):
    """Kafka's ACLs lack a permission; the text says which one to grant."""


class Fenced(RecoveryRequired):
    """Another owner opened this shard; everything this owner had under way is void."""


# not RecoveryRequired: the outcome is known, and the writer can be used again
class TooEarly(Exception):
    """By Kafka's clock a batch was not due yet, and all of it was aborted; nothing is in doubt."""


class Refused(RecoveryRequired):
    """Some of a transaction's records cannot be written, and all of it was aborted.

    `suspects` maps the offset of the request of each such record to (reason word, detail). `is_timeout`: the
    brokers did not take some of them in time.
    """

    def __init__(self, suspects: dict[int, tuple[str, str]], *, is_timeout: bool = False) -> None:
        _, detail = next(iter(suspects.values()), ("", "no reason was reported"))
        super().__init__(
            f"{len(suspects)} records could not be written, the transaction was aborted: {detail}"
        )
        self.suspects = suspects
        self.is_timeout = is_timeout


# not RecoveryRequired: another opening would find no more room
class IndexFull(Exception):
    """Redis has no memory left; nothing was stored, and the records stay in Kafka until there is room."""
