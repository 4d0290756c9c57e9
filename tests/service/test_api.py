"""The HTTP API of a real service: send, find, list, cancel, count."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from blackbox.admin.changes import READ_WITHIN_S
from tests.service.conftest import Serve
from tests.support.world import World, both_engines_at_length, until

pytestmark = pytest.mark.service


@pytest.fixture
def service(serve: Serve) -> httpx.Client:
    return serve()


def asked(world: World, countdown: float, **more: object) -> dict[str, object]:
    return {"topic": world.targets[0], "message": "hi", "countdown": countdown} | more


def ask(service: httpx.Client, request: dict[str, object], caller: str = "shop") -> str:
    answer = service.post("/requests", json=request, headers={"CALLER_SERVICE": caller})
    assert answer.status_code == 201, answer.text
    [id] = answer.json()["ids"]
    return str(id)


def bulk(service: httpx.Client, requests: Sequence[dict[str, object]]) -> httpx.Response:
    return service.post("/requests/bulk", content="\n".join(map(json.dumps, requests)))


def state(service: httpx.Client, id: str) -> str:
    return str(service.get(f"/requests/{id}").json()["state"])


@both_engines_at_length
def test_a_request_is_sent_found_listed_and_cancelled(world: World, service: httpx.Client) -> None:
    id = ask(service, asked(world, 3600, id="order/17"))
    until("it is pending", lambda: state(service, id) == "pending")
    found = service.get(f"/requests/{id}").json()
    assert (found["caller"], found["caller_id"], found["target"]) == (
        "shop", "order/17", world.targets[0],
    )  # fmt: skip
    assert service.get("/requests/order/17").json() == found
    [listed] = service.get("/requests").json()["requests"]
    assert {**found, **listed} == found

    cancelled = service.delete(f"/requests/{id}")
    assert (cancelled.status_code, cancelled.json()["outcome"]) == (200, "cancelled")
    assert state(service, id) == "ended"
    assert service.delete(f"/requests/{id}").json()["outcome"] == "too-late"
    assert service.get("/requests").json() == {"requests": []}


@pytest.mark.proof
def test_a_request_written_just_before_is_cancelled_by_its_caller_id(
    world: World, service: httpx.Client
) -> None:
    for number in range(20):
        ask(service, asked(world, 3600, id=f"o-{number}"))
        answer = service.delete(f"/requests/o-{number}").json()
        assert answer["outcome"] == "cancelled", answer


def test_nobody_waits_for_the_marker_of_a_transaction_to_be_read(
    world: World, service: httpx.Client
) -> None:
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(servers | {"transactional.id": f"{world.name}.caller"})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(world.requests, json.dumps(asked(world, 3600, id="order/18")), partition=0)
    producer.commit_transaction(10)
    until("it is pending", lambda: state(service, "order/18") == "pending")

    began = time.monotonic()
    assert service.delete("/requests/order/19").status_code == 404

    assert time.monotonic() - began < READ_WITHIN_S


def test_a_delivered_request_is_found_with_its_place_and_not_cancelled(
    world: World, service: httpx.Client
) -> None:
    id = ask(service, asked(world, 0))
    until("it is delivered", lambda: state(service, id) == "delivered")
    late = service.delete(f"/requests/{id}").json()
    assert late["outcome"] == "too-late"
    assert late["request"]["place"]["topic"] == world.targets[0]


def test_an_unknown_request_is_not_found(world: World, service: httpx.Client) -> None:
    for id in ("nobody", "6ba7b810-9dad-81d1-80b4-00c04fd430c8"):
        for answer in (service.get(f"/requests/{id}"), service.delete(f"/requests/{id}")):
            assert answer.status_code == 404
            assert id in answer.json()["error"]


def test_of_1000_overdue_requests_only_the_500_not_cancelled_are_delivered(
    world: World, serve: Serve
) -> None:
    for number in range(1000):
        request = asked(world, 0, id=f"r{number}", message=str(number))
        world.send_raw(json.dumps(request), key=b"k", partition=0)
    for number in range(0, 1000, 2):
        world.send_raw(json.dumps({"id": f"r{number}", "cancel": True}), key=b"k", partition=0)
    world.flush()
    service = serve()

    def fired() -> list[int]:
        return [int(message.value() or b"") for message in world.received(world.targets[0])]

    until("500 are delivered", lambda: len(fired()) >= 500)
    assert sorted(fired()) == list(range(1, 1000, 2))
    assert service.get("/stats").json()["pending"] == 0


def test_a_bulk_is_accepted_completely_or_not_at_all(world: World, service: httpx.Client) -> None:
    good = [asked(world, 3600, message=n) for n in range(500)]
    wrong = bulk(
        service, [*good, asked(world, 0) | {"countdown": "soon"}, {"id": "x", "cancel": True}]
    )
    assert wrong.status_code == 422
    assert [(one["number"], one["reason"]) for one in wrong.json()["refused"]] == [
        (500, "bad-due-time"), (501, "bad-cancel"),
    ]  # fmt: skip
    ids = bulk(service, good).json()["ids"]
    assert len(set(ids)) == 500
    until("they are pending", lambda: service.get("/stats").json()["pending"] == 500)


def test_a_number_is_delivered_as_it_was_written(world: World, service: httpx.Client) -> None:
    body = f'{{"topic":"{world.targets[0]}","message":[1.0,1.10,10000000000000000000000],"countdown":0}}'
    assert service.post("/requests", content=body).status_code == 201
    [message] = until("it is delivered", lambda: world.received(world.targets[0]))
    assert message.value() == b"[1.0,1.10,10000000000000000000000]"


def test_pages_list_every_request_once_by_due_time(world: World, service: httpx.Client) -> None:
    at_ms = int(time.time() + 3600) * 1000
    topics = [world.targets[n % 2] for n in range(260)]
    requests = [
        {"topic": topic, "message": n, "at": at_ms + n // 100, "id": f"r{n}"}
        for n, topic in enumerate(topics)
    ]
    ids = bulk(service, requests).json()["ids"]
    until("they are pending", lambda: service.get("/stats").json()["pending"] == 260)

    def pages(**wanted: str | int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            page = service.get("/requests", params=wanted | cursor | {"limit": 17}).json()
            found += page["requests"]
            if "next" not in page:
                return found
            cursor = {"cursor": page["next"]}

    everything = pages()
    assert sorted(one["id"] for one in everything) == sorted(ids)
    assert [one["due_ms"] for one in everything] == sorted(one["due_ms"] for one in everything)
    assert len(pages(target=world.targets[0])) == 130
    assert len(pages(caller="nobody")) == 0
    assert {one["due_ms"] for one in pages(from_ms=at_ms + 1, to_ms=at_ms + 1)} == {at_ms + 1}


def test_stats_count_pending_requests_by_caller_target_and_due_time(
    world: World, service: httpx.Client
) -> None:
    for caller, countdown in (("shop", 90), ("shop", 150), ("billing", 3600 * 24)):
        ask(service, asked(world, countdown), caller)
    until("they are pending", lambda: service.get("/stats").json()["pending"] == 3)
    found = service.get("/stats").json()
    assert found["callers"] == {"shop": 2, "billing": 1}
    assert found["targets"] == {world.targets[0]: 3}
    assert (len(found["profile"]), sum(found["profile"]), found["profile"][0]) == (60, 2, 0)
    assert len(found["shards"]) == world.partitions


def test_with_tokens_configured_every_operation_requires_one(serve: Serve) -> None:
    look, change = "l" * 16, "c" * 16
    service = serve(api_token=change, api_read_token=look)

    def status(method: str, token: str | None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        path = {"GET": "/requests", "DELETE": "/requests/x", "POST": "/requests"}[method]
        return service.request(method, path, headers=headers).status_code

    codes = {
        (method, token): status(method, token)
        for method in ("GET", "DELETE", "POST")
        for token in (None, "wrong", look, change)
    }
    assert codes == {
        ("GET", None): 401, ("GET", "wrong"): 401, ("GET", look): 200, ("GET", change): 200,
        ("DELETE", None): 401, ("DELETE", "wrong"): 401, ("DELETE", look): 403,
        ("DELETE", change): 404,
        ("POST", None): 401, ("POST", "wrong"): 401, ("POST", look): 403, ("POST", change): 422,
    }  # fmt: skip
    assert service.get("/livez").status_code == 200


def test_without_tokens_requests_from_other_sites_are_refused(
    world: World, service: httpx.Client
) -> None:
    request = asked(world, 3600)
    for headers in ({"Host": "evil.example:8000"}, {"Origin": "https://evil.example"}):
        for answer in (
            service.get("/requests", headers=headers),
            service.get("/schedules", headers=headers),
            service.get("/metrics", headers=headers),
            service.get("/", headers=headers),
            service.delete("/requests/x", headers=headers),
            service.post("/requests", json=request, headers=headers),
        ):
            assert answer.status_code == 403, answer.text
    at_home = {"Origin": str(service.base_url), "Host": f"localhost:{service.base_url.port}"}
    assert service.post("/requests", json=request, headers=at_home).status_code == 201


@pytest.mark.parametrize("more", [{"http_host": "0.0.0.0"}, {"metrics_addr": ":0"}])
def test_beyond_loopback_only_probes_and_metrics_need_no_token(
    serve: Serve, more: dict[str, str]
) -> None:
    service = serve(**more)
    for path in ("/livez", "/readyz", "/metrics", "/liveness"):
        assert service.get(path).status_code == 200, path
    for method, path in (
        ("GET", "/requests"), ("GET", "/stats"), ("GET", "/schedules"), ("GET", "/dead-letters"),
        ("POST", "/requests"), ("DELETE", "/requests/x"), ("POST", "/livez"),
    ):  # fmt: skip
        told = service.request(method, path)
        assert (told.status_code, "BLACKBOX_API_TOKEN" in told.text) == (403, True), path


def test_beyond_loopback_a_read_token_changes_nothing(serve: Serve) -> None:
    look = {"Authorization": f"Bearer {'l' * 16}"}
    service = serve(http_host="0.0.0.0", api_read_token="l" * 16)
    assert service.get("/requests").status_code == 401
    assert service.get("/requests", headers=look).status_code == 200
    told = service.delete("/requests/x", headers=look)
    assert (told.status_code, "BLACKBOX_API_TOKEN" in told.text) == (403, True)


def test_a_bulk_with_a_too_large_request_writes_nothing(
    world: World, service: httpx.Client
) -> None:
    wrong = bulk(service, [asked(world, 3600), asked(world, 3600, message="x" * 1_000_000)])
    assert [one["reason"] for one in wrong.json()["refused"]] == ["too-large"]
    id = ask(service, asked(world, 3600))
    until("it is pending", lambda: state(service, id) == "pending")
    assert service.get("/stats").json()["pending"] == 1


def test_schedules_are_listed_as_in_kafka_message_scheduler(world: World, serve: Serve) -> None:
    world.format_name = "scheduler"
    at_s = int(time.time()) + 3600
    terms = {
        "scheduler-epoch": str(at_s),
        "scheduler-target-topic": world.targets[0],
        "scheduler-target-key": "vid1",
    }
    world.send_raw(b"\x00on", list(terms.items()), key=b"vid1-online")
    world.flush()
    service = serve(history_topic=f"{world.name}.history")
    [found] = until("it is reported", lambda: service.get("/schedules").json())
    assert abs(found.pop("timestamp") - time.time()) < 60
    assert found == {
        "id": "vid1-online",
        "epoch": at_s,
        "topic": world.requests,
        "target-topic": world.targets[0],
        "target-key": "vid1",
        "value": "AG9u",
    }
    assert service.get("/liveness").status_code == 200
    info = service.get("/info").json()
    assert info["kafka"] == {
        "bootstrap_servers": world.kafka.bootstrap_servers,
        "topics": [world.requests],
        "history_topic": f"{world.name}.history",
    }
    assert service.delete("/requests/vid1-online").json()["outcome"] == "cancelled"
    assert service.get("/schedules").json() == []
