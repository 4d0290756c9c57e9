"""Records of a caller affect no other topic, key, log line, metric or terminal."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from confluent_kafka.admin import NewTopic
from hypothesis import example, given
from hypothesis import settings as with_settings
from prometheus_client.parser import text_string_to_metric_families

from blackbox.cli.terminal import as_json
from blackbox.core.intake import Intake
from blackbox.core.plan import Batch, Positions
from blackbox.embedded import EmbeddedRedis, EmbeddedStack
from blackbox.formats import Options, make_format
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.topics import receipts_topic
from blackbox.records.request import Reason, Record, Shard
from blackbox.support.logs import IsoFormatter
from tests.contract.held import NOW_MS
from tests.security.hostile_texts import TEXTS, texts
from tests.service.test_cli import blackbox
from tests.support.world import ServiceProcess, World, read_all, until

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ blackbox[._a-z]*: .+")
LABELS = {"topic", "reason", "shard", "journal", "le", "target"}


@pytest.mark.service
def test_a_request_to_a_topic_of_kafka_or_blackbox_becomes_a_dead_letter(world: World) -> None:
    other = f"{world.name}.other"
    world.create(NewTopic(other, 1))
    topics = f"{world.requests}:countdown,{other}:countdown"
    ours = [world.requests, receipts_topic(world.requests), world.dead_letters, other]
    forbidden = [*ours, receipts_topic(other), "__consumer_offsets", "__transaction_state"]
    world.start_service(request_topics=topics).wait_ready()
    for topic in forbidden:
        world.send_raw(json.dumps({"topic": topic, "message": "smuggled", "countdown": 0}))
    until("all are dead letters", lambda: len(world.received(world.dead_letters)) == len(forbidden))

    letters = world.received(world.dead_letters)
    assert {dict(m.headers() or [])["blackbox-reason"] for m in letters} == {b"forbidden-topic"}
    for topic in (*ours, receipts_topic(other)):
        values = [m.value() for m in read_all(world.kafka.bootstrap_servers, topic)]
        assert b"smuggled" not in values


@pytest.fixture(scope="module")
def own_server(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("keys"))
    server.start()
    yield server
    server.stop()


OWN_KEY = re.compile(
    rb"blackbox:\{TB-0\}:(due|ids|state|receipts|cold|refused|msg:[0-9a-f]{16}|skip:\d+)"
)


@pytest.mark.service
@with_settings(max_examples=60)
@given(caller=texts, id=texts, name=texts, value=texts, topic=texts, key=texts)
# A large invalid request: the index keeps no payload of it, but a bit in `refused`.
@example(caller="a", id="b", name="n", value="v" * 2000, topic="t", key="k")
def test_no_content_of_a_request_becomes_part_of_a_redis_key(
    own_server: EmbeddedRedis, caller: str, id: str, name: str, value: str, topic: str, key: str
) -> None:
    asked = {"message": value, "countdown": 9, "id": id, "headers": {name: value}, "key": key}
    values = [json.dumps(asked | {"topic": target}).encode() for target in ("orders", topic)]
    values += [
        json.dumps({"id": id, "cancel": True}).encode(),
        value.encode(errors="surrogatepass"),
    ]
    headers = [("CALLER_SERVICE", caller.encode(errors="surrogatepass"))]
    records = [Record(n, NOW_MS, None, value, list(headers)) for n, value in enumerate(values)]
    format = make_format("countdown", Options(max_countdown_s=100, own_topics=lambda topic: False))
    connections = pool(own_server.url)
    index = ShardIndex(Shard("TB", 0), connections, grace_s=3600)
    with redis.Redis.from_url(own_server.url) as client:
        client.flushall()
        index.begin(Positions(0, 0))
        for horizon_ms in (None, 1):
            start = index.positions.requests
            moved = [record._replace(offset=start + record.offset) for record in records]
            Intake(format, index, horizon_ms).parse_and_store(
                Batch(start, start + len(moved), moved), NOW_MS
            )
        found: Any = client.keys("*")
        index.close()
        connections.disconnect()
    assert [key for key in found if not OWN_KEY.fullmatch(key)] == []


@given(text=texts)
def test_a_log_message_is_one_printable_line(text: str) -> None:
    formatter = IsoFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    record = logging.LogRecord("blackbox.x", logging.INFO, "", 0, "said %s", (text,), None)
    assert formatter.format(record).isprintable()


@given(text=texts)
def test_an_exception_in_the_log_cannot_imitate_a_log_line(text: str) -> None:
    formatter = IsoFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        raise ValueError(text)
    except ValueError as error:
        failed = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("blackbox.x", logging.ERROR, "", 0, "failed", (), failed)
    first, *rest = formatter.format(record).split("\n")
    assert first.endswith("ERROR blackbox.x: failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


@given(text=texts.filter(lambda text: text.encode(errors="replace").decode() == text))
def test_json_for_machines_is_printable_and_means_the_same(text: str) -> None:
    printed = as_json({"caller": text})
    assert printed.isprintable()
    assert json.loads(printed) == {"caller": text}


@pytest.fixture(scope="module")
def besieged(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, ServiceProcess, set[str]]]:
    """A service that has read all hostile records, and the time series it had before."""
    with World(stack.kafka, stack.redis, tmp_path_factory.mktemp("besieged")) as world:
        service = world.start_service(retries=0).wait_ready()
        world.ask(4, within_s=0)
        assert world.wait_delivered().is_exact
        before = series(service)
        sent = list(hostile_records(world))
        for value, caller in sent:
            world.send_raw(value, [("CALLER_SERVICE", caller.encode(errors="replace"))], 0)
        world.ask(4, within_s=0)
        written = len(read_all(world.kafka.bootstrap_servers, world.requests))
        until("all are read", lambda: position(service) == written)
        assert world.wait_delivered().is_exact
        yield world, service, before


def hostile_records(world: World) -> Iterator[tuple[str, str]]:
    plain: dict[str, object] = {"topic": world.targets[0], "message": "x", "countdown": 3600}
    for text in TEXTS:
        yield json.dumps(plain), text
        for field in ("topic", "id", "key", "message", "countdown", "encoding"):
            yield json.dumps(plain | {field: text}), text
        yield json.dumps(plain | {"headers": {text: text}}), text
        yield json.dumps(plain | {text: 1}), text
        yield json.dumps({"id": text, "cancel": True}), text
        yield text.encode(errors="replace").decode(), text


def position(service: ServiceProcess) -> float:
    """How many requests have been read, of all shards."""
    shown = [sample for sample in samples(service) if sample.labels.get("journal") == "requests"]
    return float(sum(sample.value for sample in shown))


def samples(service: ServiceProcess) -> list[Any]:
    families = text_string_to_metric_families(service.get("/metrics")[1])
    return [sample for family in families for sample in family.samples]


def series(service: ServiceProcess) -> set[str]:
    """Each time series, with its labels."""
    return {f"{sample.name}{sorted(sample.labels.items())}" for sample in samples(service)}


@pytest.mark.service
def test_callers_add_no_time_series(besieged: tuple[World, ServiceProcess, set[str]]) -> None:
    world, service, before = besieged
    words = {reason.value for reason in Reason}
    new = series(service) - before
    assert all("blackbox_dead" in one for one in new), new
    for sample in samples(service):
        assert sample.labels.keys() <= LABELS
        assert sample.labels.get("reason", "empty") in words
        assert sample.labels.get("topic", world.requests) == world.requests
        assert sample.labels.get("target", world.targets[0]) in world.targets


@pytest.mark.service
def test_callers_cannot_forge_log_lines(besieged: tuple[World, ServiceProcess, set[str]]) -> None:
    _, service, _ = besieged
    lines = service.log.read_text().split("\n")[:-1]
    assert [line for line in lines if not LINE.fullmatch(line) or not line.isprintable()] == []


@pytest.mark.proof
@pytest.mark.service
def test_callers_cannot_send_commands_to_a_terminal(
    besieged: tuple[World, ServiceProcess, set[str]],
) -> None:
    world, _, _ = besieged
    end = len(list(hostile_records(world)))
    for offset in range(0, end, 7):
        options = ["--json"] if offset % 2 else []
        answer = blackbox(world.environment(), "show", *options, f"{world.requests}/0@{offset}")
        assert answer.code == 0
        assert answer.out.replace("\n", "").isprintable()
    assert blackbox(world.environment(), "status").out.replace("\n", "").isprintable()
