"""The schema of Redis: every key, its type and what it holds; `make docs` writes `docs/redis.md` from it.

The hash tag keeps all keys of a shard in one Redis Cluster slot. A member is the offset of a request
record, as 16 hex digits. The docstring of a key says its type first.
"""

from __future__ import annotations

from blackbox.records.request import Shard

PREFIX = "blackbox:"
# A member of `due` at +inf, not a request. Redis removes empty keys, so only this member tells an
# index without entries from one that lost the key.
SENTINEL = b"~"

# The same for `ids`: a field that is not UTF-8, and so never a caller's id.
IDS_SENTINEL = b"\xff"


class Keys:
    """The keys of one shard, as bytes ready to be packed."""

    prefix: bytes
    due: bytes
    """sorted set: member -> epoch ms: the due time, or the next attempt. A parked request has a score above
    2^43, which belongs to its target. The member `~` at +inf shows that the key was not lost.

    written -- intake, dispatch, recovery
    read    -- dispatch, recovery, the walk, look-ups
    """
    ids: bytes
    """hash: caller id -> member of the pending request that has it, even of a cold one. The field `\\xff`
    keeps the key in existence.

    written -- intake, dispatch, recovery
    read    -- intake, dispatch, look-ups
    """
    state: bytes
    """hash: what the index says of itself; see below

    written -- intake, dispatch, recovery
    read    -- intake, dispatch, recovery, the walk, look-ups

    format      -- the version of this schema
    requests    -- position: the next offset of the request topic to be read
    token       -- random, new with each opening of the shard
    cluster_id  -- Kafka's id of the cluster that the index belongs to
    topic_id    -- Kafka's id of the request topic
    receipts_id -- Kafka's id of the receipts topic
    group       -- the consumer group
    rebuild     -- the token of the opening that rebuilds the index; absent when that is done
    known_from  -- the offset at which the index begins: it has no information on earlier requests
    verdicts_below -- an offset. Below it, conditional records about requests that the index does not know
                   counted, unless they are in `ignored`
    judged      -- callers' rules were applied to the requests below this offset
    unknown     -- epoch ms: the outcomes of requests that were due before this time may be missing,
                   because receipts were removed
    gap         -- [from, up to, an offset as in `verdicts_below`]: requests that retention removed
                   before they were read
    gone        -- [from, up to]: requests that retention removed, until an opening has reported them
    tail        -- [offset, timestamp, checksum, leader epoch] of the last request record read
    doubtful    -- [[offset, outcome, topic/partition, offset there, topic id], …]: requests in doubt
    mark        -- [requests, receipts, pairs]: the last low-water mark
    largest     -- the size of the largest payload ever stored, in bytes
    cold        -- the number of requests in the key `cold`, which exists if this is above 0
    renewed     -- an offset: requests of the cold tier that were renewed were first written below it
    named       -- 1: `ids` must exist
    moved       -- 1: `moved` must exist
    ended       -- 1: `ended` must exist
    refused     -- 1: `refused` must exist
    ahead       -- an offset: `skip` must exist if this is above the segment of `requests`
    """
    receipts: bytes
    """string: position: the next offset of the receipts topic to be read

    written -- dispatch, recovery
    read    -- intake, dispatch, recovery, the walk
    """
    cold: bytes
    """hash: segment -> bitmap of its 65,536 offsets: the requests of the cold tier

    written -- intake
    read    -- intake, promotion, the walk, look-ups
    """
    refused: bytes
    """hash: `<segment>:<cause>` -> bitmap: large requests that were refused for this cause and have no payload;
    their dead letters are made from their records in Kafka. A cause is `invalid`, `too-late` (a replacement by
    id), or the rule of its caller. The field `~` is empty and keeps the key in existence.

    written -- intake; dispatch removes what is below the low-water mark
    read    -- intake, dispatch, look-ups
    """
    skip: bytes
    """hash: segment -> bitmap: requests at or above the position `requests` that have ended already

    written -- dispatch, recovery; intake removes segments that it has passed
    read    -- intake, the walk
    """
    ignored: bytes
    """sorted set: member -> its offset: conditional records that did not count, until a receipt names them

    written -- intake, recovery; dispatch removes them
    read    -- intake, recovery, and dispatch for the low-water mark
    """
    early: bytes
    """sorted set: member -> its offset: replacements by id that intake has not read yet. They count, although
    the requests that they replace were removed already, while Redis was full

    written -- recovery; intake removes them
    read    -- intake, the walk
    """
    moved: bytes
    """sorted set: member of a request -> offset of the carried record by which it came into the index. The
    member `~` is as in `due`.

    written -- intake; dispatch removes them
    read    -- intake, recovery
    """
    ended: bytes
    """sorted set: member of a cold request -> offset of the cancel by id that ended it. The member `~` is as
    in `due`.

    written -- intake; dispatch removes what is below the low-water mark
    read    -- intake, look-ups
    """
    unwanted: bytes
    """sorted set: member -> its offset: requests in doubt that were cancelled or replaced; they end if
    their message does not exist

    written -- intake, recovery; dispatch removes them
    read    -- dispatch, `rebind`
    """
    in_flight: bytes
    """hash: token -> the members of the batch that is being delivered, concatenated

    written -- dispatch
    read    -- intake, before it replaces a request by id; look-ups and cancels over HTTP and the command line
    """
    paused: bytes
    """hash: target -> since when it is paused, epoch ms

    written -- `pause` and `resume`, over HTTP and the command line
    read    -- dispatch, the API, `status`
    """
    callers: bytes
    """sorted set: callers that have a key `of:<caller>`, with the score 0

    written -- intake
    read    -- recovery
    """

    def __init__(self, shard: Shard) -> None:
        self.prefix = f"{PREFIX}{{{shard}}}:".encode()
        self.due = self.prefix + b"due"
        self.ids = self.prefix + b"ids"
        self.state = self.prefix + b"state"
        self.receipts = self.prefix + b"receipts"
        self.cold = self.prefix + b"cold"
        self.refused = self.prefix + b"refused"
        self.skip = self.prefix + b"skip"
        self.ignored = self.prefix + b"ignored"
        self.early = self.prefix + b"early"
        self.moved = self.prefix + b"moved"
        self.ended = self.prefix + b"ended"
        self.unwanted = self.prefix + b"unwanted"
        self.in_flight = self.prefix + b"in-flight"
        self.paused = self.prefix + b"paused"
        self.callers = self.prefix + b"callers"

    def message(self, member: bytes) -> bytes:
        """string: the payload of an entry, set with `EX`: a line of JSON, then the bytes of the message. See
        "Expiry".

        written -- intake, dispatch when it postpones
        read    -- dispatch, look-ups
        """
        return self.prefix + b"msg:" + member

    def of(self, caller: str) -> bytes:
        """sorted set: member -> due time, epoch ms, of the pending requests of a caller with `most_pending`

        written -- intake, dispatch
        read    -- intake
        """
        return self.prefix + b"of:" + caller.encode()


def counts(kind: str, name: str) -> bytes:
    """hash: unix second -> how many in this second: `requests` of a caller, or `messages` to a target,
    named `<cluster id>/<target>`.

    Some 600 to 1,200 seconds are kept.

    written -- intake, for callers with a quota; dispatch, for targets with a rate
    read    -- the same
    """
    return f"{PREFIX}{{{kind}:{name}}}:counts".encode()
