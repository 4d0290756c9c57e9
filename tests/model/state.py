"""One shard at one moment: its two journals, its index in Redis, and the memory of two owners.

Sets of requests are bit masks. Times are not numbers: a request is due, or it is not yet due.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from blackbox.core.plan import Positions

NOWHERE = -1
NOBODY = -1


class Record(StrEnum):
    """A record of the request topic. All that have a caller id share the same one.

    A carried record replaces a cold request. It counts if that is cold then; a replacement
    by id if the request that it replaces is pending.
    """

    REQUEST = "a request"
    NAMED = "a named request"
    CANCEL = "a cancel"
    GAP = "a gap"
    REPLACES_0 = "a replacement of 0 by its id"
    REPLACES_1 = "a replacement of 1 by its id"
    NAMED_REPLACES_0 = "a named replacement of 0 by its id"
    COLD = "a named cold request"
    PROMOTES_0 = "0 carried into the index"
    PROMOTES_1 = "1 carried into the index"
    RENEWS_0 = "0 carried, and still cold"
    CANCELS_0 = "a cancel of 0 by its id"


class Step(StrEnum):
    """The next step of an owner, with its number in the verbs and its name in the code."""

    CONFIRM = "R1 asks the group (confirm)"
    FENCE = "R1 fences earlier owners (ShardWriter.open)"
    WITNESS = "R2 reads the positions, looks at the last receipt (missing)"
    BARRIER = "R3 commits a barrier (commit_barrier)"
    BEGIN = "O1 empties the index, begins it at the mark (begin)"
    REBUILD = "O3 takes in the next request, but not what has ended"
    FINISH = "O4 moves the position receipts to the barrier"
    APPLY = "R4 applies the next receipts (settle)"
    CATCH_UP = "R5 takes in the next request (apply)"
    DUE = "D1 reads positions and what is due (ShardIndex.due)"
    PRODUCE = "D2 begins, produces and flushes (ShardWriter.flush)"
    RECEIPT = "D3 produces the receipt (ShardWriter.commit)"
    COMMIT = "D4 commits (Transactions.commit)"
    WATCH = "D5 watches and compares the positions (settle)"
    REMOVE = "D5 removes, and moves the position receipts (EXEC)"
    READ = "I1 reads a batch (RequestReader.read)"
    LOOK = "I2 watches and compares the position (ShardIndex.store)"
    STORE = "I3 stores, and moves the position requests (EXEC)"
    APART = "another process takes in what there is"


class Index(NamedTuple):
    """A shard in Redis: the two positions, and the content that they define. `holder` is the request with the caller id.

    letters -- the entries that are late replacements by id
    in_flight -- what is being delivered
    token   -- the owner that opened it last: an owner's walk ends with its memory, so a name is enough
    rebuild -- whose rebuild is not finished
    early   -- replacements not yet read whose request is already removed
    moved   -- the record that carried request 0 into the index, if any
    ended   -- the record that cancelled request 0 by its id, wherever it was then
    """

    requests: int = 0
    receipts: int = 0
    entries: int = 0
    holder: int = NOBODY
    skip: int = 0
    cold: int = 0
    letters: int = 0
    in_flight: int = 0
    token: int = NOBODY
    rebuild: int = NOBODY
    known_from: int = 0
    verdicts_below: int = 0
    ignored: int = 0
    early: int = 0
    moved: int = NOWHERE
    ended: int = NOWHERE


class Mark(NamedTuple):
    """Where a rebuild may start: `requests` is L, `receipts` R, `verdicts_below` V. `pairs` are (q, r)."""

    requests: int
    receipts: int
    verdicts_below: int
    pairs: tuple[tuple[int, int], ...] = ()


class Receipt(NamedTuple):
    """A committed receipt; one without outcomes, ignored records and a mark is a barrier.

    dead    -- messages that are dead letters
    lost    -- messages that it names and that were aborted
    ended   -- messages whose request was cancelled or replaced before its dispatch started
    ignored -- conditional records that did not count
    """

    delivered: int = 0
    void: int = 0
    lost: int = 0
    ended: int = 0
    dead: int = 0
    ignored: int = 0
    mark: Mark | None = None


class Walk(NamedTuple):
    """The part of an index that an owner's walk has read.

    requests, receipts -- the positions at its start
    todo               -- parts that it has not read yet
    low                -- the lowest request seen
    verdicts_below, ignored      -- the position requests after all parts, and the records ignored by then
    """

    requests: int
    receipts: int
    todo: int
    low: int
    verdicts_below: int = NOWHERE
    ignored: int = 0
    is_connected: bool = True


class Owner(NamedTuple):
    """The memory of an owner.

    step               -- the next step of recovery or dispatch
    requests, receipts -- the positions it last saw
    position, taking   -- where its reader is, once the shard is open; the batch that was read
    watched            -- the index as intake, or D5, saw it at its WATCH
    batch, ended       -- what it delivers; which of them had ended before
    ahead, ahead_ended -- the next batch, read at D2; which of it intake has ended since
    end                -- in recovery, how far it reads: receipts, then requests; in dispatch, the
                          position that its receipt reaches
    missing, is_again  -- what R2 did not find; whether this is another attempt
    dead               -- which of the batch become dead letters
    base               -- where the index starts
    gone               -- in a rebuild, what has ended
    walk, telling      -- for the next mark; what the receipt before the next step D5 records
    """

    step: Step = Step.CONFIRM
    is_connected: bool = False
    requests: int = 0
    receipts: int = 0
    position: int = NOWHERE
    taking: tuple[int, int] | None = None
    watched: Index | None = None
    batch: int = 0
    ended: int = 0
    ahead: int = 0
    ahead_ended: int = 0
    end: int = 0
    missing: int = 0
    is_again: bool = False
    dead: int = 0
    base: Mark | None = None
    gone: int = 0
    walk: Walk | None = None
    telling: int = 0

    @property
    def intake_is_watching(self) -> bool:
        """Intake and dispatch share a connection: one waits for the other."""
        return self.watched is not None and self.step is not Step.REMOVE

    def expects(self, index: Index | None) -> bool:
        """Whether the positions may be those that this owner last saw, advanced by others' intake."""
        return (
            index is not None
            and index.receipts == self.receipts
            and index.requests >= self.requests
        )


CLOSED = Owner()
START = Positions(0, 0)


class State(NamedTuple):
    """The whole state.

    written -- how many request records there are
    due     -- due requests
    taken   -- how far requests were ever stored
    log     -- the receipts; what consumers of the targets see follows from them
    fence   -- whose producer the shard's transactional.id belongs to
    redis   -- the index; None: Redis is empty
    past    -- what Redis may be rolled back to, oldest first
    group   -- the owner of the shard
    faults  -- how many there may still be
    counted -- conditional records that counted when they were first stored
    starts  -- the first offset that each journal still has
    walks   -- how many more are allowed; whether Redis may be rolled back at all
    """

    written: int
    due: int
    taken: int
    log: tuple[Receipt, ...]
    fence: int
    redis: Index | None
    past: tuple[Index | None, ...]
    group: int
    owners: tuple[Owner, Owner]
    faults: int
    counted: int = 0
    starts: Positions = START
    walks: int = 0
    does_go_back: bool = True

    def with_owner(self, who: int, owner: Owner) -> State:
        a, b = self.owners
        return self._replace(owners=(owner, b) if who == 0 else (a, owner))

    def in_doubt(self, who: int) -> State:
        """The owner forgets everything, and opens the shard again if it is still its own."""
        return self.with_owner(who, CLOSED)

    def with_index(self, index: Index) -> State:
        """One more write that Redis can lose."""
        remembers = self.does_go_back and self.faults > 0 and index != self.redis
        past = (*self.past, self.redis) if remembers else self.past
        return self._replace(redis=index, past=past, taken=max(self.taken, index.requests))

    def after_a_fault(self) -> State:
        left = self.faults - 1
        return self._replace(faults=left, past=self.past if left else ())


def below(offset: int) -> int:
    return (1 << offset) - 1


def mask(offsets: Iterable[int]) -> int:
    return sum(1 << offset for offset in offsets)


def members(offsets: int) -> list[int]:
    return [at for at in range(offsets.bit_length()) if offsets >> at & 1]


def described(index: Index | None) -> str:
    """An index in a few words: (positions) [entries]."""
    if index is None:
        return "nothing"
    held = "" if index.holder == NOBODY else f" name={index.holder}"
    more = "".join(
        f" {name}={members(found)}"
        for name in ("skip", "cold", "letters", "in_flight", "ignored", "early")
        if (found := getattr(index, name))
    )
    begun = (
        f" from {index.known_from}, verdicts_below {index.verdicts_below}"
        if index.verdicts_below
        else ""
    )
    rebuilt = "" if index.rebuild == NOBODY else f" rebuilt by {'AB'[index.rebuild]}"
    positions = f"({index.requests}, {index.receipts})"
    return f"{positions} {members(index.entries)}{held}{more}{begun}{rebuilt}"
