"""The formats `future` and `timer` on real servers, with a client that knows only the wire format."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from confluent_kafka import Message as KafkaMessage
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from tests.service.test_undeliverable import reasons
from tests.support.world import World, both_engines_at_length, read_all, until

pytestmark = pytest.mark.service

Field = descriptor_pb2.FieldDescriptorProto


def contract(
    package: str, messages: dict[str, dict[str, tuple[int, str]]]
) -> dict[str, type[Message]]:
    """Message classes of a contract that is written here by hand: field -> (number, type)."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            scalar = getattr(Field, f"TYPE_{kind.upper()}", None)
            message.field.add(
                name=field,
                number=number,
                label=Field.LABEL_OPTIONAL,
                type=scalar or Field.TYPE_MESSAGE,
                type_name=None if scalar else f".{package}.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }


THEIRS = contract(
    "theirs",
    {
        "Future": {
            "callBackTopic": (1, "string"),
            "callBackKey": (2, "string"),
            "callBack": (3, "bytes"),
        },
        "Header": {"created_at": (1, "int64"), "source": (2, "string")},
        "Timer": {
            "header": (1, "Header"),
            "action": (2, "int32"),
            "correlation_id": (3, "string"),
            "payload": (4, "bytes"),
            "exchange": (5, "string"),
            "expire_at": (6, "uint64"),
        },
        "OldExpired": {"header": (1, "Header"), "correlation_id": (2, "string")},
        "Request": {"correlation_id": (3, "string"), "type": (4, "string")},
        "Response": {"request": (2, "Request"), "type": (4, "string")},
        "TimerCreate": {"request": (1, "Request"), "expire_at": (6, "uint64")},
        "TimerExpired": {"response": (1, "Response")},
    },
)


def made(name: str, **fields: object) -> bytes:
    message: Message = THEIRS[name](**fields)
    return message.SerializeToString(deterministic=True)


def older(header: Message, **fields: object) -> bytes:
    return made("Timer", header=header, **fields)


def read(name: str, answer: KafkaMessage) -> Any:
    return THEIRS[name].FromString(answer.value() or b"")


@pytest.fixture
def futures(world: World) -> World:
    return of_format(world, "future")


@pytest.fixture
def timers(world: World) -> World:
    return of_format(world, "timer")


def of_format(world: World, name: str) -> World:
    world.format_name = name
    return world


def in_s(seconds: float) -> int:
    """The first unix second that is at least this far away."""
    return int(time.time() + seconds) + 1


def about(message: KafkaMessage) -> dict[str, object]:
    """Its headers, without blackbox's own."""
    headers = dict(message.headers() or [])
    return {name: value for name, value in headers.items() if not name.startswith("blackbox-")}


def came(world: World, topic: str, count: int) -> list[KafkaMessage]:
    return until(
        f"{count} on {topic}",
        lambda: (
            found if len(found := read_all(world.kafka.bootstrap_servers, topic)) >= count else []
        ),
    )


@both_engines_at_length
def test_a_callback_is_delivered_at_its_second_with_any_content(futures: World) -> None:
    futures.start_service().wait_ready()
    target, at_s = futures.targets[0], in_s(2)
    callback = made("Future", callBackTopic=target, callBackKey="o-7", callBack=b"\x00\xff")
    futures.send_raw(callback, [("trace", b"\xfe")], key=b"%d" % at_s)
    futures.send_raw(
        made("Future", callBackTopic=target, callBack=b"past"), key=b"%d" % (at_s - 90)
    )
    futures.send_raw(b"{", key=b"%d" % at_s)
    futures.send_raw(callback, key=b"soon")
    futures.send_raw(made("Future", callBackTopic=futures.requests), key=b"%d" % at_s)
    futures.flush()
    first, second = sorted(came(futures, target, 2), key=lambda one: one.timestamp())
    assert (first.value(), first.key(), about(first)) == (b"past", b"", {})
    assert (second.value(), second.key(), about(second)) == (
        b"\x00\xff",
        b"o-7",
        {"trace": b"\xfe"},
    )
    assert second.timestamp()[1] >= at_s * 1000
    wanted = {"not-protobuf": 1, "bad-due-time": 1, "forbidden-topic": 1}
    until("three dead letters", lambda: reasons(futures) == wanted)


@both_engines_at_length
def test_timers_of_both_contracts_are_answered_and_cancelled(timers: World) -> None:
    at_s = in_s(3)
    header = THEIRS["Header"](created_at=17, source="shop")
    asked = THEIRS["Request"](correlation_id="new", type="any")
    sent = [
        (b"k1", older(header, correlation_id="old", payload=b"p", expire_at=at_s)),
        (b"k1", older(header, correlation_id="moved", expire_at=at_s + 3600)),
        (b"k1", older(header, correlation_id="moved", expire_at=at_s)),
        (b"k1", older(header, correlation_id="dropped", expire_at=at_s)),
        (b"k1", older(header, correlation_id="dropped", action=2)),
        (b"k1", older(header, correlation_id="past", expire_at=1)),
        (b"k2", made("TimerCreate", request=asked, expire_at=at_s)),
        (
            b"k2",
            made("TimerCreate", request=THEIRS["Request"](correlation_id="away"), expire_at=at_s),
        ),
        (b"k2", made("TimerCreate", request=THEIRS["Request"](correlation_id="away"))),
        (b"k2", b"\xff"),
        (b"k2", made("Timer", expire_at=at_s)),
    ]
    for key, value in sent:
        timers.send_raw(value, key=key, partition=key[1] - ord("1"))
    timers.flush()
    timers.start_service().wait_ready()
    answers = came(timers, f"{timers.requests}.expired", 4)
    by_key = Counter(answer.key() for answer in answers)
    assert by_key == {b"k1": 3, b"k2": 1}
    of_old = [read("OldExpired", a) for a in answers if a.key() == b"k1"]
    assert sorted(answer.correlation_id for answer in of_old) == ["moved", "old", "past"]
    assert all(answer.header == header for answer in of_old)
    [of_new] = [read("TimerExpired", a) for a in answers if a.key() == b"k2"]
    assert of_new.response.request == asked
    assert of_new.response.type == "xray.events.TimerExpired"
    until("two dead letters", lambda: reasons(timers) == {"not-protobuf": 1, "bad-id": 1})

    cancel = made("Timer", correlation_id="old", action=2)
    timers.send_raw(cancel, key=b"k1", partition=0)
    after = made("Timer", correlation_id="after", expire_at=1)
    timers.send_raw(after, key=b"k1", partition=0)
    timers.flush()
    assert len(came(timers, f"{timers.requests}.expired", 5)) == 5


def test_timers_are_answered_once_although_their_owner_is_killed(timers: World) -> None:
    at_s = in_s(4)
    for number in range(500):
        timers.send_raw(
            made("Timer", correlation_id=f"t{number}", expire_at=at_s), key=b"k", partition=0
        )
    timers.flush()
    service = timers.start_service().wait_ready()
    until("it delivers", lambda: service.metric("blackbox_delivered_total") > 0)
    service.kill()
    timers.start_service().wait_ready()
    answers = came(timers, f"{timers.requests}.expired", 500)
    named = [read("OldExpired", answer).correlation_id for answer in answers]
    assert named == [f"t{number}" for number in range(500)]
