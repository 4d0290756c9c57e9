from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from confluent_kafka import KafkaError

import blackbox
from blackbox.client import AsyncClient, Client, Later, LookupFailed, MaybeSent, NotSent
from blackbox.client.pending_write import PendingWrite
from blackbox.client.request_value import request_value
from blackbox.client.request_writer import RequestWriter
from blackbox.core.plan import Bounds
from blackbox.formats import Options, make_format
from blackbox.journal.partition_reader import PartitionReader
from blackbox.records.request import Record, Request, Shard, locate, request_id
from tests.servers.mock_cluster import mock_cluster

NOW_MS = 1_767_225_600_000


def parse(value: bytes) -> Request:
    format = make_format(
        "countdown", Options(max_countdown_s=86_400, own_topics=lambda name: False)
    )
    asked = format.parse(Record(0, NOW_MS, None, value, []), NOW_MS)
    assert isinstance(asked, Request), asked
    return asked


def test_a_text_is_delivered_unchanged() -> None:
    assert parse(request_value("orders", '{"a": 1}', countdown_s=1)).message == b'{"a": 1}'


def test_bytes_are_delivered_unchanged() -> None:
    assert parse(request_value("orders", b"\xff\x00", countdown_s=1)).message == b"\xff\x00"


def test_an_object_is_delivered_as_json() -> None:
    assert (
        parse(request_value("orders", {"a": [1, None]}, countdown_s=1)).message == b'{"a":[1,null]}'
    )


def test_none_is_delivered_as_a_tombstone() -> None:
    assert parse(request_value("orders", None, countdown_s=1)).message is None


@dataclass
class Invoice:
    amount: float
    _cached: float = math.nan


@dataclass(slots=True)
class Paid:
    amount: float


class Level(Enum):
    TOP = math.inf


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (math.nan, "message is nan"),
        ({"null": [1, {"price": math.inf}]}, "message.null[1].price is inf"),
        ((None, 1.5, -math.inf), "message[2] is -inf"),
        ({"invoice": Invoice(math.nan)}, "message.invoice.amount is nan"),
        ([Paid(math.inf)], "message[0].amount is inf"),
        ({"level": Level.TOP}, "message.level is inf"),
    ],
)
def test_a_number_that_json_cannot_express_is_refused_with_its_place(
    message: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}, which JSON cannot express"):
        request_value("orders", message, countdown_s=1)


def test_a_countdown_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^countdown is nan, which JSON cannot express"):
        request_value("orders", "hi", countdown_s=math.nan)


@pytest.mark.parametrize(
    "message", [{"a": None, "null": 1.5}, [None, Invoice(2.5)], "null", {"x": {"null": "NaN"}}]
)
def test_messages_with_nulls_are_delivered_as_json(message: Any) -> None:
    wanted = message.encode() if isinstance(message, str) else orjson.dumps(message)
    assert parse(request_value("orders", message, countdown_s=1)).message == wanted


def test_every_option_of_send_is_in_the_request() -> None:
    asked = parse(
        request_value(
            "orders",
            "hi",
            countdown_s=1.5,
            id="r-17",
            key="customer-7",
            headers={"trace": "ä"},
            expires_after_s=60,
        )
    )
    assert asked == Request(
        target="orders",
        message=b"hi",
        due_ms=NOW_MS + 1500,
        key=b"customer-7",
        headers=[("trace", "ä".encode())],
        caller=None,
        caller_id="r-17",
        expires_ms=NOW_MS + 61_500,
    )


@pytest.mark.parametrize(
    "at",
    [
        datetime(2026, 1, 1, 0, 1, 30, tzinfo=UTC),
        datetime(2026, 1, 1, 1, 1, 30, tzinfo=timezone(timedelta(hours=1))),
        "2026-01-01T00:01:30Z",
        NOW_MS + 90_000,
    ],
)
def test_an_instant_is_accepted_in_every_form(at: datetime | str | int) -> None:
    assert parse(request_value("orders", "hi", at=at)).due_ms == NOW_MS + 90_000


def test_a_datetime_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="without a time zone"):
        request_value("orders", "hi", at=datetime(2026, 1, 1))


def test_a_request_without_a_due_time_or_with_two_is_refused() -> None:
    with pytest.raises(ValueError, match="neither countdown_s nor at"):
        request_value("orders", "hi")
    with pytest.raises(ValueError, match="both countdown_s and at"):
        request_value("orders", "hi", countdown_s=1, at=NOW_MS)


def test_a_recurring_request_needs_no_due_time() -> None:
    often = parse(request_value("orders", "hi", id="a", every_s=1.5))
    assert (often.recurs, often.due_ms) == ("every 1500", NOW_MS + 1500)
    daily = parse(request_value("orders", "hi", id="a", cron="0 8 * * *", timezone="Asia/Tokyo"))
    assert daily.recurs == "cron Asia/Tokyo 0 8 * * *"


MOCK = {"test.mock.num.brokers": "1", "allow.auto.create.topics": "true"}
SOON = timedelta(seconds=1)


@pytest.fixture
def writer() -> Iterator[RequestWriter]:
    with RequestWriter("in-process", caller="billing", kafka_settings=MOCK) as writer:
        yield writer


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("in-process", caller="billing", kafka_settings=MOCK) as client:
        yield client


def test_the_id_contains_the_source_of_the_request(client: Client) -> None:
    first, second = (client.send_later(None, n, "orders", SOON, id="r-17") for n in (1, 2))
    (shard, offset), other = locate(first, ["TB"]), locate(second, ["TB"])
    assert other == (shard, offset + 1)


def test_a_cancel_by_caller_id_goes_to_the_partition_of_its_request(client: Client) -> None:
    asked = client.send_later(None, "hi", "orders", SOON, id="r-17")
    assert locate(client.cancel("r-17"), ["TB"])[0] == locate(asked, ["TB"])[0]


def test_a_cancel_by_the_returned_id_goes_to_the_partition_of_its_request(client: Client) -> None:
    ids = client.send_many((None, n, "orders", SOON) for n in range(20))
    for one in ids:
        assert locate(client.cancel(one), ["TB"])[0] == locate(one, ["TB"])[0]


def test_send_many_returns_the_ids_in_order(client: Client) -> None:
    ids = client.send_many((None, n, "orders", SOON, "r-17") for n in range(1000))
    places = [locate(one, ["TB"]) for one in ids]
    assert len(ids) == 1000
    assert places == sorted(places)


def interrupted(good: Later) -> Iterator[Later]:
    yield good
    raise OSError("the file ended early")


GOOD = Later(None, "hi", "orders", SOON, id="r-17")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([GOOD, GOOD._replace(when=datetime(2026, 1, 1))], ValueError),
        ([GOOD, GOOD._replace(value=object())], TypeError),
        ([GOOD, (None, "hi", "orders", SOON, 17)], TypeError),
        ([GOOD, (1,)], TypeError),
        (interrupted, OSError),
    ],
)
def test_send_many_writes_nothing_if_one_of_the_messages_is_invalid(
    kind: type[Client] | type[AsyncClient],
    messages: list[Later | tuple[Any, ...]] | Callable[[Later], Iterator[Later]],
    error: type[Exception],
) -> None:
    client, written = kind("in-process", kafka_settings=MOCK), list[bytes | None]()

    class Recorder(RequestWriter):
        def write(self, value: bytes | None, **more: Any) -> PendingWrite:
            written.append(value)
            return super().write(value, **more)

    client._writer = Recorder("in-process", kafka_settings=MOCK)

    async def talk() -> None:
        asked = client.send_many(messages if isinstance(messages, list) else messages(GOOD))
        if not isinstance(asked, list):
            await asked

    with pytest.raises(error):
        asyncio.run(talk())
    assert written == []


def test_send_many_accepts_an_empty_list(client: Client) -> None:
    assert client.send_many([]) == []


def test_the_format_parses_exactly_what_the_client_writes() -> None:
    when = datetime(2026, 1, 1, 0, 1, 30, tzinfo=UTC)
    sent: list[bytes] = []

    class Recorder(RequestWriter):
        def write(self, value: bytes | None, **more: Any) -> PendingWrite:
            sent.append(value or b"")
            return super().write(value, **more)

    client = Client("in-process", kafka_settings=MOCK)
    client._writer = Recorder("in-process", kafka_settings=MOCK)
    client.send_later(b"\xff\x00", b"\x00\xff", "orders", when)
    client.send_later("k", {"a": 1}, "orders", timedelta(milliseconds=1500), id="r-17",
                      headers={"trace": "x"}, expires_after=timedelta(minutes=1))  # fmt: skip
    bytes_in, named = map(parse, sent)
    assert (bytes_in.key, bytes_in.message) == (b"\xff\x00", b"\x00\xff")
    assert bytes_in.due_ms == NOW_MS + 90_000
    assert named == Request(
        target="orders",
        message=b'{"a":1}',
        due_ms=NOW_MS + 1500,
        key=b"k",
        headers=[("trace", b"x")],
        caller=None,
        caller_id="r-17",
        expires_ms=NOW_MS + 61_500,
    )


def test_the_async_client_returns_ids_in_order() -> None:
    async def talk() -> tuple[list[str], str]:
        async with AsyncClient("in-process", caller="billing", kafka_settings=MOCK) as client:
            ids = await asyncio.gather(
                *(client.send_later(None, n, "orders", SOON, id="r-17") for n in range(200))
            )
            ids += await client.send_many([(None, 1, "orders", SOON, "r-17")] * 10)
            return ids, await client.cancel("r-17")

    ids, cancelled = asyncio.run(talk())
    shard, last = locate(cancelled, ["TB"])
    assert [locate(one, ["TB"]) for one in ids] == [(shard, last - n) for n in range(210, 0, -1)]


def test_a_flush_settles_every_pending_write(writer: RequestWriter) -> None:
    asked = [writer.write(request_value("orders", n, countdown_s=1)) for n in range(100)]
    writer.flush()
    assert all(one.is_settled for one in asked)
    assert len({one.id for one in asked}) == 100


AWAY = {"message.timeout.ms": "200", "log_level": "0"}


UNACKNOWLEDGED = (
    r"Kafka has not acknowledged the request to TB: .*timed out; it may have been written"
)
UNACKNOWLEDGED_ONE = "Kafka has not acknowledged 1 of the requests, which may have been written"

Report = KafkaError | None


def reporting(monkeypatch: pytest.MonkeyPatch, *errors: Report) -> None:
    """Have the producer report these outcomes of the next records, without an offset."""
    left = list(errors)

    def report(
        _: Any, topic: str, value: Any, key: Any, partition: int, settle: Any, *more: Any
    ) -> None:
        place = SimpleNamespace(topic=lambda: topic, partition=lambda: 0, offset=lambda: None)
        settle(left.pop(0), place)

    monkeypatch.setattr("blackbox.client.request_writer.produce", report)


def test_a_request_that_kafka_does_not_acknowledge_may_have_been_written() -> None:
    writer = RequestWriter("127.0.0.1:1", kafka_settings=AWAY)
    asked = writer.write(request_value("orders", "hi", countdown_s=1))
    with pytest.raises(MaybeSent, match=UNACKNOWLEDGED):
        _ = asked.id
    with pytest.raises(MaybeSent, match=UNACKNOWLEDGED_ONE):
        writer.flush()


@pytest.mark.parametrize(
    "error",
    [
        KafkaError(KafkaError._MSG_TIMED_OUT),
        KafkaError(KafkaError._TIMED_OUT),
        KafkaError(KafkaError._PURGE_INFLIGHT),
        KafkaError(KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
        None,
    ],
)
def test_a_request_whose_answer_was_lost_may_have_been_written(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: Report
) -> None:
    reporting(monkeypatch, error)
    with pytest.raises(MaybeSent, match="it may have been written"):
        client.send_later(None, "hi", "orders", SOON)


def test_a_request_that_is_written_but_not_acknowledged_in_time_may_have_been_written() -> None:
    with mock_cluster() as cluster:
        client = Client(cluster.bootstrap_servers, kafka_settings={"message.timeout.ms": "2000"})
        first = client.send_later(None, "hi", "orders", SOON)
        cluster.answer_after(6_000)
        with pytest.raises(MaybeSent, match="it may have been written"):
            client.send_later(None, "hi", "orders", SOON)
        cluster.answer_after(0)
        with Client(cluster.bootstrap_servers) as another:
            third = another.send_later(None, "hi", "orders", SOON)
        assert [locate(id, ["TB"])[1] for id in (first, third)] == [0, 2]


def test_a_request_that_kafka_rejects_was_not_written(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporting(monkeypatch, KafkaError(KafkaError.INVALID_RECORD))
    with pytest.raises(NotSent, match="Kafka rejected 1 of the requests") as raised:
        client.send_later(None, "hi", "orders", SOON)
    assert not isinstance(raised.value, MaybeSent)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_if_one_of_many_requests_may_have_been_written_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, kind: type[Client] | type[AsyncClient]
) -> None:
    reporting(monkeypatch, *map(KafkaError, (KafkaError.INVALID_RECORD, KafkaError._MSG_TIMED_OUT)))

    async def talk() -> None:
        asked = kind("in-process", kafka_settings=MOCK).send_many(
            [(None, "hi", "orders", SOON)] * 2
        )
        if not isinstance(asked, list):
            await asked

    with pytest.raises(MaybeSent, match=f"{UNACKNOWLEDGED_ONE}.* rejected 1 of the requests"):
        asyncio.run(talk())


def test_an_earlier_rejected_request_does_not_fail_a_later_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        reporting(patched, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        refused = client._writer.write(request_value("orders", "hi", countdown_s=1))
    with pytest.raises(NotSent, match="Kafka rejected the request"):
        _ = refused.id
    assert client.send_later(None, "hi", "orders", SOON)
    with pytest.raises(NotSent, match="Kafka rejected 1 of the requests"):
        client._writer.flush()
    client._writer.flush()


def test_a_client_whose_request_was_not_acknowledged_raises_when_it_closes() -> None:
    client = Client("127.0.0.1:1", kafka_settings=AWAY)
    with client, pytest.raises(MaybeSent, match=UNACKNOWLEDGED_ONE):
        client.send_later(None, "hi", "orders", SOON)


def test_the_async_client_raises_an_error_for_a_request_that_is_not_acknowledged() -> None:
    async def talk() -> None:
        async with AsyncClient("127.0.0.1:1", kafka_settings=AWAY) as client:
            await client.send_later(None, "hi", "orders", SOON)

    with pytest.raises(MaybeSent, match=UNACKNOWLEDGED):
        asyncio.run(talk())


def test_the_async_client_closes_without_stopping_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed_by: list[threading.Thread] = []
    monkeypatch.setattr(
        "blackbox.client.request_writer.RequestWriter.close",
        lambda writer: closed_by.append(threading.current_thread()),
    )

    async def talk() -> None:
        async with AsyncClient("127.0.0.1:1", kafka_settings=AWAY):
            pass

    asyncio.run(talk())
    assert len(closed_by) == 1
    assert closed_by[0] is not threading.main_thread()


def test_a_lookup_without_kafka_names_the_bootstrap_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blackbox.journal.topics.REQUEST_TIMEOUT_S", 0.1)
    id = request_id(Shard("TB", 0), 0)
    client, told = Client("127.0.0.1:1", kafka_settings=AWAY), r"is running at 127\.0\.0\.1:1"
    with client, pytest.raises(LookupFailed, match=told):
        client.get(id)


def test_a_lookup_of_a_request_that_a_transaction_hides_ends_in_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def clock() -> float:
        return now_s

    monkeypatch.setattr(
        "blackbox.journal.partition_reader.time", SimpleNamespace(monotonic=clock, sleep=sleep)
    )
    monkeypatch.setattr(PartitionReader, "bounds", lambda *_: Bounds(0, 5))
    monkeypatch.setattr(PartitionReader, "log_end", lambda *_: 10)
    client._reader._partitions = {"TB": 1, "TB.receipts": 1}
    id = request_id(Shard("TB", 0), 7)
    for look_up in (client.get, partial(client.reschedule, when=SOON)):
        now_s = 0.0
        with pytest.raises(
            LookupFailed, match=r"TB/0: an open transaction .* hides offset 7 .*timeout_s"
        ):
            look_up(id, timeout_s=3)
        assert 2.5 < now_s < 3.5


def test_cancelled_lookups_leave_the_threads_of_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, ended = threading.Event(), list[int]()

    def get(id: str, timeout_s: float) -> None:
        may_end.wait(timeout_s)
        ended.append(1)

    async def talk() -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with AsyncClient("in-process", kafka_settings=MOCK) as client:
            monkeypatch.setattr(client, "_reader", SimpleNamespace(get=get, close=lambda: None))
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.get("id", timeout_s=10), 0.05)
            try:
                free = await asyncio.wait_for(asyncio.to_thread(int, 1), 5)
            finally:
                may_end.set()
            return free

    assert asyncio.run(talk()) == 1
    assert ended == [1], "those that waited for the first one were never begun"


def test_an_id_of_another_topic_is_refused_with_what_is_expected(client: Client) -> None:
    for id in ("order-17", "018f3a52-0000-7000-8000-000000000000", request_id(Shard("B", 0), 0)):
        with pytest.raises(ValueError, match=r"give the id that send_later returned.* over HTTP"):
            client.get(id)


def test_a_request_that_is_too_large_is_refused_at_once(client: Client) -> None:
    with pytest.raises(NotSent, match="the client rejected the request"):
        client.send_later(None, "x" * 2_000_000, "orders", SOON)


def test_the_package_exports_the_clients() -> None:
    assert blackbox.Client is Client
    assert blackbox.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = blackbox.Clint
