"""Hostile records: each ends as a delivery, a pending entry or a dead letter, and the service continues."""

from __future__ import annotations

import json

import pytest
import redis

from blackbox.records.request import Headers
from tests.support.raw_record import write_with_header
from tests.support.world import World, both_engines_at_length, until

pytestmark = pytest.mark.service

UNREADABLE: list[bytes | None] = [
    b"", None, b"   ", b"{", b"[]", b'"text"', b"null", b"42", b"\xff\xfe", b"\xef\xbb\xbf{}",
    b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b'{"topic":"T","topic":"T"}', b"\x00",
    b'{"topic": "T", "message": "x", "countdown": NaN}', b'{"topic": "T", "countdown": 1e999}',
]  # fmt: skip

IMPOSSIBLE: list[dict[str, object]] = [
    {"message": "x", "countdown": 0},
    {"topic": "T", "countdown": 0},
    {"topic": "T", "message": "x"},
    {"topic": "no such name!", "message": "x", "countdown": 0},
    {"topic": "..", "message": "x", "countdown": 0},
    {"topic": "x" * 250, "message": "x", "countdown": 0},
    {"topic": "__consumer_offsets", "message": "x", "countdown": 0},
    {"topic": "T", "message": "x", "countdown": True},
    {"topic": "T", "message": "x", "countdown": "90"},
    {"topic": "T", "message": "x", "countdown": None},
    {"topic": "T", "message": "x", "countdown": 34_560_001},
    {"topic": "T", "message": "x", "at": "2030-01-01T00:00:00"},
    {"topic": "T", "message": "x", "at": 1, "countdown": 1},
    {"topic": "T", "message": "x", "countdown": 0, "headers": {"n": 1}},
    {"topic": "T", "message": "x", "countdown": 0, "headers": {"blackbox-id": "mine"}},
    {"topic": "T", "message": "%%%", "countdown": 0, "encoding": "base64"},
    {"topic": "T", "message": "x", "countdown": 0, "typo": 1},
    {"id": "x", "cancel": "yes"},
    {"id": "", "cancel": True},
]


@both_engines_at_length
def test_invalid_records_become_dead_letters_and_valid_ones_are_delivered(
    world: World,
) -> None:
    service = world.start_service().wait_ready()
    bad = UNREADABLE + [json.dumps(value).encode() for value in IMPOSSIBLE]
    for number, value in enumerate(bad):
        world.send_raw(value, [("binary", b"\xff\x00"), ("nothing", None)], partition=number % 4)
        world.ask(5, within_s=0, partition=number % 4)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict

    until("all are dead letters", lambda: len(world.received(world.dead_letters)) >= len(bad))
    letters = world.received(world.dead_letters)
    assert sorted(letter.value() or b"" for letter in letters) == sorted(v or b"" for v in bad)
    for letter in letters:
        assert list(dict(letter.headers() or [])) == [
            "binary", "nothing", "blackbox-reason", "blackbox-detail", "blackbox-source",
        ]  # fmt: skip
    assert service.metric("blackbox_invalid_total") == len(bad)


@both_engines_at_length
def test_a_record_with_a_header_name_that_is_not_utf_8_becomes_a_dead_letter(world: World) -> None:
    world.start_service().wait_ready()
    value = json.dumps({"topic": world.targets[0], "countdown": 0}).encode()
    write_with_header(world.kafka.bootstrap_servers, world.requests, b"\xff\xfe", value[:60])
    world.ask(20, within_s=0, partition=0)

    assert world.wait_delivered().is_exact
    [letter] = until("it is a dead letter", lambda: world.received(world.dead_letters))
    assert letter.value() == value[:60]
    assert ("blackbox-reason", b"bad-headers") in (letter.headers() or [])


@both_engines_at_length
def test_a_record_with_50_000_headers_becomes_a_dead_letter_of_its_own_size(world: World) -> None:
    asked = json.dumps({"topic": world.targets[0], "message": "x", "countdown": 86_400})
    headers: Headers = [("a", b"\xff")] * 50_000
    client = redis.Redis.from_url(world.redis.url)
    payloads = f"blackbox:{{{world.requests}-0}}:msg:*"
    world.start_service().wait_ready()
    for _ in range(5):
        world.send_raw(asked, headers, partition=0)
    world.ask(5, within_s=0, partition=1)

    assert world.wait_delivered().is_exact
    until("all are dead letters", lambda: len(world.received(world.dead_letters)) >= 5)
    letters = world.received(world.dead_letters)
    assert len(letters) == 5
    for letter in letters:
        found = list(letter.headers() or [])
        assert (letter.value(), found[:-3]) == (asked.encode(), headers)
        detail = b"the record has 50000 headers; give at most 1000"
        assert ("blackbox-detail", detail) in found
    assert list(client.scan_iter(payloads)) == []
    client.close()


def test_binary_headers_keys_and_tombstones_pass_through(world: World) -> None:
    headers = [("binary", b"\xff\x00"), ("nothing", None), ("empty", b"")]
    asked = {"topic": world.targets[0], "message": None, "countdown": 0, "key": "k"}
    world.send_raw(json.dumps(asked), headers, partition=0)
    world.start_service().wait_ready()
    [delivered] = until("it is delivered", lambda: world.received(world.targets[0]))
    assert delivered.value() is None
    assert delivered.key() == b"k"
    assert list(delivered.headers() or [])[:3] == headers
