"""A consumer that fails, schedules its message again, and receives it again."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import cast

import pytest
from confluent_kafka import Consumer, Message, Producer

from blackbox import Exhausted, Retry
from blackbox.records.request import Headers
from tests.support.world import World, until

pytestmark = pytest.mark.service

DELAYS_S = [1, 2, 2]


def read(consumer: Consumer) -> Message:
    def message() -> Message | None:
        found = consumer.poll(0.1)
        assert found is None or found.error() is None
        return found

    return until("a message", message)


def headers_of(message: Message) -> Headers:
    return cast(Headers, message.headers() or [])


def first(message: Message) -> dict[str, bytes | None]:
    return dict(reversed(headers_of(message)))


@pytest.mark.proof
def test_a_message_that_fails_three_times_is_delivered_four_times_unchanged(
    world: World,
) -> None:
    world.format_name = "scheduler"
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(servers)
    consumer = Consumer(servers | {"group.id": f"{world.name}.it", "auto.offset.reset": "earliest"})
    consumer.subscribe([world.targets[0]])
    retry = Retry(
        world.requests, attempts=3, shortest=timedelta(seconds=0.5), longest=timedelta(seconds=2)
    )
    world.start_service(history_topic=f"{world.name}.history").wait_ready()
    headers = [("trace", b"\xff"), ("trace", None)]
    producer.produce(world.targets[0], b"\x00\xff", b"k-7", headers=headers)  # type: ignore[arg-type]
    producer.flush()
    came = [read(consumer)]
    for _ in range(3):
        producer.produce(**retry.schedule(came[-1]))  # type: ignore[arg-type]
        producer.flush()
        came.append(read(consumer))
    with pytest.raises(Exhausted):
        retry.schedule(came[-1])
    consumer.close()

    assert {(one.key(), one.value()) for one in came} == {(b"k-7", b"\x00\xff")}
    assert [[(n, v) for n, v in headers_of(one) if n == "trace"] for one in came] == [headers] * 4
    again = came[1:]
    assert [first(one)["retry-attempt"] for one in again] == [b"1", b"2", b"3"]
    written_s = b"%d" % (came[0].timestamp()[1] // 1000)
    assert {first(one)["retry-original-timestamp"] for one in again} == {written_s}
    source = f"{came[0].topic()}/{came[0].partition()}@{came[0].offset()}".encode()
    assert {first(one)["scheduler-key"] for one in again} == {source}
    assert {len(headers_of(one)) for one in again} == {2 + 5 + 3 + 3}
    for (before, after), delay_s in zip(pairwise(came), DELAYS_S, strict=True):
        due_s, failed_s = int(first(after)["scheduler-epoch"] or b""), before.timestamp()[1] / 1000
        assert failed_s + delay_s <= due_s < failed_s + delay_s + 2
        assert due_s * 1000 <= after.timestamp()[1]
