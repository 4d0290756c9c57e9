"""A walk over all that is pending, on every kind of Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import redis

from blackbox.core.bits import SEGMENT
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Binding, Change, Cold, Positions
from blackbox.core.settlement import Settlement
from blackbox.index import walk as walks
from blackbox.index.connection import RedisSession
from blackbox.index.shard_index import ShardIndex
from blackbox.index.walk import Walk, WalkVoid
from blackbox.records.errors import IndexLost
from blackbox.records.receipt import Mark
from blackbox.records.request import member
from tests.contract.conftest import Backend, Opener
from tests.contract.held import NOW_MS, PREFIX, entry, store

OURS = Binding("cluster", "topic", "receipts", "blackbox")
MANY = 3000
"""So many entries that a walk needs several slices."""


@pytest.fixture
def index(open_index: Opener) -> ShardIndex:
    """An index whose journals are at their start."""
    index = open_index()
    index.begin(Positions(0, 0), binding=OURS)
    return index


@pytest.fixture
def walk(index: ShardIndex) -> Iterator[Callable[[], Walk]]:
    """Start a walk; all of them are closed at the end."""
    begun: list[Walk] = []

    def begin() -> Walk:
        begun.append(index.walk())
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def walked(walk: Walk) -> int:
    """The lowest pending request, after a complete walk."""
    while walk.slice():
        pass
    return walk.lowest


Begin = Callable[[], Walk]


def test_a_walk_finds_the_lowest_pending_request_whatever_its_due_time(
    index: ShardIndex, walk: Begin
) -> None:
    store(index, 0, 20, {o: entry(NOW_MS - o) for o in range(5, 20)})
    index.settle(Settlement(dict.fromkeys(range(5, 9)), 1))

    assert walked(walk()) == 9


def test_a_walk_finds_the_lowest_pending_request_among_many(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, 2 * MANY, {o: entry(NOW_MS - o) for o in range(MANY, 2 * MANY)})
    walking = walk()

    assert walking.slices() == 1 + MANY // walks.SLICE
    assert walked(walking) == MANY


def test_a_walk_ends_at_the_first_request_that_is_pending(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, MANY, {o: entry(NOW_MS - o) for o in range(7, MANY)})

    assert not walk().slice()


def test_a_walk_that_is_cut_short_counts_as_far_as_it_got(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, MANY, {MANY - 1: entry()})
    walking = walk()

    assert walking.slice()
    assert walking.lowest == walks.SLICE


def test_a_walk_starts_at_the_last_mark(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, MANY, {MANY - 1: entry()})
    assert walk().slices() > 2
    index.settle(Settlement({}, 1, mark=Mark(MANY - 10, 0)))
    walking = walk()

    assert (walking.slices(), walked(walking)) == (1, MANY - 1)


def test_a_walk_starts_where_the_index_starts(
    open_index: Opener, walk: Begin, index: ShardIndex
) -> None:
    index.begin(Positions(MANY, 0), binding=OURS)
    store(index, MANY, MANY + 9, {MANY + 4: entry()})
    walking = walk()

    assert (walking.slices(), walked(walking)) == (1, MANY + 4)


def test_a_walk_starts_at_the_end_of_a_shortened_journal(
    open_index: Opener, walk: Begin, index: ShardIndex
) -> None:
    index.begin(Positions(50, 0), binding=OURS)
    store(index, 50, 60, {})
    index.load()
    index.rebind(Positions(40, 0), OURS)
    store(index, 40, 70, {45: entry()})

    assert walked(walk()) == 45


def test_without_pending_requests_the_mark_is_the_position(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, 3, {1: entry()})
    index.settle(Settlement({1: None}, 5))
    walking = walk()

    assert (walking.positions, walked(walking)) == (Positions(3, 5), 3)


def test_a_walk_ignores_requests_stored_after_its_start(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, 3, {})
    walking = walk()
    store(index, 3, 9, {8: entry()})

    assert walked(walking) == 3


@pytest.mark.parametrize("cold", [4, SEGMENT + 4])
def test_a_walk_finds_the_lowest_request_of_the_cold_tier(
    index: ShardIndex, walk: Begin, cold: int
) -> None:
    end = SEGMENT + 10
    changes: dict[int, Change] = {cold: Cold(None), end - 2: Cold(None), end - 1: entry()}
    store(index, 0, end, changes)

    assert walked(walk()) == cold


def test_no_walk_starts_while_receipts_name_requests_that_are_not_yet_read(
    index: ShardIndex, walk: Begin
) -> None:
    store(index, 0, 3, {})
    index.settle(Settlement({5: None}, 1))

    with pytest.raises(WalkVoid, match="not yet read from Kafka"):
        walk()
    store(index, 3, 6, {4: entry()})
    assert walked(walk()) == 4


def test_no_walk_starts_until_an_early_replacement_is_read(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    index.settle(Settlement({0: None}, 0, early=[2]))

    with pytest.raises(WalkVoid, match="not yet read from Kafka"):
        walk()
    store(index, 2, 3, {2: entry()})

    assert walked(walk()) == 1


def test_receipts_below_the_start_of_a_walk_name_only_requests_below_it(
    index: ShardIndex, walk: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(RedisSession):
        """Others change the index between any two commands."""

        def run(
            self, commands: Iterable[bytes], while_busy: Callable[[], None] | None = None
        ) -> list[Any]:
            found: list[Any] = []
            for command in commands:
                found += super().run([command], while_busy)
                at = index.positions.requests
                store(index, at, at + 1, {at: entry()})
                index.settle(Settlement({at: None}, at + 1))
            return found

    monkeypatch.setattr(walks, "RedisSession", Interrupted)
    positions = walk().positions

    assert positions.receipts <= positions.requests, "the receipt at an offset names that request"


def test_a_hot_request_below_all_cold_requests_is_the_mark(index: ShardIndex, walk: Begin) -> None:
    store(index, 0, 10, {3: entry(), 4: Cold(None)})

    assert walked(walk()) == 3


def test_a_walk_finds_a_pending_request_while_others_are_stored_and_removed(
    index: ShardIndex, walk: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "SLICE", 20)
    store(index, 0, MANY, {o: entry(NOW_MS + 7 * o % 1000) for o in range(MANY)})
    stays = 1500
    index.settle(Settlement(dict.fromkeys(range(MANY // 4)), 1))
    walking = walk()
    gone, end, receipts = MANY // 4, MANY, 1
    while walking.slice():
        ended = [o for o in range(gone, min(gone + 60, MANY)) if o != stays]
        gone, receipts = gone + 60, receipts + 1
        index.settle(Settlement(dict.fromkeys(ended), receipts))
        index.postpone({stays: (NOW_MS + receipts, entry())}, NOW_MS)
        if receipts % 2:
            store(index, end, end + 40, {o: entry() for o in range(end, end + 40)})
            end += 40

    assert walking.lowest <= stays


def test_a_walk_remains_valid_while_its_owner_works(
    index: ShardIndex, open_index: Opener, walk: Begin
) -> None:
    store(index, 0, 9, {4: entry(), 5: entry()})
    walking = walk()
    store(open_index(), 9, 12, {10: entry()})
    index.settle(Settlement({5: None}, 4, mark=Mark(4, 0), recorded=[2]))

    assert walked(walking) == 4


def another_opening(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    open_index().take_over(OURS)


def a_rebuild(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    open_index().begin(Positions(9, 3), binding=OURS, is_rebuild=True)


def a_rebuild_that_ended(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    other = open_index()
    other.begin(Positions(9, 3), binding=OURS, is_rebuild=True)
    other.finish(3, OffsetSet())


def requests_going_back(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    client.hset(PREFIX + "state", "requests", 8)


def receipts_going_back(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    client.set(PREFIX + "receipts", 2)


def due_times_lost(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    client.delete(PREFIX + "due")


def due_times_lost_and_others_added(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    client.delete(PREFIX + "due")
    client.zadd(PREFIX + "due", {member(7): NOW_MS})


def all_lost(index: ShardIndex, open_index: Opener, client: redis.Redis) -> None:
    client.delete(*client.keys(PREFIX.replace("{", "\\{") + "*"))


EVENTS = [
    another_opening,
    a_rebuild,
    a_rebuild_that_ended,
    requests_going_back,
    receipts_going_back,
    due_times_lost,
    due_times_lost_and_others_added,
    all_lost,
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__.replace("_", " "))
def test_a_walk_is_discarded_after_a_new_opening_a_rollback_or_a_loss(
    index: ShardIndex, open_index: Opener, client: redis.Redis, walk: Begin,
    event: Callable[[ShardIndex, Opener, redis.Redis], None],
) -> None:  # fmt: skip
    store(index, 0, 9, {4: entry(), 5: entry()})
    index.settle(Settlement({}, 3))
    walking = walk()
    event(index, open_index, client)

    with pytest.raises(WalkVoid):
        walked(walking)


@pytest.mark.parametrize(
    "event",
    [event for event in EVENTS if event not in (requests_going_back, receipts_going_back)],
    ids=lambda event: event.__name__.replace("_", " "),
)
def test_no_walk_starts_after_a_new_opening_or_a_loss(
    index: ShardIndex, open_index: Opener, client: redis.Redis, walk: Begin,
    event: Callable[[ShardIndex, Opener, redis.Redis], None],
) -> None:  # fmt: skip
    store(index, 0, 9, {4: entry(), 5: entry()})
    index.settle(Settlement({}, 3))
    event(index, open_index, client)

    with pytest.raises(WalkVoid):
        walk()


def test_a_walk_ends_with_its_connection(index: ShardIndex, walk: Begin, backend: Backend) -> None:
    store(index, 0, 9, {4: entry()})
    walking = walk()
    backend.cut()

    with pytest.raises(IndexLost):
        walked(walking)
