"""A shard's index in Redis: due times, payloads, caller ids, and the two positions that define them.

Entries are the requests below `positions.requests` minus the removals below `positions.receipts`.
Other keys hold:

- `skip`: removals that were read although their request is not in the index yet;
- `cold`: requests that are due beyond the horizon and so are not entries;
- `ignored`: conditional records that did not count, as long as no receipt says so;
- `early`: replacements that wait in Kafka for room, though what they replace is removed already;
- `moved`: by which records requests of the cold tier came into the index;
- `ended`: requests of the cold tier that a cancel by id has ended while only Kafka knew their
  record;
- `in-flight`: requests whose delivery is under way;
- `unwanted`: requests in doubt that something else ends if they were not delivered.

Data and positions change in one MULTI. So a Redis that loses its last writes loses both, and the
journals restore them.

Intake and dispatch of one shard may be two processes. Each position has a key of its own, which its
writer watches, so that neither process makes the other one retry. Intake moves `requests`, and
watches the `skip` it read. Settling moves `receipts`, and watches `requests` only for what depends
on it.
"""

from __future__ import annotations

from blackbox.index.dispatch_changes import DispatchChanges
from blackbox.index.intake_changes import IntakeChanges
from blackbox.index.opening_changes import OpeningChanges
from blackbox.index.walk import Walk


class ShardIndex(OpeningChanges, IntakeChanges, DispatchChanges):
    """One owner's access to a shard's index. Every method is atomic and safe to call from any thread.

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
