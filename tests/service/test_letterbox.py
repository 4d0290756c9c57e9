"""How much of the dead-letter topic is read, on a real broker."""

from __future__ import annotations

import tracemalloc
from contextlib import closing

import pytest
from confluent_kafka import Producer

from blackbox.admin.admin import Admin
from blackbox.api.answers import LetterState
from blackbox.journal.access import KafkaAccess
from blackbox.journal.letterbox import (
    HEADER,
    LONGEST_STRETCH,
    MOST_SHOWN_BYTES,
    Letter,
    Letterbox,
    beginning,
)
from blackbox.journal.shard_journal import ShardJournal
from tests.world import World

pytestmark = pytest.mark.service

LETTERS = 1000


@pytest.fixture
def box(world: World) -> Letterbox:
    """A thousand letters; the newest hundred and every tenth of the others were discarded."""
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers, "linger.ms": 20})
    for number in range(LETTERS):
        producer.produce(world.dead_letters, b"%d" % number)
    for number in range(LETTERS):
        if number >= LETTERS - 100 or number % 10 == 0:
            mark = f"discarded {world.dead_letters}/0@{number}"
            producer.produce(world.dead_letters, None, headers=[(HEADER, mark.encode())])
    assert producer.flush(60) == 0
    return Letterbox(KafkaAccess(world.kafka.bootstrap_servers, world.name), world.dead_letters)


OPEN = [number for number in reversed(range(LETTERS - 100)) if number % 10]


LARGE = 100
SIZE = 500_000


def test_of_large_letters_no_more_is_held_than_is_shown(world: World) -> None:
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    for number in range(LARGE):
        producer.produce(world.dead_letters, "ä".encode() * (SIZE // 2), key=b"%d" % number)
        producer.poll(0)
    assert producer.flush(60) == 0
    with closing(Admin(world.settings())) as admin:
        admin.letters(limit=1)
        tracemalloc.start()
        try:
            found = admin.letters(limit=LARGE)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < LARGE * SIZE / 2
    assert [letter.key for letter in found] == [b"%d" % number for number in reversed(range(LARGE))]
    assert {letter.value for letter in found} == {"ä".encode() * (MOST_SHOWN_BYTES // 2)}
    assert {LetterState.of(letter).value_bytes for letter in found} == {SIZE}


@pytest.mark.parametrize("text", ["abc", "aäbc", "a€bc", "a😀bc", "😀"])
def test_what_is_cut_ends_with_a_whole_character(text: str) -> None:
    held = text.encode()
    for most in range(1, 8):
        assert beginning(held, most) == held[:most].decode(errors="ignore").encode()


def number_of(letter: Letter) -> int | None:
    return None if letter.became else int(letter.value or b"")


@pytest.mark.parametrize("limit", [1, 7, 100, 799, LETTERS, None])
def test_the_newest_open_letters_are_found_whatever_the_limit(
    box: Letterbox, limit: int | None
) -> None:
    assert box.newest(number_of, limit) == OPEN[:limit]


def test_no_more_is_read_than_it_takes(box: Letterbox, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    requests = ShardJournal.requests

    def counted(journal: ShardJournal, start: int, end: int) -> object:
        read.append(end - start)
        return requests(journal, start, end)

    monkeypatch.setattr(ShardJournal, "requests", counted)
    assert box.newest(lambda letter: letter.place, 1) == [box.newest(lambda one: one.place)[0]]
    without_the_second = read[:-1]
    assert sum(without_the_second) < LETTERS
    assert max(without_the_second) <= LONGEST_STRETCH
