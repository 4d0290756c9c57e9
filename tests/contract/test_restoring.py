"""The contract of an index that is being restored: nobody but its run writes there, on every Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from blackbox.doubt import Doubt, LabelsMoved
from blackbox.entry import Entry
from blackbox.index.bits import SEGMENT
from blackbox.index.restoring import NOTHING, Content, NotEmpty, Restoring, Superseded
from blackbox.plan import Labels
from blackbox.request import member
from tests.contract.conftest import Backend, Opener
from tests.contract.held import GRACE_S, NOW_MS, PREFIX, SHARD, entry, held, segments, store, stored

Open = Callable[[str], Restoring]

ENTRIES: dict[int, Entry] = {3: entry(NOW_MS + 5), 4: entry(caller_id="order-4"), 9: entry()}
LABELS = Labels(10, 7)


@pytest.fixture
def open_restore(backend: Backend) -> Iterator[Open]:
    """Another part in a run of this name."""
    connections = backend.connections()
    opened: list[Restoring] = []

    def open_another(run: str) -> Restoring:
        opened.append(Restoring(SHARD, connections, run, grace_s=GRACE_S))
        return opened[-1]

    yield open_another
    for index in opened:
        index.close()
    connections.disconnect()


@pytest.fixture
def restoring(open_restore: Open) -> Restoring:
    """A restore that has begun."""
    index = open_restore("one")
    index.begin(range(10), replace=False)
    return index


def put(index: Restoring, entries: dict[int, Entry] = ENTRIES) -> Content:
    content, _ = index.put(list(entries.items()), NOW_MS)
    return content


def test_what_is_put_is_an_index_once_it_is_finished(
    restoring: Restoring, open_index: Opener, client: redis.Redis
) -> None:
    restoring.finish(LABELS, 100, put(restoring))

    index = open_index()
    assert index.load() == LABELS
    assert index.due(NOW_MS + 5, 10).pending == 3
    found = held(client)
    assert found.due == [(NOW_MS, 4), (NOW_MS, 9), (NOW_MS + 5, 3)]
    assert (found.payloads, found.holders) == (stored(ENTRIES), {"order-4": 4})
    assert sorted(client.hgetall(PREFIX + "state")) == [
        b"format",
        b"known_from",
        b"largest",
        b"requests",
    ]


def test_an_index_that_is_not_finished_is_empty_for_its_next_owner(
    restoring: Restoring, open_index: Opener
) -> None:
    put(restoring)

    assert open_index().load() is None


def test_tasks_put_parts_in_any_order_and_again(
    restoring: Restoring, open_restore: Open, client: redis.Redis
) -> None:
    sums = [put(open_restore("one"), {offset: ENTRIES[offset]}) for offset in (9, 4, 3)]
    put(open_restore("one"))

    restoring.finish(LABELS, 100, sum(sums, NOTHING))

    assert held(client).payloads == stored(ENTRIES)


def test_payloads_outlive_their_due_time(restoring: Restoring, client: redis.Redis) -> None:
    put(restoring, {3: entry(NOW_MS + 5000), 4: entry(NOW_MS - 5000)})

    ttls = [client.ttl(PREFIX + f"msg:{member(offset).decode()}") for offset in (3, 4)]
    assert ttls == pytest.approx([GRACE_S + 5, GRACE_S], abs=2)


def test_an_index_with_labels_is_not_emptied(
    open_restore: Open, open_index: Opener, client: redis.Redis
) -> None:
    store_some(open_index)
    before = held(client)

    with pytest.raises(NotEmpty, match="TB-3: the index is not empty"):
        open_restore("one").begin(range(10), replace=False)

    assert held(client) == before


def test_an_index_with_labels_is_emptied_when_asked_to(
    open_restore: Open, open_index: Opener, client: redis.Redis
) -> None:
    store_some(open_index)

    restoring = open_restore("one")
    restoring.begin(range(10), replace=True)
    restoring.finish(LABELS, 0, NOTHING)

    assert (held(client).due, held(client).labels) == ([], LABELS)


def test_an_index_of_another_version_is_emptied_only_when_asked_to(
    open_restore: Open, client: redis.Redis
) -> None:
    client.hset(PREFIX + "state", mapping={"format": "1", "requests": 3})

    with pytest.raises(NotEmpty):
        open_restore("one").begin(range(10), replace=False)
    open_restore("one").begin(range(10), replace=True)

    assert list(client.hgetall(PREFIX + "state")) == [b"restore", b"known_from"]


def test_removals_of_before_are_forgotten(
    open_restore: Open, open_index: Opener, client: redis.Redis
) -> None:
    index = open_index()
    index.begin(Labels(0, 0))
    index.settle({5: None, SEGMENT: None, 1500 * SEGMENT: None}, 2)

    open_restore("one").begin(range(1500 * SEGMENT + 1), replace=True)

    assert segments(client) == set()


# others


def test_a_task_that_is_late_writes_nothing_into_the_index_of_a_service(
    restoring: Restoring, open_index: Opener, client: redis.Redis
) -> None:
    put(restoring)
    service = open_index()
    service.begin(Labels(0, 0))
    store(service, 0, 5, {4: entry(caller_id="theirs")})
    before = held(client)

    with pytest.raises(Superseded, match="a service or another restore has taken the index over"):
        put(restoring)
    with pytest.raises(Superseded):
        restoring.finish(LABELS, 0, NOTHING)

    assert held(client) == before
    assert service.load() == Labels(5, 0)


def test_a_task_that_is_late_writes_nothing_into_the_index_of_another_restore(
    restoring: Restoring, open_restore: Open, client: redis.Redis
) -> None:
    put(restoring)
    other = open_restore("another")
    other.begin(range(10), replace=False)

    with pytest.raises(Superseded):
        put(restoring)

    other.finish(LABELS, 0, NOTHING)
    assert (held(client).due, held(client).holders) == ([], {})


def test_a_service_may_come_between_a_look_at_the_mark_and_the_write(
    restoring: Restoring, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_one_call(monkeypatch, restoring, "_watch", lambda: open_index().begin(Labels(0, 0)))

    with pytest.raises(Superseded):
        put(restoring)

    assert (held(client).due, held(client).labels) == ([], Labels(0, 0))


def test_a_service_may_come_while_the_index_is_checked(
    restoring: Restoring, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = put(restoring)
    after_one_call(monkeypatch, restoring, "_content", lambda: open_index().begin(Labels(0, 0)))

    with pytest.raises(Superseded):
        restoring.finish(LABELS, 0, content)

    assert (held(client).due, held(client).labels) == ([], Labels(0, 0))


def test_removals_that_a_service_has_marked_stay(
    open_restore: Open, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_over() -> None:
        service = open_index()
        service.begin(Labels(0, 0))
        service.settle({5: None}, 2)

    restoring = open_restore("one")
    after_one_call(monkeypatch, restoring, "_exec", take_over)

    with pytest.raises(Superseded):
        restoring.begin(range(10), replace=False)

    assert held(client).skip == {5}


def test_a_service_that_begins_too_late_sees_a_restored_index(
    restoring: Restoring, open_index: Opener, client: redis.Redis
) -> None:
    service = open_index()  # has seen an index without labels
    content = put(restoring)
    restoring.finish(LABELS, 0, content)

    with pytest.raises(LabelsMoved):
        service.begin(Labels(0, 0))

    assert len(held(client).due) == 3


@pytest.mark.parametrize(
    "lose",
    [
        lambda client: client.zrem(PREFIX + "due", member(3).decode()),
        lambda client: client.zincrby(PREFIX + "due", 1, member(3).decode()),
        lambda client: client.zadd(PREFIX + "due", {member(1).decode(): NOW_MS}),
        lambda client: client.hdel(PREFIX + "ids", "order-4"),
    ],
    ids=["an entry less", "another due time", "an entry more", "a caller id less"],
)
def test_an_index_that_is_not_what_the_journals_gave_is_not_finished(
    restoring: Restoring, open_index: Opener, client: redis.Redis, lose: Callable[[Any], object]
) -> None:
    content = put(restoring)
    lose(client)

    with pytest.raises(Doubt, match="did Redis lose writes meanwhile"):
        restoring.finish(LABELS, 0, content)

    assert open_index().load() is None


def test_many_entries_are_read_back_in_parts(restoring: Restoring) -> None:
    many = {offset: entry(NOW_MS + offset % 7) for offset in range(5000)}
    parts = [dict(list(many.items())[first : first + 1000]) for first in range(0, 5000, 1000)]

    restoring.finish(Labels(5000, 0), 0, sum((put(restoring, part) for part in parts), NOTHING))


def store_some(open_index: Opener) -> None:
    index = open_index()
    index.begin(Labels(0, 0))
    store(index, 0, 2, {0: entry(), 1: entry(caller_id="order-1")})


def after_one_call(
    monkeypatch: pytest.MonkeyPatch, restoring: Restoring, name: str, then: Callable[[], object]
) -> None:
    """Let something happen once, after the next call of a method."""
    method = getattr(restoring, name)

    def once(*given: Any) -> Any:
        monkeypatch.setattr(restoring, name, method)
        answer = method(*given)
        then()
        return answer

    monkeypatch.setattr(restoring, name, once)
