"""How much of the dead-letter topic is read, on a real broker."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from blackbox.journal.access import KafkaAccess
from blackbox.journal.letterbox import HEADER, LONGEST_STRETCH, Letter, Letterbox
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
