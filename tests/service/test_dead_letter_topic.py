"""How much of the dead-letter topic is read, on a real broker."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Producer

from blackbox.admin import dead_letters
from blackbox.admin.admin import Admin
from blackbox.api.answers import LetterState
from blackbox.journal.dead_letter_topic import (
    HEADER,
    LONGEST_STRETCH,
    MOST_CHARS,
    MOST_SHOWN_BYTES,
    DeadLetter,
    DeadLetterTopic,
    first_bytes,
)
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.outgoing import LETTER_HEADERS
from tests.support.world import World, read_all

pytestmark = pytest.mark.service

LETTERS = 1000


def headers(topic: str, offset: int) -> list[tuple[str, str | bytes | None]]:
    about = ("not-json", "no request", f"{topic}/0@{offset}")
    return list(zip(LETTER_HEADERS, about, strict=True))


@pytest.fixture
def box(world: World) -> DeadLetterTopic:
    """A thousand dead letters; the newest hundred and every tenth of the others were discarded."""
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers, "linger.ms": 20}
    producer = Producer(settings | {"enable.idempotence": True})  # else a retry changes the order
    for number in range(LETTERS):
        about = headers(world.requests, number)
        producer.produce(world.dead_letters, b"%d" % number, headers=about)
    for number in range(LETTERS):
        if number >= LETTERS - 100 or number % 10 == 0:
            mark = f"discarded {world.dead_letters}/0@{number}"
            producer.produce(world.dead_letters, None, headers=[(HEADER, mark.encode())])
    assert producer.flush(60) == 0
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    return DeadLetterTopic(access, world.dead_letters, [world.requests])


OPEN = [number for number in reversed(range(LETTERS - 100)) if number % 10]


LARGE = 100
SIZE = 500_000


def test_only_the_shown_part_of_large_dead_letters_is_kept_in_memory(world: World) -> None:
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(settings | {"enable.idempotence": True})  # else a retry changes the order
    for number in range(LARGE):
        value, about = "ä".encode() * (SIZE // 2), headers(world.requests, number)
        producer.produce(world.dead_letters, value, key=b"%d" % number, headers=about)
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


MANY = 300


def test_long_details_of_forged_dead_letters_are_not_kept_in_memory(world: World) -> None:
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers, "compression.type": "zstd"}
    producer = Producer(settings | {"enable.idempotence": True})
    for number in range(MANY):
        (_, reason), _, source = headers(world.requests, number)
        forged = zip(LETTER_HEADERS, (reason, SIZE * b"x", source[1]), strict=True)
        producer.produce(world.dead_letters, b"v", headers=list(forged))
        producer.poll(0)
    assert producer.flush(60) == 0
    with closing(Admin(world.settings())) as admin:
        tracemalloc.start()
        try:
            found = admin.letters()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < MANY * SIZE / 2
    assert len(found) == MANY
    assert {letter.detail for letter in found} == {MOST_CHARS["blackbox-detail"] * "x"}


@pytest.mark.parametrize("text", ["abc", "aäbc", "a€bc", "a😀bc", "😀"])
def test_a_cut_text_ends_with_a_complete_character(text: str) -> None:
    held = text.encode()
    for most in range(1, 8):
        assert first_bytes(held, most) == held[:most].decode(errors="ignore").encode()


def number_of(letter: DeadLetter) -> int | None:
    return None if letter.became else int(letter.value or b"")


@pytest.mark.parametrize("limit", [1, 7, 100, 799, LETTERS, None])
def test_the_newest_open_dead_letters_are_found_for_any_limit(
    box: DeadLetterTopic, limit: int | None
) -> None:
    assert box.newest(number_of, limit) == OPEN[:limit]


def test_dead_letters_are_read_backwards_only_as_far_as_needed(
    box: DeadLetterTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_letter_whose_mark_an_open_transaction_hides_is_not_replayed_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    own, dispatch = (Producer(servers | more) for more in ({}, {"transactional.id": world.name}))
    own.produce(world.dead_letters, b"no request", headers=headers(world.requests, 0))
    assert own.flush(60) == 0
    dispatch.init_transactions()
    dispatch.begin_transaction()
    dispatch.produce(world.dead_letters, b"no request", headers=headers(world.requests, 1))
    assert dispatch.flush(60) == 0
    place = f"{world.dead_letters}/0@0"
    own.produce(world.dead_letters, None, headers=[(HEADER, f"replayed {place}".encode())])
    assert own.flush(60) == 0

    still_open, sleep = [dispatch], time.sleep

    def commit_first(duration_s: float) -> None:
        while still_open:
            still_open.pop().commit_transaction()
        sleep(duration_s)

    monkeypatch.setattr(time, "sleep", commit_first)  # of the reader, between its looks
    with closing(Admin(world.settings())) as admin:
        assert admin.close_letters([place], replay=True).done == []
        [letter] = [one for one in admin.letters(is_open=False) if one.place == place]
    assert letter.became == "replayed"


def test_many_large_dead_letters_are_read_once_and_replayed_in_several_transactions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(settings | {"enable.idempotence": True})  # else a retry changes the order
    for number in range(3):
        about = headers(world.requests, number)
        producer.produce(world.dead_letters, b"no request %d" % number, headers=about)
    assert producer.flush(60) == 0
    places = [f"{world.dead_letters}/0@{offset}" for offset in range(3)]
    monkeypatch.setattr(dead_letters, "MOST_REPLAYED_BYTES", 1)
    looks: list[object] = []
    newest = DeadLetterTopic.newest

    def counted(topic: DeadLetterTopic, take: Any, limit: int | None = None, **more: Any) -> Any:
        looks.append(more.get("is_settled"))
        return newest(topic, take, limit, **more)

    monkeypatch.setattr(DeadLetterTopic, "newest", counted)
    with closing(Admin(world.settings())) as admin:
        done = admin.close_letters(places, replay=True)
        assert (done.done, done.left) == (places, {})
        assert looks == [True]
        assert admin.letters() == []
    written = read_all(world.kafka.bootstrap_servers, world.requests)
    assert [record.value() for record in written] == [b"no request %d" % n for n in range(3)]
    assert len({record.offset() for record in written}) == 3
    assert written[-1].offset() == 4, "markers of two transactions are between the records"


def test_dead_letters_of_another_deployment_are_neither_shown_nor_closed(world: World) -> None:
    other = f"{world.name}.other"
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(settings | {"enable.idempotence": True})  # else a retry changes the order
    for topic in (world.requests, other):
        producer.produce(world.dead_letters, b"no request", headers=headers(topic, 0))
    assert producer.flush(60) == 0
    [own, foreign] = [f"{world.dead_letters}/0@{offset}" for offset in range(2)]
    with closing(Admin(world.settings())) as admin:
        assert [letter.place for letter in admin.letters(is_open=False)] == [own]
        for again in (True, False):
            done = admin.close_letters([foreign], replay=again)
            assert (done.done, list(done.left)) == ([], [foreign])
            assert done.left[foreign].startswith("no such letter")
        assert admin.close_letters([own, foreign], replay=False).done == [own]
    world.requests = other
    with closing(Admin(world.settings())) as admin:
        [letter] = admin.letters()
        assert (letter.place, letter.became) == (foreign, None)
