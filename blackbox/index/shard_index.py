"""A shard's index in Redis: due times, payloads, caller ids, and the two positions that define them.

Entries are the requests below `positions.requests` minus the removals below `positions.receipts`;
`keys` lists all keys. Data and positions change in one MULTI. So a Redis that loses its last writes
loses both, and the journals restore them. Intake and dispatch of one shard may be two processes:
each position has a key of its own, so that neither makes the other one retry.
"""

from __future__ import annotations

from blackbox.index.dispatch_changes import DispatchChanges
from blackbox.index.doubt_changes import DoubtChanges
from blackbox.index.intake_changes import IntakeChanges
from blackbox.index.opening_changes import OpeningChanges
from blackbox.index.walk import Walk


class ShardIndex(OpeningChanges, DoubtChanges, IntakeChanges, DispatchChanges):
    """One owner's access to a shard's index. Every method is safe to call from any thread.

    Its parts, each in the module of its name: `OpeningChanges` for recovery, `IntakeChanges` (`store`),
    `DispatchChanges` (`due`, `mark_in_flight`, `settle`) on `PostponingChanges`, `DoubtChanges`; below them
    `Lookups` (reads), `GuardedIndex` (WATCH, MULTI, EXEC) and `CommandBuilder` (commands, not sent).

    Each change is one MULTI or one script, and so atomic, with three exceptions: `outcome_unknown`
    goes through the entries in steps, `mark_in_flight` marks and then checks, and `begin` and `discard`
    remove entries in steps before it. The payloads that `due` returns are read after the due times.

    `removed` grows whenever intake, here or elsewhere, may have replaced or cancelled something.
    Remembers the positions this owner last saw and raises PositionsMoved as soon as Redis has
    others; IndexLost when the connection fails. Both mean: recover with a new ShardIndex.

    `is_behind` says whether Kafka has a receipt at an offset or after it, `topic_id` which topic
    requests are read from. To be given by a process that stores while another one dispatches: the
    index that it sees may be one that went back, or one of another topic.
    """

    def walk(self) -> Walk:
        """A walk along the requests, over a connection of its own."""
        return Walk(self.shard, self.connections, self._token)
