"""Rules for callers, on real servers."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import pytest
import redis
from confluent_kafka import Message
from confluent_kafka.admin import NewTopic

from blackbox.embedded import EmbeddedRedis
from tests.service.conftest import Serve
from tests.service.test_cli import blackbox
from tests.support.world import (
    AT_LENGTH,
    ServiceProcess,
    World,
    both_engines_at_length,
    read_all,
    until,
)

pytestmark = pytest.mark.service

QUIET, QUIET_S = (2000, 8) if AT_LENGTH else (1000, 4)
NOISE_PER_S = 2000
BUSY_MS = 250
"""At the 99th percentile, on a machine that runs other tests as well."""

TRIES = 3
"""Retries, because a busy machine is not a delay by a noisy caller."""

RULES = """
[callers.shop]
targets = ["{orders}", "{mail}.*"]
longest_countdown_s = 60
largest_message_bytes = 100

[callers.burst]
requests_per_second = 5

[callers.hoarder]
most_pending = 10

[callers.suspended]
admitted = false

[others]
admitted = false
"""


def send(world: World, caller: str | None, **asked: object) -> None:
    request = {"topic": world.targets[0], "message": "m", "countdown": 0} | asked
    headers = [] if caller is None else [("CALLER_SERVICE", caller.encode())]
    world.send_raw(json.dumps(request), headers, key=str(asked.get("id", "")).encode() or None)


def rules(world: World, text: str = RULES) -> Path:
    path = world.folder / "callers.toml"
    path.write_text(text.format(orders=world.targets[0], mail=f"{world.name}.mail"))
    return path


def header(message: Message, name: str) -> str:
    value = dict(message.headers() or []).get(name)
    return value.decode() if isinstance(value, bytes) else ""


def ended(service: ServiceProcess) -> float:
    return service.metric("blackbox_delivered_total") + service.metric("blackbox_dead_total")


def letters(world: World) -> Counter[tuple[str, str]]:
    """Dead letters by reason and caller."""
    found = read_all(world.kafka.bootstrap_servers, world.dead_letters)
    return Counter((header(m, "blackbox-reason"), header(m, "CALLER_SERVICE")) for m in found)


@both_engines_at_length
def test_each_caller_may_do_only_what_its_rules_allow(world: World) -> None:
    mail = f"{world.name}.mail.eu"
    world.create(NewTopic(mail, 1))
    service = world.start_service(callers_file=rules(world)).wait_ready()

    send(world, "shop", message="to orders")
    send(world, "shop", message="to mail", topic=mail)
    send(world, "shop", message="elsewhere", topic=world.targets[1])
    send(world, "shop", message="far", countdown=61)
    send(world, "shop", message="x" * 101)
    send(world, "suspended")
    send(world, "nobody-knows-me")
    send(world, None)
    world.flush()
    until("all have an outcome", lambda: ended(service) == 8)

    refused = letters(world)
    assert refused[("forbidden", "shop")] == 3
    assert refused[("forbidden", "suspended")] == 1
    assert refused[("forbidden", "nobody-knows-me")] == refused[("forbidden", "")] == 1
    brokers = world.kafka.bootstrap_servers
    assert [m.value() for m in read_all(brokers, world.targets[0])] == [b"to orders"]
    assert [m.value() for m in read_all(brokers, mail)] == [b"to mail"]
    assert service.metric('blackbox_refused_total{caller="shop",reason="forbidden"}') == 3
    assert service.metric('blackbox_refused_total{caller="(others)",reason="forbidden"}') == 2


@both_engines_at_length
def test_requests_beyond_the_quota_of_a_second_become_dead_letters(world: World) -> None:
    service = world.start_service(callers_file=rules(world)).wait_ready()
    for number in range(50):
        send(world, "burst", message=f"burst {number}")
    world.flush()
    until("all have an outcome", lambda: ended(service) == 50)

    asked = read_all(world.kafka.bootstrap_servers, world.requests)
    seconds = Counter(m.timestamp()[1] // 1000 for m in asked)
    admitted = sum(min(5, count) for count in seconds.values())
    assert len(read_all(world.kafka.bootstrap_servers, world.targets[0])) == admitted
    assert letters(world) == {("quota", "burst"): 50 - admitted}
    letter = read_all(world.kafka.bootstrap_servers, world.dead_letters)[0]
    assert header(letter, "blackbox-detail") == (
        "CALLER_SERVICE 'burst' has already sent 5 requests in this second (requests_per_second); "
        "send it again later"
    )


def test_cancelled_and_delivered_requests_free_the_callers_quota(world: World) -> None:
    service = world.start_service(callers_file=rules(world)).wait_ready()
    for number in range(10):
        send(world, "hoarder", countdown=3600, id=f"later-{number}")
    world.flush()
    until("all are pending", lambda: service.metric("blackbox_pending") == 10)
    for _ in range(30):
        send(world, "hoarder")
    world.flush()
    until("there were too many", lambda: letters(world) == {("quota", "hoarder"): 30})
    assert service.metric('blackbox_refused_total{caller="hoarder",reason="quota"}') == 30

    for number in range(4):
        id = f"later-{number}"
        world.send_raw(json.dumps({"id": id, "cancel": True}), key=id.encode())
    world.flush()
    until("four are cancelled", lambda: service.metric("blackbox_cancelled_total") == 4)

    def is_admitted() -> bool:
        send(world, "hoarder")
        world.flush()
        return service.metric("blackbox_delivered_total") > 0

    until("there is room again", is_admitted, every_s=0.3)


def test_a_changed_rules_file_applies_at_once_and_an_invalid_one_is_ignored(world: World) -> None:
    path = rules(world, '[callers.shop]\ntargets = ["nowhere"]')
    service = world.start_service(callers_file=path).wait_ready()
    send(world, "shop")
    world.flush()
    until("it is refused", lambda: letters(world) == {("forbidden", "shop"): 1})

    path.write_text('[callers.shop]\ntargets = "nowhere"')
    until("it is reported", lambda: "callers.shop.targets = 'nowhere'" in service.log.read_text())
    until("the metric shows it", lambda: service.metric("blackbox_callers_file_valid") == 0)
    send(world, "shop")
    world.flush()
    until("it is still refused", lambda: letters(world) == {("forbidden", "shop"): 2})

    path.write_text("")
    until("it is read", lambda: service.metric("blackbox_callers_file_valid") == 1)
    send(world, "shop")
    world.flush()
    until("it is delivered", lambda: service.metric("blackbox_delivered_total") == 1)


@pytest.mark.proof
def test_admitted_requests_stay_admitted_when_the_index_is_lost(
    fragile_world: World, own_redis: EmbeddedRedis
) -> None:
    world = fragile_world
    path = rules(world, "")
    service = world.start_service(callers_file=path).wait_ready()
    send(world, "shop", message="patience", countdown=15)
    world.flush()
    until("a receipt records that it was read", lambda: 1 in read(world))
    path.write_text("[others]\nadmitted = false")
    with redis.Redis.from_url(own_redis.url) as client:
        client.flushall()
    until("it is delivered", lambda: service.metric("blackbox_delivered_total") == 1)
    assert letters(world) == {}


@pytest.mark.proof
def test_a_recurring_request_that_is_not_admitted_does_not_recur(world: World) -> None:
    path = rules(world, "[others]\nadmitted = false")
    service = world.start_service(callers_file=path).wait_ready()
    send(world, "shop", id="each-minute", every=60, countdown=None)
    world.flush()
    until("it is refused", lambda: letters(world) == {("forbidden", "shop"): 1})
    assert len(read_all(world.kafka.bootstrap_servers, world.requests)) == 1
    assert service.metric("blackbox_pending") == 0


@pytest.mark.proof
def test_a_schedule_that_is_not_admitted_gets_its_tombstone(world: World) -> None:
    world.format_name = "scheduler"
    path = rules(world, "[others]\nadmitted = false")
    world.start_service(callers_file=path, history_topic=f"{world.name}.history").wait_ready()
    terms = [("scheduler-epoch", b"0"), ("scheduler-target-topic", world.targets[0].encode())]
    world.send_raw(b"value", terms, key=b"schedule-1")
    world.flush()
    until("it is refused", lambda: letters(world) == {("forbidden", ""): 1})
    records = read_all(world.kafka.bootstrap_servers, world.requests)
    assert [(m.key(), m.value()) for m in records] == [
        (b"schedule-1", b"value"),
        (b"schedule-1", None),
    ]


def test_the_api_refuses_a_forbidden_request_at_once(world: World, serve: Serve) -> None:
    client = serve(callers_file=rules(world))
    asked = {"topic": world.targets[1], "message": "m", "countdown": 0}

    answer = client.post("/requests", json=asked, headers={"CALLER_SERVICE": "shop"})

    assert answer.status_code == 422
    told = f"CALLER_SERVICE 'shop' may not send to '{world.targets[1]}'; allowed: "
    assert told in answer.json()["error"]


def test_an_invalid_rules_file_stops_the_start(world: World) -> None:
    path = rules(world, "[callers.shop]\nrequests_per_minute = 5")
    service = world.start_service(callers_file=path)
    assert service.process.wait(30) == 2
    assert service.log.read_text().strip() == (
        f"error: BLACKBOX_CALLERS_FILE={path}: callers.shop.requests_per_minute: unknown rule"
    )


@pytest.mark.proof
@pytest.mark.alone
def test_a_noisy_caller_does_not_delay_a_quiet_one(world: World) -> None:
    noise = f"{world.name}.noise"
    world.create(NewTopic(noise, 4))
    path = rules(world, "[callers.noisy]\nrequests_per_second = 50")
    service = world.start_service(callers_file=path).wait_ready()
    world.ask(500, from_s=1, within_s=2)
    world.wait_delivered()

    for _ in range(TRIES):
        alone, beside = late_ms_of_the_quiet(world, noise)
        refused = service.metric("blackbox_refused_total")
        print(f"p99 of the quiet one alone {alone} ms, beside {refused:.0f} refused {beside} ms")
        most = 1.2 * alone if AT_LENGTH else BUSY_MS
        if beside <= most:
            break
    assert beside <= most
    assert refused > NOISE_PER_S / 2


def late_ms_of_the_quiet(world: World, target: str) -> tuple[int, int]:
    """The 99th percentiles in every other second, without other callers, and in the seconds between."""
    before, over = len(world.asked), Event()
    noisy = Thread(target=make_noise, args=(world, target, over))
    noisy.start()
    world.ask(QUIET, from_s=1, within_s=1 + QUIET_S)
    verdict = world.wait_delivered()
    over.set()
    noisy.join()
    assert verdict.is_exact, verdict
    bodies = {asked.body for asked in list(world.asked.values())[before:]}
    late: tuple[list[int], list[int]] = [], []
    for message in world.received():
        if (message.value() or b"").decode() in bodies:
            due_ms = int(header(message, "blackbox-due-ms"))
            late[due_ms // 1000 % 2].append(message.timestamp()[1] - due_ms)
    alone, beside = (sorted(each)[int(len(each) * 0.99)] for each in late)
    return alone, beside


def make_noise(world: World, target: str, over: Event) -> None:
    """In every odd second."""
    while not over.wait(0.05):
        for _ in range(NOISE_PER_S // 20 if int(time.time()) % 2 else 0):
            send(world, "noisy", topic=target, message="noise")


def read(world: World) -> list[int]:
    """How far requests had been read, as each receipt records it."""
    found = read_all(world.kafka.bootstrap_servers, f"{world.requests}.receipts")
    return [json.loads(m.value() or b"").get("read", 0) for m in found]


@pytest.mark.proof
@both_engines_at_length
def test_a_backlog_reaches_a_target_no_faster_than_its_rate(world: World) -> None:
    slow, fast = world.targets[:2]
    path = rules(world, f'[targets."{slow}"]\nmessages_per_second = 40')
    for number in range(200):
        send(world, "shop", topic=slow, message=f"{number}")
    send(world, "shop", topic=fast)
    world.flush()
    service = world.start_service(callers_file=path).wait_ready()
    until("all are delivered", lambda: service.metric("blackbox_delivered_total") == 201)

    came = sorted(m.timestamp()[1] for m in read_all(world.kafka.bootstrap_servers, slow))
    assert len(came) == 200
    assert max(Counter(ms // 1000 for ms in came).values()) <= 80
    assert came[-1] - came[0] >= 3000
    [other] = read_all(world.kafka.bootstrap_servers, fast)
    assert other.timestamp()[1] < came[-1] - 1000


@pytest.mark.proof
def test_a_paused_target_gets_nothing_until_it_is_resumed(world: World, serve: Serve) -> None:
    paused, other = world.targets[:2]
    client, brokers = serve(), world.kafka.bootstrap_servers
    [told] = client.post(f"/targets/{paused}/pause").json()["paused"]
    assert told["topic"] == paused
    with redis.Redis.from_url(world.redis.url) as admin:
        [key, *others] = admin.keys(f"blackbox:{{{world.requests}-*}}:paused")
        admin.delete(key)  # as in a Redis that lost a shard
        assert client.post(f"/targets/{paused}/pause").json()["paused"] == [told]
        assert others
        assert admin.exists(key)
    assert f": {paused}" in blackbox(world.environment(), "status").out
    sent = 0

    def is_held_back() -> bool:
        nonlocal sent
        send(world, "shop", topic=paused)
        world.flush()
        sent += 1
        return world.services[0].metric("blackbox_postponed_total") > 0

    until("one is parked", is_held_back, every_s=0.2)
    send(world, "shop", topic=other)
    world.flush()
    until("the other one is delivered", lambda: len(read_all(brokers, other)) == 1)
    assert len(read_all(brokers, paused)) < sent

    assert blackbox(world.environment(), "resume", paused).code == 0
    until("the parked ones are delivered", lambda: len(read_all(brokers, paused)) == sent)
    assert paused not in blackbox(world.environment(), "status").out
    assert letters(world) == {}
