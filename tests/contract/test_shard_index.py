"""The contract of a shard's index, on every kind of Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from blackbox.core.bits import SEGMENT
from blackbox.core.interpret import refused_entry
from blackbox.core.parking import BAND_MS, LETTERS, bands_of, parked_at
from blackbox.core.plan import (
    Binding,
    Carried,
    Change,
    Cold,
    DueEntries,
    IndexMetadata,
    Plan,
    Positions,
    Postponed,
    Replacement,
    Touched,
    View,
)
from blackbox.core.resolve import resolve
from blackbox.core.settlement import Settlement
from blackbox.index import intake_changes
from blackbox.index.guarded_index import MAX_BATCH_BYTES
from blackbox.index.keys import SENTINEL
from blackbox.index.shard_index import ShardIndex
from blackbox.index.stored_fields import OLDER
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.errors import ForeignIndex, IndexLost, PositionsMoved, RecoveryRequired
from blackbox.records.receipt import Mark
from blackbox.records.refusal_causes import BROKEN_RULES
from blackbox.records.request import Cancel, Invalid, Reason, Record, Shard, member, request_id
from tests.contract.conftest import Backend, Opener
from tests.contract.held import (
    GRACE_S,
    NOW_MS,
    PREFIX,
    SHARD,
    Held,
    entry,
    held,
    loaded,
    segments,
    store,
    stored,
)

MANY = 2500
NOTHING = Touched((), ())
Verb = Callable[[ShardIndex], object]

VERBS: dict[str, Verb] = {
    "store": lambda index: store(index, 10, 12, {10: entry(), 11: Cancel("order-1")}),
    "due": lambda index: index.due(NOW_MS, 10),
    "settle": lambda index: index.settle(Settlement({0: None, 1: "order-1", 99: None}, 8)),
    "postpone": lambda index: index.postpone({0: (NOW_MS + 1, entry())}, NOW_MS),
}
verbs = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
DISPATCH = {name: verb for name, verb in VERBS.items() if name != "store"}
dispatch_verbs = pytest.mark.parametrize("verb", DISPATCH.values(), ids=DISPATCH)


@pytest.fixture
def index(open_index: Opener) -> ShardIndex:
    """An index whose journals are at their start."""
    index = open_index()
    index.begin(Positions(0, 0))
    return index


def begun(open_index: Opener, positions: Positions, changes: dict[int, Change]) -> ShardIndex:
    index = open_index()
    index.begin(Positions(0, 0))
    store(index, 0, positions.requests, changes)
    index.settle(Settlement({}, positions.receipts))
    return index


def set_positions(client: redis.Redis, positions: Positions | None) -> None:
    if positions is None:
        client.delete(PREFIX + "state", PREFIX + "receipts")
    else:
        client.hset(PREFIX + "state", "requests", positions.requests)
        client.set(PREFIX + "receipts", positions.receipts)


# positions


def test_an_empty_redis_has_no_positions(open_index: Opener) -> None:
    assert open_index().load() is None


def test_the_next_owner_loads_the_positions_of_the_previous_one(open_index: Opener) -> None:
    open_index().begin(Positions(7, 3))

    following = open_index()

    assert (loaded(following), following.positions) == (
        IndexMetadata(Positions(7, 3)),
        Positions(7, 3),
    )


def leave_no_positions(client: redis.Redis) -> None:
    """Entries, a caller id and removals read ahead, of an index whose positions are lost."""
    client.hset(PREFIX + "state", "known_from", 5)
    client.hset(PREFIX + "skip", "0", b"\xff")
    client.zadd(PREFIX + "ignored", {member(3).decode(): 3})
    client.zadd(PREFIX + "due", {member(0).decode(): NOW_MS, member(7).decode(): NOW_MS})
    client.hset(PREFIX + "ids", "order-7", member(7).decode())
    for offset in (0, 7):
        client.set(PREFIX + f"msg:{member(offset).decode()}", entries.encode(entry()))


def test_a_new_index_contains_nothing_of_an_earlier_one(
    open_index: Opener, client: redis.Redis
) -> None:
    leave_no_positions(client)

    index = open_index()
    index.begin(Positions(0, 0))

    found = held(client)
    assert (found.positions, found.due, found.holders) == (Positions(0, 0), [], {})
    assert (found.skip, index.unrecorded(9)) == (set(), (0, []))
    assert client.hget(PREFIX + "state", "known_from") == b"0"


def test_payloads_outlive_their_due_time(open_index: Opener, client: redis.Redis) -> None:
    index = open_index()
    index.begin(Positions(0, 0))
    store(index, 0, 5, {3: entry(NOW_MS + 5000), 4: entry(NOW_MS - 5000)})

    ttls = [client.ttl(PREFIX + f"msg:{member(offset).decode()}") for offset in (3, 4)]
    assert ttls == pytest.approx([GRACE_S + 5, GRACE_S], abs=2)


def test_a_leftover_entry_beyond_the_position_is_not_delivered_again_and_again(
    open_index: Opener, client: redis.Redis
) -> None:
    leave_no_positions(client)
    index = open_index()
    index.begin(Positions(0, 0))
    store(index, 0, 5, {0: entry()})  # the rest is still in Kafka

    delivered = []
    for receipts in (2, 4):
        now = [offset for offset, _ in index.due(NOW_MS, 10).entries]
        index.settle(Settlement(dict.fromkeys(now), receipts))
        delivered += now

    assert delivered == [0]


def test_only_one_of_two_owners_starts_an_empty_index(open_index: Opener) -> None:
    earlier, later = open_index(), open_index()
    earlier.begin(Positions(0, 0))

    with pytest.raises(PositionsMoved, match=r"expected .*, found"):
        later.begin(Positions(5, 5))

    assert loaded(earlier) == IndexMetadata(Positions(0, 0))


def test_only_an_owner_that_saw_every_change_rebuilds_an_index(
    index: ShardIndex, open_index: Opener
) -> None:
    late = open_index()
    store(index, 0, 5, {0: entry()})

    with pytest.raises(PositionsMoved):
        late.begin(Positions(0, 0))

    [(offset, stored)] = index.due(NOW_MS, 10).entries
    assert (offset, stored is None) == (0, False)


def test_an_index_of_a_later_format_is_refused_with_the_remedy(
    index: ShardIndex, client: redis.Redis
) -> None:
    client.hset(PREFIX + "state", "format", "11")

    for verb in (index.load, *(lambda v=v: v(index) for v in VERBS.values())):
        with pytest.raises(
            ForeignIndex, match="format '11', but this version reads 10; run the version"
        ):
            verb()


@pytest.mark.parametrize("older", OLDER)
def test_an_index_of_an_earlier_format_counts_as_empty(
    index: ShardIndex, open_index: Opener, client: redis.Redis, older: bytes
) -> None:
    store(index, 0, 1, {0: entry()})
    client.hset(PREFIX + "state", "format", older)

    for verb in VERBS.values():
        with pytest.raises(PositionsMoved):
            verb(index)
    later = open_index()
    assert later.load() is None
    later.begin(Positions(7, 3))
    assert (held(client).positions, held(client).due) == (Positions(7, 3), [])


MOVED = {
    "absent": None,
    "requests lower": Positions(9, 7),
    "receipts lower": Positions(10, 6),
    "receipts higher": Positions(10, 8),
}


@pytest.mark.parametrize(
    ("verb", "found"),
    [
        pytest.param(verb, found, id=f"{name}, {what}")
        for name, verb in VERBS.items()
        for what, found in MOVED.items()
        if name in DISPATCH or not what.startswith("receipts")
    ],
)
def test_positions_that_moved_stop_every_verb_and_change_nothing(
    open_index: Opener, client: redis.Redis, verb: Verb, found: Positions | None
) -> None:
    index = begun(open_index, Positions(10, 7), {0: entry(), 1: entry(caller_id="order-1")})
    set_positions(client, found)
    before = held(client)

    for _ in range(2):
        with pytest.raises(PositionsMoved):
            verb(index)

    assert held(client) == before


def test_intake_elsewhere_does_not_stop_dispatch(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    store(open_index(), 0, 2, {0: entry(), 1: entry()})

    assert [offset for offset, _ in index.due(NOW_MS, 10).entries] == [0, 1]
    index.postpone({1: (NOW_MS + 5, entry())}, NOW_MS)
    index.settle(Settlement({0: None}, 4))
    assert held(client).positions == Positions(2, 4)
    assert held(client).due == [(NOW_MS + 5, 1)]


def test_intake_elsewhere_continues_while_receipts_are_settled_here(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    elsewhere = open_index()
    store(elsewhere, 0, 2, {0: entry(), 1: entry()})
    looks = 0

    def settled_in_between(view: View) -> Plan:
        nonlocal looks
        looks += 1
        index.settle(Settlement({looks - 1: None}, looks))
        return resolve([(2, entry())], view)

    elsewhere.store(2, 3, NOTHING, settled_in_between, NOW_MS)

    assert looks == 1
    assert held(client).positions == Positions(3, 1)
    assert held(client).offsets() == [1, 2]


def test_a_request_removed_just_before_it_is_read_is_never_stored(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    elsewhere = open_index()
    looks = 0

    def removed_in_between(view: View) -> Plan:
        nonlocal looks
        looks += 1
        if looks == 1:
            index.settle(Settlement({1: None}, 1))
        return resolve([(0, entry()), (1, entry())], view)

    elsewhere.store(0, 2, NOTHING, removed_in_between, NOW_MS)

    assert looks == 2
    assert held(client).offsets() == [0]


def test_a_caller_id_that_a_new_request_uses_is_not_freed(
    index: ShardIndex, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = open_index()
    store(elsewhere, 0, 1, {0: entry(caller_id="order-1")})
    commands = index._commands_that_settle

    def reused_in_between(*seen: Any) -> Iterator[bytes]:
        if elsewhere.positions.requests == 1:
            store(elsewhere, 1, 2, {1: entry(caller_id="order-1")})
        return commands(*seen)

    monkeypatch.setattr(index, "_commands_that_settle", reused_in_between)
    index.settle(Settlement({0: "order-1"}, 1))

    assert held(client).holders == {"order-1": 1}
    assert held(client).offsets() == [1]


def test_intake_elsewhere_marks_the_batch_read_ahead_as_stale(
    index: ShardIndex, open_index: Opener
) -> None:
    before = index.removed
    store(open_index(), 0, 1, {0: entry()})

    index.due(NOW_MS, 10)

    assert index.removed > before


def test_a_batch_that_another_owner_stored_is_not_stored_again(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    store(open_index(), 0, 2, {0: entry(), 1: entry()})
    before = held(client)

    assert store(index, 0, 2, {0: entry(1), 1: entry(1)}) == Plan()
    assert held(client) == before
    assert index.positions == Positions(2, 0)


@dispatch_verbs
def test_a_fenced_owner_changes_nothing_after_the_next_owner_has_settled(
    open_index: Opener, client: redis.Redis, verb: Verb
) -> None:
    zombie = begun(open_index, Positions(10, 7), {0: entry(), 1: entry(caller_id="order-1")})
    open_index().settle(Settlement({0: None}, 9))
    before = held(client)

    with pytest.raises(PositionsMoved):
        verb(zombie)

    assert held(client) == before


def test_a_shard_does_not_see_the_requests_of_another(index: ShardIndex, backend: Backend) -> None:
    connections = backend.connections()
    neighbour = ShardIndex(Shard("TB", 33), connections, grace_s=GRACE_S)
    store(index, 0, 1, {0: entry()})

    assert neighbour.load() is None
    neighbour.begin(Positions(0, 0))
    assert neighbour.due(NOW_MS, 10).entries == []
    neighbour.close()
    connections.disconnect()


# store


def test_a_stored_request_is_read_unchanged_once_it_is_due(
    index: ShardIndex, client: redis.Redis
) -> None:
    change = Entry("orders", b"line\nline \xff", NOW_MS, b"k", [("h", b"\xfe")], "shop", "order-1")

    plan = store(index, 0, 1, {0: change})

    assert plan.puts == {0: change}
    assert held(client) == Held(
        Positions(1, 0), [(NOW_MS, 0)], stored({0: change}), {"order-1": 0}, set()
    )
    assert index.due(NOW_MS, 10).entries == [(0, entries.encode(change))]
    assert index.due(NOW_MS - 1, 10).entries == []


def test_gaps_in_the_offsets_are_skipped(index: ShardIndex, client: redis.Redis) -> None:
    store(index, 0, 100, {7: entry(), 93: entry()})
    store(index, 100, 120, {})

    assert held(client).offsets() == [7, 93]
    assert index.positions == held(client).positions == Positions(120, 0)


def test_the_same_batch_again_changes_nothing(index: ShardIndex, client: redis.Redis) -> None:
    batch: dict[int, Change] = {
        0: entry(caller_id="a"),
        1: entry(caller_id="a"),
        2: entry(caller_id="b"),
        3: Cancel("b"),
    }
    store(index, 0, 4, batch)
    before = held(client)

    assert store(index, 0, 4, batch) == Plan()
    assert held(client) == before


def test_of_a_batch_partly_stored_before_only_the_rest_is_stored(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: Cancel("a")})

    plan = store(index, 0, 4, {0: entry(caller_id="a"), 1: Cancel("a"), 2: entry(), 3: entry()})

    assert (sorted(plan.puts), plan.cancelled) == ([2, 3], 0)
    assert held(client).offsets() == [2, 3]
    assert held(client).positions == Positions(4, 0)


def test_a_batch_beyond_the_position_is_refused(index: ShardIndex, client: redis.Redis) -> None:
    store(index, 0, 2, {0: entry()})

    with pytest.raises(PositionsMoved, match=r"read from 3, but the index is at .*requests=2"):
        store(index, 3, 4, {3: entry()})

    assert held(client).offsets() == [0]


def test_a_payload_outlives_its_due_time_by_the_grace(
    index: ShardIndex, client: redis.Redis
) -> None:
    due_in_s = {0: 90, 1: 0, 2: -3600, 3: 40_000_000}
    store(index, 0, 4, {o: entry(NOW_MS + s * 1000) for o, s in due_in_s.items()})

    for offset, seconds in due_in_s.items():
        left_s: Any = client.ttl(f"{PREFIX}msg:{member(offset).decode()}")
        assert 0 <= max(0, seconds) + GRACE_S - left_s <= 5


UNSURE = entry()._replace(reason=Reason.OUTCOME_UNKNOWN, detail="it may have been delivered")
BECOME_LETTERS: dict[str, Verb] = {
    "refused when read": lambda index: store(index, 1, 2, {1: UNSURE}),
    "postponed": lambda index: index.postpone({0: (NOW_MS + 5, UNSURE)}, NOW_MS),
    "postponed beside deliveries": lambda index: index.settle(
        Settlement({}, 1, {0: (NOW_MS + 5, UNSURE)}, NOW_MS)
    ),
    "outcome unknown": lambda index: index.outcome_unknown(NOW_MS, NOW_MS),
}


@pytest.mark.parametrize("become_letter", BECOME_LETTERS.values(), ids=BECOME_LETTERS)
def test_a_dead_letter_does_not_become_a_request_again_after_an_outage_longer_than_the_grace(
    index: ShardIndex, client: redis.Redis, become_letter: Verb
) -> None:
    store(index, 0, 1, {0: entry()})
    become_letter(index)
    letters = [o for o, payload in held(client).payloads.items() if b'"reason"' in payload]
    assert len(letters) == 1

    def years_left() -> float:
        left_s: Any = client.ttl(f"{PREFIX}msg:{member(letters[0]).decode()}")
        return float(left_s) / 365 / 86_400

    assert years_left() > 9
    index.postpone({letters[0]: (NOW_MS + 60_000, None)}, NOW_MS)
    assert years_left() > 9


def test_a_payload_due_within_a_second_has_the_whole_grace(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 1, {0: entry(NOW_MS + 1)})

    left_ms: Any = client.pttl(f"{PREFIX}msg:{member(0).decode()}")
    assert left_ms > GRACE_S * 1000 - 1000 + 1


def test_batches_of_any_size_are_stored_and_removed(index: ShardIndex, client: redis.Redis) -> None:
    store(index, 0, MANY, {o: entry(NOW_MS + o, caller_id=f"order-{o}") for o in range(MANY)})
    assert held(client).offsets() == list(range(MANY))
    assert len(held(client).holders) == MANY

    due = index.due(NOW_MS + MANY, MANY * 2)
    assert [offset for offset, _ in due.entries] == list(range(MANY))
    assert None not in [payload for _, payload in due.entries]

    store(index, MANY, MANY + 1200, {MANY + o: Cancel(f"order-{o}") for o in range(1200)})
    known = index.caller_ids(range(1000, MANY + 500))
    assert known == {o: f"order-{o}" for o in range(1200, MANY)}
    index.settle(Settlement({o: known.get(o) for o in range(1200, MANY)}, 5))
    assert held(client) == Held(Positions(MANY + 1200, 5), [], {}, {}, set())


# replace and cancel


def test_a_cancel_ends_the_request_of_an_earlier_batch(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: entry(caller_id="b")})

    plan = store(index, 2, 3, {2: Cancel("a")})

    assert (plan.cancelled, plan.removals) == (1, [0])
    assert held(client).offsets() == [1]
    assert list(held(client).payloads) == [1]
    assert held(client).holders == {"b": 1}


def test_a_cancel_by_id_ends_that_request_and_frees_its_caller_id(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 3, {0: entry(caller_id="a"), 1: entry(), 2: entry(caller_id="a")})
    store(index, 3, 4, {3: entry()})

    ids = [request_id(SHARD, offset) for offset in (0, 1, 2)]
    other = request_id(SHARD._replace(partition=SHARD.partition + 1), 3)
    cancels = [Cancel(None, id) for id in (*ids, other, request_id(SHARD, 99))]
    plan = store(index, 4, 9, dict(enumerate(cancels, 4)))

    assert plan.cancelled == 2
    assert held(client).offsets() == [3]
    assert list(held(client).payloads) == [3]
    assert held(client).holders == {}


def test_a_future_dead_letter_cannot_be_cancelled(index: ShardIndex, client: redis.Redis) -> None:
    store(index, 0, 1, {0: entry()._replace(reason="not-json")})

    assert store(index, 1, 2, {1: Cancel(None, request_id(SHARD, 0))}).cancelled == 0
    assert held(client).offsets() == [0]


LARGE = Record(0, NOW_MS, None, b"{" * 100_000, [])
NOT_JSON = refused_entry(LARGE, Invalid(Reason.NOT_JSON, "not JSON"), NOW_MS)
OVER_QUOTA = refused_entry(LARGE, BROKEN_RULES["requests_per_second"], NOW_MS)


def test_a_large_refused_request_has_no_payload_and_cannot_be_cancelled(
    index: ShardIndex, client: redis.Redis
) -> None:
    late = NOT_JSON._replace(reason="too-late", detail="not pending")
    named = OVER_QUOTA._replace(caller_id="a")
    store(index, 0, 5, {0: NOT_JSON, 1: entry(), 2: OVER_QUOTA, 3: late, 4: named})
    assert set(held(client).payloads) == {1, 4}

    due = index.due(NOW_MS, 10)
    assert [offset for offset, _ in due.entries] == [0, 1, 2, 3, 4]
    assert due.refused == {0: "invalid", 2: "requests_per_second", 3: "too-late"}

    cancels = {5 + n: Cancel(None, request_id(SHARD, n)) for n in (0, 2, 3)}
    assert store(index, 5, 9, cancels).cancelled == 0
    assert held(client).offsets() == [0, 1, 2, 3, 4]


def test_the_marks_of_refused_requests_go_with_the_low_water_mark(
    index: ShardIndex, client: redis.Redis
) -> None:
    other = 2 * SEGMENT
    store(index, 0, other + 1, {1: NOT_JSON, 2: OVER_QUOTA, other: OVER_QUOTA})
    index.settle(Settlement({1: None, 2: None}, 2, mark=Mark(other - 1, 1, [])))
    assert held(client).offsets() == [other]
    raw: Any = client
    assert set(raw.hkeys(PREFIX + "refused")) == {b"2:requests_per_second", SENTINEL}


def test_a_shortened_log_takes_only_the_marks_of_what_it_lost(
    index: ShardIndex, open_index: Opener
) -> None:
    kept, lost = SEGMENT + 5, SEGMENT + 8
    store(index, 0, 3 * SEGMENT, dict.fromkeys((kept, lost, 2 * SEGMENT + 1), OVER_QUOTA))
    index.load()
    index.rebind(Positions(lost, 0), Binding("cluster", "topic", "receipts", "group"))
    end = 3 * SEGMENT
    store(index, lost, end, {lost: entry(), 2 * SEGMENT + 1: entry()})

    assert index.refused([kept, lost, 2 * SEGMENT + 1]) == {kept: "requests_per_second"}


def test_refused_requests_are_parked_without_a_payload_also_for_the_next_owner(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    store(index, 0, 200, dict.fromkeys(range(200), OVER_QUOTA))
    [band, *_] = bands_of(LETTERS)
    index.postpone({o: (parked_at(band, NOW_MS), None) for o in range(200)}, NOW_MS)

    next_owner = open_index()
    next_owner.load()

    for owner in (index, next_owner):
        assert owner.parked() == {band: LETTERS}
    assert held(client).payloads == {}
    assert {score for score, _ in held(client).due} == {parked_at(band, NOW_MS)}


def test_a_cancel_ends_the_request_of_its_own_batch(index: ShardIndex, client: redis.Redis) -> None:
    plan = store(index, 0, 2, {0: entry(caller_id="a"), 1: Cancel("a")})

    assert plan.cancelled == 1
    assert held(client) == Held(Positions(2, 0), [], {}, {}, set())


def test_a_cancel_of_an_unknown_caller_id_changes_nothing(
    index: ShardIndex, client: redis.Redis
) -> None:
    assert store(index, 0, 1, {0: Cancel("a")}).cancelled == 0
    store(index, 1, 2, {1: entry(caller_id="a")})

    assert held(client).offsets() == [1]


def test_a_request_under_the_same_caller_id_replaces_the_earlier_one(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 1, {0: entry(caller_id="a")})
    across = store(index, 1, 2, {1: entry(caller_id="a")})
    within = store(index, 2, 4, {2: entry(caller_id="a"), 3: entry(caller_id="a")})

    assert (across.replaced, within.replaced) == (1, 2)
    assert held(client).offsets() == [3]
    assert list(held(client).payloads) == [3]
    assert held(client).holders == {"a": 3}


def test_a_cancel_after_the_delivery_leaves_the_next_request_alone(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 1, {0: entry(caller_id="a")})
    index.settle(Settlement({0: "a"}, 1))
    plan = store(index, 1, 3, {1: Cancel("a"), 2: entry(caller_id="a")})

    assert (plan.cancelled, plan.replaced) == (0, 0)
    assert held(client).offsets() == [2]
    assert held(client).holders == {"a": 2}


def test_a_replacement_waits_for_the_delivery_in_flight_and_then_for_recovery(
    index: ShardIndex, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_changes, "IN_FLIGHT_WAIT_S", 0.1)
    store(index, 0, 1, {0: entry()})
    too_late = entry()._replace(reason="too-late")
    replacing = Replacement(request_id(SHARD, 0), None, entry(NOW_MS + 1000), too_late)
    index.mark_in_flight([0], index.removed)

    with pytest.raises(
        RecoveryRequired, match=r"is still in flight after 0\.1 s; requests are read again"
    ):
        store(index, 1, 2, {1: replacing})
    assert held(client).offsets() == [0]

    index.settle(Settlement({}, 1))  # as recovery, when nothing of it was committed
    assert store(index, 1, 2, {1: replacing}).replaced == 1
    assert held(client).due == [(NOW_MS + 1000, 1)]


@pytest.mark.parametrize("named", [[], [1]], ids=["that nothing leaves", "something else"])
def test_a_replaced_owner_cannot_change_what_its_successor_has_in_flight(
    index: ShardIndex, open_index: Opener, monkeypatch: pytest.MonkeyPatch, named: list[int]
) -> None:
    monkeypatch.setattr(intake_changes, "IN_FLIGHT_WAIT_S", 0.1)
    store(index, 0, 2, {0: entry(), 1: entry()})
    replacing = Replacement(request_id(SHARD, 0), None, entry(), entry()._replace(reason="x"))
    successor = open_index()
    successor.load()
    successor.settle(Settlement({}, 1))
    successor.mark_in_flight([0], successor.removed)

    with pytest.raises(PositionsMoved):
        index.mark_in_flight(named, index.removed)

    with pytest.raises(RecoveryRequired, match="is still in flight"):
        store(successor, 2, 3, {2: replacing})


def replacement_of_0() -> Replacement:
    """The request at 0 again, a second later; a dead letter if it is too late."""
    too_late = entry()._replace(reason="too-late")
    return Replacement(request_id(SHARD, 0), None, entry(NOW_MS + 1000), too_late)


def test_a_replacement_waits_until_redis_has_all_receipts_that_are_in_kafka(
    index: ShardIndex,
    open_index: Opener,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The intake of another process connects after Redis went back to before a delivery."""
    monkeypatch.setattr(intake_changes, "IN_FLIGHT_WAIT_S", 0.0)
    receipts_in_kafka, looked = 2, list[int]()

    def is_behind(receipts: int) -> bool:
        looked.append(receipts)
        return receipts < receipts_in_kafka

    elsewhere = open_index()
    elsewhere.is_behind = is_behind
    store(elsewhere, 0, 2, {0: entry(), 1: entry()})
    assert looked == []  # only a replacement depends on receipts

    with pytest.raises(RecoveryRequired, match="requests are read again from 2"):
        store(elsewhere, 2, 3, {2: replacement_of_0()})
    assert held(client).due == [(NOW_MS, 0), (NOW_MS, 1)]

    index.settle(Settlement({0: None}, receipts_in_kafka))  # as recovery, with what Redis lost
    assert store(elsewhere, 2, 3, {2: replacement_of_0()}).replaced == 0
    assert held(client).due == [(NOW_MS, 1), (NOW_MS, 2)]
    assert entries.decode(held(client).payloads[2]).reason == "too-late"

    looked.clear()
    store(elsewhere, 3, 4, {3: replacement_of_0()})
    assert looked == []  # this connection has seen them all


def test_no_replacement_is_decided_after_redis_lost_receipts(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    store(index, 0, 1, {0: entry()})
    elsewhere = open_index()
    index.settle(Settlement({}, 5))
    store(elsewhere, 1, 2, {1: entry()})
    set_positions(client, Positions(2, 3))

    for at in (2, 3):
        with pytest.raises(
            PositionsMoved, match=r"receipts were settled up to 5, but the index is at .*receipts=3"
        ):
            store(elsewhere, at, at + 1, {at: replacement_of_0()})
        store(elsewhere, at, at + 1, {at: entry()})
    assert held(client).offsets() == [0, 1, 2, 3]


def test_a_replacement_is_too_late_although_it_is_read_before_the_delivery_is_settled(
    index: ShardIndex, open_index: Opener, client: redis.Redis
) -> None:
    store(index, 0, 1, {0: entry()})
    elsewhere = open_index()
    index.mark_in_flight([0], index.removed)

    def settle(receipts: int) -> bool:
        """Dispatch goes on while the intake of another process stores: it has read what is pending."""
        index.settle(Settlement({0: None}, 1))
        return False

    elsewhere.is_behind = settle
    assert store(elsewhere, 1, 2, {1: replacement_of_0()}).replaced == 0

    assert entries.decode(held(client).payloads[1]).reason == "too-late"


def test_no_replacement_is_decided_while_an_opening_removes_what_was_delivered(
    index: ShardIndex, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_changes, "IN_FLIGHT_WAIT_S", 0.0)
    store(index, 0, 2, {0: entry(), 1: entry()})
    index.mark_in_flight([0, 1], index.removed)

    index.settle(Settlement({1: None}, index.positions.receipts))

    with pytest.raises(RecoveryRequired, match="is still in flight"):
        store(index, 2, 3, {2: replacement_of_0()})


# settle


def test_a_delivered_request_leaves_nothing_behind(index: ShardIndex, client: redis.Redis) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: entry(caller_id="b")})

    index.settle(Settlement({0: "a"}, 1))

    assert held(client) == Held(
        Positions(2, 1), [(NOW_MS, 1)], stored({1: entry(caller_id="b")}), {"b": 1}, set()
    )
    assert index.positions == Positions(2, 1)


@pytest.mark.parametrize("key", ["skip", "moved", "ended", "refused"])
def test_an_index_notices_the_loss_of_any_single_key(
    index: ShardIndex, open_index: Opener, client: redis.Redis, key: str
) -> None:
    asked = entry()._replace(origin=0)
    store(index, 0, 2, {0: Cold(None), 1: Cold(None)})
    store(index, 2, 3, {2: Carried(0, 0, None, asked)})
    store(index, 3, 5, {3: Carried(1, 1, None, Cold(None)), 4: Cancel(None, request_id(SHARD, 1))})
    store(index, 5, 6, {5: OVER_QUOTA})
    index.settle(Settlement({2: None, 5: None, 9: None}, 1, origins=[0]))
    assert index.due(NOW_MS, 10).entries == []

    client.delete(PREFIX + key)

    with pytest.raises(PositionsMoved, match=f"Redis lost a single key, .*{key};"):
        index.due(NOW_MS, 10)
    kept = open_index().load()
    assert kept is not None
    assert not kept.is_whole


def test_cancels_by_id_that_come_too_late_take_no_room(index: ShardIndex, client: Any) -> None:
    store(index, 0, 2, {0: Cold(None), 1: Cold(None)})
    store(index, 2, 3, {2: Carried(0, 0, None, Cold(None))})
    late = {offset: Cancel(None, request_id(SHARD, offset - 1)) for offset in range(4, 1000)}

    store(index, 3, 1000, late)
    assert not client.exists(PREFIX + "ended")

    store(index, 1000, 1001, {1000: Cancel(None, request_id(SHARD, 0))})
    assert client.zscore(PREFIX + "ended", member(0)) == 1000


def test_an_index_whose_removals_are_used_up_is_complete(
    index: ShardIndex, open_index: Opener
) -> None:
    index.settle(Settlement({1: None, SEGMENT - 1: None}, 1))
    store(index, 0, SEGMENT, {})

    assert index.due(NOW_MS, 10).entries == []
    kept = open_index().load()
    assert kept is not None
    assert kept.is_whole


def test_a_delivery_frees_the_caller_id_only_of_its_latest_request(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: entry(caller_id="a")})

    index.settle(Settlement({0: "a"}, 1))

    assert held(client).holders == {"a": 1}
    assert store(index, 2, 3, {2: Cancel("a")}).cancelled == 1


def test_the_same_outcomes_again_change_nothing(index: ShardIndex, client: redis.Redis) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: entry(caller_id="b")})
    index.settle(Settlement({0: "a"}, 1))
    before = held(client)

    index.settle(Settlement({0: "a"}, 1))

    assert held(client) == before


# removals read before their requests


@pytest.mark.parametrize("offset", [0, 1, 7, 8, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT])
def test_a_request_whose_removal_was_read_first_is_not_stored(
    index: ShardIndex, client: redis.Redis, offset: int
) -> None:
    index.settle(Settlement({offset: None}, 1))
    assert held(client).skip == {offset}
    store(index, 0, max(0, offset - 2), {})

    around = range(max(0, offset - 2), offset + 3)
    store(index, around.start, around.stop, {o: entry() for o in around})

    assert held(client).offsets() == [o for o in around if o != offset]


def test_removals_above_the_position_are_stored_and_removals_below_it_are_applied(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})

    index.settle(Settlement({1: None, 2: None, SEGMENT: None}, 4))

    assert held(client).offsets() == [0]
    assert held(client).skip == {2, SEGMENT}


def test_a_batch_across_a_segment_border_respects_the_removals_of_both_segments(
    index: ShardIndex, client: redis.Redis
) -> None:
    removed = [SEGMENT - 2, SEGMENT, SEGMENT + 2]
    index.settle(Settlement(dict.fromkeys(removed), 1))

    around = range(SEGMENT - 3, SEGMENT + 4)
    store(index, 0, around.stop, {o: entry() for o in around})

    assert held(client).offsets() == [o for o in around if o not in removed]


def test_used_segments_are_dropped_and_the_current_one_kept(
    index: ShardIndex, client: redis.Redis
) -> None:
    index.settle(Settlement(dict.fromkeys(segment * SEGMENT + 5 for segment in range(5)), 1))
    assert segments(client) == {0, 1, 2, 3, 4}

    store(index, 0, SEGMENT - 1, {})
    assert segments(client) == {0, 1, 2, 3, 4}
    store(index, SEGMENT - 1, SEGMENT, {})
    assert segments(client) == {1, 2, 3, 4}
    store(index, SEGMENT, 3 * SEGMENT + 4, {})
    assert segments(client) == {3, 4}

    last = 3 * SEGMENT + 5
    store(index, last - 1, last + 2, {o: entry() for o in (last - 1, last, last + 1)})
    assert held(client).offsets() == [last - 1, last + 1]


def test_a_request_read_after_its_removal_still_ends_the_one_it_replaced(
    index: ShardIndex, client: redis.Redis
) -> None:
    index.settle(Settlement({1: None, 3: None}, 1))

    store(index, 0, 1, {0: entry(caller_id="a")})
    store(index, 1, 2, {1: entry(caller_id="a")})
    store(index, 2, 4, {2: entry(caller_id="b"), 3: entry(caller_id="b")})

    assert held(client) == Held(Positions(4, 1), [], {}, {}, {1, 3})


# conditional records that did not count


TOO_LATE = entry()._replace(reason="too-late")


def late(offset: int, names: int) -> dict[int, Change]:
    return {offset: Replacement(request_id(SHARD, names), None, entry(), TOO_LATE)}


def test_ignored_records_are_stored_until_a_receipt_records_them(
    index: ShardIndex, open_index: Opener
) -> None:
    store(index, 0, 2, {0: entry()})
    store(index, 2, 4, late(2, 1) | late(3, 0))
    store(open_index(), 4, 9, late(5, 0) | {7: Carried(6, 6, None, entry())})

    assert index.unrecorded(10) == (9, [2, 5, 7])
    assert index.unrecorded(2) == (9, [2, 5])
    index.settle(Settlement({}, 1, recorded=[2, 5]))
    assert index.unrecorded(10) == (9, [7])


def test_an_index_rebuilt_from_a_mark_uses_the_recorded_verdicts(
    open_index: Opener, client: redis.Redis
) -> None:
    index = open_index()
    index.begin(Positions(10, 3), verdicts_below=14)
    index.ignore([12])

    store(index, 10, 15, late(11, 4) | late(12, 4) | late(14, 4))

    due = {o: entries.decode(stored or b"").reason for o, stored in index.due(NOW_MS, 9).entries}
    assert due == {11: None, 12: "too-late", 14: "too-late"}
    assert index.unrecorded(10) == (15, [12, 14])


def test_ignored_records_are_recorded_only_below_the_position(index: ShardIndex) -> None:
    index.ignore([4, 5, 6])
    store(index, 0, 6, {})

    assert index.unrecorded(10) == (6, [4, 5])


def test_an_index_is_kept_with_the_mark_that_its_owner_wrote(
    index: ShardIndex, open_index: Opener
) -> None:
    index.settle(Settlement({}, 4, mark=Mark(2, 1, [(3, 2)])))

    kept = open_index().load()

    assert kept is not None
    assert kept.mark is not None
    pairs = [*map(tuple, kept.mark.pairs)]
    assert (kept.mark.requests, kept.mark.receipts, pairs) == (2, 1, [(3, 2)])


# postpone


def test_a_postponed_request_is_due_later_and_has_its_new_content(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: entry()})
    later = entry(caller_id="a")._replace(attempts=1)

    index.postpone({0: (NOW_MS + 4000, later)}, NOW_MS)

    assert held(client).due == [(NOW_MS, 1), (NOW_MS + 4000, 0)]
    assert held(client).payloads[0] == entries.encode(later)
    assert held(client).holders == {"a": 0}
    assert held(client).positions == index.positions == Positions(2, 0)
    left_s: Any = client.ttl(f"{PREFIX}msg:{member(0).decode()}")
    assert left_s > GRACE_S


def test_requests_are_postponed_in_the_multi_that_removes_others(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 4, {0: entry(), 1: entry(caller_id="a"), 2: entry(), 3: Cancel("a")})
    later = entry()._replace(attempts=1)

    index.settle(
        Settlement({0: None}, 1, {1: (NOW_MS + 4000, later), 2: (NOW_MS + 4000, later)}, NOW_MS)
    )

    assert held(client) == Held(
        Positions(4, 1), [(NOW_MS + 4000, 2)], {2: entries.encode(later)}, {}, set()
    )
    assert index.positions == Positions(4, 1)


def test_postponing_does_not_restore_a_cancelled_request(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 3, {0: entry(caller_id="a"), 1: entry(), 2: Cancel("a")})

    index.postpone({0: (NOW_MS + 1, entry(caller_id="a")), 1: (NOW_MS + 1, entry())}, NOW_MS)

    assert held(client).due == [(NOW_MS + 1, 1)]
    assert list(held(client).payloads) == [1]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_request_cancelled_elsewhere_while_it_is_postponed_leaves_no_payload(
    index: ShardIndex, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch,
    is_lost: bool,
) -> None:  # fmt: skip
    store(index, 0, 2, {0: entry(), 1: entry(caller_id="a")})
    if is_lost:
        client.delete(f"{PREFIX}msg:{member(1).decode()}")
    elsewhere, commands = open_index(), index._commands_that_settle

    def cancelled_in_between(*seen: Any) -> Iterator[bytes]:
        if elsewhere.positions.requests == 2:
            store(elsewhere, 2, 3, {2: Cancel("a")})
        return commands(*seen)

    monkeypatch.setattr(index, "_commands_that_settle", cancelled_in_between)
    parked_ms = parked_at(next(bands_of("orders")), NOW_MS)
    index.settle(Settlement({0: None}, 1, {1: (parked_ms, entry(caller_id="a"))}, NOW_MS))

    assert held(client) == Held(Positions(3, 1), [], {}, {}, set())


def test_a_lost_payload_is_written_again_when_its_request_is_postponed(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 3, {0: entry(), 1: entry(), 2: entry()})
    client.delete(f"{PREFIX}msg:{member(1).decode()}")
    later = entry()._replace(attempts=1)

    index.settle(Settlement({0: None}, 1, {1: (NOW_MS + 5, later), 2: (NOW_MS + 5, later)}, NOW_MS))

    assert held(client).payloads == dict.fromkeys((1, 2), entries.encode(later))


def test_intake_elsewhere_does_not_repeat_a_settlement_that_postpones(
    index: ShardIndex, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    elsewhere, commands = open_index(), index._commands_that_settle
    looks = 0

    def stored_in_between(*seen: Any) -> Iterator[bytes]:
        nonlocal looks
        looks += 1
        store(elsewhere, 1 + looks, 2 + looks, {1 + looks: entry()})
        return commands(*seen)

    monkeypatch.setattr(index, "_commands_that_settle", stored_in_between)
    index.settle(Settlement({0: None}, 1, {1: (NOW_MS + 5, entry())}, NOW_MS))

    assert looks == 1
    assert held(client).due == [(NOW_MS, 2), (NOW_MS + 5, 1)]


# due


def test_requests_are_read_by_due_time_and_then_in_journal_order(
    index: ShardIndex,
) -> None:
    due_ms = {0: NOW_MS, 1: NOW_MS - 1, 2: NOW_MS, 3: NOW_MS - 1, 15: NOW_MS, 16: NOW_MS, 256: 0}
    store(index, 0, 257, {offset: entry(at_ms) for offset, at_ms in due_ms.items()})

    assert [offset for offset, _ in index.due(NOW_MS, 10).entries] == [256, 1, 3, 0, 2, 15, 16]


def test_negative_and_huge_due_times_keep_their_order(index: ShardIndex) -> None:
    store(index, 0, 4, {0: entry(BAND_MS - 1), 1: entry(-5), 2: entry(0), 3: entry(-(2**53))})

    due = index.due(NOW_MS, 10)

    assert [offset for offset, _ in due.entries] == [3, 1, 2]
    assert (due.next_due_ms, due.oldest_ms) == (BAND_MS - 1, -(2**53))


def parked(target: str, due_ms: int) -> Postponed:
    return parked_at(next(bands_of(target)), due_ms), entry(due_ms)._replace(target=target)


def test_parked_requests_are_pending_and_not_due_until_they_are_released(
    index: ShardIndex, open_index: Opener
) -> None:
    store(index, 0, 9, {offset: entry(NOW_MS - offset) for offset in range(9)})
    index.postpone({o: parked("orders", NOW_MS - o) for o in range(1, 6)}, NOW_MS)
    index.postpone({6: parked("bills", NOW_MS)}, NOW_MS)

    other = open_index()
    other.load()
    for reader in (index, other):
        due = reader.due(NOW_MS, 10)
        assert [offset for offset, _ in due.entries] == [8, 7, 0]
        assert (due.pending, due.oldest_ms, due.next_due_ms) == (9, NOW_MS - 8, None)
        assert set(reader.parked().values()) == {"orders", "bills"}
        released = reader.due(NOW_MS, 3, release={"orders": 9, "nothing": 9})
        assert [offset for offset, _ in released.entries] == [5, 4, 3, 8, 7, 0]
        assert released.is_full
        assert set(released.parked.values()) == {"orders", "bills"}
        assert released.released == {5, 4, 3}
        assert released.backlogs == {"orders", "bills"}
        few = reader.due(NOW_MS, 9, release={"orders": 2})
        assert [offset for offset, _ in few.entries] == [5, 4, 8, 7, 0]
        assert few.is_full
        whole = reader.due(NOW_MS, 9, release={"orders": 9})
        assert (len(whole.entries), whole.backlogs, whole.is_full) == (
            8,
            frozenset({"bills"}),
            False,
        )

    index.settle(Settlement(dict.fromkeys([1, 2, 3, 4, 5]), 1))
    assert set(index.due(NOW_MS, 10, release={"orders": 10}).parked.values()) == {"bills"}
    assert set(index.parked().values()) == {"bills"}


def test_a_request_that_is_due_after_all_times_is_parked_in_the_band_of_its_target(
    index: ShardIndex,
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    index.postpone({0: parked("orders", NOW_MS), 1: parked("orders", 2**62)}, NOW_MS)

    due = index.due(NOW_MS, 10, release={"orders": 10})

    assert [offset for offset, _ in due.entries] == [0, 1]
    assert set(due.parked.values()) == {"orders"}


@pytest.mark.parametrize("score", [1022 * BAND_MS, 2**53, 2**60, 1e300])
def test_a_score_beyond_all_bands_does_not_keep_others_from_being_delivered(
    index: ShardIndex, client: redis.Redis, score: float
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    client.zadd(PREFIX + "due", {member(1): score})

    due = index.due(NOW_MS, 10)

    assert [offset for offset, _ in due.entries] == [0]
    assert due.pending == 2


def test_a_shard_that_finds_other_parked_requests_each_time_is_opened_again(
    index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_note_parked", lambda *_: None)

    with pytest.raises(RecoveryRequired, match="while looking for what is due"):
        index.due(NOW_MS, 10)


def test_requests_that_another_owner_parked_are_found(
    index: ShardIndex, open_index: Opener
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    other = open_index()
    other.load()
    other.postpone({0: parked("orders", NOW_MS), 1: parked("bills", NOW_MS)}, NOW_MS)
    assert set(index.due(NOW_MS, 10).parked.values()) == {"orders", "bills"}

    other.postpone({1: (NOW_MS, None)}, NOW_MS)
    assert set(index.due(NOW_MS, 10, release={"bills": 10}).parked.values()) == {"orders"}
    other.postpone({1: parked("bills", NOW_MS)}, NOW_MS)
    assert set(index.due(NOW_MS, 10).parked.values()) == {"orders", "bills"}


def test_a_parked_request_can_be_cancelled(index: ShardIndex) -> None:
    store(index, 0, 1, {0: entry(caller_id="a")})
    index.postpone({0: parked("orders", NOW_MS)}, NOW_MS)
    plan = store(index, 1, 2, {1: Cancel("a")})
    assert plan.cancelled == 1
    assert index.due(NOW_MS, 10, release={"orders": 10}).pending == 0


def test_a_parked_request_without_its_payload_is_due(
    index: ShardIndex, client: redis.Redis, open_index: Opener
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    index.postpone({0: parked("orders", NOW_MS), 1: parked("orders", NOW_MS)}, NOW_MS)
    for offset in range(2):
        client.delete(f"{PREFIX}msg:{offset:016x}")
    other = open_index()
    other.load()
    assert other.due(NOW_MS, 10).entries == [(0, None), (1, None)]


def test_a_read_of_due_requests_says_what_remains(index: ShardIndex) -> None:
    nothing = index.due(NOW_MS, 2)
    store(index, 0, 4, {o: entry(NOW_MS - 10 + o) for o in range(3)} | {3: entry(NOW_MS + 70)})
    full, all_of_it = index.due(NOW_MS, 2), index.due(NOW_MS, 4)

    assert nothing == DueEntries([], False, None, None, 0)
    assert [offset for offset, _ in full.entries] == [0, 1]
    assert (full.is_full, full.pending, full.oldest_ms) == (True, 4, NOW_MS - 10)
    assert [offset for offset, _ in all_of_it.entries] == [0, 1, 2]
    assert (all_of_it.is_full, all_of_it.next_due_ms) == (False, NOW_MS + 70)


def test_a_read_of_due_requests_is_repeated_if_the_index_changes(
    index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(index, 0, 1, {0: entry()})
    run, looks = index._redis.run, 0

    def changed_in_between(commands: Any) -> Any:
        nonlocal looks
        answers = run(commands)
        if len(answers) > 1:
            looks += 1
            if looks == 1:
                answers[-1] = b"9"
                answers[2] = []
        return answers

    monkeypatch.setattr(index._redis, "run", changed_in_between)

    assert [offset for offset, _ in index.due(NOW_MS, 10).entries] == [0]
    assert looks == 2


def test_a_batch_is_bounded_by_bytes_and_the_rest_comes_next(
    index: ShardIndex, client: redis.Redis
) -> None:
    large = b"x" * (1 << 20)
    store(index, 0, 20, {offset: entry(message=large) for offset in range(20)})
    receipts, delivered = 0, []
    while (due := index.due(NOW_MS, 1000)).entries:
        assert sum(len(payload or b"") for _, payload in due.entries) <= MAX_BATCH_BYTES
        offsets = [offset for offset, _ in due.entries]
        assert due.is_full is (len(offsets) < due.pending)
        receipts += 1
        index.settle(Settlement(dict.fromkeys(offsets), receipts))
        delivered += offsets

    assert (delivered, receipts) == (list(range(20)), 2)


def test_a_message_larger_than_a_batch_is_a_batch_of_its_own(index: ShardIndex) -> None:
    too_large = b"x" * (MAX_BATCH_BYTES + 1)
    store(index, 0, 3, {0: entry(message=too_large), 1: entry(), 2: entry()})

    due = index.due(NOW_MS, 1000)

    assert [offset for offset, _ in due.entries] == [0]
    assert due.is_full


def test_a_batch_of_small_messages_is_full_after_a_large_message(index: ShardIndex) -> None:
    store(index, 0, 1, {0: entry(message=b"x" * (1 << 20))})
    index.settle(Settlement({0: None}, 1))
    store(index, 1, 1001, {offset: entry() for offset in range(1, 1001)})

    due = index.due(NOW_MS, 1000)

    assert len(due.entries) == 1000
    assert all(due.entries)


def test_a_request_without_its_payload_is_not_skipped(
    index: ShardIndex, client: redis.Redis
) -> None:
    store(index, 0, 2, {0: entry(), 1: entry()})
    client.delete(f"{PREFIX}msg:{member(0).decode()}")

    assert index.due(NOW_MS, 10).entries == [(0, None), (1, entries.encode(entry()))]


def test_a_request_that_ends_during_a_read_does_not_count_as_a_lost_payload(
    index: ShardIndex, open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(index, 0, 2, {0: entry(caller_id="a"), 1: entry()})
    intake, read_payloads = open_index(), index._mget

    def cancelled_in_between(names: Any) -> Any:
        store(intake, 2, 3, {2: Cancel("a")})
        return read_payloads(names)

    monkeypatch.setattr(index, "_mget", cancelled_in_between)

    assert index.due(NOW_MS, 10).entries == [(1, entries.encode(entry()))]


def store_beyond_the_position(index: ShardIndex) -> None:
    with pytest.raises(PositionsMoved):
        store(index, 11, 12, {})


GIVEN_UP: dict[str, Verb] = {
    "a batch stored before": lambda index: store(index, 0, 2, {}),
    "nothing left to put off": lambda index: index.postpone({9: (NOW_MS, entry())}, NOW_MS),
    "a batch beyond the position": store_beyond_the_position,
}


@verbs
@pytest.mark.parametrize("give_up", GIVEN_UP.values(), ids=GIVEN_UP)
def test_an_abandoned_change_does_not_affect_the_next_one(
    open_index: Opener, verb: Verb, give_up: Verb
) -> None:
    index = begun(open_index, Positions(10, 7), {0: entry(), 1: entry(caller_id="order-1")})
    give_up(index)
    open_index().postpone({1: (NOW_MS - 1, entry(caller_id="order-1"))}, NOW_MS)

    verb(index)


# caller ids


def test_caller_ids_of_pending_requests_are_known(index: ShardIndex) -> None:
    store(index, 0, 3, {0: entry(caller_id="a"), 1: entry(caller_id="b"), 2: entry()})
    index.settle(Settlement({1: "b"}, 1))

    assert index.caller_ids([0, 1, 2, 3]) == {0: "a", 2: None}
    assert index.caller_ids([]) == {}


def test_no_payload_is_read_if_no_request_has_a_caller_id(index: ShardIndex) -> None:
    store(index, 0, 1, {0: entry()})

    assert index.caller_ids([0]) == {}


# the connection

ALL: dict[str, Verb] = {
    **VERBS,
    "load": lambda index: index.load(),
    "begin": lambda index: index.begin(Positions(0, 0)),
    "caller_ids": lambda index: index.caller_ids([0]),
}


@pytest.mark.parametrize("verb", ALL.values(), ids=ALL)
def test_a_lost_connection_is_noticed_and_never_opened_again(
    open_index: Opener, backend: Backend, verb: Verb
) -> None:
    index = begun(open_index, Positions(10, 7), {0: entry(), 1: entry(caller_id="order-1")})
    before = held(backend.client)
    backend.cut()

    for _ in range(2):
        with pytest.raises(IndexLost, match="the connection to Redis was lost"):
            verb(index)

    assert held(backend.client) == before
    assert open_index().positions == Positions(10, 7)


@pytest.mark.parametrize("verb", ALL.values(), ids=ALL)
def test_a_closed_index_is_not_used_again(index: ShardIndex, verb: Verb) -> None:
    index.close()
    index.close()

    with pytest.raises(IndexLost):
        verb(index)


def test_an_index_forgets_what_lies_beyond_the_end_of_a_shortened_log(
    index: ShardIndex, client: Any
) -> None:
    store(index, 0, 10, {4: Cold(None), 8: Cold(None), 9: entry()})
    index.settle(Settlement({9: None, 12: None}, 7))
    index.load()

    index.rebind(Positions(6, 5), Binding("cluster", "topic", "receipts", "group"))
    store(index, 6, 14, {8: entry(), 12: entry()})

    assert held(client).offsets() == [8, 12]
    assert index.positions == Positions(14, 5)
    assert client.hget(PREFIX + "state", "cold") == b"1"


def test_an_index_keeps_the_effects_of_records_that_a_shortened_log_still_has(
    index: ShardIndex, client: Any
) -> None:
    store(index, 0, 10, {9: entry()})
    kept = {"moved": {member(1): 5, member(2): 6}, "ended": {member(3): 5, member(4): 6}}
    for key, scores in kept.items():
        client.zadd(PREFIX + key, scores)
    index.load()

    index.rebind(Positions(6, 0), Binding("cluster", "topic", "receipts", "group"))

    left = {key: client.zrange(PREFIX + key, 0, -1) for key in kept}
    assert left == {"moved": [member(1)], "ended": [member(3)]}
