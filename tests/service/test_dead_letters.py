"""Dead letters over HTTP: listed, replayed once, or discarded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

from blackbox.admin import replay_conflicts
from blackbox.records.request import placed
from tests.service.conftest import Serve
from tests.service.test_cli import blackbox
from tests.support.world import ForkedService, World, read_all, until

pytestmark = pytest.mark.service


def list_letters(service: httpx.Client, **wanted: Any) -> list[dict[str, Any]]:
    found = service.get("/dead-letters", params=wanted)
    assert found.status_code == 200, found.text
    letters: list[dict[str, Any]] = found.json()["letters"]
    return letters


def some(service: httpx.Client, count: int) -> list[dict[str, Any]]:
    def all_there() -> list[dict[str, Any]]:
        found = list_letters(service)
        return found if len(found) == count else []

    return until(f"{count} dead letters", all_there)


def close_letters(service: httpx.Client, how: str, *places: str) -> dict[str, Any]:
    answer = service.post(f"/dead-letters/{how}", json={"places": places})
    assert answer.status_code == 200, answer.text
    done: dict[str, Any] = answer.json()
    return done


def undeliverable(world: World, **more: object) -> str:
    topic = f"{world.name}.later"
    asked = {"topic": topic, "message": "hi", "countdown": 0} | more
    world.send_raw(json.dumps(asked), [("CALLER_SERVICE", "shop"), ("trace", b"\xff")], key=b"k")
    world.flush()
    return topic


def test_a_dead_letter_is_listed_and_replayed_once_its_target_exists(
    world: World, serve: Serve
) -> None:
    service = serve(retries=1)
    topic = undeliverable(world)
    [letter] = some(service, 1)
    assert (letter["reason"], letter["caller"], letter["key"]) == ("unknown-topic", "shop", "k")
    assert json.loads(letter["value"])["topic"] == topic
    assert topic in letter["detail"]
    assert letter["source"].startswith(f"{world.requests}/")

    world.create(NewTopic(topic, 1))
    place = letter["place"]
    assert close_letters(service, "replay", place) == {"done": [place], "left": {}}
    kafka = world.kafka.bootstrap_servers
    [message] = until("it is delivered", lambda: read_all(kafka, topic))
    headers: list[Any] = message.headers() or []  # type: ignore[assignment]
    assert headers[:2] == [("CALLER_SERVICE", b"shop"), ("trace", b"\xff")]
    assert [name for name, _ in headers[2:]] == [
        "blackbox-id",
        "blackbox-due-ms",
        "blackbox-source",
    ]

    assert close_letters(service, "replay", place) == {
        "done": [],
        "left": {place: "already replayed"},
    }
    assert list_letters(service) == []
    assert [one["became"] for one in list_letters(service, is_open="false")] == ["replayed"]
    assert len(read_all(kafka, topic)) == 1


def test_a_replay_does_not_replace_a_newer_request_with_the_same_id(
    world: World, serve: Serve
) -> None:
    service = serve(retries=1)
    topic = undeliverable(world, id="k")
    [letter] = some(service, 1)
    world.create(NewTopic(topic, 1))
    undeliverable(world, id="k", countdown=3600)
    place = letter["place"]
    left = close_letters(service, "replay", place)["left"]
    assert "cancel that one first" in left[place]
    assert service.delete("/requests/k").json()["outcome"] == "cancelled"
    assert close_letters(service, "replay", place) == {"done": [place], "left": {}}
    until("it is delivered", lambda: read_all(world.kafka.bootstrap_servers, topic))


def wait_briefly() -> None:
    """Wait a second, not five, for the service to read what the request topic has."""
    replay_conflicts.READ_WITHIN_S = 1.0


def test_a_replay_does_not_replace_a_request_that_an_open_transaction_hides(
    world: World, serve: Serve
) -> None:
    world.service_type = partial(ForkedService, before=[wait_briefly])
    service = serve(retries=1)
    topic = undeliverable(world, id="k", message="older")
    [letter] = some(service, 1)
    world.create(NewTopic(topic, 1))
    source = placed(letter["source"])
    assert source is not None
    kafka = world.kafka.bootstrap_servers
    other = Producer({"bootstrap.servers": kafka, "transactional.id": world.name})
    other.init_transactions(10)
    other.begin_transaction()
    other.produce(world.requests, "{}", partition=source[0].partition)
    assert other.flush(10) == 0
    undeliverable(world, id="k", message="newer")

    place = letter["place"]
    left = close_letters(service, "replay", place)["left"]
    assert "requests that the service has not read yet" in left[place]

    other.abort_transaction(10)
    until("the newer one is delivered", lambda: len(read_all(kafka, topic)) == 1)
    until("it is replayed", lambda: close_letters(service, "replay", place)["done"] == [place])
    until("the older one is delivered", lambda: len(read_all(kafka, topic)) == 2)
    assert [message.value() for message in read_all(kafka, topic)] == [b"newer", b"older"]


def test_dead_letters_with_ids_are_replayed_one_after_the_other(world: World, serve: Serve) -> None:
    service = serve(retries=1)
    for id in ("a", "b"):
        topic = undeliverable(world, id=id)
    places = [letter["place"] for letter in some(service, 2)]
    world.create(NewTopic(topic, 1))
    for place in places:
        # Behind the first one, the request topic ends with the marker of its transaction.
        assert close_letters(service, "replay", place) == {"done": [place], "left": {}}
    kafka = world.kafka.bootstrap_servers
    until("both are delivered", lambda: len(read_all(kafka, topic)) == 2)


def test_the_command_line_lists_and_discards_dead_letters(world: World, serve: Serve) -> None:
    service = serve(retries=0)
    undeliverable(world)
    [letter] = some(service, 1)
    place = letter["place"]
    told = blackbox(world.environment(), "letters", "--json")
    assert {**told.json} == letter
    assert blackbox(world.environment(), "letters").lines[0].endswith("unknown-topic")
    assert blackbox(world.environment(), "letters", "--discard", place).code == 0
    again = blackbox(world.environment(), "letters", "--replay", place)
    assert (again.code, again.out) == (1, f"{place}: already discarded\n")
    assert blackbox(world.environment(), "letters").out == ""
    assert "(discarded)" in blackbox(world.environment(), "letters", "--all").out


@pytest.mark.proof
def test_concurrent_replays_deliver_a_dead_letter_once(world: World, serve: Serve) -> None:
    services = [serve(retries=1), serve(retries=1)]
    topic = undeliverable(world)
    [letter] = some(services[0], 1)
    world.create(NewTopic(topic, 1))
    body = {"places": [letter["place"]]}
    with ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(services[number % 2].post, "/dead-letters/replay", json=body)
            for number in range(6)
        ]
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} <= {200, 503}
    done = [place for answer in answers for place in answer.json().get("done", [])]
    assert done in (
        [],
        [letter["place"]],
    )  # a fenced process may lose the answer, but not the replay
    until("it is delivered", lambda: read_all(world.kafka.bootstrap_servers, topic))
    assert close_letters(services[0], "replay", letter["place"])["done"] == []
    assert len(read_all(world.kafka.bootstrap_servers, topic)) == 1


def test_a_discarded_or_unknown_dead_letter_is_not_replayed(world: World, serve: Serve) -> None:
    service = serve(retries=1)
    world.send_raw("no request")
    undeliverable(world)
    found = {letter["reason"]: letter["place"] for letter in some(service, 2)}
    assert [one["reason"] for one in list_letters(service, reason="not-json")] == ["not-json"]
    first = found["not-json"]
    assert close_letters(service, "discard", first, first)["done"] == [first]
    nothing = f"{world.dead_letters}/0@999999"
    left = close_letters(service, "replay", first, nothing, "x")["left"]
    assert left[first] == "already discarded"
    assert "no such letter" in left[nothing]
    assert "no such letter" in left["x"]
    assert [letter["place"] for letter in list_letters(service)] == [found["unknown-topic"]]
