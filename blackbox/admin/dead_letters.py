"""Replay or discard dead letters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from blackbox.admin.lookup import StatusLookup
from blackbox.admin.replay_conflicts import conflicts
from blackbox.admin.replayed_record import as_new, why_another
from blackbox.journal.dead_letter_topic import DeadLetter, DeadLetterTopic, ReplayRecord
from blackbox.journal.letter_closer import LetterCloser
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.errors import JournalLost, RecoveryRequired
from blackbox.records.outgoing import MESSAGE_ONLY, left_out
from blackbox.records.request import Reason, Record, Request, Shard, placed

# Of keys, values and headers: they are in memory, and in one transaction, together.
MOST_REPLAYED_BYTES = 16 << 20
# With its last transaction, a replay should take less than the 20 s after which the page gives up.
REPLAYED_WITHIN_S = 8.0
NOT_DONE = "not done: the letters before it took too long; ask again"


@dataclass(frozen=True, slots=True)
class ClosedLetters:
    """`done`: the places of the letters replayed or discarded; `left`: why others were not, by place."""

    done: list[str]
    left: dict[str, str]


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The letters in `topic` about requests of the configured topics."""

    lookup: StatusLookup
    topic: str

    def newest(
        self, reason: str | None, is_open: bool, limit: int | None, most_bytes: int
    ) -> list[DeadLetter]:
        """As `Admin.letters`."""

        def wanted(letter: DeadLetter) -> DeadLetter | None:
            is_wanted = reason in (None, letter.reason) and not (is_open and letter.became)
            return letter if is_wanted else None

        def shown(letter: DeadLetter) -> DeadLetter:
            # Shortened while they are read: the values of all letters may take gigabytes.
            return letter.shortened(self._target_of(letter), most_bytes)

        return self._dead_letter_topic().newest(wanted, limit, keep=shown)

    def close_letters(self, places: Sequence[str], *, replay: bool) -> ClosedLetters:
        """Discard these letters, or write their requests again (`replay`); each letter once, also in concurrent runs.

        A replay writes the request's original record to its original partition: a countdown starts
        again, and a past instant is due at once. A letter is left if a request under its caller id is
        pending, or if those before it took `REPLAYED_WITHIN_S`. Raises RecoveryRequired if nothing was
        done, or the outcome is unknown: read the letters again.
        """
        until_s = time.monotonic() + REPLAYED_WITHIN_S
        topic = self._dead_letter_topic()
        with closing(LetterCloser(self.lookup.access, self.topic)) as closer:
            # Before the read: nobody else replays a letter between the read and the last commit.
            closer.open()
            open_ones, left = self._open(topic, places, replay=replay)
            if replay:
                done = self._replay(topic, closer, list(open_ones.values()), left, until_s)
                return ClosedLetters(done, left)
            if open_ones:
                closer.write(dict.fromkeys(open_ones))
            return ClosedLetters(list(open_ones), left)

    def _replay(
        self,
        topic: DeadLetterTopic,
        closer: LetterCloser,
        letters: Sequence[DeadLetter],
        left: dict[str, str],
        until_s: float,
    ) -> list[str]:
        """Replay these letters, in several transactions; returns their places. Adds to `left` why others are not."""
        done: list[str] = []
        while letters:
            try:
                replayed, behind = self._replay_some(topic, closer, letters, left)
            except RecoveryRequired as error:
                if not done:
                    raise
                left |= {one.place: str(error) for one in letters if one.place not in left}
                break
            done += replayed
            letters = behind
            if time.monotonic() > until_s:
                left |= dict.fromkeys((letter.place for letter in letters), NOT_DONE)
                break
        return done

    def _replay_some(
        self,
        topic: DeadLetterTopic,
        closer: LetterCloser,
        letters: Sequence[DeadLetter],
        left: dict[str, str],
    ) -> tuple[list[str], Sequence[DeadLetter]]:
        """Replay the first of these letters, in one transaction; returns their places, and the letters behind."""
        whole, records, behind = self._next_replays(topic, letters, left)
        left |= conflicts(self.lookup, records, lambda place: self._is_there(whole[place]))
        wanted = {place: record for place, record in records.items() if place not in left}
        if wanted:
            closer.write(wanted)
        return list(wanted), behind

    def _open(
        self, topic: DeadLetterTopic, places: Sequence[str], *, replay: bool
    ) -> tuple[dict[str, DeadLetter], dict[str, str]]:
        """The open letters at these places, without their content, and why others are left; by place."""
        named = frozenset(places)
        try:
            found = topic.newest(
                lambda letter: letter if letter.place in named else None,
                # Together, the contents of a thousand letters may have a gigabyte.
                keep=DeadLetter.without_content,
                # A committed mark behind an open transaction of anybody cannot be read yet, and its
                # letter would be replayed a second time.
                is_settled=True,
            )
        except JournalLost as error:
            raise type(error)(f"nothing was replayed or discarded; try again: {error}") from None
        known = {letter.place: letter for letter in found}
        open_ones: dict[str, DeadLetter] = {}
        left: dict[str, str] = {}
        for place in dict.fromkeys(places):
            try:
                open_ones[place] = self._closable(known.get(place), replay=replay)
            except ValueError as why:
                left[place] = str(why)
        return open_ones, left

    def _next_replays(
        self, topic: DeadLetterTopic, letters: Sequence[DeadLetter], left: dict[str, str]
    ) -> tuple[dict[str, DeadLetter], dict[str, ReplayRecord], Sequence[DeadLetter]]:
        """The first letters, whole, and what is written for them, both by place; and the letters behind.

        They have at most `MOST_REPLAYED_BYTES`, apart from the last one. Adds to `left` those that cannot
        be replayed.
        """
        # Those that cannot be replayed take no room, so that each transaction has one that can.
        found: dict[str, DeadLetter] = {}
        records: dict[str, ReplayRecord] = {}
        size, coming = 0, list(letters)
        while coming and size < MOST_REPLAYED_BYTES:
            together = coming[: _fitting(coming)]
            whole = topic.whole([letter.place for letter in together])
            for letter in together:
                if size >= MOST_REPLAYED_BYTES:
                    break
                coming.remove(letter)
                try:
                    records[letter.place] = self._replay_record(whole.get(letter.place))
                except ValueError as why:
                    left[letter.place] = str(why)
                else:
                    size += _replayed_bytes(letter)
                    found[letter.place] = whole[letter.place]
        return found, records, coming

    def _closable(self, letter: DeadLetter | None, *, replay: bool) -> DeadLetter:
        """This letter. Raises ValueError if it cannot be closed, whatever its content is."""
        if letter is None:
            raise ValueError(
                f"no such letter of a configured request topic among the latest of {self.topic}"
            )
        if letter.became is not None:
            raise ValueError(f"already {letter.became}")
        if replay and letter.reason == Reason.TOO_LATE:
            raise ValueError(
                "the request it should replace was delivered or has ended, so replaying it could "
                "deliver twice; send a new request if you want that"
            )
        if replay and letter.detail.startswith(MESSAGE_ONLY):
            raise ValueError(f"{MESSAGE_ONLY}; have its caller send it again")
        return letter

    def _dead_letter_topic(self) -> DeadLetterTopic:
        return DeadLetterTopic(self.lookup.access, self.topic, self.lookup.formats)

    def _replay_record(self, letter: DeadLetter | None) -> ReplayRecord:
        """The record to write again. Raises ValueError for a letter that cannot be replayed."""
        if letter is None:
            raise ValueError("Kafka has just removed it")
        place = placed(letter.source)
        assert place is not None
        shard, offset = place
        # A letter without a value is that of a tombstone, unless its detail says that the record
        # was too large for the dead-letter topic.
        is_shortened = "left out" in letter.detail or letter.detail.startswith("shortened")
        if (letter.key, letter.value, letter.headers, is_shortened) == (None, None, [], False):
            raise ValueError("nothing is left of the request; have its caller send it again")
        if letter.value is not None or not is_shortened:
            headers = as_new(letter.headers)
            return ReplayRecord(shard, offset, letter.key, letter.value, headers)
        record = self._record_at(shard, offset)
        if record is None:
            raise ValueError(f"its value was left out, and {letter.source} is no longer in Kafka")
        if why := why_another(letter, record):
            raise ValueError(f"its value was left out, and {letter.source} {why}")
        headers = as_new(record.headers)
        return ReplayRecord(shard, offset, record.key, record.value, headers)

    def _is_there(self, letter: DeadLetter) -> bool:
        """Whether the record of the letter's request is still at its place."""
        place = placed(letter.source)
        assert place is not None
        record = self._record_at(*place)
        return record is not None and why_another(letter, record) is None

    def _record_at(self, shard: Shard, offset: int) -> Record | None:
        with closing(ShardJournal(shard, self.lookup.access)) as journal:
            return journal.records([offset]).get(offset)

    def _target_of(self, letter: DeadLetter) -> str | None:
        """The target of the letter's message; None when its request cannot be parsed."""
        # The topic may hold letters of other deployments, whose formats are not known here.
        topic = letter.source.rpartition("/")[0]
        if topic not in self.lookup.formats or letter.detail.startswith(MESSAGE_ONLY):
            return None
        record = Record(0, letter.at_ms, letter.key, letter.value, letter.headers)
        parsed = self.lookup.formats[topic].parse(record, letter.at_ms)
        return parsed.target if isinstance(parsed, Request) else None


def _fitting(letters: Iterable[DeadLetter]) -> int:
    """How many of these letters are read at once: at least one, and no more after `MOST_REPLAYED_BYTES`."""
    size = count = 0
    for letter in letters:
        if size >= MOST_REPLAYED_BYTES:
            break
        size, count = size + _replayed_bytes(letter), count + 1
    return count


def _replayed_bytes(letter: DeadLetter) -> int:
    """The size of the record that a replay of this letter writes, about."""
    left = left_out(letter.detail)
    return letter.content_bytes + (0 if left is None else left.value_bytes)
