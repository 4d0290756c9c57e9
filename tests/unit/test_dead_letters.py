"""Replays of dead letters whose caller id has a pending request, or another letter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from blackbox.admin import dead_letters, replay_conflicts
from blackbox.admin.dead_letters import ClosedLetters, DeadLetters
from blackbox.core.plan import Bounds, Positions
from blackbox.formats import Options, make_format
from blackbox.journal.dead_letter_topic import DeadLetter, ReplayRecord
from blackbox.records.errors import JournalLost, RecoveryRequired
from blackbox.records.outgoing import MESSAGE_ONLY
from blackbox.records.request import Record, Shard, request_id

SHARD = Shard("TB", 3)


@dataclass
class FakeLookup:
    """The index and the end of one shard; `letters` and `written` are the dead-letter topic's.

    An open transaction hides the requests from `stable_end` to `log_end`. Not all offsets have `records`.
    `there` are those that are read for a letter. `looks` counts the reads of all letters, and
    `read_whole` are those whose content was read last. A transaction may have one of the `failures`.
    """

    holders: dict[str, int] = field(default_factory=dict)
    read_to: int = 10
    stable_end: int = 10
    log_end: int = 10
    records: tuple[int, ...] = tuple(range(10))
    there: dict[int, Record] = field(default_factory=dict)
    letters: list[DeadLetter] = field(default_factory=list)
    looks: int = 0
    transactions: list[list[str]] = field(default_factory=list)
    failures: dict[int, RecoveryRequired] = field(default_factory=dict)
    read_whole: list[str] = field(default_factory=list)
    access: Any = None
    formats: Any = field(
        default_factory=lambda: {"TB": make_format("countdown", Options(10**7, lambda _: False))}
    )

    @property
    def inspector(self) -> FakeLookup:
        return self

    @property
    def written(self) -> list[str]:
        return [place for places in self.transactions for place in places]

    def positions(self, shard: Shard) -> Positions:
        return Positions(self.read_to, 0)

    def offset_of(self, shard: Shard, caller_id: str) -> int | None:
        return self.holders.get(caller_id)

    def add(self, offset: int, value: bytes, detail: str = "") -> str:
        """Add the open letter of the request at this offset; returns the letter's place."""
        place = f"letters/0@{len(self.letters)}"
        source, size = SHARD.source(offset), len(value)
        letter = DeadLetter(
            place, 0, "unknown-topic", detail, source, "shop", None, value, [], size
        )
        self.letters.append(replace(letter, content_bytes=size))
        return place


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> FakeLookup:
    made = FakeLookup()

    class FakeReader:
        def __init__(self, access: object, *, prefetched: int) -> None: ...

        def bounds(self, topic: str, partition: int) -> Bounds:
            return Bounds(0, made.stable_end)

        def log_end(self, topic: str, partition: int) -> int:
            return made.log_end

        def read(
            self, topic: str, partition: int, start: int, end: int
        ) -> Iterator[tuple[list[int], int]]:
            assert end <= made.stable_end
            yield [offset for offset in made.records if start <= offset < end], end

        def close(self) -> None: ...

    class FakeTopic:
        def __init__(self, *_: Any) -> None: ...

        def newest(
            self,
            take: Callable[[DeadLetter], DeadLetter | None],
            limit: Any = None,
            *,
            keep: Any,
            is_settled: bool = False,
        ) -> Any:
            made.looks += 1
            return [keep(letter) for letter in made.letters if take(letter)]

        def whole(self, places: Iterable[str]) -> dict[str, DeadLetter]:
            made.read_whole = list(places)
            return {letter.place: letter for letter in made.letters if letter.place in places}

    class FakeCloser:
        def __init__(self, *_: Any) -> None: ...
        def open(self) -> None: ...
        def close(self) -> None: ...

        def write(self, letters: Mapping[str, ReplayRecord | None]) -> None:
            made.transactions.append(list(letters))
            if failure := made.failures.get(len(made.transactions)):
                made.transactions.pop()
                raise failure

    class FakeJournal:
        def __init__(self, shard: Shard, access: object) -> None:
            assert shard == SHARD

        def records(self, offsets: Iterable[int]) -> dict[int, Record]:
            return {offset: made.there[offset] for offset in offsets if offset in made.there}

        def close(self) -> None: ...

    monkeypatch.setattr(dead_letters, "DeadLetterTopic", FakeTopic)
    monkeypatch.setattr(dead_letters, "LetterCloser", FakeCloser)
    monkeypatch.setattr(dead_letters, "ShardJournal", FakeJournal)
    monkeypatch.setattr(replay_conflicts, "PartitionReader", FakeReader)
    monkeypatch.setattr(replay_conflicts, "READ_WITHIN_S", 0)
    return made


def closed(lookup: FakeLookup, *places: str, replay: bool = True) -> ClosedLetters:
    return DeadLetters(lookup, "letters").close_letters(places, replay=replay)  # type: ignore[arg-type]


def asked(message: str, id: str | None = "r") -> bytes:
    under = f', "id": "{id}"' if id else ""
    return b'{"topic": "orders", "countdown": 0, "message": "%s"%s}' % (
        message.encode(),
        under.encode(),
    )


def test_a_replay_does_not_replace_a_newer_pending_request_with_the_same_id(
    lookup: FakeLookup,
) -> None:
    place = lookup.add(4, asked("v1"))
    lookup.holders["r"] = 8

    done = closed(lookup, place)

    assert (done.done, lookup.written) == ([], [])
    assert request_id(SHARD, 8) in done.left[place]
    assert "cancel that one first, or discard this letter" in done.left[place]
    assert closed(lookup, place, replay=False).done == [place]


def test_of_letters_with_the_same_id_only_one_is_replayed_at_once(lookup: FakeLookup) -> None:
    first, second, other = (lookup.add(n, asked(f"v{n}", id)) for n, id in enumerate("rrx"))

    done = closed(lookup, second, first, other)

    assert done.done == [second, other]
    assert done.left[first].startswith(f"{second} has the same id, 'r'")


def test_letters_without_an_id_are_replayed_together_also_while_intake_is_behind(
    lookup: FakeLookup,
) -> None:
    lookup.read_to = 0
    places = [lookup.add(n, asked("m", None)) for n in range(2)]
    places.append(lookup.add(2, b"no request"))

    assert closed(lookup, *places) == ClosedLetters(places, {})


def test_a_letter_with_an_id_is_replayed_only_once_all_requests_are_read(
    lookup: FakeLookup,
) -> None:
    place = lookup.add(4, asked("v1"))
    lookup.read_to = 9
    assert closed(lookup, place).left[place].endswith("try again once they are read")

    lookup.read_to = 10
    assert closed(lookup, place).done == [place]


def test_a_letter_is_not_replayed_past_requests_that_an_open_transaction_hides(
    lookup: FakeLookup,
) -> None:
    place = lookup.add(4, asked("v1"))
    lookup.log_end = 12

    done = closed(lookup, place)

    assert (done.done, lookup.written) == ([], [])
    assert "requests that the service has not read yet" in done.left[place]

    lookup.read_to = lookup.stable_end = 12
    assert closed(lookup, place).done == [place]


def test_offsets_without_a_record_do_not_delay_a_replay(lookup: FakeLookup) -> None:
    place = lookup.add(4, asked("v1"))
    lookup.stable_end = lookup.log_end = 13  # aborted records, and the marker behind them

    assert closed(lookup, place).done == [place]


OWN = Record(4, 0, None, asked("v1"), [])
LATER = OWN._replace(timestamp_ms=120_000, has_broker_time=True)


@pytest.mark.parametrize(
    "there", [OWN, OWN._replace(headers=[("blackbox-carried", b"[3,3,0,false]")])]
)
def test_a_letter_whose_outcome_is_not_settled_yet_can_be_replayed(
    lookup: FakeLookup, there: Record
) -> None:
    place = lookup.add(4, asked("v1"))
    lookup.holders["r"] = 4
    lookup.there[4] = there

    assert closed(lookup, place).done == [place]


@pytest.mark.parametrize(
    "there",
    [OWN._replace(value=asked("v2")), LATER, None],
    ids=["another value", "later", "gone"],
)
def test_a_replay_does_not_replace_a_request_that_has_the_offset_of_the_letters_own(
    lookup: FakeLookup, there: Record | None
) -> None:
    place = lookup.add(4, asked("v1"))
    lookup.holders["r"] = 4
    lookup.there |= {} if there is None else {4: there}

    done = closed(lookup, place)

    assert (done.done, lookup.written) == ([], [])
    assert "cancel that one first, or discard this letter" in done.left[place]


def test_a_letter_that_has_a_message_instead_of_a_request_is_not_replayed(
    lookup: FakeLookup,
) -> None:
    place = lookup.add(4, asked("v1"), f"{MESSAGE_ONLY}; it does not exist")

    [shown] = DeadLetters(lookup, "letters").newest(None, True, None, 100)  # type: ignore[arg-type]
    assert shown.target is None
    assert closed(lookup, place) == ClosedLetters(
        [], {place: f"{MESSAGE_ONLY}; have its caller send it again"}
    )
    assert closed(lookup, place, replay=False).done == [place]


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Transactions of 400 bytes, one in each call."""
    monkeypatch.setattr(dead_letters, "MOST_REPLAYED_BYTES", 400)
    monkeypatch.setattr(dead_letters, "REPLAYED_WITHIN_S", -1)
    return 400


@pytest.fixture
def much_time(few_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "REPLAYED_WITHIN_S", 60)


@pytest.mark.usefixtures("much_time")
def test_letters_with_much_content_are_looked_for_once_and_replayed_in_several_transactions(
    lookup: FakeLookup,
) -> None:
    large = asked("x" * 300, None)
    places = [lookup.add(n, large) for n in range(5)]

    assert closed(lookup, *places) == ClosedLetters(places, {})
    assert lookup.transactions == [places[:2], places[2:4], places[4:]]
    assert lookup.looks == 1


@pytest.mark.usefixtures("much_time")
def test_letters_before_a_failed_transaction_are_reported_as_replayed(lookup: FakeLookup) -> None:
    large = asked("x" * 300, None)
    gone = lookup.add(0, b"", "(value of 9 bytes left out)")
    lookup.letters[-1] = replace(lookup.letters[-1], value=None)
    places = [lookup.add(n, large) for n in range(1, 6)]
    lookup.failures[2] = JournalLost("nothing was written")

    done = closed(lookup, gone, *places)

    assert done.done == lookup.written == places[:2]
    assert "no longer in Kafka" in done.left.pop(gone)
    assert done.left == dict.fromkeys(places[2:], "nothing was written")


def test_a_replay_whose_first_transaction_fails_raises_the_reason(lookup: FakeLookup) -> None:
    lookup.failures[1] = JournalLost("nothing was written")
    with pytest.raises(JournalLost, match="nothing was written"):
        closed(lookup, lookup.add(0, asked("v1")))


def test_letters_for_which_a_call_has_no_time_are_replayed_in_the_next_calls(
    lookup: FakeLookup, few_bytes: int
) -> None:
    large = asked("x" * 300, None)
    places = [lookup.add(n, large) for n in range(5)]
    named = [places[2], places[0], places[4], places[1], places[3]]

    calls = []
    while named:
        done = closed(lookup, *named)
        assert lookup.read_whole == done.done
        assert done.left == dict.fromkeys(named[len(done.done) :], dead_letters.NOT_DONE)
        calls.append(done.done)
        named = list(done.left)

    assert calls == [places[2:3] + places[:1], [places[4], places[1]], [places[3]]]


def test_a_letter_that_is_larger_than_a_transaction_is_replayed_alone(
    lookup: FakeLookup, few_bytes: int
) -> None:
    first, second = (lookup.add(n, asked("x" * 2 * few_bytes, None)) for n in range(2))

    assert closed(lookup, first, second) == ClosedLetters([first], {second: dead_letters.NOT_DONE})


def test_letters_that_cannot_be_replayed_leave_room_for_others(
    lookup: FakeLookup, few_bytes: int
) -> None:
    large = asked("x" * few_bytes, None)
    message_only = lookup.add(0, large, MESSAGE_ONLY)
    place = lookup.add(1, large)

    done = closed(lookup, message_only, place)

    assert (done.done, list(done.left)) == ([place], [message_only])
    assert lookup.read_whole == [place]


def test_letters_whose_records_are_gone_leave_room_for_others(
    lookup: FakeLookup, few_bytes: int
) -> None:
    gone = []
    for offset in range(3):
        gone.append(lookup.add(offset, b"", f"(value of {few_bytes} bytes left out)"))
        lookup.letters[-1] = replace(lookup.letters[-1], value=None)
    place = lookup.add(3, asked("v1", None))

    done = closed(lookup, *gone, place)

    assert (done.done, list(done.left)) == ([place], gone)
    assert "no longer in Kafka" in done.left[gone[0]]


def test_a_value_that_was_left_out_counts_as_content(lookup: FakeLookup, few_bytes: int) -> None:
    places = []
    for offset in range(2):
        value = asked("x" * few_bytes, None)
        lookup.there[offset] = Record(offset, 0, None, value, [])
        places.append(lookup.add(offset, b"", f"(value of {len(value)} bytes left out)"))
        lookup.letters[-1] = replace(lookup.letters[-1], value=None)

    done = closed(lookup, *places)

    assert done == ClosedLetters(places[:1], {places[1]: dead_letters.NOT_DONE})


def test_a_discard_reads_no_content_and_has_no_limit(lookup: FakeLookup, few_bytes: int) -> None:
    places = [lookup.add(n, asked("x" * few_bytes, None)) for n in range(3)]

    assert closed(lookup, *places, replay=False).done == places
    assert lookup.read_whole == []
