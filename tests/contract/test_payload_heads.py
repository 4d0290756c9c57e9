"""What an owner asks about many requests at once is read without their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from blackbox.core.parking import bands_of, parked_at
from blackbox.core.plan import Named, Positions
from blackbox.index import guarded_index
from blackbox.index.payload_heads import HEAD_BYTES, LONG_HEAD_BYTES
from blackbox.index.shard_index import ShardIndex
from blackbox.records.entry import Entry
from blackbox.records.request import Cancel, Reason, member, request_id
from tests.contract.conftest import Backend, Opener
from tests.contract.held import NOW_MS, PREFIX, SHARD, entry, held, store

MANY = 40
LARGE = b"x" * 250_000
IDS = [request_id(SHARD, offset) for offset in range(MANY)]

# The Redis inside this process does not count bytes.
counting = pytest.mark.parametrize("backend", ["real_backend"], indirect=True)


@pytest.fixture
def index(open_index: Opener) -> ShardIndex:
    index = open_index()
    index.begin(Positions(0, 0))
    return index


@contextmanager
def little_read(backend: Backend) -> Iterator[None]:
    """Fails if Redis sent more than two kilobytes for each of many requests."""

    def sent() -> int:
        told: Any = backend.client.info("stats")
        return int(told["total_net_output_bytes"])

    before = sent()
    yield
    assert sent() - before < MANY * 2_000


ASKED: dict[str, Callable[[ShardIndex], object]] = {
    "named": lambda index: index.named(IDS),
    "caller_ids": lambda index: index.caller_ids(range(MANY)),
    "cancels by id": lambda index: store(
        index, MANY, 2 * MANY, {MANY + n: Cancel(None, id) for n, id in enumerate(IDS)}
    ),
}


@counting
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_burst_of_cancels_reads_no_message(
    index: ShardIndex, backend: Backend, asked: Callable[[ShardIndex], object]
) -> None:
    store(index, 0, MANY, {o: entry(message=LARGE, caller_id=f"c{o}") for o in range(MANY)})

    with little_read(backend):
        asked(index)


@counting
def test_the_target_of_parked_requests_is_found_without_their_messages(
    index: ShardIndex, open_index: Opener, backend: Backend
) -> None:
    store(index, 0, MANY, {o: entry(message=LARGE) for o in range(MANY)})
    band = next(bands_of("orders"))
    index.postpone(
        {o: (parked_at(band, NOW_MS), entry(message=LARGE)) for o in range(MANY)}, NOW_MS
    )
    following = open_index()

    with little_read(backend):
        assert following.parked() == {band: "orders"}


def with_head_of(size: int, caller_id: str, **more: Any) -> Entry:
    """A request whose line of JSON has about so many bytes."""
    return entry(caller_id=caller_id)._replace(headers=[("trace", "t" * size)], **more)


@pytest.mark.parametrize(
    "size", [0, *range(HEAD_BYTES - 110, HEAD_BYTES, 7), LONG_HEAD_BYTES, 4 * LONG_HEAD_BYTES]
)
def test_headers_of_any_length_do_not_hide_what_follows_them(index: ShardIndex, size: int) -> None:
    letter = with_head_of(size, "b", reason=Reason.TOO_LATE)
    store(index, 0, 3, {0: with_head_of(size, "a"), 1: letter, 2: entry(message=LARGE)})

    assert index.caller_ids([0, 1, 2]) == {0: "a", 1: "b", 2: None}
    assert index.named(IDS[:3]) == {
        IDS[0]: Named(0, True, "a"),
        IDS[1]: Named(1, False, "b"),
        IDS[2]: Named(2, True, None),
    }
    assert store(index, 3, 4, {3: Cancel(None, IDS[0])}).cancelled == 1


@pytest.mark.parametrize("message", [b"small", LARGE])
def test_a_missing_payload_is_not_taken_for_one_that_cannot_be_read(
    index: ShardIndex, client: redis.Redis, message: bytes
) -> None:
    store(index, 0, 4, {o: entry(message=message, caller_id=f"c{o}") for o in range(4)})
    client.delete(f"{PREFIX}msg:{member(0).decode()}")
    client.set(f"{PREFIX}msg:{member(1).decode()}", b"")
    client.set(f"{PREFIX}msg:{member(2).decode()}", LARGE)

    assert index.caller_ids(range(5)) == {1: None, 2: None, 3: "c3"}
    assert [one.is_pending for one in index.named(IDS[:5]).values()] == [*4 * [True], False]


@pytest.mark.parametrize("band", [None, next(bands_of("orders"))])
def test_dead_letters_of_unknown_outcome_are_made_of_a_few_megabytes_at_once(
    index: ShardIndex, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, band: int | None
) -> None:
    asked = {offset: entry(message=b"x" * 2_000) for offset in range(MANY)}
    store(index, 0, MANY, asked)
    if band is not None:
        index.postpone({o: (parked_at(band, NOW_MS), one) for o, one in asked.items()}, NOW_MS)
    monkeypatch.setattr(guarded_index, "MAX_BATCH_BYTES", 25_000)
    read_payloads, sizes = index._mget, list[int]()

    def measured(names: Sequence[bytes]) -> list[bytes | None]:
        found = read_payloads(names)
        sizes.append(sum(len(payload or b"") for payload in found))
        return found

    monkeypatch.setattr(index, "_mget", measured)

    assert index.outcome_unknown(NOW_MS, NOW_MS) == MANY
    assert max(sizes) <= 25_000
    assert held(client).due == [(NOW_MS, offset) for offset in range(MANY)]
    assert all(b"outcome-unknown" in payload for payload in held(client).payloads.values())
