"""The rules of the owners of a shard, the content of its request topic, and the changes of an index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tests.model.journals import NAMED_BY, Records, of_kind, planned
from tests.model.state import NOBODY, NOWHERE, Index, Owner, State, below


class Rule(StrEnum):
    """The rules of the verbs. Each can be switched off."""

    POSITION = "a batch begins where it was read from, not at its first record"
    INTAKE_LABEL = "I2 stops when the position is below the batch"
    ONE_MULTI = "I3 moves the position in one MULTI with the entries"
    DUE_ONLY = "D1 takes only what is due"
    DUE_POSITIONS = "D1 compares the positions with those last seen"
    AHEAD = "a batch read ahead is dropped when intake has removed something since"
    COMMIT_FIRST = "D5 removes after the commit, not before"
    REMOVAL_POSITIONS = "D5 compares the positions with those last seen"
    WATCH = "EXEC does nothing when a watched key has changed"
    NO_RECONNECT = "a lost connection to Redis is a doubt, not connected again in silence"
    SHARD_ID = "the transactional.id is the shard's, not the process's"
    FENCE_FIRST = "R1 fences before R2 looks at receipts"
    WITNESS = "R2 looks whether the messages of the last receipt are there"
    BARRIER = "R3 commits a barrier"
    VOID = "R3 records what R2 did not find"
    BETWEEN = "R4 goes round again when a receipt came in before the barrier"
    SKIP = "R4 keeps removals of requests that are not read yet in skip"
    CATCH_UP = "R5 reads the requests to their end before anything is delivered"
    LEAVING = "a replacement by id waits for a delivery that is under way"
    APART = "another process judges conditional records only when all receipts are applied"
    TOKEN = "W2 compares the token"
    POSITIONS = "W2 compares the positions"
    CONNECTION = "W2 ends when the connection is lost"
    POSITIONS_FIRST = "W1 reads (q, r) before anything else"
    PENDING = "L is not above what is pending"
    CAUGHT_UP = "W1 waits until all requests are read that any receipt names"
    PAIRS = "R is that of a pair with its q at or below L"
    VERDICTS_LAST = "V is read after all parts"
    VERDICTS = "V is the position of the requests, not L"
    TELLING = "records that did not count are named before a mark"
    UNKNOWN = "what is at or above V and names a request below the index does not count"
    COMMITTED = "journals are trimmed below a committed mark only"
    USABLE = "a mark below a journal's start is passed over"
    BELOW_START = "an index below a journal's start is begun at the mark"
    TOLD_FIRST = "an index that is begun knows what receipts tell"
    STAYS = "the position receipts stays at R until O4"
    WAITS = "nobody else stores while an index is rebuilt"
    REBUILDER = "O3 ends when the rebuild is another owner's"
    ADOPTED = "a rebuild that is taken over is rid of what has ended since"
    ENDED = "a cancel by the first id is kept until what it ends is written again"
    EARLY = "what a replacement names that has no room is ended at once"
    EARLY_COUNTS = "and the replacement counts when it is read"
    EARLY_READ = "W1 waits until such a replacement is read"
    GONE_SKIP = "O4 keeps removals of requests that are not read yet in skip"


@dataclass(frozen=True, slots=True)
class Terms:
    """`limit` is the most that one batch delivers; `without` are the rules that are switched off.

    `is_apart`: intake is a process of its own. `is_once`: a batch is delivered in one transaction.
    """

    records: Records
    limit: int
    without: frozenset[Rule]
    is_apart: bool = False
    is_once: bool = True
    has_walks: bool = False

    def token(self, who: int) -> int:
        """Only walks compare it."""
        return who if self.has_walks else NOBODY

    def keeps(self, rule: Rule) -> bool:
        return rule not in self.without

    def is_fenced(self, state: State, who: int) -> bool:
        return state.fence != who and self.keeps(Rule.SHARD_ID) and self.is_once

    def can_reach_redis(self, owner: Owner) -> bool:
        return owner.is_connected or not self.keeps(Rule.NO_RECONNECT)

    def watches(self, owner: Owner) -> bool:
        """A WATCH ends with the connection it was sent over."""
        return owner.is_connected and self.keeps(Rule.WATCH)

    @property
    def conditional(self) -> int:
        return of_kind(self.records, tuple(NAMED_BY))

    def stored(self, state: State, index: Index, seen: Index, start: int, end: int) -> State:
        """The changes of an index by I3, R5 and O3, from the state that they read at their WATCH."""
        known = (
            seen if self.keeps(Rule.UNKNOWN) else seen._replace(verdicts_below=len(self.records))
        )
        plan = planned(self.records, known._replace(in_flight=0, token=NOBODY), start, end)
        if not self.keeps(Rule.ONE_MULTI):
            state = state.with_index(index._replace(requests=end))
        first = plan.counted & ~below(state.taken)
        return state._replace(counted=state.counted | first).with_index(
            index._replace(
                requests=end,
                entries=index.entries & ~plan.ended | plan.entries & ~seen.entries,
                holder=plan.holder if plan.holder != seen.holder else index.holder,
                skip=index.skip & ~below(end),
                cold=plan.cold,
                letters=index.letters & ~plan.ended | plan.letters & ~seen.letters,
                ignored=index.ignored | plan.ignored,
                early=index.early & ~below(end),
                moved=plan.moved,
                ended=plan.was_ended if self.keeps(Rule.ENDED) else NOWHERE,
            )
        )

    def settled(self, index: Index, seen: Index, ended: int, position: int) -> Index:
        """The changes of an index by R4 and D5, from the state that they read at their WATCH."""
        early = ended & ~below(seen.requests)
        is_freed = seen.holder != NOBODY and ended >> seen.holder & 1
        gone = ended & ~early
        return index._replace(
            receipts=position,
            entries=index.entries & ~gone,
            holder=NOBODY if is_freed else index.holder,
            skip=index.skip | (early if self.keeps(Rule.SKIP) else 0),
            letters=index.letters & ~gone,
            in_flight=0,
        )
