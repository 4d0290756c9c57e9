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
from tests.fakes import record

SHARD = Shard("TB", 0)
PLACE = "letters/0@0"
ID = request_id(SHARD, 3).encode()
CALLERS: Headers = [("CALLER_SERVICE", b"shop"), ("trace", b"1")]


class Letters:
    """The dead-letter topic, with one letter: the first or second form of that of `original`."""

    def __init__(self, original: Record, *, is_shortened: bool) -> None:
        forms = list(forms_of(SHARD, "letters", original, "outcome-unknown", "it may have been"))
        _, _, key, value, headers, _ = forms[is_shortened]
        as_read = [(n, v.encode() if isinstance(v, str) else v) for n, v in headers]
        self.letter = DeadLetter.of(Record(0, 1, key, value, as_read), PLACE)
        self.replayed: ReplayRecord | None = None

    def newest(
        self,
        take: Callable[[DeadLetter], DeadLetter | None],
        limit: int | None = None,
        keep: Callable[[DeadLetter], DeadLetter] = lambda letter: letter,
    ) -> list[DeadLetter]:
        return [keep(self.letter)]

    def close_letters(self, places: Mapping[str, ReplayRecord | None], choose: object) -> list[str]:
        [self.replayed] = places.values()
        return list(places)


def replay(monkeypatch: pytest.MonkeyPatch, letters: Letters, original: Record) -> ClosedLetters:
    """Replay the letter, while its request topic has this record."""

    class Journal:
        def records(self, offsets: Iterable[int]) -> dict[int, Record]:
            return {original.offset: original}

        def close(self) -> None: ...

    monkeypatch.setattr(DeadLetters, "_dead_letter_topic", lambda _: letters)
    monkeypatch.setattr(dead_letters, "ShardJournal", lambda *_: Journal())
    lookup = StatusLookup(load(kafka_bootstrap_servers="127.0.0.1:1"))
    return DeadLetters(lookup, "letters").close_letters([PLACE], replay=True)


@pytest.mark.parametrize("is_shortened", [False, True], ids=["whole", "value left out"])
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
    monkeypatch: pytest.MonkeyPatch, own: Headers, is_shortened: bool
) -> None:
    original = record(7)._replace(headers=[*CALLERS, *own])
    letters = Letters(original, is_shortened=is_shortened)

    closed = replay(monkeypatch, letters, original)

    assert closed.done == [PLACE]
    assert letters.replayed == ReplayRecord(SHARD, 7, b"key", b"{}", CALLERS)


def test_a_dead_letter_with_nothing_in_it_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Record(7, 1, None, None, [])

    closed = replay(monkeypatch, Letters(nothing, is_shortened=False), nothing)

    assert closed.left == {PLACE: "nothing is left of the request; have its caller send it again"}
