"""A batch after triage, and how one of its requests waits: parked, or with ever longer delays."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from blackbox.core.parking import LETTERS, band_for, parked_at, waits_for
from blackbox.core.plan import DueEntries, Postponed
from blackbox.records.entry import Entry
from blackbox.records.outgoing import Refusal
from blackbox.records.receipt import Claim
from blackbox.records.request import MAY_COME_BACK, Reason, Record

FIRST_RETRY_MS = 1_000
LONGEST_RETRY_MS = 60_000
ALONE_SPREAD_MS = 50
DOUBTFUL_LATER_MS = 5_000
# Bytes (or one larger record) and offsets per transaction: messages wait for the read from Kafka.
MOST_LETTER_BYTES, MOST_LETTER_SPAN = 16_000_000, 4000

# Refusals of all that is sent there. Any other may be the fault of one record of a batch.
TOPIC_WIDE_REASONS = MAY_COME_BACK - {Reason.BROKER_ERROR}

QUEUED = "waiting behind earlier messages for the same target"


@dataclass(slots=True)
class DueBatch:
    """A batch, each request in one of four places; `parked` maps bands to the targets parked for.

    `records` are those that were read from Kafka already. Those `without_payload` were refused, and get
    none while they are parked.
    """

    ready: dict[int, Entry] = field(default_factory=dict)
    alone: dict[int, Entry] = field(default_factory=dict)
    dead: dict[int, Entry] = field(default_factory=dict)
    postponed: dict[int, Postponed] = field(default_factory=dict)
    parked: dict[int, str] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    without_payload: Collection[int] = frozenset()

    def __bool__(self) -> bool:
        """Whether it has anything for one transaction."""
        return bool(self.ready or self.dead)

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """The entries for one transaction."""
        yield from self.ready.items()
        yield from self.dead.items()

    def offsets(self) -> list[int]:
        return [*self.ready, *self.alone, *self.dead, *self.postponed]

    def take_out(self, offsets: Iterable[int]) -> DueBatch:
        """Take these requests out, as a batch of their own."""
        taken = DueBatch(records=self.records)
        for offset in list(offsets):
            if offset in self.ready:
                taken.ready[offset] = self.ready.pop(offset)
            else:
                taken.dead[offset] = self.dead.pop(offset)
        return taken

    def postpone_spread(self, offset: int, now_ms: int) -> None:
        """Postpone a request, a little later than what was postponed before it."""
        self.postponed[offset] = now_ms + ALONE_SPREAD_MS * (1 + len(self.postponed)), None

    def park_if_possible(
        self, offset: int, entry: Entry, refusal: Refusal, parked: Mapping[int, str]
    ) -> bool:
        """Park a request if possible; return whether it was parked."""
        to = waits_for(entry)
        # dispatch does not look at parked entries, so a message would not expire in time
        if not may_park(to, refusal) or (to != LETTERS and entry.expires_ms):
            return False
        return self.park(offset, entry, refusal[1], parked)

    def park(self, offset: int, entry: Entry, why: str, parked: Mapping[int, str]) -> bool:
        """Park a request; return False if other targets have all bands for it."""
        to = waits_for(entry)
        # of two targets in one band, only one would come out
        band = band_for(to, {**parked, **self.parked})
        if band is None:
            return False
        self.parked[band] = to
        if entry.reason is not None:  # a dead letter's detail is for its reader
            entry = entry._replace(waits=max(1, entry.waits))
        elif entry.waits == 0 or entry.detail != why:
            entry = entry._replace(waits=entry.waits + 1, detail=why)
        is_bare = offset in self.without_payload
        self.postponed[offset] = parked_at(band, entry.due_ms), None if is_bare else entry
        return True

    def park_behind_backlogs(self, due: DueEntries, limited: Container[str]) -> None:
        """Park what comes due for a target with a backlog, so that it goes out in the order of due times.

        `limited` are the targets with a rate.
        """
        for part in (self.ready, self.alone) if due.backlogs else ():
            for offset, entry in list(part.items()):
                to = waits_for(entry)
                # one that is not parked would overtake a backlog that waits for a rate, without end
                waits = not entry.expires_ms or to in limited
                waits = waits and offset not in due.released and to in due.backlogs
                if waits and self.park(offset, entry, QUEUED, due.parked):
                    del part[offset]

    def close_together(self, offsets: Iterable[int], now_ms: int) -> list[int]:
        """The first of these offsets; postpone those that are far behind, so that Kafka is read in one place."""
        near, spans, start = list[int](), 0, -1
        for offset in sorted(offsets):
            if start < 0:
                start = offset
            elif offset - start > MOST_LETTER_SPAN:
                spans, start = spans + 1, offset
            if spans:  # those of one span come back together
                self.postponed[offset] = now_ms + ALONE_SPREAD_MS * spans, None
            else:
                near.append(offset)
        return near

    def postpone_distant_letters(self, now_ms: int) -> None:
        """Postpone dead letters whose records are read from Kafka, except some close together."""
        unread = [
            offset
            for offset, entry in self.dead.items()
            if is_in_kafka(entry) and offset not in self.records
        ]
        near, read_bytes = self.close_together(unread, now_ms), 0
        for offset in near:
            read_bytes += self.dead[offset].left_bytes
            # the first one is read whatever its size, or it would never be
            if read_bytes > MOST_LETTER_BYTES and offset != near[0]:
                self.postponed[offset] = now_ms, None
        for offset in unread:
            if offset in self.postponed:
                del self.dead[offset]

    def retry_or_end(
        self, offset: int, entry: Entry, refusal: Refusal, retries: int, now_ms: int
    ) -> None:
        """Retry a request later; after so many `retries`, its message becomes a dead letter."""
        reason, detail = refusal
        is_over = entry.attempts >= retries and reason != Reason.UNREACHABLE
        if is_over and entry.reason is None:
            detail = f"{detail}, tried {entry.attempts + 1} times"
            self.dead[offset] = as_dead(entry, (reason, detail))
            return
        if reason == Reason.UNREACHABLE:  # retried without limit, and not counted as an attempt
            count, later = entry.waits, entry._replace(waits=entry.waits + 1)
        else:
            count, later = entry.attempts, entry._replace(attempts=entry.attempts + 1, waits=0)
            detail = f"{detail}; attempt {later.attempts} of {retries + 1}"
        if entry.reason is None:
            later = later._replace(detail=detail)
        # `waits` grows as long as an outage lasts, so the shift is limited too
        wait_ms = min(FIRST_RETRY_MS << min(count, 10), LONGEST_RETRY_MS)
        # then only the score is written, which costs Redis less than the payload
        is_unchanged = reason == Reason.UNREACHABLE and entry.detail == later.detail
        is_stored = is_unchanged and wait_ms == LONGEST_RETRY_MS
        self.postponed[offset] = now_ms + wait_ms, None if is_stored else later


def may_park(to: str, refusal: Refusal) -> bool:
    """Whether a refusal allows parking."""
    # A dead letter waits for its topic, whatever that lacks. A message to a missing or forbidden
    # target becomes a dead letter after some retries instead.
    return refusal[0] == Reason.UNREACHABLE or (to == LETTERS and refusal[0] in TOPIC_WIDE_REASONS)


def postpone_doubtful(entry: Entry, claim: Claim, now_ms: int) -> Postponed:
    """Postpone a request of which it is not known whether it was delivered."""
    why = f"cannot read yet whether it was delivered to {claim.at} at {claim.there}"
    later = entry._replace(waits=entry.waits + 1)
    if entry.reason is None:
        later = later._replace(detail=why)
    return now_ms + DOUBTFUL_LATER_MS, None if entry.detail == later.detail else later


def is_record(entry: Entry) -> bool:
    """Whether the entry holds the request's own record."""
    return not entry.target  # `refused_entry` leaves it empty


def is_in_kafka(entry: Entry) -> bool:
    """Whether the record of a dead letter is read from Kafka, because Redis does not hold it whole."""
    return entry.left_bytes > 0 or not is_record(entry)


def as_dead(entry: Entry, refusal: Refusal) -> Entry:
    """The dead letter that a request becomes."""
    reason, detail = refusal
    return entry._replace(reason=reason, detail=detail, attempts=0, waits=0)
