"""The verdict on a demo: compare what was sent with what can be read back. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blackbox.demo.script import TARGETS, ExpectedOutcome, ScriptedRecord
from blackbox.records.request import Headers, Shard, request_id

OWN_HEADERS = ("blackbox-id", "blackbox-due-ms", "blackbox-source")
# From the first request on: new servers and a new service are slow at first.
WARM_MS = 3000
LETTER_HEADERS = ("blackbox-reason", "blackbox-detail", "blackbox-source")


class Seen(NamedTuple):
    """A record as the independent consumer read it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """All requests, counted by outcome.

    `faults` maps each kind of fault to the records it was found on:

    lost        -- messages that were not delivered
    duplicated  -- messages that were delivered more than once
    early       -- messages stamped before they were due
    strays      -- records that were not requested, including cancelled or replaced messages
    damaged     -- messages whose key, headers or id are not as requested
    misjudged   -- broken requests without exactly one dead letter with the right reason and headers
    unread      -- records that cannot be read back from the request topic

    `late_ms` holds record timestamps minus due times, ascending; `warm_late_ms` holds those of
    messages due at least `WARM_MS` after the first request.
    """

    requests: int
    delivered: int
    cancelled: int
    replaced: int
    letters: Counter[str]
    faults: dict[str, list[str]]
    late_ms: list[int] = field(repr=False)
    warm_late_ms: list[int] = field(repr=False)
    first_ms: int | None

    @property
    def is_good(self) -> bool:
        return not self.faults


class Tally:
    """Matches records read back, in any order, with what was sent."""

    def __init__(self, script: Sequence[ScriptedRecord], request_topic: str) -> None:
        self._script = script
        self._request_topic = request_topic
        # Matched by bytes alone. Headers of blackbox are checked, but a verdict that relied on them
        # would trust the product that it judges.
        self._by_value = {line.value: line for line in script}
        self._by_message = {
            line.message: line for line in script if line.expected is ExpectedOutcome.DELIVERED
        }
        self._requests: dict[bytes, Seen] = {}
        self._messages: dict[bytes, Seen] = {}
        self._letters: dict[bytes, Seen] = {}
        self._again: list[str] = []
        self._letters_again: list[str] = []
        self._strays: list[str] = []
        self._late: list[tuple[int, int]] = []

    @property
    def delivered(self) -> int:
        return len(self._messages)

    @property
    def dead(self) -> int:
        return len(self._letters)

    @property
    def late_ms(self) -> list[int]:
        """Record timestamp minus due time of every message whose request was seen too, ascending."""
        # A copy: another thread may append while this one sorts.
        return sorted(late_ms for _, late_ms in self._late.copy())

    def take(self, seen: Seen) -> None:
        value = seen.value or b""
        if seen.topic == self._request_topic:
            self._requests[value] = seen
            line = self._by_value.get(value)
            # The topics are read side by side, so a message may be seen before its request.
            if line is not None and line.message in self._messages:
                self._time(line, self._messages[line.message])
        elif seen.topic in TARGETS:
            self._take_message(value, seen)
        elif self._by_value.get(value, _UNKNOWN_LINE).expected is not ExpectedOutcome.DEAD:
            self._strays.append(_show(seen))
        elif value in self._letters:
            self._letters_again.append(_show(seen))
        else:
            self._letters[value] = seen

    def verdict(self) -> DemoVerdict:
        by_outcome = Counter(line.expected for line in self._script)
        wanted = [line for line in self._script if line.expected is ExpectedOutcome.DELIVERED]
        broken = [line for line in self._script if line.expected is ExpectedOutcome.DEAD]
        delivered = [line for line in wanted if line.message in self._messages]
        faults = {
            "lost": [_text(line.message) for line in wanted if line.message not in self._messages],
            "duplicated": list(self._again),
            "early": [_text(line.message) for line in delivered if self._is_early(line)],
            "strays": list(self._strays),
            "damaged": [_text(line.message) for line in delivered if not self._is_intact(line)],
            "misjudged": [*filter(None, map(self._misjudged, broken)), *self._letters_again],
            "unread": [_text(one.value) for one in self._script if one.value not in self._requests],
        }
        return DemoVerdict(
            requests=len(self._script) - by_outcome[ExpectedOutcome.CANCEL],
            delivered=len(delivered),
            cancelled=by_outcome[ExpectedOutcome.CANCELLED],
            replaced=by_outcome[ExpectedOutcome.REPLACED],
            letters=Counter(_reason(letter) for letter in self._letters.values()),
            faults={name: found for name, found in faults.items() if found},
            late_ms=self.late_ms,
            warm_late_ms=self._warm_late_ms(),
            first_ms=min((seen.timestamp_ms for seen in self._messages.values()), default=None),
        )

    def _take_message(self, value: bytes, seen: Seen) -> None:
        line = self._by_message.get(value)
        if line is None or line.topic != seen.topic:
            self._strays.append(_show(seen))
        elif value in self._messages:
            self._again.append(_show(seen))
        else:
            self._messages[value] = seen
            if line.value in self._requests:
                self._time(line, seen)

    def _time(self, line: ScriptedRecord, seen: Seen) -> None:
        due_ms = self._due_ms(line)
        self._late.append((due_ms, seen.timestamp_ms - due_ms))

    def _warm_late_ms(self) -> list[int]:
        first_ms = min((seen.timestamp_ms for seen in self._requests.values()), default=0)
        return sorted(late_ms for due_ms, late_ms in self._late if due_ms >= first_ms + WARM_MS)

    def _due_ms(self, line: ScriptedRecord) -> int:
        return self._requests[line.value].timestamp_ms + line.countdown_ms

    def _is_early(self, line: ScriptedRecord) -> bool:
        stamp_ms = self._messages[line.message].timestamp_ms
        return line.value in self._requests and stamp_ms < self._due_ms(line)

    def _is_intact(self, line: ScriptedRecord) -> bool:
        seen = self._messages[line.message]
        # By position: headers of blackbox come last, and callers' headers keep their order.
        asked, own = seen.headers[: -len(OWN_HEADERS)], dict(seen.headers[-len(OWN_HEADERS) :])
        return (
            seen.key == line.key
            and asked == [*line.headers, *line.more_headers]
            and tuple(own) == OWN_HEADERS
            and (line.value not in self._requests or own == self._own_headers(line))
        )

    def _own_headers(self, line: ScriptedRecord) -> dict[str, bytes | None]:
        request = self._requests[line.value]
        shard, offset = Shard(request.topic, request.partition), request.offset
        values = request_id(shard, offset), str(self._due_ms(line)), shard.source(offset)
        return {name: text.encode() for name, text in zip(OWN_HEADERS, values, strict=True)}

    def _misjudged(self, line: ScriptedRecord) -> str | None:
        letter = self._letters.get(line.value)
        if letter is None:
            return f"{_text(line.value)}: no dead letter, expected {line.reason}"
        if _reason(letter) != line.reason:
            return f"{_text(line.value)}: {_reason(letter)}, expected {line.reason}"
        names = tuple(name for name, _ in letter.headers[-len(LETTER_HEADERS) :])
        if letter.headers[: -len(LETTER_HEADERS)] != [*line.headers] or names != LETTER_HEADERS:
            return f"{_text(line.value)}: its headers are {letter.headers}"
        return None


_UNKNOWN_LINE = ScriptedRecord("", b"", (), ExpectedOutcome.CANCEL)


def percentile(ascending: Sequence[int], share: float) -> int:
    """The value at index `length * share`, rounded down, of an ascending sequence; 0 if empty."""
    if not ascending:
        return 0
    return ascending[min(len(ascending) - 1, int(len(ascending) * share))]


def _reason(letter: Seen) -> str:
    return (dict(letter.headers).get("blackbox-reason") or b"").decode()


def _show(seen: Seen) -> str:
    return f"{seen.topic}/{seen.partition}@{seen.offset}: {_text(seen.value or b'')}"


def _text(value: bytes) -> str:
    return value[:80].decode(errors="replace")
