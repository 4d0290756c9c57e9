"""An undeliverable request becomes a dead letter with its reason, and the others are delivered in time."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from confluent_kafka import Message
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.world import World, both_engines_at_length, read_all, until

pytestmark = pytest.mark.service

POLL_INTERVAL_MS = 1000
TRIES = 3
"""Retries, because a machine that stands still is not a delay by undeliverable requests."""


def reasons(world: World) -> Counter[str]:
    letters = world.received(world.dead_letters)
    return Counter(header(letter, "blackbox-reason") for letter in letters)


def header(message: Message, name: str) -> str:
    value = dict(message.headers() or [])[name]
    assert isinstance(value, bytes)
    return value.decode()


@both_engines_at_length
def test_a_thousand_undeliverable_requests_do_not_delay_deliverable_ones(
    world: World,
) -> None:
    kinds: list[tuple[str, dict[str, object] | str]] = [
        ("unknown-topic", {"topic": f"{world.name}.nowhere", "message": "x", "countdown": 0}),
        ("forbidden-topic", {"topic": world.requests, "message": "x", "countdown": 0}),
        ("bad-due-time", {"topic": world.targets[0], "message": "x", "countdown": "soon"}),
        ("not-json", "{"),
    ]
    world.start_service(retries=1, poll_interval_ms=POLL_INTERVAL_MS).wait_ready()
    world.ask(1000, within_s=1, partition=0)
    world.wait_delivered()
    delays_ms: list[int] = []
    for _ in range(TRIES):
        alone_ms = most_late(world)
        for number in range(1000):
            _, value = kinds[number % len(kinds)]
            world.send_raw(value if isinstance(value, str) else json.dumps(value), partition=0)
        delays_ms.append(most_late(world) - alone_ms)
        if delays_ms[-1] < POLL_INTERVAL_MS:
            break
    print(f"behind 1,000 undeliverable: later by {delays_ms[-1]} ms at most")
    assert min(delays_ms) < POLL_INTERVAL_MS, delays_ms

    asked = 1000 * len(delays_ms)
    until("all dead letters", lambda: sum(reasons(world).values()) >= asked)
    assert reasons(world) == {kind: asked // len(kinds) for kind, _ in kinds}


def most_late(world: World) -> int:
    """The lateness in ms of the last of 1,000 requests that are due at once."""
    before = len(world.asked)
    world.ask(1000, within_s=0, partition=0)
    world.wait_delivered()
    verdict = world.verdict(late_from=before)
    assert verdict.is_exact, verdict
    return verdict.late_ms[-1]


def test_a_message_too_large_for_the_client_does_not_affect_others(world: World) -> None:
    large = {"topic": world.targets[0], "message": "x" * 2_000_000, "countdown": 0}
    world.send_raw(json.dumps(large), [("CALLER_SERVICE", b"tests")], partition=0)
    world.ask(100, within_s=0, partition=0)
    world.start_service().wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    until("the dead letter", lambda: reasons(world) == {"too-large": 1})
    letter = world.received(world.dead_letters)[0]
    assert header(letter, "blackbox-source") == f"{world.requests}/0@0"
    assert letter.value() is None
    assert "left out" in header(letter, "blackbox-detail")


@both_engines_at_length
def test_messages_that_the_broker_refuses_do_not_affect_the_rest_of_the_batch(
    world: World,
) -> None:
    compacted = f"{world.name}.compacted"
    world.create(NewTopic(compacted, 1, config={"cleanup.policy": "compact"}))
    for _ in range(5):
        keyless = {"topic": compacted, "message": "x", "countdown": 0}
        world.send_raw(json.dumps(keyless), [("CALLER_SERVICE", b"tests")], partition=0)
    for number in range(5):
        keyed = {"topic": compacted, "message": f"m{number}", "key": f"k{number}", "countdown": 0}
        world.send_raw(json.dumps(keyed), partition=0)
    world.ask(200, within_s=0, partition=0)
    world.start_service().wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    until("5 dead letters", lambda: reasons(world) == {"refused": 5})
    brokers = world.kafka.bootstrap_servers
    until("the keyed ones are delivered", lambda: len(read_all(brokers, compacted)) == 5)
    assert {m.key() for m in read_all(brokers, compacted)} == {
        f"k{number}".encode() for number in range(5)
    }


def test_a_target_created_later_receives_its_message(world: World) -> None:
    late = f"{world.name}.late"
    request = {"topic": late, "message": "patience", "countdown": 0}
    world.send_raw(json.dumps(request), partition=0)
    service = world.start_service().wait_ready()
    until("it is postponed", lambda: service.metric("blackbox_postponed_total") >= 1)
    world.create(NewTopic(late, 1))
    found = until("the message", lambda: read_all(world.kafka.bootstrap_servers, late))
    assert [m.value() for m in found] == [b"patience"]
    assert reasons(world) == {}


@pytest.mark.proof
@both_engines_at_length
def test_a_target_deleted_under_load_delays_others_for_a_few_seconds(
    world: World,
) -> None:
    brokers, doomed = world.kafka.bootstrap_servers, f"{world.name}.doomed"
    world.create(NewTopic(doomed, 1))
    world.start_service().wait_ready()
    for number in range(4000):
        asked = {"topic": doomed, "message": "x", "countdown": number / 400}
        world.send_raw(json.dumps(asked), partition=0)
    world.ask(2000, within_s=10, partition=0)
    until("some are delivered", lambda: len(read_all(brokers, doomed)) >= 100)

    admin = AdminClient({"bootstrap.servers": brokers})
    [deleted] = admin.delete_topics([doomed]).values()
    deleted.result()
    verdict = world.wait_delivered()

    assert verdict.is_exact, verdict
    print(f"beside a target that was deleted: late by {verdict.late_ms[-1]} ms at most")
    assert verdict.late_ms[-1] < 7000, verdict.late_ms[-10:]


def test_an_expired_request_becomes_a_dead_letter(world: World) -> None:
    request = {"topic": world.targets[0], "message": "x", "countdown": 0, "expires_after": 0.001}
    world.send_raw(json.dumps(request), partition=0)
    world.ask(1, within_s=0)
    until("it expired", lambda: len(read_all(world.kafka.bootstrap_servers, world.requests)) == 2)
    world.start_service().wait_ready()
    assert world.wait_delivered().is_exact
    until("the dead letter", lambda: reasons(world) == {"expired": 1})


@both_engines_at_length
def test_a_replaced_request_is_delivered_once_and_a_cancelled_one_never(world: World) -> None:
    for number in range(20):
        named = {
            "topic": world.targets[0], "message": f"v{number}", "countdown": 2, "id": "invoice-7",
        }  # fmt: skip
        world.send_raw(json.dumps(named), partition=1)
    unwanted = {"topic": world.targets[0], "message": "never", "countdown": 1, "id": "unwanted"}
    world.send_raw(json.dumps(unwanted), partition=1)
    world.send_raw(json.dumps({"id": "unwanted", "cancel": True}), partition=1)
    world.flush()
    service = world.start_service().wait_ready()
    found = until("the last version", lambda: world.received(world.targets[0]))
    assert [m.value() for m in found] == [b"v19"]
    assert service.metric("blackbox_replaced_total") == 19
    assert service.metric("blackbox_cancelled_total") == 1
    until("nothing is pending", lambda: service.metric("blackbox_pending") == 0)
