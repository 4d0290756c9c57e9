"""What the owners of a shard keep to, what they find in its request topic, and how they change an index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tests.model.journals import Records, planned
from tests.model.state import NOBODY, Index, Owner, State, below


class Rule(StrEnum):
    """What the verbs keep to. They can be told to do without."""

    POSITION = "a batch begins where it was read from, not at its first record"
    INTAKE_LABEL = "I2 stops when the label is below the batch"
    ONE_MULTI = "I3 moves the label in one MULTI with the entries"
    DUE_ONLY = "D1 takes only what is due"
    DUE_LABELS = "D1 compares the labels with those last seen"
    AHEAD = "a batch read ahead is dropped when intake has removed something since"
    COMMIT_FIRST = "D5 removes after the commit, not before"
    REMOVAL_LABELS = "D5 compares the labels with those last seen"
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


@dataclass(frozen=True, slots=True)
class Terms:
    """`limit` is the most that one batch delivers; `without` are the rules that nobody keeps to."""

    records: Records
    limit: int
    without: frozenset[Rule]

    def keeps(self, rule: Rule) -> bool:
        return rule not in self.without

    def is_fenced(self, state: State, who: int) -> bool:
        return state.fence != who and self.keeps(Rule.SHARD_ID)

    def can_reach_redis(self, owner: Owner) -> bool:
        return owner.is_connected or not self.keeps(Rule.NO_RECONNECT)

    def watches(self, owner: Owner) -> bool:
        """A WATCH ends with the connection it was sent over."""
        return owner.is_connected and self.keeps(Rule.WATCH)

    def stored(self, state: State, index: Index, seen: Index, start: int, end: int) -> State:
        """What I3 and R5 make of an index, given what they saw of it at their WATCH."""
        puts, ended, holder = planned(self.records, seen, start, end)
        if not self.keeps(Rule.ONE_MULTI):
            state = state.with_index(index._replace(requests=end))
        return state.with_index(
            Index(
                requests=end,
                receipts=index.receipts,
                entries=(index.entries | puts) & ~ended,
                holder=holder if holder != seen.holder else index.holder,
                skip=index.skip & ~below(end),
            )
        )

    def settled(self, index: Index, seen: Index, ended: int, label: int) -> Index:
        """What R4 and D5 make of an index, given what they saw of it at their WATCH."""
        early = ended & ~below(seen.requests)
        is_freed = seen.holder != NOBODY and ended >> seen.holder & 1
        return Index(
            requests=index.requests,
            receipts=label,
            entries=index.entries & ~(ended & ~early),
            holder=NOBODY if is_freed else index.holder,
            skip=index.skip | (early if self.keeps(Rule.SKIP) else 0),
        )
