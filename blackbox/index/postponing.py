"""Entries that are tried later, and those that are parked until their target can take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from blackbox.core.parking import BAND_MS, BANDS, LETTERS, band_at, parked_at, span, waits_for
from blackbox.core.plan import Postponed
from blackbox.index.command_builder import CHUNK, chunks, zadd_chunks
from blackbox.index.connection import pack
from blackbox.index.guarded_index import MAX_CONTENTION
from blackbox.index.lookups import Lookups
from blackbox.index.packed_commands import by_score
from blackbox.index.stored_fields import as_entry
from blackbox.records import entry as entries
from blackbox.records.request import OUTCOME_UNKNOWN, Reason, member

LOOKED_AT = 100


class PostponingChanges(Lookups):
    """New due times, and the bands of parked entries."""

    def postpone(self, changes: Mapping[int, Postponed], now_ms: int) -> None:
        """Postpone these pending entries, by offset, in one MULTI; those that have ended are left out."""
        with self._lock:
            for _ in range(MAX_CONTENTION):
                keys = self._keys.state, self._keys.receipts
                found, pending = self._watch_pending(changes, *keys)
                commands = self._postpone_commands(pending, now_ms)
                if not commands or self._exec_even_if_full(commands, found):
                    return
            raise self._contended("postponing")

    def _postpone_commands(
        self, changes: Mapping[int, Postponed], now_ms: int, *, only_there: bool = False
    ) -> list[bytes]:
        """The commands that postpone these entries; with `only_there`, a missing payload is not written."""
        commands = [
            self._keep_payload(offset, at_ms, now_ms)
            if entry is None
            else self._set_payload(
                offset,
                entries.encode(entry),
                at_ms,
                now_ms,
                is_letter=entry.reason is not None,
                only_there=only_there,
            )
            for offset, (at_ms, entry) in changes.items()
        ]
        scored = [(at_ms, offset) for offset, (at_ms, _) in changes.items()]
        for at_ms, entry in changes.values():
            # else it is looked up later, not before a MULTI
            if (band := band_at(at_ms)) and self._parked is not None:
                # refused ones are parked without a payload
                self._parked[band] = LETTERS if entry is None else waits_for(entry)
        # XX: an entry that ended in the meantime must not come back.
        return [*commands, *zadd_chunks(self._keys.due, scored, only_there=True)]

    def _has_payloads(self, changes: Mapping[int, Postponed]) -> bool:
        """Whether each payload that these changes replace is there."""
        replaced = [offset for offset, (_, entry) in changes.items() if entry is not None]
        names = [self._keys.message(member(offset)) for offset in replaced]
        there: int = sum(self._redis.ask("EXISTS", *chunk) for chunk in chunks(names))
        return there == len(names)

    def parked(self) -> Mapping[int, str]:
        """The target of each band that has parked entries, or had some until a moment ago."""
        with self._lock:
            return self._bands()

    def _bands(self) -> dict[int, str]:
        # A band's target is found in its entries and stored nowhere else, so the two cannot differ.
        if self._parked is None:
            bands: list[int] = []
            lowest, end = parked_at(1, 0), span(BANDS)[1]
            while first := self._redis.ask(
                *by_score(self._keys.due, lowest, end, 0, 1, "WITHSCORES")
            ):
                bands.append(band_at(int(float(first[1]))))
                lowest = parked_at(bands[-1] + 1, 0)
            found = ((band, self._target_of(band)) for band in bands)
            self._parked = {band: target for band, target in found if target is not None}
        return self._parked

    def _target_of(self, band: int) -> str | None:
        """The target of a band; None if nothing is left in it."""
        while names := self._redis.run([self._read_band(band, LOOKED_AT)])[0]:
            offsets = [int(name, 16) for name in names]
            if self._causes(offsets):
                return LETTERS  # without payloads
            for _, head in self._heads(names):
                if (entry := as_entry(head)) is not None:
                    return waits_for(entry)
            # Entries whose payloads are gone become due, and are read again from Kafka.
            scores = self._scores(self._keys.due, offsets)
            self.postpone({offset: (score % BAND_MS, None) for offset, score in scores.items()}, 0)
        return None

    def _read_band(self, band: int, limit: int) -> bytes:
        return pack(*by_score(self._keys.due, *span(band), 0, limit))

    def _parked_commands(self, known: Iterable[int], released: Mapping[int, int]) -> list[bytes]:
        """Reads of the released bands, a count of all parked entries, and one for each known band."""
        spans = [(BAND_MS, span(BANDS)[1]), *map(span, known)]
        counts = [pack("ZCOUNT", self._keys.due, *span) for span in spans]
        return [*(self._read_band(*one) for one in released.items()), *counts]

    def _note_parked(
        self, known: Mapping[int, str], counts: Sequence[int]
    ) -> dict[int, int] | None:
        """Note which of these bands have entries left; return how many, or None if other bands have some.

        The first of the `counts` is that of all parked entries.
        """
        total, *in_bands = counts
        if total != sum(in_bands):
            self._parked = None  # Redis went back, or an owner that was fenced parked something
            return None
        left = {band: count for band, count in zip(known, in_bands, strict=True) if count}
        self._parked = {band: known[band] for band in left}
        return left

    def outcome_unknown(self, due_before_ms: int, now_ms: int) -> int:
        """Make dead letters of pending requests that were due before this; return how many."""
        count, first = 0, 0
        while True:
            with self._lock:
                upto = first + CHUNK - 1
                look = pack("ZRANGE", self._keys.due, first, upto, "WITHSCORES")
                flat, largest = self._redis.run([look, self._look_largest])
                scores = dict(zip(flat[::2], flat[1::2], strict=True))
                names = [name for name, score in scores.items() if float(score) < BAND_MS]
                stored = self._payloads(names, int(largest or 0))
            if not stored:
                return count + sum(
                    self._parked_unknown(band, due_before_ms, now_ms)
                    for band in list(self.parked())
                )
            first += len(stored)
            changes: dict[int, Postponed] = {}
            for name, payload in stored:
                entry = as_entry(payload)
                if entry is not None and entry.reason is None and entry.due_ms <= due_before_ms:
                    letter = entry._replace(reason=Reason.OUTCOME_UNKNOWN, detail=OUTCOME_UNKNOWN)
                    at_ms = int(float(scores[name]))  # unchanged: paging needs the order
                    changes[int(name, 16)] = at_ms, letter
            count += len(changes)
            self.postpone(changes, now_ms)

    def _parked_unknown(self, band: int, due_before_ms: int, now_ms: int) -> int:
        # Entries leave their band: a dead letter does not wait for the target.
        count, end = 0, parked_at(band, min(due_before_ms, BAND_MS - 1))
        while True:
            with self._lock:
                look = by_score(self._keys.due, parked_at(band, 0), end, 0, CHUNK, "WITHSCORES")
                flat, largest = self._redis.run([pack(*look), self._look_largest])
                scores = dict(zip(flat[::2], flat[1::2], strict=True))
                stored = self._payloads(list(scores), int(largest or 0))
            if not stored:
                return count
            changes: dict[int, Postponed] = {}
            for name, payload in stored:
                entry, at_ms = as_entry(payload), int(float(scores[name])) % BAND_MS
                if entry is not None and entry.reason is None:
                    entry = entry._replace(reason=Reason.OUTCOME_UNKNOWN, detail=OUTCOME_UNKNOWN)
                    count += 1
                changes[int(name, 16)] = at_ms, entry
            self.postpone(changes, now_ms)


def released_shares(
    known: Mapping[int, str], release: Mapping[str, int], limit: int
) -> dict[int, int]:
    """How many entries of each released band are read at most."""
    bands = sorted(band for band, to in known.items() if to in release)
    # All backlogs share a second limit: due entries do not wait until they are through.
    share = max(1, limit // max(1, len(bands)))
    return {band: min(share, release[known[band]]) for band in bands}


def not_emptied(
    left: Mapping[int, int], bands: Sequence[int], in_bands: Sequence[Sequence[bytes]]
) -> Set[int]:
    """The bands that still have a backlog: one that comes out whole is not a backlog any more."""
    emptied = {
        band
        for band, names in zip(bands, in_bands, strict=True)
        if names and len(names) == left[band]
    }
    return left.keys() - emptied
