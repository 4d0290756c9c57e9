"""What a replay of a dead letter writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from blackbox.admin import dead_letters
from blackbox.admin.dead_letters import ClosedLetters, DeadLetters
from blackbox.admin.lookup import StatusLookup
from blackbox.config.settings import load
from blackbox.journal.dead_letter_topic import DeadLetter, ReplayRecord
from blackbox.records.outgoing import dead_letters as forms_of
from blackbox.records.request import Headers, Record, Shard, request_id
from tests.support.fakes import record

SHARD = Shard("TB", 0)
PLACE = "letters/0@0"
ID = request_id(SHARD, 3).encode()
CALLERS: Headers = [("CALLER_SERVICE", b"shop"), ("trace", b"1")]
WHOLE = record(7)._replace(headers=CALLERS)
# Of a minute after the letter.
LATER = WHOLE._replace(timestamp_ms=60_002, has_broker_time=True)


class Letters:
    """The dead-letter topic and its closer, with one letter: that of `original` in this form, from 0."""

    def __init__(self, original: Record, form: int) -> None:
        forms = list(forms_of(SHARD, "letters", original, "outcome-unknown", "it may have been"))
        _, _, key, value, headers, _ = forms[form]
        as_read = [(n, v.encode() if isinstance(v, str) else v) for n, v in headers]
        self.letter = DeadLetter.of(Record(0, 1, key, value, as_read), PLACE)
        self.replayed: ReplayRecord | None = None

    def newest(
        self,
        take: Callable[[DeadLetter], DeadLetter | None],
        limit: int | None = None,
        *,
        keep: Callable[[DeadLetter], DeadLetter],
        is_settled: bool,
    ) -> list[DeadLetter]:
        return [keep(self.letter)]

    def whole(self, places: Iterable[str]) -> dict[str, DeadLetter]:
        return dict.fromkeys(places, self.letter)

    def open(self) -> None: ...
    def close(self) -> None: ...

    def write(self, letters: Mapping[str, ReplayRecord | None]) -> None:
        [self.replayed] = letters.values()


def replay(monkeypatch: pytest.MonkeyPatch, letters: Letters, there: Record) -> ClosedLetters:
    """Replay the letter, while its request topic has this record."""

    class Journal:
        def records(self, offsets: Iterable[int]) -> dict[int, Record]:
            return {there.offset: there}

        def close(self) -> None: ...

    monkeypatch.setattr(DeadLetters, "_dead_letter_topic", lambda _: letters)
    monkeypatch.setattr(dead_letters, "LetterCloser", lambda *_: letters)
    monkeypatch.setattr(dead_letters, "ShardJournal", lambda *_: Journal())
    lookup = StatusLookup(load(kafka_bootstrap_servers="127.0.0.1:1"))
    return DeadLetters(lookup, "letters").close_letters([PLACE], replay=True)


FORMS = pytest.mark.parametrize("form", range(3), ids=["whole", "value left out", "all left out"])


@FORMS
@pytest.mark.parametrize(
    "own",
    [
        [("blackbox-carried", b"[3,3,1,false]")],
        [("blackbox-replaces", ID), ("blackbox-carried", b"[3,3,1,false]")],
        [("blackbox-follows", b"TB/0@3"), ("blackbox-carried", b"[3,3,1,false]")],
        [("blackbox-replaces", ID)],
        [("blackbox-follows", b"TB/0@3")],
        [("blackbox-again", b"TB/0@3")],
        [],
    ],
    ids=lambda own: ", ".join(name for name, _ in own) or "none",
)
def test_a_replayed_request_counts_as_a_new_one_of_its_caller(
    monkeypatch: pytest.MonkeyPatch, own: Headers, form: int
) -> None:
    original = record(7)._replace(headers=[*CALLERS, *own])
    letters = Letters(original, form)

    closed = replay(monkeypatch, letters, original)

    assert closed.done == [PLACE]
    assert letters.replayed == ReplayRecord(SHARD, 7, b"key", b"{}", CALLERS)


def test_a_dead_letter_with_nothing_in_it_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Record(7, 1, None, None, [])

    closed = replay(monkeypatch, Letters(nothing, 0), nothing)

    assert closed.left == {PLACE: "nothing is left of the request; have its caller send it again"}


@pytest.mark.parametrize(
    ("form", "there", "why"),
    [
        (1, LATER, "its timestamp is later than the letter's"),
        (2, LATER, "its timestamp is later than the letter's"),
        (1, WHOLE._replace(key=b"other"), "its key is not the letter's"),
        (1, WHOLE._replace(key=None), "its key is not the letter's"),
        (1, WHOLE._replace(headers=[*CALLERS, ("a", b"b")]), "its headers are not the letter's"),
        (1, WHOLE._replace(headers=CALLERS[1:]), "its headers are not the letter's"),
        (1, WHOLE._replace(value=b"{ }"), "its value has 3 bytes"),
        (2, WHOLE._replace(value=b"{ }"), "its value has 3 bytes"),
        (2, WHOLE._replace(value=None), "its value has 0 bytes"),
    ],
)
def test_a_record_that_took_the_place_of_a_shortened_letters_record_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch, form: int, there: Record, why: str
) -> None:
    letters = Letters(WHOLE, form)

    closed = replay(monkeypatch, letters, there)

    assert letters.replayed is None
    assert closed.left == {
        PLACE: f"its value was left out, and TB/0@7 is another record now ({why}): discard the "
        "letter, and have its caller send the request again"
    }


@pytest.mark.parametrize("form", [1, 2])
def test_a_record_of_a_caller_whose_clock_is_ahead_is_not_called_another_record(
    monkeypatch: pytest.MonkeyPatch, form: int
) -> None:
    letters = Letters(WHOLE, form)

    closed = replay(monkeypatch, letters, LATER._replace(has_broker_time=False))

    assert letters.replayed is None
    assert closed.left[PLACE].startswith(
        "its value was left out, and TB/0@7 may be another record now: its timestamp, which its "
        "producer set, is later than the letter's"
    )
    assert "this record may be the only copy of the request" in closed.left[PLACE]
    assert "have its caller send the request again before you discard" in closed.left[PLACE]


def test_a_record_with_another_key_is_another_record_whoever_set_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = LATER._replace(has_broker_time=False, key=b"other")
    closed = replay(monkeypatch, Letters(WHOLE, 1), there)

    assert "TB/0@7 is another record now (its key is not the letter's)" in closed.left[PLACE]


@FORMS
def test_clocks_that_are_a_second_apart_do_not_prevent_a_replay(
    monkeypatch: pytest.MonkeyPatch, form: int
) -> None:
    closed = replay(monkeypatch, Letters(WHOLE, form), WHOLE._replace(timestamp_ms=1001))

    assert closed.done == [PLACE]


def test_a_whole_letter_is_replayed_whatever_is_at_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = Letters(WHOLE, 0)

    assert replay(monkeypatch, letters, record(7, b"other", 9999)).done == [PLACE]
    assert letters.replayed == ReplayRecord(SHARD, 7, b"key", b"{}", CALLERS)


@pytest.mark.parametrize("form", [1, 2])
def test_a_shortened_letter_is_replayed_although_another_clock_was_ahead(
    monkeypatch: pytest.MonkeyPatch, form: int
) -> None:
    there = LATER._replace(timestamp_ms=60_001)
    assert replay(monkeypatch, Letters(WHOLE, form), there).done == [PLACE]
